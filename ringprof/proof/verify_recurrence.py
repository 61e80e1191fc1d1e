"""Verification of recurrences, before and after timing, on the ranks that are timed.

Before timing, a short sequence is compared as a whole: output, every gradient, the final state and the gradient of the
initial state, against the recurrence in float64 (`ringprof.proof.recurrences`): token by token on CPU, in chunks
on a GPU, a form that tests hold against the one token by token. The bounds are those of `ringprof.proof.dense`:
the kernel alone is the strategy's own kernel over the whole sequence on one device. A wrong result is compared with
those of known mistakes, and the message names the one that it equals.

After timing, every rank compares its share of the last timed results for one head of keys, and all heads of values that
read it, of the first batch entry; of all entries where parameters have gradients, which are sums over the batch. The
reference is the chunkwise recurrence in float64 over the whole sequence, which tests hold against the one token by
token. Results must also be finite. The error of the kernel alone is that of the check before timing, except in plain
torch, where it is that of one call over the whole sequence.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from ringprof.iteration.layer import LayersShard
from ringprof.iteration.recurrence import (
    SHARED,
    RecurrenceResults,
    RecurrenceShard,
    call_operator,
    draw_inputs,
    select_group,
    single_rank_strategy,
)
from ringprof.iteration.resolve import torch_dtype
from ringprof.proof.dense import (
    SEED,
    TOKENS_PER_RANK,
    allowed_rms,
    compare_results,
    gather_numbers,
    relative_rms,
)
from ringprof.proof.recurrences import ChunkedRecurrence, DenseRecurrence, mistakes
from ringprof.proof.result import TensorCheck
from ringprof.proof.verify import add_timed, raise_if_wrong, repeats_first, size_in_words, summed_over_ranks
from ringprof.ranks.process_group import GroupRanks, gather_tensor
from ringprof.run import TensorError, Verification
from ringprof.strategies.recurrent.state_strategies import StateA2A
from ringprof.workload.recurrences import Operator
from ringprof.workload.workload import Workload

MOST_TOKENS = 2048
"""Most tokens that are compared token by token before timing, unless the ranks are more."""
MATCH_FACTOR = 1.5
"""A result equals that of a mistake if its error against it is at most this many times the error allowed otherwise."""
_MOST_ITERATIONS = 2
_STATES = ("final_state", "dinitial_state")


def verify_recurrence(strategy: Any, workload: Workload, device: torch.device) -> Verification:
    """Verify a strategy before it is timed. Collective: every rank must call this, and gets the same answer.

    Raises `VerificationError`, which names the worst rank and tensor and, where it is known, the mistake.
    """
    world = strategy.comm.size
    tokens = min(max(1, MOST_TOKENS // world), TOKENS_PER_RANK[device.type], workload.seq // world)
    workload = workload.at(world * max(tokens, (workload.conv_width or 1) - 1))
    check = _ShortCheck(strategy, workload, device)
    errors = check.compare()
    wrong = {name for name, error in errors.items() if not error.equal}
    ending = f"{size_in_words(workload)}; nothing was timed" + (check.reason(wrong) if wrong else "")
    return Verification(passed=True, seq=workload.seq, errors=raise_if_wrong(errors, ending))


class _ShortCheck:
    """Comparison of a short sequence with the recurrence in float64: token by token on CPU, in chunks on a GPU."""

    def __init__(self, strategy: Any, workload: Workload, device: torch.device) -> None:
        self._strategy, self._workload, self._device = strategy, workload, device
        self._world, self._rank = strategy.comm.size, strategy.comm.rank
        generator = torch.Generator().manual_seed(SEED)
        self._full = draw_inputs(workload, workload.seq, torch.device("cpu"), generator)
        shape = (workload.batch, workload.heads, workload.head_dim, workload.value_dim)

        def normal(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator)

        self._full |= {"initial_state": normal(*shape)} if strategy.takes_states else {}
        self._full = {name: x.to(device) for name, x in self._full.items()}
        self._dout = normal(workload.batch, workload.seq, workload.heads, workload.value_dim).to(torch_dtype(workload))
        self._dfinal = normal(*shape)
        self._results = self._over_ranks()
        # Token by token, a GPU would wait for the launches of some 100,000 kernels.
        exact = ChunkedRecurrence() if device.type == "cuda" else DenseRecurrence()
        self._exact = self._share(self._whole(exact, torch.float64))
        kernel = single_rank_strategy(strategy.kernel_name)
        self._kernel = self._share(self._whole(kernel, None))

    def compare(self) -> dict[str, TensorCheck]:
        """Return the errors over all ranks. Collective."""
        local = self._workload.seq // self._world
        positions = torch.arange(local, device=self._device) + self._rank * local
        by_rank = [f"d{name}" for name in SHARED]
        return compare_results(
            self._results, self._exact, self._kernel, positions, torch_dtype(self._workload),
            self._hops, GroupRanks(None), not_by_token=(*by_rank, *_STATES),
        )[0]  # fmt: skip

    def reason(self, wrong: set[str]) -> str:
        """Return which known mistake gives the wrong results, to be appended to a sentence; empty if none. Collective.

        A mistake must give all wrong tensors of the pass on every rank.
        """
        ranks, dtype = GroupRanks(None), torch_dtype(self._workload)
        outputs = wrong & {"out", "final_state"}
        names = outputs or wrong
        kernel_rms = {name: relative_rms(self._kernel[name] - self._exact[name], self._exact[name]) for name in names}
        limits = {name: MATCH_FACTOR * allowed_rms(kernel_rms[name], dtype, self._hops(name)) for name in names}
        for sentence, mistaken in mistakes(self._world, backward=not outputs):
            # Forward mistakes are compared by their outputs alone, which take no gradients.
            whole = self._share(self._whole(mistaken, torch.float64, backward=not outputs))
            matches = all(
                relative_rms(self._results[name].double() - whole[name], self._exact[name]) <= limits[name]
                for name in names
            )
            if all(row[0] for row in gather_numbers([float(matches)], ranks)):
                return f"; the result equals that of a known mistake: {sentence}"
        return ""

    def _hops(self, name: str) -> int:
        """Return how often a tensor is rounded to the input's type between ranks."""
        workload = self._workload
        if self._world == 1 or name in ("out", *_STATES):
            return 0
        repeated = isinstance(self._strategy, StateA2A) and workload.kv_heads % self._world
        return self._world if name.removeprefix("d") in SHARED or repeated else 0

    def _over_ranks(self) -> dict[str, Tensor]:
        """Run the strategy over the ranks, and return this rank's results by name."""
        local = self._workload.seq // self._world
        own = slice(self._rank * local, (self._rank + 1) * local)
        whole = (*SHARED, "initial_state")
        inputs = {name: x if name in whole else x[:, own].contiguous() for name, x in self._full.items()}
        # The gradient of the final state is a sum over the ranks, here in unequal shares.
        share = 2 * (self._rank + 1) / (self._world * (self._world + 1))
        gradients = (self._dout[:, own], self._dfinal * share) if self._workload.backward else ()
        results = _run(self._strategy, self._workload, inputs, None, *gradients)
        for name in [name for name in results if name.removeprefix("d") in whole]:
            results[name] = summed_over_ranks(results[name])
        return _with_heads(results)

    def _whole(self, target: Any, dtype: torch.dtype | None, *, backward: bool = True) -> dict[str, Tensor]:
        """Run ``target`` over the whole sequence, in ``dtype`` (None: the inputs' own)."""
        gradients = (self._dout, self._dfinal) if backward and self._workload.backward else ()
        return _run(target, self._workload, self._full, dtype, *gradients)

    def _share(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's share of results over the whole sequence."""
        local = self._workload.seq // self._world
        own = slice(self._rank * local, (self._rank + 1) * local)
        complete = (*(f"d{name}" for name in SHARED), *_STATES)
        return _with_heads({name: x if name in complete else x[:, own] for name, x in whole.items()})


def _with_heads(results: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the results with four dimensions each, as comparisons by token take them."""
    return {name: x.reshape(*x.shape, *[1] * (4 - x.dim())) for name, x in results.items()}


# --- after timing -------------------------------------------------------------------------------------


def verify_timed_recurrence(
    shard: RecurrenceShard, last: RecurrenceResults, first_rows: Tensor, before: Verification
) -> Verification:
    """Verify the last timed results and add the outcome to ``before``, the verification before timing.

    ``first_rows`` are the `row_sums` of the first output. Collective: every rank must call this, and gets the same
    answer. Raises `VerificationError`, which names the worst rank and tensor, if a result is wrong.
    """
    begin, workload = time.perf_counter_ns(), shard.workload
    ending = f"in the last timed iteration, {size_in_words(workload)}; nothing was recorded"
    results = {name: x.detach() for name, x in last.named().items()}
    same = repeats_first(results, first_rows, ending)
    group = int(torch.randint(workload.kv_heads, (), generator=torch.Generator().manual_seed(SEED)))
    output_gradient = {} if shard.dout is None else {"dout": shard.dout}
    own, one_group = select_group(workload, {**shard.inputs, **output_gradient, **results}, group)
    sums = [name for name in own if name.removeprefix("d") in SHARED and name not in SHARED]
    for name in sums:
        own[name] = summed_over_ranks(own[name])
    gathered = {
        name: x if name in SHARED else torch.cat(gather_tensor(x.detach().contiguous()), 1)
        for name, x in own.items() if name in shard.inputs or name == "dout"
    }  # fmt: skip
    dout = [gathered.pop("dout")] if "dout" in gathered else []
    exact = _run(ChunkedRecurrence(), one_group, gathered, torch.float64, *dout)
    rank, local = shard.strategy.comm.rank, workload.seq // shard.strategy.comm.size
    share = slice(rank * local, (rank + 1) * local)
    kernel_rms = dict[str, float]()
    iterations = shard.strategy.comm.size * one_group.heads * one_group.batch / (workload.heads * workload.batch)
    # A Triton kernel would be compiled for the one head: minutes. Its error is that of the check before timing.
    if iterations <= _MOST_ITERATIONS and shard.kernel().name == "reference":
        kernel_alone = _run(single_rank_strategy("reference"), one_group, gathered, None, *dout)
        kernel_rms = {name: relative_rms(x.double() - exact[name], exact[name]) for name, x in kernel_alone.items()}
    expected = {name: x if name in sums else x[:, share] for name, x in exact.items()}
    return add_timed(
        before, own, expected, kernel_rms, lambda name: shard.strategy.comm.size if name in sums else 0, workload,
        begin, ending, places=local, kv_head=group, same_output=same,
    )  # fmt: skip


def _run(
    target: Any, workload: Workload, inputs: Mapping[str, Tensor], dtype: torch.dtype | None, *gradients: Tensor
) -> dict[str, Tensor]:
    """Compute a recurrence over the given tokens, in ``dtype`` (None: the inputs' own); return its results by name.

    ``gradients`` are those of the output and of the final state; without them there is no backward pass. With an input
    ``initial_state`` there is a final state.
    """
    leaves = {name: x.detach().to(dtype or x.dtype).requires_grad_(bool(gradients)) for name, x in inputs.items()}
    operands = dict(leaves)
    initial = operands.pop("initial_state", None)
    options = {} if initial is None else {"initial_state": initial, "return_final_state": True}
    with torch.set_grad_enabled(bool(gradients)):
        result = call_operator(target, workload, operands, **options)
    outputs = result if isinstance(result, tuple) else (result,)
    results = dict(zip(("out", "final_state"), (x.detach() for x in outputs), strict=False))
    if gradients:
        of_outputs = [x.to(y) for x, y in zip(gradients, outputs, strict=False)]
        of_leaves = torch.autograd.grad(outputs, list(leaves.values()), of_outputs, allow_unused=True)
        # An initial state that a first document of no tokens leaves unused has no gradient.
        results |= {
            f"d{name}": torch.zeros_like(leaf) if x is None else x
            for (name, leaf), x in zip(leaves.items(), of_leaves, strict=True)
        }
    return results


# --- verification of the recurrences in a pattern of layers, beside that of their attention ---


def recurrences_of(workload: Workload) -> list[Workload]:
    """Return the recurrences of a workload's pattern, one for each operator; empty without a pattern."""
    operators = dict.fromkeys(workload.pattern if workload.layer else ())
    return [part for operator in operators if (part := workload.part(operator)) and part.recurrent]


def join_verifications(attention: Verification, recurrence: Verification, operator: Operator) -> Verification:
    """Add a recurrence's errors to those of attention, with the operator before their names: ``gdn dq``."""

    def joined(errors: dict[str, TensorError], others: dict[str, TensorError]) -> dict[str, TensorError]:
        return errors | {f"{operator} {name}": error for name, error in others.items()}

    timed, other = attention.timed, recurrence.timed
    if timed is not None and other is not None:
        timed = msgspec.structs.replace(
            timed, errors=joined(timed.errors, other.errors), took_ns=timed.took_ns + other.took_ns,
            same_output=timed.same_output and other.same_output,
        )  # fmt: skip
    errors = joined(attention.errors, recurrence.errors)
    return msgspec.structs.replace(attention, seq=min(attention.seq, recurrence.seq), errors=errors, timed=timed)


def verify_timed_layers(shard: LayersShard, before: Verification, attention: Verification) -> Verification:
    """Verify the first recurrence of each operator in the last timed iteration, and add it to that of attention.

    ``before`` is the verification before timing. Collective: every rank must call this, and gets the same answer.
    Raises `VerificationError`, which names the worst rank and tensor, if a result is wrong.
    """
    for operator, recurrence in shard.recurrences.items():
        prefix = f"{operator} "
        own = {name.removeprefix(prefix): error for name, error in before.errors.items() if name.startswith(prefix)}
        checked = verify_timed_recurrence(
            recurrence, shard.kept_results[operator], shard.first_rows[operator],
            msgspec.structs.replace(before, errors=own),
        )  # fmt: skip
        attention = join_verifications(attention, checked, operator)
    return attention
