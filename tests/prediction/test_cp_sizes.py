"""Plans of dynamic context parallelism against brute force: sizes, packing, balance per rank and step, times."""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest

pytest.importorskip("torch", reason="times are of dry runs")

from ringprof import cli
from ringprof.errors import UsageError
from ringprof.prediction.calibration import read_calibration
from ringprof.prediction.cp_sizes import TIMED_STEPS, Documents, packed, plan, times_on
from ringprof.prediction.kernel_model import OutsideCalibration
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import predict
from ringprof.prediction.query import Query
from ringprof.prediction.schedules import schedule_of
from ringprof.workload.workload import Workload


def fewest_sequences(lengths: list[int], capacity: int) -> int:
    """Return the smallest number of sequences that hold the documents, by trying every assignment."""
    for count in range(1, len(lengths) + 1):
        for assignment in product(range(count), repeat=len(lengths)):
            filled = [0] * count
            for length, index in zip(lengths, assignment, strict=True):
                filled[index] += length
            if max(filled) <= capacity:
                return count
    raise AssertionError


@pytest.mark.parametrize("seed", range(20))
def test_packing_holds_all_documents_in_few_sequences(seed: int) -> None:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 50, size=generator.integers(1, 7)).tolist()
    sequences = packed(lengths, 60)
    assert sorted(length for sequence in sequences for length in sequence) == sorted(lengths)
    assert all(sum(sequence) <= 60 for sequence in sequences)
    # The bound of first-fit decreasing (Dósa 2007).
    assert len(sequences) <= 11 / 9 * fewest_sequences(lengths, 60) + 6 / 9


@pytest.mark.parametrize("seed", range(20))
def test_the_plan_is_what_the_ranks_do(seed: int) -> None:
    """Count the pairs of every rank in every step by hand, from the sequences alone."""
    generator = np.random.default_rng(seed)
    world, capacity, sizes = 8, 64, [1, 2, 8]
    lengths = np.minimum(1 + generator.lognormal(3.0, 1.2, size=60).astype(int), 8 * capacity).tolist()
    result = plan(lengths, world, sizes, capacity)
    total, alone, rows = result["all"], result["all on 8"], [row for name, row in result.items() if name.isdigit()]
    steps_of_all = 0
    slowest_of_all = pairs_of_all = 0.0
    for row in rows:
        smaller = [size for size in sizes if size < row.size]
        own = [x for x in lengths if x <= row.size * capacity and all(x > size * capacity for size in smaller)]
        assert row.documents == len(own) and row.tokens_share == pytest.approx(sum(own) / sum(lengths))
        sequences = packed(own, row.size * capacity)
        counts = (sum(1 for x in sequence for i in range(x) for _ in range(i + 1)) for sequence in sequences)
        work = sorted(counts, reverse=True)
        groups = world // row.size
        steps = [work[first : first + groups] for first in range(0, len(work), groups)]
        ranks = np.array([[group / row.size for group in step for _ in range(row.size)]
                          + [0.0] * (world - row.size * len(step)) for step in steps])  # fmt: skip
        assert (row.sequences, row.steps) == (len(sequences), len(steps))
        assert row.busiest == pytest.approx(ranks.max(1).sum() / (ranks.sum() / world))
        assert row.filled == pytest.approx(sum(own) / (len(steps) * world * capacity))
        steps_of_all += len(steps)
        slowest_of_all += ranks.max(1).sum()
        pairs_of_all += ranks.sum()
    assert sum(row.flops_share for row in rows) == pytest.approx(1.0)
    assert total.steps == steps_of_all
    assert total.busiest == pytest.approx(slowest_of_all / (pairs_of_all / world))
    assert alone.sequences == len(packed(lengths, 8 * capacity)) == alone.steps


