"""Why the GPUs idle, as sentences: the cause that takes most of the idle time, and what would shorten it."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.timeline.host_activity import (
    COMPILATION,
    DATA_LOADER,
    LAUNCH_CALL,
    MEMORY_CALL,
    NOT_KEPT,
    NOTHING_RECORDED,
    SYNCHRONISATION,
)
from ringprof.analysis.timeline.idle import (
    BLOCKED,
    HOST,
    HOST_COPY,
    NO_LAUNCH,
    OTHER_STREAM,
    IdleCauses,
    IdleEvent,
    causes_of_ranks,
)
from ringprof.formatting import percent

LAUNCH_BOUND = "launch-bound"
"""Many short stretches between launches, whatever the host does in them."""
_SLOW_LAUNCH, _SLOW_OPERATOR = "slow launch call", "slow operator"
_ALWAYS_OWN = (DATA_LOADER, MEMORY_CALL, SYNCHRONISATION, COMPILATION, NOT_KEPT)


class HostCause(msgspec.Struct, frozen=True):
    """Largest cause of the time in which the GPUs idle because their next work is not launched."""

    kind: str
    """`LAUNCH_BOUND`, or what the host does: a class of `HOST_CLASSES`, ``slow launch call`` or ``slow operator``."""
    name: str
    """The host event that takes most of it; empty where none is open, and for `LAUNCH_BOUND`."""
    share: float
    """Of all idle time, 0..1, over all ranks: what the host spends in that event, in short gaps, or in nothing."""


def idle_of(attribution: Attribution) -> IdleCauses:
    """Sum the causes of the idle time of all ranks on GPUs."""
    return causes_of_ranks(rank.idle for rank in attribution.ranks if rank.idle is not None)


def host_cause(causes: IdleCauses) -> HostCause | None:
    """Find what takes most of the time in which the next work is not launched; None where there is no such time."""
    times: dict[str, int] = defaultdict(int)
    names: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for event in causes.events:
        for kind, time in _kinds(event):
            times[kind] += time
            names[kind][event.name] += time
    if not any(times.values()):
        return None
    kind = max(times, key=lambda one: times[one])
    if kind == LAUNCH_BOUND:
        return HostCause(kind, "", times[kind] / causes.total_ns)
    name = max(names[kind], key=lambda one: names[kind][one])
    spent = sum(event.time_ns for event in causes.events if event.cause == HOST and event.name == name)
    return HostCause(kind, name, spent / causes.total_ns)


def _kinds(event: IdleEvent) -> list[tuple[str, int]]:
    """The kinds of host cause that an event's time belongs to, with the time of each."""
    if event.cause == BLOCKED:
        return []
    if event.event_class in _ALWAYS_OWN:
        return [(event.event_class, event.time_ns)]
    if event.cause != HOST:
        return [(LAUNCH_BOUND, event.time_ns)]
    slow = {LAUNCH_CALL: _SLOW_LAUNCH, NOTHING_RECORDED: NOTHING_RECORDED}.get(event.event_class, _SLOW_OPERATOR)
    return [(slow, event.long_ns), (LAUNCH_BOUND, event.time_ns - event.long_ns)]


def not_launched_in_words(attribution: Attribution, share: str) -> str:
    """Say why the GPUs idle before launches; ``share`` is what they idle so of the time."""
    if _is_predicted(attribution):
        return f"{share} of the predicted time the GPU is idle because its next work is not launched yet."
    causes = idle_of(attribution)
    text = f"{share} of the time the GPU is idle {_before_launches(causes)}"
    cause = host_cause(causes)
    if cause is None:
        return f"{text}."
    of_idle = f"{percent(cause.share)} of its idle time"
    if cause.kind == LAUNCH_BOUND:
        return f"{text}: {of_idle} is short host work (pieces below 0.1 ms) and gaps below 5 us."
    if cause.kind == NOT_KEPT:
        return f"{text}; these traces do not hold what the host did meanwhile."
    if cause.kind == NOTHING_RECORDED:
        return f"{text}: for {of_idle} the launching thread has no operator, CUDA call or range open."
    return f"{text}: for {of_idle} the host is in {cause.name}{_WITHIN.get(cause.kind, '')}."


