"""Labels of figures, and the meaning of each section in a sentence, for readers without the manual."""

from __future__ import annotations

from ringprof.analysis.findings.time_table import IDLE_LABELS, TIMES
from ringprof.analysis.kinds.kinds import KIND

LABELS: dict[str, str] = {
    **{row.name: row.label for row in TIMES if row.label},
    **IDLE_LABELS,
    **{key: kind.label for key, kind in KIND.items()},
}
"""Label of each part of a rank's time, cause of idle time, and kind."""

MEANINGS: dict[str, str] = {
    "machine": "What the driver reported while the iterations were timed, some ten times a second: a GPU that is held "
    "back runs every kernel slower, whatever the code does.",
    "breakdown": "Each rank's time, in parts that sum to its wall: an instant in which anything computes is compute, "
    "else communication if any runs (exposed), else memory operations, else idle.",
    "rates": "FLOPs of attention and matrix products by the shapes that the profiler recorded, over the time of their "
    "kernels. MFU: these FLOPs over the slowest rank's wall and the device's peak; recomputed work counts.",
    "waterfall": "From the device's peak matrix rate down to the speed achieved: what each loss takes of the slowest "
    "rank's wall, mean over ranks. The parts sum to that wall.",
    "timeline": "Every rank's device over time, a lane a stream: computation above, below it communication, split into "
    "waiting for a peer and bytes on the wire where the traces tell. Shaded: every other ring step, if there are any. "
    "Idle stretches that are wide enough to be seen are grey, with their cause. The overview above marks stretches "
    "without computation; the table below lists the longest of them.",
    "recurrence": "Local scan: what a rank computes without the states of other ranks. States: combining those of "
    "ranks and passing them on. Output: what needs the incoming state. Work belongs to the part that launched it, and "
    "waiting and wire time may be hidden behind computation.",
    "steps": "A ring step is one block of attention and the hops that it should hide. Exposed is communication in the "
    "step with nothing computing beside it; a step is bound by compute, by the wire or by a peer.",
    "waiting": "What each ring step of each rank exposes: the brightest cell costs most.",
    "parts": "Parts of the mean wall of what was profiled, as in each run's own report.",
    "kinds": "What ran, by kind, mean over ranks. Kinds may run at the same time, so they need not sum to the wall.",
    "speed": "Timed without the profiler, unless said otherwise; controls took turns with ordinary iterations.",
    "kernels": "Activities on the device by name, over all ranks, with the kind that they count as.",
    "gemms": "Calls of matrix products by the shape that the profiler recorded, (m, k) by (k, n), mean over ranks: the "
    "time of their kernels, and FLOPs over that time against the device's peak.",
    "collectives": "Kernels and copies of communication by kind, process group and size of one operation, mean over "
    "ranks. Sizes and bus bandwidth are those of nccl-tests; waiting for peers counts in the last column alone.",
    "layers": "Attention and communication by layer of the model, mean over ranks: work belongs to the layer that "
    "launched it, in the backward pass to the layer of the forward operator. Of transfers that overlap, the first "
    "has the time, so that the rows sum to the run's.",
    "hops": "A hop is one transfer with neighbours. It waits until its peers have arrived; the rest is wire.",
    "settings": "What was run, where, and with which versions.",
    "comparison": "Measurements side by side. Noise: the measurements do not prove a difference (95 % interval of the "
    "ratio, rank test). Of single recordings the interval assumes how far recordings of one program differ.",
    "changes": "What became of the time of one profiled iteration (of a captured block whose iterations are not known: "
    "of the block), by part of the waterfall, largest change first: to the left what the other run spends less, to the "
    "right what it spends more. The parts sum to the wall's change.",
    "timelines": "The base above, the other below, each from its first activity, on one axis: zooming moves both.",
    "changed_steps": "What each ring step exposes, mean over ranks.",
    "changed_kernels": "Time by name, mean over ranks.",
    "sweep": "Every combination of strategy, length and kernel that was recorded. FWD, FWD+BWD and TFLOPs/s are timed "
    "without the profiler; flash, comm, overlap and exposed are shares of the profiled iteration, whose kinds may run "
    "at once. 1 MiB is 1,048,576 bytes.",
    "sweep_speed": "Model FLOPs (backward 2.5 times forward, causal half) per device over the slowest rank's time. "
    "Dashed: what the kernel alone reaches, the ceiling; dotted: other people's code.",
    "tflops": "Model FLOPs (attention: backward 2.5 times forward, causal half) per device over the slowest rank's "
    "time.",
    "shares": "What the time of the profiled iteration went into, mean over ranks: shares of the mean wall, as in the "
    "table below. The profiler makes iterations longer, so they are no shares of the times there.",
    "peak_memory": "The most that a device held in the timed iterations.",
    "idle": "What the device waited for while nothing ran on it. Host: the next activity was not launched yet, by what "
    "the launching thread did meanwhile. Gap: launched, and it starts within 5 µs. Blocked: launched, and it starts "
    "later. The three sum to idle. Time blocked on a peer's copy is part of exposed communication, not of idle.",
    "memory": "What the allocators of the profiled program held after each allocation and release, by the clock of its "
    "calls, which run ahead of the device.",
}
"""Explanation of each section of a page."""
