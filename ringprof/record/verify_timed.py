"""Right at the length that was timed: the last timed iteration's own result, in places, against dense attention.

The check before timing (`ringprof.record.verify`) is short, since its reference is dense. A strategy may be wrong only
at longer blocks, or from the second call on. So after timing, every rank looks at what its last timed iteration left:

* all of output and gradients is finite;
* with a deterministic kernel, the last output has the same bits as the first at this length;
* output and dQ of `PLACES` random query rows a rank, of all heads, equal attention over the whole sequence;
* dK and dV of `PLACES` random keys a rank, on one kv head, equal the sum over all query rows, whose LSE and delta are
  computed here for that head, and not taken from the strategy; so does the gradient of that head's sinks, of a batch
  of one.

Whole sequences are there for one head at a time, and their scores block by block. An error is relative as in the check
before, over the places of one rank, with the same bound. The kernel's own error, which may grow with the length, is
that of one call over the whole sequence on the kv head of the keys, and counts with at least one unit roundoff. Where
ranks are so many that this would cost more than `MOST_ITERATIONS`, it is the one of the check before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from ringprof.errors import VerificationError
from ringprof.record.measure import Results, WorkloadShard, row_sums
from ringprof.record.process_group import gather_tensor
from ringprof.record.resolve import layout_options, torch_dtype
from ringprof.record.verify import (
    SEED,
    kernel_results,
    of_ranks,
    refuse_wrong,
    relative_rms,
    roundings,
    summed_over_ranks,
    whole_block,
    worst,
)
from ringprof.run import TimedVerification, Verification, Workload
from ringprof.strategies.kernels.builtin import KeyStretches, capped

PLACES = 16
BLOCK_NUMBERS = {"cpu": 2**22, "cuda": 2**25}
"""Scores that are computed at a time; some copies of them are held."""
KEYS_AT_A_TIME = 8192
MOST_ITERATIONS = 2


def verify_timed(
    problem: WorkloadShard, first_rows: Tensor, last: Results, workload: Workload, before: Verification
) -> Verification:
    """The check before timing with this one added; all ranks must call it, and all get the same answer.

    ``first_rows`` are the `row_sums` of the first output at this length, ``last`` what the last timed iteration
    returned. Raises `VerificationError` naming the worst rank and tensor where a result is wrong.
    """
    begin = time.perf_counter_ns()
    same = same_as_first(problem, first_rows, last, workload.seq)
    if not same and problem.strategy.parameters.get("deterministic"):
        raise VerificationError(
            f"wrong result: the last timed output is not the first's to the bit, at sequence {workload.seq}, though"
            " the kernel is deterministic; nothing was recorded"
        )
    head = int(torch.randint(workload.kv_heads, (), generator=torch.Generator().manual_seed(SEED)))
    places = _Places(problem, workload)
    measured = places.in_results(last, head)
    expected = places.of_rows() | (places.of_keys(head) if workload.backward else {})
    alone = places.of_kernel(head)
    unit = torch.finfo(torch_dtype(workload)).eps / 2
    errors = {}
    for name, reference in expected.items():
        difference = measured[name].double() - reference
        kernel_rms = before.errors[name].kernel_rms
        if name in alone:
            one_head = reference.shape[2] == 1 or name == "dsinks"
            there = reference if one_head else reference[:1, :, places.heads(head)]
            kernel_rms = relative_rms(alone[name].double() - there, there)
        row = [float(difference.abs().max()), relative_rms(difference, reference), max(kernel_rms, unit)]
        rows, hops = of_ranks(row, problem.q.device), roundings(name, problem.strategy)
        errors[name] = worst(rows, torch_dtype(workload), hops)
    refuse_wrong(errors, f"in the last timed iteration, at sequence {workload.seq}; nothing was recorded")
    timed = TimedVerification(
        seq=workload.seq, places=places.count, kv_head=head, same_output=same, errors=errors,
        took_ns=time.perf_counter_ns() - begin,
    )  # fmt: skip
    return msgspec.structs.replace(before, timed=timed)


def softmax_rows(
    q: Tensor, k: Tensor, v: Tensor, seen: KeyStretches, scale: float, wide: torch.dtype, softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output (R, E) and LSE (R) of query rows (R, D) over whole keys (S, D) and values (S, E), in ``wide``.

    Block by block; ``sinks`` are one more logit a row (R), of value 0.
    """
    q = q.to(wide) * scale
    out, lse = q.new_zeros(len(q), v.shape[1]), torch.full_like(q[:, 0], float("-inf"))
    if sinks is not None:
        lse = sinks.to(wide)
    for keys, scores, _ in _scores(q, k, seen, softcap):
        block = torch.logsumexp(scores, 1)
        total = torch.logaddexp(lse, block)
        # A row may see none of these keys yet.
        base = total.masked_fill(total.isneginf(), 0)
        out = out * (lse - base).exp()[:, None] + (scores - base[:, None]).exp_() @ v[keys].to(wide)
        lse = total
    return out, lse


