"""Verification after timing, at the timed length: sampled rows of the last timed results against dense attention.

The verification before timing (`ringprof.proof.verify`) uses a short sequence, because its reference is dense. A
strategy may be wrong only with longer blocks, or from the second call on. So after timing, every rank verifies the
results of its last timed iteration:

* output and gradients are finite;
* with a deterministic kernel, the last output has the same bits as the first one at this length;
* output and dQ of `SAMPLED_ROWS` random query rows per rank, of all heads, equal attention over the whole sequence;
* dK and dV of `SAMPLED_ROWS` random keys per rank, on one kv head, equal the sum over all query rows. Their LSE and
  delta are computed here for that head, and not taken from the strategy. With a batch of one, so is the gradient of
  that head's sinks.

Prefill and decode have an output alone: that of `SAMPLED_ROWS` rows of each rank is compared, of `SEQUENCES` sequences,
for every kv head whose query heads the rank returns.

Whole sequences are gathered for one head at a time, and their scores are computed block by block. Errors are relative
over the sampled rows of one rank, with the bound of the verification before timing. The kernel's own error may grow
with the length. It is that of one call over the whole sequence on the kv head of the keys, and at least one unit
roundoff. If there are so many ranks that this call would cost more than `MOST_ITERATIONS` iterations, and over a cache,
the kernel's own error is that of the verification before timing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ringprof.errors import VerificationError
from ringprof.iteration.resolve import layout_options
from ringprof.iteration.shard import DynamicCpShard, Measurement, Results, WorkloadShard
from ringprof.proof.dense import SEED, gather_numbers, kernel_results, relative_rms, severity, whole_block
from ringprof.proof.verify import add_timed, repeats_first, roundings, size_in_words, summed_over_ranks, verify
from ringprof.ranks.process_group import GroupRanks, gather_tensor
from ringprof.run import TensorError, TimedVerification, Verification
from ringprof.strategies.kernels.reference import KeyStretches, masked_scores
from ringprof.workload.workload import Workload

SAMPLED_ROWS = 16
SEQUENCES = 2
BLOCK_NUMBERS = {"cpu": 2**22, "cuda": 2**25}
"""Number of scores that are computed at a time, by device type; memory holds a few copies of them."""
KEYS_AT_A_TIME = 8192
MOST_ITERATIONS = 2


def verify_timed(
    shard: WorkloadShard, first_rows: Tensor, last: Results, workload: Workload, before: Verification
) -> Verification:
    """Verify the last timed results and add the outcome to ``before``, the verification before timing.

    ``first_rows`` are the `row_sums` of the first output at this length, ``last`` the results of the last timed
    iteration. Collective: every rank must call this, and gets the same answer. Raises `VerificationError`, which names
    the worst rank and tensor, if a result is wrong.
    """
    begin = time.perf_counter_ns()
    ending = f"in the last timed iteration, {size_in_words(workload)}; nothing was recorded"
    same = repeats_first({name: x.detach() for name, x in vars(last).items() if x is not None}, first_rows, ending)
    head, kernel_rms = 0, dict[str, float]()
    if workload.kv_length is not None:
        places, measured, expected = _compared_over_cache(shard, last.out, workload)
    else:
        if not same and shard.strategy.parameters.get("deterministic"):
            raise VerificationError(
                f"wrong result: the last timed output is not the first's to the bit, at sequence {workload.seq}, though"
                " the kernel is deterministic; nothing was recorded"
            )
        head = int(torch.randint(workload.kv_heads, (), generator=torch.Generator().manual_seed(SEED)))
        sample = _RowSample(shard, workload)
        places, measured = sample.count, sample.select_results(last, head)
        expected = sample.reference_rows() | (sample.reference_keys(head) if workload.backward else {})
        for name, x in sample.kernel_rows(head).items():
            one_head = expected[name].shape[2] == 1 or name == "dsinks"
            exact = expected[name] if one_head else expected[name][:1, :, sample.heads(head)]
            kernel_rms[name] = relative_rms(x.double() - exact, exact)
    hops = partial(roundings, strategy=shard.strategy, sinks=workload.sinks is not None)
    return add_timed(
        before, measured, expected, kernel_rms, hops, workload, begin, ending, places=places, kv_head=head,
        same_output=same,
    )  # fmt: skip


def softmax_rows(
    q: Tensor, k: Tensor, v: Tensor, seen: KeyStretches, scale: float, dtype: torch.dtype, softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output (R, E) and LSE (R) of query rows (R, D) over keys (S, D) and values (S, E), in ``dtype``.

    Computes block by block. ``sinks`` are one additional logit per row (R), whose value vector is 0.
    """
    q = q.to(dtype) * scale
    out, lse = q.new_zeros(len(q), v.shape[1]), torch.full_like(q[:, 0], float("-inf"))
    if sinks is not None:
        lse = sinks.to(dtype)
    for keys, scores, _ in _scores(q, k, seen, softcap):
        block = torch.logsumexp(scores, 1)
        total = torch.logaddexp(lse, block)
        # A row may attend none of the keys so far.
        base = total.masked_fill(total.isneginf(), 0)
        out = out * (lse - base).exp()[:, None] + (scores - base[:, None]).exp_() @ v[keys].to(dtype)
        lse = total
    return out, lse


