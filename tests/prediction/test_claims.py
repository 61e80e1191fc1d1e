"""Claims of docs/prediction-accuracy.md on errors on committed data, part by part, by dev/benchmarks/prediction.py."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

pytest.importorskip("torch", reason="a prediction runs strategies on shapes")

from dev.benchmarks import prediction
from dev.benchmarks.prediction import Score
from ringprof.errors import UsageError
from ringprof.prediction import network
from ringprof.prediction.calibration import read_calibration
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import Lognormal, MaxLognormal, predict
from ringprof.prediction.query import Query
from ringprof.prediction.schedules import schedule_of
from ringprof.prediction.score import check_rows
from ringprof.workload.workload import Workload
from scripts.scoreboard import GENERATED, QUESTIONS, with_tables
from tests.paths import ROOT


def within(scores: Sequence[Score], mean: float, most: float) -> bool:
    errors = [abs(score.error) for score in scores]
    return sum(errors) / len(errors) <= mean and max(errors) <= most


def inside(scores: Sequence[Score]) -> float:
    return sum(bool(score.inside) for score in scores) / len(scores)


ANY = (0.0, 1.0)
BURST_ROWS = ("V0035", "V0038", "V0044", "V0047", "V0060", "V0061", "V0102", "V0104", "V0132", "V0135")


@pytest.mark.parametrize(
    ("part", "rows", "count", "mean", "most", "held"),
    [
        ("shapes", (), 14, 0.01, 0.025, ANY),
        # The all-gather run converted dQ to float32 once more, which takes half a millisecond of its 12.8.
        ("masks", (), 4, 0.04, 0.125, ANY),
        ("other_heads", (), 13, 0.015, 0.035, (1.0, 1.0)),
        ("eight", (), 1, 0.06, 0.06, ANY),
        # Megatron's ring: without the gathers and scatters around its blocks it came out 12 to 28 % too fast.
        ("h100", ("V0138", "V0146", "V0202", "V0210"), 4, 0.065, 0.085, ANY),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                # The docs say that 5 % is out of reach where the host decides: one program, recorded twice, differs by
                # more. The interval shows it.
                ("host", (), 46, 9.0, 9.0, (0.7, 0.95)),
                ("host_elsewhere", (), 43, 9.0, 9.0, (0.7, 0.95)),
                ("short", (), 32, 0.05, 0.11, ANY),
                ("runs", (), 13, 0.015, 0.055, (0.7, 0.9)),
                ("strategies", (), 13, 0.015, 0.055, (0.7, 0.9)),
                ("lengths", (), 13, 0.03, 0.08, (0.7, 0.9)),
                ("replays", (), 17, 0.02, 0.02, ANY),
                # Transformer Engine's ring on 16 and 32 GPUs, forward: hops over nodes in communicators of two ranks.
                # In one communicator they are 38 % too slow.
                ("b200", ("V1047", "V1052"), 2, 0.04, 0.04, ANY),
                # Double rings at 262144 and 524288 tokens with the settings that have repeats, forward and backward.
                ("a800", BURST_ROWS, 10, 0.05, 0.06, ANY),
            ]
        ),
    ],
)
def test_errors_of_a_part(
    part: str, rows: tuple[str, ...], count: int, mean: float, most: float, held: tuple[float, float]
) -> None:
    scores = list(getattr(prediction, part)(*rows))
    assert len(scores) == count and within(scores, mean, most) and held[0] <= inside(scores) <= held[1]


def test_error_on_shapes_of_a_later_session() -> None:
    """Ten runs are bound by the device, and four, which take 2.5 to 5 ms, are in between."""
    scores = list(prediction.later())
    of_device = [score for score in scores if score.measured > prediction.HOST_MS]
    assert len(scores) == 14 and len(of_device) == 10 and within(of_device, 0.02, 0.04) and within(scores, 0.03, 0.08)


def test_error_on_shapes_of_the_last_session() -> None:
    scores = list(prediction.last())
    # megatron was measured with merges of several kernels, of which one is left.
    merged = [score for score in scores if score.name.startswith("megatron")]
    others = [score for score in scores if score not in merged]
    assert len(others) == 6 and within(others, 0.011, 0.02) and inside(others) == 1.0
    assert len(merged) == 1 and -0.05 < merged[0].error < 0


@pytest.mark.long
def test_difference_between_two_processes_on_one_host() -> None:
    """23 host-bound programs differ by 16.2 % on average, 16 device-bound ones by 0.9 %."""
    by_device = {score.name for score in prediction.short()}
    differences = {name: abs(second / first - 1) for name, (first, second) in prediction.measured_twice().items()}
    host = [difference for name, difference in differences.items() if name not in by_device]
    device = [difference for name, difference in differences.items() if name in by_device]
    assert sum(host) / len(host) == pytest.approx(0.162, abs=0.001)
    assert sum(device) / len(device) == pytest.approx(0.009, abs=0.001)


def test_error_on_h100_with_flash_attn_3() -> None:
    """The curves are of the same session, but no run is fitted to; documents and windows are further off."""
    scores, masked = list(prediction.h100_shapes()), list(prediction.h100_masks())
    # zigzag of 8192 tokens was measured when its host did more, and dK and dV were copied into the message.
    assert len(scores) == 16 and within(scores, 0.023, 0.1001) and inside(scores) == 14 / 16
    # Measured before a rank's own block was computed in two halves, which leaves out sums of gradients.
    assert len(masked) == 3 and within(masked, 0.07, 0.09)
    long = [score for score in scores if score.measured > prediction.HOST_MS and "flash-attn-3" in score.name]
    # zigzag of 16384 tokens was measured before those halves, too.
    assert len(long) == 12 and within(long, 0.02, 0.052)


def test_error_on_h200_with_flash_attn_3_that_no_curve_is_fitted_to() -> None:
    """611 and 524 TFLOP/s on 2 GPUs, and 12.83 and 12.92 ms of two recordings on one."""
    plain = Workload(seq=131072, heads=40, kv_heads=40, head_dim=128)
    windowed = replace(plain, window=4096)
    grouped = replace(plain, seq=16384, heads=32, kv_heads=8)
    queries = [
        Query("zigzag", workload, Cluster(1, ranks), "flash-attn-3", "copy" if ranks > 1 else "nccl")
        for workload, ranks in ((plain, 2), (windowed, 2), (grouped, 1))
    ]
    first, second, third = (predict(query, read_calibration("h200"), schedule_of) for query in queries)
    assert first.tflops(first.median_ns) == pytest.approx(611, rel=0.04)
    assert second.tflops(second.median_ns) == pytest.approx(524, rel=0.04)
    assert third.median_ns / 1e6 == pytest.approx(12.88, rel=0.02)


def test_error_on_other_h200_of_another_session() -> None:
    """No curve is fitted to these runs."""
    scores = list(prediction.h200_later())
    assert len(scores) == 19 and within(scores, 0.0215, 0.051) and inside(scores) == 17 / 19
    assert sum(score.error < 0 for score in scores) == 18


def test_error_on_h200_by_kernel() -> None:
    """No curve is fitted to these runs; 8192 tokens take 2.7 ms, where the host has its part."""
    scores = list(prediction.h200_kernels())
    assert len(scores) == 15 and within(scores, 0.025, 0.143) and inside(scores) == 13 / 15
    newer = [score for score in scores if "flash-attn-3" in score.name or "flash-attn-4" in score.name]
    plain = [score for score in newer if "window" not in score.name and score.measured > prediction.HOST_MS]
    assert len(newer) == 13 and len(plain) == 11 and within(plain, 0.02, 0.042)


@pytest.mark.long
def test_error_on_the_zigzag_grid_on_4_gpus() -> None:
    """The docs say that intervals are too narrow here, and that sizes which the host decides are missed."""
    scores = list(prediction.grid())
    assert within(scores, 0.035, 0.25) and 0.7 <= inside(scores) <= 0.9
    # Older code, which took a fifth more host time.
    assert within(list(prediction.grid_host()), 0.235, 0.41)
    # The bundled machine's margins are those of these runs and of the shapes of three sessions, rounded up.
    margins = {
        bound: prediction.transfer_margin(scores_of_bound, bound)
        for bound, scores_of_bound in prediction.held_out().items()
    }
    bundled = {bound: value.value for bound, value in read_calibration("h200").transfer_margin.items()}
    assert all(margins[bound] <= bundled[bound] < margins[bound] + 0.1 for bound in bundled)


def test_conformal_interval_by_hand() -> None:
    """Nine cases are off by 1 to 9 spreads: the eighth of ten, over the 1.2816 of a normal distribution."""
    prediction_stub: Any = SimpleNamespace(
        time=MaxLognormal(Lognormal(1e6, 0.01)), machine=SimpleNamespace(transfer_margin={})
    )
    scores = [Score("", math.exp(0.01 * off), 1.0, prediction=prediction_stub) for off in range(1, 10)]
    assert prediction.transfer_margin(scores, "device") == pytest.approx(8 / 1.2816, abs=0.01)


def test_error_of_peak_memory_in_the_later_session() -> None:
    """Torch holds 32 MiB besides on a GPU. The runs are of older code, which held more.

    It kept K and V of the last step, sent dK and dV, and gathered tensors. K and V had other slots than dK and dV, and
    packed documents whole shards.
    """
    ratios = []
    for shape in prediction.later_shapes():
        assert shape.peak_mib is not None
        schedule = schedule_of(shape.query, shape.query.cluster, [0, 1])
        predicted_mib = max(program.peak_bytes for program in schedule.programs) / 2**20 + 32
        ratios.append(predicted_mib / shape.peak_mib)
    assert 0.81 < min(ratios) < max(ratios) < 1.001
    assert sum(ratio > 0.99 for ratio in ratios) == 18 and len(ratios) == 29


def test_error_of_peak_memory_of_short_sequences() -> None:
    """15 of 39 runs hold up to 25 % less today; the others are predicted within 0.3 %, also small flash-attn blocks."""
    same = set()
    for shape in prediction.recorded_shapes("h200_shapes_4.csv")[:39]:
        assert shape.peak_mib is not None
        programs = schedule_of(shape.query, shape.query.cluster, None).programs
        ratio = (max(program.peak_bytes for program in programs) / 2**20 + 32) / shape.peak_mib
        assert 0.75 < ratio < 1.003
        if ratio > 0.997:
            same.add(shape.name)
    assert len(same) >= 24
    assert same > {
        "zigzag-4096-8h8kv-flash-attn-forward", "ring-12288-20h20kv-flash-attn", "double-ring-18432-12h12kv-cudnn"
    }  # fmt: skip


@pytest.mark.long
def test_error_on_published_h100_cells() -> None:
    """Causal backward passes on 16 GPUs, in which the best one leads by 2 %; the benchmark has all 60 cells."""
    scores = list(prediction.h100("V0241", "V0242", "V0243", "V0244", "V0245"))
    # Megatron's ring is 8 % too slow, with the copies that the program makes around each block.
    assert len(scores) == 5 and within(scores, 0.035, 0.085) and sum(abs(score.error) < 0.025 for score in scores) >= 3
    assert prediction.ranking(scores) == (1, 1)


def test_intervals_hold_four_of_five_published_rows_of_every_family() -> None:
    """The bundled spreads are those of the committed table; rows of a log that beats the kernel are apart."""
    table = prediction.read_csv(ROOT / "dev" / "benchmarks" / "data" / "prediction_scores.csv")
    scores = [score for part in ("h100", "b200", "a800") for score in table[part]]
    for machine, spreads in prediction.family_spreads(scores).items():
        bundled = {name: value.value for name, value in read_calibration(machine).family_spread.items()}
        assert bundled == pytest.approx(spreads, abs=0.0021)
    for family in {score.family for score in scores}:
        members = [
            score for score in scores
            if score.family == family and score.name.split()[0] not in prediction.BEATS_KERNEL
        ]  # fmt: skip
        assert 0.74 <= inside(members) <= 0.85, family


def test_rows_scored_apart_are_those_of_a_log_that_beats_the_kernel() -> None:
    """All rows of one system in one log, of which the audit finds a row faster than the kernel alone at any length."""
    a800 = [row for row in prediction.rows() if row["hardware"].startswith("A800")]

    def refuse(*_: object) -> Any:
        raise UsageError("rates are judged without a prediction")

    checked = check_rows(a800, read_calibration("a800"), refuse, Cluster(nic_gbit=200.0, gpus_per_nic=2))
    impossible = {
        (row["system"], re.findall(r"log [0-9]+", row["note"])[0])
        for row, result in zip(a800, checked, strict=True) if any(code == "above_kernel" for code, _ in result.flags)
    }  # fmt: skip
    apart = [row["id"] for row in a800 if any(row["system"] == s and log in row["note"] for s, log in impossible)]
    assert tuple(apart) == prediction.BEATS_KERNEL


def two_gpus_as_many(column: str) -> dict[tuple[str, ...], float]:
    """Return how far two GPUs are off by session, strategy, kernel, transport, tokens, heads and recording."""
    table = prediction.read_csv(ROOT / "dev" / "benchmarks" / "data" / "prediction_scores.csv")
    recorded = {score.name: score.measured for part in ("runs", "eight") for score in table[part]}
    errors = {}
    with open(ROOT / "dev" / "benchmarks" / "data" / "two_gpus_as_many.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            many = [float(row[name]) for name in ("four_ms", "four_again_ms") if row[name]]
            many += [recorded[Path(row["recording"]).name]] if row["recording"] else []
            key = tuple(row[name] for name in ("session", "strategy", "kernel", "hops", "seq", "kv_heads", "recording"))
            if row[column]:
                errors[key] = float(row[column]) / (sum(many) / len(many)) - 1
    return errors


SHORT_HOPS = ("B", "zigzag", "cudnn", "nccl", "16384", "40", "")


def test_two_gpus_that_stand_for_four_are_within_three_percent_of_them() -> None:
    """All but one case whose hops decide and are shorter than 128 MiB."""
    for column, count, mean, low, high in (
        ("two_ms", 12, 0.0075, -0.016, 0.0165),
        ("other_two_ms", 9, 0.0185, -0.03, 0),
    ):
        errors = two_gpus_as_many(column)
        assert -0.145 < errors.pop(SHORT_HOPS) < -0.14
        compared = [error for (*_, recording), error in errors.items() if not recording]
        assert len(compared) == count and low <= min(compared) and max(compared) < high
        assert sum(map(abs, compared)) / count < mean


def test_two_gpus_are_within_three_percent_of_recordings_of_four_and_eight() -> None:
    """Recordings of other hosts and days, all of them slower; by both pairs of GPUs."""
    first, other = (
        {key: error for key, error in two_gpus_as_many(column).items() if key[-1]}
        for column in ("two_ms", "other_two_ms")
    )
    assert len(first) == 5 and len(other) == 2
    assert all(-0.027 < error < -0.007 for error in (*first.values(), *other.values()))


def test_channels_between_two_ranks_explain_what_two_gpus_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's rule: a hop of 84 MB has 16 channels between two ranks and 8 among four, one of 168 MB equally many."""

    def predicted_ms(seq: int) -> float:
        workload = Workload(seq=seq, heads=40, kv_heads=40, head_dim=128)
        query = Query("zigzag", workload, Cluster(1, 4), "cudnn", "nccl")
        return predict(query, read_calibration("h200"), schedule_of).median_ns / 1e6

    four = {seq: predicted_ms(seq) for seq in (16384, 32768)}
    rule = network.channels
    monkeypatch.setattr(network, "channels", lambda message, ranks, *rest: rule(message, 2, *rest))
    assert predicted_ms(16384) / four[16384] - 1 == pytest.approx(two_gpus_as_many("two_ms")[SHORT_HOPS], abs=0.01)
    assert predicted_ms(32768) == pytest.approx(four[32768])


