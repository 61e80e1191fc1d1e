"""Listings of what ran: kernels, products, communication, layers, parts of a recurrence, and the user's ranges."""

from __future__ import annotations

from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.timeline.recurrence import RecurrencePart
from ringprof.analysis.transfers.hops import total
from ringprof.common.json_object import JsonObject
from ringprof.report.listing import RANK, Field, FieldTable
from ringprof.report.page.document import Content, PageContext
from ringprof.report.tables import Column
from ringprof.report.terms import LABELS
from ringprof.report.text import duration, short_name

# --- kernels ------------------------------------------------------------------------------------------


def _kernel_rows(findings: Findings) -> list[JsonObject]:
    kernels = findings.attribution.kernels
    total_ns = sum(kernel.time_ns for kernel in kernels) or 1
    return [
        {**kernel._asdict(), "short_name": short_name(kernel.name), "share": kernel.time_ns / total_ns,
         "mean_ns": kernel.mean_ns, "hidden": kernel.hidden}
        for kernel in kernels
    ]  # fmt: skip


KERNELS = FieldTable(
    "kernels", _kernel_rows,
    (
        Field("short_name", "", Column("kernel", folds=True), json=""),
        Field("name", "name of the kernel, copy or set", Column("name", "name")),
        Field("kind", "kind of activity", Column("kind", drop=3), shown=LABELS.__getitem__),
        Field("time_ns", "sum of its durations over all ranks", Column("time", "time", on_page="ms"), summed=True),
        Field("share", "share of the sum over all kernels, 0..1", Column("of all", "share", on_page="% of all"),
              json=""),
        Field("calls", "number of calls over all ranks", Column("calls", "rough count"), summed=True),
        Field("mean_ns", "mean duration of a call", Column("mean", "short time", 1, on_page="mean µs"), json=""),
        Field("hidden", "share of its time that other activities hide, 0..1; missing for computation",
              Column("hidden", "rough share", on_page="% hidden"), json="hidden_share"),
        Field("exposed_ns", "time that is not hidden; missing for computation", Column("exposed", "time", 2),
              summed=True),
        Field("worst_rank", "rank that spends most time in it"),
        Field("worst_ns", "time of that rank"),
    ),
    ("short_name", "kind", "time_ns", "share", "calls", "mean_ns", "hidden", "exposed_ns"),
    title="kernels", nothing=lambda _: "kernels: a CPU trace holds no activities of a device",
)  # fmt: skip


def kernels_html(findings: Findings, page: PageContext) -> Content | None:
    """Build a table with one row per name and kind, summed over all ranks; None on CPU."""
    if not findings.attribution.kernels:
        return None
    order = ("name", "kind", "calls", "time_ns", "mean_ns", "share", "hidden", "exposed_ns")
    table = KERNELS.table(findings, order=order, count=1).page("name")
    largest_of_other = [
        f"{short_name(kernel.name)} {duration(kernel.time_ns)}" for kernel in findings.attribution.largest_of_other
    ]
    lines = [f"Largest of {LABELS['other']}: {'; '.join(largest_of_other)}."] if largest_of_other else []
    return Content(tables=[table], lines=lines)


# --- matrix products, communication -------------------------------------------------------------------

GEMMS = FieldTable(
    "gemms",
    lambda findings: [
        {**row.shape._asdict(), **row._asdict(), "mean_ns": row.mean_ns, "peak_share": row.of_peak}
        for row in findings.gemms
    ],
    (
        Field("batch", "products of (m, k) by (k, n) per call; missing, like m, n and k, where no shape is recorded",
              Column("batch", "count", 1)),
        Field("m", "rows of the left factor", Column("m", "count")),
        Field("n", "columns of the right factor", Column("n", "count")),
        Field("k", "columns of the left factor", Column("k", "count")),
        Field("dtype", "data type of the factors; missing where it is not recorded", Column("dtype")),
        Field("calls", "operator calls over all ranks; kernels where no shape is recorded",
              Column("calls", "rough count"), summed=True),
        Field("time_ns", "sum of the durations of their matrix-product kernels over all ranks; on CPU, of the calls",
              Column("time", "time"), summed=True),
        Field("share", "share of the time of all matrix products, 0..1",
              Column("of all", "share", on_page="% of products")),
        Field("mean_ns", "", Column("mean", "short time", 2, on_page="mean µs"), json=""),
        Field("flops", "floating-point operations of all calls"),
        Field("tflops", "TFLOP/s per device while the kernels ran", Column("TFLOP/s", "rate")),
        Field("peak_share", "tflops over the device's peak, 0..1; missing where the peak is not known",
              Column("of peak", "share", on_page="% of peak")),
    ),
    ("m", "n", "k", "batch", "dtype", "calls", "time_ns", "share", "mean_ns", "tflops", "peak_share"),
    title="matrix products",
    nothing=lambda _: "matrix products: no shapes are recorded (torch.profiler's record_shapes=True records them), or "
    "nothing multiplies",
)  # fmt: skip

