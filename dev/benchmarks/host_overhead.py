"""Measure the host time of a forward and backward pass: from the call to its return, without a wait for the device.

    python dev/benchmarks/host_overhead.py                                      # no GPU: nothing computed, nothing sent
    torchrun --nproc-per-node 2 dev/benchmarks/host_overhead.py --kernels flash-attn,cudnn

Without GPUs, kernels return empty tensors at once, and the process group is torch's fake one with --world ranks: only
Python and torch's dispatch remain. With GPUs everything is real; the device is idle when a pass begins, and is
synchronised after it. Tensors are small, since the host time does not depend on their size. All strategies are timed
interleaved, including third-party ones that are installed; `ratio` is relative to ring-flash-attn's zigzag. With
--pieces, a second table breaks the time of --ours down: calls of kernels, hops, merges and sums, with their callees.

--layers 8 makes 8 calls per pass, each with the output of the previous one as its queries, and reports the time per
call. As in a model, autograd's thread is then woken only once. On a GPU, torch runs every backward pass on a thread of
its own; --one-thread keeps it on the caller's thread (torch.autograd.set_multithreading_enabled).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from on_gpus import start

from ringprof.strategies import create, find
from ringprof.strategies.base import Rows
from ringprof.strategies.kernels import merge
from ringprof.strategies.kernels.kernel import Kernel
from ringprof.strategies.transport import communicator, gradient_ring, ring_channel
from ringprof.strategies.transport.baselines import NoOpKernel
from ringprof.strategies.transport.handshake import Handshake

OURS = "zigzag,ring,stripe,burst,double-ring,megatron,ulysses,usp,allgather"
PEERS = "ring-flash-attn/zigzag,ring-flash-attn/ring,ring-flash-attn/stripe,yunchang/usp,torch-cp"
Body = Callable[[], Any]
WARM_CALLS = 3


def main() -> int:
    options = _options()
    torch.autograd.set_multithreading_enabled(not options.one_thread)
    on_gpu = torch.cuda.is_available()
    rows = []
    for world in [int(os.environ["WORLD_SIZE"])] if on_gpu else map(int, options.world.split(",")):
        device = start() if on_gpu else _start_alone(world)
        bodies = _bodies(options, device)
        bodies = {key: body for key, body in bodies.items() if _runs(key, body)}
        rows += _rows(_measure(bodies, options.rounds, device), world, options.layers)
        if options.pieces:
            ours = {key: body for key, body in bodies.items() if key[0].split(" ")[0] in options.ours.split(",")}
            pieces = _pieces(ours, options.rounds, device)
            if not on_gpu or dist.get_rank() == 0:
                print(*pieces, sep="\n", flush=True)
        if not on_gpu:
            dist.destroy_process_group()
    if not on_gpu or dist.get_rank() == 0:
        print(*_lines(rows), sep="\n", flush=True)
        if options.out:
            Path(options.out).write_text(json.dumps(rows, indent=1))
    if on_gpu:
        dist.barrier()
    os._exit(0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", default="2,8", help="ranks to pretend, without GPUs")
    parser.add_argument("--ours", default=OURS)
    parser.add_argument("--peers", default=PEERS)
    parser.add_argument("--pieces", action="store_true", help="where the time goes")
    parser.add_argument("--kernels", default="flash-attn,cudnn", help="with GPUs")
    parser.add_argument("--hops", default="nccl,copy", help="with GPUs")
    parser.add_argument("--tokens", type=int, default=512, help="tokens per rank")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--layers", type=int, default=1, help="calls per pass, like the layers of a model")
    parser.add_argument("--one-thread", action="store_true", help="run backward passes on the caller's thread")
    parser.add_argument("--out", help="write the rows as JSON, too")
    return parser.parse_args()


def _start_alone(world: int) -> torch.device:
    """Start rank 0 of a fake process group whose other ranks do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    torch.set_num_threads(1)
    handshake = Handshake("", dict.fromkeys(range(world), 0), {})
    communicator.perform_handshake, communicator.check_same_call = lambda *_: handshake, lambda *_: None
    _install_fake_flash_attn()
    return torch.device("cpu")


