"""Attention and communication of one rank by layer of the model.

A layer is a module, or a range of the user whose name has the number of a layer, such as ``layers.3``. The trace shows
which ones are layers: those of the class with the most instances that launch attention, at least two; of classes with
equally many, the outermost. Attention outside of them is searched for layers of further classes in the same way.
Ranges that ringprof names as layers are layers if one launches attention: others may have recurrences. Work
belongs to the layer that launched it. In the backward pass it belongs to the layer of the forward operator whose
autograd node launched it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ringprof.analysis import intervals
from ringprof.analysis.intervals import Spans
from ringprof.analysis.kinds.classify import Classified
from ringprof.analysis.kinds.kinds import ATTENTION, COMMUNICATION, COMPUTE, is_kind
from ringprof.analysis.timeline.cpu import find_communication, outermost_operators, window_bounds
from ringprof.analysis.timeline.rows import TimedActivities
from ringprof.analysis.timeline.window import Window
from ringprof.trace.columns import NONE, Int64, Trace, distinct, enclosing_rows

OUTSIDE = ""
"""Name that stands for everything outside of all layers, or of unknown layer."""
MOST_LAYERS = 1000
"""Largest number of layers of a rank; a trace that names more has none."""

NAMED_LAYER = "ringprof::layer "
"""Start of the names of the ranges that `ringprof.capture` opens around the layers of a model."""
_MODULE = "nn.Module: "
"""Start of the names of modules, which end in the number of the instance, as in ``nn.Module: Linear_3``."""
_NOT_USER_RANGES = ("ringprof::", "nccl:", "gloo:", "c10d::")
_LAYER_NUMBER = re.compile(
    r"(?:layer|block|attn|attention|decoder|encoder|\bh)s?[ ._:#(\[/-]{0,4}([0-9]+)", re.IGNORECASE
)
_NUMBER = re.compile("[0-9]+")
_LONGEST_NAME = 1000


class LayerTime(NamedTuple):
    """Times of one layer on one rank, in nanoseconds. All layers and the rest together sum to the rank's times."""

    layer: str
    """Name of the module or range; `OUTSIDE` for the rest."""
    attention_ns: int
    """Time of attention kernels; of kernels that overlap, the one that began first has the time."""
    communication_ns: int
    """Time of communication; of transfers that overlap, the one that began first has the time."""
    exposed_ns: int
    """Exposed communication: part of ``communication_ns``, plus time that the device idled for a peer's copy."""
    exposed_backward_ns: int
    """Part of ``exposed_ns`` that the backward pass launched."""
    wait_ns: int
    """Part of ``exposed_ns`` spent waiting for a peer, as far as it is known."""
    wire_ns: int
    """Part of ``exposed_ns`` with bytes on the wire, as far as it is known."""
    compute_ns: int
    """Time of all computation, attention included; of kernels that overlap, the one that began first has the time."""


class _Calls(NamedTuple):
    """Calls of all layers: disjoint on each thread."""

    start_ns: Int64
    end_ns: Int64
    thread: Int64
    layer: Int64
    """Index into the names of the layers."""


class _Points(NamedTuple):
    """Times on threads; for those within calls of autograd nodes also time and thread of the forward operator."""

    time_ns: Int64
    thread: Int64
    forward_ns: Int64
    forward_thread: Int64
    in_backward: npt.NDArray[np.bool_]
    """Whether a point lies within the call of a node, as recomputed forward operators do, too."""

    def take(self, rows: npt.NDArray[np.intp]) -> _Points:
        """Return the points of some rows."""
        return _Points(
            self.time_ns[rows], self.thread[rows], self.forward_ns[rows], self.forward_thread[rows],
            self.in_backward[rows],
        )  # fmt: skip

    def owners(self, calls: _Calls) -> Int64:
        """Return each point's layer among ``calls`` or `NONE`: directly, else by the forward operator."""
        row = enclosing_rows(calls[:3], self.time_ns, self.thread)
        by_node = np.flatnonzero((row == NONE) & (self.forward_ns != NONE))
        row[by_node] = enclosing_rows(calls[:3], self.forward_ns[by_node], self.forward_thread[by_node])
        owner: Int64 = np.append(calls.layer, NONE)[row]
        return owner


