"""A prediction as text: time, uncertainty, breakdown and inputs."""

from __future__ import annotations

import math

from ringprof.common.formatting import percent
from ringprof.dryrun.schedule import CommStart, CommWait
from ringprof.prediction.calibration import Calibration, Value, named_values
from ringprof.prediction.network import Cluster, Links
from ringprof.prediction.predict import PredictionResult, inputs, warnings_of
from ringprof.prediction.whole_steps import StepPrediction
from ringprof.report import palette
from ringprof.report.page import bars
from ringprof.report.page.document import Content, Document, PageSection, PageTable, number, text
from ringprof.report.tables import Column, Table
from ringprof.report.text import LONGEST_SENTENCE, TextStyle, binary_size, clean, duration, rate, strategy_in_title
from ringprof.strategies.catalog import PEERS
from ringprof.workload.devices import peak_of
from ringprof.workload.workload import Workload

PART_LABELS = {
    "kernel": "attention", "memory": "merges, copies", "same_host": "wire in node", "other_host": "wire between",
    "peers": "waiting for peers", "host": "launching",
}  # fmt: skip
_RECURRENCE_LABELS = PART_LABELS | {"kernel": "recurrence", "memory": "other kernels"}
_STEP_LABELS = {
    "attention": "attention, by the simulation below", "layers": "layers outside attention", "optimizer": "optimizer",
    "once": "embeddings, head and loss", "traffic": "exposed parameters and gradients",
}  # fmt: skip
_NOTABLE = 0.02
"""Fraction of the time from which a transfer gets a remark."""


def part_labels(workload: Workload) -> dict[str, str]:
    """Return the label of each part of a breakdown: recurrences have a convolution, and no merges."""
    return _RECURRENCE_LABELS if workload.recurrent else PART_LABELS


def described(workload: Workload) -> str:
    """Describe a workload in a few words."""
    batch = f"batch {workload.batch}, " if workload.batch > 1 else ""
    full = not workload.causal and workload.mask().plain
    attention = "full attention" if full else str(workload.mask())
    mask = workload.mask_in_short() if workload.recurrent else ", ".join([attention, *workload.extras()])
    passes = "forward and backward" if workload.backward else "forward only"
    tokens = f"{workload.seq} token{'s' if workload.seq > 1 else ''}"
    if workload.kv_length is not None:
        tokens = f"{workload.phase} of {tokens} over {workload.kv_length} keys"
    return f"{tokens}, {batch}{workload.heads_in_words()} · {mask} · {workload.dtype} · {passes}"


def cluster_text(cluster: Cluster, device: str) -> str:
    """Describe a cluster in a few words."""
    network = ""
    if cluster.hosts > 1 and cluster.nic_gbit is not None:
        shared = f" for {cluster.gpus_per_nic} GPUs" if cluster.gpus_per_nic > 1 else " per GPU"
        network = f", {cluster.nic_gbit:g} Gbit/s{shared}"
    hosts = f"{cluster.hosts} nodes of {cluster.gpus_per_host}" if cluster.hosts > 1 else "one node"
    return f"{cluster.size} x {clean(device)} ({hosts}{network})"


def prediction_text(prediction: PredictionResult, style: TextStyle) -> str:
    """Return the full text of a prediction, ending with a newline."""
    query, machine = prediction.query, prediction.machine
    low_ns, median_ns, high_ns = prediction.interval_ns
    params = ", ".join(f"{key}={value}" for key, value in prediction.schedule.params.items())
    hops = " · hops by copy engine" if query.hops == "copy" else ""
    peak_place = f", in {clean(prediction.peak_label)}" if prediction.peak_label else ""
    peak = peak_of(machine.device, query.workload.dtype)
    of_peak = f", {percent(prediction.tflops(median_ns) / peak.tflops, 0)} of the device's peak" if peak else ""
    labels = part_labels(query.workload)
    head = [
        f"PREDICTED: {clean(query.strategy)} on {cluster_text(query.cluster, machine.device)}",
        f"{described(query.workload)} · kernel {query.kernel}{hops}",
        *([clean(params)] if params else []),
        "",
        f"time      {duration(median_ns)} per iteration; in four of five cases {duration(low_ns)} to"
        f" {duration(high_ns)}",
        f"rate      {rate(prediction.tflops(median_ns))} per GPU ({rate(prediction.tflops(high_ns))} to"
        f" {rate(prediction.tflops(low_ns))}){of_peak}",
        f"memory    {binary_size(prediction.peak_bytes)} per GPU at most{peak_place}",
        f"exposed   {percent(prediction.exposed_share)} of the time waits for transfers and peers (mean of ranks)",
        f"longest   {', '.join(f'{phase}: {labels[part]}' for phase, part in prediction.bound_by.items())}",
    ]
    tail = [
        *remarks(prediction),
        "how sure, one standard deviation: " + ", ".join(
            f"{name} {percent(math.sqrt(variance))}" for name,
            variance in prediction.variance_by_input.items() if variance > 1e-6
        ),
        "",
        "what it rests on",
        *(_input(name, value) for name, value in inputs(prediction).items()),
    ]  # fmt: skip
    # The slowest rank's time by phase and part.
    spans, present = prediction.breakdown, [part for part in labels if prediction.breakdown.total(part) > 0]
    rows = [[name, *(f"{parts.get(part, 0.0) / 1e6:,.3f}" for part in present)] for name, parts in spans.phases.items()]
    table = Table("slowest rank, ms", [Column(""), *(Column(labels[part]) for part in present)], rows)
    sections = [style.fit("\n".join(head)), table.text(style), style.fit("\n".join(tail))]
    return style.finish("\n\n".join(sections))


