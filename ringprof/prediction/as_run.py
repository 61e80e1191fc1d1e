"""A prediction written in the recorder's format: a `Run`, and a Kineto trace per simulated rank.

Everything that reads recorded runs can read it. Every visible name marks it as predicted: the run, the hosts and the
devices; so does the run's field ``predicted``.
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
from ringprof.common.files import write_atomically
from ringprof.common.json_object import JsonObject
from ringprof.dryrun.schedule import CommStart, CommWait, ComputeOp, MemoryOp, Op, Program, StreamWait
from ringprof.prediction.host_model import host_ns
from ringprof.prediction.predict import PredictionResult, kernel_figures
from ringprof.prediction.simulator import RINGS, Timeline
from ringprof.run import Environment, Predicted, Profiled, RankTrace, Run, StrategyUsed, Timings, Topology, write_run

MARK = "(predicted)"
_COMPUTE_STREAM, _FIRST_TRANSFER_STREAM = 7, 20
_THREAD, _ORIGIN_NS = 1, 10**15
_ATTENTION_KERNELS = {
    "cudnn": ("cudnn_sdpa_flash_fprop", "cudnn_sdpa_flash_bprop"),
    "torch-flash": ("pytorch_flash::flash_fwd_kernel", "pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel"),
    "flash-attn-3": ("FlashAttnFwdSm90", "FlashAttnBwdSm90"),
    "fla": ("chunk_gated_delta_rule_fwd_kernel", "chunk_gated_delta_rule_bwd_kernel"),
    "flash-attn-4": ("flash_attncuteflash_fwd", "flash_attncuteflash_bwd"),
}
_DEFAULT_ATTENTION_KERNELS = ("flash_fwd_kernel", "flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel")
_TRANSFER_KERNELS = {
    "send_recv": "ncclDevKernel_SendRecv", "chain": "ncclDevKernel_SendRecv", "all_to_all": "ncclDevKernel_SendRecv",
    "all_gather": "ncclDevKernel_AllGather_RING_LL", "reduce_scatter": "ncclDevKernel_ReduceScatter_Sum_RING_LL",
}  # fmt: skip
_COLLECTIVE_NAMES = {
    "all_to_all": "all_to_allv", "all_gather": "_allgather_base", "reduce_scatter": "_reduce_scatter_base",
}  # fmt: skip

_Event = JsonObject


def write_prediction(prediction: PredictionResult, folder: Path, command: Sequence[str]) -> Run:
    """Write ``run.json`` and the traces of the simulated ranks into ``folder``; return the run."""
    folder.mkdir(parents=True, exist_ok=True)
    traces = []
    # An earlier prediction's file, whose traces are replaced: until the last trace exists, the folder is not a run.
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
    """Return the prediction as a run, whose three iterations are the 10th, 50th and 90th percentile."""
    query, cluster = prediction.query, prediction.query.cluster
    world_size, now = cluster.size, datetime.now(UTC)
    slowest = max(timeline.end_ns for timeline in prediction.timelines)
    by_rank = {
        p.rank: t.end_ns / slowest for p, t in zip(prediction.schedule.programs, prediction.timelines, strict=True)
    }
    representatives = [prediction.representative_of(rank) for rank in range(world_size)]
    quantiles = prediction.interval_ns
    programs = {program.rank: program for program in prediction.schedule.programs}
    return Run(
        name=f"predicted-{query.strategy.rpartition(':')[2]}-{query.workload.seq}",
        created=f"{now:%Y-%m-%dT%H:%M:%SZ}",
        command=list(command),
        workload=query.workload,
        topology=Topology(
            world_size=world_size,
            # The hosts share one clock, so they are marked as emulated.
            hosts=[f"predicted{EMULATED}{cluster.host(rank)}" for rank in range(world_size)],
            local_ranks=[rank % cluster.gpus_per_host for rank in range(world_size)],
            ranks_per_host=cluster.gpus_per_host, device_type="cuda", backend="nccl",
        ),
        strategy=StrategyUsed(
            name=query.strategy, target=prediction.schedule.target, params=prediction.schedule.params,
            layout=prediction.schedule.layout,
            hops=query.hops,
        ),
        kernel=query.kernel,
        environment=Environment(
            devices=[f"{prediction.machine.device} {MARK}"] * world_size, versions={"ringprof": __version__},
            variables={}
        ),
        timings=Timings(
            warmup=0, iterations_ns=[[round(ns * by_rank[rank]) for ns in quantiles] for rank in representatives]
        ),
        profiled=Profiled(iterations_ns=[[round(slowest * by_rank[rank])] for rank in representatives]),
        peak_memory_bytes=[programs[rank].peak_bytes for rank in representatives],
        work=[programs[rank].work for rank in representatives],
        traces=traces,
        predicted=Predicted(
            machine=prediction.machine.name, evidence=prediction.evidence, simulated_ranks=len(programs),
            p10_ns=round(quantiles[0]), p50_ns=round(quantiles[1]), p90_ns=round(quantiles[2]),
        ),
    )  # fmt: skip


def trace_of(prediction: PredictionResult, program: Program, timeline: Timeline) -> JsonObject:
    """Return one rank's trace in the format of torch's profiler."""
    cluster, machine = prediction.query.cluster, prediction.machine
    host = list(accumulate(host_ns(machine, kernel_figures(machine, prediction.query), program)))
    writer = _Writer(prediction, program, timeline, _ORIGIN_NS + round(min(prediction.lead_ns, host[-1])))
    events, begin = list[_Event](), _ORIGIN_NS
    for op_index, op in enumerate(program.ops):
        # The host finishes issuing an operation before the device starts it.
        end = max(begin + 100, _ORIGIN_NS + round(host[op_index]))
        events += writer.op_events(op_index, op, begin, end)
        begin = end
    events.append(writer.range("ringprof::iteration", _ORIGIN_NS, begin))
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
        "traceEvents": events,
    }  # fmt: skip


class _Writer:
    """Events of one rank's operations, on the host and on the device."""

    def __init__(self, prediction: PredictionResult, program: Program, timeline: Timeline, origin: int) -> None:
        self._program, self._timeline, self._origin = program, timeline, origin
        self._streams: dict[str, int] = {}
        self._launches = 0
        forward, backward = _ATTENTION_KERNELS.get(prediction.query.kernel, _DEFAULT_ATTENTION_KERNELS)
        self._names = {"forward": f"{forward} {MARK}", "backward": f"{backward} {MARK}"}

    def op_events(self, op_index: int, op: Op, begin: int, end: int) -> Iterator[_Event]:
        """Yield the events of an operation that the host issues from ``begin`` to ``end``."""
        if isinstance(op, CommStart):
            destination = f"/to={_neighbours(self._program.rank, op)[0]}" if op.operation == "copy" else ""
            yield self.range(f"ringprof::send/{op.channel}{destination}", begin, end)
            yield from self._transfer(op_index, op, begin, end)
        elif isinstance(op, ComputeOp | MemoryOp):
            if op.label:
                yield self.range(f"ringprof::{op.label}", begin, end)
            name = self._names[op.phase] if isinstance(op, ComputeOp) else op.name
            start, stop = self._timeline.ops[op_index]
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
        """Yield a launch at the end of the host's work and the kernel that it started."""
        self._launches += 1
        args |= {"device": 0, "stream": stream, "correlation": self._launches}
        launch = {"correlation": self._launches}
        yield _slice("cuda_runtime", "cudaLaunchKernel", 0, _THREAD, max(begin, end - 1), end, launch)
        first, last = (self._origin + round(time_ns) for time_ns in (start, stop))
        yield _slice(category, name, 1, stream, first, last, args)

    def _transfer(self, op_index: int, comm_op: CommStart, begin: int, end: int) -> Iterator[_Event]:
        """Yield the events of a transfer: one copy per message, or one NCCL kernel with its recorded calls."""
        stream = self._streams.setdefault(comm_op.communicator, _FIRST_TRANSFER_STREAM + 2 * len(self._streams))
        start, ready, stop = self._timeline.kernels[op_index]
        if comm_op.operation == "copy":
            total_bytes, copy_start = sum(comm_op.messages), ready
            for size in comm_op.messages:
                copy_end = copy_start + (stop - ready) * size / total_bytes
                name = "Memcpy PtoP (Device -> Device)"
                yield from self._kernel(name, stream, copy_start, copy_end, begin, end, "gpu_memcpy", bytes=size)
                copy_start = copy_end
            return
        rank, args, calls = self._program.rank, JsonObject(), list[JsonObject]()
        if comm_op.operation in RINGS:
            following, previous = _neighbours(rank, comm_op)
            for size in comm_op.messages:
                calls.append({"Collective name": "send", "Dst Rank": following, **_sizes(comm_op, size, size)})
                calls.append({"Collective name": "recv", "Src Rank": previous, **_sizes(comm_op, size, size)})
        elif comm_op.operation == "chain":
            (size,), (sender, receiver) = comm_op.messages, comm_op.members
            call = {"send": ("Dst Rank", receiver)} if rank == sender else {"recv": ("Src Rank", sender)}
            for name, (key, peer) in call.items():
                calls.append({"Collective name": name, key: peer, **_sizes(comm_op, size, size)})
        else:
            (piece,), name = comm_op.messages, _COLLECTIVE_NAMES[comm_op.operation]
            total = piece * len(comm_op.members)
            sizes = {"all_gather": (piece, total), "reduce_scatter": (total, piece)}
            sent_and_received = sizes.get(comm_op.operation, (total, total))
            args = {"Collective name": name, "Rank": rank, **_sizes(comm_op, *sent_and_received)}
            calls.append(args)
        for call in calls:
            yield _slice("cpu_op", "record_param_comms", 0, _THREAD, begin, begin + 1, {"Rank": rank, **call})
        name = f"{_TRANSFER_KERNELS[comm_op.operation]} {MARK}"
        yield from self._kernel(name, stream, start, stop, begin, end, **args)


def _neighbours(rank: int, comm_op: CommStart) -> tuple[int, int]:
    """Return the ranks that a hop goes to and comes from."""
    position = comm_op.members.index(rank)
    return comm_op.members[(position + 1) % len(comm_op.members)], comm_op.members[position - 1]


def _sizes(comm_op: CommStart, sent: int, received: int) -> JsonObject:
    return {
        "dtype": "Byte", "In msg nelems": sent, "Out msg nelems": received, "Group size": len(comm_op.members),
        "Process Group Name": comm_op.communicator, "Process Group Description": f"ringprof:{comm_op.channel}",
        "Process Group Ranks": str(list(comm_op.members)), "In split size": "[]", "Out split size": "[]",
    }  # fmt: skip


def _slice(category: str, name: str, process: int, thread: int, begin: int, end: int, args: _Event) -> _Event:
    return {
        "ph": "X", "cat": category, "name": name, "pid": process, "tid": thread, "ts": begin / 1e3,
        "dur": (end - begin) / 1e3, "args": args,
    }  # fmt: skip
