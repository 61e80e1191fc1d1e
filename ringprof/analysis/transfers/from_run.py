"""Bytes and peers of send/recv kernels that no trace record tells of, from what the recorder counted.

Where an iteration was replayed by a CUDA graph, or the CPU's records are missing, a kernel shows its time and nothing
else. ``run.json`` counts what each rank sent over each ring in an iteration. That is spread over the kernels only
where it leaves no choice: the counts must be those of the trace, and the hops of a pass must all be equally large.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ringprof.analysis.transfers.transfers import Message, Transfer
from ringprof.run import Run, Sent

_PHASES = ("forward", "backward")


def fill_from_run(transfers: Sequence[Transfer], run: Run | None, rank: int) -> list[Transfer]:
    """The rank's transfers; its send/recv kernels with bytes and peers from ``run`` where no record has them."""
    bare = [place for place, transfer in enumerate(transfers) if transfer.kind == "send_recv"]
    work = run.work_of(rank) if run and bare else None
    if run is None or work is None:
        return list(transfers)
    if any(transfers[place].source != "none" for place in bare):
        return list(transfers)
    sizes = _sizes(work.sent or [], len(bare))
    if not sizes or len(bare) % len(sizes):
        return list(transfers)
    filled = list(transfers)
    to, source = _neighbours(run, rank)
    group = ("", tuple(run.ranks()))
    for number, place in enumerate(bare):
        size = sizes[number % len(sizes)]
        filled[place] = msgspec.structs.replace(
            filled[place],
            group=group,
            sends=() if to is None else (Message(to, size),),
            receives=() if source is None else (Message(source, size),),
            sent_bytes=size,
            source="run",
        )
    return filled


def _sizes(sent: Sequence[Sent], kernels: int) -> list[int | None]:
    """Bytes of each hop of one iteration, in order; None where hops of different size are mixed in one pass.

    Empty where something else than hops was counted that runs as a send/recv kernel, too, or more hops than there are
    kernels.
    """
    hops = [entry for entry in sent if entry.operation == "send_recv" and entry.count]
    if any(entry.operation == "all_to_all" for entry in sent) or sum(entry.count for entry in hops) > kernels:
        return []
    sizes: list[int | None] = []
    for phase in _PHASES:
        these = [entry for entry in hops if entry.phase == phase]
        each = {entry.sent_bytes // entry.count if entry.sent_bytes % entry.count == 0 else None for entry in these}
        size = each.pop() if len(each) == 1 else None
        sizes += [size] * sum(entry.count for entry in these)
    return sizes


def _neighbours(run: Run, rank: int) -> tuple[int | None, int | None]:
    """(rank sent to, rank received from), None where what was sent did not go round one ring of all ranks."""
    to: dict[int, int] = {}
    for sender, work in zip(run.ranks(), run.work or (), strict=False):
        receivers = {entry.to for entry in work.sent or ()}
        receiver = receivers.pop() if len(receivers) == 1 else None
        if receiver is None:
            return None, None
        to[sender] = receiver
    ring = [rank]
    while (following := to.get(ring[-1], rank)) not in ring:
        ring.append(following)
    return (to[rank], ring[-1]) if len(ring) == len(to) else (None, None)
