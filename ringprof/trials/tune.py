"""Tuning: record the best predicted choices on the devices of this node, in turns, until their times separate."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import msgspec

from ringprof.analysis.findings.uncertainty import ratio_interval
from ringprof.common.formatting import significant
from ringprof.common.json_object import JsonObject
from ringprof.errors import Interrupted, RingprofError, UnsupportedWorkloadError
from ringprof.prediction.advise import Choice, candidates, chosen_queries, label_of, ranked_choices
from ringprof.prediction.calibration import Calibration, base_for
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import prediction_dict
from ringprof.prediction.query import Query
from ringprof.ranks.progress import Reporter
from ringprof.recording import RecordRequest
from ringprof.report.tables import Column, text_table
from ringprof.report.text import TextStyle, clean
from ringprof.run import slowest
from ringprof.trials.turns import record_request, refuse_launcher, save, take_turns

SCHEMA = "ringprof.tuning/1"
_LEAST_ROUNDS = 3
"""Number of rounds from which trials are compared: two differences alone are alike by chance too often."""


@dataclass
class Trial:
    """One choice, with its recordings so far."""

    query: Query
    forecast: Choice | None
    """Prediction; None where no calibration covers the device."""
    runs: list[str] = field(default_factory=list)
    """Folder of each recording, relative to the tuning's file."""
    recordings_ns: dict[int, list[int]] = field(default_factory=dict)
    """Times of the slowest rank in nanoseconds, by round and iteration."""
    failure: str | None = None
    """Reason why the choice could not be recorded, such as a wrong result; None if it could."""
    dropped_after: int | None = None
    """First round after which it was significantly slower than the fastest; None while it is not."""
    slower: tuple[float, float] | None = None
    """95 % interval of its time over that of the fastest trial, from the rounds that both have.

    None for the fastest, and with fewer than `_LEAST_ROUNDS` common rounds.
    """

    @property
    def label(self) -> str:
        """Strategy with its parameters and its transport."""
        return label_of(self.query)

    @property
    def running(self) -> bool:
        """Whether further rounds record the choice."""
        return self.failure is None and self.dropped_after is None

    @property
    def median_ns(self) -> float | None:
        """Median nanoseconds per iteration: over the recordings, of the median of each; None without a recording."""
        return median(map(median, self.recordings_ns.values())) if self.recordings_ns else None


@dataclass(frozen=True)
class Tuning:
    """Outcome of `tune`: all trials, the fastest first."""

    trials: tuple[Trial, ...]
    rounds: int
    stopped_by: str
    """``decided``, ``rounds`` or ``minutes``."""
    device: str
    machine: str | None
    """Name of the calibration that ordered the choices; None if none covers the device."""

    @property
    def undecided(self) -> list[Trial]:
        """Trials that are not significantly slower than the fastest; the fastest included."""
        return [trial for trial in self.trials if trial.running]

    def verdict(self) -> str:
        """Return the outcome as a sentence."""
        first = self.trials[0]
        if first.median_ns is None:
            return f"nothing was recorded: {first.label}: {first.failure}"
        after = f"after {self.rounds} round{'s' if self.rounds > 1 else ''}"
        others = [trial for trial in self.undecided if trial is not first]
        if others and self.rounds < _LEAST_ROUNDS:
            return f"cannot tell {after}: choices are compared from round {_LEAST_ROUNDS} on"
        if others:
            names = "; ".join(trial.label for trial in others)
            return f"cannot tell {after}: {first.label} is not significantly faster than {names}"
        compared = [trial for trial in self.trials if trial is not first and trial.failure is None]
        if not compared:
            return f"{first.label} is the only one that was recorded"
        return f"{first.label} is the fastest of {len(compared) + 1} {after}"