def _before_launches(causes: IdleCauses) -> str:
    """Name what host-bound idle time is: time before launches, gaps between launched activities, or both."""
    least = _SMALL * (causes.host_ns + causes.gap_ns)
    named = (
        ("because its next work is not launched yet", causes.host_ns),
        ("in gaps below 5 us", causes.gap_ns),
    )
    return " or ".join(words for words, time_ns in named if time_ns > least)


_SMALL = 0.01
"""Share of host-bound idle time below which a cause of it is not named."""
_WITHIN = {DATA_LOADER: " (data loader)", COMPILATION: " (compilation or graph capture)"}


def remedy_of_host(cause: HostCause | None, launch_bound: str) -> str:
    """Return what would shorten the idle time before launches; ``launch_bound`` is the remedy of many short gaps."""
    if cause is None:
        return ""
    return {
        LAUNCH_BOUND: launch_bound,
        DATA_LOADER: "more DataLoader workers, prefetching, pinned memory",
        MEMORY_CALL: f"keep memory allocated, so that the step needs no {cause.name}",
        SYNCHRONISATION: f"fewer calls that wait for the GPU, such as {cause.name}",
        COMPILATION: "profile after compilation and graph capture are over (more warm-up)",
        _SLOW_LAUNCH: (
            f"find why single {cause.name} calls take long: kernels loaded at first use (warm up before profiling"
            f"{', or CUDA_MODULE_LOADING=EAGER' if cause.name.startswith('cu') else ''}), or a busy CPU"
        ),
        _SLOW_OPERATOR: f"find what holds the host up in {cause.name} (first use, a busy CPU)",
        NOT_KEPT: "",
        NOTHING_RECORDED: "name the program's phases with torch.profiler.record_function to see what it does meanwhile",
    }[cause.kind]


def blocked_in_words(attribution: Attribution, share: str) -> str:
    """Say why the GPUs idle although their next work is launched; ``share`` is shown of a prediction."""
    if _is_predicted(attribution):
        return f"{share} of the predicted time the GPU is idle although its next work is launched."
    causes, event = idle_of(attribution), _longest_blocked(attribution)
    wall = sum(rank.breakdown.wall_ns for rank in attribution.ranks)
    unknown = sum(one.time_ns for one in causes.events if one.name == NO_LAUNCH)
    if event is None or event.name == NO_LAUNCH:
        return (
            f"{percent(unknown / wall)} of the time nothing runs on the GPU and the launch of what follows is not "
            "recorded, so the cause cannot be told."
        )
    idle, launched = causes.total_ns, percent((causes.blocked_ns - unknown) / wall)
    text = f"{launched} of the time the GPU is idle although its next work is launched: for"
    reason = {HOST_COPY: "a copy is staged through pageable memory", OTHER_STREAM: "it waits for another stream"}
    said = reason.get(event.name, "it waits for something that the trace does not record")
    return f"{text} {percent(event.time_ns / idle)} of its idle time {said}."


def remedy_of_blocked(attribution: Attribution) -> str:
    """Return what would shorten the time in which launched work is blocked; empty where its cause is not known."""
    event = _longest_blocked(attribution)
    remedies = {
        HOST_COPY: "pinned memory for copies from and to the host",
        OTHER_STREAM: "fewer dependencies between streams",
        NO_LAUNCH: "record the CPU's launches as well (ProfilerActivity.CPU) to see the cause",
    }
    return remedies.get(event.name, "") if event else ""


def _is_predicted(attribution: Attribution) -> bool:
    return attribution.run is not None and attribution.run.predicted is not None


def _longest_blocked(attribution: Attribution) -> IdleEvent | None:
    return next((event for event in idle_of(attribution).events if event.cause == BLOCKED), None)
