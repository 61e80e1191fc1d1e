"""Recording of one training step of a model: module outputs, the gradient of the model's output, and the loss.

Global module hooks see every module that a step calls, so that a step may be any function: the module with the most
parameters that is called from outside other modules is the model.

Every rank runs the reference's step on the whole batch and compares with its own tokens. The tolerance is measured: the
reference runs again `NOISE_RUNS` times, each time with every output of a module that has no children changed by one
unit in the last place of the type that this module returns on the ranks. With e the largest relative error of these
runs, a tensor passes while

    error <= NOISE_FACTOR · e + FLOOR[type] · u

where u is the unit roundoff. A token may differ by `TOKEN_FACTOR` times that, relative to the larger of its own row and
the mean row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_map_only

from ringprof.errors import RingprofError, UsageError
from ringprof.proof.completion_barrier import CompletionBarrier
from ringprof.proof.dense import SINGLE_FLOOR
from ringprof.ranks.process_group import GroupRanks
from ringprof.strategies import Unsupported
from ringprof.strategies.masks.layouts import LAYOUTS

_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Attributes in which DDP, FSDP, torch.compile and checkpointing hold the module that they wrap."""

NOISE_RUNS = 2
NOISE_FACTOR = 2.0
LOW_FLOOR = 4
"""Unit roundoffs of bf16 and fp16 that are always allowed; of wider types `SINGLE_FLOOR`."""

ChangeOutput = Callable[[str, nn.Module, Any], Any]
"""Function of a module's name, the module and its output, called after each module; returns the output to use."""


