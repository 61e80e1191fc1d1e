"""Measure a machine: kernels by shape, memory, the host's own time, heat; with two GPUs links and contention, too.

Every GPU computes at the same time, as in a run, and keeps computing, so that it is as warm. What has been measured is
handed on after every part, so that a run cut short has left a calibration.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import UTC, datetime
from statistics import median, pstdev
from typing import Any

import msgspec
import torch
from torch import Tensor

from ringprof.errors import UsageError
from ringprof.json_object import JsonObject
from ringprof.prediction.calibration import (
    COLLECTIVES,
    TIME_SHARES,
    Calibration,
    KernelFigures,
    KernelSample,
    Link,
    Nccl,
    Value,
)
from ringprof.prediction.host_model import explained
from ringprof.prediction.host_timing import measured_passes
from ringprof.prediction.microbenchmark import Bench, call_of
from ringprof.prediction.network import channels
from ringprof.prediction.shapes import COLLECTIVE_BYTES, MESSAGES, Wanted, blocks
from ringprof.record.dryrun.schedule import AttentionOp
from ringprof.record.machine import versions
from ringprof.strategies.kernels.builtin import KERNELS
from ringprof.strategies.kernels.merge import accumulate
from ringprof.strategies.transport.communicator import Communicator
from ringprof.strategies.transport.message import Message

Save = Callable[[Calibration], None]
_SHAPE = ("phase", "q", "kv", "heads", "kv_heads", "head_dim", "causal", "pairs", "sequences")
_SLICE_S = 30.0
"""Between savings of samples."""
_WARM_S = 8.0
_LONG = AttentionOp(
    label="", phase="forward", batch=1, q=16384, kv=16384, heads=40, kv_heads=40, head_dim=128, causal=False
)  # fmt: skip
_BESIDE, _BESIDE_BYTES = msgspec.structs.replace(_LONG, q=8192, kv=8192), 1 << 30
"""A block, and a message that takes longer: beside a part of the block it would lose less than two calls differ by."""
_TURNS, _LET_IN_CYCLES = 15, 400_000
_COPIED_BYTES = 256 << 20


def measure_machine(
    base: Calibration, bench: Bench, kernels: Sequence[str], seconds: float, save: Save,
    chosen: Collection[str] = TIME_SHARES.keys(),
) -> Calibration:  # fmt: skip
    """Measure the ``chosen`` of `TIME_SHARES` within about ``seconds``; what else is known of the base stays.

    ``save`` is called on rank 0 with what is known so far. Raises `UsageError` where there is no kernel.
    """
    if not kernels:
        raise UsageError("no attention kernel runs on this GPU: name recorded runs instead")
    started = time.monotonic()
    ends, share, whole = {}, 0.0, sum(TIME_SHARES[name] for name in chosen)
    for name, part in TIME_SHARES.items():
        share += part * (name in chosen)
        ends[name] = started + share / whole * seconds
    found = msgspec.structs.replace(
        base, created=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", nccl=_nccl(base.nccl, bench), elsewhere={},
        environment=versions(bench.device),
    )  # fmt: skip
    warms, cold = kernels[0], list[str]()
    if "kernels" in chosen:
        warms, cold = _warm(bench, kernels, min(_WARM_S, (ends["kernels"] - started) / 5))

    def keep(**changes: Any) -> None:
        nonlocal found
        found = msgspec.structs.replace(found, **changes)
        if bench.rank == 0:
            save(found)

    if "kernels" in chosen:
        for samples, failed in _kernel_samples(bench, kernels, ends["kernels"]):
            keep(kernels=_with_samples(found.kernels, samples), unmeasured=cold + failed)
    parts: tuple[tuple[str, str, Callable[[], JsonObject]], ...] = (
        ("host", "host", lambda: _host(bench, found, kernels, ends["host"])),
        ("memory", "memory", lambda: _memory(bench, 1e3 * found.touch_us.value)),
        ("links", "links", lambda: {"same_host": _links(bench, found, ends["links"])}),
        ("links", "contention", lambda: _contention(bench, found, warms)),
        ("links", "copied hops", lambda: {"same_host": _copied(bench, found.same_host)}),
        ("heat", "heat", lambda: _heat(bench, warms, ends["heat"])),
    )
    for part_of, name, attempt in parts:
        if part_of in chosen:
            # Without what an earlier calibration could not measure.
            others = [line for line in found.unmeasured if not line.startswith(f"{name}: ")]
            alone = part_of == "links" and bench.size == 1
            refused = {"unmeasured": [*others, f"{name}: needs two GPUs"]}
            keep(**{"unmeasured": others, **(refused if alone else _attempted(name, attempt, others))})
    return found


def _host(bench: Bench, before: Calibration, kernels: Sequence[str], until: float) -> JsonObject:
    passes = measured_passes(bench, kernels, until)
    found = explained(before, passes, "ringprof calibrate: passes of strategies")
    return {"host": found.host, "kernels": found.kernels, "passes": found.passes}


def _attempted(name: str, part: Callable[[], JsonObject], failed: list[str]) -> JsonObject:
    """What a part finds, or that it failed: the others are still wanted."""
    try:
        return part()
    except (RuntimeError, ValueError, UsageError) as error:
        return {"unmeasured": [*failed, f"{name}: {_brief(error)}"]}


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def usable_kernels(device: torch.device) -> list[str]:
    """Fastest first; not the fallback, which compiles anew for every shape."""
    return [
        name for name, kind in KERNELS.items()
        if name not in ("flex", "reference") and kind.why_unsupported(device, torch.bfloat16, 128) is None
    ]  # fmt: skip


def _nccl(before: Nccl, bench: Bench) -> Nccl:
    if bench.device.type != "cuda":
        return before
    version = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return msgspec.structs.replace(before, version=version)


# --- kernels ----------------------------------------------------------------------------------------


def _warm(bench: Bench, kernels: Sequence[str], seconds: float) -> tuple[str, list[str]]:
    """Compute for some seconds, until the device is warm; return the kernel that did, and why others did not run."""
    failed: list[str] = []
    for kernel in kernels if bench.device.type == "cuda" else ():
        try:
            body, until = call_of(KERNELS[kernel](), _LONG, bench), time.monotonic() + seconds
            while time.monotonic() < until or bench.heater is None:
                bench.heater = body, median(bench.times_ns(body, 50))
        except RuntimeError as error:
            failed.append(f"{kernel}, to warm the GPU: {_brief(error)}")
        else:
            return kernel, failed
    return kernels[0], failed


def _kernel_samples(
    bench: Bench, kernels: Sequence[str], until: float
) -> Iterable[tuple[list[KernelSample], list[str]]]:
    """All ranks' samples and failures so far, whenever a slice of time has passed; ranks share out the shapes."""
    wanted_blocks = blocks(kernels)
    mine, total = wanted_blocks[bench.rank :: bench.size], len(wanted_blocks)
    samples: list[KernelSample] = []
    failed: list[str] = []
    instances = {name: KERNELS[name]() for name in kernels}
    done = False
    while not done:
        pause = min(until, time.monotonic() + _SLICE_S)
        while mine and time.monotonic() < pause:
            wanted = mine.pop(0)
            try:
                samples.append(_sample(bench, instances[wanted.kernel], wanted))
            except RuntimeError as error:
                block = wanted.block
                shape = f"{block.q} x {block.kv}, {block.heads} heads, {block.kv_heads} kv, causal={block.causal}"
                failed.append(f"{wanted.kernel} {block.phase} {shape}: {_brief(error)}")
        # All ranks go on while one has shapes left and time.
        done = all(bench.together(not mine or time.monotonic() >= until, bool))
        left = sum(bench.together(len(mine), int)) if done else 0
        late = [f"kernels: {left} of {total} shapes, for lack of time: give more --seconds"] if left else []
        yield (
            [sample for part in bench.together(samples, list[KernelSample]) for sample in part],
            [line for part in bench.together(failed, list[str]) for line in part] + late,
        )