def pairs_of(documents: Documents) -> int:
    return sum(length * (length + 1) // 2 for length in documents)


def test_times_of_steps_add_up() -> None:
    """Where time follows from work by a straight line, interpolated steps are exact; few sequences are timed."""
    timed: list[tuple[Documents, int]] = []

    def time_of(documents: Documents, size: int) -> float:
        timed.append((documents, size))
        return 100.0 + pairs_of(documents) / size

    lengths = [*range(20, 400, 3), *[700] * 5]
    result = plan(lengths, 4, [1, 4], 400, time_of)
    rows = [row for name, row in result.items() if name.isdigit()]
    for row in rows:
        sequences = packed([x for x in lengths if (x > 400) == (row.size == 4)], row.size * 400)
        busiest = sorted(map(pairs_of, sequences), reverse=True)[:: 4 // row.size]
        assert row.time_ns == pytest.approx(sum(100.0 + pairs / row.size for pairs in busiest))
    assert len(timed) <= 3 * TIMED_STEPS
    assert result["all"].time_ns == pytest.approx(sum(row.time_ns or 0.0 for row in rows))


def test_short_documents_beyond_the_curves_take_the_time_of_the_last_that_is_reached() -> None:
    def time_of(documents: Documents, size: int) -> float:
        if max(documents) < 50:
            raise OutsideCalibration("too short")
        return float(pairs_of(documents))

    few_short = plan([1000] * 4 + [10], 1, [1], 1000, time_of)["1"]
    assert few_short.time_ns == pytest.approx(5 * pairs_of((1000,)))
    many_short = plan([100] + [40] * 100, 1, [1], 100, time_of)["1"]
    assert many_short.time_ns is None and many_short.reason == "too short"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [([3], "groups of 3 ranks do not divide 8"), ([1, 2], "a document of 300 tokens does not fit")],
)
def test_impossible_sizes_are_refused(sizes: list[int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan([10, 300], 8, sizes, 100)


def test_a_document_takes_the_time_that_predict_says() -> None:
    machine = read_calibration("h200")
    workload = Workload(seq=1, heads=32, kv_heads=8, head_dim=128)
    time_of = times_on(machine, workload, "zigzag", Cluster(1, 8))
    whole = Workload(seq=65536, heads=32, kv_heads=8, head_dim=128)
    for size in (1, 4):
        alone = predict(Query("zigzag", whole, Cluster(1, size), hops="auto"), machine, schedule_of, draws=3)
        assert time_of((65536,), size) == alone.median_ns
        # Filled up to what the ranks can divide.
        assert time_of((65536 - 2 * size + 1,), size) == alone.median_ns


def test_the_command_prints_every_size(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    command = [
        "advise", "--seq", "1m", "--documents", "lognormal:mean=16384,sigma=0.8,seed=3", "--cp-sizes", "1,2,8",
        "--tokens-per-rank", "32k",
    ]  # fmt: skip
    assert cli.run([*command, "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = document["rows"]
    assert document["schema"] == "ringprof.cp-sizes/1" and [row["ranks"] for row in rows][-2:] == ["all", "all on 8"]
    assert sum(row["documents"] for row in rows[:-2]) == rows[-2]["documents"] == rows[-1]["documents"]
    assert cli.run(command) == 0
    text = capsys.readouterr().out
    assert "busiest rank" in text and "predicted" not in text
    monkeypatch.setattr("ringprof.prediction.cp_sizes.TIMED_STEPS", 1)
    assert cli.run([*command, "--machine", "h200", "--heads", "32", "--kv-heads", "8"]) == 0
    assert "attention" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cp-sizes", "1,8"], "--cp-sizes needs --documents"),
        (["--cp-sizes", "1,8", "--documents", "512x2"], "--cp-sizes needs --tokens-per-rank"),
        (
            ["--documents", "512x2", "--machine", "h200", "--tokens-per-rank", "1k"],
            "--tokens-per-rank goes with --cp-sizes",
        ),
        (["--documents", "512x2", "--nic", "400"], "--nic goes with --machine"),
        (["--cp-sizes", "1,8", "--oversubscription", "2"], "--oversubscription: not with --cp-sizes"),
        (["--cp-sizes", "1,8", "--kv-heads", "8"], "--kv-heads: not with --cp-sizes and no --machine"),
        (["--cp-sizes", "8", "--documents", "512x2", "--tokens-per-rank", "1k", "--no-causal"], "with a causal mask"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["advise", "--seq", "1024", *options]) == 2
    assert message in capsys.readouterr().err
