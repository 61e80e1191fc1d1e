"""Write the calibrations that come with the package, ringprof/prediction/machines/*.json.

h200 is measured: from the committed runs, from dev/benchmarks/data/h200_links.csv and from `ringprof calibrate`.
dev/benchmarks/data/h200_kernels.csv has the kernels of the latter, h200_heads.csv those of other head sizes, and
h200_newer_kernels.csv flash-attn 3 and 4. h100_kernels.csv has cuDNN and flash-attn 3 of h100. h100_recurrences.csv and
h200_recurrences.csv have linear recurrences. What one of the two lacks of flash-attn 3 and 4 is taken from the other.
The rest of h100, b200 and a800 are assembled from published figures by the rules below; docs/prediction-accuracy.md
says which. No data enters that this page scores a prediction against, except the rows that it names.
Sources in the machine files say benchmarks/ for what is in dev/benchmarks/ now.

    python -m scripts.build_machines [NAME...]
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ringprof.prediction.calibration import (
    PERSISTENT_KERNELS,
    Calibration,
    Host,
    HostPass,
    KernelFigures,
    KernelSample,
    Link,
    Nccl,
    RecurrenceCurve,
    RecurrencePoint,
    Value,
    assumed_calibration,
    calibration_json,
)
from ringprof.prediction.fit import calibrate_from, observed_run
from ringprof.prediction.host_model import fit_host_times
from ringprof.prediction.machine import with_rates
from ringprof.prediction.measure_recurrences import curves_from, measured_curve, recurrence_case
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import predict
from ringprof.prediction.query import Query
from ringprof.prediction.schedules import schedule_of
from ringprof.workload.workload import Workload

ROOT = Path(__file__).parents[1]
DATA = ROOT / "dev" / "benchmarks" / "data"
MACHINES = ROOT / "ringprof" / "prediction" / "machines"
PUBLISHED_UTILISATION = 1.0
"""Utilisation assumed for published kernel benchmarks, which pause between shapes and flush caches."""
AS_MEASURED = "as measured on H200"
NIC_SOURCE = "8 x 400 Gbit/s, B200: Together AI, NCCL SendRecv P2P Scaling Report, 2026-04-10"
NIC = Link(
    channel_gb_s=Value(14.5, 0.1, "published", NIC_SOURCE), hop_gb_s=Value(44.0, 0.1, "published", NIC_SOURCE),
    total_gb_s=Value(43.0, 0.2, "published", NIC_SOURCE), latency_us=Value(50.0, 0.5, "assumed", "of the usual order"),
    line_gbit=400.0,
)  # fmt: skip


CALIBRATED = "ringprof calibrate, 2 H200, 2026-11-22"
OTHER_HEADS = "ringprof calibrate, 2 H200, 2026-11-22, torch 2.11 (benchmarks/data/h200_heads.csv)"
RECURRENCES = "ringprof calibrate, one {}, 2026-11-26, Triton 3.7.1, fla 0.6"
THROTTLING_SOURCE = (
    "ringprof calibrate, 2 H200: 89 shapes of cuDNN, 61 of flash-attn, by how long the device had computed before"
)
SHORT = 8192
"""Tokens below which committed runs have no blocks."""
HOST_SOURCE = "ringprof calibrate, 2 H200, in two processes: 112 passes of strategies (benchmarks/data/h200_host.csv)"
PRIOR_US = {
    "call_us": 3.13, "launch_us": 22.11, "forward_us": 120.6, "backward_us": 139.92, "post_us": 165.96,
    "wait_us": 17.43, "collective_us": 92.65, "copy_us": 133.58, "autograd_us": 467.24,
}  # fmt: skip
PRIOR_KERNEL_US = {"cudnn": (120.6, 139.92), "flash-attn": (77.13, 64.53)}
"""Times from 116 passes of older code on 2 and 4 H200, whose proportions hold today's passes."""
HOST_VARIATION = Value(
    0.095, 0.3, "measured", "both ranks' medians in the runs of h200_shapes_2.csv that the host decides"
)
HOST_SPREAD = 0.15
"""Relative difference between hosts of this kind, and of one host at two times."""


HELD_OUT = "runs of other machines, processes and days (benchmarks/prediction.py held_out), split conformal"
TRANSFER_MARGIN = {
    "device": Value(0.95, 0.1, "measured", f"181 {HELD_OUT}"), "host": Value(0.75, 0.2, "measured", f"89 {HELD_OUT}")
}  # fmt: skip
NOISE_SOURCE = "the same runs: with so much those of 2 to 8 ms lie within as often as longer ones"


