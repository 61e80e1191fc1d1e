"""Write the figures of HolisticTraceAnalysis for runs, through ``run.hta()``, in a Python that can import it.

python -m tests.analysis.hta_figures OUT.json FOLDER...
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

from tests.loaded import analysis

TEMPORAL = ("kernel_time(us)", "compute_time(us)", "non_compute_time(us)", "idle_time(us)")


def figures_of(folder: str) -> dict[str, Any]:
    """Return by rank the overlap in percent and the temporal breakdown in microseconds."""
    # HolisticTraceAnalysis knows no marked iterations: both analyse the whole trace.
    hta = analysis(folder, window="trace").hta()
    # HolisticTraceAnalysis takes CUDA's waits on a stream, in which nothing runs, for activities of the device.
    waits = hta.t.symbol_table.get_sym_id_map().get("cuda_sync")
    for rank, frame in hta.t.traces.items():
        hta.t.traces[rank] = frame[frame["cat"] != waits]
    overlap = hta.get_comm_comp_overlap(visualize=False).set_index("rank")["comp_comm_overlap_pctg"]
    temporal = hta.get_temporal_breakdown(visualize=False).set_index("rank")
    return {
        "overlap": {str(rank): float(share) for rank, share in overlap.items()},
        "temporal": {str(rank): {key: float(row[key]) for key in TEMPORAL} for rank, row in temporal.iterrows()},
    }


def main() -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    out, *folders = sys.argv[1:]
    Path(out).write_text(json.dumps({folder: figures_of(folder) for folder in folders}))


if __name__ == "__main__":
    main()