COLLECTIVES = FieldTable(
    "collectives",
    lambda findings: [
        {**row.key._asdict(), **row._asdict(), "busbw_gbps": row.busbw_gbps, "wire_busbw_gbps": row.wire_busbw_gbps}
        for row in findings.collectives
    ],
    (
        Field("kind", "kind of communication", Column("kind"), shown=LABELS.__getitem__),
        Field("group", "description or name of the process group; empty where it is not recorded", Column("group"),
              shown=lambda group: group or "-"),
        Field("ranks", "number of ranks of the group", Column("ranks", "count")),
        Field("size_bytes", "size of one operation as nccl-tests count it: of an all-gather, the whole output",
              Column("MB", "bytes")),
        Field("link", "slowest link used: same_host, other_host or unknown", Column("link", drop=2)),
        Field("calls", "kernels or copies over all ranks", Column("calls", "rough count"), summed=True),
        Field("time_ns", "sum of their durations over all ranks, waiting included", Column("time", "time"),
              summed=True),
        Field("wait_ns", "part of time_ns until the last rank of each operation had begun; missing where that is not "
              "known", Column("waiting", "time", 1), summed=True),
        Field("busbw_gbps", "bus bandwidth of nccl-tests over time_ns, GB/s; missing where the size is not known",
              Column("with\nwaiting", "rate", 3, on_page="GB/s with waiting")),
        Field("wire_busbw_gbps", "bus bandwidth without waiting, GB/s; missing where waiting is not known",
              Column("busbw\nGB/s", "rate")),
    ),
    ("kind", "group", "ranks", "size_bytes", "link", "calls", "time_ns", "wait_ns", "wire_busbw_gbps", "busbw_gbps"),
    title="communication",
    nothing=lambda findings: "collectives: " + (
        "a CPU trace does not tell when a transfer ran" if findings.attribution.on_cpu else "none in these traces"),
    note="busbw: bus bandwidth as nccl-tests define it, without waiting for peers where that is known",
    bars_by="kind",
)  # fmt: skip


# --- layers of the model ------------------------------------------------------------------------------

OUTSIDE_LAYERS = "outside of all layers"


def _label(layer: str, findings: Findings) -> str:
    """Return a layer's name, in a recorded hybrid model with the layer's operator."""
    run, number = findings.attribution.run, layer.rpartition(".")[2]
    pattern = run.workload.pattern if run and run.workload and run.workload.layer else ()
    if len(set(pattern)) < 2 or not (number.isascii() and number.isdecimal()):
        return layer or OUTSIDE_LAYERS
    return f"{layer} {pattern[int(number[:18]) % len(pattern)]}"


def _layer_rows(findings: Findings) -> list[JsonObject]:
    exposed_ns = sum(row.time.exposed_ns for row in findings.layers)
    return [
        {**row.time._asdict(), **row._asdict(), "layer": row.time.layer or None,
         "label": _label(row.time.layer, findings), "share": row.time.exposed_ns / exposed_ns if exposed_ns else None}
        for row in findings.layers
    ]  # fmt: skip


def _layers_of_ranks(findings: Findings) -> list[JsonObject]:
    """Build one row per rank and layer."""
    known = any(row.wait_ns is not None for row in findings.layers)
    unknown = {} if known else {"wait_ns": None, "wire_ns": None}
    return [
        {"rank": rank.rank, **time._asdict(), "layer": time.layer or None, **unknown}
        for rank in findings.attribution.ranks
        for time in rank.layers
    ]


LAYERS = FieldTable(
    "layers", _layer_rows,
    (
        RANK._replace(json=""),
        Field("layer", "name of the module or range; missing for what no layer launched"),
        Field("label", "", Column("layer", folds=True), json=""),
        Field("attention_ns", "time of attention kernels; the rows of a rank sum to its flash time",
              Column("attention", "time", 2), summed=True),
        Field("communication_ns", "time of communication; of transfers that overlap, the first has the time",
              Column("comm", "time", 1), summed=True),
        Field("exposed_ns", "exposed communication; the rows of a rank sum to its exposed_comm_ns",
              Column("exposed", "time"), summed=True),
        Field("exposed_backward_ns", "part of exposed_ns that the backward pass launched",
              Column("in backward", "time", 4), summed=True),
        Field("wait_ns", "part of exposed_ns spent waiting for a peer; missing where that is not known",
              Column("waiting", "time", 3), summed=True),
        Field("wire_ns", "part of exposed_ns with bytes on the wire; missing where that is not known",
              Column("wire", "time", 3), summed=True),
        Field("compute_ns", "time of all computation, attention included; the rows of a rank sum to its compute_ns",
              Column("compute", "time", 2), summed=True),
        Field("share", "", Column("of all", "share", on_page="% of exposed"), json=""),
        Field("worst_rank", "", Column("worst\nrank", "count", 5)),
        Field("worst_exposed_ns", "", Column("its\nexposed", "time", 5)),
    ),
    ("label", "compute_ns", "attention_ns", "communication_ns", "exposed_ns", "share", "exposed_backward_ns", "wait_ns",
     "wire_ns", "worst_rank", "worst_exposed_ns"),
    title="layers", most_rows=100, rows_of_frame=_layers_of_ranks,
    nothing=lambda _: "layers: these traces name none around their attention; ringprof.capture(model=...), "
    "torch.profiler's with_stack=True, or record_function(f'layers.{i}') in the model does",
)  # fmt: skip


