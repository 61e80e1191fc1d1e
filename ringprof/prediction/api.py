"""The public functions of foresight: `predict` and `advise`, as objects with frames and plots."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ringprof.errors import UsageError
from ringprof.formatting import percent
from ringprof.frames import PREDICTION_FRAMES
from ringprof.json_object import JsonObject
from ringprof.prediction import recommendation_text
from ringprof.prediction.advise import Advice, advice_dict
from ringprof.prediction.advise import advise as _advise
from ringprof.prediction.as_run import write_prediction
from ringprof.prediction.calibration import Calibration, read_calibration
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import PredictionResult, prediction_dict
from ringprof.prediction.predict import predict as _predict
from ringprof.prediction.query import Query
from ringprof.prediction.text import PART_LABELS, prediction_text
from ringprof.report import plots
from ringprof.report.page.html import render as page
from ringprof.report.text import TextStyle
from ringprof.run import Run, Workload

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_T = TypeVar("_T")
ONE_HOST = Cluster()
"""Eight GPUs."""
MachineLike = str | os.PathLike[str] | Calibration
"""A bundled machine's name (`ringprof.prediction.calibration.BUNDLED`), a file of ``ringprof calibrate``, or one
read."""


def predict(
    strategy: str, workload: Workload, cluster: Cluster = ONE_HOST, *, machine: MachineLike, kernel: str = "auto",
    hops: str = "auto", params: Mapping[str, Any] | None = None,
) -> Prediction:  # fmt: skip
    """What a strategy will take: ``predict("burst", Workload(seq=1 << 20, ...), Cluster(hosts=4), machine="h100")``.

    Raises what ``ringprof predict`` says: `UnsupportedWorkloadError` where the strategy cannot run so, `UsageError`
    outside
    of what the machine's file tells.
    """
    from ringprof.prediction.schedules import schedule_of

    query = Query(strategy, _checked(workload, Workload), _checked(cluster, Cluster), kernel, hops, params or {})
    return Prediction(_predict(query, _read(machine), schedule_of))


def advise(
    workload: Workload, cluster: Cluster = ONE_HOST, *, machine: MachineLike, kernel: str = "auto",
    memory_bytes: int | None = None, strategies: Sequence[str] = (),
) -> Recommendation:  # fmt: skip
    """Every strategy, degree, placement, window and hop engine foreseen, by time; raises as `predict`."""
    from ringprof.prediction.schedule_cache import ScheduleCache

    chosen = _advise(
        _checked(workload, Workload), _checked(cluster, Cluster), _read(machine), ScheduleCache().of, kernel=kernel,
        memory_bytes=memory_bytes, strategies=strategies,
    )  # fmt: skip
    return Recommendation(chosen)


def _read(machine: MachineLike) -> Calibration:
    return machine if isinstance(machine, Calibration) else read_calibration(machine)


def _checked(given: Any, kind: type[_T]) -> _T:
    """A problem or a cluster, or a dict of its fields. Raises `UsageError` for what is neither."""
    try:
        return msgspec.convert(msgspec.to_builtins(given), kind)
    except (msgspec.ValidationError, TypeError) as error:
        raise UsageError(f"{kind.__name__}: {error}") from None


class Prediction:
    """One prediction."""

    def __init__(self, prediction: PredictionResult) -> None:
        self.prediction = prediction

    @property
    def interval_ms(self) -> tuple[float, float, float]:
        """Milliseconds an iteration: in nine of ten cases more, the middle, in one of ten more."""
        return self.prediction.interval_ms

    @property
    def tflops(self) -> float:
        """Per GPU, of the middle."""
        return self.prediction.tflops(self.prediction.median_ns)

    def report(self) -> JsonObject:
        """Schema ``ringprof.prediction/1``."""
        return prediction_dict(self.prediction)

    def parts(self) -> pd.DataFrame:
        """A row a phase and part of the slowest rank's time."""
        rows = [
            {"phase": phase, "part": PART_LABELS[part], "time_ms": ns / 1e6}
            for phase, found in self._phases().items() for part, ns in found.items()
        ]  # fmt: skip
        return _frame("parts", rows)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Where the time goes: a bar a phase, in parts."""
        rows = {
            phase: {PART_LABELS[part]: ns / 1e6 for part, ns in found.items()}
            for phase, found in self._phases().items()
        }
        drawn = plots.parts(rows, "ms of the slowest rank, predicted", ax)
        drawn.set_title(repr(self))
        return drawn

    def _phases(self) -> dict[str, dict[str, float]]:
        spans = self.prediction.spans
        return {name: found for name, found in (("forward", spans.forward), ("backward", spans.backward)) if found}

    def write(self, folder: str | os.PathLike[str]) -> Run:
        """Write ``run.json`` and traces of the ranks that were simulated, for `ringprof.load`."""
        return write_prediction(self.prediction, Path(folder), ["ringprof.predict"])

    def to_terminal(self, style: TextStyle | None = None) -> str:
        """As ``ringprof predict`` prints it."""
        return prediction_text(self.prediction, style or TextStyle())

    def __repr__(self) -> str:
        low, middle, high = self.interval_ms
        return f"PREDICTED {self.prediction.query.strategy}: {middle:.3f} ms ({low:.3f} to {high:.3f})"


class Recommendation:
    """The choices for a problem on a cluster."""

    def __init__(self, advice: Advice) -> None:
        self.advice = advice

    @property
    def first(self) -> Prediction:
        """The fastest that fits."""
        return Prediction(self.advice.first.prediction)

    @property
    def plot(self) -> RecommendationPlots:
        return RecommendationPlots(self.advice)

    def report(self) -> JsonObject:
        """Schema ``ringprof.advice/1``."""
        return advice_dict(self.advice)

    def choices(self) -> pd.DataFrame:
        """A row a choice, the fastest that fits first."""
        rows = []
        for choice in self.advice.choices:
            one = choice.prediction
            low, middle, high = one.interval_ms
            rows.append({
                "choice": choice.label, "best": choice.best, "low_ms": low, "middle_ms": middle, "high_ms": high,
                "tflops": one.tflops(one.median_ns), "exposed": one.exposed_share, "peak_bytes": one.peak_bytes,
                "fits": choice.fits, "on_front": choice.on_front,
            })  # fmt: skip
        return _frame("choices", rows)

    def over(self, what: str = "tokens") -> pd.DataFrame:
        """The first strategies over ``tokens``, ``hosts`` or ``nic``: a row a choice and place."""
        rows = [
            {"choice": name, "at": at, "low_ms": low, "middle_ms": middle, "high_ms": high}
            for name, points in recommendation_text.series(self.advice, what).items()
            for at, (low, middle, high) in points
        ]  # fmt: skip
        return _frame("over", rows)

    def to_terminal(self, style: TextStyle | None = None) -> str:
        """As ``ringprof advise`` prints it."""
        return recommendation_text.advice_text(self.advice, style or TextStyle())

    def to_html(self) -> str:
        """The page of ``ringprof advise --html``."""
        return page(recommendation_text.document(self.advice))

    def __repr__(self) -> str:
        first = self.advice.first
        return f"{self.first!r}: {first.label} of {len(self.advice.choices)}, {percent(first.best, 0)} to be the best"


class RecommendationPlots:
    """``advised.plot``."""

    def __init__(self, advice: Advice) -> None:
        self._advice = advice

    def choices(self, ax: Axes | None = None) -> Axes:
        """The interval of every choice, ms an iteration."""
        shown = self._advice.choices[: recommendation_text.MOST_SHOWN]
        names, values = [choice.label for choice in shown], [choice.prediction.interval_ms for choice in shown]
        return plots.intervals(names, values, "ms an iteration, predicted; 80 % within the bar", ax)

    def tokens(self, ax: Axes | None = None) -> Axes:
        """Speed of the first strategies against length, with bands and where one overtakes the first."""
        return self._over("tokens", ax)

    def hosts(self, ax: Axes | None = None) -> Axes:
        """The same against hosts."""
        return self._over("hosts", ax)

    def nic(self, ax: Axes | None = None) -> Axes:
        """The same against the rate of a NIC."""
        return self._over("nic", ax)

    def _over(self, name: str, ax: Axes | None) -> Axes:
        advice = self._advice
        drawn = recommendation_text.speeds(advice, name), recommendation_text.marks(advice, name)
        return plots.bands(recommendation_text.ACROSS[name], recommendation_text.SPEED, *drawn, ax)


def _frame(name: str, rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    frame = pd.DataFrame(list(rows), columns=list(PREDICTION_FRAMES[name]))
    frame.attrs["columns"] = dict(PREDICTION_FRAMES[name])
    return frame