def _install_fake_flash_attn() -> None:
    """Install a fake flash-attn module that computes nothing and has the signatures of the real one."""

    def forward(
        q: Any, k: Any, v: Any, dropout_p: Any, softmax_scale: Any, causal: Any, window_size_left: Any,
        window_size_right: Any, softcap: Any, alibi_slopes: Any, return_softmax: Any,
    ) -> Any:  # fmt: skip
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1])
        return torch.empty_like(q), lse, lse, lse

    def backward(
        dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any, dropout_p: Any,
        softmax_scale: Any, causal: Any, window_size_left: Any, window_size_right: Any, softcap: Any,
        alibi_slopes: Any, deterministic: Any, rng_state: Any = None,
    ) -> Any:  # fmt: skip
        return softmax_lse

    interface = types.ModuleType("flash_attn.flash_attn_interface")
    names = ("_flash_attn_forward", "_flash_attn_varlen_forward", "_flash_attn_backward", "_flash_attn_varlen_backward")
    for name, function in zip(names, (forward, forward, backward, backward), strict=True):
        setattr(interface, name, function)
    package = types.ModuleType("flash_attn")
    package.flash_attn_interface = interface  # type: ignore[attr-defined]
    package.__spec__ = ModuleSpec("flash_attn", None)
    sys.modules |= {"flash_attn": package, "flash_attn.flash_attn_interface": interface}


def _bodies(options: argparse.Namespace, device: torch.device) -> dict[tuple[str, str], Body]:
    """Build the function that runs a pass, by strategy and kernel."""
    torch.manual_seed(dist.get_rank())
    on_gpu = device.type == "cuda"
    # On CPU, arithmetic would add to the host time; on GPU it does not.
    shape = (1, options.tokens, 8, 128) if on_gpu else (1, 16, 2, 8)
    q, k, v, dout = (torch.randn(shape, device=device).bfloat16() for _ in range(4))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]

    def body(strategy: Any) -> Body:
        def run() -> None:
            out = leaves[0]
            for _ in range(options.layers):
                out = strategy.attention(out, *leaves[1:], causal=True)
            torch.autograd.grad(out, leaves, dout)

        return run

    bodies = {}
    for kernel in options.kernels.split(",") if on_gpu else ["null"]:
        for name in options.ours.split(","):
            ring_like = name not in ("ulysses", "megatron", "allgather")
            for hops in options.hops.split(",") if on_gpu and ring_like else ["nccl"]:
                label = f"{name} (copied hops)" if hops == "copy" else name
                bodies[label, kernel] = body(_strategy(name, kernel, hops))
                if on_gpu and hops == "nccl":
                    bodies[f"{name} (CUDA graph)", kernel] = _replay(bodies[label, kernel])
        for name in options.peers.split(","):
            missing = find(name).missing()
            try:
                if not missing and (not on_gpu or kernel in find(name).load().KERNELS):
                    bodies[name, kernel] = body(_strategy(name, kernel, "nccl"))
            except Exception as error:
                missing = f"{type(error).__name__}: {error}"
            if missing and dist.get_rank() == 0:
                print(f"{name} is not measured: {missing}", flush=True)
    return bodies


def _replay(body: Body) -> Body:
    """Return a function that replays ``body`` as a CUDA graph, which is captured in the fourth call."""
    calls, graph = 0, torch.cuda.CUDAGraph()

    def replayed() -> None:
        nonlocal calls
        calls += 1
        if calls <= WARM_CALLS:
            body()
            return
        if calls == WARM_CALLS + 1:
            torch.cuda.synchronize()
            # NCCL's watchdog thread queries events at the same time.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                body()
        graph.replay()

    return replayed


def _strategy(name: str, kernel: str, hops: str) -> Any:
    if kernel != "null":
        return create(name, kernel=kernel, hops=hops)
    strategy = create(name)
    # As on a GPU, where hops of this size are not worth the extra kernel calls that would overlap them.
    strategy.overlaps_last_hop = lambda travelling: False
    for hop_ring in [part for part in vars(strategy).values() if isinstance(part, ring_channel.HopRing)]:
        hop_ring.transport.all_to_all_device = "cpu"
    no_op = NoOpKernel(writes_into=True)  # as flash-attn 3
    strategy.kernel_for = lambda q, **_: no_op
    return strategy


