"""The public functions `predict`, `advise` and `balance`: predictions as objects with data frames and plots."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ringprof.common.formatting import percent
from ringprof.common.json_object import JsonObject
from ringprof.common.validation import refuse_below_one
from ringprof.errors import UsageError
from ringprof.prediction import recommendation_text
from ringprof.prediction.advise import Advice, advice_dict
from ringprof.prediction.advise import advise as _advise
from ringprof.prediction.as_run import write_prediction
from ringprof.prediction.calibration import Calibration, read_calibration
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import PredictionResult, prediction_dict
from ringprof.prediction.predict import predict as _predict
from ringprof.prediction.query import Query
from ringprof.prediction.text import document, part_labels, prediction_text
from ringprof.report import plots
from ringprof.report.page.html import render as page
from ringprof.report.result import Result
from ringprof.report.text import TextStyle
from ringprof.run import Run
from ringprof.workload.workload import Workload

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_T = TypeVar("_T")
ONE_HOST = Cluster()
"""One host with eight GPUs."""
MachineLike = str | os.PathLike[str] | Calibration
"""The name of a bundled machine (`ringprof.prediction.calibration.BUNDLED`), the path of a file written by ``ringprof
calibrate``, or a `Calibration`."""


def predict(
    strategy: str, workload: Workload, cluster: Cluster = ONE_HOST, *, machine: MachineLike, kernel: str = "auto",
    hops: str = "auto", params: Mapping[str, Any] | None = None,
) -> Prediction:  # fmt: skip
    """Predict the performance of a strategy: ``predict("burst", Workload(seq=1 << 20, ...), Cluster(hosts=4),
    machine="h100")``.

    Raises the errors of ``ringprof predict``: `UnsupportedWorkloadError` if the strategy cannot run this way,
    `UsageError` for anything that the machine's file does not cover.
    """
    from ringprof.prediction.schedules import schedule_of

    query = Query(strategy, _converted(workload, Workload), _converted(cluster, Cluster), kernel, hops, params or {})
    return Prediction(_predict(query, _read(machine), schedule_of))


def advise(
    workload: Workload, cluster: Cluster = ONE_HOST, *, machine: MachineLike, kernel: str = "auto",
    memory_bytes: int | None = None, strategies: Sequence[str] = (),
) -> Recommendation:  # fmt: skip
    """Predict every bundled strategy with its degrees, placements and transports, and order them by time.

    Raises the errors of `predict`.
    """
    from ringprof.prediction.schedules import ScheduleCache

    advice = _advise(
        _converted(workload, Workload), _converted(cluster, Cluster), _read(machine), ScheduleCache().of, kernel=kernel,
        memory_bytes=memory_bytes, strategies=strategies,
    )  # fmt: skip
    return Recommendation(advice)


def balance(workload: Workload, world: int = 8) -> pd.DataFrame:
    """Compare the load balance of strategies and layouts for a mask on ``world`` ranks, best first. Needs no GPU.

    One row per strategy with its parameters; the columns are ``frame.attrs["columns"]``. Raises `UsageError`.
    """
    from ringprof.prediction.balance import balances  # imports torch

    refuse_below_one({"world": world})
    rows = balances(_converted(workload, Workload), world)
    return _frame({name: (meaning, [getattr(row, name) for row in rows]) for name, meaning in _BALANCE.items()})


_BALANCE = {
    "strategy": "name of the strategy",
    "params": "parameters of the strategy",
    "reason": "why the strategy cannot run this; empty if it can",
    "busiest": "work of the busiest rank over the mean of the ranks",
    "steps": "work of the busiest rank of each ring step, summed over the steps, over the mean rank's total; missing "
    "where ranks do not wait for each other in every step",
    "needed": "share of the ordered pairs of ranks of which the first needs keys of the second, 0..1",
}


def _read(machine: MachineLike) -> Calibration:
    return machine if isinstance(machine, Calibration) else read_calibration(machine)


def _converted(value: Any, kind: type[_T]) -> _T:
    """Convert a workload or a cluster, or a dict of its fields, to ``kind``. Raises `UsageError` for anything else."""
    try:
        return msgspec.convert(msgspec.to_builtins(value), kind)
    except (msgspec.ValidationError, TypeError) as error:
        raise UsageError(f"{kind.__name__}: {error}") from None


class Prediction(Result):
    """The predicted performance of one run."""

    _frames = ("parts",)

    def __init__(self, prediction: PredictionResult) -> None:
        self.prediction = prediction

    @property
    def interval_ms(self) -> tuple[float, float, float]:
        """Milliseconds per iteration as 10th, 50th and 90th percentile."""
        return self.prediction.interval_ms

    @property
    def tflops(self) -> float:
        """TFLOP/s per GPU at the median time."""
        return self.prediction.tflops(self.prediction.median_ns)

    def report(self) -> JsonObject:
        """Return the prediction as a dict of schema ``ringprof.prediction/1``."""
        return prediction_dict(self.prediction)

    def parts(self) -> pd.DataFrame:
        """Return the time of the slowest rank, with one row per phase and part."""
        labels = part_labels(self.prediction.query.workload)
        phases = self.prediction.breakdown.phases
        rows = [(phase, labels[part], ns / 1e6) for phase, parts in phases.items() for part, ns in parts.items()]
        return _frame({
            "phase": ("forward or backward", [phase for phase, _, _ in rows]),
            "part": ("part of the time", [part for _, part, _ in rows]),
            "time_ms": ("predicted time of the slowest rank", [time_ms for _, _, time_ms in rows]),
        })  # fmt: skip

    @property
    def verdict(self) -> list[str]:
        """Predicted time with its interval, then what limits it and what the prediction does not cover."""
        sections = document(self.prediction)
        return [sections.headline, *sections.verdict]

    @property
    def plot(self) -> PredictionPlots:
        """Plots with matplotlib: ``parts``, where the time goes, with one stacked bar per phase."""
        return PredictionPlots(self)

    def write(self, folder: str | os.PathLike[str]) -> Run:
        """Write ``run.json`` and traces of the ranks that were simulated, for `ringprof.load`."""
        return write_prediction(self.prediction, Path(folder), ["ringprof.predict"])

    def to_terminal(self, style: TextStyle | None = None) -> str:
        """Return the text that ``ringprof predict`` prints."""
        return prediction_text(self.prediction, style or TextStyle())

    def _page(self) -> str:
        return page(document(self.prediction))

    def __repr__(self) -> str:
        low, middle, high = self.interval_ms
        return f"PREDICTED {self.prediction.query.strategy}: {middle:.3f} ms ({low:.3f} to {high:.3f})"


class Recommendation(Result):
    """Ranked choices for a workload on a cluster."""

    _frames = ("choices", "over")

    def __init__(self, advice: Advice) -> None:
        self.advice = advice

    @property
    def first(self) -> Prediction:
        """Prediction of the fastest choice that fits into memory."""
        return Prediction(self.advice.first.prediction)

    @property
    def verdict(self) -> list[str]:
        """Recommended choice, how sure it is, and where another choice becomes faster."""
        return [recommendation_text.answer(self.advice), *recommendation_text.sentences(self.advice)]

    @property
    def plot(self) -> RecommendationPlots:
        """Plots with matplotlib: ``choices``, and speed over ``tokens``, ``hosts`` and ``nic``."""
        return RecommendationPlots(self.advice)

    def report(self) -> JsonObject:
        """Return the recommendation as a dict of schema ``ringprof.advice/1``."""
        return advice_dict(self.advice)

    def choices(self) -> pd.DataFrame:
        """Return one row per choice; the fastest that fits into memory comes first."""
        choices = self.advice.choices
        predictions = [choice.prediction for choice in choices]
        return _frame({
            "choice": (_CHOICE, [choice.label for choice in choices]),
            "best": ("probability that no other choice is faster, 0..1", [choice.best for choice in choices]),
            **_interval_columns([result.interval_ms for result in predictions]),
            "tflops": ("TFLOP/s per device; missing where the work is not known",
                       [result.tflops(result.median_ns) for result in predictions]),
            "exposed": ("share of the time that waits for transfers, mean over ranks, 0..1",
                        [result.exposed_share for result in predictions]),
            "peak_bytes": ("peak memory of a rank", [result.peak_bytes for result in predictions]),
            "fits": ("whether peak_bytes fits in the memory of a device", [choice.fits for choice in choices]),
            "on_front": ("whether no faster choice needs as little memory", [choice.on_front for choice in choices]),
        })  # fmt: skip

    def over(self, what: str = "tokens") -> pd.DataFrame:
        """Return the compared choices over ``tokens``, ``hosts`` or ``nic``, with one row per choice and value."""
        series = recommendation_text.series(self.advice, what)
        rows = [(name, *point) for name, points in series.items() for point in points]
        return _frame(
            {
                "choice": (_CHOICE, [name for name, _, _ in rows]),
                "at": ("tokens, hosts, or Gbit/s per NIC", [value for _, value, _ in rows]),
                **_interval_columns([interval_ms for _, _, interval_ms in rows]),
            }
        )

    def to_terminal(self, style: TextStyle | None = None) -> str:
        """Return the text that ``ringprof advise`` prints."""
        return recommendation_text.advice_text(self.advice, style or TextStyle())

    def _page(self) -> str:
        return page(recommendation_text.document(self.advice))

    def __repr__(self) -> str:
        first = self.advice.first
        return f"{self.first!r}: {first.label} of {len(self.advice.choices)}, {percent(first.best, 0)} to be the best"


class PredictionPlots(plots.PlotSet):
    """Plots of a prediction: ``prediction.plot``."""

    def __init__(self, prediction: Prediction) -> None:
        self._prediction = prediction

    def parts(self, ax: Axes | None = None) -> Axes:
        """Plot where the time goes, with one stacked bar per phase."""
        result = self._prediction.prediction
        labels = part_labels(result.query.workload)
        rows = {
            phase: {labels[part]: ns / 1e6 for part, ns in parts.items()}
            for phase, parts in result.breakdown.phases.items()
        }
        axes = plots.parts(rows, "ms of the slowest rank, predicted", ax)
        axes.set_title(repr(self._prediction))
        return axes


class RecommendationPlots(plots.PlotSet):
    """Plots of a recommendation: ``recommendation.plot``."""

    def __init__(self, advice: Advice) -> None:
        self._advice = advice

    def choices(self, ax: Axes | None = None) -> Axes:
        """Plot the predicted interval of every choice in ms per iteration."""
        choices = self._advice.choices[: recommendation_text.MOST_SHOWN]
        names, values = [choice.label for choice in choices], [choice.prediction.interval_ms for choice in choices]
        return plots.intervals(names, values, "ms per iteration, predicted; 80 % within the bar", ax)

    def tokens(self, ax: Axes | None = None) -> Axes:
        """Plot predicted TFLOP/s of the compared choices over the sequence length, with intervals and crossings."""
        return self._over("tokens", ax)

    def hosts(self, ax: Axes | None = None) -> Axes:
        """Plot predicted TFLOP/s of the compared choices over the number of hosts."""
        return self._over("hosts", ax)

    def nic(self, ax: Axes | None = None) -> Axes:
        """Plot predicted TFLOP/s of the compared choices over the rate of a NIC."""
        return self._over("nic", ax)

    def _over(self, name: str, ax: Axes | None) -> Axes:
        advice = self._advice
        lines_and_marks = recommendation_text.speeds(advice, name), recommendation_text.marks(advice, name)
        return plots.bands(recommendation_text.ACROSS[name], recommendation_text.SPEED, *lines_and_marks, ax)


_Columns = Mapping[str, tuple[str, Sequence[Any]]]
"""Name of each column of a data frame -> meaning, values."""
_CHOICE = "strategy, degrees, placement and hop engine"


def _frame(columns: _Columns) -> pd.DataFrame:
    import pandas as pd

    frame = pd.DataFrame({name: values for name, (_, values) in columns.items()})
    frame.attrs["columns"] = {name: meaning for name, (meaning, _) in columns.items()}
    return frame


def _interval_columns(intervals_ms: Sequence[tuple[float, float, float]]) -> _Columns:
    percentiles = {"low_ms": "10th percentile", "middle_ms": "median", "high_ms": "90th percentile"}
    return {
        name: (f"predicted milliseconds per iteration, {percentile}", [interval[index] for interval in intervals_ms])
        for index, (name, percentile) in enumerate(percentiles.items())
    }
