"""Builder of synthetic traces: a test states what ran when, in nanoseconds, and gets a `Trace`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringprof.analysis.kinds.classify import Classified
from ringprof.analysis.kinds.kinds import KINDS
from ringprof.trace.columns import (
    KERNEL,
    NONE,
    OPERATOR,
    Activities,
    CommRecord,
    CommRecords,
    Device,
    HostEvents,
    Launches,
    Ranges,
    Trace,
)

NCCL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
FLASH = "flash_fwd_kernel<Flash_fwd_kernel_traits<128>>"
MAIN = 100
"""Default thread of launches, ranges and operators."""


def kind_names(classified: Classified) -> list[str]:
    """Return the kind of every activity as text."""
    return [KINDS[code] for code in classified.kind]


def collective(name: str, **fields: Any) -> CommRecord:
    """Return a communication record; by default of ``elements`` bf16 numbers in the group ``cp`` of four ranks."""
    elements = fields.pop("elements", 1000)
    values: dict[str, Any] = {
        "group": "cp",
        "group_description": None,
        "group_ranks": (0, 1, 2, 3),
        "group_size": 4,
        "in_elements": elements,
        "out_elements": elements,
        "dtype": "BFloat16",
        "source_rank": None,
        "destination_rank": None,
    }
    return CommRecord(name=name, **{**values, **fields})


@dataclass
class Builder:
    """Collector of the rows of one rank's trace; `trace` returns them as columns sorted by start."""

    rank: int | None = 0
    world_size: int | None = 4
    host: str | None = None
    producer: str = "torch"
    gpu: str = "NVIDIA H200"
    names: list[str] = field(default_factory=list)
    collectives: list[CommRecord] = field(default_factory=list)
    activities: list[tuple[int, ...]] = field(default_factory=list)
    launches: list[tuple[int, ...]] = field(default_factory=list)
    annotations: list[tuple[int, ...]] = field(default_factory=list)
    device_annotations: list[tuple[int, ...]] = field(default_factory=list)
    operators: list[tuple[int, ...]] = field(default_factory=list)
    records: list[tuple[int, ...]] = field(default_factory=list)
    host_events: list[tuple[int, ...]] = field(default_factory=list)

    def run(
        self,
        name: str,
        start: int,
        end: int,
        *,
        launched: int | None = None,
        call: int = 5,
        thread: int = MAIN,
        stream: int = 7,
        device: int = 0,
        category: int = KERNEL,
        own: CommRecord | None = None,
        node: int = NONE,
        correlation: int | None = None,
        size: int = NONE,
        target: int = NONE,
    ) -> Builder:
        """Add a device activity, launched at ``launched`` (None: not recorded) by a call of ``call`` ns."""
        joins = NONE
        if correlation is not None:
            joins = correlation
        elif launched is not None:
            joins = 1000 + len(self.launches)
            self.launches.append((launched, launched + call, thread, joins))
        carried = NONE if own is None else self._collective(own)
        self.activities.append(
            (start, end, self._name(name), category, device, stream, joins, NONE, size, carried, node, target)
        )
        return self

    def mark(self, name: str, start: int, end: int, thread: int = MAIN) -> Builder:
        """Add a CPU annotation."""
        self.annotations.append((start, end, self._name(name), thread, NONE, NONE))
        return self

    def mark_device(self, name: str, start: int, end: int, stream: int = 7) -> Builder:
        """Add a device annotation."""
        self.device_annotations.append((start, end, self._name(name), stream, 0, NONE))
        return self

    def operate(self, name: str, start: int, end: int, thread: int = MAIN) -> Builder:
        """Add a CPU operator."""
        self.operators.append((start, end, self._name(name), thread, NONE, NONE))
        return self

    def on_host(self, name: str, start: int, end: int, category: int = OPERATOR, thread: int = MAIN) -> Builder:
        """Add a host event that explains idle time: an operator, a range or a CUDA call."""
        self.host_events.append((start, end, self._name(name), thread, category))
        return self

    def record(self, start: int, end: int, what: CommRecord, thread: int = MAIN) -> Builder:
        """Add a ``record_param_comms`` row."""
        self.records.append((start, end, thread, NONE, self._collective(what)))
        return self

    def batch(
        self, launched: int, start: int, end: int, *, to: int, source: int, tensors: int = 2, **fields: Any
    ) -> Builder:
        """Add a batched exchange: its records before the launch, then one kernel without metadata."""
        posted = launched - 10 * tensors
        for number in range(tensors):
            self.record(
                posted + 10 * number, posted + 10 * number + 4, collective("send", destination_rank=to, **fields)
            )
            self.record(
                posted + 10 * number + 5, posted + 10 * number + 9, collective("recv", source_rank=source, **fields)
            )
        return self.run(NCCL, start, end, launched=launched, stream=20)

    def trace(self, path: str = "") -> Trace:
        """Return all rows as a `Trace`."""
        ranges = (np.int64, np.int64, np.int32, np.int64, np.int32, np.int64)
        return Trace(
            path=path or f"rank{self.rank}.json",
            names=list(self.names),
            activities=_columns(
                Activities,
                self.activities,
                (
                    np.int64,
                    np.int64,
                    np.int32,
                    np.int8,
                    np.int32,
                    np.int32,
                    *[np.int64] * 3,
                    np.int32,
                    np.int64,
                    np.int32,
                ),
            ),
            launches=_columns(Launches, self.launches, (np.int64,) * 4),
            annotations=_columns(Ranges, self.annotations, ranges),
            device_annotations=_columns(Ranges, self.device_annotations, ranges),
            operators=_columns(Ranges, self.operators, ranges),
            comm_records=_columns(CommRecords, self.records, (np.int64,) * 4 + (np.int32,)),
            host_events=_columns(HostEvents, self.host_events, (np.int64, np.int64, np.int32, np.int64, np.int8)),
            collectives=list(self.collectives),
            devices=[Device(0, self.gpu)],
            producer=self.producer,
            rank=self.rank,
            world_size=self.world_size,
            host=self.host,
            groups={},
            base_ns=0,
        )

    def _name(self, name: str) -> int:
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)

    def _collective(self, what: CommRecord) -> int:
        if what not in self.collectives:
            self.collectives.append(what)
        return self.collectives.index(what)


def _columns(kind: Any, rows: list[tuple[int, ...]], types: tuple[Any, ...]) -> Any:
    ordered = sorted(rows, key=lambda row: row[0])
    columns = zip(*ordered, strict=True) if rows else [() for _ in types]
    return kind(*(np.array(column, dtype) for column, dtype in zip(columns, types, strict=True)))
