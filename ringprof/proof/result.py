"""Requests and results of a check, as plain values that ranks exchange as JSON. Imports no torch."""

from __future__ import annotations

import math

import msgspec

from ringprof.common.formatting import three_digits
from ringprof.run import TensorError
from ringprof.workload.workload import Workload

TENSOR_FORMATS = ("bshd", "bhsd", "sbhd")
CALLS = 3
BATCH, HEADS, KV_HEADS = 2, 8, 2
"""Default sizes. Several batch entries and grouped heads, so that mistakes with either show."""
TIME_LIMIT_S = 300.0


class CheckRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One check as the user requested it; None stands for a default that depends on the machine.

    For a model, only ``target``, ``time_limit``, ``device`` and ``world`` have a meaning.
    """

    target: str = ""
    """``module:function`` where ringprof starts the ranks."""
    of_model: bool = False
    """Whether the function returns parallel step, reference and batch, and is no attention."""
    layout: str = ""
    """``contiguous``, ``zigzag`` or ``stripe``; ``positions`` where each rank states which tokens it holds."""
    batch: int | None = None
    """None: `BATCH`."""
    seq: int | None = None
    heads: int | None = None
    """None: `HEADS`, with `KV_HEADS` kv heads unless ``kv_heads`` says otherwise."""
    kv_heads: int | None = None
    """None: as many as ``heads`` where these are given."""
    head_dim: int = 64
    dtype: str = "bf16"
    causal: bool = True
    documents: tuple[int, ...] | None = None
    """Lengths of the documents that the sequence packs; None: one."""
    window: int | None = None
    """Sliding-window length in tokens, defined as in `Workload`; None: no window."""
    prefix: int | None = None
    """Number of first tokens of a document that are always visible, defined as in `Workload`; None: none."""
    softmax_scale: float | None = None
    backward: bool = True
    tensor_format: str = "bshd"
    calls: int = CALLS
    extra_calls: bool = True
    """Whether to add a call with large scores, and one in fp32."""
    time_limit: float = TIME_LIMIT_S
    """Seconds that a rank waits for the others after a call or a step."""
    device: str = "auto"
    world: int | None = None


class TensorCheck(TensorError, frozen=True, kw_only=True):
    """Error of one tensor relative to dense attention, over all ranks and per token."""

    wrong_tokens: int
    """Number of tokens, over all ranks, whose error is larger than rounding explains."""
    first_token: int | None
    """Position in the sequence of the first wrong token."""
    first_rank: int | None
    """Rank that holds the first wrong token."""

    @property
    def equal(self) -> bool:
        """Whether rounding explains the whole difference."""
        return self.rms <= self.allowed_rms and not self.wrong_tokens


class SentInCall(msgspec.Struct, frozen=True, kw_only=True):
    """Data that one rank sent in one call, forward and backward, as recorded by torch's profiler."""

    operations: dict[str, int]
    """Number of torch.distributed calls that send, by name."""
    size_bytes: int | None
    """Total size of the tensors passed to these calls; None where the sizes are unknown."""


