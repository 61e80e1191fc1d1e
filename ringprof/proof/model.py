"""Comparison of a parallel training step with a reference's step on one process, over all ranks."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from ringprof.errors import UsageError
from ringprof.proof.completion_barrier import CompletionBarrier
from ringprof.proof.dense import (
    TOKEN_FACTOR,
    error_on_rank,
    gather_by_name,
    gather_numbers,
    relative_rms,
    worst_errors,
)
from ringprof.proof.model_reasons import explain
from ringprof.proof.model_step import (
    NOISE_RUNS,
    ModelRun,
    Step,
    allowed_error,
    find_tokens,
    full_parameters,
    run_on_ranks,
)
from ringprof.proof.on_ranks import gather_sent, record_sent
from ringprof.proof.result import TIME_LIMIT_S, ModelCheck, ModuleDifference, ParameterCheck, SentInCall, TensorCheck
from ringprof.ranks.process_group import GroupRanks
from ringprof.ranks.progress import Reporter, SilentReporter

UNSTABLE = 0.5
"""Relative change of the output by rounding, from which the reference is taken for random (dropout)."""


class _Names(msgspec.Struct, frozen=True):
    """Names that must be alike on all ranks, a digest of the batch, and the rank's tokens."""

    modules: list[str]
    parameters: list[str]
    batch: str
    problem: str
    tokens: list[int]
    """Index of each local token among the tokens of all rows."""


def check_model_on_ranks(
    parallel: Callable[..., Any],
    reference: Callable[..., Any],
    batch: Any,
    *,
    shard: Callable[[Any], Any] | None = None,
    positions: Any = None,
    group: Any = None,
    time_limit: float = TIME_LIMIT_S,
    reporter: Reporter | None = None,
) -> ModelCheck:
    """Compare a parallel step with the reference's; all ranks call this and get the same result.

    The arguments are those of `ringprof.check_model`. Raises `UsageError`, and `RecordError` where a step fails or does
    not return on some rank.
    """

    def run_own() -> Any:
        return parallel(batch) if shard is None else parallel(**shard(batch))

    def run_whole() -> Any:
        return reference(**batch) if isinstance(reference, nn.Module) else reference(batch)

    held = None if positions is None else torch.as_tensor(positions)
    reporter = reporter or SilentReporter()
    ranks = GroupRanks(group)
    barrier = CompletionBarrier(ranks, time_limit)
    reporter.start("call 1 of the parallel step", 1)
    sent: list[SentInCall] = []
    parallel_step = run_on_ranks(
        run_own, ranks, barrier, "call 1 of the parallel step", around_forward=lambda: record_sent(sent)
    )
    reporter.start("reference", 1)
    reference_step = run_on_ranks(run_whole, ranks, barrier, "the reference")
    run = _aligned(run_own, run_whole, parallel_step, reference_step, batch, held, ranks, barrier)
    weights = _differing_weights(run)
    noisy = [_noisy_step(run, number) for number in range(NOISE_RUNS)]

    errors = _module_errors(run, noisy)
    logits = errors.get(("", 0))
    wrong = [index for index, key in enumerate(run.modules) if not errors[key].equal]
    first = None
    if wrong:
        name, _ = run.modules[wrong[0]]
        after = run.modules[wrong[0] - 1][0] if wrong[0] else None
        first = ModuleDifference(name=name, after=after, error=errors[run.modules[wrong[0]]])
    parameters = _parameter_errors(run, noisy)
    losses, loss, loss_is = _compare_losses(run, noisy)
    holders = torch.bincount(torch.cat(run.every_token), minlength=math.prod(reference_step.shape))
    own = parallel_step.model.parameters(), next(iter(parallel_step.outputs.values()))
    dtype = next(x.dtype for x in itertools.chain(*own) if x.is_floating_point())
    check = ModelCheck(
        equal=bool((holders == 1).all()) and not wrong and not weights and (loss is None or loss_is is not None)
        and all(error.rms <= error.allowed_rms for error in parameters.values()),
        ranks=ranks.size, batch=reference_step.shape, dtype=str(dtype).split(".")[-1], device=ranks.device.type,
        logits=logits, modules=len(run.modules), first_difference=first, loss=loss, losses=losses, loss_is=loss_is,
        parameters=parameters, reasons=weights,
        sent=gather_sent(sent, ranks),
    )  # fmt: skip
    if not check.equal:
        reporter.start("explanations", 1)
        reasons = [*weights, *explain(run, check, holders)]
        check = msgspec.structs.replace(check, reasons=reasons)
    for step in (parallel_step, reference_step):
        step.model.zero_grad(set_to_none=True)
    return check