# --- parts of a recurrence ----------------------------------------------------------------------------

_PASSES = {"fwd": "forward ", "bwd": "backward ", "": ""}
_PARTS = {
    "local": "local scan", "state": "states of other ranks", "output": "output", "halo": "convolution halo",
    "heads": "exchange of heads",
}  # fmt: skip
_SUMS = ("compute_ns", "communication_ns", "exposed_ns", "transfers", "sent_bytes", "wait_ns", "wire_ns")


def _recurrence_rows(findings: Findings) -> list[JsonObject]:
    by_part: dict[tuple[str, str], dict[int, RecurrencePart]] = {}
    for rank in findings.attribution.ranks:
        for row in rank.recurrence:
            by_part.setdefault((row.phase, row.part), {})[rank.rank] = row
    rows = []
    for phase, part in [(phase, part) for phase in _PASSES for part in _PARTS if (phase, part) in by_part]:
        of_ranks = by_part[phase, part]
        worst = max(of_ranks, key=lambda rank: of_ranks[rank].exposed_ns)
        exposed_ns = of_ranks[worst].exposed_ns or None
        rows.append({
            "part": _PASSES[phase] + _PARTS[part],
            **{key: total([getattr(row, key) for row in of_ranks.values()]) for key in _SUMS},
            "worst_rank": worst if exposed_ns else None, "worst_exposed_ns": exposed_ns,
        })  # fmt: skip
    return rows


RECURRENCE = FieldTable(
    "recurrence", _recurrence_rows,
    (
        Field("part", "", Column("", on_page="part")),
        Field("compute_ns", "", Column("computing", "time"), summed=True),
        Field("communication_ns", "", Column("communicating", "time"), summed=True),
        Field("exposed_ns", "", Column("exposed", "time"), summed=True),
        Field("transfers", "", Column("transfers", "rough count", 2), summed=True),
        Field("sent_bytes", "", Column("MB", "bytes", 1), summed=True),
        Field("wait_ns", "", Column("wait", "time", 3), summed=True),
        Field("wire_ns", "", Column("wire", "time", 3), summed=True),
        Field("worst_rank", "", Column("worst\nrank", "count", 4)),
        Field("worst_exposed_ns", "", Column("its\nexposed", "time", 4)),
    ),
    title="parts of the recurrence",
)  # fmt: skip


# --- ranges of the user -------------------------------------------------------------------------------

ANNOTATIONS = FieldTable(
    "annotations", lambda findings: [{**row._asdict(), "hidden": row.hidden} for row in findings.annotations],
    (
        Field("name", "name of the ranges", Column("annotation", folds=True)),
        Field("calls", "ranges in which something was launched, over all ranks", Column("calls", "rough count", 2),
              summed=True),
        Field("busy_ns", "time in which anything runs that was launched in them, sum over ranks",
              Column("busy", "time"), summed=True),
        Field("compute_ns", "part of busy_ns in which anything computes", Column("compute", "time", 3), summed=True),
        Field("communication_ns", "part of busy_ns in which any communication runs", Column("comm", "time"),
              summed=True),
        Field("exposed_ns", "part of communication_ns with no computation beside it, from this range or any other",
              Column("exposed", "time"), summed=True),
        Field("hidden", "share of communication_ns that is hidden, 0..1; missing without communication",
              Column("hidden", "rough share"), json="hidden_share"),
    ),
    ("name", "busy_ns", "compute_ns", "communication_ns", "exposed_ns", "hidden", "calls"),
    title="annotations", of_few_ranks=True,
    nothing=lambda findings: "annotations: " + (
        "not on CPU: they are the times of ranges on a device, and a CPU run records none"
        if findings.attribution.on_cpu else "nothing on the device was launched in a range of the user's"),
)  # fmt: skip

LISTINGS = (KERNELS, ANNOTATIONS, LAYERS, GEMMS, COLLECTIVES)
"""Listings in the order of the JSON report."""
