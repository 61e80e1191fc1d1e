"""State of the GPUs during the timed iterations, and their links: to rule the machine out before blaming code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import msgspec

from ringprof.analysis.findings.findings import Findings
from ringprof.common.formatting import percent
from ringprof.report.page.document import Content, PageContext, PageTable, number, text
from ringprof.report.tables import Listing
from ringprof.report.text import TextStyle, clean
from ringprof.run import DeviceLinks, DeviceState

MIN_CLOCK_RATIO = 0.97
"""Ratio of the slowest to the fastest GPU's clock below which the difference is reported."""
MIN_CLOCK_DROP = 0.01
"""Relative drop of the median clock below the highest from which rates are taken to be reduced."""

NEAR_LIMIT = 0.95
"""Share of a limit that a sample must reach for a power cap or a thermal slow-down to be named the cause. The only
accuracy that NVML documents for power is 5 %, for Fermi and Kepler (NVML API Reference, nvmlDeviceGetPowerUsage)."""
POWER_AVERAGING_NS = 2 * 10**9
"""Run time below which a power reading, a mean over 1 s, may still include the time before the run."""
_THERMAL = ("software thermal slow-down", "hardware thermal slow-down")

States = dict[int, DeviceState]


def states_of(findings: Findings) -> States:
    """Return the sampled state of each rank's GPU; empty where no GPU reported one."""
    run = findings.attribution.run
    states = zip(run.ranks(), run.device_states or (), strict=False) if run else ()
    return {rank: state for rank, state in states if state is not None}


def _links_of(findings: Findings) -> list[DeviceLinks]:
    """List the links of the ranks that reported them."""
    run = findings.attribution.run
    return [links for links in (run.device_links or () if run else ()) if links is not None]


