"""Predictions of linear recurrences: dry runs against runs on CPU ranks, curves against formulas."""

from __future__ import annotations

import json
import math
import re
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch", reason="dry runs need torch")

import torch

from dev.benchmarks import recurrent_prediction
from ringprof.cli import run as run_command
from ringprof.dryrun.schedule import CommStart, MemoryOp, RecurrenceOp
from ringprof.errors import UnsupportedWorkloadError, UsageError
from ringprof.iteration.recurrence import RecurrenceShard
from ringprof.iteration.shard import counted_work, reset_counts
from ringprof.prediction.advise import advise
from ringprof.prediction.as_run import write_prediction
from ringprof.prediction.calibration import (
    Calibration,
    RecurrencePoint,
    calibration_json,
    parse_calibration,
    read_calibration,
)
from ringprof.prediction.host_model import host_ns
from ringprof.prediction.kernel_model import OutsideCalibration
from ringprof.prediction.measure_recurrences import (
    curves_from,
    measure_recurrences,
    measured_curve,
    recurrence_case,
    recurrence_cases,
)
from ringprof.prediction.microbenchmark import Bench
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import predict, prediction_dict
from ringprof.prediction.query import Query
from ringprof.prediction.recurrence_curves import RECURRENCE_PASS_US, RecurrenceCurves, recurrence_curves_of
from ringprof.prediction.schedules import schedule, schedule_of
from ringprof.prediction.text import remarks
from ringprof.results.load import load
from ringprof.run import Work
from ringprof.strategies import create_recurrent
from ringprof.strategies.recurrent.registry import STRATEGIES
from ringprof.workload.recurrences import RECURRENCES, Operator
from ringprof.workload.workload import Workload
from tests.paths import ROOT
from tests.strategies.ranks import run_ranks

PAGE = ROOT / "docs" / "hybrid-models.md"
WORK = Workload(seq=128, heads=4, kv_heads=4, head_dim=8, operator="gdn", dtype="fp32")
NS_PER_TOKEN_AND_HEAD = {("forward", "local"): 1.0, ("forward", "block"): 2.0, ("backward", "local"): 2.5,
                         ("backward", "block"): 4.0}  # fmt: skip
HOST_US = 250.0


def workloads() -> list[Workload]:
    documents = (None, (50, 78), (32, 32, 64), (10, 30, 70, 18))
    changed = [
        msgspec.structs.replace(WORK, operator=operator, documents=lengths, conv_width=width)
        for operator, lengths, width in product(RECURRENCES, documents, (None, 4))
    ]
    others: list[dict[str, Any]] = [{"kv_heads": 2}, {"v_head_dim": 16, "batch": 2}, {"backward": False}]
    return changed + [msgspec.structs.replace(WORK, **change) for change in others]


def recorded_work(rank: int) -> list[Work]:
    """Run every workload with every strategy; return what this rank computed and sent."""
    works = []
    for name in STRATEGIES:
        strategy = create_recurrent(name, kernel="reference")
        for workload in workloads():
            shard = RecurrenceShard.create(strategy, workload, torch.device("cpu"))
            reset_counts([strategy])
            shard.run_iteration()
            works.append(counted_work([strategy]))
    return works


@pytest.mark.processes
def test_a_dry_run_computes_and_sends_what_ranks_do() -> None:
    by_rank = run_ranks(4, recorded_work)
    for number, (name, workload) in enumerate(product(STRATEGIES, workloads())):
        programs = schedule(name, workload, 4).programs
        for rank, works in enumerate(by_rank):
            assert sent(programs[rank].work) == sent(works[number]), (name, workload, rank)
            assert programs[rank].work.block_flops == works[number].block_flops
            assert programs[rank].work.block_calls == works[number].block_calls


def sent(work: Work) -> list[Any]:
    return sorted((x.channel, x.phase, x.operation, x.link, x.to or -1, x.count, x.sent_bytes) for x in work.sent or ())


def test_states_travel_whatever_the_length_and_heads_with_it() -> None:
    def bytes_of(name: str, seq: int) -> int:
        workload = msgspec.structs.replace(WORK, seq=seq, dtype="bf16")
        return sum(each.sent_bytes for each in schedule(name, workload, 4).programs[1].work.sent or ())

    # A state of 4 heads of 8 x 8 numbers of 4 bytes, forward and back.
    assert bytes_of("state-ring", 128) == bytes_of("state-ring", 1024) == 2 * 4 * 8 * 8 * 4
    assert bytes_of("state-scan", 128) == bytes_of("state-scan", 1024)
    assert bytes_of("state-a2a", 1024) == 8 * bytes_of("state-a2a", 128)


