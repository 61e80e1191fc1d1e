"""Times by layer against a calculation, nanosecond by nanosecond, on the raw events of made-up traces."""

from __future__ import annotations

import gzip
import json
import random
import re
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ringprof.analysis.findings.findings import findings_in_memory
from ringprof.run import read_run
from ringprof.scale.pipeline import attribute
from ringprof.trace.columns import Ranges, Trace, table_of
from ringprof.trace.kineto import parse_trace, read_trace
from ringprof.trace.reduced import parse_reduced, reduce_trace
from tests.analysis.build import FLASH, NCCL
from tests.paths import ROOT

MAIN, AUTOGRAD = 100, 101
WALL = 3000
Event = dict[str, Any]


class Step:
    """Raw events of a training step; times are whole nanoseconds."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._ids = count(1)

    def event(self, category: str, name: str, thread: int, start: int, end: int, **args: Any) -> None:
        """Add a complete event."""
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": start / 1e3,
             "dur": (end - start) / 1e3, "args": args}
        )  # fmt: skip

    def kernel(self, name: str, launched: int, thread: int, start: int, end: int, stream: int) -> None:
        """Add a kernel with its launch, which takes 1 ns."""
        number = next(self._ids)
        self.event("cuda_runtime", "cudaLaunchKernel", thread, launched, launched + 1, correlation=number)
        self.event("kernel", name, 0, start, end, correlation=number, device=0, stream=stream)

    def arrow(self, forward: tuple[int, int], node: tuple[int, int]) -> None:
        """Add an arrow from (thread, time) to (thread, time)."""
        number = next(self._ids)
        for phase, (thread, time) in (("s", forward), ("f", node)):
            self.events.append(
                {"ph": phase, "id": number, "pid": 1, "tid": thread, "ts": time / 1e3, "cat": "fwdbwd",
                 "name": "fwdbwd"}
            )  # fmt: skip

    def trace(self) -> Trace:
        """Read the events as a Kineto file."""
        data = {"traceEvents": self.events, "distributedInfo": {"rank": 0, "world_size": 1}}
        return parse_trace(json.dumps(data).encode(), "rank0.json")


def layers_of(trace: Trace) -> dict[str, tuple[int, ...]]:
    """Return the times of each layer as the analysis has them."""
    (rank,) = attribute([trace]).ranks
    assert [sum(column) for column in zip(*(row[1:4] for row in rank.layers), strict=True)] in (
        [], [rank.breakdown.flash_ns, rank.breakdown.comm_ns, rank.breakdown.exposed_comm_ns],
    )  # fmt: skip
    return {row.layer: tuple(row[1:5]) for row in rank.layers}


def brute_force(events: list[Event], prefix: str) -> dict[str, list[int]]:
    """Attribute every nanosecond by scanning the raw events."""
    spans = [
        (event["name"], event["tid"], round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3), event)
        for event in events
        if event["ph"] == "X"
    ]
    tails = {event["id"]: (event["tid"], round(event["ts"] * 1e3)) for event in events if event["ph"] == "s"}
    heads = [(event["tid"], round(event["ts"] * 1e3), event["id"]) for event in events if event["ph"] == "f"]

    def layer_at(thread: int, time: int) -> str:
        names = [name for name, on, start, end, _ in spans if name.startswith(prefix) and on == thread
                 and start <= time < end]  # fmt: skip
        return names[0].removeprefix("nn.Module: ") if names else ""

    def owner(thread: int, time: int) -> tuple[str, bool]:
        nodes = [
            (start, end)
            for name, on, start, end, _ in spans
            if name.startswith("autograd::engine") and on == thread and start <= time < end
        ]
        direct = layer_at(thread, time)
        if direct or not nodes:
            return direct, bool(nodes)
        start, end = max(nodes)
        inside = [number for on, time, number in heads if on == thread and start <= time < end]
        return (layer_at(*tails[min(inside)]) if inside else ""), True

    launches = {event["args"]["correlation"]: (on, start) for name, on, start, _, event in spans
                if event["cat"] == "cuda_runtime"}  # fmt: skip
    kernels = sorted(
        (start, end, name == NCCL, *owner(*launches[event["args"]["correlation"]]))
        for name, _, start, end, event in spans
        if event["cat"] == "kernel"
    )
    sums: dict[str, list[int]] = {}
    for time in range(WALL * 2):
        running = [kernel for kernel in kernels if kernel[0] <= time < kernel[1]]
        computing = [kernel for kernel in running if not kernel[2]]
        sending = [kernel for kernel in running if kernel[2]]
        if computing:
            sums.setdefault(computing[0][3], [0] * 4)[0] += 1
        if sending:
            row = sums.setdefault(sending[0][3], [0] * 4)
            row[1] += 1
            row[2] += not computing
            row[3] += sending[0][4] and not computing
    return sums


def random_step(seed: int, named: str) -> Step:
    """Return a step of four layers with hops at random times; ``named``: how layers are named."""
    draw, step = random.Random(seed), Step()
    step.event("python_function", "nn.Module: Model_0", MAIN, 0, 1000)
    start_on_device = 0
    for layer in range(4):
        begin = 100 + 200 * layer
        if named == "modules":
            step.event("python_function", f"nn.Module: Layer_{layer}", MAIN, begin, begin + 180)
            step.event("python_function", f"nn.Module: Attention_{layer}", MAIN, begin + 5, begin + 160)
            step.event("python_function", f"nn.Module: Linear_{layer}", MAIN, begin + 162, begin + 170)
        else:
            step.event("user_annotation", f"model.layers.{layer}", MAIN, begin, begin + 180)
        for _ in range(3):
            launched = begin + draw.randrange(10, 150)
            start_on_device = max(start_on_device, launched) + draw.randrange(40)
            step.kernel(FLASH, launched, MAIN, start_on_device, start_on_device + draw.randrange(1, 90), 7)
            step.kernel(NCCL, launched + 1, MAIN, start_on_device + draw.randrange(60), start_on_device + 130, 9)
            start_on_device += 90
    for node, layer in enumerate(reversed(range(4))):
        begin = 1500 + 200 * node
        step.event("cpu_op", "autograd::engine::evaluate_function: RingBackward", AUTOGRAD, begin, begin + 150)
        if draw.random() < 0.8:
            step.arrow((MAIN, 100 + 200 * layer + draw.randrange(10, 150)), (AUTOGRAD, begin + 2))
        for _ in range(2):
            launched = begin + draw.randrange(5, 140)
            start_on_device = max(start_on_device, launched) + draw.randrange(40)
            step.kernel(FLASH, launched, AUTOGRAD, start_on_device, start_on_device + draw.randrange(1, 90), 7)
            step.kernel(NCCL, launched + 1, AUTOGRAD, start_on_device + draw.randrange(60), start_on_device + 130, 9)
            start_on_device += 90
    # Gradients are reduced after the backward pass, outside of all layers.
    step.kernel(NCCL, 2400, MAIN, start_on_device + 50, start_on_device + 300, 9)
    return step


@pytest.mark.parametrize("named", ["modules", "ranges"])
@pytest.mark.parametrize("seed", range(12))
def test_layers_equal_a_scan_of_the_raw_events(seed, named):
    step = random_step(seed, named)
    expected = brute_force(step.events, "nn.Module: Layer_" if named == "modules" else "model.layers.")
    trace = step.trace()
    layers = layers_of(trace)
    assert layers == {layer: tuple(row) for layer, row in expected.items() if any(row)}
    assert len(layers) == 5
    assert layers_of(parse_reduced(reduce_trace(trace))) == layers


def test_the_sums_over_ranks_are_those_of_the_run_also_where_a_rank_names_no_layers():
    named, unnamed = random_step(1, "modules").trace(), random_step(2, "modules")
    unnamed.events = [event for event in unnamed.events if event["cat"] != "python_function"]
    other = unnamed.trace()
    ranks = [trace_of_rank(named, 0), trace_of_rank(other, 1)]
    attribution = attribute(ranks)
    rows = findings_in_memory(attribution).layers
    assert [row.time.layer for row in rows] == ["Layer_0", "Layer_1", "Layer_2", "Layer_3", ""]
    assert sum(row.time.exposed_ns for row in rows) == sum(rank.breakdown.exposed_comm_ns for rank in attribution.ranks)
    assert rows[-1].worst_rank == 1


def trace_of_rank(trace: Trace, rank: int) -> Trace:
    return msgspec.structs.replace(trace, rank=rank, world_size=2)


def in_ranges(*names: str, category: str = "user_annotation") -> Step:
    """Return one kernel of attention in each range; ranges follow each other."""
    step = Step()
    for number, name in enumerate(names):
        if name:
            step.event(category, name, MAIN, 100 * number, 100 * number + 50)
        step.kernel(FLASH, 100 * number + 10, MAIN, 100 * number + 20, 100 * number + 60, 7)
    return step


@pytest.mark.parametrize(
    ("names", "layers"),
    [
        (["layers.0", "layers.1"], ["layers.0", "layers.1"]),
        (["layer 10", "layer 9"], ["layer 9", "layer 10"]),
        (["transformer.h.0.attn", "transformer.h.1.attn"], ["transformer.h.0.attn", "transformer.h.1.attn"]),
        (["TransformerLayer_0", "TransformerLayer_1"], ["TransformerLayer_0", "TransformerLayer_1"]),
        (["step 7 block[0]", "step 7 block[1]", "step 8 block[0]"], ["step * block[0]", "step * block[1]"]),
        (["ringprof::layer stages.0", "ringprof::layer stages.1"], ["stages.0", "stages.1"]),
        (["layers.0", "layers.1", ""], ["layers.0", "layers.1", ""]),
        # One layer, steps, and loops that number something else are no layers.
        (["layers.0", "layers.0"], []),
        (["step 0", "step 1"], []),
        (["ProfilerStep#0", "ProfilerStep#1"], []),
        (["micro_batch 0", "micro_batch 1"], []),
        (["attention", "attention"], []),
    ],
)
def test_ranges_are_layers_by_their_names(names, layers):
    assert list(layers_of(in_ranges(*names).trace())) == layers


def test_the_class_with_the_most_instances_is_the_layer_and_of_several_the_outermost():
    """Two stages of two layers each; the projections inside run no attention."""
    step = Step()
    for number in range(4):
        begin = 100 * number
        step.event("python_function", f"nn.Module: Layer_{number}", MAIN, begin + 1, begin + 90)
        step.event("python_function", f"nn.Module: Attention_{number}", MAIN, begin + 5, begin + 60)
        for projection in range(3):
            begins = begin + 60 + 10 * projection
            step.event("python_function", f"nn.Module: Linear_{3 * number + projection}", MAIN, begins, begins + 5)
        step.kernel(FLASH, begin + 10, MAIN, begin + 20, begin + 60, 7)
    for stage in range(2):
        step.event("python_function", f"nn.Module: Stage_{stage}", MAIN, 200 * stage, 200 * stage + 199)
    assert list(layers_of(step.trace())) == [f"Layer_{number}" for number in range(4)]


def test_attention_of_two_classes_gives_the_layers_of_both():
    step = Step()
    for number in range(5):
        name = f"nn.Module: Global_{number // 2}" if number % 2 else f"nn.Module: Local_{number // 2}"
        step.event("python_function", name, MAIN, 100 * number, 100 * number + 50)
        step.kernel(FLASH, 100 * number + 10, MAIN, 100 * number + 20, 100 * number + 60, 7)
    assert list(layers_of(step.trace())) == ["Local_0", "Local_1", "Local_2", "Global_0", "Global_1"]


def test_a_node_belongs_to_the_innermost_of_nested_calls():
    """Reentrant checkpointing runs nodes within a node whose own forward operator is in no layer."""
    step = in_ranges("layers.0", "layers.1")
    step.event("cpu_op", "autograd::engine::evaluate_function: CheckpointFunctionBackward", AUTOGRAD, 300, 600)
    step.event("cpu_op", "autograd::engine::evaluate_function: RingBackward", AUTOGRAD, 350, 400)
    step.arrow((MAIN, 90), (AUTOGRAD, 301))
    step.arrow((MAIN, 120), (AUTOGRAD, 351))
    step.kernel(FLASH, 360, AUTOGRAD, 700, 710, 7)  # within the inner node: layers.1
    step.kernel(FLASH, 410, AUTOGRAD, 720, 750, 7)  # after it, within the outer node: no layer
    assert layers_of(step.trace()) == {"layers.0": (40, 0, 0, 0), "layers.1": (50, 0, 0, 0), "": (30, 0, 0, 0)}


def test_what_was_launched_without_a_record_is_outside_of_all_layers():
    step = in_ranges("layers.0", "layers.1")
    step.event("kernel", FLASH, 0, 500, 530, device=0, stream=7)
    assert layers_of(step.trace())[""] == (30, 0, 0, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"id": "7"}, {"id": None}, {"id": 1 << 70}, {"tid": "main"}, {"ts": "soon"}, {"ts": None}, {"tid": 1 << 65},
        {"id": 999},
    ],
)  # fmt: skip
def test_damaged_arrows_leave_the_backward_pass_outside(change):
    step = in_ranges("layers.0", "layers.1")
    step.event("cpu_op", "autograd::engine::evaluate_function: RingBackward", AUTOGRAD, 300, 400)
    step.arrow((MAIN, 20), (AUTOGRAD, 301))
    step.kernel(FLASH, 310, AUTOGRAD, 500, 530, 7)
    assert layers_of(step.trace())["layers.0"] == (70, 0, 0, 0)
    step.events = [event | change if event["ph"] == "f" else event for event in step.events]
    assert layers_of(step.trace())[""] == (30, 0, 0, 0)


def test_only_modules_are_kept_of_python_functions():
    step = in_ranges("nn.Module: Layer_0", "nn.Module: Layer_1", category="python_function")
    before = step.trace()
    step.event("python_function", "torch/nn/modules/module.py(1773): _wrapped_call_impl", MAIN, 0, 200)
    after = step.trace()
    assert np.array_equal(before.modules.start_ns, after.modules.start_ns)
    assert before.names == after.names


def with_ranges(trace: Trace, names: list[str]) -> Trace:
    """Cut the times of a trace's launches into equal ranges of these names, on every thread that launches."""
    launches, old = trace.launches, trace.annotations
    edges = np.linspace(launches.start_ns.min() - 1, launches.end_ns.max() + 1, len(names) + 1).astype(np.int64)
    threads = np.unique(launches.thread)
    count = len(names) * len(threads)
    columns = {
        "start_ns": np.tile(edges[:-1], len(threads)), "end_ns": np.tile(edges[1:], len(threads)),
        "name": np.tile(np.arange(len(names)) + len(trace.names), len(threads)),
        "thread": np.repeat(threads, len(names)), "device": np.full(count, -1), "external_id": np.full(count, -1),
    }  # fmt: skip
    order = np.argsort(np.append(old.start_ns, columns["start_ns"]), kind="stable")
    joined = {name: np.append(getattr(old, name), column)[order] for name, column in columns.items()}
    return msgspec.structs.replace(trace, names=[*trace.names, *names], annotations=table_of(Ranges, joined))


