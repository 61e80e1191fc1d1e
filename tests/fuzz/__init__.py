"""Coverage-guided fuzzing of everything that reads a stranger's file.

    python -m tests.fuzz trace --minutes 10      # needs atheris; findings lie in tests/fuzz/found/

A target takes any bytes and must end in a result or in a `ringprof.errors.RingprofError`, soon and in little memory.
"""
