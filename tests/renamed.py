"""Committed runs with another GPU's name in their traces."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path


def with_gpu_named(run: Path, device: str, folder: Path) -> Path:
    """Copy a run's folder to ``folder``, its traces naming their GPU ``device``; returns the copy."""
    shutil.copytree(run, folder)
    for path in folder.glob("*.json.gz"):
        trace = json.loads(gzip.decompress(path.read_bytes()))
        for properties in trace["deviceProperties"]:
            properties["name"] = device
        path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    return folder