@pytest.mark.parametrize("folder", ["waits-copies", "waits-nccl", "h200x8-zigzag-131072"])
def test_layers_of_real_runs_sum_to_the_run(folder):
    """Hops by copy engines let the device idle for a peer; that time belongs to the layer of the hop."""
    paths = sorted((ROOT / "tests/data" / folder).glob("rank*.json.gz"))
    run = read_run(paths[0].parent / "run.json") if (paths[0].parent / "run.json").exists() else None
    traces = [with_ranges(read_trace(path), [f"layers.{number}" for number in range(4)]) for path in paths]
    attribution = attribute(traces, run)
    plain = attribute([read_trace(path) for path in paths], run)
    for rank, without in zip(attribution.ranks, plain.ranks, strict=True):
        assert rank.breakdown == without.breakdown and not without.layers
        columns = [sum(column) for column in zip(*(row[1:] for row in rank.layers), strict=True)]
        attention_ns, communication_ns, exposed_ns, _, wait_ns, wire_ns, compute_ns = columns
        assert (attention_ns, communication_ns) == (rank.breakdown.flash_ns, rank.breakdown.comm_ns)
        assert compute_ns == rank.breakdown.compute_ns
        assert exposed_ns == rank.breakdown.exposed_comm_ns
        assert (wait_ns, wire_ns) == (rank.exposed.wait_ns, rank.exposed.wire_ns)
        assert len([row for row in rank.layers if row.layer]) >= 2
    blocked_ns = sum(rank.breakdown.blocked_on_peer_ns for rank in attribution.ranks)
    assert (blocked_ns > 0) == (folder == "waits-copies")


