"""The bundled strategies: algorithms over an attention kernel, a communicator and a layout. Needs torch only.

The public names below are loaded when they are first used, so that the names of the strategies are known without torch.
"""

from __future__ import annotations

if __name__ != "ringprof.strategies":
    # In a checkout `import strategies` would make a second copy of every class.
    raise ImportError("import ringprof.strategies: the folder strategies/ is part of the package ringprof")

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .algorithms.dynamic import Dynamic
    from .algorithms.redistribute import redistribute_cache
    from .catalog import Spec, find
    from .errors import PeerLost, UnknownName, Unsupported, WrongGradient
    from .recurrent.registry import create_recurrent
    from .registry import Parameter, create, for_inference, for_recurrences, names, parameters, peer_names

_MODULES = {
    "Dynamic": "algorithms.dynamic",
    "Parameter": "registry",
    "PeerLost": "errors",
    "RankRaised": "errors",
    "Spec": "catalog",
    "UnknownName": "errors",
    "Unsupported": "errors",
    "WrongGradient": "errors",
    "create": "registry",
    "create_recurrent": "recurrent.registry",
    "find": "catalog",
    "for_inference": "registry",
    "for_recurrences": "registry",
    "names": "registry",
    "parameters": "registry",
    "peer_names": "registry",
    "redistribute_cache": "algorithms.redistribute",
}
"""Module of each public name, below this package."""

__all__ = [
    "Dynamic",
    "Parameter",
    "PeerLost",
    "RankRaised",
    "Spec",
    "UnknownName",
    "Unsupported",
    "WrongGradient",
    "create",
    "create_recurrent",
    "find",
    "for_inference",
    "for_recurrences",
    "names",
    "parameters",
    "peer_names",
    "redistribute_cache",
]


def __getattr__(name: str) -> Any:
    if name == "Unfit":
        warnings.warn("ringprof.strategies.Unfit is now called Unsupported", DeprecationWarning, stacklevel=2)
        name = "Unsupported"
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
