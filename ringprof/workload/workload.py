"""The workload of a recording or prediction: sizes, mask, phase, and the layer around the attention."""

from __future__ import annotations

from itertools import accumulate
from typing import Annotated, Literal

import msgspec

from ringprof.common.json_object import JsonObject
from ringprof.workload.combinations import why_refused
from ringprof.workload.mask import NO_LIMIT, Mask
from ringprof.workload.recurrences import TRAITS, Operator, OperatorTraits, recurrence_flops

_SHARE = 32
"""Ratio of the memory for reading to the largest accepted ``run.json``: one made of empty lists needs 20 times its
size. With 1 GiB, files of up to 32 MiB are read; the file of a run of 10,000 ranks has 25 MiB."""


MOST_RANKS = 1 << 20
"""Maximum number of ranks of a run: a larger number in a file is damage, and would only fill memory."""

Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
"""A size of at least 1, checked when a file is decoded, since the file may be untrusted."""
Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
"""A duration in nanoseconds, checked when a file is decoded."""
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""A count, checked when a file is decoded."""


Phase = Literal["training", "prefill", "decode"]


class LayerAround(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a layer other than attention; its hidden size is heads · head_dim."""

    parallel: Literal["ddp", "fsdp2"]
    """Data parallelism that reduces the gradients of the parameters, over all ranks."""
    mlp_size: Size
    """Intermediate size of the gated MLP."""
    checkpoint: bool = False
    """Whether the backward pass recomputes each layer (activation checkpointing)."""
    pattern: tuple[Operator, ...] | None = None
    """Operators of a hybrid model's layers, in order, repeated over all layers; None: attention in all of them."""
    recurrent_strategy: str | None = None
    """Strategy of the pattern's recurrences; None without a pattern."""

    def __str__(self) -> str:
        recomputed = ", computed again in the backward pass" if self.checkpoint else ""
        hybrid = f", pattern {','.join(self.pattern)} with {self.recurrent_strategy}" if self.pattern else ""
        return f"whole layer: MLP of {self.mlp_size}, {self.parallel.upper()}{recomputed}{hybrid}"


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """One attention or recurrence, shared by the ranks of one context-parallel group (`Run.workload_ranks`).

    With a recurrence, ``heads`` are those of values and states, and ``kv_heads`` those of queries and keys (the groups
    of Mamba-2). ``head_dim`` is the size of a key (Mamba-2's state size), ``v_head_dim`` that of a value (the head size
    of Mamba-2). The mask is causal.
    """

    batch: Size = 1
    seq: Size
    """Global sequence length in tokens."""
    heads: Size
    kv_heads: Size
    head_dim: Size
    causal: bool = True
    dtype: str = "bf16"
    """``bf16``, ``fp16`` or ``fp32``."""
    backward: bool = True
    """Whether an iteration has a backward pass after its forward pass."""
    layers: Size = 1
    """Number of attention layers per captured step."""
    steps: Size = 1
    """Number of steps in a captured block."""
    documents: tuple[Size, ...] | None = None
    """Lengths of the packed documents, in order; None: one document."""
    window: Size | None = None
    """Sliding window: keys up to and including its own that a query attends to; without a causal mask as many after
    it. None: all."""
    prefix: Size | None = None
    """Number of first tokens of each document that all its queries attend to, in addition to the window; without a
    window the mask is that of a prefix LM. None: no prefix."""
    sequences: tuple[Size, ...] | None = None
    """Dynamic context parallelism: number of sequences that share the ``seq`` tokens in each step of an iteration; all
    sequences of a step run on the same number of ranks. None: one step with one sequence."""
    phase: Phase = "training"
    kv_length: Size | None = None
    """Keys per sequence in inference: the last ``seq`` of them are new tokens, the others are cached. None in
    training."""
    layer: LayerAround | None = None
    """The rest of each of the ``layers``; None: attention alone."""

    v_head_dim: Size | None = None
    """Head size of v if it differs from that of q and k: smaller in attention (MLA), any with a recurrence."""
    softcap: Annotated[float, msgspec.Meta(gt=0, le=1e9)] | None = None
    """Soft cap: scores s become softcap · tanh(s / softcap); None: no cap."""
    sinks: Literal["learned"] | None = None
    """Attention sinks: with ``learned``, one learned logit per head takes part in the softmax and gets a gradient."""
    operator: Operator = "attention"
    """``attention``, or a recurrence: ``gdn`` (gated delta net), ``mamba2``, ``simple-gla`` or ``gla``."""
    conv_width: Size | None = None
    """Tokens that the short causal convolution before a recurrence reads; None: no convolution."""

    def __post_init__(self) -> None:
        if reason := why_refused(self.features()):
            raise ValueError(reason)
        if self.recurrent and self.heads % self.kv_heads:
            raise ValueError(f"--kv-heads {self.kv_heads} does not divide the {self.heads} heads")
        if not self.recurrent and self.value_dim > self.head_dim:
            raise ValueError(
                f"--v-head-dim {self.v_head_dim}: heads of v are at most as large as those of q and k, {self.head_dim}"
            )
        if self.kv_length is not None and self.kv_length < self.seq:
            raise ValueError(f"--kv-length {self.kv_length} holds the new tokens, too: at least {self.seq}")
        if self.kv_length is not None and self.backward:
            raise ValueError(f"{self.phase} is forward only")
        if self.sequences is not None and any(self.seq % count for count in self.sequences):
            raise ValueError(f"{self.seq} tokens are no even sequences, {self.sequences} of them")
        if self.layer is not None and self.layer.pattern is not None:
            if self.layer.recurrent_strategy is None and set(self.layer.pattern) - {"attention"}:
                raise ValueError("a pattern with recurrences needs a strategy for them")
        if self.layers % len(self.pattern):
            raise ValueError(f"{self.layers} layers are no multiple of the pattern {','.join(self.pattern)}")
        if self.documents is not None and sum(self.documents) != self.seq:
            raise ValueError(f"the documents are {sum(self.documents)} tokens together, the sequence has {self.seq}")

    def features(self) -> JsonObject:
        """Return the values of the workload's features, by the names of `ringprof.workload.combinations`."""
        return {
            "operator": self.operator, "phase": self.phase, "kv_length": self.kv_length, "causal": self.causal,
            "documents": self.documents, "window_size": self.window, "prefix": self.prefix, "softcap": self.softcap,
            "sinks": self.sinks, "v_head_dim": self.v_head_dim, "conv_width": self.conv_width, "layer": self.layer,
            "pattern": self.layer and self.layer.pattern,
            "recurrent_strategy": self.layer and self.layer.recurrent_strategy,
        }  # fmt: skip

    @property
    def pattern(self) -> tuple[Operator, ...]:
        """Operators of the layers, in order, repeated over all of them."""
        return (self.layer and self.layer.pattern) or (self.operator,)

    def part(self, operator: Operator) -> Workload | None:
        """Return what the layers of one operator compute, without the rest of a layer; None without such layers.

        A pattern's recurrences have as many heads of keys as of values, of one size, and Mamba-2 one group. Windows and
        other options of the softmax belong to its attention alone.
        """
        count = self.pattern.count(operator) * (self.layers // len(self.pattern))
        if not count:
            return None
        if len(set(self.pattern)) == 1 or operator == "attention":
            return msgspec.structs.replace(self, layer=None, layers=count)
        traits = TRAITS[operator]
        return Workload(
            batch=self.batch, seq=self.seq, heads=self.heads, kv_heads=1 if traits.state_space else self.heads,
            head_dim=self.head_dim, dtype=self.dtype, backward=self.backward, layers=count, steps=self.steps,
            documents=self.documents, operator=operator, conv_width=traits.convolution,
        )  # fmt: skip

    @property
    def traits(self) -> OperatorTraits:
        """Facts about the operator."""
        return TRAITS[self.operator]

    @property
    def recurrent(self) -> bool:
        """Whether the operator is a recurrence."""
        return self.traits.recurrent

    @property
    def value_dim(self) -> int:
        """Head size of v."""
        return self.v_head_dim or self.head_dim

    def mask(self) -> Mask:
        """Return the attention mask over all keys; in inference, only the last tokens have queries."""
        cumulative = None if self.documents is None else [0, *accumulate(self.documents)]
        before = NO_LIMIT if self.window is None else self.window - 1
        after = 0 if self.window is None and self.prefix else before
        return Mask.of(cumulative, (before, after), causal=self.causal, prefix=self.prefix or 0)

    def step(self, count: int) -> Workload:
        """Return the workload of one group of ranks in a step with ``count`` sequences (dynamic CP)."""
        return msgspec.structs.replace(self, seq=self.seq // count, sequences=None)

    def at(self, seq: int, kv_length: int | None = None) -> Workload:
        """Scale the workload to ``seq`` tokens and ``kv_length`` keys; documents, window and prefix scale with them."""
        scaled = self.mask().scaled(self.kv_length or self.seq, kv_length or seq)
        documents = None if scaled.documents is None else tuple(end - first for first, end in scaled.spans(seq))
        window = None if self.window is None else scaled.left + 1
        prefix = scaled.prefix or None
        return msgspec.structs.replace(
            self, seq=seq, kv_length=kv_length, documents=documents, window=window, prefix=prefix
        )

    def model_flops(self) -> int:
        """Count the FLOPs of one iteration over all ranks: forward 4·B·S²·H·D, half if causal; backward 2.5 times that.

        If the heads of v have another size E, forward uses 2·(D + E) instead of 4·D, and backward 2·(3·D + 2·E) instead
        of 10·D. S² is summed over the documents; with a window and in inference, the exact mask area replaces it. For a
        recurrence it is the count of `ringprof.workload.recurrences`. All steps and layers of a captured block are
        included, and for whole layers their matrix products.
        """
        if self.sequences is not None:
            return sum(count * self.step(count).model_flops() for count in self.sequences)
        parts = self._parts()
        if parts:
            own = sum(part.model_flops() for part in parts)
        elif self.recurrent or self.mask().windowed or self.kv_length is not None:
            own = self.exact_flops()
        else:
            squares = sum(length**2 for length in self.documents or (self.seq,))
            own = self._flops(squares if self.causal else 2 * squares)
        return own + 2 * self.batch * self.seq * self.all_parameters() * self.steps * (3 if self.backward else 1)

    def _parts(self) -> list[Workload]:
        """Return what the layers of each operator of a pattern compute; empty for layers of one operator."""
        kinds = dict.fromkeys(self.pattern)
        return [part for kind in kinds if (part := self.part(kind))] if len(kinds) > 1 else []

    def exact_flops(self) -> int:
        """Count the FLOPs of attention alone from the exact mask area: S(S+1)/2 per causal document, not S²/2.

        For a recurrence the count equals `model_flops` without the rest of a layer. With a pattern of layers, only
        those with attention count.
        """
        if self.sequences is not None:
            return sum(count * self.step(count).exact_flops() for count in self.sequences)
        if self._parts():
            attention = self.part("attention")
            return 0 if attention is None else attention.exact_flops()
        if self.recurrent:
            tokens, passes = self.batch * self.seq * self.layers * self.steps, 3 if self.backward else 1
            sizes = self.heads, self.head_dim, self.value_dim
            return recurrence_flops(tokens, *sizes, delta_rule=self.traits.delta_rule, passes=passes)
        return self._flops(2 * self.pairs())

    def pairs(self) -> int:
        """Count the pairs of a query and a key that it attends to, for one head of one sequence."""
        return self.mask().area(self.kv_length or self.seq, None if self.kv_length is None else self.seq)

    def parameters(self, operator: Operator = "attention") -> int:
        """Count the parameters of the matrices of one layer of a pattern.

        They are q, k, v, output, and the three of the gated MLP. A recurrence also has a gate as large as its output,
        and projections to its decays and writing strengths.
        """
        if self.layer is None:
            return 0
        traits, hidden, kv_heads, gates = TRAITS[operator], self.heads * self.head_dim, self.kv_heads, 0
        if traits.recurrent:
            kv_heads = 1 if traits.state_space else self.heads
            gates = hidden + traits.gates(self.heads, self.head_dim)
        return hidden * (2 * hidden + 2 * kv_heads * self.head_dim + gates + 3 * self.layer.mlp_size)

    def all_parameters(self) -> int:
        """Count the parameters of the matrices of all layers."""
        return sum(map(self.parameters, self.pattern)) * (self.layers // len(self.pattern))

    def cache_bytes(self) -> int:
        """Return the bytes of K and V that all ranks hold and the new tokens attend to.

        That is batch · keys · kv_heads · (head_dim + v_head_dim) elements, with the keys that a window leaves.
        """
        keys = self.kv_length or self.seq
        if self.window is not None:
            keys = min(keys, self.seq + self.window - 1 + (self.prefix or 0))
        elements = self.batch * keys * self.kv_heads * (self.head_dim + (self.v_head_dim or self.head_dim))
        return elements * (4 if self.dtype == "fp32" else 2)

    def _flops(self, twice_the_area: int) -> int:
        """Count the FLOPs of attention over a mask of the given area (in pairs), doubled to stay an integer."""
        size, v_size = self.head_dim, self.v_head_dim or self.head_dim
        flops_per_pair = (size + v_size) + (3 * size + 2 * v_size if self.backward else 0)
        return self.batch * twice_the_area * self.heads * flops_per_pair * self.layers * self.steps

    def extras(self) -> list[str]:
        """Describe the soft cap, the sinks and the convolution, if any, in words."""
        words = [] if self.softcap is None else [f"softcap {self.softcap:g}"]
        words += [] if self.conv_width is None else [f"convolution of {self.conv_width} tokens"]
        return words + ([] if self.sinks is None else [f"{self.sinks} sinks"])

    def mask_in_words(self) -> str:
        """Describe the mask, or the recurrence and its documents: ``causal, 3 documents of 100 to 900 tokens``."""
        words = str(self.mask())
        return words.replace("causal", self.traits.words, 1) if self.recurrent else words

    def mask_in_short(self) -> str:
        """Describe the mask or recurrence, with its options, in a few words: ``causal, 15 documents, window 4096``."""
        parts = ["causal" if self.causal else "prefix LM" if self.prefix and not self.window else "full"]
        parts = [self.operator] if self.recurrent else parts
        parts += [f"{len(self.documents)} documents"] if self.documents else []
        parts += [f"window {self.window}"] if self.window else []
        parts += [f"prefix {self.prefix}"] if self.prefix else []
        return ", ".join([*parts, *self.extras()])

    def heads_in_words(self) -> str:
        """Describe the heads: ``40 heads (8 kv) of 128`` or, with another size of v, ``16 heads of 192 (v 128)``."""
        grouped = f" ({self.kv_heads} {'of keys' if self.recurrent else 'kv'})" if self.kv_heads != self.heads else ""
        v_size = f" (v {self.v_head_dim})" if self.v_head_dim else ""
        return f"{self.heads} heads{grouped} of {self.head_dim}{v_size}"