LLAMA = ROOT / "tests/data/llama-4-layers"
"""A step of transformers' Llama of 4 layers, zigzag with copied hops, on 2 H200, captured with ``model=``. Rank 1 is
held up by about 4 ms on its device before the attention of layer 2 in the forward pass."""


def by_sequence_number(path: Path) -> dict[str, list[int]]:
    """Return the attention and communication time of each layer by the sequence numbers of forward operators."""
    events = json.loads(gzip.open(path).read(), parse_float=Decimal, parse_int=Decimal)["traceEvents"]
    rows = [
        (event["name"], event["cat"], event["tid"], int(event["ts"] * 1000), int((event["ts"] + event["dur"]) * 1000),
         event.get("args", {}))
        for event in events
        if event["ph"] == "X" and "cat" in event
    ]  # fmt: skip
    named = [row for row in rows if row[0].startswith("ringprof::layer ") and row[1] == "user_annotation"]
    nodes = [row for row in rows if row[0].startswith("autograd::engine::evaluate_function")]
    operators = [row for row in rows if row[1] == "cpu_op" and not row[5].get("Fwd thread id")]
    forward = {row[5]["Sequence number"]: row for row in sorted(operators, key=lambda row: row[3])
               if "Sequence number" in row[5]}  # fmt: skip
    launches = {row[5]["correlation"]: row for row in rows if row[1] in ("cuda_runtime", "cuda_driver")
                and "correlation" in row[5]}  # fmt: skip

    def around(candidates: list[Any], thread: Decimal, time: int) -> list[Any]:
        return [row for row in candidates if row[2] == thread and row[3] <= time < row[4]]

    def layer_of(activity: Any) -> str:
        launch = launches[activity[5]["correlation"]]
        owners = around(named, launch[2], launch[3])
        inside = around(nodes, launch[2], launch[3])
        if not owners and inside:
            operator = forward.get(max(inside, key=lambda row: row[3])[5].get("Sequence number"))
            owners = around(named, operator[2], operator[3]) if operator else []
        return owners[0][0].removeprefix("ringprof::layer ") if owners else ""

    sums: dict[str, list[int]] = {}
    for column, pattern in enumerate((r"kernel .*flash::", r"gpu_memcpy Memcpy PtoP|kernel nccl")):
        latest = 0
        chosen = [row for row in rows if re.match(pattern, f"{row[1]} {row[0]}", re.DOTALL)]
        for activity in sorted(chosen, key=lambda row: row[3]):
            sums.setdefault(layer_of(activity), [0, 0])[column] += max(0, activity[4] - max(activity[3], latest))
            latest = max(latest, activity[4])
    return sums


