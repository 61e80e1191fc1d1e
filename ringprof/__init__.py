"""ringprof: record ring attention (context parallelism) and see where its time goes.

Importing this module loads neither torch nor pandas nor matplotlib: the public names below load what they
need when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ringprof._version import __version__

if TYPE_CHECKING:
    from ringprof.api import Analysis, capture, compare, load
    from ringprof.benchmark_logs.logs import logs

_API = "ringprof.api"
_HOME = {"Analysis": _API, "compare": _API, "load": _API, "capture": _API, "logs": "ringprof.benchmark_logs.logs"}

__all__ = ["Analysis", "__version__", "capture", "compare", "load", "logs"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'ringprof' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