def _aligned(
    parallel: Callable[[], Any], reference: Callable[[], Any], own: Step, whole: Step, batch: Any,
    positions: Tensor | None, ranks: GroupRanks, barrier: CompletionBarrier,
) -> ModelRun:  # fmt: skip
    """Find out which tokens each rank holds, and which outputs and parameters all ranks can compare. Collective."""
    tokens, problem = find_tokens(own.ids, whole.ids, positions)
    names = _Names(
        [name for name, calls in own.outputs.items() if len(calls) == len(whole.outputs.get(name, []))],
        sorted(own.gradients),
        _digest(batch),
        problem,
        tokens.tolist(),
    )
    by_rank = ranks.gather_structs(names)
    for number, other in zip(ranks.numbers, by_rank, strict=True):
        if other.problem:
            raise UsageError(f"rank {number}: {other.problem}")
        if other.batch != by_rank[0].batch:
            raise UsageError(
                f"rank {number} has another batch than rank {ranks.numbers[0]}: it must be the same on all"
            )
    if names.parameters != sorted(whole.gradients):
        strange = sorted(set(names.parameters) ^ set(whole.gradients))
        raise UsageError(f"the models have different parameters: {', '.join(strange[:3])} is only in one of them")
    common = set(names.modules).intersection(*(other.modules for other in by_rank))
    modules = [(name, call) for name in whole.outputs for call in range(len(whole.outputs[name])) if name in common]
    every = [torch.tensor(other.tokens, dtype=torch.int64) for other in by_rank]
    return ModelRun(ranks, barrier, parallel, reference, own, whole, tokens, every, modules)


