"""Bytes and peers of send/recv kernels without a trace record, from the counts that the recorder wrote.

Where a CUDA graph replays an iteration, or the CPU records are missing, a kernel shows only its time. ``run.json``
counts what each rank sent over each ring in an iteration. These counts are assigned to kernels only where the
assignment is unique: the counts equal those of the trace, and all hops of a pass have one size.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ringprof.analysis.transfers.transfers import Transfer
from ringprof.run import Run, Sent
from ringprof.trace.columns import Message

_PHASES = ("forward", "backward")


def fill_from_run(transfers: Sequence[Transfer], run: Run | None, rank: int) -> list[Transfer]:
    """Return the rank's transfers, with bytes and peers from ``run`` for send/recv kernels without a record."""
    unrecorded = [index for index, transfer in enumerate(transfers) if transfer.kind == "send_recv"]
    work = run.work_of(rank) if run and unrecorded else None
    if run is None or work is None:
        return list(transfers)
    if any(transfers[index].source != "none" for index in unrecorded):
        return list(transfers)
    sizes = _sizes(work.sent or [], len(unrecorded))
    if not sizes or len(unrecorded) % len(sizes):
        return list(transfers)
    filled = list(transfers)
    receiver, sender = _neighbours(run, rank)
    group = ("", tuple(run.ranks()))
    for number, index in enumerate(unrecorded):
        size = sizes[number % len(sizes)]
        filled[index] = msgspec.structs.replace(
            filled[index],
            group=group,
            sends=() if receiver is None else (Message(receiver, size),),
            receives=() if sender is None else (Message(sender, size),),
            sent_bytes=size,
            source="run",
        )
    return filled


def _sizes(sent: Sequence[Sent], kernels: int) -> list[int | None]:
    """Return the bytes of each hop of one iteration, in order; None for hops of a pass with mixed sizes.

    Empty where the run counted all-to-alls, which run as send/recv kernels too, or more hops than there are kernels.
    """
    hops = [entry for entry in sent if entry.operation == "send_recv" and entry.count]
    if any(entry.operation == "all_to_all" for entry in sent) or sum(entry.count for entry in hops) > kernels:
        return []
    sizes: list[int | None] = []
    for phase in _PHASES:
        of_phase = [entry for entry in hops if entry.phase == phase]
        sizes_of_phase = {
            entry.sent_bytes // entry.count if entry.sent_bytes % entry.count == 0 else None for entry in of_phase
        }
        size = sizes_of_phase.pop() if len(sizes_of_phase) == 1 else None
        sizes += [size] * sum(entry.count for entry in of_phase)
    return sizes


def _neighbours(run: Run, rank: int) -> tuple[int | None, int | None]:
    """Return (receiver, sender) of the rank; None where the messages did not go round one ring of all ranks."""
    receiver_of: dict[int, int] = {}
    for sender, work in zip(run.ranks(), run.work or (), strict=False):
        receivers = {entry.to for entry in work.sent or ()}
        receiver = receivers.pop() if len(receivers) == 1 else None
        if receiver is None:
            return None, None
        receiver_of[sender] = receiver
    ring = [rank]
    while (next_rank := receiver_of.get(ring[-1], rank)) not in ring:
        ring.append(next_rank)
    return (receiver_of[rank], ring[-1]) if len(ring) == len(receiver_of) else (None, None)
