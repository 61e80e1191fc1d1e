"""``python -m ringprof``: the command line, for torchrun and for hosts where the script is not on PATH."""

import os
import sys
from contextlib import suppress

with suppress(FileNotFoundError):  # the current folder has been removed
    if not sys.flags.isolated and sys.path[:1] == [os.getcwd()]:
        # Python puts the current folder first, and its content may be untrusted. ringprof itself is already located.
        del sys.path[0]

from ringprof.cli import main

if __name__ == "__main__":
    main()
