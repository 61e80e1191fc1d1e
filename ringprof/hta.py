"""HolisticTraceAnalysis as a companion: its object over the same traces, for what it analyses deeper."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringprof.errors import InputError, MissingExtraError

_READS = (".json", ".json.gz")


def trace_analysis(paths: Mapping[int, str]) -> Any:
    """A ``hta.trace_analysis.TraceAnalysis`` over the trace of each rank.

    Raises `MissingExtraError` where it cannot be imported, `InputError` where a trace is none that it reads.
    """
    for path in paths.values():
        if not path.lower().endswith(_READS) or not Path(path).is_file():
            raise InputError(f"{path}: HolisticTraceAnalysis reads Kineto files only ({', '.join(_READS)})")
    try:
        from hta.trace_analysis import TraceAnalysis
    except ImportError as error:
        raise MissingExtraError(
            f"HolisticTraceAnalysis cannot be imported ({error}): pip install 'ringprof[hta]' 'pandas<3'"
        ) from None
    # It joins each path to its folder, which leaves whole paths as they are.
    return TraceAnalysis(trace_files={rank: str(Path(path).resolve()) for rank, path in paths.items()}, trace_dir="/")
