"""``python -m ringprof``: the same command line, for torchrun and for hosts without the script on PATH."""

import os
import sys
from contextlib import suppress

with suppress(FileNotFoundError):  # the current folder has been removed
    if not sys.flags.isolated and sys.path[:1] == [os.getcwd()]:
        # Python puts the current folder first, which may be a stranger's. ringprof itself has been found by now.
        del sys.path[0]

from ringprof.cli import main

if __name__ == "__main__":
    main()
