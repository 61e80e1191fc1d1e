"""The state of the GPUs through the timed iterations, and what connects them: to be known before code is blamed."""

from __future__ import annotations

from collections import Counter

from ringprof.analysis.findings.findings import Findings
from ringprof.digits import percent
from ringprof.report.page.document import Content, PageContext, PageTable, number, text
from ringprof.report.tables import Listing
from ringprof.report.text import TextStyle, clean
from ringprof.run import DeviceLinks, DeviceState

UNEVEN = 0.97
"""A GPU's clock below this share of another's is said."""
FELL = 0.01
"""A median clock that is further below the highest than this share has fallen: rates follow it."""

States = dict[int, DeviceState]


def states_of(found: Findings) -> States:
    """By rank; empty where no GPU told."""
    run = found.attribution.run
    known = zip(run.ranks(), run.device_states or (), strict=False) if run else ()
    return {rank: state for rank, state in known if state is not None}


def _links_of(found: Findings) -> list[DeviceLinks]:
    """Of the ranks that told any."""
    run = found.attribution.run
    return [one for one in (run.device_links or () if run else ()) if one is not None]


def terminal(found: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """None where no GPU told."""
    lines = [*in_words(states_of(found)), *links_in_words(_links_of(found))]
    return [style.wrap("\n".join(lines))] if lines else []


def in_words(states: States) -> list[str]:
    """What the GPUs ran at, and what held them back."""
    return [line for line in (_ran_at(states), *_limits(states), _uneven(states)) if line]


def links_in_words(links: list[DeviceLinks]) -> list[str]:
    """NVLinks a GPU and adapters a host, in a line; each kind of GPU and of host once."""
    gpus = dict.fromkeys(_nvlinks(one.nvlinks) for one in links if one.nvlinks is not None)
    hosts = dict.fromkeys(_adapters(one) for one in links if one.adapters)
    parts = [f"each GPU {' or '.join(gpus)}"] if gpus else []
    parts += [f"each host {' or '.join(hosts)}"] if hosts else []
    return ["links: " + "; ".join(parts)] if parts else []


def _nvlinks(ends: dict[str, int]) -> str:
    count = sum(ends.values())
    if not count:
        return "no NVLink"
    peers = len(ends.keys() - {"switch", "unknown"})
    to = " to switches" if "switch" in ends else f" to {peers} GPU{'s' * (peers > 1)}" if peers else ""
    return f"{count} NVLink{'s' * (count > 1)}{to}"


def _adapters(links: DeviceLinks) -> str:
    alike = Counter((one.gbits, one.layer) for one in links.adapters or ())
    return " + ".join(
        f"{count} x {'' if gbits is None else f'{gbits:g} Gbit/s '}{clean(layer or 'network')}"
        for (gbits, layer), count in alike.items()
    )


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


def _limits(states: States) -> list[str]:
    """What the driver says limits the clock, and whether it fell; where it did, first. Nothing where nothing does."""
    slower = {rank: below for rank, one in states.items() if (below := _below_highest(one) or 0.0) > FELL}
    held = {rank: states[rank] for rank in slower}
    others = {rank: state for rank, state in states.items() if rank not in slower}
    lines = []
    if held:
        reasons = _reasons(held, len(states)) or f"what is not told ({len(held)} of {len(states)} ranks)"
        lines.append(
            f"held back by {reasons}: median SM clock up to {percent(max(slower.values()))} below the highest; "
            "rates are of these clocks, and a cooler or less loaded GPU would reach others"
        )
    if limited := _reasons(others, len(states)):
        told = any(_below_highest(one) is not None for one in others.values() if one.held_back)
        lines.append(f"the driver reports {limited}, " + ("clock unaffected" if told else "clock not known"))
    return lines


def _below_highest(state: DeviceState) -> float | None:
    """By which share the median clock is below the highest that the GPU can."""
    if not state.sm_clock_mhz or not state.rated_sm_clock_mhz:
        return None
    return 1 - state.sm_clock_mhz / state.rated_sm_clock_mhz


def _reasons(states: States, of: int) -> str:
    shares: dict[str, list[float]] = {}
    for state in states.values():
        for reason, share in state.held_back.items():
            shares.setdefault(reason, []).append(share)
    return " and ".join(
        f"{clean(reason)} ({len(found)} of {of} ranks, in {percent(max(found), 0)} of the samples)"
        for reason, found in sorted(shares.items())
    )


def _uneven(states: States) -> str:
    clocks = {rank: one.sm_clock_mhz for rank, one in states.items() if one.sm_clock_mhz}
    if not clocks:
        return ""
    slowest, fastest = min(clocks, key=clocks.__getitem__), max(clocks, key=clocks.__getitem__)
    share = clocks[slowest] / clocks[fastest]
    return f"rank {slowest}'s clock is {percent(1 - share)} below rank {fastest}'s" if share < UNEVEN else ""


_COLUMNS = ("rank", "SM clock MHz", "lowest", "highest it can", "power W", "limit W", "hottest °C", "reported limits")


def html(found: Findings, page: PageContext) -> Content | None:
    """A row a rank, and what connects them; None where nothing told."""
    states, links = states_of(found), links_in_words(_links_of(found))
    if not states:
        return Content(lines=links) if links else None
    rows = [
        [
            number(rank, 0),
            *(number(value, 0) for value in (state.sm_clock_mhz, state.least_sm_clock_mhz, state.rated_sm_clock_mhz)),
            *(number(value, 0) for value in (state.power_w, state.power_limit_w, state.hottest_celsius)),
            text(", ".join(f"{reason} {percent(share, 0)}" for reason, share in state.held_back.items()) or "nothing"),
        ]
        for rank, state in states.items()
    ]
    return Content(tables=[PageTable(list(_COLUMNS), rows)], lines=[*in_words(states), *links])