def _scores(q: Tensor, k: Tensor, seen: KeyStretches, softcap: float) -> Iterator[tuple[slice, Tensor, Tensor | float]]:
    """Yield blocks of keys, the scores of all rows with them, and the derivative of the scores by the uncapped ones.

    Leaves out keys at both ends that no row attends.
    """
    first, end = seen.bounds()
    step = max(1, BLOCK_NUMBERS[q.device.type] // len(q))
    for start in range(first, end, step):
        keys = slice(start, min(start + step, end))
        shown = seen.shown(torch.arange(start, keys.stop, device=q.device))
        yield keys, *masked_scores(q @ k[keys].to(q.dtype).T, shown, softcap)


class _RowSample:
    """Sample of rows and keys of every rank, and the results of dense attention for them."""

    def __init__(self, shard: WorkloadShard, workload: Workload) -> None:
        self._shard, self._workload = shard, workload
        self._comm, self._device = shard.strategy.comm, shard.q.device
        self._group = workload.heads // workload.kv_heads
        self._scale: float = workload.head_dim**-0.5
        self._softcap, self._sinks = workload.softcap or 0.0, shard.sinks
        self._mask = workload.mask()
        self._positions = shard.strategy.positions(workload.seq, **layout_options(workload)).to(self._device)
        self.count = min(SAMPLED_ROWS, len(self._positions))
        generator = torch.Generator().manual_seed(SEED + self._comm.rank)
        chosen = torch.randperm(len(self._positions), generator=generator)[: self.count]
        self._chosen = chosen.sort().values.to(self._device)

    def select_results(self, results: Results, head: int) -> dict[str, Tensor]:
        """Return the sampled part of ``results``, in the shapes of `reference_rows` and `reference_keys`."""
        selected = {"out": self._select(results.out)}
        if results.dq is not None and results.dk is not None and results.dv is not None:
            selected["dq"] = self._select(results.dq)
            selected |= {
                name: self._select(x)[:1, :, head : head + 1] for name, x in (("dk", results.dk), ("dv", results.dv))
            }
        if results.dsinks is not None and self._workload.batch == 1:
            selected["dsinks"] = summed_over_ranks(results.dsinks)[None, None, self.heads(head), None]
        return selected

    def _sink_logits(self, heads: slice, rows: int) -> Tensor | None:
        """Return one logit per head and row for ``rows`` rows of each of the heads, ordered by head."""
        return None if self._sinks is None else self._sinks.detach()[heads].repeat_interleave(rows)

    def _select(self, x: Tensor) -> Tensor:
        """Return the sampled rows (B, rows, H, D) of a local tensor (B, S, H, D)."""
        return x.detach()[:, self._chosen]

    def heads(self, kv_head: int) -> slice:
        """Return the query heads of a kv head."""
        return slice(kv_head * self._group, (kv_head + 1) * self._group)

    def kernel_rows(self, head: int) -> dict[str, Tensor]:
        """Return the sampled part of one kernel call over the whole sequence; empty if that would take too long.

        The call computes one kv head of the first batch entry.
        """
        workload, shard = self._workload, self._shard
        if self._comm.size * self._group > MOST_ITERATIONS * workload.heads:
            return {}
        q, k, v = (self._gather(x, 0, self.heads(head) if x is shard.q else slice(head, head + 1))[None]
                   for x in (shard.q, shard.k, shard.v))  # fmt: skip
        dout = None if shard.dout is None else self._gather(shard.dout, 0, self.heads(head))[None]
        sinks = None if self._sinks is None else self._sinks[self.heads(head)]
        results = kernel_results(shard.kernel().again(), q, k, v, dout, whole_block(workload), sinks=sinks)
        return {name: x if name == "dsinks" else x[:, self._positions[self._chosen]] for name, x in results.items()}

    def reference_rows(self) -> dict[str, Tensor]:
        """Compute the output and, with a backward pass, dQ of the sampled rows (B, rows, H, D), in float64."""
        shard = self._shard
        q = self._select(shard.q).double()
        results = {"out": q.new_empty(*q.shape[:3], shard.v.shape[3])}
        results |= {"dq": torch.empty_like(q)} if shard.dout is not None else {}
        seen = self._keys_seen_from(self._positions[self._chosen])
        for batch in range(self._workload.batch):
            for head in range(self._workload.kv_heads):
                (k, v), heads = self._gather_keys_values(batch, head), self.heads(head)
                rows = _by_head(q[batch, :, heads])
                sinks = self._sink_logits(heads, self.count)
                out, lse = softmax_rows(rows, k, v, seen, self._scale, torch.float64, self._softcap, sinks)
                results["out"][batch, :, heads] = self._by_row(out)
                if shard.dout is not None:
                    dout = _by_head(self._select(shard.dout)[batch, :, heads].double())
                    results["dq"][batch, :, heads] = self._by_row(self._dq(rows, k, v, dout, out, lse, seen))
        return results

    def _dq(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor, seen: KeyStretches
    ) -> Tensor:
        dq, delta = torch.zeros_like(q), (dout * out).sum(1, keepdim=True)
        for keys, scores, slope in _scores(q * self._scale, k, seen, self._softcap):
            weights = (scores - lse[:, None]).exp_()
            dq += (slope * weights * (dout @ v[keys].double().T - delta)) @ k[keys].double()
        return dq * self._scale

    def _by_row(self, x: Tensor) -> Tensor:
        """Reshape (heads · rows, D) into (rows, heads, D)."""
        return x.view(self._group, self.count, -1).transpose(0, 1)

    def reference_keys(self, head: int) -> dict[str, Tensor]:
        """Compute dK and dV (1, rows, 1, D) of the sampled keys on one kv head of the first batch entry, in float64.

        Every rank sums the contributions of its own query rows to the sampled keys of all ranks. Collective.
        """
        assert self._shard.dout is not None
        (k, v), heads = self._gather_keys_values(0, head), self.heads(head)
        sampled_positions = torch.cat(gather_tensor(self._positions[self._chosen], self._comm.group))
        keys, values = k[sampled_positions].double(), v[sampled_positions].double()
        dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
        dsinks = torch.zeros(self._group, dtype=torch.float64, device=self._device)
        # With 16-bit inputs the errors to be found are far larger than those of float32.
        dtype = torch.float32 if self._shard.q.element_size() == 2 else torch.float64
        step = max(1, BLOCK_NUMBERS[self._device.type] // max(len(sampled_positions), KEYS_AT_A_TIME) // self._group)
        for start in range(0, len(self._positions), step):
            rows = slice(start, start + step)
            q, dout = (_by_head(x.detach()[0, rows, heads]) for x in (self._shard.q, self._shard.dout))
            seen = self._keys_seen_from(self._positions[rows])
            sinks = self._sink_logits(heads, len(self._positions[rows]))
            out, lse = softmax_rows(q, k, v, seen, self._scale, dtype, self._softcap, sinks)
            q, dout, out, lse = q.double(), dout.double(), out.double(), lse.double()
            scores, slope = masked_scores(q @ keys.T * self._scale, seen.shown(sampled_positions), self._softcap)
            weights = (scores - lse[:, None]).exp_()
            delta = (dout * out).sum(1, keepdim=True)
            dk += (slope * weights * (dout @ values.T - delta)).T @ q * self._scale
            dv += weights.T @ dout
            if sinks is not None:
                dsinks -= ((sinks.double() - lse).exp() * delta.squeeze(1)).view(self._group, -1).sum(1)
        results = {}
        for name, total in (("dk", dk), ("dv", dv)):
            dist.all_reduce(total, group=self._comm.group)
            results[name] = total[self._comm.rank * self.count :][None, : self.count, None]
        if self._sinks is not None and self._workload.batch == 1:
            dist.all_reduce(dsinks, group=self._comm.group)
            results["dsinks"] = dsinks[None, None, :, None]
        return results

    def _keys_seen_from(self, positions: Tensor) -> KeyStretches:
        """Return the keys that all query heads of a kv head attend from these positions."""
        return KeyStretches.of(self._mask, positions, self._workload.seq).repeated(self._group)

    def _gather_keys_values(self, batch: int, head: int) -> Iterator[Tensor]:
        """Gather keys and values (S, D) of one kv head from all ranks, in sequence order. Collective."""
        return (self._gather(x, batch, slice(head, head + 1))[:, 0] for x in (self._shard.k, self._shard.v))

    def _gather(self, x: Tensor, batch: int, heads: slice) -> Tensor:
        """Gather some heads of a batch entry of a tensor from all ranks, in sequence order: (S, heads, D)."""
        # gloo does not support every dtype, so the bytes are gathered.
        own_bytes = x.detach()[batch, :, heads].contiguous().view(torch.uint8)
        gathered: Tensor = self._shard.strategy.unshard(own_bytes, 0, **layout_options(self._workload))
        return gathered.view(x.dtype)


def _by_head(x: Tensor) -> Tensor:
    """Reshape (rows, heads, D) into (heads · rows, D)."""
    return x.transpose(0, 1).flatten(0, 1)


def _compared_over_cache(
    shard: WorkloadShard, out: Tensor, workload: Workload
) -> tuple[int, dict[str, Tensor], dict[str, Tensor]]:
    """Return sampled numbers of this rank's output, and those of dense attention, from some rows of some sequences.

    The first item is the number of pairs of a kv head and a sequence. Collective.
    """
    strategy, keys, group = shard.strategy, workload.kv_length or 0, workload.heads // workload.kv_heads
    own_heads = strategy.heads(workload.heads, workload.kv_heads)
    of_queries, returned = (
        range(*heads.indices(workload.heads)) for heads in (own_heads.queries, own_heads.returned)
    )  # fmt: skip
    kv_heads = range(*own_heads.kv.indices(workload.kv_heads))
    key_positions = strategy.key_positions(keys, workload.seq).to(out.device)
    ranks = gather_numbers([kv_heads.start, len(key_positions)], GroupRanks(None))
    most_keys = int(max(count for _, count in ranks))
    padded = functional.pad(key_positions, (0, most_keys - len(key_positions)), value=-1)
    # Keep only ranks with the same kv heads: others hold the same positions of other heads.
    positions_by_rank = {
        rank: rank_positions[rank_positions >= 0]
        for rank, rank_positions in enumerate(gather_tensor(padded))
        if ranks[rank][0] == kv_heads.start
    }

    def gathered_head(x: Tensor, batch: int, number: int) -> Tensor:
        """Gather keys or values (kv_length, D) of one of this rank's heads, in sequence order. Collective."""
        own_rows = functional.pad(x[batch, :, number], (0, 0, 0, most_keys - x.shape[1]))
        # gloo does not support every dtype, so the bytes are gathered.
        pieces = gather_tensor(own_rows.contiguous().view(torch.uint8))
        gathered = own_rows.new_full((keys, own_rows.shape[1]), float("nan"))
        for rank, positions in positions_by_rank.items():
            gathered[positions] = pieces[rank].view(own_rows.dtype)[: len(positions)]
        return gathered

    queries = shard.q
    if returned != of_queries:
        # Gather the queries of the returned heads. Ranks with the same query heads have the same queries, so their sum
        # is divided by their number.
        total = queries.new_zeros((*queries.shape[:2], workload.heads, queries.shape[3]), dtype=torch.float64)
        count = queries.new_zeros(workload.heads, dtype=torch.float64)
        total[:, :, own_heads.queries], count[own_heads.queries] = queries.double(), 1
        dist.all_reduce(total)
        dist.all_reduce(count)
        queries = (total / count[:, None])[:, :, own_heads.returned]
    generator = torch.Generator().manual_seed(SEED)
    rows = torch.randperm(out.shape[1], generator=generator)[:SAMPLED_ROWS].sort().values.to(out.device)
    positions = keys - workload.seq + strategy.query_positions(workload.seq).to(out.device)[rows]
    seen = KeyStretches.of(workload.mask(), positions, keys)
    measured, expected = list[Tensor](), list[Tensor]()
    for number, kv_head in enumerate(kv_heads):
        heads = [index for index, head in enumerate(returned) if head // group == kv_head]
        for batch in torch.randperm(workload.batch, generator=generator)[:SEQUENCES].tolist():
            k, v = (gathered_head(x, batch, number) for x in (shard.k, shard.v))
            if heads:
                q, own_rows = (_by_head(x[batch][rows][:, heads].double()) for x in (queries, out))
                sinks = None if shard.sinks is None else shard.sinks[heads].repeat_interleave(len(rows))
                scores = workload.head_dim**-0.5, torch.float64, workload.softcap or 0.0, sinks
                measured.append(own_rows.flatten())
                expected.append(softmax_rows(q, k, v, seen.repeated(len(heads)), *scores)[0].flatten())
    return len(measured), {"out": torch.cat(measured)}, {"out": torch.cat(expected)}


# --- steps of dynamic context parallelism -------------------------------------------------------------


def verify_steps(dynamic: Any, workload: Workload, sizes: tuple[int, ...], device: torch.device) -> Verification:
    """Verify the strategy of every size before timing, all groups of ranks at once; see `ringprof.proof.verify`.

    Raises `VerificationError`.
    """
    return _merge(
        [verify(dynamic.of(size), workload.step(dynamic.comm.size // size), device) for size in dict.fromkeys(sizes)]
    )


def verify_timed_steps(shard: DynamicCpShard, measured: Measurement, before: Verification) -> Verification:
    """Verify the last timed result of every step; see `ringprof.proof.verify_timed`. Raises `VerificationError`."""
    assert measured.last is not None
    rows = measured.first_rows.chunk(len(shard.steps), 1)
    return _merge([
        verify_timed(step, rows[number], shard.results_of_step(measured.last, number), workload, before)
        for number, (step, workload) in enumerate(zip(shard.steps, shard.workloads, strict=True))
    ])  # fmt: skip


def _merge(verifications: list[Verification]) -> Verification:
    """Merge verifications: keep each tensor's error nearest its bound, and the lengths of the longest sequence."""
    longest = max(verifications, key=lambda verification: (verification.timed or verification).seq)
    timed = [verification.timed for verification in verifications if verification.timed is not None]
    merged_timed = longest.timed and msgspec.structs.replace(
        longest.timed, errors=_worst_errors(timed), took_ns=sum(verification.took_ns for verification in timed),
        same_output=all(verification.same_output for verification in timed),
    )  # fmt: skip
    return msgspec.structs.replace(longest, errors=_worst_errors(verifications), timed=merged_timed)


def _worst_errors(verifications: Sequence[Verification | TimedVerification]) -> dict[str, TensorError]:
    """Return each tensor's error that is nearest its bound."""
    names = verifications[0].errors
    return {name: max((verified.errors[name] for verified in verifications), key=severity) for name in names}
