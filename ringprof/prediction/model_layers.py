"""Times of a model's training step outside attention, measured with one and with two layers (`ringprof calibrate
--model`)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ringprof.errors import UnsupportedWorkloadError
from ringprof.workload.workload import Size

Phase = Literal["forward", "backward", "optimizer"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")
REACH = 2.0
"""Factor by which a prediction's tokens per rank may lie outside the measured lengths."""
Time = Annotated[float, msgspec.Meta(ge=0, lt=1e18)]


class ModelStep(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of the steps of a model with one and with two layers over equally many tokens: nanoseconds outside
    attention."""

    phase: Phase
    tokens: Size
    """Tokens of one device, all sequences of a batch together."""
    one_layer_ns: Time
    two_layers_ns: Time
    spread: Annotated[float, msgspec.Meta(ge=0, le=2)]
    """Standard deviation over the steps, as a fraction of the time."""
    count: Size

    @property
    def layer_ns(self) -> float:
        """Nanoseconds that one more layer takes."""
        return max(0.0, self.two_layers_ns - self.one_layer_ns)

    @property
    def rest_ns(self) -> float:
        """Nanoseconds of what the model has once: embeddings, the head and the loss."""
        return max(0.0, self.one_layer_ns - self.layer_ns)


class ModelFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Measured steps of one model on one device."""

    target: str
    """``module:function`` that created the model."""
    device: str
    heads: Size
    kv_heads: Size
    head_dim: Size
    dtype: str
    layer_bytes: Size
    """Bytes of one layer's parameters; gradients have as many."""
    rest_bytes: Annotated[int, msgspec.Meta(ge=0)]
    """Bytes of the parameters that the model has once."""
    attention_calls: dict[str, int]
    """Attention calls of one layer in a step, ``forward`` and ``backward``; two forward calls where the layer is
    computed again in the backward pass."""
    attention_ns: dict[str, list[tuple[int, float]]]
    """Nanoseconds of one attention call over all tokens of the device, by pass, as pairs of tokens and time."""
    steps: list[ModelStep]

    def times_ns(self, phase: Phase, tokens: int) -> tuple[float, float, float]:
        """Return the time per layer, the time of the rest, both in nanoseconds, and the standard deviation of a layer's
        time as a fraction of it.

        Between measured lengths the times are interpolated. Beyond, the nearest time is scaled by the tokens, except
        the optimizer's. Raises `UnsupportedWorkloadError` beyond `REACH` times the measured lengths.
        """
        steps = sorted((step for step in self.steps if step.phase == phase), key=lambda step: step.tokens)
        shortest, longest = steps[0], steps[-1]
        if not shortest.tokens / REACH <= tokens <= longest.tokens * REACH:
            raise UnsupportedWorkloadError(
                f"{tokens} tokens per GPU: the layers of {self.target} were measured with {shortest.tokens} to"
                f" {longest.tokens} (ringprof calibrate --model, --tokens)"
            )
        low = max((step for step in steps if step.tokens <= tokens), default=shortest, key=lambda step: step.tokens)
        high = min((step for step in steps if step.tokens >= tokens), default=longest, key=lambda step: step.tokens)
        spread = max(_difference_spread(low), _difference_spread(high))
        if low.tokens == high.tokens:
            scale = 1.0 if phase == "optimizer" else tokens / low.tokens
            return scale * low.layer_ns, scale * low.rest_ns, spread
        share = (tokens - low.tokens) / (high.tokens - low.tokens)
        layer_ns, rest_ns = (
            (1 - share) * a + share * b for a, b in ((low.layer_ns, high.layer_ns), (low.rest_ns, high.rest_ns))
        )
        return layer_ns, rest_ns, spread


def _difference_spread(step: ModelStep) -> float:
    """Return the standard error of a layer's time, the difference of two medians, as a fraction of it."""
    if not step.layer_ns:
        return 0.0
    error_ns: float = step.spread * (step.one_layer_ns**2 + step.two_layers_ns**2) ** 0.5 / step.count**0.5
    return min(1.0, error_ns / step.layer_ns)
