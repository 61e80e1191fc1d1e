"""The run: what ran, its verification, its speed and its baselines; in the terminal, in JSON and on the page."""

from __future__ import annotations

import shlex
from statistics import fmean
from typing import Any

import msgspec

from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.summary import BaselineMetrics, Communication, Rates
from ringprof.analysis.kinds.kinds import ATTENTION, COMPUTE, KIND, in_a_sentence
from ringprof.analysis.transfers.hops import OTHER_HOST, SAME_HOST
from ringprof.common.formatting import percent, three_digits
from ringprof.common.json_object import JsonObject
from ringprof.report.page.document import Content, PageContext, PageTable, ReportParts, text
from ringprof.report.tables import Column, Listing, Table, text_table
from ringprof.report.text import (
    TextStyle,
    binary_size,
    captured_in_words,
    clean,
    duration,
    in_unit,
    rate,
    slower_or_faster,
    strategy_in_title,
    unit_for,
)
from ringprof.run import Run, Verification
from ringprof.workload.workload import Workload

_PARTIAL_NOTE = "a part of the run was chosen: rates, controls and memory of whole iterations are left out"
_LARGE_OVERHEAD = 0.25
"""Least slow-down by the profiler, as a share, for which the time of a GPU run's computation is stated."""
_MIN_KIND_SHARE = 0.01
"""Least share of computation for which a kind is named."""
_JSON_FIELDS = ("name", "created", "workload", "workload_ranks", "topology", "strategy", "kernel", "verification",
         "peak_memory_bytes", "device_states", "device_links")  # fmt: skip

_LINK_PLACES = {SAME_HOST: "within a host", OTHER_HOST: "between hosts"}