@pytest.mark.parametrize("name", GENERATED)
def test_tables_of_errors_are_those_of_the_committed_scores(name: str) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert page == with_tables(name, page), "python -m scripts.scoreboard"


def test_every_part_is_counted_in_at_most_one_question() -> None:
    """Left out are parts that score rows of other parts again: by other machines, or by what was recorded with them."""
    parts = [part for parts in QUESTIONS.values() for part in parts]
    assert len(parts) == len(set(parts))
    assert prediction.PARTS.keys() - set(parts) == {"runs", "strategies", "lengths", "eight", "plain_masks"}


def test_spread_of_a_family_by_hand() -> None:
    """Five rows of a spread of their own of 3 %, off by 1 to 5 %, each times 1.2816: four of five need sqrt(7) %."""
    rows = [
        Score(str(off), math.exp(0.012816 * off), 1.0, math.exp(-0.038448), math.exp(0.038448), machine="h200")
        for off in range(1, 6)
    ]
    assert prediction.family_spread(rows) == pytest.approx(0.01 * math.sqrt(7), abs=0.001)


@pytest.mark.long
def test_error_on_all_published_h100_cells() -> None:
    scores = [score for score in prediction.h100() if score.hosts > 1]
    assert len(scores) == 60 and within(scores, 0.035, 0.085)
    good, cells = prediction.ranking(scores)
    assert cells == 12 and good >= 11
