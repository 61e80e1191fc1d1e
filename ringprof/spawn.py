"""Script that runs a ringprof process without imports from the current folder: ``python -P spawn.py PATHS WHAT ...``.

An untrusted current folder may hold a ``numpy.py``. PATHS are the import paths of the parent process as JSON
(`ringprof.common.process_pool.spawn_command`).
"""

import json
import signal
import sys
from importlib.util import module_from_spec, spec_from_file_location

PACKAGE = __file__.rpartition("/")[0]


def start(paths: str, what: str, *arguments: str) -> None:
    """Run a rank of a recording (``record``) or a check (``check``), or a worker that calls functions (``helper``)."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # SIGINT ends the process without a traceback: the parent process reports it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # The parent process blocked it until this line (`ringprof.common.process_pool.interrupts_blocked`).
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    parent_paths = json.loads(paths)
    sys.path[:] = [*parent_paths, *(path for path in sys.path if path not in parent_paths)]
    # Load this copy of the package, whose folder may not be on the import path.
    spec = spec_from_file_location("ringprof", f"{PACKAGE}/__init__.py", submodule_search_locations=[PACKAGE])
    assert spec is not None and spec.loader is not None
    sys.modules["ringprof"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["ringprof"])
    if what in ("record", "check"):
        from ringprof.recording.rank_main import main as run_rank

        run_rank(what, list(arguments))
    from ringprof.common.process_pool import main as run_worker

    run_worker(list(arguments))


if __name__ == "__main__":
    start(*sys.argv[1:])
