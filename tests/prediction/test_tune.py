"""Tuning: which choices go on and when it ends, with recordings made up; one tuning on CPU ranks; and its scores."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median, stdev
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="choices are strategies")

from ringprof.cli import run
from ringprof.errors import Interrupted, RecordError
from ringprof.prediction.network import Cluster
from ringprof.prediction.query import Query
from ringprof.ranks.progress import SilentReporter
from ringprof.recording import RecordRequest
from ringprof.report.text import TextStyle
from ringprof.trials import tune as tuning_module
from ringprof.trials import turns
from ringprof.trials.tune import Trial, Tuning, tune, tuning_dict, tuning_text
from ringprof.workload.workload import Workload

Times = Callable[[str, int], float]
"""Milliseconds of an iteration, by strategy and number of its recording from 0."""
STRATEGIES = ("zigzag", "ulysses", "allgather")
DATA = Path(__file__).parents[1] / "data"


class Machine:
    """Stands for ranks: every recording has the given times, or fails."""

    def __init__(self, folder: Path, times: Times) -> None:
        self.folder, self.times = folder, times
        self.requests: list[RecordRequest] = []

    def record(self, request: RecordRequest, reporter: object) -> Any:
        count = sum(earlier.strategy == request.strategy for earlier in self.requests)
        self.requests.append(request)
        time_ns = round(1e6 * self.times(request.strategy, count))
        timings = SimpleNamespace(iterations_ns=[[time_ns] * 3, [time_ns // 2] * 3])
        return SimpleNamespace(name=f"run{len(self.requests)}", timings=timings)

    def tune(self, rounds: int = 8, minutes: float = 10.0) -> Tuning:
        base = RecordRequest(
            workload=Workload(seq=512, heads=4, kv_heads=2, head_dim=64), strategy="", device="cpu", world=2, iters=3,
            output=str(self.folder / "tune.json"),
        )  # fmt: skip
        return tune(
            base, machine=None, strategies=STRATEGIES, top=3, rounds=rounds, minutes=minutes, reporter=SilentReporter()
        )


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Times], Machine]:
    """Function that returns a `Machine` of given times, which `tune` records on."""

    def with_times(times: Times) -> Machine:
        recorder = Machine(tmp_path, times)
        monkeypatch.setattr(turns, "record", recorder.record)
        return recorder

    return with_times


def drift(count: int) -> float:
    """Return a machine that slows down by 3 % from round to round: alike for all."""
    return 1.03**count


def test_it_ends_when_one_is_left_and_drift_cancels(machine: Callable[[Times], Machine]) -> None:
    """Differences of 5 and 10 % with a scatter of 0.2 % separate in three rounds, beside a drift of 6 %."""
    scatter = {"zigzag": (0, 1, -1), "ulysses": (1, 0, 0), "allgather": (-1, 1, 0)}
    base = {"zigzag": 10.0, "ulysses": 11.0, "allgather": 10.5}
    recorder = machine(lambda name, count: base[name] * drift(count) * (1 + 0.002 * scatter[name][count]))
    tuning = recorder.tune()
    assert [request.strategy for request in recorder.requests] == [*STRATEGIES] * 3 or len(recorder.requests) == 9
    assert [trial.query.strategy for trial in tuning.trials] == ["zigzag", "allgather", "ulysses"]
    assert (tuning.rounds, tuning.stopped_by, len(tuning.undecided)) == (3, "decided", 1)
    assert [request.verify for request in recorder.requests] == [True] * 3 + [False] * 6
    low, high = tuning.trials[1].slower or (0, 0)
    assert low < 1.05 < high and low > 1.04
    saved = json.loads((recorder.folder / "tune.json").read_text())
    assert saved == json.loads(json.dumps(tuning_dict(tuning))) and saved["decided"]
    assert "zigzag is the fastest of 3 after 3 rounds" in tuning_text(tuning, TextStyle())


def test_equal_choices_cannot_be_told_apart(machine: Callable[[Times], Machine]) -> None:
    """Two alternate in being 1 % faster; the third is 20 % slower and is recorded no longer than needed."""
    recorder = machine(
        lambda name, count: 12.0 if name == "ulysses" else 10.0 + 0.1 * ((count + (name == "zigzag")) % 2)
    )
    tuning = recorder.tune(rounds=6)
    assert tuning.stopped_by == "rounds" and {trial.query.strategy for trial in tuning.undecided} == {
        "zigzag", "allgather"
    }  # fmt: skip
    assert [len(trial.recordings_ns) for trial in tuning.trials] == [6, 6, 3]
    assert "cannot tell after 6 rounds" in tuning.verdict() and "stopped by --rounds" in tuning_text(
        tuning, TextStyle()
    )
    recorder = machine(lambda name, count: 10.0)
    short = recorder.tune(minutes=1e-9)
    assert short.stopped_by == "minutes" and "compared from round 3 on" in short.verdict()


def test_a_choice_dropped_against_an_early_leader_returns(machine: Callable[[Times], Machine]) -> None:
    """Zigzag is ahead for three rounds and slow from then on: all-gather, dropped after them, is recorded again."""
    recorder = machine(
        lambda name, count: {
            "zigzag": 10.0 if count < 3 else 20.0, "allgather": 10.5, "ulysses": 10.01 + 0.02 * (count % 2)
        }[name]
    )  # fmt: skip
    tuning = recorder.tune(rounds=8)
    assert tuning.trials[0].query.strategy == "ulysses"
    assert 3 in tuning.trials[1].recordings_ns and tuning.trials[1].query.strategy == "allgather"


def decided(slower: float, seed: int) -> bool | None:
    """Tune two choices, the second ``slower`` by that share, with a drift of 1 % and a scatter of 0.3 % per recording.

    Return whether the first is the answer; None where it cannot be told in 8 rounds.
    """
    generator = random.Random(seed)
    trials = [
        Trial(Query(name, Workload(seq=512, heads=4, kv_heads=4, head_dim=64), Cluster(1, 2), "cudnn"), None)
        for name in ("zigzag", "ulysses")
    ]
    for number in range(1, 9):
        common = generator.gauss(0, 0.01)
        for index, trial in enumerate(trials):
            time_ns = 1e8 * (1 + common + slower * index + generator.gauss(0, 0.003))
            trial.recordings_ns[number] = [int(time_ns)] * 3
        outcome = tuning_module._judged(trials, number, "none", None)
        if len(outcome.undecided) == 1:
            return outcome.trials[0] is trials[0]
    return None


def test_how_often_it_is_right() -> None:
    """A difference of 1 % is always found; of equal choices about one in eight pairs is called different."""
    assert all(decided(0.01, seed) for seed in range(40))
    false_answers = sum(decided(0.0, seed) is not None for seed in range(150))
    assert 0.05 < false_answers / 150 < 0.22


@pytest.mark.parametrize(("rounds_before", "kept"), [(0, "no result was written"), (2, "holds the 2 rounds before it")])
def test_an_interrupted_tuning_says_what_is_kept(
    machine: Callable[[Times], Machine], rounds_before: int, kept: str
) -> None:
    def times(name: str, count: int) -> float:
        if name == "ulysses" and count == rounds_before:
            raise Interrupted("interrupted; nothing was recorded")
        return 10.0

    recorder = machine(times)
    with pytest.raises(Interrupted, match=f"^interrupted in round {rounds_before + 1}; .*{kept}$"):
        recorder.tune()
    path = recorder.folder / "tune.json"
    assert path.exists() == bool(rounds_before)
    assert not rounds_before or json.loads(path.read_text())["rounds"] == rounds_before


def test_a_failed_choice_is_named(machine: Callable[[Times], Machine]) -> None:
    def times(name: str, count: int) -> float:
        if name == "ulysses":
            raise RecordError("dq differs")
        return 10.0 if name == "zigzag" else 11.0 + 0.01 * count

    tuning = machine(times).tune()
    assert tuning.trials[-1].failure == "dq differs" and tuning.undecided == [tuning.trials[0]]
    assert "failed: dq differs" in tuning_text(tuning, TextStyle())


@pytest.mark.parametrize(("name", "count"), [("h200x2-tune-131072", 3), ("h200x2-tune-131072-decided", 2)])
def test_compare_scores_the_predictions_of_a_tuning(name: str, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Choices recorded on 2 H200: each prediction against the median of its own recordings."""
    path = DATA / f"{name}.json"
    trials = json.loads(path.read_text())["trials"]
    assert run(["compare", str(path), str(path), "--format", "json"]) == 0
    scores = json.loads(capsys.readouterr().out)["scores"]
    expected = {
        trial["label"]: trial["forecast"]["iteration_ms"]["p50"] / median(map(median, trial["iterations_ms"])) - 1
        for trial in trials
    }
    assert {score["forecast"]: score["error"] for score in scores} == pytest.approx(expected, abs=1e-4)
    assert len(expected) == count and all(score["inside"] for score in scores)