PUBLISHED_MARGIN = {
    "device": Value(0.3, 0.3, "measured", "with the spread of the family, four of five published rows of h100 and b200")
}
"""Factor on the spread of kernels and links far from all samples, which was three times what rows are off."""
_ON_H100 = {
    "other": 0.026, "allgather": 0.024, "burst": 0.031, "double-ring": 0.0, "megatron": 0.056, "ulysses": 0.0,
    "usp": 0.015,
}  # fmt: skip
FAMILY_SPREAD = {
    "h100": _ON_H100,
    "h200": _ON_H100,
    "b200": {
        "other": 0.025, "allgather": 0.0, "burst": 0.031, "double-ring": 0.027, "megatron": 0.026, "ulysses": 0.057,
        "usp": 0.016,
    },
    "a800": {
        "other": 0.052, "allgather": 0.024, "burst": 0.031, "double-ring": 0.037, "megatron": 0.051, "ulysses": 0.015,
        "usp": 0.164,
    },
}  # fmt: skip
"""Relative spread by machine and family; ``dev/benchmarks/prediction.py`` computes them (`family_spreads`)."""
SOURCE_OVERHEAD = Value(
    10_000.0, 0.5, "published", "rows of 131072 tokens take 10 to 20 ms longer than their blocks and hops: not modelled"
)  # fmt: skip


MATMUL = Value(
    790.0, 0.02, "measured", "a bfloat16 matrix product in a loop on an H200 at its power limit, 2026-11-23"
)  # fmt: skip


ON_H100 = "ringprof calibrate, 2 H100 of 700 W, 2026-11-25, torch 2.11 (benchmarks/data/h100_kernels.csv)"
ON_H200 = "ringprof calibrate, one H200, 2026-11-26, torch 2.11 (benchmarks/data/h200_newer_kernels.csv)"
H200_AS_H100 = 0.03
"""Relative difference of a kernel between an H200 and an H100: both have the same chip and power limit.

cuDNN's curves of the two differ by 3.7 % in the mean from 4096 tokens on, 17 blocks of flash-attn 3 by 2.5 %.
"""
FLASH_ATTN_3_ON_H200 = (
    ("forward", 32768, 40, 40, 658.0), ("backward", 32768, 40, 40, 597.0), ("forward", 65536, 24, 4, 653.0),
    ("backward", 65536, 24, 4, 601.0),
)  # fmt: skip
"""Phase, tokens, heads, kv heads and TFLOP/s of one causal call."""


def h200() -> Calibration:
    """Return the H200 fitted to runs, with kernels and better isolated figures from ``calibrate``.

    The links of ``calibrate`` are not used: hops one after another hide most of a hop's latency.
    """
    machine = fit_h200()
    kernels = [
        msgspec.structs.replace(
            kernel,
            samples=[*kernel.samples, *_calibrated_samples(kernel), *_other_head_samples(kernel.name)],
            throttling=None if kernel.fills_device else Value(0.04, 0.5, "measured", THROTTLING_SOURCE),
        )
        for kernel in machine.kernels
    ]
    kernels = [_flash_attn_3_on_h200() if kernel.name == "flash-attn-3" else kernel for kernel in kernels]
    kernels.append(_newer_flash_attn("flash-attn-4", _hot_samples("flash-attn-4", "h200_newer_kernels.csv", ON_H200)))
    machine = _with_host(msgspec.structs.replace(machine, kernels=kernels))
    return msgspec.structs.replace(
        machine, created="2026-11-22", transfer_margin=TRANSFER_MARGIN, family_spread=family_spread("h200"),
        memory_gb_s=Value(4176.0, 0.02, "measured", CALIBRATED),
        reorder_gb_s=Value(1002.0, 0.1, "measured", CALIBRATED),
        run_to_run_noise_us=Value(200.0, 0.3, "measured", NOISE_SOURCE), matmul_tflops=MATMUL,
        recurrences=_recurrences("h200"),
    )  # fmt: skip


