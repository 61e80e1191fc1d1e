"""The bundled strategies: algorithms over an attention kernel, a communicator and a layout. Needs torch only."""

if __name__ != "ringprof.strategies":
    # In a checkout `import strategies` would make a second copy of every class.
    raise ImportError("import ringprof.strategies: the folder strategies/ is part of the package ringprof")

import warnings
from typing import Any

from ringprof.strategies.algorithms.dynamic import Dynamic
from ringprof.strategies.errors import PeerLost, UnknownName, Unsupported, WrongGradient
from ringprof.strategies.registry import Parameter, Spec, create, find, for_inference, names, parameters, peer_names

__all__ = [
    "Dynamic",
    "Parameter",
    "PeerLost",
    "Spec",
    "UnknownName",
    "Unsupported",
    "WrongGradient",
    "create",
    "find",
    "for_inference",
    "names",
    "parameters",
    "peer_names",
]


def __getattr__(name: str) -> Any:
    if name == "Unfit":
        warnings.warn("ringprof.strategies.Unfit is now called Unsupported", DeprecationWarning, stacklevel=2)
        return Unsupported
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
