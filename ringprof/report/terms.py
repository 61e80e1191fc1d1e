"""Labels of figures, and explanations of the sections of comparisons and sweeps."""

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
    "waiting": "What each ring step of each rank exposes: the brightest cell costs most.",
    "parts": "Parts of the mean wall of what was profiled, as in each run's own report.",
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
}
"""Explanation of each section of a page of a comparison or sweep, and of the heat map of ring steps."""