@dataclass
class Step:
    """One training step as this process has run it."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """Arguments of the model's call, with copies of their tensors."""
    outputs: dict[str, list[Tensor]]
    """Detached outputs with a row per token (tokens, features), by module and call, in the order of return."""
    output_gradient: Tensor | None
    """Gradient of the loss with respect to the model's output (tokens, features); None where none reaches it."""
    loss: float | None
    shape: tuple[int, int]
    """Rows and tokens per row of the model's first tensor argument."""
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    """Each parameter's gradient after the step, gathered where it is sharded, by the name without wrappers."""

    @property
    def ids(self) -> Tensor:
        """First tensor argument of the model's call: (rows, tokens, ...)."""
        return first_tensor(self.args, self.kwargs)

    def name_arguments(self) -> None:
        """Turn the positional arguments of the model's call into keyword arguments, where its signature names them."""
        with suppress(TypeError, ValueError):
            signature = inspect.signature(self.model.forward)
            named = signature.bind(*self.args, **self.kwargs).arguments
            kinds = {name: signature.parameters[name].kind for name in named}
            if inspect.Parameter.VAR_POSITIONAL not in kinds.values():
                rest = [name for name, kind in kinds.items() if kind is inspect.Parameter.VAR_KEYWORD]
                self.args, self.kwargs = (), {**named, **(named[rest[0]] if rest else {})}
                for name in rest:
                    del self.kwargs[name]


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter by the qualified name without wrappers, gathered where it is sharded. Collective."""
    return {unwrapped(name): _full(x.detach()) for name, x in model.named_parameters()}


def _full(x: Tensor) -> Tensor:
    full: Any = getattr(x, "full_tensor", None)
    whole: Tensor = full() if full else x
    return whole


def unwrapped(name: str) -> str:
    """Remove the parts of a qualified name that belong to wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def names_of(model: nn.Module) -> dict[int, str]:
    """Return the qualified name without wrappers of each module, by its id; a wrapped module itself has none."""
    names: dict[str, int] = {}
    for name, module in model.named_modules():
        names.setdefault(unwrapped(name), id(module))
    return {module: name for name, module in names.items()}


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return ``input_ids``, or else the first tensor argument with a row per sequence: (rows, tokens, ...).

    Raises `UsageError` where there is none.
    """
    for value in (kwargs.get("input_ids"), *args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim() >= 2:
            return value
    raise UsageError("the model is called without a tensor of (rows, tokens): nothing says which tokens a rank holds")


def rows_of(output: Any, shape: tuple[int, int]) -> tuple[Tensor, Tensor] | None:
    """Find the tensor with a row per token in a module's output; return it and a view (tokens, features).

    A tensor of one row for all ``shape[0]`` rows, such as rotary embeddings, is expanded. None where there is none.
    """
    tokens = shape[0] * shape[1]
    if isinstance(output, Tensor):
        if not output.is_floating_point():
            return None
        if output.dim() >= 2 and output.shape[:2] == shape:
            return output, output.reshape(tokens, -1)
        if output.dim() >= 3 and output.shape[:2] == (1, shape[1]):
            return output, output.expand(shape[0], *output.shape[1:]).reshape(tokens, -1)
        return (output, output.reshape(tokens, -1)) if output.dim() == 2 and output.shape[0] == tokens else None
    values: Any = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    )
    return next((rows for rows in (rows_of(value, shape) for value in values) if rows is not None), None)


@dataclass
class _Recorder:
    change: ChangeOutput | None
    around_forward: Callable[[], Any] | None
    depth: int = 0
    steps: list[Step] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    block: ExitStack = field(default_factory=ExitStack)
    outputs: dict[str, list[Any]] = field(default_factory=dict)
    recording: bool = False

    def before(self, module: nn.Module, args: Any) -> None:
        # A module of a model that is called from outside any other is recomputed by activation checkpointing.
        is_new = id(module) not in self.names or any(step.model is module for step in self.steps)
        if not self.depth and is_new and any(True for _ in module.parameters()):
            self.names |= names_of(module)
            self.outputs, self.recording = {}, True
            module.zero_grad(set_to_none=True)
            if self.around_forward is not None:
                self.block.enter_context(self.around_forward())
        self.depth += 1

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        self.depth -= 1
        name = self.names.get(id(module))
        changed = self.change(name, module, output) if self.change and name is not None else None
        output = output if changed is None else changed
        if self.recording and name is not None:
            self.outputs.setdefault(name, []).append(_detached(output))
        if self.recording and not self.depth:
            self.block.close()
            self.recording = False
            self._add_step(module, args, kwargs, output)
        return changed

    def _add_step(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        ids = first_tensor(args, kwargs)
        shape = ids.shape[0], ids.shape[1]
        outputs = {
            name: [rows[1] for rows in (rows_of(call, shape) for call in calls) if rows is not None]
            for name, calls in self.outputs.items()
        }
        # Copies, since torch's context parallelism restores its sharded buffers in place after the step.
        args, kwargs = tree_map_only(Tensor, lambda x: x.detach().clone(), (args, kwargs))
        step = Step(model, args, kwargs, {name: x for name, x in outputs.items() if x}, None, None, shape)
        rows = rows_of(output, shape)
        if rows is not None and rows[0].requires_grad:

            def keep(gradient: Tensor) -> None:
                step.output_gradient = gradient.detach().reshape(shape[0] * shape[1], -1).clone()

            rows[0].register_hook(keep)  # type: ignore[no-untyped-call]
        self.steps.append(step)


def record_step(
    step: Callable[[], Any], change: ChangeOutput | None = None, around_forward: Callable[[], Any] | None = None
) -> Step:
    """Run one training step and return its recording; run the backward pass where the step has not.

    ``around_forward`` returns a context for the model's forward pass. Raises `UsageError` where the step does not call
    a model exactly once.
    """
    recorder = _Recorder(change, around_forward)
    hooks = [
        register_module_forward_pre_hook(recorder.before),
        register_module_forward_hook(recorder.after, with_kwargs=True),
    ]
    try:
        loss = _loss(step())
        if not recorder.steps:
            raise UsageError("the step calls no torch module with parameters: nothing to compare")
        recorded = max(recorder.steps, key=lambda step: sum(1 for _ in step.model.parameters()))
        calls = sum(other.model is recorded.model for other in recorder.steps)
        if calls > 1:
            raise UsageError(f"the step calls its model {calls} times: compare a step that calls it once")
        ran_backward = any(x.grad is not None for x in recorded.model.parameters())
        if isinstance(loss, Tensor) and loss.requires_grad and not ran_backward and recorded.output_gradient is None:
            loss.backward()  # type: ignore[no-untyped-call]
    finally:
        for hook in hooks:
            hook.remove()
    recorded.loss = loss.item() if isinstance(loss, Tensor) else loss
    # A copy, since DDP writes the gradients of the next step to the same memory.
    recorded.gradients = {
        unwrapped(name): None if x.grad is None else _full(x.grad.detach()).clone()
        for name, x in recorded.model.named_parameters()
        if x.requires_grad
    }
    return recorded


def _loss(result: Any) -> Any:
    """Return the loss in a step's result: a number, an object with a ``loss``, or a tuple that begins with it."""
    if isinstance(result, Mapping):
        result = result.get("loss")
    elif not isinstance(result, (Tensor, float, tuple, list)):
        result = getattr(result, "loss", None)
    result = result[0] if isinstance(result, (tuple, list)) and result else result
    return result if isinstance(result, float) or (isinstance(result, Tensor) and result.numel() == 1) else None


def _detached(output: Any) -> Any:
    """Copy the tensors of a module's output, which later modules may overwrite."""
    if isinstance(output, Tensor):
        return output.detach().clone()
    if isinstance(output, Mapping):
        return {key: _detached(value) for key, value in output.items()}
    return [_detached(value) for value in output] if isinstance(output, (tuple, list)) else None


# --- steps on all ranks, and the tokens that each rank holds -------------------------------------------


