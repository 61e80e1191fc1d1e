"""Result of the check of a whole model, as plain values that ranks exchange as JSON. Imports no torch."""

from __future__ import annotations

import msgspec

from ringprof.proof.result import SentInCall, TensorCheck, sent_in_words
from ringprof.run import TensorError


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
