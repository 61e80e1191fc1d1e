"""The report for people: most important first, every figure with its unit, parts that sum.

`render` returns text. It decides how things are written, never what they come to.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ringprof.analysis.attribution import Attribution
from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.summary import Communication, KindRow, Rates, Summary
from ringprof.analysis.kinds.kinds import in_a_sentence
from ringprof.analysis.transfers.hops import EMULATED, OTHER_HOST, SAME_HOST
from ringprof.report import sections as further
from ringprof.report.controls import controls_section
from ringprof.report.terms import LABELS
from ringprof.report.text import (
    ascii_bar,
    bar,
    binary_size,
    clean,
    duration,
    in_ascii,
    in_unit,
    percent,
    rate,
    rounded_to_sum,
    slower_or_faster,
    unit_for,
)
from ringprof.run import Run, Verification

LONGEST_BAR = 20
_LINKS = {SAME_HOST: "within a host", OTHER_HOST: "between hosts"}


@dataclass(frozen=True)
class Look:
    """How the text is to be written."""

    width: int = 80
    color: bool = False
    ascii_only: bool = False

    def bar(self, share: float, width: int) -> str:
        return ascii_bar(share, width) if self.ascii_only else bar(share, width)


def render(found: Findings, look: Look | None = None, sections: Sequence[str] = ()) -> str:
    """The whole report as text that ends with a newline; ``sections``: what to add, of `sections.SECTIONS`."""
    look = look or Look()
    attribution, summary = found.attribution, found.summary
    blocks: list[RenderableType] = [Text(header_of(attribution, summary), style="bold")]
    blocks.append(Text("\n".join(clean(line) for line in found.verdict)))
    if not attribution.on_cpu and summary.communication:
        blocks.append(Text("\n".join(_split_line(row) for row in summary.communication)))
    if attribution.run:
        blocks.append(Text("\n".join(_run_lines(attribution.run, summary.rates, attribution.partial_window))))
    if summary.rates.controls:
        blocks.append(controls_section(summary.rates.controls))
    blocks.append(_where_time_went(summary, look))
    blocks.append(_by_kind(summary, attribution.on_cpu))
    if len(attribution.ranks) > 1:
        blocks.append(_by_rank(summary))
    blocks.extend(_section(name, found, look) for name in further.SECTIONS if name in sections)
    blocks.extend(_warning_block(attribution))
    untold = ("steps", "hops") if attribution.on_cpu else ()
    left = ["--html report.html", *(f"--{name}" for name in further.SECTIONS if name not in (*sections, *untold))]
    blocks.append(Text("next: ringprof report PATH " + " · ".join([*left, "--format json"]), style="dim"))
    return _written(blocks, look)


def _written(blocks: Sequence[RenderableType], look: Look) -> str:
    file = io.StringIO()
    console = Console(
        file=file,
        width=look.width,
        force_terminal=look.color,
        no_color=not look.color,
        color_system="standard" if look.color else None,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    for number, block in enumerate(blocks):
        if number:
            console.print()
        _print_whole(console, block)
    text = "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"
    return in_ascii(text) if look.ascii_only else text


def _print_whole(console: Console, block: RenderableType) -> None:
    """Print; a table that does not fit runs over the edge rather than lose digits."""
    if isinstance(block, Group):
        for part in block.renderables:
            _print_whole(console, part)
        return
    needed = Measurement.get(console, console.options.update(max_width=10_000), block).maximum
    console.print(block, width=max(console.width, needed) if isinstance(block, Table) else None, crop=False)


# --- what was run, and what stands out --------------------------------------------------------------


def header_of(attribution: Attribution, summary: Summary) -> str:
    """Ranks, hosts, devices and the slowest rank's wall in a line."""
    ranks = attribution.ranks
    of = max(attribution.world_size, len(ranks))
    count = f"{len(ranks)} of {of} ranks" if len(ranks) < of else f"{of} rank{'s' if of > 1 else ''}"
    parts = [f"{count}, {_hosts(summary)}"]
    parts.extend(clean(device) for device in summary.devices)
    if attribution.on_cpu:
        parts.append("CPU")
    if summary.attention:
        parts.append(" and ".join(summary.attention) + " attention")
    wall = duration(summary.slowest_wall_ns)
    if len(ranks) > 1:
        excess = percent(summary.slowest_excess)
        parts.append(f"{wall} on the slowest rank (rank {summary.slowest_rank}, {excess} over the mean)")
    else:
        parts.append(f"{wall} on rank {ranks[0].rank}")
    if summary.iterations > 1:
        parts.append(f"{summary.iterations} iterations")
    return " · ".join(parts)