def tune(
    base: RecordRequest, *, machine: Calibration | None, strategies: Sequence[str], top: int, rounds: int,
    minutes: float, reporter: Reporter,
) -> Tuning:  # fmt: skip
    """Record the ``top`` choices in turns, each verified in the first round, and write the outcome after every round.

    ``base`` holds the workload, the device and how to record; its ``output`` is the tuning's file, beside which the
    runs lie. A trial ends when the 95 % interval of its time over the fastest one's lies above 1. Tuning ends when one
    is left, after ``rounds``, or before a round that would begin after ``minutes``.

    Raises `UsageError` under a launcher, and `UnsupportedWorkloadError` if no choice can run.
    """
    refuse_launcher()
    path, started = Path(base.output), time.monotonic()
    path.parent.mkdir(parents=True, exist_ok=True)
    trials, device, machine = _trials(base, machine, strategies, top, reporter)
    number, tuning = 1, None

    def ended(of_round: int) -> bool:
        """Judge the trials after a round and write the outcome; return whether no further round follows."""
        nonlocal tuning
        tuning = _judged(trials, of_round, device, machine)
        if len(tuning.undecided) <= 1:
            tuning = replace(tuning, stopped_by="decided")
        elif of_round < rounds and time.monotonic() - started > 60 * minutes:
            tuning = replace(tuning, stopped_by="minutes")
        save(path, tuning_dict(tuning))
        reporter.say(f"round {of_round}: {tuning.verdict()}")
        return tuning.stopped_by != "rounds" or of_round == rounds

    try:
        for number, trial in take_turns(trials, ended):
            if trial.running:
                _record(trial, number, base, path.parent, reporter)
    except Interrupted:
        rounds_before = f"{number - 1} round{'s' if number > 2 else ''}"
        kept = f"{path} holds the {rounds_before} before it" if number > 1 else "no result was written"
        raise Interrupted(f"interrupted in round {number}; {kept}") from None
    assert tuning is not None
    return tuning


