"""The state of the GPUs through the timed iterations, and what connects them: to be known before code is blamed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import msgspec

from ringprof.analysis.findings.findings import Findings
from ringprof.formatting import percent
from ringprof.report.page.document import Content, PageContext, PageTable, number, text
from ringprof.report.tables import Listing
from ringprof.report.text import TextStyle, clean
from ringprof.run import DeviceLinks, DeviceState

UNEVEN = 0.97
"""A GPU's clock below this share of another's is said."""
FELL = 0.01
"""A median clock that is further below the highest than this share has fallen: rates follow it."""

NEAR = 0.95
"""A power cap or a thermal slow-down is called the cause where a sample reaches this share of the limit. The only
accuracy that NVML documents for power is 5 %, of Fermi and Kepler (NVML API Reference, nvmlDeviceGetPowerUsage)."""
AVERAGED_NS = 2 * 10**9
"""In a shorter run a power reading that is a mean over 1 s may still hold what was before."""
_THERMAL = ("software thermal slow-down", "hardware thermal slow-down")

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
    lines = [*in_words(states_of(found), timed_ns_of(found)), *links_in_words(_links_of(found))]
    return [style.wrap("\n".join(lines))] if lines else []


def timed_ns_of(found: Findings) -> int | None:
    """How long the slowest rank's timed iterations took together, in which the GPUs were sampled."""
    run = found.attribution.run
    return max((sum(times) for times in run.timings.iterations_ns), default=None) if run and run.timings else None


def in_words(states: States, timed_ns: int | None = None) -> list[str]:
    """State what the GPUs ran at, what the driver says limits them, and whether the samples agree with that."""
    return [line for line in (_ran_at(states, timed_ns), *_limits(states, timed_ns), _uneven(states)) if line]


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


def _ran_at(states: States, timed_ns: int | None) -> str:
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
    looks = [state.looks for state in states.values()]
    sampled = f"{_span([min(looks), max(looks)], ',')} samples each" if looks else ""
    during = f" in {_seconds(timed_ns)}" if timed_ns else ""
    return f"GPUs while they were timed ({sampled}{during}): {', '.join(parts)}" if parts else ""


def _seconds(time_ns: int) -> str:
    """Format a time in two significant digits."""
    if time_ns < 10**8:
        return f"{time_ns / 1e6:.2g} ms"
    return f"{time_ns / 1e9:.2g} s" if time_ns < 10**10 else f"{time_ns / 1e9:,.0f} s"


def _span(ends: list[float], form: str) -> str:
    low, high = (f"{end:{form}}" for end in ends)
    return low if low == high else f"{low} to {high}"


def _limits(states: States, timed_ns: int | None) -> list[str]:
    """State what the driver says limits the clock: as the cause where the clock fell and the samples agree with it."""
    slower = {rank: below for rank, one in states.items() if (below := _below_highest(one) or 0.0) > FELL}
    held = {rank: states[rank] for rank in slower if _agreeing(states[rank])}
    unsure = {rank: states[rank] for rank in slower if rank not in held}
    others = {rank: state for rank, state in states.items() if rank not in slower}
    lines = [_held_back(held, slower, len(states))] if held else []
    if unsure:
        reported = _reasons(unsure, len(states)) or f"no limit ({len(unsure)} of {len(states)} ranks)"
        lines.append(
            f"the driver reports {reported}{_while(unsure)}: {_fell(slower, unsure)}, cause not certain; "
            f"rates are of these clocks{_why_low(unsure, timed_ns)}"
        )
    if limited := _reasons(others, len(states)):
        told = any(_below_highest(one) is not None for one in others.values() if one.held_back)
        clock = "clock unaffected" if told else "clock not known"
        lines.append(f"the driver reports {limited}{_while(others)}, {clock}")
    return lines


def _held_back(held: States, below: dict[int, float], of: int) -> str:
    """Name the limits that the samples agree with as the cause, and beside them those that they do not."""
    causes = {rank: _with_reasons(state, _agreeing(state)) for rank, state in held.items()}
    rest = {rank: _with_reasons(state, state.held_back.keys() - _agreeing(state)) for rank, state in held.items()}
    also = _reasons(rest, of)
    return (
        f"held back by {_reasons(causes, of)}: {_fell(below, held)}; "
        "rates are of these clocks, and a cooler or less loaded GPU would reach others"
        + (f"; the driver also reports {also}{_while(rest)}" if also else "")
    )


