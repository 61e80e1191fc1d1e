"""Metrics of a report by name, and conditions on them for CI: ``exposed_comm > 5%``, ``tflops < 0.95 * base``.

A name means the same in every report and comparison: a mean over ranks, with ``max(...)`` and ``min(...)`` over ranks.
``exposed_comm``, ``idle``, the causes of idle time (``idle_host``) and the other parts of the time are shares of the
wall time (0..1). With ``_ns`` they are times over the whole window, with ``_ms`` times of one iteration
(`ringprof.analysis.findings.measurements`). A metric whose value is not known is left out.

A metric that was measured repeatedly has an interval. A condition on it is decided where the answer is the same over
the whole interval, and otherwise undecided. A metric that was measured once counts as exact.

Grammar: FIGURE OP NUMBER[%] [* base], with OP one of < <= > >= == !=, and FIGURE a name, or ``max(name)`` or
``min(name)`` over ranks. Conditions are parsed, never evaluated as code.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from statistics import fmean

import msgspec

from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.metric import WATERFALL_PREFIX
from ringprof.analysis.findings.metric_table import METRICS, Use
from ringprof.analysis.findings.time_table import IDLE_LABELS, TIMES
from ringprof.analysis.kinds.kinds import KINDS
from ringprof.analysis.rank import Rank
from ringprof.errors import UsageError

_TIMES_WITH_SHARES = [row.name for row in TIMES if row.name not in ("wall", "exposed_other_groups", "blocked_on_peer")]
"""Times that conditions know of every rank, with their share of its wall time."""
_HOP_METRICS = {
    "wait_share": "wait_share",
    "wire_gbps": "wire_gbps",
    "wait_ns": "wait_ns",
    "wire_ns": "wire_ns",
    "hops": "count",
    "hop_bytes": "sent_bytes",
}
"""Fields of `HopTotals` by the name of the metric."""


def metrics_of(findings: Findings) -> dict[str, float]:
    """Return all known metrics of a run or of traces, by name."""
    metrics: dict[str, float] = {}
    by_rank = [_rank_metrics(rank) for rank in findings.attribution.ranks]
    for name in dict.fromkeys(name for of_rank in by_rank for name in of_rank):
        values = [of_rank[name] for of_rank in by_rank if name in of_rank]
        metrics |= {name: fmean(values), f"max({name})": max(values), f"min({name})": min(values)}
    # Shares in a report are total time over total wall time of all ranks, not means of the ranks' shares.
    *parts, wall = findings.summary.parts
    metrics |= {part.name: part.share for part in parts}
    metrics |= {name: metrics[f"{name}_ns"] / wall.mean_ns for name in IDLE_LABELS if wall.mean_ns and name in metrics}
    other = {row.name: row.value(findings) for row in METRICS if Use.CONDITIONS in row.use}
    if findings.inference is not None:
        other |= {f"bound.{name}": share for name, share in findings.inference.shares.items()}
    if findings.step_rates is not None:
        other |= {f"{row.part}_tflops": row.tflops for row in findings.step_rates.parts}
    metrics |= {name: float(value) for name, value in other.items() if value is not None}
    return metrics | {f"{WATERFALL_PREFIX}{part.part}": part.share for part in findings.waterfall.parts}


def _rank_metrics(rank: Rank) -> dict[str, float]:
    """Return the metrics of one rank by name."""
    breakdown, hops = rank.breakdown, rank.hop_totals
    times_ns: dict[str, int | None] = {name: getattr(breakdown, f"{name}_ns") for name in _TIMES_WITH_SHARES}
    if rank.idle is not None:
        causes_ns = rank.idle.host_ns, rank.idle.gap_ns, rank.idle.blocked_ns, breakdown.blocked_on_peer_ns
        times_ns |= zip(IDLE_LABELS, causes_ns, strict=True)
    metrics: dict[str, float | None] = {"wall_ns": breakdown.wall_ns}
    for name, time_ns in times_ns.items():
        if time_ns is not None:
            metrics |= {f"{name}_ns": time_ns, name: time_ns / breakdown.wall_ns if breakdown.wall_ns else 0.0}
    metrics["overlap_ratio"] = breakdown.overlap_ratio
    metrics |= {f"{kind}_ns": breakdown.kinds[kind].time_ns if kind in breakdown.kinds else 0 for kind in KINDS}
    if hops.count:
        metrics |= {name: getattr(hops, field) for name, field in _HOP_METRICS.items()}
    return {name: value for name, value in metrics.items() if value is not None}


_USUAL = ("exposed_comm", "max(exposed_comm)", "idle", "overlap_ratio", "wait_share", "wall_ms", "tflops")
"""Names that the message about an unknown one lists."""
_NOT_SHARES = {"wire_gbps", "hops", *(row.name for row in METRICS if row.unit != "share")}


def shares_among(names: Iterable[str]) -> set[str]:
    """Return the names of the metrics that are shares, 0..1 or more."""
    plain_names = {name: name.partition("(")[2].rstrip(")") or name for name in names}
    return {
        name
        for name, plain in plain_names.items()
        if plain not in _NOT_SHARES and not plain.endswith(("_ns", "_ms", "_bytes", "_mib", "_mb", "_tflops"))
    }


_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_GRAMMAR = re.compile(
    r"\s*(?:(?P<over>max|min)\s*\(\s*(?P<inner>[a-z_][a-z0-9_.]*)\s*\)|(?P<plain>[a-z_][a-z0-9_.]*))"
    r"\s*(?P<sign><=|>=|==|!=|<|>)\s*(?P<number>[+-]?[0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*(?P<percent>%?)"
    r"\s*(?P<base>\*\s*base)?\s*",
    re.IGNORECASE,
)


class Condition(msgspec.Struct, frozen=True):
    """One parsed condition."""

    text: str
    """Condition as the user wrote it."""
    figure: str
    """Name of a metric, or ``max(name)`` or ``min(name)``."""
    sign: str
    """Comparison operator."""
    number: float
    """Limit; a share (0..1) where the text gives percent."""
    percent: bool
    """Whether the text gives the limit in percent."""
    of_base: bool
    """Whether the limit is a multiple of the base's value."""

    def holds(
        self,
        figures: Mapping[str, float],
        base: Mapping[str, float],
        shares: Collection[str] | None = None,
        interval: tuple[float, float] | None = None,
    ) -> bool | None:
        """Return whether the condition holds for these metrics; None where it is undecided.

        ``shares``: names of the metrics that are shares; None skips the check of units. ``interval``: 95 % interval of
        the metric, or of its ratio to the base's; None where it was measured once. An interval that contains the limit
        leaves the condition undecided. Raises `UsageError` for an unknown metric, and for a limit in another unit,
        with which the condition would hold always or never.
        """
        value = self._figure(figures)
        if shares is not None and not self.of_base:
            self._refuse_other_unit(is_share=self.figure in shares)
        test = _OPERATORS[self.sign]
        if interval is not None and self.sign not in ("==", "!="):
            low, high = (test(end, self.number) for end in interval)
            return low if low == high else None
        return test(value, self.number * (self._figure(base) if self.of_base else 1.0))

    def _figure(self, figures: Mapping[str, float]) -> float:
        """Return the value of the condition's metric. Raises `UsageError` where it is unknown, with similar names."""
        if self.figure not in figures:
            similar = ", ".join(difflib.get_close_matches(self.figure, figures, n=3, cutoff=0.6))
            usual = [name for name in _USUAL if name in figures] or [*figures][: len(_USUAL)]
            others = len(figures) - len(usual)
            listed = (", ".join(usual) or "none") + f" and {others} more (docs/metrics.md lists all)" * (others > 0)
            advice = f"did you mean {similar}?" if similar else f"there are: {listed}"
            raise UsageError(f"--fail-if {self.text!r}: no figure {self.figure!r} here; {advice}")
        return figures[self.figure]

    def _refuse_other_unit(self, *, is_share: bool) -> None:
        """Raise `UsageError` for a limit in another unit than the metric's."""
        if is_share and not self.percent and abs(self.number) > 1:
            meant = f"{self.figure} {self.sign} {self.number:g}%"
            raise UsageError(f"--fail-if {self.text!r}: {self.figure} is a share: did you mean {meant!r}?")
        if self.percent and not is_share:
            meant = f"{self.figure} {self.sign} {self.number:g} * base"
            raise UsageError(f"--fail-if {self.text!r}: {self.figure} is no share: did you mean {meant!r}?")


def parse_condition(text: str) -> Condition:
    """Parse a condition of ``--fail-if``, such as ``tflops < 0.95 * base``; raise `UsageError` with its grammar."""
    match = _GRAMMAR.fullmatch(text)
    number = float(match["number"]) if match else math.nan
    if match is None or not math.isfinite(number):
        raise UsageError(f"--fail-if {text!r}: write FIGURE OP NUMBER[%] [* base], such as 'tflops < 0.95 * base'")
    scaled = number / 100 if match["percent"] else number
    figure = f"{match['over'].lower()}({match['inner']})" if match["over"] else match["plain"]
    return Condition(text.strip(), figure, match["sign"], scaled, bool(match["percent"]), bool(match["base"]))
