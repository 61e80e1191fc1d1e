"""Settings of all tests."""

from hypothesis import HealthCheck, settings

# A busy machine makes no example wrong.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