def test_the_short_convolution_is_one_kernel_per_pass() -> None:
    """In bfloat16; it reads and writes the tokens, and backward reads two tensors of them and writes one; half as fast
    as other kernels."""
    workload = msgspec.structs.replace(WORK, dtype="bf16", conv_width=4)
    moved = [
        op.bytes for op in schedule("state-scan", workload, 2).programs[0].ops
        if isinstance(op, MemoryOp) and op.name == "causal_conv1d"
    ]  # fmt: skip
    channels = 2 * workload.kv_heads * workload.head_dim + workload.heads * workload.value_dim
    once = workload.seq // 2 * channels * 2
    assert moved == [2 * 2 * once, 2 * 3 * once]


def test_a_chain_of_two_ranks_matches_on_both() -> None:
    first, second = (program.ops for program in schedule("state-ring", WORK, 2).programs)
    ends = [[(op.members, op.communicator) for op in ops if isinstance(op, CommStart)] for ops in (first, second)]
    assert ends[0] == ends[1] == [((0, 1), "state:0,1/0,1"), ((1, 0), "state:0,1/0,1")]


@pytest.mark.parametrize(
    ("operator", "tokens", "inputs_mib", "measured_gib"),
    [("simple-gla", 65_536, 1028, 3.04), ("gla", 65_536, 1536, 6.03), ("gdn", 16_384, 258, 0.93)],
)
def test_memory_is_the_peak_of_the_allocator(
    operator: Operator, tokens: int, inputs_mib: int, measured_gib: float
) -> None:
    """`dev/benchmarks/recurrent_speed.py` on H200, gdn on an H100: what a call allocates beside its inputs."""
    workload = Workload(seq=2 * tokens, heads=16, kv_heads=16, head_dim=128, operator=operator)
    peak_bytes = max(program.peak_bytes for program in schedule("state-scan", workload, 2).programs)
    assert peak_bytes / 2**20 - inputs_mib == pytest.approx(1024 * measured_gib, rel=0.02)


# --- curves -----------------------------------------------------------------------------------------


def made_up(operators: tuple[Operator, ...] = ("gdn",)) -> Calibration:
    """Return an H200 whose recurrences take a time for each token and head."""
    kernels = {"gdn": "gated_delta_rule", "simple-gla": "simple_gla", "gla": "gla"}
    samples = [
        measured_curve(
            "fla", msgspec.structs.replace(case, phase=phase, part=part),
            RecurrencePoint(case.tokens, ns * case.tokens * case.heads, 0.01, HOST_US), "made up",
        )
        for case in recurrence_cases([kernels[name] for name in operators])
        for (phase, part), ns in NS_PER_TOKEN_AND_HEAD.items()
    ]  # fmt: skip
    return msgspec.structs.replace(read_calibration("h200"), recurrences=curves_from(samples))


def part(tokens: int, heads: int, **changes: Any) -> RecurrenceOp:
    fields = {
        "label": "", "phase": "forward", "part": "local", "operator": "gated_delta_rule", "batch": 1, "tokens": tokens,
        "heads": heads, "head_dim": 128, "v_head_dim": 128, "receives": False, "sends": False,
    }  # fmt: skip
    return RecurrenceOp(**{**fields, **changes})


@pytest.mark.parametrize("tokens", [2048, 3000, 16384, 50_000, 131_072, 300_000])
@pytest.mark.parametrize("heads", [4, 8, 12, 16, 24, 32, 48])
def test_a_time_that_grows_with_the_work_is_reproduced(tokens: int, heads: int) -> None:
    curves = RecurrenceCurves(made_up(), "fla")
    assert curves.estimate(part(tokens, heads)).ns == pytest.approx(tokens * heads)
    assert curves.host_us(part(tokens, heads)) == pytest.approx(HOST_US)
    assert curves.estimate(part(tokens, heads // 2, batch=2)).ns == pytest.approx(tokens * (heads // 2 * 2))


def test_spread_grows_outside_of_the_samples_until_it_is_refused() -> None:
    curves = RecurrenceCurves(made_up(), "fla")
    inside, outside = (curves.estimate(part(tokens, 16)).spread for tokens in (4096, 262_144))
    assert outside == pytest.approx(inside + 0.1)
    with pytest.raises(OutsideCalibration, match="2048 to 131072 tokens"):
        curves.estimate(part(1 << 21, 16))
    # Below the shortest sample fixed costs decide: the time stays.
    assert curves.estimate(part(1024, 16)).ns == curves.estimate(part(2048, 16)).ns


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"head_dim": 64}, "no curve of gated_delta_rule with keys of 64 and values of 128: it has heads of 128 and"),
        ({"operator": "gla"}, "it has curves of gated_delta_rule alone"),
    ],
)
def test_a_part_without_a_curve_is_refused_in_one_line(change: Any, says: str) -> None:
    with pytest.raises(OutsideCalibration, match=says) as refusal:
        RecurrenceCurves(made_up(), "fla").estimate(part(4096, 16, **change))
    assert "\n" not in str(refusal.value)


