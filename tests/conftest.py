"""Settings of all tests."""

import signal

from hypothesis import HealthCheck, settings

# A busy machine makes no example wrong.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# A shell has what runs in its background ignore Ctrl-C, and what tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_make_parametrize_id(val: object) -> str | None:
    """Bytes are named by their number: gzip writes the time into them, and workers must agree on names."""
    return f"{len(val)} bytes" if isinstance(val, bytes) else None
