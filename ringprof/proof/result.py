"""Requests and results of checks of attentions and models: plain values that ranks exchange as JSON, without torch."""

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
        work, differs = self.workload, not (self.errors and all(error.equal for error in self.errors.values()))
        lines = [
            f"{'equal' if self.equal else 'NOT EQUAL'} to dense attention over {work.seq} tokens: {self.ranks}"
            f" rank{'s' * (self.ranks > 1)}, {work.seq // self.ranks} tokens each, {self.layout},"
            f"{f' batch {work.batch},' * (work.batch > 1)} {work.heads_in_words()}, {work.mask()}, {work.dtype},"
            f" {self.device}",
            f"call {self.call} of {self.calls}"
            + (f" ({self.variant})" if self.variant else ", the first that is not equal" * differs)
            + ", relative root-mean-square errors:",
        ]  # fmt: skip
        if self.errors:
            lines.append(f"  {'':4}{'off by':>10}{'allowed':>10}{'kernel':>10}  worst     wrong tokens")
        lines += [f"  {name:4}{_error_in_words(error, work.seq)}" for name, error in self.errors.items()]
        lines += [*([str(self.seen)] if self.seen else []), sent_in_words(self.sent, "a call")]
        lines += [f"skipped: {reason}" for reason in self.skipped]
        return "\n".join([*lines, *(f"why: {reason}" for reason in self.reasons)])


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


# --- check of a model ---------------------------------------------------------------------------------


class ParameterCheck(TensorError, frozen=True, kw_only=True):
    """Error of one parameter's gradient, on the rank where it is largest."""

    ratio: float
    """Factor of the reference's gradient that fits best; 1 where the gradients are equal."""
    residual: float
    """Relative error that remains after the reference's gradient is multiplied by ``ratio``."""


class ModuleDifference(msgspec.Struct, frozen=True, kw_only=True):
    """First module, in the order in which the reference's modules return, whose output differs."""

    name: str
    """Qualified name in the model; empty for the model itself."""
    after: str | None
    """Last module before it, whose output is equal; None where there is none."""
    error: TensorCheck


class ModelCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a check of a model, the same on all ranks; ``str(check)`` is the text that the command prints."""

    equal: bool
    """Whether the tokens are partitioned, and logits, loss and every gradient equal the reference's."""
    ranks: int
    batch: tuple[int, int]
    """Rows and tokens per row of the whole batch."""
    dtype: str
    device: str
    logits: TensorCheck | None
    """Error of the model's output per token; None where the tokens cannot be compared."""
    modules: int
    """Number of modules whose output was compared."""
    first_difference: ModuleDifference | None
    loss: float | None
    """Loss of the reference; None where a step returns none."""
    losses: list[float]
    """Loss that each rank returned."""
    loss_is: str | None
    """How the ranks' losses make up the reference's, such as ``mean``; None where they do not."""
    parameters: dict[str, ParameterCheck]
    """Errors of the gradients after the step's own reduction, by the parameter's qualified name."""
    sent: list[SentInCall] | None
    """Data sent in the model's forward pass, by rank; None where another profiler was running."""
    reasons: list[str]
    """Explanations of a difference, one sentence each; empty where none is known."""

    @property
    def wrong_parameters(self) -> dict[str, ParameterCheck]:
        """Parameters whose gradient differs from the reference's."""
        return {name: error for name, error in self.parameters.items() if not error.rms <= error.allowed_rms}

    def __str__(self) -> str:
        rows, seq = self.batch
        lines = [
            f"{'equal' if self.equal else 'NOT EQUAL'} to one process: {self.ranks} rank{'s' * (self.ranks > 1)},"
            f" {rows} x {seq} tokens, {self.dtype}, {self.device}, relative root-mean-square errors:"
        ]
        if self.logits is not None:
            lines.append(f"  {'':10}{'off by':>10}{'allowed':>10}  wrong")
            lines.append(f"  {'logits':10}{self.logits.rms:10.2e}{self.logits.allowed_rms:10.2e}  "
                         f"{self._wrong_tokens(self.logits)}")  # fmt: skip
        if self.parameters:
            name, worst = max(
                self.parameters.items(), key=lambda item: item[1].rms / item[1].allowed_rms if item[1].rms else 0.0
            )
            wrong = len(self.wrong_parameters)
            lines.append(f"  {'gradients':10}{worst.rms:10.2e}{worst.allowed_rms:10.2e}  {wrong or 'none'} of"
                         f" {len(self.parameters)} parameters, {'the' if wrong else 'largest error:'}"
                         f"{' worst is' * bool(wrong)} {name}")  # fmt: skip
        if self.loss is not None:
            losses = ", ".join(f"{loss:.6g}" for loss in self.losses[:8])
            relation = f"their {self.loss_is} is equal" if self.loss_is else "NOT EQUAL"
            lines.append(f"loss: {losses} by rank, reference {self.loss:.6g}: {relation}")
        if self.first_difference is not None:
            first = self.first_difference
            after = f", after {first.after}, which is equal" if first.after else ""
            lines.append(f"first difference: {first.name or 'the model'}{after}: {self._wrong_tokens(first.error)}")
        lines.append(sent_in_words(self.sent, "the forward pass"))
        return "\n".join([*lines, *(f"why: {reason}" for reason in self.reasons)])

    def _wrong_tokens(self, error: TensorCheck) -> str:
        if error.first_token is None:
            return "none" if error.equal else f"all a little, most on rank {error.rank}"
        rows, seq = self.batch
        return (
            f"{error.wrong_tokens} of {rows * seq} tokens, the first is"
            f" {token_in_words(error.first_token, self.batch)} on rank {error.first_rank}"
        )


def token_in_words(token: int, batch: tuple[int, int]) -> str:
    """Name a token by its position, and by its row where the batch has several; ``token`` counts over all rows."""
    rows, seq = batch
    return f"token {token % seq}" + f" of row {token // seq}" * (rows > 1)