def _recurrences(device: str) -> list[RecurrenceCurve]:
    samples = [
        measured_curve(
            "fla",
            recurrence_case(
                row["operator"], int(row["tokens"]), int(row["heads"]), row["receives"] == "1", row["sends"] == "1",
                row["phase"], row["part"],
            ),
            RecurrencePoint(
                int(row["tokens"]), round(float(row["us"]) * 1e3), float(row["spread"]), float(row["host_us"])
            ),
            RECURRENCES.format(device.upper()),
        )
        for row in _rows(f"{device}_recurrences.csv")
    ]  # fmt: skip
    return curves_from(samples)


def _on_other_hopper(samples: list[KernelSample], device: str) -> list[KernelSample]:
    """Return samples of the other of H100 and H200, which have the same chip, as assumed ones of this device."""
    return [
        msgspec.structs.replace(
            sample, spread=math.hypot(sample.spread, H200_AS_H100), origin="assumed",
            source=f"as on {device}: {sample.source}",
        )
        for sample in samples
    ]  # fmt: skip


def _flash_attn_3_on_h200() -> KernelFigures:
    """Return flash-attn 3 on H200: its own samples, and those of an H100 for shapes that they lack."""
    measured = [
        KernelSample(
            phase=phase, q=tokens, kv=tokens, heads=heads, kv_heads=kv_heads, head_dim=128, causal=True, spread=0.01,
            ns=(4 if phase == "forward" else 10) * tokens**2 / 2 * heads * 128 / tflops / 1e3, origin="measured",
            source="one H200, the kernel alone, 2026-11-23",
        )
        for phase, tokens, heads, kv_heads, tflops in FLASH_ATTN_3_ON_H200
    ]  # type: ignore[arg-type]  # fmt: skip
    measured += _hot_samples("flash-attn-3", "h200_newer_kernels.csv", ON_H200)
    shapes = {_shape(sample) for sample in measured}
    others = [sample for sample in _hot_samples("flash-attn-3") if _shape(sample) not in shapes]
    return _newer_flash_attn("flash-attn-3", [*measured, *_on_other_hopper(others, "H100")])


def _shape(sample: KernelSample) -> tuple[object, ...]:
    return (
        sample.phase, sample.q, sample.kv, sample.heads, sample.kv_heads, sample.causal, sample.pairs, sample.sequences,
    )  # fmt: skip


def _newer_flash_attn(name: str, samples: list[KernelSample]) -> KernelFigures:
    """Return flash-attn 3 or 4 on Hopper: its forward pass fills the device, its backward pass has many blocks.

    That was probed for flash-attn 3, and is assumed of flash-attn 4.
    """
    probe = "2 H100: a hop posted during a call of 4 to 22 ms, 2026-11-25"
    origin, source = ("measured", probe) if name == "flash-attn-3" else ("assumed", "as flash-attn 3")
    return KernelFigures(
        name=name, fills_device=True, fills_backward=False, samples=samples,
        tail=Value(0.005, 1.0, origin, source),  # type: ignore[arg-type]
        lead=Value(0.0, 0.5, "assumed", "no kernel waits for its blocks"),
    )  # fmt: skip


def _hot_samples(kernel: str, file: str = "h100_kernels.csv", source: str = ON_H100) -> list[KernelSample]:
    """Return samples from devices that had computed for 0.2 s or more before each, which counts as a long time."""
    return [
        KernelSample(
            phase=row["phase"], causal=row["causal"] == "1", ns=float(row["us"]) * 1e3, spread=float(row["spread"]),
            head_dim=128, origin="measured", source=source, pairs=int(row["pairs"]) if row["pairs"] else None,
            sequences=int(row["sequences"] or 1),
            **{name: int(row[name]) for name in ("q", "kv", "heads", "kv_heads", "count")},
        )  # type: ignore[arg-type]
        for row in _rows(file) if row["kernel"] == kernel
    ]  # fmt: skip


