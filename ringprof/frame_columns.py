"""The columns of every frame, and what each means: ``frame.attrs["columns"]``."""

from __future__ import annotations

from ringprof.analysis.kinds.kinds import KINDS
from ringprof.report.terms import LABELS

_RANK = {"rank": "rank in the world"}
_HOST = {"host": "host that the rank ran on; missing where nothing names it"}
_ITERATION = {"iteration": "number of the profiled iteration, from 0"}
_TFLOPS = {"tflops": "TFLOP/s per device; missing where the work is not known"}
_OWN_CLOCK = "unix time by the rank's own clock"
_SPAN = {"start_ns": _OWN_CLOCK, "end_ns": _OWN_CLOCK}
_INTERVAL = {
    "low_ms": "predicted milliseconds an iteration; in one of ten cases less",
    "middle_ms": "predicted milliseconds an iteration; in half of the cases less",
    "high_ms": "predicted milliseconds an iteration; in nine of ten cases less",
}
_CHOICE = {"choice": "strategy, degrees, placement and hop engine"}

PARTS_OF_TIME = {
    "wall_ns": "from the start of the first activity to the end of the last",
    "compute_ns": "time in which anything computes",
    "comm_ns": "time in which any communication runs",
    "overlapped_ns": "of comm_ns, with computation beside it; missing on CPU",
    "exposed_comm_ns": "communication with no computation beside it",
    "exposed_memory_ns": "copies and sets with neither computation nor communication beside them",
    "idle_ns": "nothing runs",
    "overlap_ratio": "overlapped_ns / comm_ns, 0..1; missing without communication and on CPU",
    "exposed_other_groups_ns": "exposed communication of process groups that were not asked for",
    "background_ns": "only what is not of the chosen range runs",
}
"""Of a breakdown, by its fields' names."""
_OF_KINDS = {f"{kind}_ns": f"sum of the durations of kind {LABELS[kind]}; kinds may overlap" for kind in KINDS}

FRAMES: dict[str, dict[str, str]] = {
    "breakdown": {**_RANK, **_HOST, **PARTS_OF_TIME, **_OF_KINDS},
    "iterations": {
        **_RANK,
        **_ITERATION,
        "median": "whether this iteration's slowest rank took the median time",
        **PARTS_OF_TIME,
        **_OF_KINDS,
    },
    "steps": {
        **_RANK,
        **_ITERATION,
        "phase": "fwd or bwd",
        "call": "which attention call of the iteration and phase, from 0",
        "step": "number of the ring step in its pass, from 0",
        **_SPAN,
        "block_ns": "union of the step's attention kernels",
        "compute_ns": "time in the step in which anything computes",
        "hops": "exchanges that the block should hide",
        "bytes": "bytes that these send",
        "wait_ns": "sum of their waits; missing where one's is not known",
        "wire_ns": "sum of their wires; missing where one's is not known",
        "exposed_ns": "communication within the step with no computation beside it",
        "exposed_wire_ns": "of exposed_ns, with something on the wire",
        "bound": "what the step's length came from: compute, wire or peer",
        "source": "what tells the steps: ringprof, annotation or order",
    },
    "kernels": {
        "name": "of the kernel, copy or set",
        "kind": "what it counts as",
        "time_ns": "sum of its durations over all ranks",
        "share": "of the sum over all kernels, 0..1",
        "calls": "how often it ran, over all ranks",
        "mean_ns": "of one call",
        "hidden": "share of its time with something beside it that hides it, 0..1; missing for computation",
        "exposed_ns": "the rest of its time; missing for computation",
        "worst_rank": "the rank that spends most in it",
        "worst_ns": "its time there",
    },
    "annotations": {
        "name": "of the ranges",
        "calls": "ranges in which something was launched, over all ranks",
        "busy_ns": "time in which anything runs that was launched in them, sum over ranks",
        "compute_ns": "of it, in which anything computes",
        "communication_ns": "of it, in which any communication runs",
        "exposed_ns": "of the communication, with no computation beside it, whoever launched that",
        "hidden": "share of the communication that is hidden, 0..1; missing without any",
    },
    "hops": {
        **_RANK,
        "hop": "number among the rank's hops, by start",
        "group": "process group",
        "send_to": "ranks that it sends to",
        "receive_from": "ranks that it receives from",
        "bytes": "bytes sent",
        **_SPAN,
        "ready_ns": "when the last rank that it depends on had started, by the rank's own clock",
        "wait_ns": "until its peers had started; missing where that is not known",
        "wire_ns": "the rest of it; missing where that is not known",
        "exposed_ns": "time of it with no computation beside it",
        "wire_gbps": "bytes / wire_ns, GB/s",
        "link": "same_host, other_host or unknown",
        "source": "where peers and bytes come from",
    },
    "waterfall": {
        "part": "of the slowest rank's wall",
        "time_ns": "mean over ranks; all parts sum to the wall",
        "share": "of the wall, 0..1",
        "tflops": "what the speed would be if this part and those before it were all, per device",
        "evidence": "the figures that it comes from, in words",
        "remedy": "what would shorten it; empty where that is not known",
    },
    "memory": {
        **_RANK,
        "memory": "whose memory: cuda and the device's number, or host",
        "time_ns": "unix time by the rank's own clock, from which on it is so",
        "allocated_bytes": "in use",
        "reserved_bytes": "in use or kept for later use; missing for the host",
    },
}
"""Tables that can be had of an analysis, by the method that makes them: their columns, each with what it means and its
unit where the name does not hold it."""

FORESEEN: dict[str, dict[str, str]] = {
    "choices": {
        **_CHOICE,
        "best": "probability that no other is faster, 0..1",
        **_INTERVAL,
        **_TFLOPS,
        "exposed": "part of the time that waits for transfers, mean over ranks, 0..1",
        "peak_bytes": "most memory that a rank holds",
        "fits": "whether that is there",
        "on_front": "whether nothing is faster with as little memory",
    },
    "over": {**_CHOICE, "at": "tokens, hosts, or Gbit/s of a NIC", **_INTERVAL},
    "parts": {
        "phase": "forward or backward",
        "part": "what the time goes to",
        "time_ms": "of the slowest rank, predicted",
    },
}
"""The same of a prediction and of advice."""
