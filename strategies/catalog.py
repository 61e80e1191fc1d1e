"""Catalog of the strategies: name, location of the class, summary and source. Importing it loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from .errors import UnknownName, nearest_name


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
    distribution: str = ""
    """Name under which the first package is installed, if it differs from that of its module."""

    def missing(self) -> str | None:
        """Return which required packages are not installed, and how to install them; None where none is missing."""
        lacking = [package for package in self.packages if find_spec(package) is None]
        return f"needs {' and '.join(lacking)}: {self.install}" if lacking else None

    def version(self) -> str | None:
        """Return the installed version of the first required package; None where none is required or known."""
        from importlib import metadata  # takes longer than the list of strategies

        try:
            return metadata.version(self.distribution or self.packages[0]) if self.packages else None
        except metadata.PackageNotFoundError:
            return None

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

RECURRENT = {
    name: Spec(name, f"{__package__}.recurrent.state_strategies:{attribute}", summary, reference)
    for name, attribute, summary, reference in (
        ("state-ring", "StateRing", "states travel from rank to rank, one after another", "arXiv 2405.21060, 8.2"),
        ("state-scan", "StateScan", "states and transitions, combined in a scan", "flash-linear-attention, maxtext"),
        ("state-a2a", "StateA2A", "all-to-all from sequence to heads and back", "Megatron-LM"),
    )
}
"""Strategies for linear recurrences: gated delta net, Mamba-2, gated linear attention."""

RECURRENT_PEERS = {
    "fla/cp": Spec(
        "fla/cp", f"{__package__}.recurrent.peers:FlaContextParallel", "all-gather of transitions; gated delta rule",
        "", ("fla",), "pip install '.[fla]' in a clone of ringprof", "fla-core",
    )
}  # fmt: skip
"""Strategies of other projects for linear recurrences."""

_RING_FLASH_ATTN = ("ring_flash_attn", "flash_attn"), "pip install ring-flash-attn flash-attn"
_YUNCHANG = ("yunchang", "flash_attn"), "pip install yunchang flash-attn"
_TRANSFORMER_ENGINE = ("transformer_engine",), "pip install --no-build-isolation 'transformer_engine[pytorch]'"


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
        _peer("transformer-engine/a2a+p2p", "TransformerEngineA2AP2P", "cp_comm_type a2a+p2p", _TRANSFORMER_ENGINE),
    )
}
"""Strategies of other projects (peers), available where their packages are installed."""


ALIASES = {"p2p": "megatron", "a2a": "ulysses", "all_gather": "allgather", "a2a+p2p": "usp"}
"""Bundled strategies by the names that Transformer Engine (``cp_comm_type``) gives the same communication."""
LAYOUT_ALIASES = {"striped": "stripe"}
"""Layouts by their other names."""


def canonical_name(name: str) -> str:
    """Return the name of a strategy that ``name``, perhaps an alias, stands for."""
    return ALIASES.get(name, name)


def canonical_parameters(params: dict[str, Any]) -> dict[str, Any]:
    """Return a strategy's parameters with the layout's own name in place of an alias."""
    layout = params.get("layout")
    return {**params, "layout": LAYOUT_ALIASES[layout]} if layout in LAYOUT_ALIASES else params


def names_with_masks() -> list[str]:
    """Return the names of the bundled strategies that support packed documents and sliding windows."""
    return [name for name, spec in SPECS.items() if spec.load().takes_masks]


def find(name: str) -> Spec:
    """Return the spec of a bundled strategy, of a peer, or of ``package.module:Class``. Raises `UnknownName`.

    Also accepts the `ALIASES`.
    """
    known = {**SPECS, **CACHED, **RECURRENT, **PEERS, **RECURRENT_PEERS}
    name = canonical_name(name)
    if name in known:
        return known[name]
    if ":" in name:
        return Spec(name, name, "given by its import path", "")
    hint = nearest_name(name, [*known, *ALIASES])
    raise UnknownName(f"no strategy {name!r}{hint}; there are: {', '.join(known)}, or package.module:Class")
