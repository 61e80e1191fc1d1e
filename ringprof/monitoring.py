"""Watch a training loop: what communication costs it, on whom its ranks wait, and how that changes."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.findings import findings_in_memory
from ringprof.errors import MissingExtraError, RingprofError, UsageError
from ringprof.formatting import percent
from ringprof.json_object import JsonObject
from ringprof.record.request import require_packages
from ringprof.scale.pipeline import attribute
from ringprof.trace.kineto import read_trace
from ringprof.trace.reduced import parse_reduced, reduce_trace
from ringprof.validation import refuse_below_one

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ringprof.record.monitor import Monitor

_log = logging.getLogger("ringprof.monitor")


@contextmanager
def monitor(
    log: str | os.PathLike[str] | None = None,
    *,
    every: int = 200,
    group: ProcessGroup | DeviceMesh | None = None,
    tensorboard: str | os.PathLike[str] | None = None,
) -> Iterator[Monitor]:
    """Profile one step of the loop in the block now and then, and tell what its communication costs.

    Every rank of ``group`` (None: the world, or this process alone) enters. A step is one of the first optimizer that
    takes one; call ``step()`` of what this yields where that is not so. After ``every`` steps one warms the profiler up
    and the next is profiled, reduced on its rank and explained on the first; no trace is kept. The next look is put off
    until looking takes at most 1 % of the time.

    The first rank appends a line of JSON to ``log`` for every look: ``step``, ``time``, ``ranks``, ``step_ms`` (without
    the profiler), ``wall_ms`` (slowest rank), ``exposed_comm_share`` (``mean``, ``worst``, ``rank``), ``wait_ms`` and
    ``wire_ms`` (mean over ranks; null where they cannot be told), ``waited_for`` (ms by rank, of those that others
    waited for), ``straggler`` (the one waited for most), ``looks`` (for how many in a row) and ``interval``. The logger
    ``ringprof.monitor`` says it in words, and TensorBoard gets its figures where a folder is given.

    There is no look while a rank has a torch.profiler of its own, at work or to come: a process can have but one.

    Raises `MissingExtraError` without torch or, where asked for, TensorBoard; `UsageError` on a rank outside ``group``,
    for ``every`` below 1, and on the first rank where ``log`` cannot be written.
    """
    require_packages("torch")
    refuse_below_one({"every": every})
    from ringprof.record.monitor import Monitor
    from ringprof.record.process_group import GroupRanks

    ranks = GroupRanks(group)
    looks = Looks(log, _writer(tensorboard)) if ranks.rank == 0 else Looks(None)
    watch = Monitor(every, ranks, reduced, looks.tell)
    try:
        yield watch
    finally:
        watch.close()


def reduced(path: Path) -> bytes:
    """The reduced form of a trace; empty where it cannot be read."""
    try:
        return reduce_trace(read_trace(path))
    except RingprofError:
        return b""


class Looks:
    """What the first rank has told so far."""

    def __init__(self, log: str | os.PathLike[str] | None, writer: Any = None) -> None:
        self._log, self._writer = log, writer
        if log is not None and (Path(log).is_dir() or not os.access(Path(log).absolute().parent, os.W_OK)):
            raise UsageError(f"{os.fspath(log)}: cannot write the looks here: name a file in a folder that is there")
        self._straggler: int | None = None
        self._in_a_row = 0

    def tell(self, step: int, traces: list[bytes], cost: dict[str, float]) -> None:
        """One look: every rank's reduced trace, empty where there is none."""
        known = [parse_reduced(data) for data in traces if data]
        if not known:
            _log.warning("step %d: no rank has a trace that can be read, or they are too large together", step)
            return
        line: JsonObject = {"step": step, "time": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"}
        line |= look_figures(attribute(known)) | cost
        self._in_a_row = self._in_a_row + 1 if line["straggler"] == self._straggler else 1
        self._straggler = line["straggler"]
        line["looks"] = self._in_a_row
        if self._log is not None:
            with Path(self._log).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        _log.info("%s", _in_words(line))
        if self._writer is not None:
            self._writer.add_scalar("ringprof/exposed_comm_share", line["exposed_comm_share"]["mean"], step)
            self._writer.add_scalar("ringprof/step_ms", line["step_ms"], step)
            self._writer.flush()


def look_figures(attribution: Attribution) -> JsonObject:
    """What is told of one look."""
    summary, ranks = findings_in_memory(attribution).summary, attribution.ranks
    waited = waited_for(attribution)
    rows = [row for rank in ranks for row in rank.link_totals]
    told = bool(rows) and all(row.timed == row.kernels for row in rows)
    wait, wire = (sum(getattr(row, name) for row in rows) / len(ranks) / 1e6 for name in ("wait_ns", "wire_ns"))
    return {
        "ranks": len(ranks),
        "wall_ms": summary.slowest_wall_ns / 1e6,
        "exposed_comm_share": {
            "mean": summary.exposed_mean, "worst": summary.exposed_worst, "rank": summary.exposed_worst_rank
        },
        "wait_ms": wait if told else None,
        "wire_ms": wire if told else None,
        "waited_for": {str(rank): time / 1e6 for rank, time in waited.most_common()},
        "straggler": waited.most_common(1)[0][0] if waited else None,
    }  # fmt: skip


def waited_for(attribution: Attribution) -> Counter[int]:
    """By rank: nanoseconds that transfers of others waited for it, the last of their partners to begin."""
    blamed: Counter[int] = Counter()
    for rank in attribution.ranks:
        blamed.update(rank.exposed.waited_for)
    return blamed


def _in_words(line: JsonObject) -> str:
    """One look in a line."""
    share = line["exposed_comm_share"]
    text = f"step {line['step']}: {percent(share['mean'])} exposed communication (rank {share['rank']}: "
    text += f"{percent(share['worst'])}), {line['step_ms']:,.1f} ms a step"
    if line["straggler"] is not None:
        times = f", for {line['looks']} looks" if line["looks"] > 1 else ""
        text += f"; most waited for: rank {line['straggler']}{times}"
    return text


def _writer(folder: str | os.PathLike[str] | None) -> Any:
    if folder is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtraError(f"TensorBoard cannot be imported ({error}): pip install tensorboard") from None
    return SummaryWriter(str(folder))