# --- predictions ------------------------------------------------------------------------------------


def query(strategy: str, gpus: int, **changes: Any) -> Query:
    workload = Workload(seq=131_072, heads=16, kv_heads=16, head_dim=128, operator="gdn")
    return Query(strategy, msgspec.structs.replace(workload, **changes), Cluster(hosts=1, gpus_per_host=gpus))


def test_one_gpu_takes_the_time_of_its_curves() -> None:
    prediction = predict(query("state-scan", 1), made_up(), schedule_of, draws=3)
    expected_ns = 131_072 * 16 * sum(NS_PER_TOKEN_AND_HEAD.values())
    kernel_ns = prediction.breakdown.total("kernel")
    assert kernel_ns == pytest.approx(expected_ns, rel=0.05)
    assert prediction.breakdown.total("peers", "same_host") == 0
    forward = next(row for row in prediction_dict(prediction)["inputs"] if row["name"] == "forward_kernel_curves")
    # The curves are uncertain by more than what they add to the time's uncertainty: only a part of the time is theirs.
    share = prediction.breakdown.forward["kernel"] / prediction.median_ns
    added = prediction_dict(prediction)["uncertainty"]["forward kernel"]
    assert 0.1 < share < 0.9 and forward["spread"] * share == pytest.approx(added, rel=0.1)


@pytest.mark.parametrize("backward", [True, False])
def test_the_host_pays_for_a_pass_at_its_first_part(backward: bool) -> None:
    machine, workload = made_up(), query("state-scan", 2, backward=backward).workload
    program, curves = schedule("state-scan", workload, 2).programs[0], recurrence_curves_of(machine, "fla")
    call_us = machine.host.call_us.value
    beyond = [
        (op.phase, op.part, round(ns / 1e3 - op.calls * call_us - HOST_US, 6))
        for op, ns in zip(program.ops, host_ns(machine, curves.kernel, program), strict=True)
        if isinstance(op, RecurrenceOp) and op.part == "local"
    ]  # fmt: skip
    passes = ["forward", "backward"][: 1 + backward]
    assert beyond[0] == ("forward", "local", RECURRENCE_PASS_US)
    assert [phase for phase, _, us in beyond if us >= RECURRENCE_PASS_US] == passes


def test_a_ring_of_states_waits_for_all_ranks_before_it() -> None:
    machine = made_up()
    four = predict(query("state-ring", 4), machine, schedule_of, draws=3)
    waits = [
        sum(
            timeline.ops[index][1] - timeline.ops[index][0]
            for index, op in enumerate(program.ops)
            if getattr(op, "id", None) is not None and not isinstance(op, CommStart) and index < len(program.ops) // 2
        )
        for program, timeline in zip(four.schedule.programs, four.timelines, strict=True)
    ]
    # Forward, a rank waits for one hop more than the rank before it.
    assert waits == sorted(waits)
    latency_ns = 1e3 * machine.same_host.latency_us.value
    assert waits[3] - waits[0] > 2.5 * latency_ns


def test_a_prediction_is_written_as_a_run_that_other_commands_read(tmp_path: Path) -> None:
    for name in STRATEGIES:
        run = write_prediction(predict(query(name, 2), made_up(), schedule_of, draws=3), tmp_path / name, ["ringprof"])
        assert run.kernel == "fla"
        breakdown = load(tmp_path / name).breakdown()
        assert len(breakdown) == 2
        assert (breakdown["compute_ns"] > 0).all()


def test_more_ranks_than_are_simulated() -> None:
    scan = query("state-scan", 8, seq=1 << 22)
    large = Query("state-scan", scan.workload, Cluster(hosts=32, gpus_per_host=8, nic_gbit=400.0))
    assert predict(large, made_up(), schedule_of, draws=3).median_ns > 0
    with pytest.raises(UnsupportedWorkloadError, match="state-ring"):
        predict(Query("state-ring", large.workload, large.cluster), made_up(), schedule_of)


