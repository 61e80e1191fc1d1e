"""Measured times per iteration: rows of a table, recorded runs, and choices that ``ringprof bench`` recorded in turns.

The CSV has the columns ``strategy, seq_global, heads, n_gpus`` and ``time_ms`` or ``tflops`` (per GPU). Optional
columns are ``hardware, hosts, gpus_per_host, kv_heads, head_dim, batch, causal, dtype, pass, kernel, degrees, system``.
A row with an unknown value is not predicted. A ``system`` that names Transformer Engine or Megatron sends its hops as
`Query.pairwise` says. The baselines of MagiAttention's ``cp_benchmark`` run their blocks on one stream and, with
flash-attn 3, gather and scatter around each of them (``exps/dist_attn/baselines`` at 2c64135: ``ring_attn.py`` and
``_fa3_varlen_forward`` of ``utils_cp.py``).
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import msgspec

from ringprof.common.decoding import UNREADABLE, decode_file
from ringprof.common.files import is_folder, read_whole
from ringprof.common.json_object import JsonObject, Params
from ringprof.common.validation import whole
from ringprof.errors import InputError, RingprofError
from ringprof.prediction.network import Cluster
from ringprof.prediction.query import Query, find_run
from ringprof.run import Run
from ringprof.strategies.catalog import SPECS
from ringprof.workload.devices import device_named
from ringprof.workload.workload import Workload

TUNING = "ringprof.tuning/1"
"""Schema of the file of ``ringprof bench --until-decided``."""
_MOST_ROWS = 20_000
_NUMBER = re.compile(r"[0-9]{1,18}(\.[0-9]{0,18})?([eE][+-]?[0-9]{1,2})?")
_TIMES = ("time_ms", "tflops", "tflops_per_gpu_computed", "tflops_per_gpu_printed")
_COUNTS = {"seq_global": "", "heads": "", "n_gpus": "", "kv_heads": "", "head_dim": "128", "batch": "1"}
"""Columns with counts, and their defaults."""
_CLUSTER_COLUMNS = ("hosts", "gpus_per_host")
_SPELLINGS: Mapping[str, Mapping[str, str]] = {
    "pass": {"": "fwd+bwd", "fwd": "fwd", "forward": "fwd", "bwd": "bwd", "backward": "bwd", "fwd+bwd": "fwd+bwd",
             "forward+backward": "fwd+bwd"},
    "causal": dict.fromkeys(("", "true", "t", "yes", "y", "1", "causal"), "causal")
    | dict.fromkeys(("false", "f", "no", "n", "0", "full"), "full"),
    "dtype": {"": "bf16", "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "half": "fp16",
              "fp32": "fp32", "float32": "fp32"},
}  # fmt: skip
"""Accepted spellings of a column, with their meaning."""
_FLASH = re.compile(r"(?:fa|flash[-_ ]?att(?:entio)?n)[-_ v]*([234]?)(?![0-9])")
_PAIRWISE = re.compile(r"transformer ?engine|\bte\b|megatron|magiattention cp_benchmark: (ring_p2p|usp|loongtrain)")
"""Programs that send by Transformer Engine's ``flash_attn_p2p_communicate`` or a copy of it, in lower case."""
_NAMES = ("id", "system", "strategy", "degrees", "kernel", "hardware")
_KNOWN = {*_NAMES, *_TIMES, *_COUNTS, *_CLUSTER_COLUMNS, *_SPELLINGS}


@dataclass(frozen=True)
class Measured:
    """Measured time of what a query describes."""

    source: str
    """Path of the run, path and line of the table, or name of the row."""
    query: Query | None = None
    """Workload, strategy and cluster; ``auto`` for a kernel or a transport that is not stated.

    None if the measurement does not state enough, for the ``reason``.
    """
    ms: float | None = None
    """Milliseconds per iteration."""
    part: str = "fwd+bwd"
    """``fwd``, ``bwd`` or ``fwd+bwd``."""
    device: str | None = None
    """Name of the GPU; None if it is not stated."""
    reason: str = ""
    """Reason why there is nothing to compare with a prediction."""
    line: int = 0
    """Line of the table."""
    tflops: float | None = None
    """Measured TFLOP/s per GPU, of rows of a table."""


def read_rows(path: str) -> list[dict[str, str]]:
    """Read the rows of a CSV file, keyed by its lower-case column names. Raises `InputError`."""
    text = read_whole(path).decode("utf-8-sig", errors="replace")
    header, _, body = text.partition("\n")
    between = max(",;\t", key=header.count)
    try:
        names = [name.strip().lower() for name in next(csv.reader([header], delimiter=between), [])]
        rows = list(islice(csv.DictReader(io.StringIO(body), names, delimiter=between), _MOST_ROWS + 1))
    except csv.Error as error:
        raise InputError(f"{path}: not a table of measurements: {error}") from None
    if not rows or not {"strategy", "seq_global", "heads", "n_gpus"} <= set(names) or not set(_TIMES) & set(names):
        raise InputError(f"{path}: not a table of measurements: it needs strategy, seq_global, heads, n_gpus, time_ms")
    if len(rows) > _MOST_ROWS:
        raise InputError(f"{path}: at most {_MOST_ROWS} rows are checked at once")
    return rows


