"""Measurement of a model's step outside attention on one device: steps with one layer and with two, phase by phase.

The model's function gets a number of layers and returns the model and a function of a number of tokens that returns the
model's keyword arguments; as a third value, it may return the optimizer. Events on the device mark where each attention
call begins and ends, in the forward and the backward pass, so attention is subtracted from the step that it ran in.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median, pstdev
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ringprof.errors import UsageError
from ringprof.prediction.calibration import PHASES, ModelFigures, ModelStep, Phase
from ringprof.strategies.base import Strategy

Pass = Literal["forward", "backward"]
STEPS, WARMUP = 5, 2
"""Timed steps per length and number of layers, and steps before them."""


@dataclass
class StepTimer:
    """Time stamps of one step: ends of its phases, and start and end of each attention call."""

    device: torch.device
    phase: Phase = "forward"
    ends: list[Any] = field(default_factory=list)
    """Time stamps at the start of the step and at the end of each phase."""
    attention: list[tuple[Phase, Pass, Any, Any]] = field(default_factory=list)
    """Phase, pass, and time stamps of start and end of each attention call."""
    shapes: set[tuple[int, int, int]] = field(default_factory=set)
    """Query heads, kv heads and head size of the calls."""
    _begun: dict[Pass, Any] = field(default_factory=dict)

    def stamp(self) -> Any:
        """Return the device's time: an event in its stream, or nanoseconds on a CPU."""
        if self.device.type != "cuda":
            return time.perf_counter_ns()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def begin(self, direction: Pass) -> None:
        """Record the start of an attention call."""
        self._begun[direction] = self.stamp()

    def end(self, direction: Pass) -> None:
        """Record the end of the attention call of this pass that began last."""
        self.attention.append((self.phase, direction, self._begun.pop(direction), self.stamp()))

    def next_phase(self) -> None:
        """Record the end of a phase; the first call records the start of the step."""
        self.ends.append(self.stamp())
        if len(self.ends) <= len(PHASES):
            self.phase = PHASES[len(self.ends) - 1]

    def times_ns(self) -> tuple[dict[Phase, float], dict[Pass, list[float]]]:
        """Wait for the device; return nanoseconds outside attention by phase, and of each attention call by pass."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        outside = {
            phase: self._between(a, b) for phase, a, b in zip(PHASES, self.ends, self.ends[1:], strict=False)
        }  # fmt: skip
        calls: dict[Pass, list[float]] = defaultdict(list)
        for phase, direction, begun, ended in self.attention:
            calls[direction].append(self._between(begun, ended))
            outside[phase] -= calls[direction][-1]
        return {phase: max(0.0, ns) for phase, ns in outside.items()}, calls

    def _between(self, a: Any, b: Any) -> float:
        return a.elapsed_time(b) * 1e6 if self.device.type == "cuda" else float(b - a)


class _Begin(torch.autograd.Function):
    """Identity on q, k and v that records the start of the forward and the end of the backward call."""

    @staticmethod
    def forward(ctx: Any, timer: StepTimer, *qkv: Tensor) -> tuple[Tensor, ...]:
        ctx.timer = timer
        timer.begin("forward")
        return tuple(x.view_as(x) for x in qkv)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.timer.end("backward")
        return None, *gradients


class _End(torch.autograd.Function):
    """Identity on the output that records the end of the forward and the start of the backward call."""

    @staticmethod
    def forward(ctx: Any, timer: StepTimer, out: Tensor) -> Tensor:
        ctx.timer = timer
        timer.end("forward")
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[None, Tensor]:
        ctx.timer.begin("backward")
        return None, dout


@contextmanager
def timed_attention(timer_of: Callable[[], StepTimer]) -> Iterator[None]:
    """Time every call of torch's `scaled_dot_product_attention` and of a strategy's `attention` in the context.

    The names are replaced in their modules, because a layer may be computed again in a thread of autograd, where no
    function mode applies. Calls by a name that was imported before are missed.
    """

    def timed(call: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, heads: int, **options: Any) -> Any:
        timer = timer_of()
        timer.shapes.add((q.shape[heads], k.shape[heads], q.shape[-1]))
        q, k, v = _Begin.apply(timer, q, k, v)  # type: ignore[no-untyped-call]
        return _End.apply(timer, call(q, k, v, **options))  # type: ignore[no-untyped-call]

    sdpa, of_strategy = functional.scaled_dot_product_attention, Strategy.attention

    def timed_sdpa(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        names = ("attn_mask", "dropout_p", "is_causal")
        return timed(sdpa, query, key, value, -3, **dict(zip(names, args, strict=False)), **options)

    def timed_strategy(self: Strategy, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return timed(of_strategy.__get__(self), q, k, v, 2, **options)

    functional.scaled_dot_product_attention = timed_sdpa
    Strategy.attention = timed_strategy  # type: ignore[method-assign]
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = sdpa
        Strategy.attention = of_strategy  # type: ignore[method-assign]


def measure_model(
    function: Callable[[int], Any], target: str, device: torch.device, tokens: Sequence[int], *,
    steps: int = STEPS, notify: Callable[[str, int, int], None] = lambda *_: None,
) -> ModelFigures:  # fmt: skip
    """Measure a model's steps with one and two layers over each number of ``tokens`` on ``device``.

    ``function`` is as in this module's docstring; models are moved to the device. ``notify`` gets the name of a
    measurement, its number from 0, and the number of all. Raises `UsageError` for a function or a model that fails, for
    a function that returns something else, for two layers without more parameters than one, and for a model whose
    attention calls are not seen or differ in their heads.
    """
    measured: dict[tuple[int, int], list[StepTimer]] = {}
    bytes_of: dict[int, int] = {}
    dtype = ""
    for layers in (1, 2):
        with _errors_named(f"{target}: with {layers} layer{'s' if layers > 1 else ''}"):
            model, inputs, optimizer = _created(function, layers, target, device)
        bytes_of[layers] = sum(x.nbytes for x in model.parameters())
        dtype = str(next(model.parameters()).dtype).split(".")[-1]
        for number, count in enumerate(tokens):
            notify(f"{layers} layers, {count} tokens", (layers - 1) * len(tokens) + number, 2 * len(tokens))
            with _errors_named(f"{target}: its function of the number of tokens"):
                batch = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs(count).items()}
            with _errors_named(f"{target}: a step over {count} tokens"):
                timers = [run_step(model, batch, optimizer, device) for _ in range(WARMUP + steps)]
            measured[layers, count] = timers[WARMUP:]
            if not all(timer.attention for timer in timers):
                raise UsageError(
                    f"{target}: no attention call was seen: the model must call"
                    " torch.nn.functional.scaled_dot_product_attention by that name, or a strategy's attention"
                )
        del model, inputs, optimizer, batch
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if bytes_of[2] <= bytes_of[1]:
        raise UsageError(f"{target}: with two layers it has no more parameters than with one: give it the argument")
    return _figures(measured, target, device, tokens, bytes_of, dtype)


@contextmanager
def _errors_named(part: str) -> Iterator[None]:
    """Raise any error of the user's code in the context as a `UsageError` with its file and line."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        kind = type(error).__name__
        raise UsageError(f"{part} fails with {kind}: {error} ({frame.filename}:{frame.lineno})") from error


