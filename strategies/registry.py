"""Registry of the strategies: their names, and how to create one from its name."""

from __future__ import annotations

import difflib
import inspect
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ringprof.strategies.errors import UnknownName, Unsupported
from ringprof.strategies.transport.communicator import Communicator


@dataclass(frozen=True)
class Spec:
    """A registered strategy: its name, the location of its class, a one-line summary, and its source."""

    name: str
    target: str
    """Location of the class, ``package.module:Class``; imported on first use."""
    summary: str
    reference: str
    """Paper or project that it follows."""
    packages: tuple[str, ...] = ()
    """Third-party packages that it needs."""
    install: str = ""
    """Command that installs these packages."""

    def missing(self) -> str | None:
        """Return which required packages are not installed, and how to install them; None where none is missing."""
        lacking = [package for package in self.packages if find_spec(package) is None]
        return f"needs {' and '.join(lacking)}: {self.install}" if lacking else None

    def load(self) -> Any:
        """Import the class. Raises `UnknownName` where the module, the class or a required package is missing."""
        module, _, attribute = self.target.partition(":")
        lacking = self.missing()
        if lacking:
            raise UnknownName(f"strategy {self.name!r} {lacking}")
        try:
            return getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UnknownName(f"strategy {self.target!r} cannot be imported: {error}") from None


@dataclass(frozen=True)
class Parameter:
    """One parameter of a strategy: its type as users write it, its default, and one line of help."""

    name: str
    kind: str
    """Type: ``bool``, ``int``, ``float``, ``str``, or the choices joined by ``|``."""
    default: Any
    required: bool
    help: str


def _spec(name: str, attribute: str, summary: str, reference: str) -> Spec:
    return Spec(name, f"{__package__}.algorithms.{name.replace('-', '_')}:{attribute}", summary, reference)


SPECS = {
    spec.name: spec
    for spec in (
        _spec("ring", "Ring", "K and V travel; contiguous layout, so causal ranks wait", "arXiv 2310.01889"),
        _spec(
            "zigzag",
            "Zigzag",
            "the ring with two chunks per rank: balanced causal work",
            "ring-flash-attention",
        ),
        _spec("stripe", "Stripe", "the ring with token i on rank i mod N: balanced, all masked", "arXiv 2311.09431"),
        _spec("ulysses", "Ulysses", "all-to-all from sequence to heads and back", "arXiv 2309.14509"),
        _spec("usp", "USP", "Ulysses inside groups, a ring across them", "arXiv 2405.07719"),
        _spec("double-ring", "LoongDoubleRing", "inner rings in an outer ring; dK and dV travel", "arXiv 2406.18485"),
        _spec("burst", "Burst", "(double) ring forward; Q and dQ travel backward", "arXiv 2509.19836"),
        _spec("megatron", "Megatron", "packed hops, two compute streams, diagonal last", "TransformerEngine, p2p"),
        _spec("allgather", "AllGather", "all-gather of K and V, reduce-scatter of dK and dV", "arXiv 2407.21783"),
    )
}

CACHED = {
    spec.name: spec
    for spec in (
        _spec("dcp", "DecodeContextParallel", "decode: a cache over ranks, merged by LSE", "vLLM; arXiv 2507.07120"),
        _spec("ring-prefill", "RingPrefill", "prefill over a cache: K and V travel, or Q", "arXiv 2411.01783"),
    )
}
"""Strategies for inference over a KV cache, which have no backward pass."""

_RING_FLASH_ATTN = ("ring_flash_attn", "flash_attn"), "pip install ring-flash-attn flash-attn"
_YUNCHANG = ("yunchang", "flash_attn"), "pip install yunchang flash-attn"
_TRANSFORMER_ENGINE = ("transformer_engine",), "pip install --no-build-isolation 'transformer_engine[pytorch]'"
_MAGI = ("magi_attention",), "build it from https://github.com/SandAI-org/MagiAttention"


def _peer(name: str, attribute: str, summary: str, source: tuple[tuple[str, ...], str] = ((), "")) -> Spec:
    module = name.partition("/")[0].replace("-", "_")
    return Spec(name, f"{__package__}.peers.{module}:{attribute}", summary, "", *source)