class TraceLayers:
    """The layers of one rank's trace; ``names`` is empty where it shows none."""

    def __init__(self, trace: Trace, attention_ns: Int64, thread: Int64) -> None:
        """Find the layers. Attention was launched at the times ``attention_ns`` on the threads ``thread``."""
        self._nodes = nodes = trace.backward_calls
        self._node_levels = _by_depth(nodes.start_ns, nodes.end_ns, nodes.thread)
        self.names: list[str] = []
        self._calls: list[_Calls] = []
        candidates = _candidates(trace) if len(attention_ns) else []
        if not candidates:
            return
        left = self._points(attention_ns, thread)
        while candidates and len(left.time_ns):
            owners = [left.owners(calls) for _, calls, _ in candidates]
            counts = [len(distinct(owner[owner != NONE])) for owner in owners]
            # Of classes with equally many layers, the outermost takes the most time.
            times = [int((calls.end_ns - calls.start_ns).sum()) for _, calls, _ in candidates]
            best = max(range(len(candidates)), key=lambda number: (counts[number], times[number]))
            names, calls, fewest = candidates.pop(best)
            if counts[best] < fewest or len(self.names) + counts[best] > MOST_LAYERS:
                break
            self._calls.append(calls._replace(layer=calls.layer + len(self.names)))
            self.names += names
            left = left.take(np.flatnonzero(owners[best] == NONE))

    def of(self, times_ns: Int64, thread: Int64) -> tuple[Int64, npt.NDArray[np.bool_]]:
        """Return the layer open at each time on its thread, and whether the backward pass runs then.

        The layer is an index into ``names``, or `NONE`.
        """
        points = self._points(times_ns, thread)
        layer = np.full(len(times_ns), NONE, np.int64)
        for calls in self._calls:
            layer = np.where(layer == NONE, points.owners(calls), layer)
        return layer, points.in_backward

    def spans(self) -> tuple[Int64, Int64, Int64, npt.NDArray[np.bool_]]:
        """Return the calls of layers and of their autograd nodes: start, end, layer, and whether in the backward pass.

        The layer is an index into ``names``, which must not be empty.
        """
        nodes = self._nodes
        layer, _ = self.of(nodes.forward_ns, nodes.forward_thread)
        layer[nodes.forward_ns == NONE] = NONE
        of_layer = layer != NONE
        start, end, thread, number = (np.concatenate(column) for column in zip(*self._calls, strict=True))
        in_backward = np.append(self._points(start, thread).in_backward, np.ones(int(of_layer.sum()), np.bool_))
        return (
            np.append(start, nodes.start_ns[of_layer]), np.append(end, nodes.end_ns[of_layer]),
            np.append(number, layer[of_layer]), in_backward,
        )  # fmt: skip

    def _points(self, times_ns: Int64, thread: Int64) -> _Points:
        """Find the innermost call of a node around each time on its thread."""
        nodes, node = self._nodes, np.full(len(times_ns), NONE, np.int64)
        for level in self._node_levels:
            rows = nodes.start_ns[level], nodes.end_ns[level], nodes.thread[level]
            enclosing = enclosing_rows(rows, times_ns, thread)
            node = np.where(enclosing == NONE, node, np.append(level, NONE)[enclosing])
        forward_ns, forward_thread = (
            np.append(nodes.forward_ns, NONE)[node],
            np.append(nodes.forward_thread, NONE)[node],
        )
        return _Points(times_ns, thread, forward_ns, forward_thread, node != NONE)


_DEEPEST = 8
"""Number of levels of nested calls that are told apart. Autograd nodes nest only where checkpointing is reentrant."""


def _by_depth(start: Int64, end: Int64, thread: Int64) -> list[npt.NDArray[np.intp]]:
    """Return the rows of intervals by depth: those within no other of their thread, those within one, and so on.

    The intervals of a thread nest or are disjoint.
    """
    levels: list[npt.NDArray[np.intp]] = []
    left = np.lexsort((-end, start, thread))
    while len(levels) < _DEEPEST and (len(left) or not levels):
        outermost = np.ones(len(left), np.bool_)
        for number in distinct(thread[left]):
            rows = np.flatnonzero(thread[left] == number)
            latest_end = np.maximum.accumulate(end[left[rows]])
            outermost[rows[1:]] = start[left[rows[1:]]] >= latest_end[:-1]
        levels.append(left[outermost])
        left = left[~outermost]
    return levels


