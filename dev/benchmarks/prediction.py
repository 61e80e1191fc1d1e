"""Every error of a prediction against a measurement, with its sign: predicted over measured, minus 1.

    python dev/benchmarks/prediction.py [PART...]              # every row, then the errors by family, machine and pass
    python dev/benchmarks/prediction.py --csv FILE [PART...]   # the rows as a table, which scripts/scoreboard.py reads

Parts are the keys of `PARTS`; each prints what the machine that predicts it was fitted to (`FITTED`).
The first two are the runs of dev/benchmarks/data/h200_shapes.csv (recorded by prediction_truth.py there), of shapes
that no committed run has. later and masks are those of h200_shapes_2.csv. grid and grid_host are the cells of
h200_grid.csv (dev/benchmarks/strategy_speed.py, zigzag on 4 H200). h100, b200 and a800 are the published rows of
attention.csv. All others are the committed runs.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import msgspec

import ringprof
from ringprof.prediction.calibration import Calibration, ModelFigures, read_calibration
from ringprof.prediction.fit import Observed, calibrate_from, observed_run
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import PredictionResult, predict
from ringprof.prediction.query import Query
from ringprof.prediction.schedules import schedule_of
from ringprof.prediction.score import check_rows
from ringprof.prediction.what_if import Changes, what_if
from ringprof.prediction.whole_steps import predict_step
from ringprof.run import Run, read_run
from ringprof.workload.workload import LayerAround, Workload

ROOT = Path(__file__).parents[2]
TRACES, DATA = ROOT / "traces", ROOT / "dev" / "benchmarks" / "data"
EIGHT = ROOT / "tests" / "data" / "h200x8-zigzag-131072"


@dataclass(frozen=True)
class Score:
    """One prediction against one measurement; times in milliseconds."""

    name: str
    measured: float
    predicted: float
    low: float | None = None
    """Lower end of the 80 % interval; ``high`` is its upper end."""
    high: float | None = None
    prediction: PredictionResult | None = None
    family: str = ""
    """Name of the strategy; ``machine`` is the name of the machine that predicts it."""
    machine: str = ""
    part: str = ""
    """Pass that was timed: ``fwd``, ``bwd`` or ``fwd+bwd``."""
    hosts: int = 1

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def group(self) -> tuple[str, str, str]:
        """Family, machine and pass, by which errors are summarised."""
        return self.family, self.machine, self.part

    @property
    def inside(self) -> bool | None:
        return None if self.low is None or self.high is None else self.low <= self.measured <= self.high


MIDDLE_MS = 2.5
"""Milliseconds below which runs of the later session are host-bound."""
_ITERATIONS = 10
"""Iterations of a recorded run from its first to its middle timed one.

