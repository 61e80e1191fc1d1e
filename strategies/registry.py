"""Registry of the strategies: their names, and how to create one from its name."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .base import Context
from .catalog import CACHED, PEERS, RECURRENT, SPECS, canonical_name, canonical_parameters, find
from .errors import UnknownName, Unsupported, nearest_name
from .transport.communicator import Communicator


@dataclass(frozen=True)
class Parameter:
    """One parameter of a strategy: its type as users write it, its default, and one line of help."""

    name: str
    kind: str
    """Type: ``bool``, ``int``, ``float``, ``str``, or the choices joined by ``|``."""
    default: Any
    required: bool
    help: str


def names() -> list[str]:
    """Return the names of the bundled training strategies."""
    return list(SPECS)


def for_inference() -> list[str]:
    """Return the names of the bundled strategies for inference over a KV cache."""
    return list(CACHED)


def for_recurrences() -> list[str]:
    """Return the names of the bundled strategies for linear recurrences."""
    return list(RECURRENT)


def peer_names() -> list[str]:
    """Return the names of the strategies of other projects, installed or not."""
    return list(PEERS)


def parameters(strategy: Any) -> list[Parameter]:
    """Return the keyword parameters of a strategy class.

    Raises `Unsupported` for ``*args`` and ``**kwargs``, which hide the parameters.
    """
    hints = typing.get_type_hints(strategy.__init__)
    described: dict[str, str] = getattr(strategy, "PARAMETERS", {})
    result = []
    for name, parameter in inspect.signature(strategy).parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            raise Unsupported(f"{strategy.__name__}: parameters must be named: no *args or **kwargs")
        if parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        required = parameter.default is parameter.empty
        default = None if required else parameter.default
        result.append(Parameter(name, _kind(hints.get(name, str)), default, required, described.get(name, "")))
    return result


def _kind(hint: Any) -> str:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return "|".join(_kind(part) for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is typing.Literal:
        return "|".join(str(choice) for choice in typing.get_args(hint))
    return getattr(hint, "__name__", str(hint))


def check_parameters(strategy: Any, name: str, params: dict[str, Any]) -> None:
    """Check that the strategy has all parameters in ``params``, and that none it requires is missing.

    Raises `Unsupported` where not, and names the parameters that the strategy has.
    """
    known = parameters(strategy)
    for key in params:
        _find_parameter(known, name, key)
    for parameter in known:
        choices, value = parameter.kind.split("|"), params.get(parameter.name)
        if len(choices) > 1 and isinstance(value, str) and value not in choices:
            raise Unsupported(f"parameter {parameter.name}: {value!r} is not {parameter.kind}")
    missing = [parameter.name for parameter in known if parameter.required and parameter.name not in params]
    if missing:
        raise Unsupported(f"strategy {name!r} needs the parameter {missing[0]!r}")


def _find_parameter(known: Sequence[Parameter], name: str, key: str) -> Parameter:
    """Return the parameter called ``key``. Raises `Unsupported` where the strategy ``name`` has none."""
    for parameter in known:
        if parameter.name == key:
            return parameter
    valid = ", ".join(parameter.name for parameter in known) or "none"
    hint = nearest_name(key, (parameter.name for parameter in known))
    raise Unsupported(f"strategy {name!r} has no parameter {key!r}{hint}; it has: {valid}")


def parse_parameter(strategy: Any, name: str, key: str, text: str) -> Any:
    """Parse the value of ``key=text`` into the parameter's type. Raises `Unsupported` for an invalid value."""
    kind = _find_parameter(parameters(strategy), name, key).kind
    text = canonical_parameters({key: text})[key]
    try:
        if kind == "bool":
            truth = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
            return truth[text.lower()]
        if kind in ("int", "float"):
            return int(text) if kind == "int" else float(text)
        if "|" in kind and text not in kind.split("|"):
            raise ValueError(text)
    except (KeyError, ValueError):
        raise Unsupported(f"parameter {key}: {text!r} is not {kind}") from None
    return text


def create(
    name: str,
    group: Any = None,
    kernel: str = "auto",
    ranks_per_host: int | None = None,
    hops: str = "auto",
    hosts: Sequence[int] | None = None,
    **params: Any,
) -> Any:
    """Create a strategy over the ranks of ``group``: a process group or a one-dimensional DeviceMesh (None: the world).

    ``name`` may be Transformer Engine's (``p2p``, ``a2a``, ``all_gather``, ``a2a+p2p``; see `catalog.ALIASES`).

    Collective: all ranks of the group call it with the same arguments. Without torch.distributed there is one rank.

    ``kernel`` is a kernel's name or ``auto``. ``ranks_per_host`` overrides what the launcher says. ``hops`` is the
    transport of hops within a host (see `communicator.HOPS`). ``hosts`` numbers every global rank's host. ``params``
    are the strategy's own parameters. Raises `UnknownName` and `Unsupported`.
    """
    name, params = canonical_name(name), canonical_parameters(params)
    strategy, problem = None, None
    try:
        if name in RECURRENT:
            raise UnknownName(f"strategy {name!r} is for recurrences: create_recurrent({name!r})")
        strategy = find(name).load()
        check_parameters(strategy, name, params)
    except (Unsupported, UnknownName) as error:
        problem = error.with_traceback(None)  # which would hold this frame
    # Equal on all ranks that were called with the same arguments.
    listed = ", ".join(f"{key}={params[key]!r}" for key in sorted(params))
    comm = Communicator(
        group, ranks_per_host=ranks_per_host, hops=hops, hosts=hosts,
        request=f"{name}({listed}) with kernel {kernel}", problem=problem,
    )  # fmt: skip
    assert strategy is not None, "a communicator is refused where there is a problem"
    if comm.is_world:
        create_again = partial(create, name, None, kernel, ranks_per_host, hops, hosts, **params)
        comm.recipe = create_again, ()
    return strategy(Context(comm, kernel), **params)
