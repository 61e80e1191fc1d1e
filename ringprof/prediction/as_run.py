"""A prediction in the recorder's form: a Run, and a Kineto trace for each of its ranks.

Everything that reads recorded runs reads these. What they are shows in every name that people see: the run's, the
hosts' and the devices', and in the run's field ``predicted``.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from ringprof._version import __version__
from ringprof.analysis.transfers.hops import EMULATED
from ringprof.files import write_atomically
from ringprof.json_object import JsonObject
from ringprof.prediction.host_model import host_ns
from ringprof.prediction.predict import PredictionResult
from ringprof.prediction.simulator import RINGS, Timeline
from ringprof.record.dryrun.schedule import AttentionOp, CommStart, CommWait, MemoryOp, Op, Program, StreamWait
from ringprof.run import Environment, Predicted, Profiled, RankTrace, Run, StrategyUsed, Timings, Topology, write_run

MARK = "(predicted)"
_COMPUTE_STREAM, _FIRST_CARRYING = 7, 20
_THREAD, _ORIGIN_NS = 1, 10**15
_KERNELS = {
    "cudnn": ("cudnn_sdpa_flash_fprop", "cudnn_sdpa_flash_bprop"),
    "torch-flash": ("pytorch_flash::flash_fwd_kernel", "pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel"),
    "flash-attn-3": ("FlashAttnFwdSm90", "FlashAttnBwdSm90"),
    "flash-attn-4": ("FlashAttentionForwardSm100", "FlashAttentionBackwardSm100"),
}
_USUAL_KERNELS = ("flash_fwd_kernel", "flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel")
_CARRYING = {
    "send_recv": "ncclDevKernel_SendRecv", "all_to_all": "ncclDevKernel_SendRecv",
    "all_gather": "ncclDevKernel_AllGather_RING_LL", "reduce_scatter": "ncclDevKernel_ReduceScatter_Sum_RING_LL",
}  # fmt: skip
_CALLED = {"all_to_all": "all_to_allv", "all_gather": "_allgather_base", "reduce_scatter": "_reduce_scatter_base"}

_Event = JsonObject


def write_prediction(prediction: PredictionResult, folder: Path, command: Sequence[str]) -> Run:
    """Write ``run.json`` and the traces of the ranks that were simulated into ``folder``; returns the run."""
    folder.mkdir(parents=True, exist_ok=True)
    traces = []
    # Of a prediction before, whose traces go: until the last is there, the folder is no run.
    (folder / "run.json").unlink(missing_ok=True)
    for program, timeline in zip(prediction.schedule.programs, prediction.timelines, strict=True):
        path = folder / f"rank{program.rank}.json.gz"
        text = msgspec.json.encode(trace_of(prediction, program, timeline))
        write_atomically(path, gzip.compress(text, 6, mtime=0))
        traces.append(RankTrace(rank=program.rank, path=path.name))
    run = run_of(prediction, traces, command)
    write_run(run, folder / "run.json")
    return run


def run_of(prediction: PredictionResult, traces: list[RankTrace], command: Sequence[str]) -> Run:
    """The run; its three iterations are the tenth, the middle and the ninetieth percentile."""
    query, cluster = prediction.query, prediction.query.cluster
    size, now = cluster.size, datetime.now(UTC)
    slowest = max(one.end_ns for one in prediction.timelines)
    by_rank = {
        p.rank: t.end_ns / slowest for p, t in zip(prediction.schedule.programs, prediction.timelines, strict=True)
    }
    like = [prediction.stands_for(rank) for rank in range(size)]
    quantiles = prediction.interval_ns
    programs = {program.rank: program for program in prediction.schedule.programs}
    return Run(
        name=f"predicted-{query.strategy.rpartition(':')[2]}-{query.workload.seq}",
        created=f"{now:%Y-%m-%dT%H:%M:%SZ}",
        command=list(command),
        workload=query.workload,
        topology=Topology(
            world_size=size,
            # Of one clock, so emulated.
            hosts=[f"predicted{EMULATED}{cluster.host(rank)}" for rank in range(size)],
            local_ranks=[rank % cluster.gpus_per_host for rank in range(size)],
            ranks_per_host=cluster.gpus_per_host, device_type="cuda", backend="nccl",
        ),
        strategy=StrategyUsed(
            name=query.strategy, target=prediction.schedule.target, params=prediction.schedule.params,
            layout=prediction.schedule.layout,
            hops=query.hops,
        ),
        kernel=query.kernel,
        environment=Environment(
            devices=[f"{prediction.machine.device} {MARK}"] * size, versions={"ringprof": __version__}, variables={}
        ),
        timings=Timings(warmup=0, iterations_ns=[[round(ns * by_rank[one]) for ns in quantiles] for one in like]),
        profiled=Profiled(iterations_ns=[[round(slowest * by_rank[one])] for one in like]),
        peak_memory_bytes=[programs[one].peak_bytes for one in like],
        work=[programs[one].work for one in like],
        traces=traces,
        predicted=Predicted(
            machine=prediction.machine.name, evidence=prediction.evidence, simulated_ranks=len(programs),
            p10_ns=round(quantiles[0]), p50_ns=round(quantiles[1]), p90_ns=round(quantiles[2]),
        ),
    )  # fmt: skip


def trace_of(prediction: PredictionResult, program: Program, timeline: Timeline) -> JsonObject:
    """One rank's trace, as torch's profiler would have written it."""
    cluster, machine = prediction.query.cluster, prediction.machine
    return {
        "schemaVersion": 1,
        "deviceProperties": [
            {
                "id": 0, "name": f"{machine.device} {MARK}", "totalGlobalMem": machine.memory_bytes,
                "numSms": machine.multiprocessors,
            }
        ],
        "distributedInfo": {"backend": "nccl", "rank": program.rank, "world_size": cluster.size, "pg_config": []},
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
        "traceEvents": list(_events(prediction, program, timeline)),
    }  # fmt: skip


def _events(prediction: PredictionResult, program: Program, timeline: Timeline) -> Iterator[_Event]:
    machine = prediction.machine
    host = list(accumulate(host_ns(machine, machine.kernel(prediction.query.kernel), program)))
    origin = _ORIGIN_NS + round(min(prediction.lead_ns, host[-1]))
    writer = _Writer(prediction, program, timeline, origin)
    begin = _ORIGIN_NS
    for place, op in enumerate(program.ops):
        # The host is done with an operation before the device begins it.
        end = _ORIGIN_NS + round(host[place])
        yield from writer.of(place, op, begin, max(begin + 100, end))
        begin = max(begin + 100, end)
    yield writer.range("ringprof::iteration", _ORIGIN_NS, begin)


class _Writer:
    """The events of one rank's operations: on the host, and on the device."""

    def __init__(self, prediction: PredictionResult, program: Program, timeline: Timeline, origin: int) -> None:
        self._prediction, self._program, self._timeline, self._origin = prediction, program, timeline, origin
        self._streams: dict[str, int] = {}
        self._launches = 0
        forward, backward = _KERNELS.get(prediction.query.kernel, _USUAL_KERNELS)
        self._names = {"forward": f"{forward} {MARK}", "backward": f"{backward} {MARK}"}

    def of(self, place: int, op: Op, begin: int, end: int) -> Iterator[_Event]:
        """An operation that the host issues from ``begin`` to ``end``."""
        if isinstance(op, CommStart):
            to = f"/to={_neighbours(self._program.rank, op)[0]}" if op.operation == "copy" else ""
            yield self.range(f"ringprof::send/{op.channel}{to}", begin, end)
            yield from self._carried(place, op, begin, end)
        elif isinstance(op, AttentionOp | MemoryOp):
            if op.label:
                yield self.range(f"ringprof::{op.label}", begin, end)
            name = self._names[op.phase] if isinstance(op, AttentionOp) else op.name
            start, stop = self._timeline.ops[place]
            yield from self._kernel(name, _COMPUTE_STREAM + op.stream, start, stop, begin, end)
        elif isinstance(op, CommWait):
            yield self.range("ringprof::wait", begin, end)
        else:
            assert isinstance(op, StreamWait)

    def range(self, name: str, begin: int, end: int) -> _Event:
        return _slice("user_annotation", name, 0, _THREAD, begin, end, {})

    def _kernel(
        self, name: str, stream: int, start: float, stop: float, begin: int, end: int, category: str = "kernel",
        **args: Any,
    ) -> Iterator[_Event]:  # fmt: skip
        """Yield a launch when the host is done, before which the device cannot begin, and what it launched."""
        self._launches += 1
        args |= {"device": 0, "stream": stream, "correlation": self._launches}
        launch = {"correlation": self._launches}
        yield _slice("cuda_runtime", "cudaLaunchKernel", 0, _THREAD, max(begin, end - 1), end, launch)
        first, last = (self._origin + round(time_ns) for time_ns in (start, stop))
        yield _slice(category, name, 1, stream, first, last, args)

    def _carried(self, place: int, post: CommStart, begin: int, end: int) -> Iterator[_Event]:
        stream = self._streams.setdefault(post.communicator, _FIRST_CARRYING + 2 * len(self._streams))
        start, ready, stop = self._timeline.kernels[place]
        if post.operation == "copy":
            total, at = sum(post.messages), ready
            for size in post.messages:
                until = at + (stop - ready) * size / total
                name = "Memcpy PtoP (Device -> Device)"
                yield from self._kernel(name, stream, at, until, begin, end, "gpu_memcpy", bytes=size)
                at = until
            return
        yield from (_record(self._program.rank, post, begin, call) for call in _calls(self._program.rank, post))
        args = {} if post.operation in RINGS else _collective_args(self._program.rank, post)
        name = f"{_CARRYING[post.operation]} {MARK}"
        yield from self._kernel(name, stream, start, stop, begin, end, **args)