def h100() -> Calibration:
    """Return the H100: measured cuDNN, flash-attn 3 and recurrences, flash-attn 2 as published, all else as on H200."""
    machine = published("h100", "NVIDIA H100 80GB HBM3", "H100", 132, 80 << 30)
    on_h200 = _hot_samples("flash-attn-3", "h200_flash_attn_3.csv", "one H200, the kernel alone, 2026-11-26")
    samples = [*_hot_samples("flash-attn-3"), *_on_other_hopper(on_h200, "H200")]
    measured = {"flash-attn-3": _newer_flash_attn("flash-attn-3", samples)}
    measured["cudnn"] = msgspec.structs.replace(machine.kernel("cudnn"), samples=_hot_samples("cudnn"))
    flash_attn_4 = _hot_samples("flash-attn-4", "h200_newer_kernels.csv", ON_H200)
    kernels = [measured.get(kernel.name, kernel) for kernel in machine.kernels]
    kernels.append(_newer_flash_attn("flash-attn-4", _on_other_hopper(flash_attn_4, "H200")))
    return msgspec.structs.replace(
        machine, created="2026-11-26", kernels=kernels, recurrences=_recurrences("h100"),
        matmul_tflops=Value(699.5, 0.043, "measured", ON_H100), matmul_clock_mhz=1470.0,
    )  # fmt: skip


def _other_head_samples(kernel: str) -> list[KernelSample]:
    """Return samples from a device that had computed for 0.3 s before each, which counts as a long time."""
    return [
        KernelSample(
            phase=row["phase"], causal=row["causal"] == "1", ns=float(row["us"]) * 1e3, spread=float(row["spread"]),
            origin="measured", source=OTHER_HEADS,
            **{name: int(row[name]) for name in ("q", "kv", "heads", "kv_heads", "head_dim", "count")},
        )  # type: ignore[arg-type]
        for row in _rows("h200_heads.csv") if row["kernel"] == kernel
    ]  # fmt: skip


def _calibrated_samples(kernel: KernelFigures) -> list[KernelSample]:
    """Return the samples of ``calibrate`` for shapes that the runs do not have.

    The measurement let cuDNN's device cool between short samples. flash-attn draws less power: its rate at 65536 tokens
    is that at 16384.
    """
    samples = []
    for row in _rows("h200_kernels.csv"):
        q, kv, heads, kv_heads, count = (int(row[name]) for name in ("q", "kv", "heads", "kv_heads", "count"))
        if row["kernel"] != kernel.name or (kernel.samples and max(q, kv) >= SHORT):
            continue
        ns, spread = float(row["us"]) * 1e3, float(row["spread"])
        if kernel.samples:
            spread = max(spread, 0.03)
        sample = KernelSample(
            phase=row["phase"], q=q, kv=kv, heads=heads, kv_heads=kv_heads, head_dim=128, causal=row["causal"] == "1",
            ns=ns, spread=spread, count=count, busy_s=_busy_s(ns, count), origin="measured", source=CALIBRATED,
            pairs=int(row["pairs"]) if row["pairs"] else None, sequences=int(row["sequences"] or 1),
        )  # type: ignore[arg-type]  # fmt: skip
        samples.append(sample)
    return samples


def _busy_s(ns: float, count: int) -> float:
    """Return the seconds of computing before a sample: two warm-up calls and, on average, half of the counted ones."""
    return round(ns * (2 + count / 2) / 1e9, 5)


def _with_host(machine: Calibration) -> Calibration:
    """Fit the host times to the passes that `calibrate` measured on 2 and 4 GPUs of one host."""
    prior = {name: Value(us, HOST_SPREAD, "measured", HOST_SOURCE) for name, us in PRIOR_US.items()}
    kernels = []
    for kernel in machine.kernels:
        of_kernel = (Value(us, HOST_SPREAD, "measured", HOST_SOURCE) for us in PRIOR_KERNEL_US.get(kernel.name, ()))
        times = dict(zip(("forward_us", "backward_us"), of_kernel, strict=False))
        kernels.append(msgspec.structs.replace(kernel, **times))
    machine = msgspec.structs.replace(machine, host=Host(**prior), kernels=kernels)
    fitted = fit_host_times(machine, [_pass(row) for row in _rows("h200_host.csv")], HOST_SOURCE)
    host = {
        name: msgspec.structs.replace(getattr(fitted.host, name), spread=HOST_SPREAD)
        for name in fitted.host.__struct_fields__
        if name not in ("host_variation", "pass_spread")
    }  # fmt: skip
    return msgspec.structs.replace(fitted, host=Host(**host, host_variation=HOST_VARIATION), passes=[])


def _pass(row: dict[str, str]) -> HostPass:
    counts = {name: int(row[name.removesuffix("_us")]) for name in Host.__struct_fields__ if name.endswith("_us")}
    return HostPass(
        strategy=row["strategy"], kernel=row["kernel"], hops=row["hops"], ranks=int(row["ranks"]),
         # type: ignore[arg-type]
        backward=row["trains"] == "1", kinds=counts, us=float(row["us"]), source=HOST_SOURCE,
    )  # fmt: skip


