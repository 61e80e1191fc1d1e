"""Operators that mix the tokens: softmax attention, and linear recurrences with their FLOPs.

A recurrence keeps a state of K x V numbers per head, with K the size of a key and V that of a value. Its FLOPs are
those of the chunkwise form with chunks of `CHUNK` tokens, in which GPUs compute it. Per token and head, forward:

    linear attention   C (K + V) for the pairs within a chunk, 4 K V to read and update the state
    gated delta rule   C (3 K + 2 V) for the pairs within a chunk, 6 K V to correct, read and update the state

A product over pairs within a chunk counts the C / 2 tokens that a token sees on average. The triangular system of the
delta rule, decays and gates are left out: they are no matrix products, or small beside them. The backward pass counts
twice the forward pass: two products for each of its products, and nothing that is computed again.

Sources: "Gated Delta Networks" (arXiv 2412.06464) for the chunkwise forms of both; "Transformers are
SSMs" (arXiv 2405.21060), section 6, for Mamba-2, which is linear attention with one decay per head.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Operator = Literal["attention", "gdn", "mamba2", "simple-gla", "gla"]
"""Operator that mixes the tokens: softmax attention, or a recurrence."""


class OperatorTraits(NamedTuple):
    """Facts about one operator, from which its tensors, parameters, FLOPs and words follow."""

    words: str
    """Name in sentences."""
    method: str = ""
    """Method of a strategy for recurrences that computes it; empty for attention."""
    delta_rule: bool = False
    """Whether a writing strength per head corrects the state, as in the gated delta rule."""
    state_space: bool = False
    """Whether its inputs are x, b and c of a state space model, whose layers in a pattern have one head of b and c."""
    channel_decay: bool = False
    """Whether each key channel has a decay, not each head."""
    convolution: int | None = None
    """Tokens that the convolution of a pattern's layers reads, as in Qwen3-Next; None: no convolution."""

    @property
    def recurrent(self) -> bool:
        """Whether it is a recurrence."""
        return bool(self.method)

    def gates(self, heads: int, key_dim: int) -> int:
        """Count a recurrence's decays and writing strengths per token."""
        return heads * (key_dim if self.channel_decay else 2 if self.delta_rule else 1)


TRAITS: dict[Operator, OperatorTraits] = {
    "attention": OperatorTraits("attention"),
    "gdn": OperatorTraits("gated delta net", "gated_delta_rule", delta_rule=True, convolution=4),
    "mamba2": OperatorTraits("Mamba-2", "mamba2", state_space=True, convolution=4),
    "simple-gla": OperatorTraits("simple gated linear attention", "simple_gla"),
    "gla": OperatorTraits("gated linear attention", "gla", channel_decay=True),
}
OPERATORS: tuple[Operator, ...] = tuple(TRAITS)
RECURRENCES: tuple[Operator, ...] = tuple(name for name, traits in TRAITS.items() if traits.recurrent)
CHUNK = 64
"""Tokens per chunk in the count of FLOPs: those of flash-linear-attention's kernels."""


def forward_flops_per_token(key_dim: int, value_dim: int, *, delta_rule: bool) -> int:
    """Count the FLOPs of one token and head in the forward pass, by the formula in this module's docstring."""
    keys, values, state = (3, 2, 6) if delta_rule else (1, 1, 4)
    return CHUNK * (keys * key_dim + values * value_dim) + state * key_dim * value_dim


def recurrence_flops(tokens: int, heads: int, key_dim: int, value_dim: int, *, delta_rule: bool, passes: int) -> int:
    """Count the FLOPs of ``tokens`` tokens; ``passes`` is 1 for the forward pass, 2 for backward, 3 for both."""
    return passes * tokens * heads * forward_flops_per_token(key_dim, value_dim, delta_rule=delta_rule)