def _sample(bench: Bench, kernel: Any, wanted: Wanted) -> KernelSample:
    """Raises RuntimeError where the device has not the memory, or the kernel cannot do this."""
    try:
        ns, spread, count = bench.typical_ns(call_of(kernel, wanted.block, bench, wanted.parts))
    finally:
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
    shape = {name: getattr(wanted.block, name) for name in _SHAPE}
    return KernelSample(**shape, ns=ns, spread=min(spread, 1.0), count=count, origin="measured", source=kernel.name)


def _with_samples(before: Sequence[KernelFigures], samples: Sequence[KernelSample]) -> list[KernelFigures]:
    """The samples with the kernels that their sources name."""
    named = {kernel.name: kernel for kernel in before}
    for name in {sample.source for sample in samples}:
        mine = [msgspec.structs.replace(one, source="ringprof calibrate") for one in samples if one.source == name]
        nothing = Value(0.0, 0.5, "assumed", "a kernel of many short blocks")
        known = named.get(name) or KernelFigures(name=name, fills_device=False, tail=nothing, lead=nothing, samples=[])
        named[name] = msgspec.structs.replace(known, samples=mine)
    return [kernel for kernel in named.values() if kernel.samples] or list(before)


# --- memory -----------------------------------------------------------------------------------------


