"""Proofs in a running training loop: one head of one attention call of a real batch, against dense attention.

A due step captures, from one call, one sequence of the batch and one kv head with its query heads: q, k, v, the output
and, in the backward pass, their gradients. When the step ends, the ranks compare them with dense attention in float64
over the gathered keys, a few rows at a time. Layers, sequences and heads take turns.

A result passes while its relative root-mean-square error is at most 3 · sqrt(kernel² + N · u² / 3), or 64 u for fp32:
each of N ranks may round partial results by the unit roundoff u, and ``kernel`` is the error that rounding the weights,
their gradients and the output to the input's type alone makes on the same tensors.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringprof.common.json_object import JsonObject
from ringprof.proof.dense import ERROR_FACTOR, SINGLE_FLOOR, gather_numbers, relative_rms
from ringprof.proof.on_ranks import record_sent
from ringprof.proof.result import SentInCall
from ringprof.ranks.process_group import GroupRanks
from ringprof.strategies.base import Strategy, checksum, positions_in_documents
from ringprof.strategies.kernels.reference import KeyStretches, masked_scores
from ringprof.strategies.kernels.uncompiled import uncompiled
from ringprof.strategies.masks.layouts import LAYOUTS
from ringprof.training.appended_log import AppendedLog
from ringprof.training.steps import StepCounter, interval_for
from ringprof.workload.mask import Mask

NUMBERS_PER_SCORE = 8
"""Float64 numbers that are held per score while a block of rows is computed."""
STEPS_BEFORE = 4
"""Steps that show how many calls there are and how long a step takes, before the first proof is planned."""
PASSES_OVER_SCORES = 30
"""Times that a proof reads or writes the float64 scores of its head, for the estimate before the first proof."""
GATHERED_PER_S = 1e9
"""Bytes per second between ranks, for the same estimate."""

_log = logging.getLogger("ringprof.prove")


@dataclass
class _Capture:
    """One head of one sequence in one attention call: q (s, G, D), k and v (s, D), and results by name."""

    strategy: Strategy | None
    options: dict[str, Any]
    q: Tensor
    k: Tensor
    v: Tensor
    results: dict[str, Tensor]
    dout: Tensor | None = None
    sent: SentInCall | None = None
    position_ids: Tensor | None = None


class _Ready(msgspec.Struct, frozen=True):
    """Whether one rank can take part in a proof, and values that must be alike on all ranks."""

    problem: str = ""
    key: str = ""
    backward: bool = False
    batch: list[int] = []
    """Checksums of the integer tensors that strategies sharded for the step, such as the whole batch's token IDs."""


class _RankResult(msgspec.Struct, frozen=True, kw_only=True):
    """Findings of one rank in a proof."""

    failed: str = ""
    errors: dict[str, tuple[float | None, float, float]] = {}
    """(error, None if it is not finite; tolerance; rounding error) of each result."""
    partition: bool = True
    position_ids: bool | None = None
    sent: int | None = None
    peers: int = 0
    peer_weight: float = 0.0


@dataclass
class _Problem:
    """Inputs and buffers of a proof on a rank; all memory for collectives is allocated before the first of them."""

    capture: _Capture
    mask: Mask
    positions: Tensor
    keys: Tensor
    values: Tensor
    sums: Tensor
    """Sums over ranks of dk and dv, exact and rounded: (2, S, D + E)."""
    order: Tensor
    """Positions of all keys, in the order of ``keys``."""
    backward: bool = False
    """Whether every rank has captured the gradients."""


