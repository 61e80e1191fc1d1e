"""Report in one line what is missing, before anything is installed. The syntax is old so that any Python runs it."""

import sys

NEEDED = (3, 11)

if sys.version_info[:2] < NEEDED:
    sys.exit(
        "ringprof needs Python %d.%d or newer; this is %d.%d. Try: make PYTHON=python3.12 ..."
        % (NEEDED + tuple(sys.version_info[:2]))
    )
try:
    import ensurepip  # noqa: F401
    import venv  # noqa: F401
except ImportError:
    sys.exit("this Python has no venv module. On Debian and Ubuntu: apt install python3-venv")