def unknown_columns(rows: Sequence[Mapping[str, str | None]]) -> list[str]:
    """Return the columns that are ignored."""
    return [name for name in rows[0] if name and name not in _KNOWN]


def read_row(number: int, row: Mapping[str, str | None], device: str, cluster: Cluster) -> Measured:
    """Read the row in line ``number`` of a table; a row that was measured on another ``device`` has no query."""
    cells = {key: value.strip() for key, value in row.items() if key and isinstance(value, str) and value.strip()}
    measured = Measured(cells.get("id") or cells.get("strategy") or "", line=number, part="")
    try:
        part, workload, cluster = _read_workload(cells, cluster)
        speeds = {name: float(cells[name]) for name in _TIMES if _is_number(name, cells.get(name))}
        measured_ms, tflops = speeds.pop("time_ms", None), next(iter(speeds.values()), None)
        flops = workload.model_flops() * 5 / 7 if part == "bwd" else workload.model_flops()
        flops = flops / cluster.size / 1e9
        if measured_ms is None and tflops:
            measured_ms = flops / tflops
        measured = replace(measured, part=part, ms=measured_ms, tflops=flops / measured_ms if measured_ms else None)
        return replace(measured, query=_query_of(cells, workload, cluster, device))
    except InputError as error:
        return replace(measured, reason=str(error))


def _is_number(name: str, text: str | None) -> bool:
    """Return whether there is a positive number. Raises `InputError` for anything else than a number or nothing."""
    if text and (not _NUMBER.fullmatch(text) or not float(text)):
        raise InputError(f"{name} {text[:40]!r} is no such number")
    return bool(text)


def _count(name: str, text: str) -> int:
    """Read a positive integer. Raises `InputError`."""
    count = whole(text.removesuffix(".0"))  # pandas writes 65536.0 if another row lacks the value
    if not count or count > 1 << 40:
        raise InputError(f"{name} {text[:40]!r} is no such number" if text else f"no {name}")
    return count


def _read_workload(cells: Mapping[str, str], cluster: Cluster) -> tuple[str, Workload, Cluster]:
    """Return pass, workload and cluster of a row. Raises `InputError`."""
    meanings = {}
    for column, meaning_of in _SPELLINGS.items():
        spelling = cells.get(column, "").lower().removeprefix("torch.")
        if spelling not in meaning_of:
            raise InputError(f"{column} {spelling[:40]!r} is none of {', '.join(filter(None, meaning_of))}")
        meanings[column] = meaning_of[spelling]
    defaults = _COUNTS | {"kv_heads": cells.get("heads", "")}
    seq, heads, world_size, kv_heads, head_dim, batch = (
        _count(name, cells.get(name, defaults[name])) for name in _COUNTS
    )
    workload = Workload(
        seq=seq, heads=heads, kv_heads=kv_heads, head_dim=head_dim, batch=batch, causal=meanings["causal"] == "causal",
        backward=meanings["pass"] != "fwd", dtype=meanings["dtype"],
    )  # fmt: skip
    cluster_sizes = {name: _count(name, cells[name]) for name in _CLUSTER_COLUMNS if name in cells}
    usual_per_host = world_size // cluster_sizes["hosts"] if "hosts" in cluster_sizes else cluster.gpus_per_host
    per_host = min(world_size, cluster_sizes.get("gpus_per_host", usual_per_host))
    hosts = cluster_sizes.get("hosts") or world_size // per_host
    if hosts * per_host != world_size:
        raise InputError(f"n_gpus {world_size} is not {hosts} hosts of {per_host}")
    return meanings["pass"], workload, replace(cluster, hosts=hosts, gpus_per_host=per_host)