def _module_name(text: str) -> tuple[str, int, str] | None:
    """Return class, number and name of the layer that a module's call may be; None for a name of another form."""
    class_name, _, number = text.removeprefix(_MODULE).rpartition("_")
    if not class_name or not (number.isascii() and number.isdecimal()):
        return None
    return class_name, int(number[:18]), f"{class_name}_{number}"


def _range_name(text: str) -> tuple[str, int, str] | None:
    """Return class, number and name of the layer that a range may be; None without the number of a layer."""
    if text.startswith(NAMED_LAYER):
        text = text.removeprefix(NAMED_LAYER)
        places = [match.span() for match in _NUMBER.finditer(text)][-1:]
    else:
        match = None if text.startswith(_NOT_USER_RANGES) else _LAYER_NUMBER.search(text)
        places = [match.span(1)] if match else []
    if not places:
        return None
    begin, end = places[0]
    # Other numbers in a name, such as that of a step, do not tell layers apart.
    before, after = (_NUMBER.sub("*", part) for part in (text[:begin], text[end:]))
    number = text[begin:end]
    return f"{before}#{after}", int(number[:18]), f"{before}{number}{after}"


def _candidates(trace: Trace) -> list[tuple[list[str], _Calls, int]]:
    """Return the classes of modules and ranges that may be layers: the instances' names, their calls, and how many of
    them must launch attention."""
    result = []
    for ranges, name_of in ((trace.modules, _module_name), (trace.annotations, _range_name)):
        classes: dict[str, dict[int, tuple[int, str]]] = {}
        for index in distinct(ranges.name).tolist():
            layer_name = name_of(trace.names[index][:_LONGEST_NAME])
            if layer_name:
                classes.setdefault(layer_name[0], {})[index] = layer_name[1:]
        for instances in classes.values():
            names = [name for _, name in sorted(set(instances.values()))]
            if len(names) < 2:
                continue
            position = {name: number for number, name in enumerate(names)}
            layer_of_name = np.full(len(trace.names), NONE, np.int64)
            layer_of_name[list(instances)] = [position[name] for _, name in instances.values()]
            rows = np.flatnonzero(layer_of_name[ranges.name] != NONE)
            rows = rows[_by_depth(ranges.start_ns[rows], ranges.end_ns[rows], ranges.thread[rows])[0]]
            layer = layer_of_name[ranges.name[rows]]
            calls = _Calls(ranges.start_ns[rows], ranges.end_ns[rows], ranges.thread[rows], layer)
            named = any(trace.names[index].startswith(NAMED_LAYER) for index in instances)
            result.append((names, calls, 1 if named else 2))
    return result


def device_layers(
    classified: Classified, rows: TimedActivities, exposed: Spans, wait: Spans, wire: Spans,
    blocked: Sequence[tuple[int, int, str]],
) -> tuple[LayerTime, ...]:  # fmt: skip
    """Return the times of a GPU rank's layers, then those outside of all; empty where the trace shows no layers.

    ``rows``: the window's activities. ``exposed``: exposed communication without the time that ``blocked`` lists;
    ``wait`` and ``wire`` are its parts that are known to wait or to be on the wire. ``blocked``: time that the device
    idled because of a peer's copy, as (index of the hop's own copy among the trace's activities, nanoseconds, part);
    the part is ``wait``, ``wire``, or ``unsplit``. Layers whose times are all 0 are left out.
    """
    trace, launch = classified.trace, classified.launch[rows.activity]
    if not (len(trace.modules.start_ns) or len(trace.annotations.start_ns)):
        return ()
    launched = launch != NONE
    time = np.where(launched, np.append(trace.launches.start_ns, NONE)[launch], NONE)
    thread = np.where(launched, np.append(trace.launches.thread, NONE)[launch], NONE)
    attention, communication = rows.of(*ATTENTION) & launched, rows.of(*COMMUNICATION)
    layers = TraceLayers(trace, time[attention], thread[attention])
    if not layers.names:
        return ()
    layer, in_backward = layers.of(time, thread)
    layer[~launched], in_backward[~launched] = NONE, False
    times = _Times(layers.names)
    computes = rows.of(*COMPUTE)
    for column, mask in (
        ("attention", rows.of(*ATTENTION)), ("compute", computes), ("communication", communication),
    ):  # fmt: skip
        start, end, row = _tiles(rows.start_ns, rows.end_ns, mask)
        times.add(column, layer[row], end - start)
        if column == "communication":
            covered = intervals.covered_ns(exposed, start, end)
            times.add("exposed", layer[row], covered)
            times.add("exposed_backward", layer[row], np.where(in_backward[row], covered, 0))
            times.add("wait", layer[row], intervals.covered_ns(wait, start, end))
            times.add("wire", layer[row], intervals.covered_ns(wire, start, end))
    row_of = {activity: row for row, activity in enumerate(rows.activity.tolist())} if blocked else {}
    for activity, time_ns, part in blocked:
        index = row_of.get(activity, NONE)
        owner = layer[[index]] if index != NONE else np.array([NONE])
        length = np.array([time_ns])
        times.add("exposed", owner, length)
        if index != NONE and in_backward[index]:
            times.add("exposed_backward", owner, length)
        if part in ("wait", "wire"):
            times.add(part, owner, length)
    return times.rows()


