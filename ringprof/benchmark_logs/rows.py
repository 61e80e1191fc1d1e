"""What a benchmark log says, as rows: times in ms, memory in MB, rates in TFLOP/s, None for what is not printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a log states about its runs outside the rows, or a user on the command line; None: not stated."""

    batch: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    hidden: int | None = None
    causal: bool | None = None
    world_size: int | None = None
    device: str | None = None
    seqs: tuple[int, ...] = ()
    """Sequence lengths that the log says it measures."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """Line that each was read from."""


@dataclass(frozen=True, kw_only=True)
class LogRow:
    """One printed table row, one Burst block, or a results block that no table row repeats."""

    file: str
    line: int
    format: str
    """``columns``, ``markdown``, ``ring_type``, ``burst`` or ``results``."""
    system: str
    """Normalised: ``burst``, ``double_ring``, ``megatron_cp``, ``ulysses``, ``usp``, ``zigzag``, ``stripe``, ``ring``;
    ``unknown`` where no heading tells."""
    label: str
    """The heading as printed (untrusted text)."""
    label_line: int | None = None
    seq: int | None = None
    batch: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    causal: bool | None = None
    dtype: str | None = None
    world_size: int | None = None
    placement: str | None = None
    """``head_first`` or ``ring_first``."""
    layout: str | None = None
    """``contiguous``, ``zigzag`` or ``stripe``, where a row names it."""
    ulysses_degree: int | None = None
    ring_degree: int | None = None
    double_ring: bool | None = None
    forward_only: bool | None = None
    forward_ms: float | None = None
    forward_backward_ms: float | None = None
    throughput_per_s: float | None = None
    tflops: float | None = None
    """Of forward and backward; of forward where `forward_only`."""
    tflops_forward: float | None = None
    tflops_backward: float | None = None
    memory_mb: float | None = None
    oom: bool = False
    missing: bool = False
    """The row stands for a measurement that has no value (``x``)."""
    device: str | None = None
    columns: tuple[str, ...] = ()
    """Titles of its table."""
    steps: Mapping[str, float] = field(default_factory=dict)
    """Worth of the last printed digit of each figure, in its own unit."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where a setting comes from that the row itself does not print: ``line 13`` or ``option``."""


@dataclass(frozen=True)
class BenchmarkLog:
    """One file's rows, with what it says around them."""

    path: str
    rows: tuple[LogRow, ...]
    settings: Settings
    """The last stated of each."""
    results_blocks: int = 0
    """``Benchmark Results for`` blocks, whether or not a row repeats them."""
    repeated_sources: tuple[tuple[int, int, str], ...] = ()
    """(line, line, name) of log files that the text lists twice."""