def test_refusals_in_one_line() -> None:
    with pytest.raises(UsageError, match="no curves of recurrences with kernel 'fla': it has none"):
        predict(query("state-scan", 2), msgspec.structs.replace(made_up(), recurrences=[]), schedule_of)
    with pytest.raises(UsageError, match="predicted with kernel fla alone"):
        Query("state-scan", WORK, Cluster(hosts=1, gpus_per_host=2), kernel="cudnn").kernel_on(made_up())
    with pytest.raises(UnsupportedWorkloadError, match="3 ranks do not divide"):
        schedule("state-a2a", msgspec.structs.replace(WORK, seq=96), 3)


def test_advice_is_for_attention() -> None:
    with pytest.raises(UnsupportedWorkloadError, match="only strategies for attention"):
        advise(query("state-scan", 2).workload, Cluster(hosts=1, gpus_per_host=2), made_up(), schedule_of)


def test_the_command_predicts_a_recurrence(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(calibration_json(made_up()))
    assert parse_calibration(path.read_bytes(), "machine") == made_up()
    options = ["predict", "--operator", "gdn", "--strategy", "state-scan", "--seq", "64k", "--heads", "16"]
    assert run_command([*options, "--gpus-per-node", "2", "--machine", str(path), "--format", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["question"]["kernel"] == "fla"
    assert answer["question"]["workload"]["operator"] == "gdn"
    assert run_command([*options, "--gpus-per-node", "2", "--machine", str(path)]) == 0
    assert "attention" not in capsys.readouterr().out
    assert run_command([*options, "--strategy", "zigzag", "--machine", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_no_remedy_is_named_that_recording_refuses() -> None:
    """A recurrence's hops go by NCCL alone, so copied hops are no remedy for hops that are exposed."""
    heads_travel = query("state-a2a", 4)
    result = predict(heads_travel, made_up(), schedule_of, draws=3)
    assert heads_travel.hops == "nccl"
    assert result.breakdown.total("same_host") > 0.2 * result.median_ns
    assert "copy" not in "".join(remarks(result))


def test_errors_of_timed_shapes_are_those_that_the_page_states() -> None:
    every = [score for name in ("h200", "h100") for score in recurrent_prediction.scores(read_calibration(name))]
    plain = [score for score in every if not score.workload.conv_width]
    rows = re.findall(
        r"^\| (H\d00) \| ([\d,]+).* \| ([\u2212+][\d.]+) to ([\u2212+][\d.]+) % \| ([\d.]+) % \| (\d+) of (\d+) \|$",
        PAGE.read_text(encoding="utf-8"), re.MULTILINE,
    )  # fmt: skip
    assert len(rows) == 6 and sum(int(row[-1]) for row in rows) == len(plain) == 96
    for gpu, tokens, least, most, mean, inside, count in rows:
        shortest = int(tokens.replace(",", ""))
        own = [
            score for score in plain if score.machine.upper() == gpu
            and (score.tokens == shortest or score.tokens > 49152 == shortest)
        ]  # fmt: skip
        errors = [100 * score.error for score in own]
        tolerance = 0.3 if shortest == 49152 and gpu == "H200" else 0.8
        stated = [float(number.replace("\u2212", "-")) for number in (least, most, mean)]
        assert [min(errors), max(errors), sum(map(abs, errors)) / len(own)] == pytest.approx(stated, abs=tolerance)
        assert (sum(score.inside for score in own), len(own)) == (int(inside), int(count))
    convolved = {
        (score.workload.operator, score.tokens): round(100 * score.error)
        for score in every if score.workload.conv_width
    }  # fmt: skip
    assert convolved == {
        ("gdn", 16384): -7, ("gdn", 49152): -5, ("mamba2", 16384): -17, ("mamba2", 49152): 7
    }  # fmt: skip
    missing_mib = [score.memory_mib[0] - score.memory_mib[1] for score in plain if score.memory_mib]
    assert len(missing_mib) == 96 and all(45 < missing < 100 for missing in missing_mib)


# --- calibration ------------------------------------------------------------------------------------


def test_every_part_is_measured_on_a_device() -> None:
    cases = [recurrence_case("gated_delta_rule", 64, 1, *ends) for ends in ((False, False), (True, True))]
    curves = measure_recurrences(Bench(torch.device("cpu")), math.inf, "reference", cases)
    parts = {(curve.phase, curve.part, curve.receives) for curve in curves}
    assert len(curves) == len(parts) == 8
    assert all(curve.kernel == "reference" and curve.points[0].tokens == 64 for curve in curves)
    assert all(point.ns > 0 and point.host_us > 0 for curve in curves for point in curve.points)
    assert measure_recurrences(Bench(torch.device("cpu")), 0.0, "reference", cases) == []