def _scores(q: Tensor, k: Tensor, seen: KeyStretches, softcap: float) -> Iterator[tuple[slice, Tensor, Tensor | float]]:
    """Blocks of keys, the scores of all rows against them, and how fast these rise with what softcap is put on.

    Keys at the ends that no row sees are left out.
    """
    first, end = seen.bounds()
    step = max(1, BLOCK_NUMBERS[q.device.type] // len(q))
    for start in range(first, end, step):
        keys = slice(start, min(start + step, end))
        scores, slope = _capped(q @ k[keys].to(q.dtype).T, softcap)
        scores.masked_fill_(~seen.shown(torch.arange(start, keys.stop, device=q.device)), float("-inf"))
        yield keys, scores, slope


def _capped(scores: Tensor, softcap: float) -> tuple[Tensor, Tensor | float]:
    """The scores with softcap, and the derivative of each by what it was."""
    if not softcap:
        return scores, 1.0
    scores = capped(scores, softcap)
    return scores, 1 - (scores / softcap).square()


class _Whole(NamedTuple):
    """Keys and values (S, D) of one head and batch entry, in their order in the sequence."""

    k: Tensor
    v: Tensor


class _Places:
    """Some rows and keys of every rank, and what dense attention has there."""

    def __init__(self, problem: WorkloadShard, workload: Workload) -> None:
        self._problem, self._workload = problem, workload
        self._strategy, self._device = problem.strategy, problem.q.device
        self._comm = problem.strategy.comm
        self._group = workload.heads // workload.kv_heads
        self._scale: float = workload.head_dim**-0.5
        self._softcap, self._sinks = workload.softcap or 0.0, problem.sinks
        self._mask, shared = workload.mask(), layout_options(workload)
        self._positions = self._strategy.positions(workload.seq, **shared).to(self._device)
        self._layout = self._strategy.layout_of(**shared) if shared else self._strategy.layout
        self.count = min(PLACES, len(self._positions))
        generator = torch.Generator().manual_seed(SEED + self._comm.rank)
        chosen = torch.randperm(len(self._positions), generator=generator)[: self.count]
        self._chosen = chosen.sort().values.to(self._device)

    def in_results(self, results: Results, head: int) -> dict[str, Tensor]:
        """What a rank's results have in its places, as `of_rows` and `of_keys` return it."""
        found = {"out": self._at(results.out)}
        if results.dq is not None and results.dk is not None and results.dv is not None:
            found["dq"] = self._at(results.dq)
            found |= {name: self._at(x)[:1, :, head : head + 1] for name, x in (("dk", results.dk), ("dv", results.dv))}
        if results.dsinks is not None and self._workload.batch == 1:
            found["dsinks"] = summed_over_ranks(results.dsinks)[None, None, self.heads(head), None]
        return found

    def _sinks_of(self, heads: slice, rows: int) -> Tensor | None:
        """The logit of each of so many rows of some heads, head after head."""
        return None if self._sinks is None else self._sinks.detach()[heads].repeat_interleave(rows)

    def _at(self, x: Tensor) -> Tensor:
        """The chosen rows of a local tensor (B, S, H, D): (B, places, H, D)."""
        return x.detach()[:, self._chosen]

    def heads(self, kv_head: int) -> slice:
        """The query heads of a kv head."""
        return slice(kv_head * self._group, (kv_head + 1) * self._group)

    def of_kernel(self, head: int) -> dict[str, Tensor]:
        """What one call of the kernel over the whole sequence has in this rank's places, on one kv head of the first
        batch entry; empty where that would take too long."""
        workload, problem = self._workload, self._problem
        if self._comm.size * self._group > MOST_ITERATIONS * workload.heads:
            return {}
        q, k, v = (self._whole(x, 0, self.heads(head) if x is problem.q else slice(head, head + 1))[None]
                   for x in (problem.q, problem.k, problem.v))  # fmt: skip
        dout = None if problem.dout is None else self._whole(problem.dout, 0, self.heads(head))[None]
        sinks = None if self._sinks is None else self._sinks[self.heads(head)]
        found = kernel_results(problem.kernel().again(), q, k, v, dout, whole_block(workload), sinks=sinks)
        return {name: x if name == "dsinks" else x[:, self._positions[self._chosen]] for name, x in found.items()}

    def of_rows(self) -> dict[str, Tensor]:
        """Output and, with a backward pass, dQ of the chosen rows (B, places, H, D), in float64."""
        problem = self._problem
        q = self._at(problem.q).double()
        found = {"out": q.new_empty(*q.shape[:3], problem.v.shape[3])}
        found |= {"dq": torch.empty_like(q)} if problem.dout is not None else {}
        at = self._seen_from(self._positions[self._chosen])
        for batch in range(self._workload.batch):
            for head in range(self._workload.kv_heads):
                whole, heads = self._keys(batch, head), self.heads(head)
                rows = by_head(q[batch, :, heads])
                sinks = self._sinks_of(heads, self.count)
                out, lse = softmax_rows(rows, whole.k, whole.v, at, self._scale, torch.float64, self._softcap, sinks)
                found["out"][batch, :, heads] = self._by_row(out)
                if problem.dout is not None:
                    dout = by_head(self._at(problem.dout)[batch, :, heads].double())
                    found["dq"][batch, :, heads] = self._by_row(self._dq(rows, dout, out, lse, whole, at))
        return found

    def _dq(self, q: Tensor, dout: Tensor, out: Tensor, lse: Tensor, whole: _Whole, at: KeyStretches) -> Tensor:
        dq, delta = torch.zeros_like(q), (dout * out).sum(1, keepdim=True)
        for keys, scores, slope in _scores(q * self._scale, whole.k, at, self._softcap):
            weights = (scores - lse[:, None]).exp_()
            dq += (slope * weights * (dout @ whole.v[keys].double().T - delta)) @ whole.k[keys].double()
        return dq * self._scale

    def _by_row(self, x: Tensor) -> Tensor:
        """(heads · places, D) -> (places, heads, D)."""
        return x.view(self._group, self.count, -1).transpose(0, 1)

    def of_keys(self, head: int) -> dict[str, Tensor]:
        """dK and dV (1, places, 1, D) of the chosen keys on one kv head of the first batch entry, in float64.

        Every rank adds up what its own query rows give to all ranks' chosen keys.
        """
        assert self._problem.dout is not None
        whole, heads = self._keys(0, head), self.heads(head)
        everywhere = torch.cat(gather_tensor(self._positions[self._chosen], self._comm.group))
        keys, values = whole.k[everywhere].double(), whole.v[everywhere].double()
        dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
        dsinks = torch.zeros(self._group, dtype=torch.float64, device=self._device)
        # What is looked for is far coarser than float32 where the inputs have 16 bits.
        wide = torch.float32 if self._problem.q.element_size() == 2 else torch.float64
        step = max(1, BLOCK_NUMBERS[self._device.type] // max(len(everywhere), KEYS_AT_A_TIME) // self._group)
        for start in range(0, len(self._positions), step):
            rows = slice(start, start + step)
            q, dout = (by_head(x.detach()[0, rows, heads]) for x in (self._problem.q, self._problem.dout))
            at = self._seen_from(self._positions[rows])
            sinks = self._sinks_of(heads, len(self._positions[rows]))
            out, lse = softmax_rows(q, whole.k, whole.v, at, self._scale, wide, self._softcap, sinks)
            q, dout, out, lse = q.double(), dout.double(), out.double(), lse.double()
            scores, slope = _capped(q @ keys.T * self._scale, self._softcap)
            scores.masked_fill_(~at.shown(everywhere), float("-inf"))
            weights = (scores - lse[:, None]).exp_()
            delta = (dout * out).sum(1, keepdim=True)
            dk += (slope * weights * (dout @ values.T - delta)).T @ q * self._scale
            dv += weights.T @ dout
            if sinks is not None:
                dsinks -= ((sinks.double() - lse).exp() * delta.squeeze(1)).view(self._group, -1).sum(1)
        found = {}
        for name, total in (("dk", dk), ("dv", dv)):
            dist.all_reduce(total, group=self._comm.group)
            found[name] = total[self._comm.rank * self.count :][None, : self.count, None]
        if self._sinks is not None and self._workload.batch == 1:
            dist.all_reduce(dsinks, group=self._comm.group)
            found["dsinks"] = dsinks[None, None, :, None]
        return found

    def _seen_from(self, positions: Tensor) -> KeyStretches:
        """What all heads of a group see from these positions."""
        return KeyStretches.of(self._mask, positions, self._workload.seq).repeated(self._group)

    def _keys(self, batch: int, head: int) -> _Whole:
        k, v = (self._whole(x, batch, slice(head, head + 1))[:, 0] for x in (self._problem.k, self._problem.v))
        return _Whole(k, v)

    def _whole(self, x: Tensor, batch: int, heads: slice) -> Tensor:
        """Some heads of a batch entry of all ranks' shares of a tensor, in the order of the sequence: (S, heads, D)."""
        # gloo does not know every type, but bytes are bytes.
        pieces = gather_tensor(x.detach()[batch, :, heads].contiguous().view(torch.uint8), self._comm.group)
        together = torch.cat(pieces).view(x.dtype)
        order = self._layout.order(self._workload.seq, self._comm.size).to(self._device)
        in_order: Tensor = torch.empty_like(together).index_copy_(0, order, together)
        return in_order


def by_head(x: Tensor) -> Tensor:
    """(rows, heads, D) -> (heads · rows, D)."""
    return x.transpose(0, 1).flatten(0, 1)


def same_as_first(problem: WorkloadShard, first_rows: Tensor, last: Results, seq: int) -> bool:
    """Whether the last output has the bits of the first on all ranks. Raises `VerificationError` where it has no
    number; leaves the device's memory to what comes next. Collective."""
    _refuse_not_finite(last, seq)
    same = of_ranks([torch.equal(first_rows, row_sums(last.out))], problem.q.device)
    if problem.q.device.type == "cuda":
        torch.cuda.empty_cache()
    return all(flag for (flag,) in same)


def _refuse_not_finite(results: Results, seq: int) -> None:
    named = {name: tensor.detach() for name, tensor in vars(results).items() if tensor is not None}
    bad = [int(not torch.isfinite(tensor).all()) for tensor in named.values()]
    for rank, flags in enumerate(of_ranks(bad, results.out.device)):
        for name in (name for name, wrong in zip(named, flags, strict=True) if wrong):
            raise VerificationError(
                f"wrong result on rank {rank}: {name} is not finite, in the last timed iteration, at sequence {seq};"
                " nothing was recorded"
            )