def _trials(
    base: RecordRequest, machine: Calibration | None, strategies: Sequence[str], top: int, reporter: Reporter
) -> tuple[list[Trial], str, Calibration | None]:
    """Return the trials, the device's name, and the calibration that ordered them, None if none covers the device."""
    import torch

    from ringprof.iteration.resolve import kernel_class, resolve, resolve_device, resolve_world_size
    from ringprof.prediction.schedules import ScheduleCache

    device = resolve_device(base.device)
    world = resolve_world_size(base.world, device, None)
    name = torch.cuda.get_device_name(0) if device == "cuda" else "cpu"
    cluster = Cluster(world // (base.ranks_per_host or world), base.ranks_per_host or world)
    # The kernel that a recording would take, for every strategy the same.
    kernel = kernel_class(resolve(msgspec.structs.replace(base, strategy="zigzag"), None)).name
    calibration = machine or base_for(name)
    queries = chosen_queries(candidates(base.workload, cluster, calibration, kernel), strategies)
    trials = [Trial(query, None) for query in queries if query.hops != "copy"]
    try:
        if device == "cpu":
            raise UnsupportedWorkloadError("no calibration covers CPU ranks")
        choices, _ = ranked_choices(
            base.workload, cluster, calibration, ScheduleCache().of, kernel=kernel, strategies=strategies
        )
        trials = [Trial(choice.prediction.query, choice) for choice in choices if choice.fits]
    except RingprofError as error:
        reporter.say(f"not ordered by a prediction: {error}")
    runnable = []
    for trial in trials:
        try:
            kernel_class(resolve(_request(trial, base, Path()), None))
        except UnsupportedWorkloadError as error:
            reporter.say(f"left out: {trial.label}: {error}")
        else:
            runnable.append(trial)
    if not runnable:
        raise UnsupportedWorkloadError("no strategy can run this workload here")
    ordered = runnable[0].forecast is not None
    if len(runnable) > top and not ordered:
        reporter.say(f"left out: {', '.join(trial.label for trial in runnable[top:])} (--top)")
    return runnable[:top], name, calibration if ordered else None


def _request(trial: Trial, base: RecordRequest, folder: Path) -> RecordRequest:
    query = trial.query
    return msgspec.structs.replace(
        base, strategy=query.strategy, params=dict(query.params), kernel=query.kernel, hops=query.hops,
        output=str(folder / "run.json"),
    )  # fmt: skip


def _record(trial: Trial, number: int, base: RecordRequest, folder: Path, reporter: Reporter) -> None:
    """Record a trial in round ``number``, and verify it the first time.

    A trial that fails, or whose result is wrong, ends with the reason.
    """
    verify = base.verify and not trial.recordings_ns
    request = msgspec.structs.replace(_request(trial, base, folder), verify=verify)
    run, _, trial.failure = record_request(request, reporter)
    if run is None:
        return
    times = slowest(run.timings.iterations_ns) if run.timings else []
    if not times:
        trial.failure = "no iteration was timed"
        return
    trial.runs.append(run.name)
    trial.recordings_ns[number] = times


def _judged(trials: Sequence[Trial], number: int, device: str, machine: Calibration | None) -> Tuning:
    """Compare each trial with the fastest one by the rounds that both have, and order all by time.

    A trial that ended against an earlier fastest one goes on where it is not slower than the present one.
    """
    recorded = [trial for trial in trials if trial.failure is None]
    fastest = min(recorded, key=_median_or_last, default=None)
    for trial in recorded:
        trial.slower = None
        if fastest is not None and trial is not fastest:
            common = sorted(fastest.recordings_ns.keys() & trial.recordings_ns.keys())
            if len(common) >= _LEAST_ROUNDS:
                sides = ([side.recordings_ns[index] for index in common] for side in (fastest, trial))
                trial.slower = ratio_interval(*sides, interleaved=True)
        slower = trial.slower is not None and trial.slower[0] > 1
        trial.dropped_after = (trial.dropped_after or number) if slower else None
    order = sorted(trials, key=lambda trial: (trial.failure is not None, _median_or_last(trial)))
    return Tuning(tuple(order), number, "rounds", device, machine.name if machine else None)


def _median_or_last(trial: Trial) -> float:
    return float("inf") if trial.median_ns is None else trial.median_ns


def tuning_dict(tuning: Tuning) -> JsonObject:
    """Return the outcome as a dict of schema ``ringprof.tuning/1``."""
    return {
        "schema": SCHEMA,
        "verdict": tuning.verdict(),
        "decided": len(tuning.undecided) == 1,
        "rounds": tuning.rounds, "stopped_by": tuning.stopped_by, "device": tuning.device, "machine": tuning.machine,
        "trials": [
            {
                "label": trial.label, "strategy": trial.query.strategy, "params": dict(trial.query.params),
                "hops": trial.query.hops, "kernel": trial.query.kernel,
                "workload": msgspec.to_builtins(trial.query.workload),
                "hosts": trial.query.cluster.hosts, "gpus_per_host": trial.query.cluster.gpus_per_host,
                "median_ms": None if trial.median_ns is None else round(trial.median_ns / 1e6, 4),
                "iterations_ms": [[round(ns / 1e6, 4) for ns in times] for times in trial.recordings_ns.values()],
                "recorded_in_rounds": [*trial.recordings_ns],
                "over_the_fastest": trial.slower, "dropped_after": trial.dropped_after, "failure": trial.failure,
                "runs": trial.runs,
                "forecast": None if trial.forecast is None else prediction_dict(trial.forecast.prediction, whole=False),
            }
            for trial in tuning.trials
        ],
    }  # fmt: skip


# --- the outcome of a tuning as text ---

_COLUMNS = (
    Column("strategy"), Column("ms"), Column("over the fastest\n(95 % interval)"), Column("recordings"),
    Column("predicted ms\n(80 % interval)"), Column("", left=True),
)  # fmt: skip


def tuning_text(tuning: Tuning, style: TextStyle) -> str:
    """Return all trials as a table, and the verdict, ending with a newline."""
    query = tuning.trials[0].query
    workload = query.workload
    head = (
        f"{workload.seq} tokens, {workload.heads} heads ({workload.kv_heads} kv) of {workload.head_dim}"
        f" on {query.cluster.size} ranks ({clean(tuning.device)}), kernel {query.kernel}"
    )
    table = text_table(_COLUMNS, [_row(trial) for trial in tuning.trials], style)
    tail = [clean(tuning.verdict())]
    if tuning.stopped_by != "decided":
        tail.append(f"stopped by --{tuning.stopped_by}")
    return style.finish(style.fit(head) + "\n\n" + table + "\n" + style.fit("\n".join(tail)))


def _row(trial: Trial) -> list[str]:
    slower = trial.slower
    forecast = "" if trial.forecast is None else "{1} ({0} to {2})".format(
        *(significant(time, 3) for time in trial.forecast.prediction.interval_ms)
    )  # fmt: skip
    note = "" if trial.failure is None else f"failed: {clean(trial.failure, 60)}"
    note = f"dropped after round {trial.dropped_after}" if trial.dropped_after else note
    return [
        clean(trial.label), "" if trial.median_ns is None else significant(trial.median_ns / 1e6),
        "" if slower is None else f"{100 * slower[0] - 100:+.2f} to {100 * slower[1] - 100:+.2f} %",
        str(len(trial.recordings_ns)), forecast, note,
    ]  # fmt: skip
