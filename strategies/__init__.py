"""The bundled strategies: algorithms over an attention kernel, a communicator and a layout. Needs torch only."""

if __name__ != "ringprof.strategies":
    # In a checkout `import strategies` would make a second copy of every class.
    raise ImportError("import ringprof.strategies: the folder strategies/ is part of the package ringprof")

from .dynamic import Dynamic
from .errors import PeerLost, Unfit, UnknownName, WrongGradient
from .registry import Parameter, Spec, create, find, for_inference, names, parameters, peers

__all__ = [
    "Dynamic",
    "Parameter",
    "PeerLost",
    "Spec",
    "Unfit",
    "UnknownName",
    "WrongGradient",
    "create",
    "find",
    "for_inference",
    "names",
    "parameters",
    "peers",
]
