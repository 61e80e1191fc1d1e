"""Figures of a report by name, and conditions on them for CI: ``exposed_comm > 5%``, ``tflops < 0.95 * base``.

A name means the same in every report and comparison: a mean over ranks, with ``max(...)`` and ``min(...)`` over them.
``exposed_comm``, ``idle``, its causes (``idle_host``) and the other parts of the time are shares of the wall (0..1);
with ``_ns`` they are times over the whole window, with ``_ms`` of one iteration
(`ringprof.analysis.findings.measurements`). What is not known has no figure.

Of a figure that was repeated a condition holds, or does not, where it does so over the figure's whole interval; else it
is undecided. A figure that was measured once is taken as it is.

Grammar: FIGURE OP NUMBER[%] [* base], with OP one of < <= > >= == !=, and FIGURE a name, or ``max(name)`` or
``min(name)`` over ranks. Parsed, never evaluated as code.
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
from ringprof.analysis.findings.inference import inference_of
from ringprof.analysis.findings.step_rates import step_rates_of
from ringprof.analysis.kinds.kinds import KINDS
from ringprof.analysis.rank import Rank
from ringprof.errors import UsageError

_TIMES = ("compute", "comm", "overlapped", "exposed_comm", "exposed_memory", "background", "idle")

IDLE_FIGURES = ("idle_host", "idle_gap", "idle_blocked", "blocked_on_peer")
"""Causes of idle time, which sum to ``idle``; last what of ``exposed_comm`` is time blocked on a peer's copy."""


def figures_of(found: Findings) -> dict[str, float]:
    """All figures of a run or traces that are known."""
    attribution, summary = found.attribution, found.summary
    figures: dict[str, float] = {}
    ranks = [_of_rank(rank) for rank in attribution.ranks]
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        values = [rank[name] for rank in ranks if name in rank]
        figures |= {name: fmean(values), f"max({name})": max(values), f"min({name})": min(values)}
    # The report's means are over all the ranks' time, not over their shares.
    figures |= {part.name: part.share for part in summary.parts if part.name != "wall"}
    wall = summary.parts[-1].mean_ns
    figures |= {name: figures[f"{name}_ns"] / wall for name in IDLE_FIGURES if wall and name in figures}
    rates, controls = summary.rates, summary.rates.controls
    known: dict[str, float | None] = {
        "overlap_ratio": summary.overlap_ratio,
        "tflops": rates.tflops,
        "block_tflops": rates.block_tflops,
        "solo_tflops": rates.solo_tflops,
        "of_solo": controls.of_solo if controls else None,
        "ideal_efficiency": controls.ideal_efficiency if controls else None,
        "flash_slowdown": controls.flash_slowdown if controls else None,
        "profiler_overhead": rates.profiler_overhead,
        "peak_memory_bytes": rates.peak_memory_bytes,
        "other_share": summary.other_share,
        "slowest_excess": summary.slowest_excess,
        "warnings": sum(warning.count for warning in attribution.warnings),
    }
    inference = inference_of(attribution, summary)
    if inference is not None:
        known["tokens_per_second"], known["read_gbps"] = inference.tokens_per_second, inference.read_gbps
        known |= {f"bound.{name}": share for name, share in inference.shares.items()}
    step = step_rates_of(attribution)
    if step is not None:
        known |= {"mfu": step.mfu, "shapes_known": step.coverage}
        known |= {f"{row.part}_tflops": row.tflops for row in step.parts}
    figures |= {name: float(value) for name, value in known.items() if value is not None}
    figures |= {f"waterfall.{part.part}": part.share for part in found.waterfall.parts}
    return figures


_NO_SHARES = {
    "tflops",
    "wire_gbps",
    "read_gbps",
    "tokens_per_second",
    "hops",
    "warnings",
    "iterations",
}


def shares_among(figures: Iterable[str]) -> set[str]:
    """Those of the figures that are shares, 0..1 or more."""
    plain = {name: name.partition("(")[2].rstrip(")") or name for name in figures}
    return {
        name
        for name, one in plain.items()
        if one not in _NO_SHARES and not one.endswith(("_ns", "_ms", "_bytes", "_mib", "_mb", "_tflops"))
    }


