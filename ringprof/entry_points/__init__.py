"""Programs of the processes that ringprof starts: ranks of recordings and checks, and worker processes."""