def _measure(bodies: dict[Any, Body], rounds: int, device: torch.device) -> dict[Any, list[float]]:
    """Time the passes interleaved, and return the microseconds of every pass."""
    times: dict[Any, list[float]] = {key: [] for key in bodies}
    for _ in range(rounds):
        for key, body in bodies.items():
            if device.type == "cuda":
                dist.barrier()
                torch.cuda.synchronize()
            before = time.perf_counter()
            body()
            times[key].append((time.perf_counter() - before) * 1e6)
    return times


PIECES = (
    (Kernel, "forward"), (Kernel, "backward"), (ring_channel.HopRing, "post"), (ring_channel.Hop, "wait"),
    (merge.Partial, "_merge_pending"),
    (merge.Sum, "add"), (merge.Sum, "result"), (gradient_ring, "forward_grads"), (gradient_ring, "add_and_cast_all"),
    (Rows, "select"),
)  # fmt: skip
"""Functions that --pieces times: owner and name."""


def _pieces(bodies: dict[tuple[str, str], Body], rounds: int, device: torch.device) -> list[str]:
    """Format the median microseconds of a pass per piece; the timing itself makes the total somewhat longer."""
    lines = []
    for key, body in bodies.items():
        spent: dict[str, list[float]] = defaultdict(list)
        with _clocks() as clocks:
            for _ in range(rounds):
                clocks.clear()
                for name, times in _measure({key: body}, 1, device).items():
                    spent["all of it" if name == key else str(name)] += times
                for name, time_us in clocks.items():
                    spent[name].append(time_us)
        shown = ", ".join(f"{name} {statistics.median(times):.0f}" for name, times in spent.items())
        lines.append(f"{' '.join(key)}: {shown} us")
    return lines


@contextmanager
def _clocks() -> Iterator[dict[str, float]]:
    """Time the pieces in the block; yields microseconds by piece."""
    spent: dict[str, float] = defaultdict(float)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += (time.perf_counter() - before) * 1e6

        return call

    with ExitStack() as stack:
        for owner, name in PIECES:
            label = f"{getattr(owner, '__name__', '').rpartition('.')[2]}.{name}"
            stack.enter_context(patch.object(owner, name, timed(label, getattr(owner, name))))
        yield spent


def _runs(key: tuple[str, ...], body: Body) -> bool:
    """Warm a pass up and return whether it runs here; prints the error if not."""
    try:
        for _ in range(5):
            body()
    except Exception as error:
        print(f"{' '.join(key)}: {type(error).__name__}: {error}", flush=True)
        return False
    return True


def _rows(times: dict[Any, list[float]], world: int, layers: int) -> list[dict[str, Any]]:
    times = {key: [time / layers for time in pass_times] for key, pass_times in times.items()}
    medians = {key: statistics.median(call_times) for key, call_times in times.items()}
    base = next((medians[key] for key in medians if key[0] == "ring-flash-attn/zigzag"), None)
    return [
        {
            "world": world, "strategy": name, "kernel": kernel, "us": median,
            "p10_us": statistics.quantiles(times[name, kernel], n=10)[0],
            "p90_us": statistics.quantiles(times[name, kernel], n=10)[-1],
            "ratio": median / base if base else None,
        }
        for (name, kernel), median in medians.items()
    ]  # fmt: skip


def _lines(rows: list[dict[str, Any]]) -> list[str]:
    lines = [f"{'ranks':>5}  {'strategy':<34}{'kernel':<11}{'us':>8}{'p10':>8}{'p90':>8}{'ratio':>7}"]
    for row in rows:
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        lines.append(
            f"{row['world']:>5}  {row['strategy']:<34}{row['kernel']:<11}{row['us']:>8.0f}"
            f"{row['p10_us']:>8.0f}{row['p90_us']:>8.0f}{ratio:>7}"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
