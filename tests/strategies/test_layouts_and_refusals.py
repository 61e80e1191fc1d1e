"""Layouts are permutations whose blocks cover the mask; unsupported calls are refused with a message."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import ringprof.strategies
from ringprof.strategies import UnknownName, Unsupported, create, find, for_inference, names, parameters
from ringprof.strategies.algorithms.allgather import AllGather
from ringprof.strategies.algorithms.usp import USP, default_ulysses_degree
from ringprof.strategies.base import Shape
from ringprof.strategies.masks.cache_layout import CacheLayout
from ringprof.strategies.masks.layouts import LAYOUTS, Block, Grid, Grouped, split_local_block
from ringprof.strategies.registry import check_parameters, parse_parameter
from ringprof.strategies.transport.message import Message
from ringprof.strategies.transport.ring_channel import HopRing, Meter
from ringprof.strategies.transport.torch_transport import TorchTransport, _splits
from tests.paths import ROOT
from tests.strategies.cases import CASES
from tests.strategies.ranks import refusal, run_ranks

# Neighbours on a busy machine are no fault of the code.
layout_names = st.sampled_from(["contiguous", "zigzag", "stripe"])


@given(layout_names, st.integers(1, 9), st.integers(1, 6))
def test_layout_assigns_every_token_once(name, size, times):
    layout = LAYOUTS[name]
    seq = layout.divisor(size) * times
    assert sorted(layout.order(seq, size).tolist()) == list(range(seq))


def covered(mask: torch.Tensor, block: Block) -> None:
    """Add a block to a count of which query saw which key."""
    part = mask[block.q, block.kv]
    part += torch.ones_like(part).tril() if block.causal else torch.ones_like(part)


@given(layout_names, st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_blocks_of_all_rank_pairs_cover_the_mask_once(name, size, times, causal):
    layout = LAYOUTS[name]
    seq = layout.divisor(size) * times
    local = seq // size
    for q_rank in range(size):
        for kv_rank in range(size):
            seen = torch.zeros(local, local, dtype=torch.int)
            block = layout.block(q_rank, kv_rank, local, causal=causal)
            if block is not None:
                covered(seen, block)
            queries = layout.positions(seq, size, q_rank).unsqueeze(1)
            keys = layout.positions(seq, size, kv_rank).unsqueeze(0)
            expected = (keys <= queries).int() if causal else torch.ones_like(seen)
            assert torch.equal(seen, expected)


@given(layout_names, st.integers(1, 5), st.lists(st.integers(0, 40), min_size=1, max_size=4))
def test_uneven_stretches_of_a_cache_are_split_without_gaps(name, size, lengths):
    layout = CacheLayout(size, tuple((LAYOUTS[name], tokens) for tokens in lengths))
    positions = [layout.positions(rank) for rank in range(size)]
    assert sorted(torch.cat(positions).tolist()) == list(range(sum(lengths)))
    assert layout.key_counts == tuple(map(len, positions))
    new = [layout.positions(rank, new=True) for rank in range(size)]
    assert layout.new_counts == tuple(map(len, new))
    assert sorted(torch.cat(new).tolist()) == list(range(sum(lengths[:-1]), sum(lengths)))
    # Each rank's keys are in the order of the sequence, and pieces differ by a token.
    assert all(torch.equal(held, held.sort().values) for held in positions)
    assert max(layout.new_counts) - min(layout.new_counts) <= (2 if name == "zigzag" else 1)


def test_uneven_pieces_are_those_of_the_docs():
    assert LAYOUTS["contiguous"].positions(5, 2, 1).tolist() == [2, 3, 4]
    # Chunks [0, 3), [3, 6), [6, 9) and [9, 13) of 13 tokens.
    assert LAYOUTS["zigzag"].positions(13, 2, 0).tolist() == [0, 1, 2, 9, 10, 11, 12]
    assert LAYOUTS["zigzag"].positions(13, 2, 1).tolist() == [3, 4, 5, 6, 7, 8]


@given(st.integers(1, 40), st.booleans())
def test_split_local_block_covers_the_local_block_once(local, causal):
    early, rest = split_local_block(local, causal=causal)
    seen = torch.zeros(local, local, dtype=torch.int)
    for block in (early, *rest):
        covered(seen, block)
    ones = torch.ones(local, local, dtype=torch.int)
    assert torch.equal(seen, ones.tril() if causal else ones)


grids = st.builds(
    lambda ulysses, ring, head_first: Grid(ulysses, ring, head_first),
    st.integers(1, 4),
    st.integers(1, 4),
    st.booleans(),
)


@given(grids)
def test_grid_contains_every_rank_once_with_inner_dimension_adjacent(grid):
    size = grid.ulysses_degree * grid.ring_degree
    for rank in range(size):
        assert grid.rank(*grid.coordinates(rank)) == rank
        assert set(grid.ulysses_group(rank)) & set(grid.ring(rank)) == {rank}
        near = grid.ulysses_group(rank) if grid.head_first else grid.ring(rank)
        assert near == list(range(near[0], near[0] + len(near)))


@given(grids, layout_names, st.integers(1, 4))
def test_ulysses_group_holds_the_tokens_of_its_ring_position(grid, name, times):
    layout = Grouped(LAYOUTS[name], grid)
    size = grid.ulysses_degree * grid.ring_degree
    seq = layout.divisor(size) * times
    assert sorted(layout.order(seq, size).tolist()) == list(range(seq))
    for rank in range(size):
        # What the all-to-all puts together, in the order of the group's ranks.
        together = torch.cat([layout.positions(seq, size, member) for member in grid.ulysses_group(rank)])
        assert torch.equal(together, LAYOUTS[name].positions(seq, grid.ring_degree, grid.coordinates(rank)[1]))


@pytest.mark.parametrize(
    ("size", "per_host", "placement", "degree"),
    [
        # On one host the smallest divisor, so that a ring is left; over hosts a host's ranks.
        (4, 4, "head-first", 2), (9, 9, "head-first", 3), (7, 7, "head-first", 7), (1, 1, "head-first", 1),
        (8, 4, "head-first", 4), (8, 2, "head-first", 2), (4, 4, "ring-first", 2), (8, 2, "ring-first", 4),
    ],
)  # fmt: skip
def test_the_default_degree_of_ulysses(size, per_host, placement, degree):
    assert default_ulysses_degree(size, per_host, placement) == degree


def test_a_sequence_of_a_hybrid_is_divided_by_its_groups_and_by_its_ring():
    """Zigzag on a ring of 3 takes multiples of 6; each place shares its part out to 2, 4 or 8 ranks."""
    for ulysses, divisor in ((1, 6), (2, 6), (4, 12), (8, 24)):
        assert Grouped(LAYOUTS["zigzag"], Grid(ulysses, 3, True)).divisor(3 * ulysses) == divisor


def test_process_grid_by_hand():
    # 2 x 4 ranks, 16 tokens, contiguous: a ring place holds 4 tokens, its two ranks 2 each.
    head_first = Grouped(LAYOUTS["contiguous"], Grid.of(8, 2, None, head_first=True))
    assert head_first.positions(16, 8, 3).tolist() == [6, 7]
    # Rank 3 is the last place of the first ring; its partner is rank 7.
    ring_first = Grouped(LAYOUTS["contiguous"], Grid.of(8, None, 4, head_first=False))
    assert (ring_first.positions(16, 8, 3).tolist(), ring_first.positions(16, 8, 7).tolist()) == ([12, 13], [14, 15])


def round_trips(rank: int, world: int) -> list[str]:
    wrong = []
    for case in [case for case in CASES if world in case.worlds]:
        strategy = create(case.name, kernel="reference", **case.params)
        for shape, dim in (((2, 32, 3), 1), ((32,), 0), ((2, 3, 32, 1), 2)):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
            local = strategy.shard(x, dim)
            tokens = torch.arange(32)[strategy.positions(32)]
            if not torch.equal(strategy.unshard(local, dim), x) or not torch.equal(local, x.index_select(dim, tokens)):
                wrong.append(f"{case} {shape}")
    return wrong


@pytest.mark.processes
@pytest.mark.parametrize("world", [1, 4])
def test_unshard_reverses_shard(world):
    assert run_ranks(world, round_trips, world) == [[]] * world


# --- refusals ---------------------------------------------------------------------------------------


def attend(x: Tensor, name: str, params: dict[str, Any] | None = None, **options: Any) -> None:
    k, v = options.pop("k", x), options.pop("v", options.get("k", x))
    create(name, kernel=options.pop("kernel", "reference"), **(params or {})).attention(x, k, v, **options)


REFUSED: list[tuple[Callable[[Tensor], Any], str]] = [
    (lambda x: attend(x[:, :7], "zigzag"), "divisible by 8"),
    (lambda x: attend(x, "ring", k=x[:, :, :3], v=x[:, :, :3]), "4 heads are not a multiple of 3 kv heads"),
    (lambda x: attend(x, "burst", {"ring_window": 3}), "ring_window 3 does not divide"),
    (lambda x: attend(x, "usp", {"ulysses_degree": 3}), "3"),
    (lambda x: attend(x, "usp", {"ulysses_degree": 2, "ring_degree": 4}), "4"),
    (lambda x: attend(x[:, :, :3], "ulysses"), "3 heads"),
    (lambda x: attend(x, "zigzag", dropout_p=0.1), "dropout_p is not supported"),
    (lambda x: attend(x, "torch-cp", window_size=(3, 0)), "takes no packed documents and no sliding window"),
    (lambda x: attend(x, "zigzag", documents=[0, 4, 8]), "the documents end at 8, and the sequence has 32"),
    (lambda x: attend(x, "zigzag", documents=[4, 32]), "documents are cumulative lengths: 0"),
    (lambda x: attend(x, "zigzag", window_size=(-3, 0)), "a query attends to, -1 for all: not (-3, 0)"),
    (
        lambda x: attend(x, "usp", {"documents_layout": "per_document", "layout": "stripe"}, documents=[0, 4, 32]),
        "the stripe layout is not made for each document by itself",
    ),
    (lambda x: attend(x, "zigzag", alibi_slopes=torch.ones(4)), "alibi_slopes is not supported"),
    (lambda x: attend(x, "torch-cp", documents=[0, 8, 32]), f"those that do are {', '.join(names())}"),
    (lambda x: attend(x, "ring", k=x.double(), v=x.double()), "share type and device"),
    (lambda x: attend(x[0], "ring"), "expected q (B, S, H, D)"),
    (
        lambda x: attend(x, "ring", k=x[:, :4], v=x[:, :4]),
        "q, k and v must share batch, local sequence and head_dim: got (1, 8, 4, 8), (1, 4, 4, 8)",
    ),
    (lambda x: create("burst", hosts=[0, 0, 1]), "hosts of 3 ranks for a world of 4"),
    (
        lambda x: attend(x[..., :4], "ring", v=x),
        "expected q (B, S, H, D), k and v (B, S, Hkv, D): got (1, 8, 4, 4), (1, 8, 4, 4), (1, 8, 4, 8)",
    ),
    (lambda x: attend(x, "ring", kernel="cudnn"), "needs a CUDA device"),
    (lambda x: attend(x, "ring", kernel="cudn"), "there are: auto, flash-attn-3, flash-attn-4"),
    (lambda x: create("burst", ranks_per_host=3), "ranks_per_host 3 does not divide"),
    (lambda x: create("ring", windows=2), "no parameter 'windows'; it has: grad_wire, deterministic"),
]


def refusals(rank: int) -> list[str]:
    """Return the error message of each call."""
    return [refusal(call, torch.zeros(1, 8, 4, 8)) for call, _ in REFUSED]


@pytest.mark.processes
def test_unsupported_workload_is_refused_equally_on_every_rank():
    for messages in run_ranks(4, refusals):
        for message, (_, part) in zip(messages, REFUSED, strict=True):
            assert part in message


# Asked before there is a process group: strategy, parameters, what the shape has of its own, ranks, what is said.
UNFIT = [
    ("allgather", {"heads_at_a_time": 3}, {}, 8, "heads_at_a_time 3 does not divide 8 kv heads"),
    ("allgather", {"heads_at_a_time": 0}, {}, 8, "heads_at_a_time 0 does not divide 8 kv heads"),
    ("dcp", {}, {"heads": 6, "kv_heads": 4, "kv_length": 64}, 2, "6 heads are not a multiple of 4 kv heads"),
    ("zigzag", {}, {"seq": 24}, 8, "a sequence divisible by 16: not 24 (try 16)"),
    ("stripe", {}, {"seq": 12}, 8, "the stripe layout on 8 ranks needs a sequence divisible by 8"),
    ("ulysses", {}, {"heads": 4}, 8, "a Ulysses degree of 8 does not divide 4 heads"),
    ("ulysses", {}, {"heads": 8, "kv_heads": 3}, 8, "8 heads are not a multiple of 3 kv heads"),
    ("usp", {"ulysses_degree": 3}, {}, 8, "ulysses_degree 3 does not divide the world size 8"),
    ("usp", {"ring_degree": 0}, {}, 8, "ring_degree 0 does not divide the world size 8"),
    ("usp", {"ulysses_degree": 2, "ring_degree": 2}, {}, 8, "ulysses_degree 2 x ring_degree 2 is not the world size 8"),
    ("usp", {"ulysses_degree": 8}, {"heads": 4, "kv_heads": 4}, 8, "a Ulysses degree of 8 does not divide 4 heads"),
    ("usp", {"ulysses_degree": 2}, {"seq": 12}, 8, "needs a sequence divisible by 8"),
    ("double-ring", {"ring_window": 3}, {}, 8, "ring_window 3 does not divide the ring of 8"),
    ("double-ring", {"ulysses_degree": 2, "ring_window": 8}, {}, 8, "ring_window 8 does not divide the ring of 4"),
    ("double-ring", {"ulysses_degree": 5}, {}, 8, "ulysses_degree 5 does not divide the world size 8"),
    ("double-ring", {"ulysses_degree": 8}, {"heads": 4, "kv_heads": 4}, 8, "degree of 8 does not divide 4 heads"),
    ("burst", {"ring_window": 3}, {}, 8, "ring_window 3 does not divide the world size 8"),
    ("burst", {"ring_window": 4, "double_ring": False}, {}, 8, "has no meaning with double_ring=false"),
    ("megatron", {}, {"seq": 24}, 8, "divisible by 16"),
    ("allgather", {"layout": "zigzag"}, {"seq": 24}, 8, "zigzag layout on 8 ranks needs a sequence divisible by 16"),
]


@pytest.mark.parametrize(("name", "params", "given_shape", "size", "said"), UNFIT)
def test_why_unsupported_states_the_reason(name, params, given_shape, size, said):
    shape = Shape(**{"batch": 1, "seq": 64, "heads": 8, "kv_heads": 8, "head_dim": 8, **given_shape})
    assert said in (find(name).load().why_unsupported(shape, size, **params) or "")


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_supported_workload_is_not_refused(name, size):
    assert find(name).load().why_unsupported(Shape(1, 64, 8, 2, 8), size) is None


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("usp", {"placement": "context-first"}),
        ("usp", {"layout": "spiral"}),
        ("allgather", {"layout": "stripe"}),
        ("ring", {"grad_wire": "mixed"}),
    ],
)
def test_unknown_parameter_value_is_refused(name, params):
    with pytest.raises(Unsupported, match=f"{next(iter(params))}: .* is not "):
        create(name, **params)


def test_unknown_strategy_error_suggests_the_nearest():
    with pytest.raises(UnknownName, match=r"did you mean 'zigzag'\?.*ring, zigzag"):
        find("zigzg")
    with pytest.raises(UnknownName, match="cannot be imported"):
        find("nowhere.to_be:Found").load()


@pytest.mark.parametrize("name", names())
def test_every_parameter_is_described_and_listed(name):
    guide = (ROOT / "docs" / "strategies.md").read_text()
    assert f"\n| {name} |" in guide or f", {name} |" in guide or f"{name}, " in guide
    for parameter in parameters(find(name).load()):
        assert parameter.help, parameter.name
        assert parameter.name != "deterministic" or parameter.default is False
        if parameter.name not in ("deterministic", "layout"):
            assert f"`{parameter.name}" in guide


def test_parameter_types_of_every_strategy():
    """The types are those that `ringprof strategies NAME` lists and command lines use; all have `deterministic`."""
    of_rings = {"grad_wire": "exact|fp32|input"}
    packed, narrow = {"documents_layout": "auto|packed|per_document|dealt"}, {"grad_wire": "fp32|input"}
    expected = {
        "ring": of_rings,
        "zigzag": of_rings | packed,
        "stripe": of_rings,
        "ulysses": narrow,
        "usp": of_rings | packed | {
            "ulysses_degree": "int", "ring_degree": "int", "placement": "head-first|ring-first",
            "layout": "zigzag|contiguous|stripe",
        },
        "double-ring": packed | {
            "ring_window": "int", "placement": "head-first|context-first", "ulysses_degree": "int",
            "grad_wire": "mixed|fp32|input",
        },
        "burst": narrow | packed | {"double_ring": "bool", "ring_window": "int", "optimized_backward": "bool"},
        "megatron": narrow | packed,
        "allgather": narrow | packed | {"layout": "contiguous|zigzag", "heads_at_a_time": "int"},
        "dcp": {
            "dcp_degree": "int", "merge": "reduce-scatter|all-to-all|all-gather", "queries": "gathered|replicated",
            "out_wire": "fp32|input",
        },
        "ring-prefill": {"passes": "auto|kv|q"},
    }  # fmt: skip
    kinds_by_name = {
        name: {parameter.name: parameter.kind for parameter in parameters(find(name).load())} for name in expected
    }
    assert set(expected) == {*names(), *for_inference()}
    for name, kinds in kinds_by_name.items():
        assert kinds.pop("deterministic", "bool") == "bool"
        assert kinds == expected[name]


def test_parameters_that_are_hidden_or_missing_are_refused():
    class Hiding:
        def __init__(self, **options: int) -> None: ...

    class Demanding:
        def __init__(self, *, pace: int, depth: int = 2) -> None: ...

    with pytest.raises(Unsupported, match=r"^Hiding: parameters must be named: no \*args or \*\*kwargs$"):
        parameters(Hiding)
    with pytest.raises(Unsupported, match=r"^strategy 'mine' needs the parameter 'pace'$"):
        check_parameters(Demanding, "mine", {"depth": 3})
    check_parameters(Demanding, "mine", {"pace": 1})


def test_unknown_parameter_error_lists_the_parameters():
    class Plain:
        def __init__(self) -> None: ...

    said = r"^strategy 'mine' has no parameter 'x'; it has: none$"
    with pytest.raises(Unsupported, match=said):
        parse_parameter(Plain, "mine", "x", "1")
    with pytest.raises(Unsupported, match=said):
        check_parameters(Plain, "mine", {"x": 1})
    with pytest.raises(Unsupported, match=r"^strategy 'ring' has no parameter 'x'; it has: grad_wire, deterministic$"):
        parse_parameter(find("ring").load(), "ring", "x", "1")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("double_ring", "true", True),
        ("double_ring", "no", False),
        ("ring_window", "4", 4),
        ("grad_wire", "fp32", "fp32"),
    ],
)
def test_a_parameter_is_read_in_its_type(key, text, value):
    assert parse_parameter(find("burst").load(), "burst", key, text) == value


@pytest.mark.parametrize(("key", "text"), [("double_ring", "maybe"), ("ring_window", "x"), ("grad_wire", "bf16")])
def test_a_parameter_of_another_type_is_refused(key, text):
    with pytest.raises(Unsupported, match=key):
        parse_parameter(find("burst").load(), "burst", key, text)


def resolved(rank: int) -> list[dict[str, object]]:
    """Return the parameters chosen on two hosts of two ranks, known from the launcher or from the call."""
    params = []
    for ranks_per_host in (None, 4):
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        params += [create(name, ranks_per_host=ranks_per_host).parameters for name in ("usp", "double-ring", "burst")]
    params.append(create("usp", placement="ring-first").parameters)
    params.append(create("double-ring", ulysses_degree=2).parameters)
    params.append(create("double-ring", ulysses_degree=2, placement="context-first").parameters)
    del os.environ["LOCAL_WORLD_SIZE"]
    return params


def test_one_parallel_degree_determines_the_other():
    assert USP.with_placement(8, 4) == {"ulysses_degree": 4}
    assert USP.with_placement(8, 4, ring_degree=4) == {"ring_degree": 4}
    assert USP.layout_for(8, ring_degree=2).grid == Grid.of(8, 4, 2, head_first=True)


@pytest.mark.processes
def test_default_degrees_and_windows_follow_the_hosts():
    for usp, double, burst, one_usp, one_double, one_burst, ring_first, heads, context in run_ranks(4, resolved):
        assert (usp["ulysses_degree"], usp["ring_degree"]) == (2, 2)
        assert (double["ring_window"], burst["ring_window"], burst["double_ring"]) == (2, 2, True)
        assert (one_usp["ulysses_degree"], one_usp["ring_degree"]) == (2, 2)
        assert (one_double["ring_window"], one_burst["ring_window"], one_burst["double_ring"]) == (4, 4, False)
        assert (ring_first["ulysses_degree"], ring_first["ring_degree"]) == (2, 2)
        # A Ulysses group fills a host, so a ring has one rank on each; the other way round a ring fills it.
        assert (heads["ring_window"], context["ring_window"]) == (1, 2)


@pytest.mark.parametrize(
    ("layout", "causal", "busiest"),
    [("contiguous", True, 7 / 4), ("contiguous", False, 1.0), ("zigzag", True, 1.0), ("zigzag", False, 1.0)],
)
def test_all_gather_imbalance_by_hand(layout: str, causal: bool, busiest: float) -> None:
    """Each rank has a quarter of the queries: the last rank sees 3 1/2 quarters of the keys, the mean is 2 quarters."""
    assert AllGather.imbalance(4, causal=causal, layout=layout) == busiest


def test_a_hop_can_be_waited_for_once():
    ring = create("ring").kv_ring
    assert isinstance(ring, HopRing)
    hop = ring.post(Message.pack([torch.ones(1)]))
    hop.wait()
    with pytest.raises(RuntimeError, match="twice"):
        hop.wait()


class _Group:
    """A stand-in for a process group that returns the arguments of a call in place of a work."""

    def alltoall_base(self, into: torch.Tensor, out: torch.Tensor, come: list[int], go: list[int], _: Any) -> object:
        return into[0].item(), out[0].item(), come, go


def test_all_messages_of_a_hop_are_waited_for():
    transport: Any = object.__new__(TorchTransport)
    vars(transport).update(group=_Group(), all_to_all_device="cpu", _splits=partial(_splits, 4, 3, 1))
    transport._check = lambda layout, waits: False
    ring: Any = SimpleNamespace(channel="kv", link="same_host", meter=Meter())
    messages = [
        [torch.full((rows,), number) for rows, number in numbers]
        for numbers in (((2, 10), (5, 11)), ((2, 20), (5, 21)))
    ]
    first, second = ([0, 0, 0, 2], [0, 2, 0, 0]), ([0, 0, 0, 5], [0, 5, 0, 0])
    hop = transport.hop(ring, Message(messages[0]), Message(messages[1]))
    assert hop._works == [(20, 10, *first), (21, 11, *second)]


@pytest.mark.parametrize("of_v", [1, 3, 4])
def test_the_output_is_as_wide_as_v(of_v):
    """Attention with equal weights is the mean of v, independent of the padding for the kernel."""
    q, k = torch.zeros(1, 8, 2, 4), torch.randn(1, 8, 2, 4)
    v = torch.arange(8.0).view(1, 8, 1, 1).expand(1, 8, 2, of_v).contiguous()
    out = create("ring", kernel="reference").attention(q, k, v, causal=False)
    assert out.shape == (1, 8, 2, of_v) and torch.allclose(out, torch.full_like(out, 3.5))


def sharded_by_another(rank: int) -> str:
    documents, x = (0, 5, 45, 64), torch.ones(1, 64, 2, 16)
    create("zigzag", documents_layout="packed").shard(x, documents=documents)
    strategy, local = create("zigzag"), x[:, :32]
    text = refusal(strategy.attention, local, local, local, documents=documents)
    strategy.shard(x, documents=documents)
    strategy.attention(local, local, local, documents=documents)
    return text


@pytest.mark.processes
def test_documents_that_another_layout_sharded_are_refused():
    assert all("has not sharded by it" in text for text in run_ranks(2, sharded_by_another))


def test_unknown_names_are_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Fit'"):
        _ = ringprof.strategies.Fit