def terminal(findings: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """Return one block on the GPUs' state and links; none where no GPU reported anything."""
    lines = [*state_lines(states_of(findings), timed_ns_of(findings)), *link_lines(_links_of(findings))]
    return [style.wrap("\n".join(lines))] if lines else []


def timed_ns_of(findings: Findings) -> int | None:
    """Return the slowest rank's total time of timed iterations, during which the GPUs were sampled."""
    run = findings.attribution.run
    return max((sum(times) for times in run.timings.iterations_ns), default=None) if run and run.timings else None


def state_lines(states: States, timed_ns: int | None = None) -> list[str]:
    """State the GPUs' clocks and power, the limits that the driver reports, and whether the samples agree."""
    return [
        line
        for line in (_operating_point(states, timed_ns), *_limit_lines(states, timed_ns), _uneven_clocks(states))
        if line
    ]


def link_lines(links: list[DeviceLinks]) -> list[str]:
    """Describe NVLinks per GPU and adapters per host in one line; each kind of GPU and host once."""
    gpus = dict.fromkeys(
        _describe_nvlinks(device_links.nvlinks) for device_links in links if device_links.nvlinks is not None
    )
    hosts = dict.fromkeys(_describe_adapters(device_links) for device_links in links if device_links.adapters)
    parts = [f"each GPU {' or '.join(gpus)}"] if gpus else []
    parts += [f"each host {' or '.join(hosts)}"] if hosts else []
    return ["links: " + "; ".join(parts)] if parts else []


def _describe_nvlinks(ends: dict[str, int]) -> str:
    count = sum(ends.values())
    if not count:
        return "no NVLink"
    peers = len(ends.keys() - {"switch", "unknown"})
    to = " to switches" if "switch" in ends else f" to {peers} GPU{'s' * (peers > 1)}" if peers else ""
    return f"{count} NVLink{'s' * (count > 1)}{to}"


def _describe_adapters(links: DeviceLinks) -> str:
    counts = Counter((adapter.gbits, adapter.layer) for adapter in links.adapters or ())
    return " + ".join(
        f"{count} x {'' if gbits is None else f'{gbits:g} Gbit/s '}{clean(layer or 'network')}"
        for (gbits, layer), count in counts.items()
    )


def _operating_point(states: States, timed_ns: int | None) -> str:
    """State clocks, power and temperature of the GPUs, and how often they were sampled."""
    parts = []
    clocks = [state.sm_clock_mhz for state in states.values() if state.sm_clock_mhz is not None]
    rated = max((state.rated_sm_clock_mhz or 0 for state in states.values()), default=0)
    if clocks:
        rated_text = f" of {rated:,}" if rated else ""
        parts.append(f"SM clock {_format_range([min(clocks), max(clocks)], ',')}{rated_text} MHz")
    power = [state.power_w for state in states.values() if state.power_w is not None]
    if power:
        limit = max((state.power_limit_w or 0 for state in states.values()), default=0)
        parts.append(f"{_format_range([min(power), max(power)], ',.0f')}{f' of {limit:,.0f}' if limit else ''} W")
    degrees = [state.hottest_celsius for state in states.values() if state.hottest_celsius is not None]
    if degrees:
        parts.append(f"at most {max(degrees)} °C")
    sample_counts = [state.looks for state in states.values()]
    sampled = f"{_format_range([min(sample_counts), max(sample_counts)], ',')} samples each" if sample_counts else ""
    duration_text = f" in {_format_seconds(timed_ns)}" if timed_ns else ""
    return f"GPUs while they were timed ({sampled}{duration_text}): {', '.join(parts)}" if parts else ""


def _format_seconds(time_ns: int) -> str:
    """Format a time with two significant digits."""
    if time_ns < 10**8:
        return f"{time_ns / 1e6:.2g} ms"
    return f"{time_ns / 1e9:.2g} s" if time_ns < 10**10 else f"{time_ns / 1e9:,.0f} s"


def _format_range(ends: list[float], form: str) -> str:
    low, high = (f"{end:{form}}" for end in ends)
    return low if low == high else f"{low} to {high}"


def _limit_lines(states: States, timed_ns: int | None) -> list[str]:
    """State which limits the driver reports.

    A limit is named as the cause only where the clock dropped and the samples agree with the limit.
    """
    clock_drops = {
        rank: drop for rank, state in states.items() if (drop := _relative_clock_drop(state) or 0.0) > MIN_CLOCK_DROP
    }
    confirmed = {rank: states[rank] for rank in clock_drops if _confirmed_reasons(states[rank])}
    doubtful = {rank: states[rank] for rank in clock_drops if rank not in confirmed}
    others = {rank: state for rank, state in states.items() if rank not in clock_drops}
    lines = [_confirmed_limits(confirmed, clock_drops, len(states))] if confirmed else []
    if doubtful:
        reported = _format_reasons(doubtful, len(states)) or f"no limit ({len(doubtful)} of {len(states)} ranks)"
        lines.append(
            f"the driver reports {reported}{_contradicting_samples(doubtful)}: "
            f"{_clock_drop(clock_drops, doubtful)}, cause not certain; "
            f"rates are of these clocks{_power_lag_note(doubtful, timed_ns)}"
        )
    if reasons := _format_reasons(others, len(states)):
        clock_known = any(_relative_clock_drop(state) is not None for state in others.values() if state.held_back)
        effect = "clock unaffected" if clock_known else "clock not known"
        lines.append(f"the driver reports {reasons}{_contradicting_samples(others)}, {effect}")
    return lines


def _confirmed_limits(confirmed: States, clock_drops: dict[int, float], rank_count: int) -> str:
    """Name the limits that the samples confirm as the cause, followed by the other reported limits."""
    causes = {rank: _with_reasons(state, _confirmed_reasons(state)) for rank, state in confirmed.items()}
    others = {
        rank: _with_reasons(state, state.held_back.keys() - _confirmed_reasons(state))
        for rank, state in confirmed.items()
    }
    other_reasons = _format_reasons(others, rank_count)
    return (
        f"held back by {_format_reasons(causes, rank_count)}: {_clock_drop(clock_drops, confirmed)}; "
        "rates are of these clocks, and a cooler or less loaded GPU would reach others"
        + (f"; the driver also reports {other_reasons}{_contradicting_samples(others)}" if other_reasons else "")
    )


def _clock_drop(clock_drops: dict[int, float], states: States) -> str:
    return f"median SM clock up to {percent(max(clock_drops[rank] for rank in states))} below the highest"


def _with_reasons(state: DeviceState, reasons: Collection[str]) -> DeviceState:
    kept = {reason: share for reason, share in state.held_back.items() if reason in reasons}
    return msgspec.structs.replace(state, held_back=kept)


def _confirmed_reasons(state: DeviceState) -> set[str]:
    """Return the reported limits that the samples do not contradict.

    A power or thermal limit is contradicted where power or temperature stayed clearly below the limit.
    """
    hot = _near_limit(state.hottest_celsius, state.limit_celsius)
    near = {
        **dict.fromkeys(_THERMAL, hot),
        "power cap": _near_limit(state.highest_power_w or state.power_w, state.power_limit_w),
    }
    return {reason for reason in state.held_back if near.get(reason, True)}


def _near_limit(sampled: float | None, limit: float | None) -> bool:
    return sampled is not None and limit is not None and sampled >= NEAR_LIMIT * limit


def _contradicting_samples(states: States) -> str:
    """State the power and temperature samples that contradict reported limits."""
    unconfirmed = {rank: state.held_back.keys() - _confirmed_reasons(state) for rank, state in states.items()}
    power_capped = [states[rank] for rank, reasons in unconfirmed.items() if "power cap" in reasons]
    thermal = [states[rank] for rank, reasons in unconfirmed.items() if reasons & {*_THERMAL}]
    parts = [
        *([_sampled_power(power_capped)] if power_capped else []),
        *([_sampled_temperature(thermal)] if thermal else []),
    ]
    return f" while {' and '.join(parts)}" if parts else ""


def _sampled_power(states: Sequence[DeviceState]) -> str:
    power = [watts for state in states if (watts := state.highest_power_w or state.power_w) is not None]
    if not power:
        return "the power is not known"
    all_have_maximum = all(state.highest_power_w for state in states)
    span = f"at most {max(power):,.0f}" if all_have_maximum else _format_range([min(power), max(power)], ",.0f")
    limit = max(state.power_limit_w or 0 for state in states)
    return f"the sampled power was {span}" + (f" of {limit:,.0f} W" if limit else " W, limit not known")


def _sampled_temperature(states: Sequence[DeviceState]) -> str:
    degrees, limit = (
        max(state.hottest_celsius or 0 for state in states),
        max(state.limit_celsius or 0 for state in states),
    )
    if not degrees:
        return "the temperature is not known"
    return f"the GPU was at most at {degrees}" + (f" of {limit} °C" if limit else " °C, limit not known")


def _power_lag_note(states: States, timed_ns: int | None) -> str:
    """Explain a power below the limit where the reading may lag behind."""
    lags = any(
        "power cap" in state.held_back and state.power_w and not state.instant_power for state in states.values()
    )
    if not lags or timed_ns is None or timed_ns >= POWER_AVERAGING_NS:
        return ""
    return "; NVML's power is a mean over 1 s on most GPUs since Ampere, and lags behind in a run this short"


def _relative_clock_drop(state: DeviceState) -> float | None:
    """Return the relative drop of the median clock below the GPU's highest; None where it is not known."""
    if not state.sm_clock_mhz or not state.rated_sm_clock_mhz:
        return None
    return 1 - state.sm_clock_mhz / state.rated_sm_clock_mhz


def _format_reasons(states: States, rank_count: int) -> str:
    shares_by_reason: dict[str, list[float]] = {}
    for state in states.values():
        for reason, share in state.held_back.items():
            shares_by_reason.setdefault(reason, []).append(share)
    return " and ".join(
        f"{clean(reason)} ({len(shares)} of {rank_count} ranks, in {percent(max(shares), 0)} of the samples)"
        for reason, shares in sorted(shares_by_reason.items())
    )


def _uneven_clocks(states: States) -> str:
    clocks = {rank: state.sm_clock_mhz for rank, state in states.items() if state.sm_clock_mhz}
    if not clocks:
        return ""
    slowest, fastest = min(clocks, key=clocks.__getitem__), max(clocks, key=clocks.__getitem__)
    share = clocks[slowest] / clocks[fastest]
    return f"rank {slowest}'s clock is {percent(1 - share)} below rank {fastest}'s" if share < MIN_CLOCK_RATIO else ""


_PAGE_COLUMNS = (
    "rank", "samples", "SM clock MHz", "lowest", "highest it can", "power W", "limit W", "hottest °C",
    "reported limits",
)  # fmt: skip


def html(findings: Findings, page: PageContext) -> Content | None:
    """Build a table with one row per rank, and lines on state and links; None where nothing was reported."""
    states, links = states_of(findings), link_lines(_links_of(findings))
    if not states:
        return Content(lines=links) if links else None
    rows = [
        [
            number(rank),
            number(state.looks),
            *(number(value) for value in (state.sm_clock_mhz, state.least_sm_clock_mhz, state.rated_sm_clock_mhz)),
            *(number(value, 3) for value in (state.power_w, state.power_limit_w, state.hottest_celsius)),
            text(", ".join(f"{reason} {percent(share, 0)}" for reason, share in state.held_back.items()) or "nothing"),
        ]
        for rank, state in states.items()
    ]
    return Content(
        tables=[PageTable(list(_PAGE_COLUMNS), rows)], lines=[*state_lines(states, timed_ns_of(findings)), *links]
    )
