"""``python -m ringprof``: the same command line, for torchrun and for hosts without the script on PATH."""

from ringprof.cli import main

if __name__ == "__main__":
    main()