def fit_h200() -> Calibration:
    """Fit an H200 to the committed runs; other machines are derived from it, too."""
    base = assumed_calibration("h200", "NVIDIA H200", 132, 150_109_880_320)
    source = "benchmarks/data/h200_links.csv: 2 and 4 H200 of one host, NCCL 2.28.9"
    link = msgspec.structs.replace(
        base.same_host,
        channel_gb_s=Value(18.0, 0.05, "measured", source), hop_gb_s=Value(350.0, 0.03, "measured", source),
        total_gb_s=Value(390.0, 0.03, "measured", "two rings at once, recorded runs"),
        latency_us=Value(50.0, 0.3, "measured", source),
    )  # fmt: skip
    base = msgspec.structs.replace(
        base, same_host=link, nccl=Nccl(version="2.28.9"),
        throttling=Value(0.16, 0.15, "measured", THROTTLING_SOURCE),
        throttling_s=Value(0.15, 0.3, "measured", THROTTLING_SOURCE),
    )  # fmt: skip
    runs = [observed_run(path.parent, base) for path in sorted((ROOT / "traces").glob("h200x4*/run.json"))]
    fitted = calibrate_from(runs, base)
    # Hops that ran beside blocks do not show link rates, so those measured alone stay.
    same_host = msgspec.structs.replace(fitted.same_host, channel_gb_s=link.channel_gb_s, hop_gb_s=link.hop_gb_s)
    return msgspec.structs.replace(fitted, same_host=same_host)


def family_spread(machine: str) -> dict[str, Value]:
    """Return the spreads of a machine's families."""
    source = "published rows of attention.csv (benchmarks/prediction.py family_spreads)"
    return {
        family: Value(spread, 0.3, "published", source) for family, spread in FAMILY_SPREAD.get(machine, {}).items()
    }


def published(name: str, device: str, hardware: str, multiprocessors: int, memory_bytes: int) -> Calibration:
    """Build a machine from kernel_curves.csv; other figures are the H200's, scaled by the data sheets."""
    reference = fit_h200()
    kernels = {"cudnn": "cudnn", "fa2": "flash-attn", "fa3": "flash-attn-3", "fa4": "flash-attn-4"}
    kernel_figures = []
    for source_name, kernel_name in kernels.items():
        samples = _samples(hardware, source_name)
        if samples:
            tail = (
                _as_h200(reference.kernel("cudnn").tail, 1.0)
                if kernel_name in PERSISTENT_KERNELS
                else Value(0.0, 0.5, "assumed", "many blocks")
            )
            lead = _as_h200(reference.kernel("cudnn").lead, 1.0)
            kernel_figures.append(
                KernelFigures(
                    name=kernel_name,
                    fills_device=kernel_name in PERSISTENT_KERNELS,
                    tail=tail,
                    lead=lead,
                    samples=samples,
                )
            )
    memory, nvlink = {"H100": (3.35 / 4.8, 1.0), "B200": (8.0 / 4.8, 2.0)}[hardware]
    return msgspec.structs.replace(
        reference, name=name, device=device, created="2026-11-22", multiprocessors=multiprocessors,
        memory_bytes=memory_bytes, environment={}, kernels=kernel_figures,
        memory_gb_s=_as_h200(reference.memory_gb_s, memory),
        reorder_gb_s=_as_h200(reference.reorder_gb_s, memory), same_host=_link_as_h200(reference.same_host, nvlink),
        other_host=NIC, nccl=Nccl(version="2.28"), contention=_as_h200(reference.contention, 1.0),
        hop_first=_as_h200(reference.hop_first, 1.0), device_variation=_as_h200(reference.device_variation, 1.0),
        throttling=_as_h200(reference.throttling, 1.0), transfer_margin=PUBLISHED_MARGIN,
        family_spread=family_spread(name), family_spread_from_hosts=1,
        noise=Value(0.06, 0.5, "assumed", "other people's kernels, clocks and power"),
    )  # fmt: skip


B200_ROWS = ("V1001", "V1021", "V1041", "V1061")
"""Ulysses on 8 B200, full and causal, forward and backward: the rows that tell what a published kernel does in runs.

With figures of the kernel alone, families come out 6 to 14 % too fast forward and up to 11 % too slow backward.
"""