Short, host-bound runs have ten times as many.
"""
HOST_MS = 5.0
"""Milliseconds below which runs are host-bound."""


@dataclass(frozen=True)
class Shape:
    """One recorded run on 2 H200."""

    name: str
    query: Query
    ms: float
    peak_mib: float | None = None
    """Peak memory of the rank that held most, where it was recorded."""

    @property
    def plain(self) -> bool:
        return self.query.workload.mask().plain


@cache
def recorded_shapes(name: str = "h200_shapes.csv") -> list[Shape]:
    with open(DATA / name, encoding="utf-8", newline="") as file:
        return [_shape(row) for row in csv.DictReader(file)]


def _shape(row: dict[str, str]) -> Shape:
    batch, seq, heads, kv_heads = (int(row[name]) for name in ("batch", "seq", "heads", "kv_heads"))
    workload = Workload(
        batch=batch, seq=seq, heads=heads, kv_heads=kv_heads, head_dim=int(row.get("head_dim") or 128),
        causal=row["causal"] == "1", backward=row["backward"] == "1",
        window=int(row["window"]) if row.get("window") else None,
        v_head_dim=int(row["v_head_dim"]) if row.get("v_head_dim") else None,
        sinks="learned" if row.get("sinks") else None,
        documents=tuple(map(int, row["documents"].split())) if row.get("documents") else None,
    )  # fmt: skip
    params = dict(param.split("=") for param in row["params"].split())
    ms = float(row["median_ms"])
    query = Query(
        row["strategy"], workload, Cluster(1, int(row.get("ranks") or 2)), row["kernel"], row["hops"], params,
        busy_s=_ITERATIONS * ms / 1e3,
    )  # fmt: skip
    return Shape(row["name"], query, ms, float(row.get("peak_mib") or 0.0) or None)


def shapes() -> Iterator[Score]:
    """Score device-bound shapes on 2 H200 that no committed run has, by the bundled h200."""
    yield from _predicted_shapes(shape for shape in recorded_shapes() if shape.ms > HOST_MS)


def host() -> Iterator[Score]:
    """Score 23 short host-bound programs on 2 H200, in two processes, on the host that the h200 was fitted to."""
    yield from (score for score in _predicted_shapes(recorded_shapes("h200_shapes_4.csv")) if _by_host(score))


def short() -> Iterator[Score]:
    """Score 16 more device-bound programs of 2 to 10 ms, each in the same two processes."""
    yield from (score for score in _predicted_shapes(recorded_shapes("h200_shapes_4.csv")) if not _by_host(score))


def _by_host(score: Score) -> bool:
    assert score.prediction is not None
    return score.prediction.host_bound


def host_elsewhere() -> Iterator[Score]:
    """Score short sequences of older code, on 2 and 4 H200 of two more sessions, with other hosts."""
    before = [*later_shapes(), *recorded_shapes("h200_shapes_3.csv")]
    yield from (score for score in _predicted_shapes(shape for shape in before if shape.plain) if _by_host(score))


def last() -> Iterator[Score]:
    """Score seven device-bound shapes of the last session, which no machine was fitted to."""
    yield from _predicted_shapes(shape for shape in recorded_shapes("h200_shapes_3.csv") if shape.ms > 2 * HOST_MS)


def later() -> Iterator[Score]:
    """Score 14 more shapes, recorded three hours later, which no machine was fitted to: device-bound, or nearly."""
    yield from _predicted_shapes(shape for shape in later_shapes() if shape.plain and shape.ms > MIDDLE_MS)


def masks() -> Iterator[Score]:
    """Score packed documents and windows of the same session; the kernel's curves of them are also of that session."""
    yield from _predicted_shapes(shape for shape in later_shapes() if not shape.plain)


def later_shapes() -> list[Shape]:
    return recorded_shapes("h200_shapes_2.csv")


def _predicted_shapes(chosen: Iterable[Shape], machine: str = "h200") -> Iterator[Score]:
    for shape in chosen:
        yield scored(shape.name, shape.ms, predict(shape.query, read_calibration(machine), schedule_of))


def h100_shapes() -> Iterator[Score]:
    """Score flash-attn 3 and cuDNN on 2 H100, by the bundled h100, whose curves of them are of the same session."""
    yield from _predicted_shapes((shape for shape in recorded_shapes("h100_shapes.csv") if shape.plain), "h100")


def h100_masks() -> Iterator[Score]:
    """Score packed documents and windows with flash-attn 3 in the same session."""
    yield from _predicted_shapes((shape for shape in recorded_shapes("h100_shapes.csv") if not shape.plain), "h100")


def h200_later() -> Iterator[Score]:
    """Score runs on 2 H200 of 2026-11-26, 16 with flash-attn 3, by the bundled h200, fitted to none of them."""
    yield from _predicted_shapes(recorded_shapes("h200_shapes_6.csv"))


def h200_kernels() -> Iterator[Score]:
    """Score zigzag on 2 of 4 H200 with flash-attn 4, 3, 2 and cuDNN, recorded after the bundled h200 had its curves."""
    yield from _predicted_shapes(recorded_shapes("h200_shapes_7.csv"))


def other_heads() -> Iterator[Score]:
    """Score other head sizes, MLA and sinks, on 2 H200; the curves of these sizes are of the same session."""
    yield from _predicted_shapes(
        shape for shape in recorded_shapes("h200_shapes_5.csv") if shape.query.workload.head_dim != 96
    )


def plain_masks() -> Iterator[Score]:
    """Score packed documents and windows by machines without their samples of such calls."""
    for file, name in (("h200_shapes_2.csv", "h200"), ("h200_shapes_6.csv", "h200"), ("h100_shapes.csv", "h100")):
        machine = without_masks(read_calibration(name))
        for shape in recorded_shapes(file):
            if not shape.plain:
                yield scored(shape.name, shape.ms, predict(shape.query, machine, schedule_of))


