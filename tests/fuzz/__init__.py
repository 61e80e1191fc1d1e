"""Coverage-guided fuzzing of all readers of untrusted files.

    python -m tests.fuzz trace --minutes 10      # needs atheris; findings are written to tests/fuzz/found/

A target takes any bytes. It must return or raise a `ringprof.errors.RingprofError`, quickly and with little memory.
"""