def _digest(value: Any) -> str:
    """Return a digest of the tensors in a batch."""
    digest = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, Tensor):
            digest.update(item.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(item, (Mapping, tuple, list)):
            for part in item.values() if isinstance(item, Mapping) else item:
                add(part)

    add(value)
    return digest.hexdigest()


def _differing_weights(run: ModelRun) -> list[str]:
    """Say which rank has other weights than the first rank; empty where all are alike. Collective.

    Raises `UsageError` where the first rank's weights differ from the reference's.
    """
    own, whole = full_parameters(run.parallel.model), full_parameters(run.reference.model)
    differs = [
        float(name not in whole or x.shape != whole[name].shape or not torch.equal(x.to(whole[name]), whole[name]))
        for name, x in own.items()
    ]
    by_rank = gather_numbers(differs, run.ranks)
    names = list(own)
    if all(map(any, by_rank)):
        raise UsageError(
            f"the reference has other weights than the parallel model (the first: {names[by_rank[0].index(1.0)]}): load"
            " the same state_dict into both"
        )
    return [
        f"rank {number} has other weights than the reference (the first: {names[rows.index(1.0)]})"
        for number, rows in zip(run.ranks.numbers, by_rank, strict=True)
        if any(rows)
    ]


def _noisy_step(run: ModelRun, seed: int) -> Step:
    """Run the reference with each leaf module's output changed by a unit in the last place."""
    generators: dict[torch.device, torch.Generator] = {}

    def change(name: str, module: nn.Module, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point() or any(True for _ in module.children()):
            return None
        generator = generators.setdefault(output.device, torch.Generator(output.device).manual_seed(seed))
        own = run.parallel.outputs.get(name)
        eps = max(torch.finfo(x.dtype).eps for x in (output, *(own or ())[:1]))
        signs = torch.randint(0, 2, output.shape, generator=generator, device=output.device) * 2 - 1
        return (output * (1 + eps * signs.to(torch.promote_types(output.dtype, torch.float32)))).to(output.dtype)

    return run.run_reference(f"noisy reference {seed}", change=change)


def _module_errors(run: ModelRun, noisy: list[Step]) -> dict[tuple[str, int], TensorCheck]:
    """Compare the output of every module call with the reference's rows of the same tokens. Collective."""
    errors = {}
    for name, call in run.modules:
        x, whole = run.parallel.outputs[name][call], run.reference.outputs[name][call]
        exact = whole.double()
        noise = max(relative_rms(step.outputs[name][call].double() - exact, exact) for step in noisy)
        if name == "" and not noise < UNSTABLE:
            raise UsageError(
                f"the reference's output changes by {noise:.0%} from call to call: switch dropout off (model.eval())"
            )
        mean = exact.square().mean().sqrt().item()
        exact = exact[run.tokens.to(exact.device)]
        allowed = allowed_error(noise, x, whole)
        difference = x.double().to(exact.device) - exact
        error, size = (y.square().mean(1).sqrt() for y in (difference, exact))
        # Negated, so that an error that is NaN counts as wrong.
        wrong = run.tokens[~(error <= TOKEN_FACTOR * allowed * size.clamp_min(mean)).cpu()]
        rms = error.square().mean().sqrt().item() / mean if mean else error.max().item()
        located = error_on_rank(x.to(exact.device), exact, noise, allowed, run.ranks.rank, wrong)
        errors[f"{name} {call}"] = msgspec.structs.replace(located, rms=rms)
    return dict(zip(run.modules, worst_errors(errors, run.ranks).values(), strict=True))


def _parameter_errors(run: ModelRun, noisy: list[Step]) -> dict[str, ParameterCheck]:
    """Compare every gradient with the reference's. Collective."""
    zero = ParameterCheck(
        max_abs=0.0, rms=0.0, kernel_rms=0.0, allowed_rms=0.0, rank=run.ranks.rank, ratio=1.0, residual=0.0
    )
    errors = dict.fromkeys(run.reference.gradients, zero)
    for name, whole in run.reference.gradients.items():
        own = run.parallel.gradients[name]
        if own is None and whole is None:
            continue
        present = next(x for x in (whole, own) if x is not None)
        x, reference = (torch.zeros_like(present) if y is None else y for y in (own, whole))
        x, y = x.double().to(present.device), reference.double()
        changed = (step.gradients[name] for step in noisy)
        noise_rms = max((relative_rms(z.double() - y, y) for z in changed if z is not None), default=0.0)
        ratio = ((x * y).sum() / y.square().sum()).item() if y.any() else 0.0
        errors[name] = msgspec.structs.replace(
            zero, max_abs=(x - y).abs().max().item(), rms=relative_rms(x - y, y), kernel_rms=noise_rms, ratio=ratio,
            allowed_rms=allowed_error(noise_rms, present, reference), residual=relative_rms(x - ratio * y, ratio * y),
        )  # fmt: skip

    def size(error: ParameterCheck) -> float:
        return math.inf if math.isnan(error.rms) else error.rms

    return {name: max(by_rank, key=size) for name, by_rank in gather_by_name(errors, run.ranks).items()}


def _compare_losses(run: ModelRun, noisy: list[Step]) -> tuple[list[float], float | None, str | None]:
    """Return the ranks' losses, the reference's, and how the former make up the latter. Collective."""
    gradient = run.parallel.output_gradient
    counted = 0.0 if gradient is None else (gradient != 0).any(1).sum().item()
    own = math.nan if run.parallel.loss is None else run.parallel.loss
    by_rank = gather_numbers([own, counted], run.ranks)
    losses, loss = [row[0] for row in by_rank], run.reference.loss
    if loss is None or (any(map(math.isnan, losses)) and run.parallel.loss is None):
        return losses, None, None
    scale = abs(loss) or 1.0
    noise = max(abs((step.loss or 0.0) - loss) / scale for step in noisy)
    allowed = scale * allowed_error(noise, next(iter(run.parallel.outputs.values()))[0], torch.empty(0))
    tokens = sum(row[1] for row in by_rank)
    combinations = {
        "value": max(losses, key=lambda value: abs(value - loss)),
        "mean": sum(losses) / len(losses),
        "sum": sum(losses),
        "mean over tokens": sum(row[0] * row[1] for row in by_rank) / tokens if tokens else math.nan,
    }
    fits = (name for name, value in combinations.items() if abs(value - loss) <= allowed)
    return losses, loss, next(fits, None)