PEERS = {
    spec.name: spec
    for spec in (
        _peer("torch-cp", "TorchContextParallel", "the ring of torch's context_parallel"),
        _peer("ring-flash-attn/ring", "RingFlashAttnRing", "K and V travel", _RING_FLASH_ATTN),
        _peer("ring-flash-attn/zigzag", "RingFlashAttnZigzag", "the ring, balanced", _RING_FLASH_ATTN),
        _peer("ring-flash-attn/stripe", "RingFlashAttnStripe", "the ring, token i on rank i mod N", _RING_FLASH_ATTN),
        _peer("ring-flash-attn/llama3", "RingFlashAttnLlama3", "all-gather, some heads at a time", _RING_FLASH_ATTN),
        _peer("yunchang/ulysses", "YunchangUlysses", "all-to-all from sequence to heads and back", _YUNCHANG),
        _peer("yunchang/usp", "YunchangUSP", "Ulysses inside groups, a zigzag ring across them", _YUNCHANG),
        _peer("transformer-engine/p2p", "TransformerEngineP2P", "cp_comm_type p2p", _TRANSFORMER_ENGINE),
        _peer("transformer-engine/a2a", "TransformerEngineA2A", "cp_comm_type a2a", _TRANSFORMER_ENGINE),
        _peer(
            "transformer-engine/all_gather",
            "TransformerEngineAllGather",
            "cp_comm_type all_gather",
            _TRANSFORMER_ENGINE,
        ),
        _peer("magi", "Magi", "MagiAttention, with its own dispatch of tokens", _MAGI),
    )
}
"""Strategies of other projects (peers), available where their packages are installed."""


def names() -> list[str]:
    """Return the names of the bundled training strategies."""
    return list(SPECS)


def for_inference() -> list[str]:
    """Return the names of the bundled strategies for inference over a KV cache."""
    return list(CACHED)


def peer_names() -> list[str]:
    """Return the names of the strategies of other projects, installed or not."""
    return list(PEERS)


def names_with_masks() -> list[str]:
    """Return the names of the bundled strategies that support packed documents and sliding windows."""
    return [name for name, spec in SPECS.items() if spec.load().takes_masks]


def find(name: str) -> Spec:
    """Return the spec of a bundled strategy, of a peer, or of ``package.module:Class``. Raises `UnknownName`."""
    known = {**SPECS, **CACHED, **PEERS}
    if name in known:
        return known[name]
    if ":" in name:
        return Spec(name, name, "given by its import path", "")
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise UnknownName(f"no strategy {name!r}{hint}; there are: {', '.join(known)}, or package.module:Class")


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
    raise Unsupported(f"strategy {name!r} has no parameter {key!r}; it has: {valid}")


def parse_parameter(strategy: Any, name: str, key: str, text: str) -> Any:
    """Parse the value of ``key=text`` into the parameter's type. Raises `Unsupported` for an invalid value."""
    kind = _find_parameter(parameters(strategy), name, key).kind
    try:
        return _parse(kind, text)
    except ValueError:
        raise Unsupported(f"parameter {key}: {text!r} is not {kind}") from None


def _parse(kind: str, text: str) -> Any:
    if kind == "bool":
        truth = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        if text.lower() not in truth:
            raise ValueError(text)
        return truth[text.lower()]
    if kind in ("int", "float"):
        return int(text) if kind == "int" else float(text)
    if "|" in kind and text not in kind.split("|"):
        raise ValueError(text)
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

    Collective: all ranks of the group call it with the same arguments. Without torch.distributed there is one rank.

    ``kernel`` is a kernel's name or ``auto``. ``ranks_per_host`` overrides what the launcher says. ``hops`` is the
    transport of hops within a host (see `communicator.HOPS`). ``hosts`` numbers every global rank's host. ``params``
    are the strategy's own parameters. Raises `UnknownName` and `Unsupported`.
    """
    from ringprof.strategies.base import Context

    strategy, problem = None, None
    try:
        strategy = find(name).load()
        check_parameters(strategy, name, params)
    except (Unsupported, UnknownName) as error:
        problem = error
    comm = Communicator(
        group, ranks_per_host=ranks_per_host, hops=hops, hosts=hosts, request=_request(name, kernel, params),
        problem=problem,
    )  # fmt: skip
    assert strategy is not None, "a communicator is refused where there is a problem"
    if comm.is_world:
        create_again = partial(create, name, None, kernel, ranks_per_host, hops, hosts, **params)
        comm.recipe = create_again, ()
    return strategy(Context(comm, kernel), **params)


def _request(name: str, kernel: str, params: dict[str, Any]) -> str:
    """Describe the arguments of `create` in one line, equal on all ranks that were called with the same arguments."""
    listed = ", ".join(f"{key}={params[key]!r}" for key in sorted(params))
    return f"{name}({listed}) with kernel {kernel}"