def _query_of(cells: Mapping[str, str], workload: Workload, cluster: Cluster, device: str) -> Query:
    """Return the query of a row. Raises `InputError` for an unknown strategy or another device."""
    name = cells.get("strategy", "").lower().replace("_", "-")
    if name not in SPECS:
        raise InputError("a strategy that ringprof has not")
    measured_device, machine_device = map(device_named, (cells.get("hardware"), device))
    if measured_device and machine_device and measured_device != machine_device:
        raise InputError(f"measured on {measured_device}, and the machine is {machine_device}")
    params: Params = {}
    degrees = cells.get("degrees", "").lower()
    ulysses, window = re.search(r"ulysses=([0-9]{1,9})", degrees), re.search(r"window=([0-9]{1,9})", degrees)
    if ulysses and name in ("usp", "double-ring"):
        params["ulysses_degree"] = int(ulysses[1])
    if name == "usp" and "ring-first" in degrees:
        params["placement"] = "ring-first"
    if window and name in ("burst", "double-ring"):
        params["ring_window"] = int(window[1])
    if "flat ring" in degrees and name == "burst":
        params["double_ring"] = False
    if name == "allgather" and workload.causal:
        params["layout"] = "zigzag"
    system = cells.get("system", "").lower()
    pairwise = _PAIRWISE.search(system) is not None
    kernel = _kernel_name(cells.get("kernel", "").lower())
    one_stream = "magiattention cp_benchmark" in system
    return Query(
        name, workload, cluster, kernel, params=params, pairwise=pairwise, one_stream=one_stream,
        repacks=one_stream and kernel == "flash-attn-3",
    )  # fmt: skip


def _kernel_name(text: str) -> str:
    """Return ringprof's name of a kernel. Raises `InputError` for an unknown one."""
    from ringprof.strategies.kernels.registry import KERNELS

    flash = _FLASH.match(text)
    if flash:
        return "flash-attn" + (f"-{flash[1]}" if flash[1] in ("3", "4") else "")
    name = next((name for name in KERNELS if name in text), None)
    if text and name is None:
        raise InputError(f"a kernel that ringprof has not, {text[:40]!r}")
    return name or "auto"


# --- recorded runs, and choices that were recorded in turns -------------------------------------------


def query_of_run(run: Run, path: str) -> Query:
    """Return what a run recorded. Raises `InputError` if it does not name its strategy and workload."""
    if run.strategy is None or run.workload is None:
        raise InputError(f"{path}: this run does not name its strategy and workload")
    used, per_host = run.strategy, min(run.topology.ranks_per_host, run.topology.world_size)
    cluster = Cluster(-(-run.topology.world_size // per_host), per_host)
    return Query(used.name, run.workload, cluster, run.kernel or "auto", used.hops, dict(used.params))


def query_of_dict(data: JsonObject, cluster: Cluster) -> Query:
    """Return the query that a saved prediction or a tuning states. Raises `LookupError` and what msgspec raises."""
    workload = msgspec.convert(data["workload"], Workload)
    cluster = replace(cluster, hosts=data["hosts"], gpus_per_host=data["gpus_per_host"])
    return Query(data["strategy"], workload, cluster, data["kernel"], data["hops"], data["params"])


def measurements(path: str, device: str, cluster: Cluster) -> Iterator[Measured]:
    """Yield each measurement of a recorded run, of a tuning or of a table.

    ``device`` and ``cluster`` are the prediction's: a table may leave out the GPUs per node. Raises `InputError`.
    """
    if not is_folder(path) and path.endswith(".json"):
        tuning = decode_file(path, dict[str, Any], "a measurement")
        if tuning.get("schema") == TUNING:
            yield from _of_tuning(tuning, path)
            return
    try:
        run = find_run(path)
    except RingprofError:
        if is_folder(path):
            raise
        for number, row in enumerate(read_rows(path), 2):
            measured = replace(read_row(number, row, device, cluster), source=f"{path}:{number}")
            if measured.query is None or measured.ms is None:
                yield replace(measured, query=None, reason=measured.reason or "no time")
            elif measured.part == "bwd":
                yield replace(measured, query=None, reason="a backward pass alone")
            else:
                yield replace(measured, query=replace(measured.query, hops="auto"))  # a table does not state them
        return
    median_ns = run.timings.median_ns() if run.timings else None
    if run.predicted is not None:
        yield Measured(path, reason="a prediction, not a recording")
    elif median_ns is None:
        yield Measured(path, reason="no iteration was timed without the profiler")
    else:
        device_name = next(iter(run.environment.devices), None)
        yield Measured(path, query_of_run(run, path), median_ns / 1e6, device=device_name)


def _of_tuning(tuning: JsonObject, path: str) -> Iterator[Measured]:
    """Yield each trial's median over its recordings."""
    try:
        device = None if tuning["device"] == "cpu" else tuning["device"]
        for trial in tuning["trials"]:
            source = f"{path}: {trial['label']}"
            if trial["median_ms"] is None:
                yield Measured(source, reason=trial["failure"] or "no time")
                continue
            yield Measured(source, query_of_dict(trial, Cluster()), float(trial["median_ms"]), device=device)
    except (LookupError, *UNREADABLE, TypeError) as error:
        raise InputError(f"{path}: not a tuning of ringprof bench --until-decided: {error}") from None