def b200() -> Calibration:
    """Return the B200: published figures of kernels alone, and of both passes in runs (`B200_ROWS`)."""
    machine = published("b200", "NVIDIA B200", "B200", 148, 180 << 30)
    rows = [row for row in _rows("attention.csv") if row["id"] in B200_ROWS]
    samples = [_sample_of_ulysses(row, machine) for row in rows]
    kernels = [
        msgspec.structs.replace(kernel, samples=[*kernel.samples, *samples]) if kernel.name == "cudnn" else kernel
        for kernel in machine.kernels
    ]
    return msgspec.structs.replace(machine, created="2026-11-26", kernels=kernels)


def _sample_of_ulysses(row: dict[str, str], machine: Calibration) -> KernelSample:
    """Return the kernel's part of a published pass: what is left after the predicted time of everything else."""
    seq, heads, kv_heads, ranks = (int(row[name]) for name in ("seq_global", "heads", "kv_heads", "n_gpus"))
    causal, phase = row["causal"] == "True", "forward" if row["pass"] == "fwd" else "backward"
    workload = Workload(seq=seq, heads=heads, kv_heads=kv_heads, head_dim=128, causal=causal)
    breakdown = predict(Query("ulysses", workload, Cluster(1, ranks), "cudnn"), machine, schedule_of).breakdown
    rest_ns = sum(ns for part, ns in getattr(breakdown, phase).items() if part != "kernel")
    flops = (4 if phase == "forward" else 10) * seq * seq / (2 if causal else 1) * heads * 128
    ns = flops / ranks / float(row["tflops_per_gpu_printed"]) / 1e3 - rest_ns
    return KernelSample(
        phase=phase, q=seq, kv=seq, heads=heads // ranks, kv_heads=kv_heads // ranks, head_dim=128, causal=causal,
        ns=ns, spread=0.03, origin="published", source=f"attention.csv, {row['id']}: Ulysses on {ranks} B200",
    )  # type: ignore[arg-type]  # fmt: skip


def a800() -> Calibration:
    """Build the A800: its kernel from the table beside row V0135, its NIC from row V0109's flat ring, NVLink by data
    sheet."""
    base = assumed_calibration("a800", "NVIDIA A800-SXM4-80GB", 108, 80 << 30)
    table = "thunlp/BurstEngine, kernel table beside V0135 (benchmarks/data/attention.csv)"
    times = (
        ("forward", False, 13.728),
        ("forward", True, 14.111),
        ("backward", False, 37.108),
        ("backward", True, 38.448),
    )
    samples = []
    for phase, causal, ms in times:
        for q, kv in ((16384, 16384),) if causal else ((8192, 16384), (16384, 8192)):
            samples.append(
                KernelSample(
                    phase=phase,
                    q=q,
                    kv=kv,
                    heads=40,
                    kv_heads=40,
                    head_dim=128,
                    causal=causal,
                    ns=ms * 1e6,  # type: ignore[arg-type]
                    spread=0.02,
                    origin="published",
                    source=table,
                )
            )
    unknown = Value(0.0, 0.5, "assumed", "a kernel of many short blocks")
    kernel = KernelFigures(name="flash-attn", fills_device=False, tail=unknown, lead=unknown, samples=samples)
    ring = "thunlp/BurstEngine, V0109: flat ring, forward, 262144 tokens, 168 MB a step in 7.76 ms"
    nccl_tests = "8xA100, nccl-tests sendrecv_perf: 110.8 GB/s on 8 channels at 128 MiB, 195 at 1 GiB"
    nvlink = Link(
        channel_gb_s=Value(13.8, 0.1, "published", nccl_tests),
        hop_gb_s=Value(130.0, 0.1, "assumed", f"{nccl_tests}; A800 has 400 of its 600 GB/s"),
        total_gb_s=Value(145.0, 0.1, "assumed", f"{nccl_tests}; A800 has 400 of its 600 GB/s"),
        latency_us=Value(50.0, 0.5, "assumed", "of the usual order"),
        collective_gb_s={
            name: Value(130.0, 0.2, "assumed", "as hops") for name in ("all_to_all", "all_gather", "reduce_scatter")
        },
    )
    nic = Link(
        channel_gb_s=Value(13.0, 0.2, "assumed", "of the usual order"), hop_gb_s=Value(21.6, 0.05, "published", ring),
        total_gb_s=Value(21.6, 0.05, "published", ring), latency_us=Value(50.0, 0.5, "assumed", "of the usual order"),
        line_gbit=200.0,
    )  # fmt: skip
    return msgspec.structs.replace(
        base, created="2026-11-22", kernels=[kernel],
        memory_gb_s=Value(1600.0, 0.1, "assumed", "as much of 2,039 GB/s as an H200 reaches"),
        same_host=nvlink, other_host=nic, nccl=Nccl(version="2.18"),
        throttling=Value(0.0, 0.5, "assumed", "the samples are from runs"),
        noise=Value(0.02, 0.5, "assumed", "repeats in the source, long ones"), run_to_run_noise_us=SOURCE_OVERHEAD,
        family_spread=family_spread("a800"), family_spread_from_hosts=1,
    )  # fmt: skip