def _calls(rank: int, post: CommStart) -> Iterator[JsonObject]:
    """What the host records of a transfer's messages."""
    if post.operation not in RINGS:
        yield _collective_args(rank, post)
        return
    following, previous = _neighbours(rank, post)
    for size in post.messages:
        yield {"Collective name": "send", "Dst Rank": following, **_sizes(post, size, size)}
        yield {"Collective name": "recv", "Src Rank": previous, **_sizes(post, size, size)}


def _neighbours(rank: int, post: CommStart) -> tuple[int, int]:
    """The ranks that a hop goes to and comes from."""
    place = post.members.index(rank)
    return post.members[(place + 1) % len(post.members)], post.members[place - 1]


def _collective_args(rank: int, post: CommStart) -> JsonObject:
    (piece,) = post.messages
    whole = piece * len(post.members)
    taken = {"all_gather": (piece, whole), "reduce_scatter": (whole, piece)}.get(post.operation, (whole, whole))
    return {"Collective name": _CALLED[post.operation], "Rank": rank, **_sizes(post, *taken)}


def _sizes(post: CommStart, given: int, taken: int) -> JsonObject:
    return {
        "dtype": "Byte", "In msg nelems": given, "Out msg nelems": taken, "Group size": len(post.members),
        "Process Group Name": post.communicator, "Process Group Description": f"ringprof:{post.channel}",
        "Process Group Ranks": str(list(post.members)), "In split size": "[]", "Out split size": "[]",
    }  # fmt: skip


def _record(rank: int, post: CommStart, begin: int, call: JsonObject) -> _Event:
    return _slice("cpu_op", "record_param_comms", 0, _THREAD, begin, begin + 1, {"Rank": rank, **call})


def _slice(category: str, name: str, process: int, thread: int, begin: int, end: int, args: _Event) -> _Event:
    return {
        "ph": "X", "cat": category, "name": name, "pid": process, "tid": thread, "ts": begin / 1e3,
        "dur": (end - begin) / 1e3, "args": args,
    }  # fmt: skip