def terminal(findings: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """Return one block on what ran, how it was verified and how fast it was; none for traces without a run file."""
    run, rates = findings.attribution.run, findings.summary.rates
    if run is None:
        return []
    verification = [_verification_line(run.verification)] if run.verification else []
    partial_note = [_PARTIAL_NOTE] if findings.attribution.partial_window else []
    speed_lines = [*_speed_lines(run, rates, findings.summary.window_iterations), *_balance_lines(run)]
    return [
        style.wrap(
            "\n".join(
                [
                    describe_run(run),
                    *verification,
                    *speed_lines,
                    *_cp_step_lines(run),
                    *_attention_share_lines(findings),
                    *partial_note,
                    *_cost_lines(run, rates),
                    *_slowed_host_lines(findings),
                ]
            )
        )
    ]


def describe_run(run: Run, *, in_title: bool = False) -> str:
    """Describe strategy, workload and kernel in one line.

    A title names only parameters that are numbers, such as degrees, and in words: ``usp, ulysses degree 2``.
    """
    parts = []
    if run.strategy:
        parameters = ", ".join(f"{key}={value}" for key, value in run.strategy.params.items())
        in_full = run.strategy.name + (f" ({parameters})" if parameters else "")
        parts.append(strategy_in_title(run.strategy.name, run.strategy.params) if in_title else in_full)
    if run.workload:
        parts += _describe_workload(run, run.workload)
    if run.kernel:
        parts.append(f"kernel {run.kernel}")
    if run.strategy and run.strategy.hops == "copy":
        parts.append("hops by copy engine")
    return " · ".join(clean(part) for part in parts) or f"{'captured block ' * run.captured}{clean(run.name)}"


def _describe_workload(run: Run, workload: Workload) -> list[str]:
    tokens = f"{workload.seq} tokens"
    if workload.kv_length is not None:
        tokens = f"{workload.phase}: {workload.seq} new of {workload.kv_length} tokens"
    if run.sharing_ranks != run.topology.world_size:
        tokens += f" per group of {run.sharing_ranks} rank{'s' if run.sharing_ranks > 1 else ''}"
    return [
        f"{tokens}, {workload.heads_in_words()}" + (f", batch {workload.batch}" if workload.batch > 1 else ""),
        ", ".join([workload.mask_in_words(), *workload.extras()]),
        workload.dtype + ("" if workload.backward else ", forward only"),
        *([] if workload.layer is None else [f"{workload.layers} x {workload.layer}"]),
    ]


def _attention_share_lines(findings: Findings) -> list[str]:
    """State the share of attention in the computation of whole layers, and what the rest is."""
    run = findings.attribution.run
    if run is None or run.workload is None or run.workload.layer is None:
        return []
    rows = {row.kind: row.time_ns for row in findings.summary.kinds if row.kind in COMPUTE}
    total_ns = sum(rows.values())
    if not total_ns:
        return []
    attention = sum(time for kind, time in rows.items() if kind in ATTENTION)
    others = [
        f"{KIND[kind].label} {percent(time / total_ns)}"
        for kind, time in rows.items() if kind not in ATTENTION and time >= _MIN_KIND_SHARE * total_ns
    ]  # fmt: skip
    return [
        f"attention's kernels are {percent(attention / total_ns)} of the computing; of the rest: {', '.join(others)}"
    ]


def _verification_line(check: Verification) -> str:
    """State at which lengths the result was verified, how, and the error nearest its tolerance."""
    outcome = "result verified" if check.passed else "RESULT WRONG"
    timed = check.timed
    errors = [*check.errors.items(), *(timed.errors.items() if timed else ())]
    name, worst_error = max(errors, key=lambda item: item[1].rms / (item[1].allowed_rms or 1.0))
    positions = ""
    if timed:
        plural = "s" if timed.places > 1 else ""
        positions = f", and at {timed.places} position{plural} per rank of the timed {timed.seq}"
    return (
        f"{outcome} against float64 at {check.seq} tokens{positions}; worst error: {name}, {worst_error.rms:.1e} "
        f"relative (tolerance {worst_error.allowed_rms:.1e}, kernel alone {worst_error.kernel_rms:.1e})"
    )


def _speed_lines(run: Run, rates: Rates, iterations: int | None) -> list[str]:
    parts = []
    if rates.tflops is not None and rates.tflops_quantiles:
        low, high = rates.tflops_quantiles["p10"], rates.tflops_quantiles["p90"]
        quantiles = f"median of {rates.iterations_timed}, p10 to p90: {rate(low)} to {rate(high)}"
        sample = captured_in_words(iterations) if run.captured else "one iteration"
        spread = quantiles if rates.iterations_timed > 1 else sample
        spread += "" if run.timings else ", under the profiler"
        if run.predicted:
            spread = f"80 % within {rate(low)} to {rate(high)}"
        parts.append(f"{rate(rates.tflops)} per device {'predicted' if run.predicted else 'achieved'} ({spread})")
    if rates.block_tflops is not None:
        parts.append(f"its attention kernels run at {rate(rates.block_tflops)}")
    return ["; ".join(parts)] if parts else []


def _balance_lines(run: Run) -> list[str]:
    """State how evenly a mask's work is spread over the ranks, if the mask is neither causal nor full."""
    flops = run.block_flops()
    if not flops or run.workload is None or run.workload.mask().plain or run.workload.recurrent:
        return []
    mean = sum(flops.values()) / len(flops)
    busiest = max(flops, key=lambda rank: flops[rank])
    least_busy = min(flops, key=lambda rank: flops[rank])
    return [
        f"attention work over the ranks: {flops[busiest] / mean:.3f} of the mean on rank {busiest}, "
        f"{flops[least_busy] / mean:.3f} on rank {least_busy}"
        + (
            f"; layout: {run.strategy.layout}"
            if run.workload.documents and run.strategy and run.strategy.layout
            else ""
        )
    ]


def _cp_step_lines(run: Run) -> list[str]:
    lines = []
    for number, step in enumerate(_cp_steps(run) or (), 1):
        size = step["ranks"]
        line = f"step {number}: {size} rank{'s' * (size > 1)} per sequence, {step['sequences']} of {step['seq']} tokens"
        if step["slowest_ns"] is not None:
            # Each step has its own slowest rank, so the times of the steps need not sum to that of an iteration.
            line += f", {duration(step['slowest_ns'])} on its slowest rank, {rate(step['tflops'])} per device"
        lines.append(line)
    return lines


def _cp_steps(run: Run) -> list[JsonObject] | None:
    """List the steps of dynamic CP, each with its slowest rank's median time; None where there are none."""
    workload = run.workload
    if workload is None or workload.sequences is None:
        return None
    steps: list[JsonObject] = []
    for number, count in enumerate(workload.sequences):
        slowest = max((rank[number] for rank in (run.timings and run.timings.steps_ns) or []), default=None)
        flops = count * workload.step(count).model_flops() / run.topology.world_size
        steps.append({
            "ranks": run.topology.world_size // count, "sequences": count, "seq": workload.seq // count,
            "slowest_ns": slowest, "tflops": flops / slowest / 1e3 if slowest else None,
        })  # fmt: skip
    return steps


def _cost_lines(run: Run, rates: Rates) -> list[str]:
    parts = []
    if rates.profiler_overhead is not None and rates.slowest_median_ns is not None:
        condition = f"without the profiler, {slower_or_faster(rates.profiler_overhead)} with it"
        condition = f"predicted by machine {clean(run.predicted.machine)}" if run.predicted else condition
        parts.append(f"{duration(rates.slowest_median_ns)} per iteration {condition}")
    if rates.peak_memory_bytes:
        parts.append(f"peak memory {binary_size(rates.peak_memory_bytes)} per device")
    return ["; ".join(parts)] if parts else []


def _slowed_host_lines(findings: Findings) -> list[str]:
    """Say what the figures stand for where a run is much slower with the profiler: on GPUs the time of computation."""
    attribution, rates = findings.attribution, findings.summary.rates
    overhead, timed_ns = rates.profiler_overhead, rates.slowest_median_ns
    recorded = attribution.run is not None and attribution.run.predicted is None
    complete = recorded and len(attribution.ranks) == attribution.world_size
    if overhead is None or timed_ns is None or overhead < _LARGE_OVERHEAD or not complete:
        return []
    if attribution.on_cpu:
        return [f"all shares are of the profiled iteration, not of the {duration(timed_ns)} without the profiler"]
    iterations = findings.summary.times_divisor
    compute_ns = fmean(rank.breakdown.compute_ns for rank in attribution.ranks) / iterations
    wall_ns = fmean(rank.breakdown.wall_ns for rank in attribution.ranks) / iterations
    if not compute_ns < timed_ns:
        return []
    return [
        f"computation takes {duration(compute_ns)} of {duration(wall_ns)} with the profiler (mean of ranks), and about"
        f" as much of the {duration(timed_ns)} without it"
    ]


def communication(findings: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """Describe waiting and wire time of each kind of communication; empty on CPU, where they are not known."""
    attribution, rows = findings.attribution, findings.summary.communication
    complete = attribution.run is not None and len(attribution.ranks) == attribution.world_size
    lines = [_communication_line(row, copy_waits_known=complete) for row in rows]
    return [style.wrap("\n".join(lines))] if rows and not attribution.on_cpu else []


def _communication_line(row: Communication, *, copy_waits_known: bool) -> str:
    name = in_a_sentence(row.kind)
    link = f" {_LINK_PLACES[row.link]}" if row.link in _LINK_PLACES else ""
    rates = []
    if row.wire_gbps is not None:
        rates.append(f"{three_digits(row.wire_gbps)} GB/s")
    if row.best_gbps is not None:
        rates.append(f"{three_digits(row.best_gbps)} best seen on this link")
    shown = f" ({'; '.join(rates)})" if rates else ""
    # A peer copy itself never waits: its rank idles, which only a complete recording attributes to a peer.
    if row.kind == "copy_engine" and not row.wait_share and not copy_waits_known:
        return f"All {name} time{link} is on the wire{shown}; waiting for it, if any, is idle time in these traces."
    waited = f"{percent(row.wait_share, 0)} of {name} time{link} was waiting for a peer"
    return f"{waited}, {percent(row.wire_share, 0)} on the wire{shown}."


def baselines(findings: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """Build a table with one row per baseline and its share of an iteration, and a sentence on the result."""
    metrics = findings.summary.rates.controls
    if metrics is None:
        return []
    unit_ns, unit = unit_for(metrics.iteration_ns)
    rows = _baseline_rows(metrics, recurrent=findings.attribution.recurrent)
    cells = [
        [name, f"{in_unit(time, unit_ns)} {unit}", percent(time / metrics.iteration_ns), note]
        for name, time, note in rows
    ]
    columns = [Column("controls"), Column("time"), Column("of an\niteration"), Column("", left=True)]
    repetitions = f"{metrics.iterations} of each in {metrics.rounds} round{'s' if metrics.rounds > 1 else ''}"
    ideal_text = (
        f"{percent(metrics.ideal_efficiency)} of its ideal and " if metrics.ideal_efficiency is not None else ""
    )
    lines = [f"The run reaches {ideal_text}{percent(metrics.of_solo)} of the solo rate"]
    if metrics.flash_slowdown is not None:
        # Communication cannot make kernels faster: what was measured so is the clock, or noise.
        lines.append(
            f"its attention kernels are {slower_or_faster(metrics.flash_slowdown)} beside communication than alone"
            if metrics.flash_slowdown >= 0 else "its attention kernels are no slower beside communication than alone"
        )  # fmt: skip
    return [text_table(columns, cells, style), style.wrap("; ".join(lines) + f" ({repetitions}).")]


def _baseline_rows(metrics: BaselineMetrics, *, recurrent: bool) -> list[tuple[str, float, str]]:
    bound_by = "compute only" if metrics.ideal_ns == metrics.compute_only_ns else "communication only"
    alone = "the tokens by the kernel alone" if recurrent else "the same blocks alone"
    rows = (
        ("ordinary iteration, interleaved", metrics.iteration_ns, ""),
        ("compute only: nothing sent", metrics.compute_only_ns, ""),
        ("communication only: nothing computed", metrics.communication_only_ns, ""),
        ("ideal: the larger of the two", metrics.ideal_ns, bound_by),
        (alone, metrics.solo_ns, rate(metrics.solo_tflops)),
    )
    return [(name, time, note) for name, time, note in rows if time is not None]


def _baseline_tables(findings: Findings) -> list[PageTable]:
    """Build the table of baselines for the page; empty where none were measured."""
    metrics = findings.summary.rates.controls
    if metrics is None:
        return []
    columns = (Column("controls"), Column("", "time", on_page="ms"), Column("of an iteration", "share"), Column("note"))
    rows = [
        [name, time, time / metrics.iteration_ns, note]
        for name, time, note in _baseline_rows(metrics, recurrent=findings.attribution.recurrent)
    ]
    return [Table("", columns, rows).page()]


def json(findings: Findings) -> ReportParts:
    """Build the ``run`` of the JSON report; times of single iterations are left to ``run.json``."""
    if findings.attribution.run is None:
        return {"run": None}
    plain: JsonObject = msgspec.to_builtins(findings.attribution.run)
    return {"run": {**{key: plain[key] for key in _JSON_FIELDS}, "cp_steps": _cp_steps(findings.attribution.run)}}


def html(findings: Findings, page: PageContext) -> Content:
    """Build a table of every setting, the verification and the environment, one row each."""
    rows = [[text("source"), text(", ".join(page.paths))]]
    run = findings.attribution.run
    settings: JsonObject = {"name": run.name, "created": run.created, "kernel": run.kernel} if run else {}
    if run is not None:
        recorded = json(findings)["run"]
        for group in ("workload", "topology", "strategy"):
            settings |= {f"{group}: {key}": value for key, value in (recorded.get(group) or {}).items()}
        settings["verification"] = _verification_line(run.verification) if run.verification else None
        settings["command"] = shlex.join(run.command)
        settings["devices"] = dict.fromkeys(run.environment.devices)
        settings["driver"] = run.environment.driver
        settings |= {f"version: {key}": value for key, value in run.environment.versions.items()}
        settings |= {f"variable: {key}": value for key, value in run.environment.variables.items()}
    rows += [
        [text(key), text(_format_setting(value))] for key, value in settings.items() if value not in (None, {}, [])
    ]
    return Content(tables=[PageTable(["what", "value"], rows)])


def _format_setting(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(key if item is None else f"{key}={item}" for key, item in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def speed_html(findings: Findings, page: PageContext) -> Content | None:
    """Build the section on speed: rates with their spread, communication, profiler overhead, memory and baselines."""
    run, style = findings.attribution.run, TextStyle(width=10_000, wide_tables=True)
    blocks = communication(findings, style, Listing())
    rates, lines = findings.summary.rates, []
    if run is not None:
        speed = _speed_lines(run, rates, findings.summary.window_iterations)
        lines = [
            *speed,
            *_cp_step_lines(run),
            *_balance_lines(run),
            *_attention_share_lines(findings),
            *_cost_lines(run, rates),
            *_slowed_host_lines(findings),
        ]
    lines += [line for block in blocks for line in block.split("\n")]
    tables = _baseline_tables(findings)
    return Content(lines=lines, tables=tables) if lines or tables else None