def step_text(step: StepPrediction, style: TextStyle) -> str:
    """Return the text of a whole step's prediction, followed by that of one layer's attention."""
    low_ns, median_ns, high_ns = step.interval_ns
    layers = f"{step.layers} layers" if step.layers > 1 else "one layer"
    rows = [[_STEP_LABELS[part], f"{ns / 1e6:,.3f}", percent(ns / median_ns)] for part, ns in step.parts_ns.items()]
    head = (
        f"PREDICTED STEP: {layers} of {clean(step.figures.target)} with {step.parallel.upper()}:"
        f" {duration(median_ns)}; in four of five cases {duration(low_ns)} to {duration(high_ns)}"
    )
    table = Table("", [Column("", left=True), Column("ms"), Column("share")], rows).text(style)
    tokens = " and ".join(f"{count:,}" for count in sorted({timed.tokens for timed in step.figures.steps}))
    note = (
        f"Outside attention: steps of one and two layers with {tokens} tokens, measured on one {step.figures.device}."
        " The memory below is that of one layer's attention: a step holds more."
    )
    attention = prediction_text(step.attention, style)
    return style.finish("\n\n".join([style.fit(head), table, style.fit(note), attention.rstrip("\n")]))


def remarks(prediction: PredictionResult) -> list[str]:
    """Return notes on the prediction: the host as the bound, exposed hops with a remedy, too little memory."""
    spans, lines = prediction.breakdown, []
    time_ns = prediction.median_ns
    if prediction.host_bound:
        lines.append("the host is the bound: it needs longer to launch than the devices to compute")
    if spans.total("other_host") > _NOTABLE * time_ns:
        lines.append(_channels_line(prediction))
    if spans.total("same_host") > _NOTABLE * time_ns and _copy_engines_may_help(prediction):
        lines.append("hops inside a node are exposed: --hops copy keeps NCCL's kernels off the multiprocessors")
    lines += [clean(warning["message"], LONGEST_SENTENCE) for warning in warnings_of(prediction)]
    return [*lines, ""] if lines else []


def _copy_engines_may_help(prediction: PredictionResult) -> bool:
    """Return whether ``--hops copy`` applies to most of what the ranks wait for inside a node."""
    query, machine = prediction.query, prediction.machine
    peer = query.stands_for is not None or query.strategy in PEERS
    if query.hops != "nccl" or peer or query.workload.recurrent or machine.same_host.copy_gb_s is None:
        return False
    waited_ns = {"send_recv": 0.0, "collective": 0.0}
    for program, timeline in zip(prediction.schedule.programs, prediction.timelines, strict=True):
        started = {op.id: op for op in program.ops if isinstance(op, CommStart)}
        for op, (start, end) in zip(program.ops, timeline.ops, strict=True):
            if isinstance(op, CommWait) and query.cluster.hosts_of(started[op.id].members) == 1:
                hop = started[op.id].operation == "send_recv"
                waited_ns["send_recv" if hop else "collective"] += end - start
    return waited_ns["send_recv"] > waited_ns["collective"]


def _channels_line(prediction: PredictionResult) -> str:
    """Return the number of NCCL channels of hops between hosts, and the variable that changes it."""
    cluster, machine = prediction.query.cluster, prediction.machine
    links = Links(machine, cluster)
    inter_node_ops = (
        op for op in prediction.schedule.programs[0].ops
        if isinstance(op, CommStart) and cluster.hosts_of(op.members) > 1
    )  # fmt: skip
    comm_op = next(inter_node_ops, None)
    waiting = percent(prediction.breakdown.total("other_host") / prediction.median_ns)
    waiting_text = f"{waiting} of the time waits for bytes between nodes"
    if comm_op is None or comm_op.operation != "send_recv":
        return waiting_text
    count, gb_s = links.channels_of(comm_op), links.hop_gb_s(comm_op)
    if gb_s >= links.nic_gb_s:
        return f"{waiting_text}: the NIC is the bound, {links.nic_gb_s:.0f} GB/s"
    return (
        f"{waiting_text}: a hop gets {count} of NCCL's channels, {gb_s:.0f} GB/s where the NIC has {links.nic_gb_s:.0f}"
        f" (the rule of {machine.nccl.version}; NCCL_NCHANNELS_PER_NET_PEER={2 * count} doubles them)"
    )


