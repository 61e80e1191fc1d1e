"""Prints HolisticTraceAnalysis's figures of runs, as JSON: a process of its own, since it needs an older pandas.

python tests/analysis/hta_figures.py < RUNS     # {name: {rank: path of its trace}}; from the repository's root
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])


def main() -> None:
    warnings.simplefilter("ignore")
    from ringprof.hta import trace_analysis

    printed, sys.stdout = sys.stdout, sys.stderr
    found = {}
    for name, paths in json.load(sys.stdin).items():
        theirs = trace_analysis({int(rank): path for rank, path in paths.items()})
        overlap = theirs.get_comm_comp_overlap(visualize=False).set_index("rank")["comp_comm_overlap_pctg"]
        breakdown = theirs.get_temporal_breakdown(visualize=False).set_index("rank")
        found[name] = {
            rank: {"overlap": float(overlap[int(rank)]), **breakdown.loc[int(rank)].astype(float).to_dict()}
            for rank in paths
        }
    json.dump(found, printed)


if __name__ == "__main__":
    main()