def _hosts(summary: Summary) -> str:
    if not summary.hosts:
        return "hosts unknown"
    if len(summary.hosts) == 1:
        return clean(f"host {summary.hosts[0]}")
    emulated = "emulated " if all(EMULATED in host for host in summary.hosts) else ""
    return f"{len(summary.hosts)} {emulated}hosts"


def _verified(verification: Verification) -> str:
    """At which lengths the result was compared, how, and how close it came to its bound."""
    outcome, timed = "result verified" if verification.passed else "RESULT WRONG", verification.timed
    errors = [*verification.errors.items(), *(timed.errors.items() if timed else ())]
    name, worst = max(errors, key=lambda item: item[1].rms / (item[1].allowed_rms or 1.0))
    places = f", and at {timed.places} places a rank of the timed {timed.seq}" if timed else ""
    return (
        f"{outcome} against float64 at {verification.seq} tokens{places}; nearest its bound: relative error of {name} "
        f"{worst.rms:.1e} (allowed {worst.allowed_rms:.1e}; the kernel alone {worst.kernel_rms:.1e})"
    )


def _run_lines(run: Run, rates: Rates, partial: bool) -> list[str]:
    lines = [_what_ran(run)]
    if run.verification:
        lines.append(_verified(run.verification))
    speed = []
    if rates.tflops is not None and rates.tflops_quantiles:
        low, high = rates.tflops_quantiles["p10"], rates.tflops_quantiles["p90"]
        several = f"median of {rates.iterations_timed}, p10 to p90: {rate(low)} to {rate(high)}"
        spread = several if rates.iterations_timed > 1 else "one iteration"
        spread += "" if run.timings else ", under the profiler"
        speed.append(f"{rate(rates.tflops)} per device achieved ({spread})")
    if rates.block_tflops is not None:
        speed.append(f"its attention kernels run at {rate(rates.block_tflops)}")
    if speed:
        lines.append("; ".join(speed))
    if partial:
        lines.append("a part of the run was chosen: rates, controls and memory of whole iterations are left out")
    lines.extend(_cost_line(rates))
    return lines


def _cost_line(rates: Rates) -> list[str]:
    parts = []
    if rates.profiler_overhead is not None and rates.slowest_median_ns is not None:
        compared = slower_or_faster(rates.profiler_overhead)
        parts.append(f"{duration(rates.slowest_median_ns)} an iteration without the profiler, {compared} with it")
    if rates.peak_memory_bytes:
        parts.append(f"peak memory {binary_size(rates.peak_memory_bytes)} a device")
    return ["; ".join(parts)] if parts else []


def _what_ran(run: Run) -> str:
    parts = []
    if run.strategy:
        given = ", ".join(f"{key}={value}" for key, value in run.strategy.params.items())
        parts.append(run.strategy.name + (f" ({given})" if given else ""))
    if run.workload:
        w = run.workload
        heads = f"{w.heads} heads" + (f" ({w.kv_heads} kv)" if w.kv_heads != w.heads else "")
        parts.append(f"{w.seq} tokens, {heads} of {w.head_dim}" + (f", batch {w.batch}" if w.batch > 1 else ""))
        parts.append("causal" if w.causal else "full")
        parts.append(w.dtype + ("" if w.backward else ", forward only"))
    if run.kernel:
        parts.append(f"kernel {run.kernel}")
    if run.strategy and run.strategy.hops == "copy":
        parts.append("hops by copy engine")
    return " · ".join(clean(part) for part in parts) or clean(run.name)


def _split_line(row: Communication) -> str:
    name = in_a_sentence(row.kind)
    link = f" {_LINKS[row.link]}" if row.link in _LINKS else ""
    rates = []
    if row.wire_gbps is not None:
        rates.append(f"{row.wire_gbps:.3g} GB/s")
    if row.best_gbps is not None:
        rates.append(f"{row.best_gbps:.3g} best seen on this link")
    shown = f" ({'; '.join(rates)})" if rates else ""
    waited = f"{percent(row.wait_share, 0)} of {name} time{link} was waiting for a peer"
    return f"{waited}, {percent(row.wire_share, 0)} on the wire{shown}."