class Prover(StepCounter):
    """Prover of one attention in a training loop; created by `ringprof.prove`. Calling it calls the attention."""

    def __init__(
        self, attention: Any, every: int, group: Any, layout: str | Tensor, stated: JsonObject, memory_bytes: int,
        log: str | os.PathLike[str] | None,
    ) -> None:  # fmt: skip
        """Observe a strategy, a module that calls strategies, or a function that the loop calls through this object.

        Of a function, ``layout`` is the name, or the positions of this rank's tokens; ``stated`` are the options of
        `Strategy.attention` that say what it computes. ``log`` is the file of the first rank.
        """
        super().__init__()
        self.interval = every
        """Steps from one proof to the next."""
        self.proofs = 0
        """Number of proofs so far."""
        self.spent_ns = 0
        """Time that proofs, and planning the first, have cost this rank so far, in nanoseconds."""
        self._attention, self._every, self._memory_bytes = attention, every, memory_bytes
        self._layout, self._stated, self._log = layout, stated, AppendedLog(log, chained=True)
        self._next: int | None = None
        """Step of the next proof; None until the first is planned."""
        self._ranks: GroupRanks | None = None
        if isinstance(attention, Strategy):
            group = attention.comm.group if group is None else group
        if not isinstance(attention, nn.Module):
            self._ranks = GroupRanks(group)
        self._group = group
        self._calls = self._calls_per_step = self._inside = 0
        self._armed, self._problem = False, ""
        self._capture: _Capture | None = None
        self._position_ids: Tensor | None = None
        self._batch: list[int] = []
        self._shapes: tuple[torch.Size, torch.Size, torch.Size, torch.device] | None = None
        """Shapes of q, k and v, and their device, in the last call."""
        self._cost, self._last_step_ns, self._step_ns = 0, time.perf_counter_ns(), list[int]()
        self._observing = ExitStack()
        if isinstance(attention, (Strategy, nn.Module)):
            self._observe(attention)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Any:
        """Call the attention; return what it returns."""
        function = self._attention.attention if isinstance(self._attention, Strategy) else self._attention
        return self._call(None, function, q, k, v, args, options)

    def close(self) -> None:
        """Stop observing; drop what has been captured."""
        self._hook.remove()
        self._observing.close()
        self._capture = None
        if not self.proofs:
            why = "no call of an attention was seen"
            if self._shapes is not None:
                why = f"the first was due after step {self._next}, when its cost is 1 % of the time"
                why = why if self._next else f"the first is planned after step {min(self._every - 1, STEPS_BEFORE)}"
                why = why if self.steps else "no optimizer took a step, and step() was not called"
            _log.warning("no proof in %d steps: %s", self.steps, why)

    # --- capture ------------------------------------------------------------------------------

    def _observe(self, target: Strategy | nn.Module) -> None:
        """Observe the calls of a strategy, or of all strategies while the module's forward pass runs."""
        original, shard = Strategy.attention, Strategy.shard

        @uncompiled
        def observed_shard(strategy: Strategy, x: Tensor, dim: int = 1, **options: Any) -> Tensor:
            if self._armed and threading.current_thread() is threading.main_thread() and not x.is_floating_point():
                begin = time.perf_counter_ns()
                self._batch.append(checksum([x]))
                self._cost += time.perf_counter_ns() - begin
            return shard(strategy, x, dim, **options)

        @uncompiled
        def observed(strategy: Strategy, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
            if strategy is not target and not self._inside:
                return original(strategy, q, k, v, **options)
            return self._call(strategy, original.__get__(strategy), q, k, v, (), options)

        Strategy.attention = observed  # type: ignore[method-assign, assignment]
        Strategy.shard = observed_shard  # type: ignore[method-assign, assignment]
        self._observing.callback(setattr, Strategy, "attention", original)
        self._observing.callback(setattr, Strategy, "shard", shard)
        if isinstance(target, nn.Module):

            def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
                self._inside += 1
                ids = kwargs.get("position_ids", kwargs.get("positions"))
                self._position_ids = ids if isinstance(ids, Tensor) and ids.dim() in (1, 2) else None

            def after(*_: Any) -> None:
                self._inside -= 1

            for hook in (
                target.register_forward_pre_hook(before, with_kwargs=True),
                target.register_forward_hook(after, always_call=True),
            ):
                self._observing.callback(hook.remove)

    def _call(
        self, strategy: Strategy | None, function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor,
        args: tuple[Any, ...], options: dict[str, Any],
    ) -> Any:  # fmt: skip
        """Call the attention, and capture the call if its turn has come."""
        self._calls += 1
        if self._ranks is None and strategy is not None:
            self._ranks = GroupRanks(strategy.comm.group if self._group is None else self._group)
        self._shapes = q.shape, k.shape, v.shape, q.device
        wanted = self._armed and self._capture is None and not self._problem
        if not wanted or self._calls - 1 != self.proofs % max(1, self._calls_per_step):
            return function(q, k, v, *args, **options)
        begin = time.perf_counter_ns()
        # Aliases, whose gradients come from this call alone.
        q, k, v = (x.view_as(x) for x in (q, k, v))
        sent: list[SentInCall] = []
        if strategy is None:
            with record_sent(sent):
                returned = function(q, k, v, *args, **options)
        else:
            before = {key: list(entry) for key, entry in strategy.comm.meter.sent.items()}
            returned = function(q, k, v, *args, **options)
            sent.append(_sent_since(strategy, before))
        called = time.perf_counter_ns()
        try:
            out = returned[0] if isinstance(returned, (tuple, list)) else returned
            self._capture = self._captured(strategy, options, q, k, v, out)
            self._capture.sent = sent[0] if sent else None
        except Exception as error:  # must not end the training; reported at the end of the step
            self._problem = f"the call was not captured: {type(error).__name__}: {error}"
        # Starting torch's profiler in a call counts, too.
        self._cost += time.perf_counter_ns() - (begin if strategy is None else called)
        return returned

    def _captured(
        self, strategy: Strategy | None, options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> _Capture:
        """Copy one sequence and one kv head of a call, and of the gradients as the backward pass brings them."""
        kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
        row, head = self.proofs % q.shape[0], self.proofs % kv_heads
        heads = slice(head * group, (head + 1) * group)

        def part(x: Tensor, *, of_keys: bool = False) -> Tensor:
            # Under autocast the attention casts its inputs to the type of the output.
            return x.detach()[row, :, head if of_keys else heads].to(out.dtype, copy=True)

        options = {**options, "row": row, "head": head}
        if isinstance(options.get("sinks"), Tensor):
            options["sinks"] = options["sinks"].detach()[heads].clone()
        capture = _Capture(strategy, options, part(q), part(k, of_keys=True), part(v, of_keys=True), {"out": part(out)})
        capture.position_ids = self._position_ids
        if out.requires_grad and not options.get("return_lse"):

            def keep(name: str, *, of_keys: bool = False) -> Callable[[Tensor], None]:
                def hook(gradient: Tensor) -> None:
                    if name == "dout":
                        capture.dout = part(gradient)
                    else:
                        capture.results[name] = part(gradient, of_keys=of_keys)

                return hook

            untyped: Any = out
            untyped.register_hook(keep("dout"))
            for name, x in (("dq", q), ("dk", k), ("dv", v)):
                untyped = x
                if x.requires_grad:
                    untyped.register_hook(keep(name, of_keys=name != "dq"))
        return capture

    # --- proof --------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Count one step; prove what it captured, and prepare the next capture if it is due."""
        self.steps += 1
        begin = time.perf_counter_ns()
        if self._armed:
            try:
                self._prove()
            except Exception as error:  # a proof that fails must not end the training
                _log.warning("step %d: the proof failed: %s: %s", self.steps, type(error).__name__, error)
                self._next = self.steps + self.interval
            self._capture, self._problem, self._armed, self._batch = None, "", False, []
        else:
            self._step_ns = [*self._step_ns[-31:], begin - self._last_step_ns]
        self._calls_per_step, self._calls = self._calls, 0
        if self._ranks is not None and self._shapes is not None:
            if self._next is None and self.steps >= min(self._every - 1, STEPS_BEFORE):
                self._next = self._plan_first(self._ranks)
            if self._next is not None and self.steps + 1 >= self._next:
                self._armed, self._cost = True, 0
        self._last_step_ns = time.perf_counter_ns()

    def _plan_first(self, ranks: GroupRanks) -> int:
        """Return the first step at which a proof is estimated to cost at most 1 % of the time so far. Collective."""
        begin = time.perf_counter_ns()
        assert self._shapes is not None
        try:
            estimate = round(1e9 * _estimated_s(*self._shapes, ranks.size))
        except Exception:  # tensors of unknown order: the first proof says so
            estimate = 0
        rows = gather_numbers([interval_for(estimate, max(1, round(median(self._step_ns))), 1)], ranks)
        self.spent_ns += time.perf_counter_ns() - begin
        return max(self.steps + 1, *(int(row[0]) for row in rows))

    def _prove(self) -> None:
        """Compare what the step captured on all ranks. Collective.

        Every rank makes the same collectives whatever fails on it: memory for them is allocated before the first, in
        which each rank says whether it can take part, and nothing between them may raise.
        """
        begin, ranks = time.perf_counter_ns(), self._ranks
        assert ranks is not None
        problem: _Problem | None = None
        try:
            ready, problem = self._prepare(ranks)
        except Exception as error:  # also torch.OutOfMemoryError
            ready = _Ready(self._problem or f"{type(error).__name__}: {error}")
        by_rank = ranks.gather_structs(ready)
        line: JsonObject = {"step": self.steps, "time": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"}
        calls = self._calls_per_step
        line |= {"ranks": ranks.numbers, "call": self.proofs % max(1, calls), "calls": calls}
        numbered = zip(ranks.numbers, by_rank, strict=True)
        text = next((f"rank {number}: {other.problem}" for number, other in numbered if other.problem), "")
        text = text or "the ranks' calls have different shapes or options" * (len({x.key for x in by_rank}) > 1)
        step_ns = max(1, round(median(self._step_ns))) if self._step_ns else 1
        if problem is not None and not text:
            problem.backward = all(other.backward for other in by_rank)
            line |= self._compare(problem, ranks)
            batches = [x.batch for x in by_rank]
            line["batch"] = batches.count(batches[0]) == len(batches) if all(batches) else None
        ranks.finish()
        cost = self._cost + time.perf_counter_ns() - begin
        rows = gather_numbers([interval_for(cost, step_ns, self._every), cost], ranks)
        self.spent_ns += cost
        self.interval = int(max(row[0] for row in rows))
        self._next = self.steps + self.interval
        self.proofs += 1
        line |= {"problem": line.get("problem") or text or None, "took_ms": max(row[1] for row in rows) / 1e6}
        line |= {"step_ms": step_ns / 1e6, "interval": self.interval}
        if ranks.rank == 0:
            verdict = _verdict(line)
            level = logging.INFO if verdict.startswith("equal") else logging.WARNING
            _log.log(level, "step %d: %s", self.steps, verdict)
            self._log.add(line)

    def _prepare(self, ranks: GroupRanks) -> tuple[_Ready, _Problem]:
        """Describe the captured call for the other ranks, and allocate the memory of its proof."""
        capture = self._capture
        if capture is None:
            raise RuntimeError(self._problem or "no attention was called in the step")
        options, local = capture.options, len(capture.q)
        seq, device = local * ranks.size, capture.q.device
        if capture.strategy is None:
            documents = options.get("cu_seqlens", options.get("documents"))
            layout = self._layout
            positions = LAYOUTS[layout].positions(seq, ranks.size, ranks.rank) if isinstance(layout, str) else layout
            positions = positions.to(device)
            options |= {**self._stated, "softmax_scale": options.get("softmax_scale", self._stated["softmax_scale"])}
        else:
            documents = options.get("documents")
            positions = capture.strategy.positions(seq, device, documents=documents)
        mask = Mask.of(documents, options.get("window_size", (-1, -1)), causal=options.get("causal", True),
                       prefix=options.get("prefix", 0))  # fmt: skip
        mask.check(seq)
        backward = capture.dout is not None and {"dq", "dk", "dv"} <= capture.results.keys()
        d, e = capture.k.shape[1], capture.v.shape[1]
        problem = _Problem(
            capture, mask, positions, capture.k.new_empty(seq, d), capture.v.new_empty(seq, e),
            torch.zeros(2, seq, d + e, dtype=torch.float64, device=device),
            torch.empty(seq, dtype=torch.int64, device=device),
        )  # fmt: skip
        scalars = {name: options.get(name) for name in ("softmax_scale", "softcap", "row", "head")}
        return _Ready(
            "", f"{tuple(capture.q.shape)} {capture.q.dtype} {mask} {scalars}", backward, self._batch
        ), problem

    def _compare(self, problem: _Problem, ranks: GroupRanks) -> JsonObject:
        """Gather keys, compute dense attention of this rank's rows, and compare. Collective."""
        capture = problem.capture
        for whole, own in (
            (problem.order, problem.positions), (problem.keys, capture.k), (problem.values, capture.v)
        ):  # fmt: skip
            if ranks.size > 1:
                dist.all_gather(list(whole.chunk(ranks.size)), own.contiguous(), group=ranks.group)
            else:
                whole.copy_(own)
        weights, unused = torch.zeros(2, ranks.size, dtype=torch.float64)
        failed = ""
        try:
            exact = self._dense(problem, ranks, weights, rounds=False)
            rounded = self._dense(problem, ranks, unused, rounds=True)
        except Exception as error:  # the other ranks wait in the next collective
            failed = f"{type(error).__name__}: {error}"
        if problem.backward and ranks.size > 1:
            dist.all_reduce(problem.sums, group=ranks.group)
        result = _RankResult(failed=failed)
        try:
            if not failed:
                others = weights.clone()
                others[ranks.rank] = 0
                partition, position_ids = _partition(problem)
                result = _RankResult(
                    errors=_errors(problem, exact, rounded, ranks), partition=partition, position_ids=position_ids,
                    sent=None if capture.sent is None else capture.sent.size_bytes, peers=int((others > 0).sum()),
                    peer_weight=round(float(others.sum() / (weights.sum() or 1.0)), 6),
                )  # fmt: skip
        except Exception as error:
            result = _RankResult(failed=f"{type(error).__name__}: {error}")
        by_rank = ranks.gather_structs(result)
        failing = [f"rank {n}: {x.failed}" for n, x in zip(ranks.numbers, by_rank, strict=True) if x.failed]
        if failing:
            return {"problem": f"the proof failed on {failing[0]}"}
        errors: dict[str, JsonObject] = {}
        for name in by_rank[0].errors:
            # An error that is not a number counts as the largest.
            excess = [_excess(*x.errors[name][:2]) for x in by_rank]
            worst = excess.index(max(excess))
            rms, allowed, kernel = by_rank[worst].errors[name]
            errors[name] = {"rms": rms, "allowed": allowed, "kernel": kernel, "rank": worst}
        fed = [x.position_ids for x in by_rank]
        return {
            "seq": len(problem.order), "dtype": str(capture.q.dtype).split(".")[-1], "mask": str(problem.mask),
            "row": capture.options["row"], "kv_head": capture.options["head"],
            "equal": all(_excess(x["rms"], x["allowed"]) <= 1 for x in errors.values()), "errors": errors,
            "partition": all(x.partition for x in by_rank), "position_ids": None if None in fed else all(fed),
            "sent_bytes": [x.sent for x in by_rank], "peers": [x.peers for x in by_rank],
            "peer_weight": [x.peer_weight for x in by_rank],
        }  # fmt: skip

    def _dense(self, problem: _Problem, ranks: GroupRanks, weights: Tensor, *, rounds: bool) -> dict[str, Tensor]:
        """Compute dense attention of this rank's rows in float64, and add its dk and dv to ``problem.sums``.

        ``weights`` receives the softmax weight on each rank's keys. With ``rounds``, the weights, their gradients and
        the output are rounded to the input's type, as a kernel rounds them.
        """
        capture, options = problem.capture, problem.capture.options
        local, group, size = capture.q.shape
        k, v = problem.keys.double(), problem.values.double()
        scale = size**-0.5 if options.get("softmax_scale") is None else options["softmax_scale"]
        softcap, sinks = options.get("softcap") or 0.0, options.get("sinks")
        step = max(1, self._memory_bytes // (8 * NUMBERS_PER_SCORE * len(k) * group))
        results: dict[str, list[Tensor]] = {"out": [], "dq": []}

        def stored(x: Tensor) -> Tensor:
            return x.to(capture.q.dtype).double() if rounds else x

        for first in range(0, local, step):
            rows = slice(first, first + step)
            q = capture.q[rows].double().flatten(0, 1)
            seen = KeyStretches.of(problem.mask, problem.positions[rows], len(k)).shown(problem.order)
            p, slope = masked_scores(q @ k.T * scale, seen.repeat_interleave(group, 0), softcap)
            if sinks is not None:
                p = torch.cat([p, sinks.double().repeat(len(p) // group)[:, None]], 1)
            p = torch.softmax(p, 1).nan_to_num(0.0)[:, : len(k)]
            weights += p.view(len(p), ranks.size, -1).sum((0, 2)).cpu()
            used = stored(p)
            out = stored(used @ v)
            results["out"].append(out)
            if not problem.backward:
                continue
            assert capture.dout is not None
            dout = capture.dout[rows].double().flatten(0, 1)
            dscores = p * (dout @ v.T - (dout * out).sum(1, keepdim=True)) * scale
            dscores = stored(dscores * slope)
            results["dq"].append(dscores @ k)
            problem.sums[int(rounds), :, :size] += dscores.T @ q
            problem.sums[int(rounds), :, size:] += used.T @ dout
        return {name: torch.cat(parts) for name, parts in results.items() if parts}


def _estimated_s(of_q: torch.Size, of_k: torch.Size, of_v: torch.Size, device: torch.device, ranks: int) -> float:
    """Estimate the time in seconds of the first proof of a call with these shapes, rather too long than too short.

    It is the sum of: float64 products, exact and rounded, forward and backward; passes over the scores; gathered keys
    and summed gradients; and a fixed time for collectives and what is loaded with its first use.
    """
    seq, numbers = of_k[1] * ranks, of_k[3] + of_v[3]
    scores = of_q[1] * (of_q[2] // of_k[2]) * seq
    if device.type != "cuda":
        flops_per_s, bytes_per_s, fixed_s = 1e9 * torch.get_num_threads(), 5e9, 0.05
    else:
        # Of NVIDIA's GPUs, only those of version x.0 compute float64 fast.
        fast = torch.cuda.get_device_capability(device)[1] == 0
        flops_per_s, bytes_per_s, fixed_s = 1e13 if fast else 3e11, 1e12 if fast else 3e11, 0.3
    return (
        12 * scores * numbers / flops_per_s + 8 * PASSES_OVER_SCORES * scores / bytes_per_s
        + 3 * 8 * seq * numbers / GATHERED_PER_S + fixed_s
    )  # fmt: skip


def _excess(rms: float | None, allowed: float) -> float:
    """Return an error over its tolerance: infinite where it is not finite."""
    return math.inf if rms is None else rms / (allowed or 1.0)


def _errors(
    problem: _Problem, exact: dict[str, Tensor], rounded: dict[str, Tensor], ranks: GroupRanks
) -> dict[str, tuple[float | None, float, float]]:
    """Return error, tolerance and rounding error of each result on this rank."""
    capture, size = problem.capture, problem.capture.q.shape[2]
    if problem.backward:
        own = problem.sums.chunk(ranks.size, 1)[ranks.rank]
        for sums, results in zip(own, (exact, rounded), strict=True):
            results |= {"dk": sums[:, :size], "dv": sums[:, size:]}
    unit = torch.finfo(capture.q.dtype).eps / 2
    floor = SINGLE_FLOOR * unit if capture.q.dtype in (torch.float32, torch.float64) else 0.0
    errors = {}
    for name, truth in exact.items():
        rms = relative_rms(capture.results[name].double().reshape(truth.shape) - truth, truth)
        kernel = relative_rms(rounded[name] - truth, truth)
        kernel = kernel if math.isfinite(kernel) else 0.0  # then the error is not finite, either
        allowed = ERROR_FACTOR * math.sqrt(kernel**2 + (ranks.size > 1) * ranks.size * unit**2 / 3)
        errors[name] = rms if math.isfinite(rms) else None, max(allowed, floor), kernel
    return errors


def _partition(problem: _Problem) -> tuple[bool, bool | None]:
    """Return whether the ranks' positions partition the sequence, and whether the model was called with this rank's.

    The latter is None where the model was called without ``position_ids`` per token. They may restart with a document.
    """
    expected = torch.arange(len(problem.order), device=problem.order.device)
    partition = torch.equal(problem.order.sort().values, expected)
    ids, positions = problem.capture.position_ids, problem.positions
    if ids is None or ids.shape[-1] != len(positions):
        return partition, None
    ids = ids.detach().view(-1, len(positions))
    ids = ids[problem.capture.options["row"] % len(ids)].to(positions)
    within = positions_in_documents(positions, problem.mask.documents)
    return partition, torch.equal(ids, positions) or torch.equal(ids, within)


def _sent_since(strategy: Strategy, before: dict[Any, list[int]]) -> SentInCall:
    """Return what a strategy has sent since its meter read ``before``."""
    operations: dict[str, int] = {}
    size = 0
    for key, (count, size_bytes) in strategy.comm.meter.sent.items():
        old_count, old_bytes = before.get(key, (0, 0))
        if count > old_count:
            operations[key[2]] = operations.get(key[2], 0) + count - old_count
            size += size_bytes - old_bytes
    return SentInCall(operations=operations, size_bytes=size)


def _verdict(line: JsonObject) -> str:
    """Describe a proof in one sentence."""
    if line["problem"]:
        return f"no proof: {line['problem']}"
    name, worst = max(line["errors"].items(), key=lambda item: _excess(item[1]["rms"], item[1]["allowed"]))
    size = "not finite" if worst["rms"] is None else f"off by {worst['rms']:.1e}"
    off = f"{name} of call {line['call']} is {size} (allowed {worst['allowed']:.1e})"
    wrong = [
        f"NOT EQUAL to dense attention: {off} on rank {worst['rank']}" if not line["equal"] else "",
        "" if line["partition"] else "the ranks' positions do not partition the sequence",
        "the model is called with other position_ids than its tokens have" if line["position_ids"] is False else "",
        "the ranks have different batches" if line["batch"] is False else "",
        "nothing was sent" if len(line["ranks"]) > 1 and not any(x is None or x for x in line["sent_bytes"]) else "",
    ]
    unchecked = {"position_ids": "the model's position_ids", "batch": "whether the ranks have the same batch"}
    names = " and ".join(what for name, what in unchecked.items() if line[name] is None and len(line["ranks"]) > 1)
    equal = f"equal to dense attention over {line['seq']} tokens: {off}{'; not seen: ' * bool(names)}{names}"
    return "; ".join(filter(None, wrong)) or equal