def _memory(bench: Bench, touch_ns: float) -> dict[str, Value]:
    """Measure rates of a merge and of a change of order, free of ``touch_ns``, a kernel's fixed time."""
    large = (1, 32768, 40, 128) if bench.device.type == "cuda" else (1, 512, 4, 64)
    total, block = torch.zeros(large, device=bench.device), bench.draw(*large)
    added, spread, _ = bench.typical_ns(lambda: accumulate(total, block))
    packed, packing, _ = bench.typical_ns(lambda: torch.stack(block.chunk(2, dim=2)))
    moved = 2 * total.numel() * 4 + block.numel() * 2
    return {
        "memory_gb_s": _value(moved / max(added - touch_ns, added / 2), spread),
        "reorder_gb_s": _value(2 * block.numel() * 2 / max(packed - touch_ns, packed / 2), max(packing, 0.1)),
    }


def _value(value: float, spread: float) -> Value:
    return Value(value, min(max(spread, 0.01), 1.0), "measured", "ringprof calibrate")


# --- links ------------------------------------------------------------------------------------------


def _links(bench: Bench, before: Calibration, until: float) -> Link:
    """Hops by message, two rings at once, collectives, copied hops; all ranks measure alike, rank 0's figures count."""
    comm = Communicator()
    ring, second = comm.ring("calibrate"), comm.ring("calibrate_beside")
    sizes = MESSAGES if bench.device.type == "cuda" else (1 << 16, 1 << 20)
    times = {}
    for size in sizes:
        tensor = torch.zeros(size, dtype=torch.uint8, device=bench.device)
        if all(bench.together(time.monotonic() < until, bool)):
            times[size] = bench.together_ns(lambda: ring.post(_whole(tensor)).wait())  # noqa: B023
    if not times:
        raise UsageError("no time was left")
    latency = times[min(times)]
    by_channels: dict[bool, list[float]] = {True: [], False: []}
    for size, ns in times.items():
        count = channels(size, bench.size, 1, before.nccl, 0.0)
        full = count >= before.nccl.peer_channels
        if size > sizes[-1] // 32:
            by_channels[full].append(size / max(ns - latency, 1.0) / (1 if full else count))
    tensor = torch.zeros(sizes[-1] // 4, dtype=torch.uint8, device=bench.device)
    both = bench.together_ns(lambda: [hop.wait() for hop in (ring.post(_whole(tensor)), second.post(_whole(tensor)))])
    both = max(both - latency, both / 2)
    link = msgspec.structs.replace(
        before.same_host,
        latency_us=_value(latency / 1e3, 0.3),
        total_gb_s=_value(2 * tensor.numel() / both, 0.03),
        collective_gb_s={**before.same_host.collective_gb_s, **_collectives(bench, comm)},
    )
    if by_channels[False]:
        link = msgspec.structs.replace(link, channel_gb_s=_value(median(by_channels[False]), 0.05))
    if by_channels[True]:
        link = msgspec.structs.replace(link, hop_gb_s=_value(max(by_channels[True]), 0.03))
    return link


def _whole(tensor: Tensor) -> Message:
    """A tensor as one message."""
    return Message([tensor])


def _collectives(bench: Bench, comm: Communicator) -> dict[str, Value]:
    channel = comm.collective("calibrate_all")
    found = {}
    for name in COLLECTIVES:
        rates = []
        for size in COLLECTIVE_BYTES if bench.device.type == "cuda" else (1 << 16,):
            piece = torch.zeros(size // 2, dtype=torch.bfloat16, device=bench.device)
            given = piece if name == "all_gather" else piece.expand(bench.size, -1).contiguous()
            ns = bench.together_ns(lambda: getattr(channel, name)(given).wait())  # noqa: B023
            rates.append((bench.size - 1) * size / ns)
        found[name] = _value(max(rates), 0.05)
    return found


def _copied(bench: Bench, before: Link) -> Link:
    if bench.device.type != "cuda":
        return before
    ring = Communicator(hops="copy").ring("calibrate_copied")
    tensor = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=bench.device)
    part = tensor[: _COPIED_BYTES // 4]
    # Two sizes, so that the rate is free of the time before the first byte.
    whole_ns, part_ns = (bench.together_ns(lambda: ring.post(_whole(one)).wait()) for one in (tensor, part))  # noqa: B023
    gb_s = (tensor.numel() - part.numel()) / max(whole_ns - part_ns, whole_ns / 2)
    return msgspec.structs.replace(before, copy_gb_s=_value(gb_s, 0.02))


def _contention(bench: Bench, before: Calibration, kernel: str) -> JsonObject:
    """What a block loses to a hop's kernel beside it: alone and beside in turns, so that both are as warm."""
    if bench.device.type != "cuda":
        return {}
    ring, body = Communicator().ring("calibrate_contention"), call_of(KERNELS[kernel](), _BESIDE, bench)
    message = torch.zeros(_BESIDE_BYTES, dtype=torch.uint8, device=bench.device)
    side: Any = torch.cuda.Stream(bench.device)  # type: ignore[no-untyped-call]
    held = channels(_BESIDE_BYTES, bench.size, 1, before.nccl, 0.0) / before.multiprocessors
    alone, beside = [], []
    for _ in range(_TURNS):
        alone.append(_beside(body, side)[0])
        beside.append(_beside(body, side, lambda: ring.post(_whole(message))))
    block, together = (median(times) for times in zip(*beside, strict=True))
    lost = (block - median(alone)) / together / held
    ranks = bench.together(lost, float)
    found = min(max(sum(ranks) / len(ranks), 0.0), 1.5)
    return {"contention": _value(found, pstdev(ranks) / max(found, 0.1) + 0.1)}


def _beside(body: Callable[[], object], side: Any, post: Callable[[], Any] | None = None) -> tuple[float, float]:
    """Nanoseconds of a block, and of them beside the hop that ``post`` begins before."""
    start, stop, arrived = (torch.cuda.Event(enable_timing=True) for _ in range(3))  # type: ignore[no-untyped-call]
    body()
    hop = post() if post else None
    # Until the hop's kernel has its multiprocessors.
    torch.cuda._sleep(_LET_IN_CYCLES)  # type: ignore[no-untyped-call]
    start.record()
    body()
    stop.record()
    with torch.cuda.stream(side):
        if hop is not None:
            hop.wait()
        arrived.record(side)
    torch.cuda.synchronize()
    block, until = start.elapsed_time(stop) * 1e6, start.elapsed_time(arrived) * 1e6
    return block, min(block, until)


# --- heat and host ----------------------------------------------------------------------------------


def _heat(bench: Bench, kernel: str, until: float) -> dict[str, Value]:
    """How much longer a block takes in an unbroken row than with pauses of four times its length."""
    if bench.device.type != "cuda":
        return {}
    body = call_of(KERNELS[kernel](), _LONG, bench)
    each = min(6.0, max(1.0, (until - time.monotonic()) / 2))
    hot = cool = 0.0
    end = time.monotonic() + each
    while time.monotonic() < end:
        hot = median(bench.times_ns(body, 20))
    cooled = []
    end = time.monotonic() + each
    while time.monotonic() < end:
        cooled.append(bench.times_ns(body, 1)[0])
        time.sleep(4 * cooled[-1] / 1e9)
    cool = median(cooled[len(cooled) // 2 :])
    # The pauses leave a duty of a fifth: see `KernelSample.duty`.
    slope = (hot - cool) / (cool - 0.2 * hot)
    return {"heat": _value(min(max(slope, 0.0), 0.5), 0.2)}