# --- tables -------------------------------------------------------------------------------------------


def _section(name: str, found: Findings, look: Look) -> RenderableType:
    if name == "steps":
        return further.steps_section(found.steps, found.attribution.on_cpu)
    if name == "hops":
        return further.hops_section(found.attribution)
    return further.waterfall_section(found.waterfall, look.bar, look.width)


def _where_time_went(summary: Summary, look: Look) -> Table:
    unit_ns, unit = unit_for(summary.parts[-1].mean_ns)
    several = summary.parts[-1].min_ns != summary.parts[-1].max_ns
    columns = ["mean", "min", "max", ""] if several else ["time", ""]
    table = further.table("where the time went", columns)
    table.add_column("", no_wrap=True, style="cyan")
    *parts, wall = summary.parts
    means = [*rounded_to_sum([part.mean_ns / unit_ns for part in parts], wall.mean_ns / unit_ns, 3), None]
    shares = [*rounded_to_sum([part.share * 100 for part in parts], 100 * wall.share, 1), None]
    rows = []
    for part, mean, share in zip(summary.parts, means, shares, strict=True):
        row = [LABELS[part.name], f"{in_unit(wall.mean_ns, unit_ns) if mean is None else f'{mean:,.3f}'} {unit}"]
        if several:
            row += [in_unit(part.min_ns, unit_ns), in_unit(part.max_ns, unit_ns)]
        rows.append([*row, percent(part.share) if share is None else f"{share:.1f} %"])
    taken = sum(max(map(len, column)) + 2 for column in zip(*rows, strict=True))
    width = max(0, min(LONGEST_BAR, look.width - taken))
    for row, part in zip(rows, summary.parts, strict=True):
        is_wall = part is wall
        table.add_row(*row, "" if is_wall else look.bar(part.share, width), style="bold" if is_wall else None)
    return table


def _by_kind(summary: Summary, on_cpu: bool) -> Table:
    unit_ns, unit = unit_for(max(row.time_ns for row in summary.kinds))
    table = further.table("by kind", ["time", "of wall", "calls", "average"])
    table.add_column("", no_wrap=True)
    for row in summary.kinds:
        table.add_row(
            LABELS[row.kind],
            f"{in_unit(row.time_ns, unit_ns)} {unit}",
            percent(row.share),
            f"{row.calls:,.0f}" if row.calls == int(row.calls) else f"{row.calls:,.1f}",
            duration(row.average_ns, 1),
            _kind_note(row, on_cpu),
        )
    return table


def _kind_note(row: KindRow, on_cpu: bool) -> str:
    if row.hidden is not None:
        return f"{percent(row.hidden, 0)} hidden"
    if row.kind == "send_recv" and on_cpu:
        return "blocked in wait"
    return ""


def _by_rank(summary: Summary) -> Table:
    unit_ns, unit = unit_for(summary.parts[-1].mean_ns)
    columns = ["wall", "compute", "exposed\ncomm", "exposed\nmemory", "idle", "overlap"]
    timed = any(row.wait_share is not None for row in summary.ranks)
    table = further.table(f"by rank\nin {unit}", [*columns, "waiting", "wire\nGB/s"] if timed else columns)
    for row in summary.ranks:
        times = (row.wall_ns, row.compute_ns, row.exposed_comm_ns, row.exposed_memory_ns, row.idle_ns)
        cells = [row.label, *(in_unit(time, unit_ns) for time in times)]
        cells.append("-" if row.overlap_ratio is None else percent(row.overlap_ratio))
        if timed:
            cells.append("-" if row.wait_share is None else percent(row.wait_share, 0))
            cells.append("-" if row.wire_gbps is None else f"{row.wire_gbps:.3g}")
        table.add_row(*cells)
    return table


def _warning_block(attribution: Attribution) -> list[RenderableType]:
    lines = []
    for warning in attribution.warnings:
        times = f" ({warning.count} times)" if warning.count > 1 else ""
        where = f"rank {warning.rank}: " if warning.rank is not None else ""
        lines.append(f"{where}{clean(warning.message)}{times} [{clean(warning.code)}]")
    if not lines:
        return []
    text = Text("\n").join(Text(line, style="yellow") for line in lines)
    return [Group(Text("warnings", style="bold yellow"), Padding(text, (0, 0, 0, 2)))]