CACHE_GB_S = {"flash-attn": 4562.0, "torch-flash": 4518.0, "cudnn": 2795.0}
"""GB/s at which kernels read a cache on one H200; runs of decode are scored by it."""
_CACHE_SOURCE = "benchmarks/decode_kernels.py, one H200: one token of 8 sequences over 524288 keys"


CACHE_SCALE = {"h200": 1.0, "h100": 3352 / 4800}
"""Memory bandwidth of the machines by the data sheets, as a fraction of an H200's."""


def with_cache_rates(calibration: Calibration) -> Calibration:
    """Return the calibration with the rates at which its kernels read a cache, where they are known."""
    scale = CACHE_SCALE.get(calibration.name)
    if scale is None:
        return calibration
    rates = {name: Value(rate, 0.03, "measured", _CACHE_SOURCE) for name, rate in CACHE_GB_S.items()}
    kernels = [
        msgspec.structs.replace(
            kernel, cache_gb_s=rates[kernel.name] if scale == 1.0 else _as_h200(rates[kernel.name], scale)
        )
        if kernel.name in rates else kernel
        for kernel in calibration.kernels
    ]  # fmt: skip
    return msgspec.structs.replace(calibration, kernels=kernels)


def _samples(hardware: str, kernel: str) -> list[KernelSample]:
    samples = []
    for row in _rows("kernel_curves.csv"):
        if (row["hardware"], row["kernel"]) != (hardware, kernel):
            continue
        seq, heads, head_dim = (int(row[name]) for name in ("seq", "heads", "head_dim"))
        causal, forward = row["mask"] == "causal", row["direction"] == "fwd"
        flops = (4 if forward else 10) * seq * seq * heads * head_dim / (2 if causal else 1)
        samples.append(
            KernelSample(
                phase="forward" if forward else "backward", q=seq, kv=seq, heads=heads, kv_heads=int(row["kv_heads"]),
                head_dim=head_dim, causal=causal, ns=flops / float(row["tflops"]) / 1e3, spread=0.02,
                utilisation=PUBLISHED_UTILISATION, origin="published", source=row["source"],
            )
        )  # fmt: skip
    return samples


def _as_h200(value: Value, scale: float) -> Value:
    source = AS_MEASURED if scale == 1.0 else f"{AS_MEASURED}, times {scale:.3g} by the data sheets"
    return Value(value.value * scale, max(0.1, value.spread), "assumed", source)


def _link_as_h200(link: Link, scale: float) -> Link:
    return msgspec.structs.replace(
        link, channel_gb_s=_as_h200(link.channel_gb_s, scale), hop_gb_s=_as_h200(link.hop_gb_s, scale),
        total_gb_s=_as_h200(link.total_gb_s, scale), latency_us=_as_h200(link.latency_us, 1.0),
        collective_gb_s={name: _as_h200(value, scale) for name, value in link.collective_gb_s.items()},
        copy_gb_s=link.copy_gb_s and _as_h200(link.copy_gb_s, scale),
    )  # fmt: skip


def _rows(name: str) -> Iterable[dict[str, str]]:
    with open(DATA / name, encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


BUILD = {
    "h200": h200,
    "h100": h100,
    "b200": b200,
    "a800": a800,
}


if __name__ == "__main__":
    MACHINES.mkdir(exist_ok=True)
    for chosen in sys.argv[1:] or BUILD:
        (MACHINES / f"{chosen}.json").write_bytes(calibration_json(with_rates(with_cache_rates(BUILD[chosen]()))))
        print(f"Wrote {MACHINES / chosen}.json")