class QueryAndKey(msgspec.Struct, frozen=True, kw_only=True):
    """Positions of a query and a key in the sequence, and the rank that holds the query."""

    query: int
    key: int
    rank: int


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of the keys that queries see, whatever their weight, with the mask, over all ranks."""

    pairs: int
    """Number of (query, key) pairs that were tried."""
    of: int
    """Number of all (query, key) pairs."""
    leaks: int
    """Number of pairs that the mask hides and the attention sees."""
    first_leak: QueryAndKey | None
    missing: int
    """Number of pairs that the mask shows and the attention does not see."""
    first_missing: QueryAndKey | None

    @property
    def right(self) -> bool:
        """Whether every tried query sees exactly the keys that the mask shows."""
        return not self.leaks + self.missing

    def __str__(self) -> str:
        deviations = [
            f"{count} {relation} (the first: token {pair.query} on rank {pair.rank}, key {pair.key})"
            for count, relation, pair in (
                (self.leaks, "seen that the mask hides", self.first_leak),
                (self.missing, "not seen that the mask shows", self.first_missing),
            )
            if pair
        ]
        tried = "" if self.pairs == self.of else f" ({100 * self.pairs / self.of:.1f} % of all)"
        return (
            f"seen: of {self.pairs} pairs of a query and a key{tried} {', '.join(deviations) or 'all as the mask says'}"
        )


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a check, the same on all ranks; ``str(check)`` is the text that the command prints."""

    equal: bool
    """Whether every call's output and gradients equal dense attention, and queries see the keys that the mask shows."""
    workload: Workload
    ranks: int
    layout: str
    device: str
    calls: int
    call: int
    """The call that is reported, counted from 1: the first that is not equal, else the one with the largest error."""
    errors: dict[str, TensorCheck]
    """Errors of the reported call: ``out``, and with a backward pass ``dq``, ``dk``, ``dv``.

    Empty where the output has another shape.
    """
    sent: list[SentInCall] | None
    """Data sent in the last call, by rank; None where another profiler was running."""
    seen: Seen | None
    """Keys that queries see; None where the output has another shape, or differs from call to call."""
    reasons: list[str]
    """Explanations of a wrong result, one sentence each; empty where none is known."""
    variant: str = ""
    """How the reported call differs from the first ones, such as ``fp32``; empty where it does not."""
    skipped: list[str] = []
    """Reasons why calls were left out, one sentence each."""

    @property
    def communicates(self) -> bool | None:
        """Whether any rank sent anything; None where another profiler was running."""
        return None if self.sent is None else any(rank.operations for rank in self.sent)

    def __str__(self) -> str:
        work = self.workload
        lines = [
            f"{'equal' if self.equal else 'NOT EQUAL'} to dense attention over {work.seq} tokens: {self.ranks}"
            f" rank{'s' * (self.ranks > 1)}, {work.seq // self.ranks} tokens each, {self.layout},"
            f"{f' batch {work.batch},' * (work.batch > 1)} {work.heads_in_words()}, {work.mask()}, {work.dtype},"
            f" {self.device}",
            f"call {self.call} of {self.calls}"
            + (f" ({self.variant})" if self.variant else ", the first that is not equal" * self._differs)
            + ", relative root-mean-square errors:",
        ]  # fmt: skip
        if self.errors:
            lines.append(f"  {'':4}{'off by':>10}{'allowed':>10}{'kernel':>10}  worst     wrong tokens")
        lines += [f"  {name:4}{_error_in_words(error, work.seq)}" for name, error in self.errors.items()]
        lines += [*([str(self.seen)] if self.seen else []), sent_in_words(self.sent, "a call")]
        lines += [f"skipped: {reason}" for reason in self.skipped]
        return "\n".join([*lines, *(f"why: {reason}" for reason in self.reasons)])

    @property
    def _differs(self) -> bool:
        return not (self.errors and all(error.equal for error in self.errors.values()))


def sent_in_words(sent: list[SentInCall] | None, where: str) -> str:
    """Format the line about the data that each rank sent in ``where``, such as ``a call``."""
    if sent is None:
        return "sent: not seen (another profiler is running)"
    if len(sent) == 1:
        return "sent: one rank has nobody to send to"
    if not any(rank.operations for rank in sent):
        return f"sent: nothing, by torch.distributed, in {where}"
    busiest = max(sent, key=lambda rank: (rank.size_bytes or 0, sum(rank.operations.values())))
    calls = ", ".join(f"{count} {name}" for name, count in sorted(busiest.operations.items()))
    silent = [str(number) for number, rank in enumerate(sent) if not rank.operations]
    size = "" if busiest.size_bytes is None else f"{three_digits(busiest.size_bytes / 2**20)} MiB, "
    return f"sent by a rank in {where}: {size}{calls}" + (f"; nothing by rank {', '.join(silent)}" * bool(silent))


def _error_in_words(error: TensorCheck, seq: int) -> str:
    """Format one row of the table of errors."""
    if not math.isfinite(error.rms):
        numbers = f"{'not finite':>10}"
    else:
        numbers = f"{error.rms:10.2e}"
    line = f"{numbers}{error.allowed_rms:10.2e}{error.kernel_rms:10.2e}  {f'rank {error.rank}':9}"
    if not error.wrong_tokens:
        return f"{line} none"
    return f"{line} {error.wrong_tokens} of {seq}, the first is token {error.first_token} on rank {error.first_rank}"