def test_layers_of_a_captured_llama_equal_those_by_sequence_numbers():
    run = read_run(LLAMA / "run.json")
    attribution = attribute([read_trace(LLAMA / f"rank{rank}.json.gz") for rank in range(2)], run)
    for rank in attribution.ranks:
        expected = by_sequence_number(LLAMA / f"rank{rank.rank}.json.gz")
        # The barrier before the captured block is no part of it.
        expected.pop("", None)
        layers = {row.layer: row for row in rank.layers}
        # The optimizer and the loss compute outside of all layers.
        assert layers.pop("").attention_ns == 0
        assert list(layers) == sorted(expected) == [f"model.layers.{number}" for number in range(4)]
        for layer, (attention_ns, communication_ns) in expected.items():
            assert layers[layer].communication_ns == communication_ns
            # The calls of attention also launch kernels that fill a tensor, whose names say nothing of attention.
            assert attention_ns < layers[layer].attention_ns < 1.01 * attention_ns
        assert sum(row.exposed_ns for row in rank.layers) == rank.breakdown.exposed_comm_ns
        assert sum(row.wait_ns + row.wire_ns for row in rank.layers) == rank.breakdown.exposed_comm_ns
    waiting = {row.layer: row.wait_ns for row in attribution.ranks[0].layers}
    assert max(waiting, key=lambda layer: waiting[layer]) == "model.layers.2" and waiting["model.layers.2"] > 3_500_000