def _fell(below: dict[int, float], among: States) -> str:
    return f"median SM clock up to {percent(max(below[rank] for rank in among))} below the highest"


def _with_reasons(state: DeviceState, reasons: Collection[str]) -> DeviceState:
    kept = {reason: share for reason, share in state.held_back.items() if reason in reasons}
    return msgspec.structs.replace(state, held_back=kept)


def _agreeing(state: DeviceState) -> set[str]:
    """Reported limits that the samples do not contradict: power or temperature was near the limit, if it is of that."""
    hot = _near(state.hottest_celsius, state.limit_celsius)
    near = {
        **dict.fromkeys(_THERMAL, hot),
        "power cap": _near(state.highest_power_w or state.power_w, state.power_limit_w),
    }
    return {reason for reason in state.held_back if near.get(reason, True)}


def _near(sampled: float | None, limit: float | None) -> bool:
    return sampled is not None and limit is not None and sampled >= NEAR * limit


def _while(states: States) -> str:
    """Set the samples beside the reported limits that they do not agree with."""
    unlike = {rank: state.held_back.keys() - _agreeing(state) for rank, state in states.items()}
    capped = [states[rank] for rank, reasons in unlike.items() if "power cap" in reasons]
    hot = [states[rank] for rank, reasons in unlike.items() if reasons & {*_THERMAL}]
    parts = [*([_power_of(capped)] if capped else []), *([_heat_of(hot)] if hot else [])]
    return f" while {' and '.join(parts)}" if parts else ""


def _power_of(capped: Sequence[DeviceState]) -> str:
    power = [watts for one in capped if (watts := one.highest_power_w or one.power_w) is not None]
    if not power:
        return "the power is not known"
    highest = all(one.highest_power_w for one in capped)
    span = f"at most {max(power):,.0f}" if highest else _span([min(power), max(power)], ",.0f")
    limit = max(one.power_limit_w or 0 for one in capped)
    return f"the sampled power was {span}" + (f" of {limit:,.0f} W" if limit else " W, limit not known")


def _heat_of(hot: Sequence[DeviceState]) -> str:
    degrees, limit = max(one.hottest_celsius or 0 for one in hot), max(one.limit_celsius or 0 for one in hot)
    if not degrees:
        return "the temperature is not known"
    return f"the GPU was at most at {degrees}" + (f" of {limit} °C" if limit else " °C, limit not known")


def _why_low(states: States, timed_ns: int | None) -> str:
    """Explain a power below the limit where the reading may lag behind."""
    lags = any("power cap" in one.held_back and one.power_w and not one.instant_power for one in states.values())
    if not lags or timed_ns is None or timed_ns >= AVERAGED_NS:
        return ""
    return "; NVML's power is a mean over 1 s on most GPUs since Ampere, and lags behind in a run this short"


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


_COLUMNS = (
    "rank",
    "samples",
    "SM clock MHz",
    "lowest",
    "highest it can",
    "power W",
    "limit W",
    "hottest °C",
    "reported limits",
)


def html(found: Findings, page: PageContext) -> Content | None:
    """A row a rank, and what connects them; None where nothing told."""
    states, links = states_of(found), links_in_words(_links_of(found))
    if not states:
        return Content(lines=links) if links else None
    rows = [
        [
            number(rank, 0),
            number(state.looks, 0),
            *(number(value, 0) for value in (state.sm_clock_mhz, state.least_sm_clock_mhz, state.rated_sm_clock_mhz)),
            *(number(value, 0) for value in (state.power_w, state.power_limit_w, state.hottest_celsius)),
            text(", ".join(f"{reason} {percent(share, 0)}" for reason, share in state.held_back.items()) or "nothing"),
        ]
        for rank, state in states.items()
    ]
    return Content(tables=[PageTable(list(_COLUMNS), rows)], lines=[*in_words(states, timed_ns_of(found)), *links])