def test_a_choice_recorded_on_gpus_is_dropped_by_the_t_test_of_its_rounds() -> None:
    """Ulysses on 2 H200 in three rounds: log ratios of the recordings' medians, by Student's t of two degrees."""
    tuning = json.loads((DATA / "h200x2-tune-131072-decided.json").read_text())
    zigzag, ulysses = tuning["trials"]
    logs = [
        math.log(median(slower) / median(faster))
        for faster, slower in zip(zigzag["iterations_ms"], ulysses["iterations_ms"], strict=True)
    ]
    margin = 4.3027 * stdev(logs) / len(logs) ** 0.5
    low, high = (math.exp(mean(logs) + sign * margin) for sign in (-1, 1))
    assert ulysses["over_the_fastest"] == pytest.approx([low, high], abs=1e-4) and low > 1.007
    assert (ulysses["dropped_after"], tuning["decided"], tuning["stopped_by"]) == (3, True, "decided")


@pytest.mark.processes
def test_tuning_on_cpu_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two strategies on two ranks, verified; `compare` says that a CPU has no predictions."""
    path = tmp_path / "tune.json"
    options = ["--seq", "512", "--heads", "4", "--head-dim", "64", "--world", "2", "--device", "cpu", "--iters", "3"]
    names = ["--strategies", "zigzag,ulysses", "--top", "2", "--rounds", "3"]
    assert run(["bench", "--until-decided", *options, *names, "--format", "json", "-o", str(path)]) in (0, 1)
    answer = json.loads(capsys.readouterr().out)
    assert answer == json.loads(path.read_text()) and len(answer["trials"]) == 2
    for trial in answer["trials"]:
        assert trial["failure"] is None and len(trial["iterations_ms"]) == 3 and len(trial["iterations_ms"][0]) == 3
        runs = [json.loads((tmp_path / name / "run.json").read_text()) for name in trial["runs"]]
        assert [bool(recorded["verification"]) for recorded in runs] == [True, False, False]
    assert run(["compare", str(path), str(path)]) == 2
    assert "a tuning without predictions" in capsys.readouterr().err
