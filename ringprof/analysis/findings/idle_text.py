"""Why the GPUs idle, as sentences: the cause that takes most of the idle time, and what would shorten it."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.claim import Claim
from ringprof.analysis.findings.producers import producer_of
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
    MANAGED,
    NO_LAUNCH,
    OTHER_STREAM,
    IdleCauses,
    IdleEvent,
    causes_of_ranks,
)

LAUNCH_BOUND = "launch-bound"
"""Kind of host cause: many short times between launches, whatever the host does in them."""
_SLOW_LAUNCH, _SLOW_OPERATOR = "slow launch call", "slow operator"
PREFETCH = "cudaMemPrefetchAsync before managed memory is touched, or memory that does not move"
"""Recommendation for page migrations of managed memory."""
_OWN_KINDS = (DATA_LOADER, MEMORY_CALL, SYNCHRONISATION, COMPILATION, NOT_KEPT)


class HostCause(msgspec.Struct, frozen=True):
    """Largest cause of the time in which the GPUs idle because their next work is not launched yet."""

    kind: str
    """`LAUNCH_BOUND`, or what the host does: a class of `HOST_CLASSES`, ``slow launch call`` or ``slow operator``."""
    name: str
    """Name of the host event that takes most of this time; empty where none is open, and for `LAUNCH_BOUND`."""
    share: float
    """Share of all idle time over all ranks, 0..1, that the host spends in this event, or in short gaps."""


def total_idle_causes(attribution: Attribution) -> IdleCauses:
    """Sum the causes of the idle time of all ranks on GPUs."""
    return causes_of_ranks(rank.idle for rank in attribution.ranks if rank.idle is not None)


def largest_host_cause(causes: IdleCauses) -> HostCause | None:
    """Find the host cause of most idle time before launches; None where there is no such time."""
    times: dict[str, int] = defaultdict(int)
    names: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for event in causes.events:
        for kind, kind_time_ns in _host_kinds(event):
            times[kind] += kind_time_ns
            names[kind][event.name] += kind_time_ns
    if not any(times.values()):
        return None
    kind = max(times, key=lambda candidate: times[candidate])
    if kind == LAUNCH_BOUND:
        return HostCause(kind, "", times[kind] / causes.total_ns)
    name = max(names[kind], key=lambda event: names[kind][event])
    time_ns = sum(event.time_ns for event in causes.events if event.cause == HOST and event.name == name)
    return HostCause(kind, name, time_ns / causes.total_ns)


def _host_kinds(event: IdleEvent) -> list[tuple[str, int]]:
    """Split an event's time by kind of host cause: (kind, nanoseconds); empty for blocked time."""
    if event.cause == BLOCKED:
        return []
    if event.event_class in _OWN_KINDS:
        return [(event.event_class, event.time_ns)]
    if event.cause != HOST:
        return [(LAUNCH_BOUND, event.time_ns)]
    slow = {LAUNCH_CALL: _SLOW_LAUNCH, NOTHING_RECORDED: NOTHING_RECORDED}.get(event.event_class, _SLOW_OPERATOR)
    return [(slow, event.long_ns), (LAUNCH_BOUND, event.time_ns - event.long_ns)]


