"""Launcher whose rank this process is, and recording as that rank: torchrun on one or many hosts, or srun. Loads torch.

If the run fails, all ranks end within seconds and one rank reports the cause. Rank 0 receives the outcome of every rank
that fails, is stopped or disconnects. It waits briefly, since the cause may arrive after its effects, ends all ranks
and reports the cause. If rank 0 itself has disconnected, rank 1 reports, and so does the first rank of every host that
holds neither rank 0 nor rank 1.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import msgspec

from ringprof import errors
from ringprof.errors import RecordError, RingprofError
from ringprof.iteration.request import RecordRequest
from ringprof.iteration.resolve import resolve
from ringprof.ranks.heartbeat import LOOPBACK
from ringprof.ranks.launcher import RankInfo
from ringprof.ranks.machine import RankHost, distinct_host_names, host_name, host_numbers
from ringprof.ranks.process_group import GroupRanks, world_group
from ringprof.ranks.progress import PositionReporter, Reporter, SilentReporter
from ringprof.ranks.rank_errors import error_line
from ringprof.ranks.watchdog import INTERRUPT, Watchdog
from ringprof.recording.recording import RankTask, recording_class
from ringprof.recording.shutdown import BACKUP_S, FirstRankShutdown, OtherRankShutdown, ReportedElsewhere
from ringprof.run import Run, read_run
from ringprof.strategies.transport.hosts import Hosts

SETUP_LIMIT_S = 600.0
"""Time limit in seconds of the process group's first collectives, before the estimate sets the run's own limit."""


class _TaskMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Message of rank 0 to the other ranks before anything is computed: the task, or the error that refuses it."""

    task: RankTask | None = None
    port: int = 0
    token: str = ""
    error: str = ""
    message: str = ""


def record_as_rank(request: RecordRequest, rank_info: RankInfo, reporter: Reporter) -> Run | None:
    """Record as the rank ``rank_info``; return the run on rank 0 and None on other ranks.

    Only rank 0 estimates, reports and writes ``run.json``. Raises an error of rank 0 before the recording
    (`UsageError` and others) on every rank.
    """

    def exit_before_run(reason: str, code: int) -> None:
        # Rank 0 reports an interrupt, not a launcher that ends all ranks.
        if rank_info.rank == 0 and reason == INTERRUPT:
            sys.stderr.write("ringprof: interrupted before all ranks were there; nothing was recorded\n")
        os._exit(code)

    position = PositionReporter(reporter if rank_info.rank == 0 else SilentReporter())
    resolved = resolve(request, rank_info)
    # A rank that waits in a collective for missing ranks notices signals and its launcher's end only by the watchdog.
    watchdog = Watchdog(exit_before_run, rank_info.parent)
    watchdog.start()
    try:
        with world_group(rank_info, resolved.device, SETUP_LIMIT_S):
            run = _record(request, rank_info, position, watchdog)
    except RuntimeError as error:
        # Before the heartbeats start, a lost rank, perhaps rank 0, shows only as an error of torch.distributed.
        raise RecordError(f"rank {rank_info.rank} cannot reach the other ranks: {error_line(error)}") from error
    finally:
        watchdog.stop()
    return None if run is None else read_run(request.output)


def _record(
    request: RecordRequest, rank_info: RankInfo, position: PositionReporter, watchdog: Watchdog
) -> Run | None:  # fmt: skip
    """Share the task with the other ranks and record it.

    The watchdog ends this rank when the launcher or another rank ends, or at the time limit.
    """
    world = GroupRanks(None)
    ranks = world.gather_structs(RankHost(host_name(), rank_info.node, os.getpid()))
    hosts = distinct_host_names(ranks)
    rank, host = rank_info.rank, hosts[rank_info.rank]
    siblings = {number: ranks[number].pid for number, name in enumerate(hosts) if name == host and number != rank}
    ranks_per_host = Hosts(dict(enumerate(host_numbers(hosts)))).per_host(range(len(hosts)))
    rank_info = replace(rank_info, local_world_size=ranks_per_host)

    # Rank 0 sends its task, or the error that refuses it, to all ranks.
    own_message, refusal = _TaskMessage(), None
    shutdown: FirstRankShutdown | OtherRankShutdown | None = None
    if rank == 0:
        try:
            task = RankTask.prepare(request, position, rank_info)
            shutdown = FirstRankShutdown(task, rank, hosts, position, siblings)
            own_message = _TaskMessage(task=task, port=shutdown.server.port, token=shutdown.server.token)
        except RingprofError as error:
            own_message, refusal = _TaskMessage(error=type(error).__name__, message=str(error)), error
    message = world.gather_structs(own_message)[0]
    if refusal is not None:
        raise refusal
    if message.task is None:
        raise getattr(errors, message.error, RecordError)(message.message)

    # The other ranks connect to rank 0's heartbeat server; if one cannot, all ranks give up.
    one_host, problem = len(set(hosts)) == 1, ""
    address = LOOPBACK if one_host else os.environ.get("MASTER_ADDR", LOOPBACK)
    if rank != 0:
        shutdown = OtherRankShutdown(message.task, rank, hosts, position, siblings)
        try:
            shutdown.connect(address, message.port, message.token)
        except OSError as error:
            why = error.strerror or error
            problem = f"rank {rank} on host {host} cannot reach rank 0 at {address}, port {message.port}: {why}"
    problems = [os.fsdecode(part) for part in world.gather_bytes(os.fsencode(problem)) if part]
    if problems or shutdown is None:
        if rank == 0:
            message.task.discard()
        # On one host no firewall is between the ranks, so there is nothing to advise.
        advice = "" if one_host else "; check that the hosts accept each other's TCP connections on any port"
        raise (RecordError if rank == 0 else ReportedElsewhere)(f"{problems[0]}{advice}")

    recording = recording_class(message.task.request)(message.task, rank_info, world, position, hosts)
    if isinstance(shutdown, FirstRankShutdown):
        recording.before_publish = shutdown.seal
    watchdog.hand_over(shutdown.stopped, message.task.time_limit, 0 if rank == 0 else BACKUP_S)
    try:
        run = recording.record()
        shutdown.done()
        return run
    except Exception as error:
        raise shutdown.failed(error) from error
    finally:
        watchdog.stop()
