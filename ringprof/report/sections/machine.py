"""The state of the GPUs through the timed iterations: what must be known before a figure is blamed on code."""

from __future__ import annotations

from typing import Any

from ringprof.analysis.findings.findings import Findings
from ringprof.report.page.document import Content, PageTable, number, text
from ringprof.report.tables import Listing
from ringprof.report.text import TextStyle, percent
from ringprof.run import DeviceState

RATED = 0.97
"""A median clock below this share of the highest is said; so is one GPU's below this share of another's."""

States = dict[int, DeviceState]


def states_of(found: Findings) -> States:
    """By rank; empty where no GPU told."""
    run = found.attribution.run
    known = zip(run.ranks(), run.device_states or (), strict=False) if run else ()
    return {rank: state for rank, state in known if state is not None}


def terminal(found: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """None where no GPU told."""
    states = states_of(found)
    return [style.wrap("\n".join(in_words(states)))] if states else []


def in_words(states: States) -> list[str]:
    """What the GPUs ran at, and what held them back."""
    return [line for line in (_ran_at(states), _held_back(states), _uneven(states)) if line]


def _ran_at(states: States) -> str:
    parts = []
    clocks = [one.sm_clock_mhz for one in states.values() if one.sm_clock_mhz is not None]
    rated = max((one.rated_sm_clock_mhz or 0 for one in states.values()), default=0)
    if clocks:
        of = f" of {rated:,}" if rated else ""
        parts.append(f"SM clock {_span([min(clocks), max(clocks)], ',')}{of} MHz")
    power = [one.power_w for one in states.values() if one.power_w is not None]
    if power:
        limit = max((one.power_limit_w or 0 for one in states.values()), default=0)
        parts.append(f"{_span([min(power), max(power)], ',.0f')}{f' of {limit:,.0f}' if limit else ''} W")
    degrees = [one.hottest_celsius for one in states.values() if one.hottest_celsius is not None]
    if degrees:
        parts.append(f"at most {max(degrees)} °C")
    return "GPUs while they were timed: " + ", ".join(parts) if parts else ""


def _span(ends: list[float], form: str) -> str:
    low, high = (f"{end:{form}}" for end in ends)
    return low if low == high else f"{low} to {high}"


def _held_back(states: States) -> str:
    """Empty where every GPU ran at the highest clock and nothing held it back."""
    reasons: dict[str, list[float]] = {}
    for state in states.values():
        for reason, share in state.held_back.items():
            reasons.setdefault(reason, []).append(share)
    slow = [rank for rank, one in states.items() if (one.sm_clock_mhz or 0) < RATED * (one.rated_sm_clock_mhz or 0)]
    if not reasons and not slow:
        return ""
    told = [
        f"{reason} ({len(shares)} of {len(states)} ranks, up to {percent(max(shares), 0)} of the time)"
        for reason, shares in sorted(reasons.items())
    ]
    what = f"held back by {' and '.join(told)}" if told else f"{len(slow)} of {len(states)} below the highest clock"
    return f"{what}: rates are of these clocks, and a cooler or less loaded GPU would reach others"


def _uneven(states: States) -> str:
    clocks = {rank: one.sm_clock_mhz for rank, one in states.items() if one.sm_clock_mhz}
    if not clocks:
        return ""
    slowest, fastest = min(clocks, key=clocks.__getitem__), max(clocks, key=clocks.__getitem__)
    share = clocks[slowest] / clocks[fastest]
    return f"rank {slowest}'s clock is {percent(1 - share)} below rank {fastest}'s" if share < RATED else ""


_COLUMNS = ("rank", "SM clock MHz", "lowest", "highest it can", "power W", "limit W", "hottest °C", "held back by")


def html(found: Findings, report: dict[str, Any], figures: Any) -> Content | None:
    """A row a rank; None where no GPU told."""
    states = states_of(found)
    if not states:
        return None
    rows = [
        [
            number(rank, 0),
            *(number(value, 0) for value in (state.sm_clock_mhz, state.least_sm_clock_mhz, state.rated_sm_clock_mhz)),
            *(number(value, 0) for value in (state.power_w, state.power_limit_w, state.hottest_celsius)),
            text(", ".join(f"{reason} {percent(share, 0)}" for reason, share in state.held_back.items()) or "nothing"),
        ]
        for rank, state in states.items()
    ]
    return Content(tables=[PageTable(list(_COLUMNS), rows)], lines=in_words(states))
