"""What was run, checked and measured, by controls too: in words, as data, and as the page's settings."""

from __future__ import annotations

import shlex
from typing import Any

import msgspec

from ringprof.analysis.findings.baselines import BaselineMetrics
from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.summary import Communication, Rates
from ringprof.analysis.kinds.kinds import ATTENTION, COMPUTE, KIND, in_a_sentence
from ringprof.analysis.transfers.hops import OTHER_HOST, SAME_HOST
from ringprof.formatting import percent, three_digits
from ringprof.json_object import JsonObject
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
    unit_for,
)
from ringprof.run import Run, Verification, Workload

_PARTIAL = "a part of the run was chosen: rates, controls and memory of whole iterations are left out"
_NAMED = 0.01
"""The least share of the computing whose kind is named."""
_KEPT = ("name", "created", "workload", "workload_ranks", "topology", "strategy", "kernel", "verification",
         "peak_memory_bytes", "device_states", "device_links")  # fmt: skip

_LINKS = {SAME_HOST: "within a host", OTHER_HOST: "between hosts"}


def terminal(found: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """None for traces that nothing else is known of."""
    run, rates = found.attribution.run, found.summary.rates
    if run is None:
        return []
    check = [_check(run.verification)] if run.verification else []
    partial = [_PARTIAL] if found.attribution.partial_window else []
    speed = [*_speed(run, rates, found.summary.window_iterations), *_balance(run)]
    return [
        style.wrap(
            "\n".join([what_ran(run), *check, *speed, *_sizes(run), *_around(found), *partial, *_cost(run, rates)])
        )
    ]


def what_ran(run: Run) -> str:
    """Strategy, workload and kernel in a line."""
    parts = []
    if run.strategy:
        given = ", ".join(f"{key}={value}" for key, value in run.strategy.params.items())
        parts.append(run.strategy.name + (f" ({given})" if given else ""))
    if run.workload:
        parts += _workload(run, run.workload)
    if run.kernel:
        parts.append(f"kernel {run.kernel}")
    if run.strategy and run.strategy.hops == "copy":
        parts.append("hops by copy engine")
    return " · ".join(clean(part) for part in parts) or clean(run.name)


def _workload(run: Run, work: Workload) -> list[str]:
    tokens = f"{work.seq} tokens"
    if work.kv_length is not None:
        tokens = f"{work.phase}: {work.seq} new of {work.kv_length} tokens"
    if run.sharing_ranks != run.topology.world_size:
        tokens += f" per group of {run.sharing_ranks} rank{'s' if run.sharing_ranks > 1 else ''}"
    return [
        f"{tokens}, {work.heads_in_words()}" + (f", batch {work.batch}" if work.batch > 1 else ""),
        ", ".join([str(work.mask()), *work.extras()]),
        work.dtype + ("" if work.backward else ", forward only"),
        *([] if work.layer is None else [f"{work.layers} x {work.layer}"]),
    ]


def _around(found: Findings) -> list[str]:
    """Of whole layers, what attention is of the computing, and what the rest is."""
    run = found.attribution.run
    if run is None or run.workload is None or run.workload.layer is None:
        return []
    rows = {row.kind: row.time_ns for row in found.summary.kinds if row.kind in COMPUTE}
    whole = sum(rows.values())
    if not whole:
        return []
    attention = sum(time for kind, time in rows.items() if kind in ATTENTION)
    rest = [
        f"{KIND[kind].label} {percent(time / whole)}"
        for kind, time in rows.items() if kind not in ATTENTION and time >= _NAMED * whole
    ]  # fmt: skip
    return [f"attention's kernels are {percent(attention / whole)} of the computing; of the rest: {', '.join(rest)}"]


def _check(check: Verification) -> str:
    """At which lengths the result was compared, how, and how close it came to its bound."""
    outcome = "result verified" if check.passed else "RESULT WRONG"
    timed = check.timed
    errors = [*check.errors.items(), *(timed.errors.items() if timed else ())]
    name, worst = max(errors, key=lambda item: item[1].rms / (item[1].allowed_rms or 1.0))
    places = f", and at {timed.places} places a rank of the timed {timed.seq}" if timed else ""
    return (
        f"{outcome} against float64 at {check.seq} tokens{places}; nearest its bound: relative error of {name} "
        f"{worst.rms:.1e} (allowed {worst.allowed_rms:.1e}; the kernel alone {worst.kernel_rms:.1e})"
    )


def _speed(run: Run, rates: Rates, iterations: int | None) -> list[str]:
    parts = []
    if rates.tflops is not None and rates.tflops_quantiles:
        low, high = rates.tflops_quantiles["p10"], rates.tflops_quantiles["p90"]
        several = f"median of {rates.iterations_timed}, p10 to p90: {rate(low)} to {rate(high)}"
        single = captured_in_words(iterations) if run.captured else "one iteration"
        spread = several if rates.iterations_timed > 1 else single
        spread += "" if run.timings else ", under the profiler"
        if run.predicted:
            spread = f"80 % within {rate(low)} to {rate(high)}"
        parts.append(f"{rate(rates.tflops)} per device {'predicted' if run.predicted else 'achieved'} ({spread})")
    if rates.block_tflops is not None:
        parts.append(f"its attention kernels run at {rate(rates.block_tflops)}")
    return ["; ".join(parts)] if parts else []


def _balance(run: Run) -> list[str]:
    """How even the work of a mask is over the ranks, where that is neither causal nor full."""
    flops = run.block_flops()
    if not flops or run.workload is None or run.workload.mask().plain:
        return []
    mean = sum(flops.values()) / len(flops)
    busiest = max(flops, key=lambda rank: flops[rank])
    least = min(flops, key=lambda rank: flops[rank])
    return [
        f"attention work over the ranks: {flops[busiest] / mean:.3f} of the mean on rank {busiest}, "
        f"{flops[least] / mean:.3f} on rank {least}"
    ]


def _sizes(run: Run) -> list[str]:
    lines = []
    for number, step in enumerate(_cp_steps(run) or (), 1):
        size = step["ranks"]
        line = f"step {number}: {size} rank{'s' * (size > 1)} a sequence, {step['sequences']} of {step['seq']} tokens"
        if step["slowest_ns"] is not None:
            line += f", {duration(step['slowest_ns'])}, {rate(step['tflops'])} per device"
        lines.append(line)
    return lines


def _cp_steps(run: Run) -> list[JsonObject] | None:
    """The steps of dynamic context parallelism, each with its slowest rank's median; None where there are none."""
    work = run.workload
    if work is None or work.sequences is None:
        return None
    found: list[JsonObject] = []
    for number, count in enumerate(work.sequences):
        slowest = max((rank[number] for rank in (run.timings and run.timings.steps_ns) or []), default=None)
        flops = count * work.step(count).model_flops() / run.topology.world_size
        found.append({
            "ranks": run.topology.world_size // count, "sequences": count, "seq": work.seq // count,
            "slowest_ns": slowest, "tflops": flops / slowest / 1e3 if slowest else None,
        })  # fmt: skip
    return found


def _cost(run: Run, rates: Rates) -> list[str]:
    parts = []
    if rates.profiler_overhead is not None and rates.slowest_median_ns is not None:
        how = f"without the profiler, {slower_or_faster(rates.profiler_overhead)} with it"
        how = f"predicted by machine {clean(run.predicted.machine)}" if run.predicted else how
        parts.append(f"{duration(rates.slowest_median_ns)} an iteration {how}")
    if rates.peak_memory_bytes:
        parts.append(f"peak memory {binary_size(rates.peak_memory_bytes)} a device")
    return ["; ".join(parts)] if parts else []


def communication(found: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """None on CPU, where no transfer's own time is known."""
    rows = found.summary.communication
    return [style.wrap("\n".join(map(_communication_line, rows)))] if rows and not found.attribution.on_cpu else []


def _communication_line(row: Communication) -> str:
    name = in_a_sentence(row.kind)
    link = f" {_LINKS[row.link]}" if row.link in _LINKS else ""
    rates = []
    if row.wire_gbps is not None:
        rates.append(f"{three_digits(row.wire_gbps)} GB/s")
    if row.best_gbps is not None:
        rates.append(f"{three_digits(row.best_gbps)} best seen on this link")
    shown = f" ({'; '.join(rates)})" if rates else ""
    waited = f"{percent(row.wait_share, 0)} of {name} time{link} was waiting for a peer"
    return f"{waited}, {percent(row.wire_share, 0)} on the wire{shown}."


def controls(found: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """A row a control, each with its share of an ordinary iteration, and what follows from them."""
    c = found.summary.rates.controls
    if c is None:
        return []
    unit_ns, unit = unit_for(c.iteration_ns)
    rows = _control_rows(c)
    cells = [
        [name, f"{in_unit(time, unit_ns)} {unit}", percent(time / c.iteration_ns), note] for name, time, note in rows
    ]
    columns = [Column("controls"), Column("time"), Column("of an\niteration"), Column("", left=True)]
    times = f"{c.iterations} of each in {c.rounds} round{'s' if c.rounds > 1 else ''}"
    ideal = f"{percent(c.ideal_efficiency)} of its ideal and " if c.ideal_efficiency is not None else ""
    lines = [f"The run reaches {ideal}{percent(c.of_solo)} of the solo rate"]
    if c.flash_slowdown is not None:
        lines.append(f"its attention kernels are {slower_or_faster(c.flash_slowdown)} beside communication than alone")
    return [text_table(columns, cells, style), style.wrap("; ".join(lines) + f" ({times}).")]


def _control_rows(c: BaselineMetrics) -> list[tuple[str, float, str]]:
    on = "compute only" if c.ideal_ns == c.compute_only_ns else "communication only"
    rows = (
        ("an iteration, in turns with these", c.iteration_ns, ""),
        ("compute only: nothing sent", c.compute_only_ns, ""),
        ("communication only: nothing computed", c.communication_only_ns, ""),
        ("ideal: the larger of the two", c.ideal_ns, on),
        ("the same blocks alone", c.solo_ns, rate(c.solo_tflops)),
    )
    return [(name, time, note) for name, time, note in rows if time is not None]


def _control_tables(found: Findings) -> list[PageTable]:
    """For the page: none where nothing was controlled."""
    c = found.summary.rates.controls
    if c is None:
        return []
    columns = (Column("controls"), Column("", "time", on_page="ms"), Column("of an iteration", "share"), Column("note"))
    rows = [[name, time, time / c.iteration_ns, note] for name, time, note in _control_rows(c)]
    return [Table("", columns, rows).page()]


def json(found: Findings) -> ReportParts:
    """What was run and measured, without the times of every iteration: those are in the ``run.json``."""
    if found.attribution.run is None:
        return {"run": None}
    plain: JsonObject = msgspec.to_builtins(found.attribution.run)
    return {"run": {**{key: plain[key] for key in _KEPT}, "cp_steps": _cp_steps(found.attribution.run)}}


def html(found: Findings, page: PageContext) -> Content:
    """Every setting, how it was checked, and where: a row each."""
    rows = [[text("source"), text(", ".join(page.paths))]]
    run = found.attribution.run
    named: JsonObject = {"name": run.name, "created": run.created, "kernel": run.kernel} if run else {}
    if run is not None:
        recorded = json(found)["run"]
        for group in ("workload", "topology", "strategy"):
            named |= {f"{group}: {key}": value for key, value in (recorded.get(group) or {}).items()}
        named["verification"] = _check(run.verification) if run.verification else None
        named["command"] = shlex.join(run.command)
        named["devices"] = dict.fromkeys(run.environment.devices)
        named["driver"] = run.environment.driver
        named |= {f"version: {key}": value for key, value in run.environment.versions.items()}
        named |= {f"variable: {key}": value for key, value in run.environment.variables.items()}
    rows += [[text(key), text(_plainly(value))] for key, value in named.items() if value not in (None, {}, [])]
    return Content(tables=[PageTable(["what", "value"], rows)])


def _plainly(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(key if item is None else f"{key}={item}" for key, item in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def speed_html(found: Findings, page: PageContext) -> Content | None:
    """Speed with its spread, the profiler's overhead and memory, in words; the split of communication; controls."""
    run, style = found.attribution.run, TextStyle(width=10_000, wide_tables=True)
    blocks = communication(found, style, Listing())
    rates, lines = found.summary.rates, []
    if run is not None:
        speed = _speed(run, rates, found.summary.window_iterations)
        lines = [*speed, *_sizes(run), *_balance(run), *_around(found), *_cost(run, rates)]
    lines += [line for block in blocks for line in block.split("\n")]
    tables = _control_tables(found)
    return Content(lines=lines, tables=tables) if lines or tables else None