def _created(
    function: Callable[[int], Any], layers: int, target: str, device: torch.device
) -> tuple[nn.Module, Callable[[int], dict[str, Any]], torch.optim.Optimizer]:
    """Return model, inputs and optimizer of ``layers`` layers. Raises `UsageError` where ``function`` does not."""
    torch.manual_seed(0)
    created = function(layers)
    if not isinstance(created, tuple) or len(created) not in (2, 3) or not isinstance(created[0], nn.Module):
        raise UsageError(
            f"{target}: it must return a model and a function of the number of tokens, not {type(created).__name__}"
        )
    model: nn.Module = created[0].to(device)
    if next(model.parameters(), None) is None:
        raise UsageError(f"{target}: the model has no parameters")
    optimizer = created[2] if len(created) > 2 else torch.optim.AdamW(model.parameters(), lr=0.0)
    return model, created[1], optimizer


def run_step(
    model: nn.Module, batch: dict[str, Any], optimizer: torch.optim.Optimizer, device: torch.device
) -> StepTimer:
    """Run one training step and return its time stamps; the loss is the model's ``loss``, or the mean of its output."""
    timer = StepTimer(device)
    with timed_attention(lambda: timer):
        timer.next_phase()
        output = model(**batch)
        loss = output if isinstance(output, Tensor) else output.loss
        loss = loss if loss.ndim == 0 else loss.float().mean()
        timer.next_phase()
        loss.backward()
        timer.next_phase()
        optimizer.step()
        optimizer.zero_grad()
        timer.next_phase()
    return timer


def _figures(
    measured: dict[tuple[int, int], list[StepTimer]], target: str, device: torch.device, tokens: Sequence[int],
    bytes_of: dict[int, int], dtype: str,
) -> ModelFigures:  # fmt: skip
    """Return the figures of ``measured`` steps, which are by (layers, tokens); ``bytes_of`` has parameters by layers.

    Raises `UsageError` for attention calls that differ in their heads.
    """
    steps: list[ModelStep] = []
    attention_ns: dict[str, list[tuple[int, float]]] = {"forward": [], "backward": []}
    calls: Counter[str] = Counter()
    shapes = {shape for timers in measured.values() for timer in timers for shape in timer.shapes}
    if len(shapes) != 1:
        raise UsageError(f"{target}: its attention calls differ in heads or head size: one kind of layer is measured")
    for count in tokens:
        times = {layers: [timer.times_ns() for timer in measured[layers, count]] for layers in (1, 2)}
        for phase in PHASES:
            values = {layers: [outside[phase] for outside, _ in times[layers]] for layers in (1, 2)}
            medians = {layers: median(values[layers]) for layers in (1, 2)}
            spread = max(pstdev(values[layers]) / (medians[layers] or 1.0) for layers in (1, 2))
            steps.append(
                ModelStep(
                    phase=phase, tokens=count, one_layer_ns=medians[1], two_layers_ns=medians[2],
                    spread=min(spread, 2.0), count=len(values[1]),
                )
            )  # fmt: skip
        for direction in attention_ns:
            per_call = [ns for _, attention in times[2] for ns in attention[direction]]  # type: ignore[index]
            attention_ns[direction].append((count, median(per_call)))
            calls[direction] = len(times[2][0][1][direction]) - len(times[1][0][1][direction])  # type: ignore[index]
    heads, kv_heads, head_dim = shapes.pop()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return ModelFigures(
        target=target, device=name, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype,
        layer_bytes=bytes_of[2] - bytes_of[1], rest_bytes=max(0, 2 * bytes_of[1] - bytes_of[2]),
        attention_calls=dict(calls), attention_ns=attention_ns, steps=steps,
    )  # fmt: skip
