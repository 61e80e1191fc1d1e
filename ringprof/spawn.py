"""Starts a process of ringprof's that imports nothing from the current folder: ``python THIS PATHS WHAT ARGUMENTS``.

With ``python -m`` or ``-c`` the current folder comes first on the import path, and a stranger's folder may hold a
``numpy.py``. (``python -P`` would do, from 3.11 on.) A script has its own folder there, which is taken off before
anything is imported. PATHS are the starting process's import paths as JSON (`ringprof.process_pool.isolated`).
"""

import sys

PACKAGE = __file__.rpartition("/")[0]
sys.path[:] = [path for path in sys.path if path != PACKAGE]

import json  # noqa: E402
import signal  # noqa: E402
from importlib.util import module_from_spec, spec_from_file_location  # noqa: E402


def start(paths: str, what: str, *arguments: str) -> None:
    """Be a rank of a recording (``record``) or of a check (``check``), or a ``helper`` that carries out functions."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Ends the process without a traceback: it is for the starting process to say what became of it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # It was blocked while Python started (`ringprof.process_pool.interrupts_blocked`).
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    given = json.loads(paths)
    sys.path[:] = [*given, *(path for path in sys.path if path not in given)]
    # This very package: it may lie in a folder that is on no path.
    spec = spec_from_file_location("ringprof", f"{PACKAGE}/__init__.py", submodule_search_locations=[PACKAGE])
    assert spec is not None and spec.loader is not None
    sys.modules["ringprof"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["ringprof"])
    if what in ("record", "check"):
        from ringprof.rank_main import main as be_rank

        be_rank(what, list(arguments))
    from ringprof.process_pool import main as be_helper

    be_helper(list(arguments))


if __name__ == "__main__":
    start(*sys.argv[1:])
