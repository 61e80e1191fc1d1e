"""Matrix products by shape and communication by size, against loops over the events of random traces."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import ringprof
from ringprof import cli
from tests.analysis.trace_text import TraceText
from tests.loaded import analysis
from tests.paths import TRACES

BF16, FP32 = "c10::BFloat16", "float"
GEMM, OTHER = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "void at::native::vectorized_elementwise_kernel<4>()"
DTYPES = {BF16: "bf16", FP32: "fp32"}


def product_trace(rng: random.Random, rank: int) -> TraceText:
    """Write random operators with shapes, nested as PyTorch nests them, and the kernels that they launch."""
    trace, device_free, host = TraceText(rank, world_size=2), 0, 0
    for _ in range(rng.randint(15, 30)):
        thread, start = rng.choice((1, 2)), host
        m, n, k, batch = (rng.choice((8, 16, 64)) for _ in range(4))
        dtype = rng.choice((BF16, FP32))
        kernels = [rng.choice((GEMM, GEMM, OTHER)) for _ in range(rng.randint(0, 3))]
        position = start + 200
        for name in kernels:
            begin = max(device_free, position) + rng.randint(0, 50)
            device_free = begin + rng.randint(1, 900)
            trace.run(begin, device_free, (position, position + 40), name=name, thread=thread)
            position += 50
        host = position + 100
        name, dims = rng.choice((
            ("aten::mm", [[m, k], [k, n]]),
            ("aten::addmm", [[n], [m, k], [k, n]]),
            ("aten::bmm", [[batch, m, k], [batch, k, n]]),
            ("aten::gelu", [[m, k]]),
        ))  # fmt: skip
        inputs: dict[str, Any] = {"Input Dims": dims, "Input type": [dtype] * len(dims)}
        if rng.random() < 0.3:
            # A tensor of a whole mesh around its shard: the inner call did the work.
            whole = [[2 * size for size in shape] for shape in dims]
            trace.event("cpu_op", name, start + 10, host - 10, thread, **{**inputs, "Input Dims": whole})
        trace.event("cpu_op", name, start + 20, host - 20, thread, **inputs)
        trace.operator("aten::linear", start, host, thread)
        host += rng.randint(10, 300)
    return trace


def products_by_hand(traces: list[TraceText]) -> dict[Any, list[int]]:
    """Sum calls, time and FLOPs by (batch, m, n, k, dtype), one kernel after another."""
    sums: dict[Any, list[int]] = defaultdict(lambda: [0, 0, 0])
    for trace in traces:
        calls = {row["args"]["correlation"]: row for row in trace.rows if row["cat"] == "cuda_runtime"}
        operators = [row for row in trace.rows if "Input Dims" in row["args"] and row["name"] != "aten::gelu"]
        launching = set()
        for kernel in (row for row in trace.rows if row["cat"] == "kernel" and row["name"] == GEMM):
            call = calls[kernel["args"]["correlation"]]
            around = [
                operator for operator in operators
                if operator["tid"] == call["tid"] and operator["ts"] <= call["ts"] < operator["ts"] + operator["dur"]
            ]  # fmt: skip
            time = round(1000 * kernel["dur"])
            if not around:
                sums[None][0] += 1
                sums[None][1] += time
                continue
            operator = min(around, key=lambda row: row["dur"])
            left, right = operator["args"]["Input Dims"][-2:]
            batch = left[0] if len(left) == 3 else 1
            key = batch, left[-2], right[-1], left[-1], DTYPES[operator["args"]["Input type"][0]]
            sums[key][1] += time
            if id(operator) not in launching:
                launching.add(id(operator))
                sums[key][0] += 1
                sums[key][2] += 2 * batch * left[-2] * right[-1] * left[-1]
    return dict(sums)


@pytest.mark.parametrize("seed", range(12))
def test_products_by_shape_are_those_of_a_loop_over_kernels(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    traces = [product_trace(rng, rank) for rank in range(2)]
    for trace in traces:
        trace.write(tmp_path)
    truth = products_by_hand(traces)
    run = analysis(tmp_path)
    frame = run.gemms()
    rows = frame.astype(object).where(frame.notna(), None).itertuples(index=False)
    by_shape = {
        None if row.m is None else (row.batch, row.m, row.n, row.k, row.dtype): [row.calls, row.time_ns, row.flops or 0]
        for row in rows
    }
    assert by_shape == truth
    kind_ns = sum(rank["kinds_ns"].get("gemm", 0) for rank in run.report()["ranks"])
    assert frame.time_ns.sum() == kind_ns
    rates = frame.dropna(subset=["m"])
    assert rates.tflops.tolist() == pytest.approx((rates.flops / rates.time_ns / 1e3).tolist())
    assert frame.share.sum() == pytest.approx(1.0)


def test_share_of_peak_is_of_the_devices_dense_rate(tmp_path: Path) -> None:
    """One product of 8192 cubed in 2 ms on an H100, whose data sheet says 989.4 TFLOP/s (SXM, dense bf16)."""
    trace = TraceText()
    inputs: dict[str, Any] = {"Input Dims": [[8192, 8192]] * 2, "Input type": [BF16] * 2}
    trace.event("cpu_op", "aten::mm", 0, 500, **inputs)
    trace.run(1000, 2_001_000, (100, 200), name=GEMM)
    text = json.loads(trace.text()) | {"deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]}
    (tmp_path / "rank0.json").write_text(json.dumps(text))
    (row,) = analysis(tmp_path / "rank0.json").gemms().itertuples(index=False)
    assert row.tflops == pytest.approx(2 * 8192**3 / 2e-3 / 1e12)
    assert row.peak_share == pytest.approx(row.tflops / 989.4, rel=1e-3)


# --- communication --------------------------------------------------------------------------------------

SIZES = {"BFloat16": 2, "Float": 4}
NAMES = {
    "all_reduce": ("allreduce", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"),
    "all_gather": ("_allgather_base", "ncclDevKernel_AllGather_RING_LL"),
    "reduce_scatter": ("_reduce_scatter_base", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"),
    "broadcast": ("broadcast", "ncclDevKernel_Broadcast_RING_LL"),
}


def collective_traces(rng: random.Random, world: int) -> list[TraceText]:
    """Write random collectives of all ranks and of pairs; each ends at one moment on all its ranks."""
    traces = [TraceText(rank, world) for rank in range(world)]
    groups = {"0": ("dp", list(range(world))), "1": ("tp", [0, 1]), "2": ("tp", [2, 3])}
    free, launches = [10_000] * world, [0] * world
    for _ in range(25):
        name = rng.choice(list(groups))
        description, ranks = groups[name]
        kind = rng.choice(list(NAMES))
        elements, dtype = rng.choice((240, 4800)), rng.choice(list(SIZES))
        starts = {rank: free[rank] + rng.randint(0, 3000) for rank in ranks}
        end = max(starts.values()) + rng.randint(500, 5000)
        outputs = {"all_gather": elements * len(ranks), "reduce_scatter": elements // len(ranks)}.get(kind, elements)
        for rank in ranks:
            args = {
                "Collective name": NAMES[kind][0], "In msg nelems": elements, "Out msg nelems": outputs, "dtype": dtype,
                "Group size": len(ranks), "Process Group Name": name, "Process Group Description": description,
                "Process Group Ranks": str(ranks), "In split size": "[]", "Out split size": "[]",
            }  # fmt: skip
            call = traces[rank].call("cudaLaunchKernelExC", launches[rank], launches[rank] + 20)
            traces[rank].activity("kernel", NAMES[kind][1], starts[rank], end, 20, correlation=call, **args)
            free[rank], launches[rank] = end, launches[rank] + 30
    return traces


def collectives_by_hand(traces: list[TraceText]) -> dict[Any, list[Any]]:
    """Sum calls, time, waiting and bus traffic by (kind, group, ranks, size), matching the n-th calls of a group."""
    calls: dict[Any, list[Any]] = defaultdict(list)
    for trace in traces:
        numbers: dict[str, int] = defaultdict(int)
        for row in sorted((row for row in trace.rows if row["cat"] == "kernel"), key=lambda row: row["ts"]):
            group = row["args"]["Process Group Name"]
            calls[group, numbers[group]].append(row)
            numbers[group] += 1
    sums: dict[Any, list[Any]] = defaultdict(lambda: [0, 0, 0, Fraction(0)])
    for rows in calls.values():
        latest = max(round(1000 * row["ts"]) for row in rows)
        for row in rows:
            args, n = row["args"], row["args"]["Group size"]
            kind = next(kind for kind, names in NAMES.items() if names[0] == args["Collective name"])
            # nccl-tests: the size of an all-gather is its output, of a reduce-scatter its input.
            count = args["Out msg nelems"] if kind == "all_gather" else args["In msg nelems"]
            size = count * SIZES[args["dtype"]]
            factor = {"all_reduce": Fraction(2 * (n - 1), n), "broadcast": Fraction(1)}.get(kind, Fraction(n - 1, n))
            sums_of_key = sums[kind, args["Process Group Description"], n, size]
            sums_of_key[0] += 1
            sums_of_key[1] += round(1000 * row["dur"])
            sums_of_key[2] += latest - round(1000 * row["ts"])
            sums_of_key[3] += size * factor
    return dict(sums)


@pytest.mark.parametrize("seed", range(8))
def test_collectives_by_size_are_those_of_a_loop_over_kernels(seed: int, tmp_path: Path) -> None:
    traces = collective_traces(random.Random(seed), 4)
    for trace in traces:
        trace.write(tmp_path)
    truth = collectives_by_hand(traces)
    frame = analysis(tmp_path).collectives()
    by_key = {(row.kind, row.group, row.ranks, row.size_bytes): row for row in frame.itertuples(index=False)}
    assert by_key.keys() == truth.keys()
    for key, (calls, time_ns, wait_ns, bus_bytes) in truth.items():
        row = by_key[key]
        assert (row.calls, row.time_ns, row.wait_ns) == (calls, time_ns, wait_ns)
        assert row.busbw_gbps == pytest.approx(float(bus_bytes / time_ns))
        assert row.wire_busbw_gbps == pytest.approx(float(bus_bytes / (time_ns - wait_ns)))


def test_communication_by_size_sums_to_the_kinds_of_committed_runs() -> None:
    for name in ("h200x2-zigzag-65536-layer", "h200x4-usp-262144", "h200x4-zigzag-65536-copied"):
        run = analysis(TRACES / name)
        by_kind = run.collectives().groupby("kind").time_ns.sum().to_dict()
        ranks = run.report()["ranks"]
        kinds = {kind for rank in ranks for kind in rank["kinds_ns"]} & by_kind.keys()
        assert by_kind == {kind: sum(rank["kinds_ns"][kind] for rank in ranks) for kind in kinds}


@pytest.mark.parametrize("name", ["h200x4-zigzag-262144", "h200x4-ring-262144", "h200x4-zigzag-65536-copied"])
def test_send_and_receive_have_the_bytes_and_times_of_the_hops(name: str) -> None:
    run = analysis(TRACES / name)
    rows = run.collectives()
    rows = rows[rows["kind"].isin(["send_recv", "copy_engine"])]
    hops = run.hops().groupby("bytes").agg(calls=("bytes", "size"), wait=("wait_ns", "sum"), wire=("wire_ns", "sum"))
    sizes = dict(zip(rows["size_bytes"], rows["calls"], strict=True))
    if not name.endswith("copied"):
        assert sizes == hops["calls"].to_dict()
        for row in rows.itertuples():
            hop = hops.loc[row.size_bytes]
            assert (row.time_ns, row.wait_ns) == (hop.wait + hop.wire, hop.wait)
            assert row.wire_busbw_gbps == pytest.approx(row.size_bytes * hop.calls / hop.wire)
    # A copied hop may be several copies.
    assert sum(size * calls for size, calls in sizes.items()) == run.hops()["bytes"].sum()


def test_report_lists_both_and_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    product_trace(random.Random(1), 0).write(tmp_path)
    assert cli.run(["report", str(tmp_path), "--show", "gemms,collectives"]) == 0
    shown = capsys.readouterr().out
    assert "matrix products" in shown and "TFLOP/s" in shown and "collectives: none in these traces" in shown
    assert cli.run(["report", str(TRACES / "cpu4-burst-4096"), "--show", "gemms"]) == 0
    assert "no shapes are recorded" in capsys.readouterr().out
    assert ringprof.load(TRACES / "cpu4-burst-4096").report()["summary"]["collectives"] == []