def launch_idle_sentence(attribution: Attribution, share: float) -> str:
    """Say why the GPUs idle before launches; ``share``: this idle time as a share of the time."""
    if _is_predicted(attribution):
        idle = "{launch_gaps/time:%} of the predicted time the GPU is idle"
        return Claim(f"{idle} because its next work is not launched yet", share)
    causes = total_idle_causes(attribution)
    reasons = {"because its next work is not launched yet": causes.host_ns, "in gaps below 5 us": causes.gap_ns}
    named = [words for words, time_ns in reasons.items() if time_ns > _MIN_SHARE * sum(reasons.values())]
    text = Claim("{launch_gaps/time:%} of the time the GPU is idle {}", share, " or ".join(named))
    cause = largest_host_cause(causes)
    if cause is None:
        return text
    if cause.kind == NOT_KEPT:
        return Claim("{}; these traces do not hold what the host did meanwhile", text)
    if cause.kind == LAUNCH_BOUND:
        short = "short host work (pieces below 0.1 ms) and gaps below 5 us"
        return Claim(f"{{}}: {{short_host/idle:%}} of its idle time is {short}", text, cause.share)
    if cause.kind == NOTHING_RECORDED:
        reason = "the launching thread has no operator, runtime call or range open"
        return Claim(f"{{}}: for {{nothing_open/idle:%}} of its idle time {reason}", text, cause.share)
    host_call = cause.name + _EXPLANATIONS.get(cause.kind, "")
    return Claim("{}: for {host_call/idle:%} of its idle time the host is in {}", text, cause.share, host_call)


_MIN_SHARE = 0.01
"""Share of host-bound idle time below which a cause of it is not named."""
_EXPLANATIONS = {DATA_LOADER: " (data loader)", COMPILATION: " (compilation or graph capture)"}


def host_recommendation(cause: HostCause | None, launch_bound: str, phases: str) -> str:
    """Recommend how to shorten the idle time before launches.

    ``launch_bound``: the recommendation for short gaps. ``phases``: marks that name the phases of a program.
    """
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
        NOTHING_RECORDED: f"name the program's phases with {phases} to see what it does meanwhile",
    }[cause.kind]


def blocked_idle_sentence(attribution: Attribution, share: float) -> str:
    """Say why the GPUs idle although their next work is launched.

    ``share``: this idle time as a share of the time; only predictions use it.
    """
    if _is_predicted(attribution):
        return Claim("{blocked/time:%} of the predicted time the GPU is idle although its next work is launched", share)
    causes, event = total_idle_causes(attribution), _longest_blocked(attribution)
    wall = sum(rank.breakdown.wall_ns for rank in attribution.ranks)
    unknown_ns = sum(idle_event.time_ns for idle_event in causes.events if idle_event.name == NO_LAUNCH)
    if event is None or event.name == NO_LAUNCH:
        return Claim(
            "{unlaunched/time:%} of the time nothing runs on the GPU and the launch of what follows is not recorded, "
            "so the cause cannot be told", unknown_ns / wall,
        )  # fmt: skip
    if event.name == MANAGED:
        return Claim(
            "{migrations/time:%} of the time nothing runs on the GPU until pages of managed memory move, which the "
            "host or the GPU touches", event.time_ns / wall,
        )  # fmt: skip
    reason = {HOST_COPY: "a copy is staged through pageable memory", OTHER_STREAM: "it waits for another stream"}
    return Claim(
        "{launched_blocked/time:%} of the time the GPU is idle although its next work is launched: for "
        "{blocked_cause/idle:%} of its idle time {}",
        (causes.blocked_ns - unknown_ns) / wall, event.time_ns / causes.total_ns,
        reason.get(event.name, "it waits for something that the trace does not record"),
    )  # fmt: skip


def blocked_recommendation(attribution: Attribution) -> str:
    """Recommend how to shorten the time in which launched work is blocked; empty where the cause is not known."""
    event = _longest_blocked(attribution)
    recommendations = {
        HOST_COPY: "pinned memory for copies from and to the host",
        OTHER_STREAM: "fewer dependencies between streams",
        NO_LAUNCH: f"record the CPU's launches as well ({producer_of(attribution).launches}) to see the cause",
        MANAGED: PREFETCH,
    }
    return recommendations.get(event.name, "") if event else ""


def _is_predicted(attribution: Attribution) -> bool:
    """Return whether the run is a prediction."""
    return attribution.run is not None and attribution.run.predicted is not None


def _longest_blocked(attribution: Attribution) -> IdleEvent | None:
    """Return the blocked event with most time; None where nothing is blocked."""
    return next((event for event in total_idle_causes(attribution).events if event.cause == BLOCKED), None)