def calibration_text(machine: Calibration, style: TextStyle) -> str:
    """Return a machine's figures with spread and origin, ending with a newline."""
    rates = [
        f"  {kernel.name + ' ' + phase:30}{max(sample.tflops for sample in samples):>12,.4g}  best TFLOP/s of"
        f" {len(samples)} shapes"
        for kernel in machine.kernels
        for phase in ("forward", "backward")
        if (samples := [sample for sample in kernel.samples if sample.phase == phase])
    ]
    failures = [f"  not measured: {clean(line)}" for line in machine.unmeasured]
    values = [_input(name, value) for name, value in named_values(machine)]
    lines = [f"{clean(machine.name)}, {clean(machine.device)}", *rates, *values, *failures]
    return style.finish(style.fit("\n".join(lines)))


def _input(name: str, value: Value) -> str:
    return f"  {name:30}{value.value:,.4g} ±{percent(value.spread)}, {value.origin}: {clean(value.source)}"


# --- a prediction as a page ---

_COLOURS = {
    "kernel": palette.PART_COLOURS["compute"],
    "memory": palette.PART_COLOURS["exposed_memory"],
    "same_host": palette.WIRE,
    "other_host": palette.UNSPLIT,
    "peers": palette.WAIT,
    "host": palette.GREY,
}
"""Colour of each part of `part_labels`."""
_LEAST_VARIANCE = 1e-6
"""Variance below which an input does not count as a source of uncertainty."""


def document(prediction: PredictionResult) -> Document:
    """Return the page of a prediction."""
    query = prediction.query
    low_ns, median_ns, high_ns = prediction.interval_ns
    label = strategy_in_title(query.strategy, prediction.schedule.params)
    answer = (
        f"Predicted: {duration(median_ns)} per iteration ({duration(low_ns)} to {duration(high_ns)} in four of five "
        f"cases), {rate(prediction.tflops(median_ns))} per GPU; {percent(prediction.exposed_share)} of the time waits "
        "for transfers and peers."
    )
    labels = part_labels(query.workload)
    bound = ", ".join(f"{phase}: {labels[part]}" for phase, part in prediction.bound_by.items())
    tiles = [
        (duration(median_ns), "per iteration, predicted"),
        (rate(prediction.tflops(median_ns)), "per GPU"),
        (binary_size(prediction.peak_bytes), "per GPU at most"),
    ]
    input_rows = [
        [text(name), number(value.value), number(value.spread, 3, 0.01), text(value.origin), text(value.source)]
        for name, value in inputs(prediction).items()
    ]
    sections = [
        PageSection("parts", "Where the time goes", "Time of the slowest rank by phase.", _parts(prediction)),
        PageSection(
            "certainty", "How sure it is", "Standard deviation of the predicted time by what is uncertain.",
            _certainty(prediction),
        ),
        PageSection("inputs", "What it rests on", "Figures of the machine file, with spread and origin.",
                    Content(tables=[PageTable(["figure", "value", "spread %", "origin", "source"], input_rows)])),
    ]  # fmt: skip
    lines = [clean(line, LONGEST_SENTENCE) for line in (*remarks(prediction), f"longest part: {bound}") if line]
    subtitle = f"{cluster_text(query.cluster, prediction.machine.device)} · {described(query.workload)}"
    return Document(
        clean(f"Predicted: {label}"), clean(f"{subtitle} · kernel {query.kernel}", LONGEST_SENTENCE), lines, tiles,
        sections, answer,
    )  # fmt: skip


def _parts(prediction: PredictionResult) -> Content:
    """Draw one stacked bar per phase, with a table of the same times."""
    spans, labels = prediction.breakdown, part_labels(prediction.query.workload)
    phases = spans.phases
    stacked = {
        label: (_COLOURS[part], [phase.get(part, 0.0) / 1e6 for phase in phases.values()])
        for part, label in labels.items()
        if spans.total(part) > 0
    }
    rows = [
        [
            text(phase),
            text(labels[part]),
            number(time_ns, scale=1e6),
            number(time_ns / prediction.median_ns, 3, 0.01),
        ]
        for phase, parts in phases.items()
        for part, time_ns in parts.items()
    ]
    table = PageTable(["phase", "part", "ms", "% of the iteration"], rows)
    return Content(charts=[bars.stacked(list(phases), stacked, "ms")], tables=[table], folds_tables=True)


def _certainty(prediction: PredictionResult) -> Content:
    """Draw the interval of the time, and the share of each uncertain input."""
    chart = bars.intervals(["one iteration"], [prediction.interval_ms], "ms")
    sources = {
        name: math.sqrt(value) for name, value in prediction.variance_by_input.items() if value > _LEAST_VARIANCE
    }
    if not sources:
        return Content(charts=[chart])
    values = [100 * spread for spread in sources.values()]
    shares = bars.stacked(list(sources), {"spread": (palette.BLUE, values)}, "% of the time, one standard deviation")
    return Content(charts=[chart, shares])