def without_masks(machine: Calibration) -> Calibration:
    """Return a machine without its samples of calls of documents and windows."""
    kernels = [
        msgspec.structs.replace(kernel, samples=[sample for sample in kernel.samples if sample.pairs is None])
        for kernel in machine.kernels
    ]
    return msgspec.structs.replace(machine, kernels=kernels)


def peers() -> Iterator[Score]:
    """Score other projects' strategies on 4 H200 (docs/speed.md)."""
    yield from _predicted_shapes(recorded_shapes("h200_peers.csv"))


def steps() -> Iterator[Score]:
    """Score steps of four Llama layers with FSDP2 and DDP on one and two H200, by the layers measured on one."""
    figures = msgspec.json.decode((DATA / "h200_llama_layers.json").read_bytes(), type=ModelFigures)
    machine = msgspec.structs.replace(read_calibration("h200"), model=figures)
    with open(DATA / "h200_steps.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            sizes = {name: int(row[name]) for name in ("seq", "heads", "kv_heads", "layers")}
            layer = LayerAround(parallel=row["parallel"], mlp_size=14336)  # type: ignore[arg-type]
            workload = Workload(**sizes, head_dim=128, layer=layer)  # type: ignore[arg-type]
            query = Query(row["strategy"], workload, Cluster(1, int(row["ranks"])), row["kernel"], row["hops"])
            step = predict_step(query, machine, schedule_of)
            low, middle, high = (ns / 1e6 for ns in step.interval_ns)
            yield Score(
                f"{row['ranks']} x H200, {row['seq']} tokens, {row['strategy']}, {row['parallel']}",
                float(row["median_ms"]), middle, low, high,
                family="whole step", machine="h200", part="fwd+bwd", hosts=1,
            )  # fmt: skip


def inference() -> Iterator[Score]:
    """Score the committed runs of prefill and decode on 2 H200."""
    for name in ("h200x2-decode-1048576", "h200x2-decode-1048576-window", "h200x2-ring-prefill-262144"):
        run = read_run(TRACES / name / "run.json")
        yield scored(name, measured_ms(run), predict(Query.of_run(run), read_calibration("h200"), schedule_of))


def grid() -> Iterator[Score]:
    """Score device-bound cells of zigzag on 4 H200: two kernels, both transports, two sessions, by the bundled h200."""
    yield from _grid(host_bound=False)


def grid_host() -> Iterator[Score]:
    """Score the cells of the grid that are predicted to be host-bound."""
    yield from _grid(host_bound=True)


def _grid(*, host_bound: bool) -> Iterator[Score]:
    for name, ms, prediction in predicted_grid():
        if prediction.host_bound == host_bound:
            yield scored(name, ms, prediction)


@cache
def predicted_grid() -> list[tuple[str, float, PredictionResult]]:
    with open(DATA / "h200_grid.csv", encoding="utf-8", newline="") as file:
        return [_cell(row) for row in csv.DictReader(file)]


def _cell(row: dict[str, str]) -> tuple[str, float, PredictionResult]:
    seq, heads, kv_heads = (int(row[name]) for name in ("seq", "heads", "kv_heads"))
    workload = Workload(seq=seq, heads=heads, kv_heads=kv_heads, head_dim=128)
    query = Query("zigzag", workload, Cluster(1, 4), row["kernel"], row["hops"])
    name = f"{row['session']} {seq} {heads}/{kv_heads} {row['kernel']} {row['hops']}"
    return name, float(row["ms"]), predict(query, read_calibration("h200"), schedule_of)


@cache
def base() -> Calibration:
    """Return the H200 without kernel samples; these come from the runs that a score allows."""
    machine = read_calibration("h200")
    return msgspec.structs.replace(machine, kernels=[msgspec.structs.replace(k, samples=[]) for k in machine.kernels])


@cache
def observed() -> dict[str, Observed]:
    """Return the committed GPU runs by the names of their folders."""
    return {path.parent.name: observed_run(path.parent, base()) for path in sorted(TRACES.glob("h200x4*/run.json"))}


def one_host() -> dict[str, Observed]:
    return {name: run for name, run in observed().items() if run.links.cluster.hosts == 1}


def measured_ms(run: Run) -> float:
    assert run.timings is not None
    return (run.timings.median_ns() or 0.0) / 1e6


def scored(name: str, measured: float, prediction: PredictionResult) -> Score:
    low, median_ms, high = prediction.interval_ms
    query = prediction.query
    return Score(
        name, measured, median_ms, low, high, prediction, query.stands_for or query.strategy, prediction.machine.name,
        "fwd+bwd" if query.workload.backward else "fwd", query.cluster.hosts,
    )  # fmt: skip


def from_others(name: str, others: Sequence[Observed]) -> Score:
    """Predict a run with a machine that is fitted to other runs."""
    run = observed()[name].run
    machine = calibrate_from(others, base())
    return scored(name, measured_ms(run), predict(Query.of_run(run), machine, schedule_of))


def runs() -> Iterator[Score]:
    """Predict every run on one host from all others."""
    for name in one_host():
        yield from_others(name, [run for other, run in observed().items() if other != name])


def strategies() -> Iterator[Score]:
    """Predict every run on one host from those of other strategies."""
    for name, held_out_run in one_host().items():
        assert held_out_run.run.strategy
        others = [
            run
            for run in observed().values()
            if run.run.strategy and run.run.strategy.name != held_out_run.run.strategy.name
        ]
        yield from_others(name, others)


def lengths() -> Iterator[Score]:
    """Predict runs of 65536 tokens from those of 262144, and the reverse."""
    for name, held_out_run in one_host().items():
        others = [run for run in observed().values() if _seq(run) != _seq(held_out_run)]
        if others and any(_seq(run) in (65536, 262144) for run in others):
            yield from_others(name, others)


def _seq(recording: Observed) -> int:
    assert recording.run.workload is not None
    return recording.run.workload.seq


def eight() -> Iterator[Score]:
    """Predict 8 GPUs from the runs of 4: the slowest rank of the profiled iteration, the only measured time."""
    analysis = ringprof.load(EIGHT)
    assert isinstance(analysis, ringprof.Analysis)
    wall = max(rank.breakdown.wall_ns for rank in analysis.attribution.ranks) / 1e6
    workload = Workload(seq=131072, heads=40, kv_heads=40, head_dim=128)
    query = Query("zigzag", workload, Cluster(1, 8), "cudnn", legacy_schedule=True)
    four = [run for run in observed().values() if run.run.topology.world_size == 4]
    yield scored(EIGHT.name, wall, predict(query, calibrate_from(four, base()), schedule_of))


def replays() -> Iterator[Score]:
    """Replay every GPU run from its own blocks and hops, against its profiled iteration."""
    machine = calibrate_from(list(observed().values()), base())
    for name, run in observed().items():
        replay = what_if(run, machine, Changes())
        assert run.run.strategy is not None
        yield Score(
            name, replay.recorded_ns / 1e6, replay.replayed_ns / 1e6, family=run.run.strategy.name,
            machine=machine.name, part="fwd+bwd", hosts=run.links.cluster.hosts,
        )  # fmt: skip


FITTED_ROWS = {"V0109": "NIC of a800", **dict.fromkeys(("V1001", "V1021", "V1041", "V1061"), "kernel of b200")}
"""Published rows that a bundled machine was fitted to, and which of its figures they are; they are not scored."""


def h100(*ids: str) -> Iterator[Score]:
    """Score published cells of MagiAttention on 8 to 64 H100, for the strategies that ringprof has."""
    yield from _published("H100", "h100", Cluster(nic_gbit=400.0), ids)


def b200(*ids: str) -> Iterator[Score]:
    """Score published cells of MagiAttention on 8 to 64 B200, for the strategies that ringprof has."""
    yield from _published("B200", "b200", Cluster(nic_gbit=400.0), ids)


def a800(*ids: str) -> Iterator[Score]:
    """Score published cells of BurstEngine on 32 A800."""
    yield from _published("A800", "a800", Cluster(nic_gbit=200.0, gpus_per_nic=2), ids)


def _published(hardware: str, machine: str, cluster: Cluster, ids: Sequence[str]) -> Iterator[Score]:
    """Yield the rows of ``ids``, or all of the hardware, except those that its machine was fitted to."""
    chosen = [
        row
        for row in rows()
        if row["hardware"].startswith(hardware) and row["id"] not in FITTED_ROWS and (not ids or row["id"] in ids)
    ]
    for checked in check_rows(chosen, read_calibration(machine), schedule_of, cluster):
        if checked.predicted_ms and checked.measured.ms:
            low, median_ms, high = checked.predicted_ms
            row = chosen[checked.measured.line - 2]
            name = f"{row['id']} {row['strategy']} {row['n_gpus']} {row['seq_global']} {row['pass']}"
            yield Score(
                f"{name} {'causal' if row['causal'] == 'True' else 'full'}", checked.measured.ms, median_ms, low,
                high, family=row["strategy"], machine=machine, part=row["pass"], hosts=int(row["hosts"]),
            )  # fmt: skip


@cache
def rows() -> list[dict[str, str]]:
    with open(DATA / "attention.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


BEATS_KERNEL = ("V0001", "V0002", "V0003", "V0004", "V0005", "V0006")
"""Published rows that are scored apart: of one system in one log, of which the audit flags any `above_kernel`."""
NOT_COMPARABLE = {
    **dict.fromkeys(BEATS_KERNEL, "a log of which three rows are faster than the kernel alone"),
    **dict.fromkeys(
        ("V0019", "V0020", "V0021", "V0022", "V0023", "V0024"), "ranks idle: grows with the square of the length, twice"
    ),
}
"""Published rows that no spread is fitted to, each with the reason."""
_LEAST_ROWS = 10
"""Rows of a family on a machine from which they have a spread of their own."""
_Z_80 = 1.2816


def family_spreads(scores: Sequence[Score]) -> dict[str, dict[str, float]]:
    """Return the relative spread by machine and family with which four of five published rows lie inside.

    Families with few rows on a machine have that of all machines, ``other`` is that of all rows of the machine.
    """
    usable = [score for score in scores if score.name.split()[0] not in NOT_COMPARABLE]
    families = sorted({score.family for score in usable})
    result: dict[str, dict[str, float]] = {}
    for machine in sorted({score.machine for score in usable}):
        own = [score for score in usable if score.machine == machine]
        result[machine] = {"other": family_spread(own)}
        for family in families:
            rows_here = [score for score in own if score.family == family]
            enough = len(rows_here) >= _LEAST_ROWS
            chosen = rows_here if enough else [score for score in usable if score.family == family]
            result[machine][family] = family_spread(chosen)
    return result


def family_spread(scores: Sequence[Score], share: float = 0.8) -> float:
    """Return the smallest spread of a family, in steps of 0.001, with which a ``share`` of the rows lies inside."""
    needed = math.ceil(len(scores) * share)
    return next(
        step / 1000 for step in range(2000) if sum(inside_with(score, step / 1000) for score in scores) >= needed
    )


def inside_with(score: Score, family: float) -> bool:
    """Return whether a published row lies within its interval if its family has another spread."""
    assert score.low is not None and score.high is not None
    spread = math.log(score.high / score.low) / 2 / _Z_80
    own = max(0.0, spread**2 - read_calibration(score.machine).family_variance(score.family, score.hosts))
    return abs(math.log(score.measured / score.predicted)) <= _Z_80 * math.sqrt(own + family**2)


def left_out(scores: Sequence[Score]) -> Iterator[tuple[str, int, int, int]]:
    """Yield by family its rows, and how many lie inside by the spreads of other machines and of other families."""
    usable = [score for score in scores if score.name.split()[0] not in NOT_COMPARABLE]
    for family in sorted({score.family for score in scores}):
        own, by_machine, by_family = [score for score in scores if score.family == family], 0, 0
        for score in own:
            same = [other for other in usable if other.family == family and other.machine != score.machine]
            others = [other for other in usable if other.family != family and other.machine == score.machine]
            elsewhere = [other for other in usable if other.family != family and other.machine != score.machine]
            by_machine += inside_with(score, _cached_spread(tuple(same or elsewhere)))
            by_family += inside_with(score, _cached_spread(tuple(others)))
        yield family, len(own), by_machine, by_family


_cached_spread = cache(family_spread)


def transfer_margin(scores: Sequence[Score], bound: str, share: float = 0.8) -> float:
    """Return the factor by which intervals must be widened to contain a ``share`` of further cases: split conformal.

    (Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World, section 4.1; Papadopoulos et al. 2002 for the
    division by each case's own spread.) ``bound`` selects the spread, ``device`` or ``host``.
    """
    needed = min(math.ceil((len(scores) + 1) * share), len(scores))
    factors = (
        factor for factor in range(1, 10_000) if sum(inside(score, bound, factor / 100) for score in scores) >= needed
    )
    return next(factors) / 100


def inside(score: Score, bound: str, factor: float) -> bool:
    """Return whether the measurement lies in the interval with another `Calibration.transfer_margin`."""
    assert score.prediction is not None
    time, margin = score.prediction.time, score.prediction.machine.transfer_margin.get(bound)
    distribution = getattr(time, bound)
    distribution = replace(distribution, spread=distribution.spread * factor / (margin.value if margin else 1.0))
    time = replace(time, **{bound: distribution})
    return time.quantile_ns(0.1) <= score.measured * 1e6 <= time.quantile_ns(0.9)


def held_out() -> dict[str, list[Score]]:
    """Return per bound the runs of other machines and days that no curve of the bundled h200 was fitted to.

    Host-bound cells of the grid are left out: older code recorded them, with a fifth more host time.
    """
    by_bound: dict[str, list[Score]] = {"device": [], "host": []}
    for score in (*shapes(), *later(), *last(), *short(), *host(), *host_elsewhere(), *grid()):
        by_bound["host" if _by_host(score) else "device"].append(score)
    return by_bound


def measured_twice() -> dict[str, tuple[float, float]]:
    """Return milliseconds per program of two processes on one host, recorded within two minutes."""
    times: dict[str, list[float]] = {}
    for shape in recorded_shapes("h200_shapes_4.csv"):
        times.setdefault(shape.name, []).append(shape.ms)
    return {name: (first, second) for name, (first, second) in times.items()}


def ranking(scores: Sequence[Score], slack: float = 0.03) -> tuple[int, int]:
    """Count the cells (GPUs, length, pass, mask) in which the predicted best strategy is the best, or within ``slack``
    of it."""
    cells: dict[tuple[str, ...], list[Score]] = {}
    for score in scores:
        cells.setdefault(tuple(score.name.split()[2:]), []).append(score)
    compared = [cell for cell in cells.values() if len(cell) > 1]
    good = 0
    for cell in compared:
        best = min(score.measured for score in cell)
        good += min(cell, key=lambda score: score.predicted).measured <= best * (1 + slack)
    return good, len(compared)


PARTS: dict[str, Callable[[], Iterator[Score]]] = {
    "shapes": shapes, "short": short, "host": host, "host_elsewhere": host_elsewhere, "later": later, "last": last,
    "masks": masks, "other_heads": other_heads, "h100_shapes": h100_shapes, "h100_masks": h100_masks,
    "h200_later": h200_later, "h200_kernels": h200_kernels, "grid": grid, "grid_host": grid_host, "runs": runs,
    "strategies": strategies,
    "lengths": lengths, "eight": eight, "replays": replays, "h100": h100, "b200": b200, "a800": a800,
    "plain_masks": plain_masks, "peers": peers, "inference": inference, "steps": steps,
}  # fmt: skip

_H200 = "the bundled h200: curves of the committed runs and of calibrate; none of these rows, except for the width"
_H100 = "the bundled h100: curves of calibrate in the same session; none of these rows"
FITTED = {
    **dict.fromkeys(("shapes", "short", "host_elsewhere", "later", "last", "grid", "grid_host"), f"{_H200} (margins)"),
    "host": f"{_H200} (margins); host times of other passes on this host",
    "masks": f"{_H200}; curves of documents and windows of the same session",
    "other_heads": f"{_H200}; curves of these head sizes of the same session",
    "h100_shapes": _H100, "h100_masks": _H100,
    "h200_later": "the bundled h200: flash-attn 3's curves of another session and of H100; none of these rows",
    "h200_kernels": "the bundled h200: curves of flash-attn 3 and 4 of another session; none of these rows",
    "plain_masks": "the bundled machines without calls of documents and windows; the ratio by those calls, not by runs",
    "peers": f"{_H200} (margins)",
    "steps": f"{_H200} (margins); layers measured on one H200; the spread of a whole step by these rows",
    "inference": f"{_H200} (margins); the rate of reading a cache by dev/benchmarks/decode_kernels.py",
    "runs": "the committed runs, without the one that is scored",
    "strategies": "the committed runs of other strategies",
    "lengths": "the committed runs of other lengths",
    "eight": "the committed runs of 4 GPUs",
    "replays": "the run itself: its own blocks and hops",
    "h100": "the bundled h100: curves of calibrate on 2 H100, links published or as on H200; none of these rows",
    "b200": "the bundled b200: kernel from published curves and V1001, V1021, V1041, V1061; all else scaled from H200",
    "a800": "the bundled a800: kernel from the table beside V0135, NIC from V0109; no other row",
}  # fmt: skip
"""Data that the machine which predicts a part was fitted to, and whether rows that are scored are among it."""


def show(name: str, scores: Sequence[Score]) -> None:
    print(f"\n{name}: {(PARTS[name].__doc__ or '').splitlines()[0]}\n  fitted to: {FITTED[name]}")
    for score in scores:
        position = {True: "inside", False: "outside", None: ""}[score.inside]
        times = f"{score.measured:12.2f} ms {score.predicted:12.2f}"
        print(f"  {score.name:48} {times} {100 * score.error:+7.1f} %  {position}")
    print(f"  {summary(scores)}")
    if name in ("h100", "b200"):
        good, cells = ranking(scores)
        print(f"  the best, or one within 3 % of it, is chosen in {good} of {cells} cells")


def summary(scores: Sequence[Score]) -> str:
    """Return number, mean error, bias, range and coverage of some scores in one line."""
    errors = [100 * score.error for score in scores]
    flags = [score.inside for score in scores if score.inside is not None]
    mean, bias = sum(map(abs, errors)) / len(errors), sum(errors) / len(errors)
    inside_text = f", {100 * sum(flags) / len(flags):.0f} % inside the 80 % interval" if flags else ""
    return (
        f"{len(scores):3}: mean error {mean:5.2f} %, bias {bias:+6.2f} %, {min(errors):+6.1f} to {max(errors):+6.1f} %"
        f"{inside_text}"
    )


def show_groups(scores: Sequence[Score]) -> None:
    """Print the errors by family, machine and pass."""
    groups: dict[tuple[str, ...], list[Score]] = {}
    for score in scores:
        groups.setdefault(score.group, []).append(score)
    print("\nby family, machine and pass:")
    for (family, machine, part), members in sorted(groups.items()):
        print(f"  {family:12} {machine:5} {part:8} {summary(members)}")


COLUMNS = ("part", "name", "family", "machine", "pass", "hosts", "measured_ms", "predicted_ms", "low_ms", "high_ms")


def write_csv(path: str, scores_by_part: dict[str, list[Score]]) -> None:
    """Write every score as a row of a table."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for part, scores in scores_by_part.items():
            for score in scores:
                times = (score.measured, score.predicted, score.low, score.high)
                writer.writerow([part, score.name, *score.group, score.hosts, *(t and f"{t:.5g}" for t in times)])


def read_csv(path: Path) -> dict[str, list[Score]]:
    """Return the scores by part of a table that `write_csv` wrote."""
    scores: dict[str, list[Score]] = {}
    with open(path, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            measured, predicted, low, high = (
                float(row[f"{name}_ms"]) if row[f"{name}_ms"] else None
                for name in ("measured", "predicted", "low", "high")
            )
            assert measured is not None and predicted is not None
            scores.setdefault(row["part"], []).append(Score(
                row["name"], measured, predicted, low, high, None, row["family"], row["machine"], row["pass"],
                int(row["hosts"]),
            ))  # fmt: skip
    return scores


def main(arguments: Sequence[str]) -> None:
    path, parts = (arguments[1], arguments[2:]) if arguments[:1] == ["--csv"] else ("", arguments)
    scores_by_part = {}
    for part in parts or PARTS:
        scores_by_part[part] = list(PARTS[part]())
        show(part, scores_by_part[part])
    show_groups([score for part, scores in scores_by_part.items() if part != "replays" for score in scores])
    if path:
        write_csv(path, scores_by_part)


if __name__ == "__main__":
    main(sys.argv[1:])
