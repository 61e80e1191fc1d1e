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
from ringprof.prediction import prediction_page, recommendation_text
from ringprof.prediction.advise import Advice, advice_dict
from ringprof.prediction.advise import advise as _advise
from ringprof.prediction.as_run import write_prediction
from ringprof.prediction.calibration import Calibration, read_calibration
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import PredictionResult, prediction_dict
from ringprof.prediction.predict import predict as _predict
from ringprof.prediction.query import Query
from ringprof.prediction.text import part_labels, prediction_text
from ringprof.report import plots
from ringprof.report.page.html import render as page
from ringprof.report.result import Result
from ringprof.report.text import TextStyle
from ringprof.results.frames import PREDICTION_COLUMNS
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
    return _frame("balance", [vars(row) for row in balances(_converted(workload, Workload), world)])


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
        rows = [
            {"phase": phase, "part": part_labels(self.prediction.query.workload)[part], "time_ms": ns / 1e6}
            for phase, parts in self.prediction.breakdown.phases.items() for part, ns in parts.items()
        ]  # fmt: skip
        return _frame("parts", rows)

    @property
    def verdict(self) -> list[str]:
        """Predicted time with its interval, then what limits it and what the prediction does not cover."""
        document = prediction_page.document(self.prediction)
        return [document.headline, *document.verdict]

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
        return page(prediction_page.document(self.prediction))

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
        rows = []
        for choice in self.advice.choices:
            prediction = choice.prediction
            low, middle, high = prediction.interval_ms
            rows.append({
                "choice": choice.label, "best": choice.best, "low_ms": low, "middle_ms": middle, "high_ms": high,
                "tflops": prediction.tflops(prediction.median_ns), "exposed": prediction.exposed_share,
                "peak_bytes": prediction.peak_bytes,
                "fits": choice.fits, "on_front": choice.on_front,
            })  # fmt: skip
        return _frame("choices", rows)

    def over(self, what: str = "tokens") -> pd.DataFrame:
        """Return the compared choices over ``tokens``, ``hosts`` or ``nic``, with one row per choice and value."""
        rows = [
            {"choice": name, "at": value, "low_ms": low, "middle_ms": middle, "high_ms": high}
            for name, points in recommendation_text.series(self.advice, what).items()
            for value, (low, middle, high) in points
        ]  # fmt: skip
        return _frame("over", rows)

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


def _frame(name: str, rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    frame = pd.DataFrame(list(rows), columns=list(PREDICTION_COLUMNS[name]))
    frame.attrs["columns"] = dict(PREDICTION_COLUMNS[name])
    return frame