def _of_rank(rank: Rank) -> dict[str, float]:
    b = rank.breakdown
    figures: dict[str, float] = {"wall_ns": b.wall_ns}
    for name in _TIMES:
        time = getattr(b, f"{name}_ns")
        if time is not None:
            figures |= {f"{name}_ns": time, name: time / b.wall_ns if b.wall_ns else 0.0}
    for name, time in _idle_of(rank).items():
        figures |= {f"{name}_ns": time, name: time / b.wall_ns if b.wall_ns else 0.0}
    if b.overlap_ratio is not None:
        figures["overlap_ratio"] = b.overlap_ratio
    figures |= {f"{kind}_ns": b.kinds[kind].time_ns if kind in b.kinds else 0 for kind in KINDS}
    if rank.hop_totals.count:
        hops = rank.hop_totals
        known = {"wait_share": hops.wait_share, "wire_gbps": hops.wire_gbps, "wait_ns": hops.wait_ns}
        known |= {"wire_ns": hops.wire_ns, "hops": hops.count, "hop_bytes": hops.sent_bytes}
        figures |= {name: value for name, value in known.items() if value is not None}
    return figures


def _idle_of(rank: Rank) -> dict[str, int]:
    """Return the causes of a rank's idle time, and the time blocked on a peer; nothing for a CPU rank."""
    if rank.idle is None:
        return {}
    causes = rank.idle.host_ns, rank.idle.gap_ns, rank.idle.blocked_ns
    return dict(zip(IDLE_FIGURES, (*causes, rank.breakdown.blocked_on_peer_ns), strict=True))


_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_SHAPE = re.compile(
    r"\s*(?:(?P<over>max|min)\s*\(\s*(?P<inner>[a-z_][a-z0-9_.]*)\s*\)|(?P<plain>[a-z_][a-z0-9_.]*))"
    r"\s*(?P<sign><=|>=|==|!=|<|>)\s*(?P<number>[+-]?[0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*(?P<percent>%?)"
    r"\s*(?P<base>\*\s*base)?\s*",
    re.IGNORECASE,
)


class Condition(msgspec.Struct, frozen=True):
    """One parsed condition."""

    text: str
    figure: str
    """A name, or ``max(name)`` or ``min(name)``."""
    sign: str
    number: float
    """As a share where the text said percent."""
    percent: bool
    of_base: bool

    def holds(
        self,
        figures: Mapping[str, float],
        base: Mapping[str, float],
        shares: Collection[str] | None = None,
        interval: tuple[float, float] | None = None,
    ) -> bool | None:
        """Whether the condition holds for these figures, of which ``shares`` are 0..1 where that is known.

        ``interval`` is the figure's, or its ratio's to the base's, where it was repeated: None, for undecided, where
        that lies on both sides of the limit. Raises `UsageError` for a figure that is not there, and for a number of
        another unit: what never holds, or always, is no gate.
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
        if self.figure not in figures:
            near = ", ".join(difflib.get_close_matches(self.figure, figures, n=3, cutoff=0.4))
            hint = f" (nearest: {near})" if near else ""
            raise UsageError(
                f"--fail-if {self.text!r}: no figure {self.figure!r} here{hint}; there are: {_all(figures)}"
            )
        return figures[self.figure]

    def _refuse_other_unit(self, *, is_share: bool) -> None:
        if is_share and not self.percent and abs(self.number) > 1:
            meant = f"{self.figure} {self.sign} {self.number:g}%"
            raise UsageError(f"--fail-if {self.text!r}: {self.figure} is a share: did you mean {meant!r}?")
        if self.percent and not is_share:
            meant = f"{self.figure} {self.sign} {self.number:g} * base"
            raise UsageError(f"--fail-if {self.text!r}: {self.figure} is no share: did you mean {meant!r}?")


def _all(figures: Mapping[str, float]) -> str:
    """The names of all figures, each in one of its forms."""
    names = [name for name in figures if "(" not in name and not name.startswith("waterfall.")]
    shown = ", ".join(sorted(name for name in names if not name.endswith("_ns") or f"{name[:-3]}_ms" not in names))
    forms = {"(": "max(...) and min(...)", "_ns": "with _ns", "waterfall.": "waterfall.PART"}
    more = [form for mark, form in forms.items() if any(mark in name for name in figures)]
    return f"{shown or 'none'}" + (f"; also {', '.join(more)}" if more else "")


def parse_condition(text: str) -> Condition:
    """Read a condition. Raises `UsageError` with the grammar where it is none."""
    match = _SHAPE.fullmatch(text)
    number = float(match["number"]) if match else math.nan
    if match is None or not math.isfinite(number):
        raise UsageError(f"--fail-if {text!r}: write FIGURE OP NUMBER[%] [* base], such as 'tflops < 0.95 * base'")
    scaled = number / 100 if match["percent"] else number
    figure = f"{match['over'].lower()}({match['inner']})" if match["over"] else match["plain"]
    return Condition(text.strip(), figure, match["sign"], scaled, bool(match["percent"]), bool(match["base"]))