def cpu_layers(trace: Trace, window: Window) -> tuple[LayerTime, ...]:
    """Return the times of a CPU rank's layers, then those outside of all; empty where the trace shows no layers.

    Communication belongs to the layer that is open at the time. Waiting and wire time are 0: they are not known on CPU.
    Layers whose times are all 0 are left out.
    """
    if not (len(trace.modules.start_ns) or len(trace.annotations.start_ns)):
        return ()
    window_start, window_end = window_bounds(trace, window, None)
    start, end, kind, thread = outermost_operators(trace)
    start, end = np.clip(start, window_start, window_end), np.clip(end, window_start, window_end)
    attention = is_kind(kind, *ATTENTION) & (end > start)
    layers = TraceLayers(trace, start[attention], thread[attention])
    if not layers.names:
        return ()
    communication = find_communication(trace, window_start, window_end)
    computes = is_kind(kind, *COMPUTE)
    compute = intervals.subtraction(intervals.union(start[computes], end[computes]), communication.blocked)
    flash = intervals.union(start[attention], end[attention])
    open_start, open_end, number, in_backward = layers.spans()
    every = np.ones(len(open_start), np.bool_)
    tile_start, tile_end, row = _tiles(open_start, open_end, every)
    times = _Times(layers.names)
    for column, covering in (
        ("attention", flash), ("compute", compute), ("communication", communication.everything),
        ("exposed", communication.exposed_beside(compute)),
    ):  # fmt: skip
        covered = intervals.covered_ns(covering, tile_start, tile_end)
        times.add(column, number[row], covered)
        times.add(column, np.array([NONE]), np.array([intervals.length_ns(covering) - int(covered.sum())]))
        if column == "exposed":
            times.add("exposed_backward", number[row], np.where(in_backward[row], covered, 0))
    return times.rows()


def _tiles(start: Int64, end: Int64, mask: npt.NDArray[np.bool_]) -> tuple[Int64, Int64, Int64]:
    """Trim the intervals of ``mask`` so that they are disjoint; time in several belongs to the one that began first.

    Returns start, end and index of each interval, by start.
    """
    row = np.flatnonzero(mask)
    row = row[np.argsort(start[row], kind="stable")]
    if not len(row):
        return start[row], end[row], row
    latest = np.maximum.accumulate(end[row])
    begin = np.maximum(start[row], np.append(start[row[0]], latest[:-1]))
    return begin, np.maximum(end[row], begin), row


class _Times:
    """Sums of times by layer; the last sum is for time outside of all layers."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._sums = {field.removesuffix("_ns"): np.zeros(len(names) + 1, np.int64) for field in LayerTime._fields[1:]}

    def add(self, column: str, layer: Int64, time_ns: Int64) -> None:
        """Add times; `NONE` as a layer stands for the last sum."""
        np.add.at(self._sums[column], layer, time_ns)

    def rows(self) -> tuple[LayerTime, ...]:
        """Return the sums of every layer that has any, and of the rest."""
        names = [*self._names, OUTSIDE]
        values = zip(*(self._sums[field.removesuffix("_ns")].tolist() for field in LayerTime._fields[1:]), strict=True)
        return tuple(LayerTime(name, *row) for name, row in zip(names, values, strict=True) if any(row))