@dataclass
class ModelRun:
    """Recorded steps of the parallel model and the reference, and which tokens this rank holds."""

    ranks: GroupRanks
    barrier: CompletionBarrier
    parallel_step: Callable[[], Any]
    reference_step: Callable[[], Any]
    parallel: Step
    reference: Step
    tokens: Tensor
    """Index of each local token among the tokens of all rows (local tokens)."""
    every_token: list[Tensor]
    """``tokens`` of each rank."""
    modules: list[tuple[str, int]]
    """Name and call of every compared module output, in the order in which the reference's modules return."""

    def run_parallel(self, where: str, **options: Any) -> Step:
        """Run the parallel step once more. Collective; ``where`` names it in the error of a rank that fails."""
        return run_on_ranks(self.parallel_step, self.ranks, self.barrier, where, **options)

    def run_reference(self, where: str, **options: Any) -> Step:
        """Run the reference's step once more, like `run_parallel`."""
        return run_on_ranks(self.reference_step, self.ranks, self.barrier, where, **options)


def run_on_ranks(
    step: Callable[[], Any], ranks: GroupRanks, barrier: CompletionBarrier, where: str, **options: Any
) -> Step:
    """Run a step on every rank and wait for all. Raises `RecordError` on every rank that can still act."""
    try:
        recorded = record_step(step, **options)
        ranks.finish()
    except RingprofError as error:
        barrier.report_failure(where, error)
        raise
    except Exception as error:
        raise barrier.report_failure(where, error) from error
    barrier.wait_for_all(where)
    return recorded


def allowed_error(noise: float, *tensors: Tensor) -> float:
    """Return the relative error that passes, by the formula in this module's docstring."""
    eps = max(torch.finfo(x.dtype).eps for x in tensors)
    return NOISE_FACTOR * noise + (LOW_FLOOR if eps > 1e-5 else SINGLE_FLOOR) * eps / 2


def find_tokens(own: Tensor, whole: Tensor, positions: Tensor | None) -> tuple[Tensor, str]:
    """Return the index of each local token among all rows' tokens (on the CPU), and a problem, empty if none.

    ``own`` is a rank's first tensor argument (b, s, ...), ``whole`` the reference's (B, S, ...). ``positions`` are
    those of the local tokens; None: they are searched by the values, in the known layouts first.
    """
    rows, seq = own.shape[:2]
    own, whole = (x.detach().cpu().reshape(*x.shape[:2], -1) for x in (own, whole))
    if own.shape[2] != whole.shape[2] or whole.shape[0] % rows:
        return torch.empty(0, dtype=torch.int64), (
            f"the model is called with {tuple(own.shape)}, the reference with {tuple(whole.shape)}: (rows, tokens) of a"
            " shard and of the whole batch are expected"
        )
    full_seq = whole.shape[1]
    blocks = [slice(first, first + rows) for first in range(0, whole.shape[0], rows)]
    if positions is None:
        candidates = list(_layout_positions(seq, full_seq))
    else:
        candidates = [positions.detach().cpu().flatten().long()]
        if len(candidates[0]) != seq or not 0 <= int(positions.min()) <= int(positions.max()) < full_seq:
            return torch.empty(0, dtype=torch.int64), f"positions must be {seq} numbers from 0 to {full_seq - 1}"
    fitting: list[Tensor] = []
    for block in blocks:
        fitting += [_flat(block, x, full_seq) for x in candidates if torch.equal(whole[block][:, x], own)]
    if positions is None and not fitting:
        matches = ((block, _longest_runs(own, whole[block])) for block in blocks)
        fitting = [_flat(block, match, full_seq) for block, match in matches if match is not None]
    if fitting and all(torch.equal(x, fitting[0]) for x in fitting):
        return fitting[0], ""
    return torch.empty(0, dtype=torch.int64), (
        "which tokens the model is called with cannot be told from their values: pass positions="
        if positions is None
        else "the model is called with other tokens than the batch has at these positions"
    )


def _layout_positions(seq: int, full_seq: int) -> Iterator[Tensor]:
    """Yield the positions that each rank holds in each layout."""
    if full_seq % seq:
        return
    size = full_seq // seq
    for layout in LAYOUTS.values():
        for rank in range(size):
            try:
                yield layout.positions(full_seq, size, rank)
            except (Unsupported, ValueError):
                break


def _longest_runs(own: Tensor, whole: Tensor) -> Tensor | None:
    """Match each local token with the longest run of equal tokens; None where there is none or several."""
    equal = (own[:, :, None] == whole[:, None, :]).all(-1).all(0).long()
    run = equal.clone()
    for index in range(equal.shape[0] - 2, -1, -1):
        run[index, :-1] = equal[index, :-1] * (1 + run[index + 1, 1:])
    positions = torch.empty(equal.shape[0], dtype=torch.int64)
    start = 0
    while start < equal.shape[0]:
        length = int(run[start].max())
        starts = (run[start] == length).nonzero()[:, 0]
        if not length or len(starts) > 1:
            return None
        positions[start : start + length] = torch.arange(length) + starts[0]
        start += length
    return positions


def _flat(block: slice, positions: Tensor, seq: int) -> Tensor:
    return (torch.arange(block.start, block.stop)[:, None] * seq + positions).flatten()
