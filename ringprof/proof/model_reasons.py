"""Explanations of a difference between a parallel model and its reference, each decided by a measurement."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringprof.proof.dense import TOKEN_FACTOR, gather_numbers, relative_rms
from ringprof.proof.model_step import ModelRun, names_of, rows_of
from ringprof.proof.result import ModelCheck, token_in_words

RATIO_TOLERANCE = 0.01
"""Relative difference up to which a gradient's ratio is taken for a number."""
NEGLIGIBLE = 1e-3
"""Share of the largest gradient below which a dependence on a token is not reported."""


def explain(run: ModelRun, check: ModelCheck, holders: Tensor) -> list[str]:
    """Return a sentence for each cause that a measurement decides. Collective.

    ``holders`` is the number of ranks that hold each token.
    """
    if (reason := _not_partitioned(run, check, holders)) is not None:
        return [reason]
    if check.first_difference is not None:
        return _explain_output(run, check)
    return _explain_loss(run, check) or _explain_gradients(run, check)


def _not_partitioned(run: ModelRun, check: ModelCheck, holders: Tensor) -> str | None:
    """Say which tokens no rank or several ranks hold; None where each token is on one rank."""
    missing, repeated = (holders == 0).nonzero()[:, 0], (holders > 1).nonzero()[:, 0]
    parts = []
    if len(missing):
        parts.append(
            f"{len(missing)} tokens are on no rank (the first: {token_in_words(int(missing[0]), check.batch)})"
        )
    if len(repeated):
        first = int(repeated[0])
        ranks = [str(n) for n, held in zip(run.ranks.numbers, run.every_token, strict=True) if (held == first).any()]
        parts.append(
            f"{len(repeated)} are on several (the first: {token_in_words(first, check.batch)} on ranks"
            f" {', '.join(ranks)})"
        )
    return f"the shards do not partition the batch: {', '.join(parts)}" if parts else None


# --- the model's output differs -----------------------------------------------------------------


def _explain_output(run: ModelRun, check: ModelCheck) -> list[str]:
    """Explain a wrong output: compare it with the reference under known mistakes, then trace what the tokens see."""
    reasons = []
    for reason, outputs in _known_mistakes(run, check):
        fits = outputs is not None and all(_fits(run, name, x, check) for name, x in outputs.items())
        if all(bool(row[0]) for row in gather_numbers([float(fits)], run.ranks)):
            reasons.append(reason)
            break
    if not reasons or "without its argument" in reasons[0]:
        reasons += _seen_tokens(run, check)
    if run.ranks.size > 1 and check.sent is not None and not any(rank.operations for rank in check.sent):
        reasons.append("no rank sends anything in the forward pass: context parallelism is off")
    return reasons


_Outputs = dict[str, Tensor]
"""Rows of this rank's tokens in the outputs of modules, by name."""


def _known_mistakes(run: ModelRun, check: ModelCheck) -> Iterator[tuple[str, _Outputs | None]]:
    """Yield each mistake with outputs of the reference under it; None where the reference cannot show it.

    The outputs are those of the first module that differs, and of the model.
    """
    assert check.first_difference is not None
    whole, tokens, name_of_first = run.reference, run.tokens, check.first_difference.name
    whole.name_arguments()
    rows, seq = whole.shape
    parameters: dict[str, Any] = {}
    with suppress(TypeError, ValueError):
        parameters = dict(inspect.signature(whole.model.forward).parameters)

    def calls(args: tuple[Any, ...], kwargs: dict[str, Any], tokens: Tensor | None) -> Iterator[_Outputs | None]:
        if "attention_mask" in parameters and kwargs.get("attention_mask") is None:
            # transformers takes a jump of the positions for the border of a document where there is no mask.
            shape = run.reference.shape if tokens is not None else run.parallel.shape
            mask = torch.ones(shape, dtype=torch.int64, device=whole.ids.device)
            yield _call(run, args, kwargs | {"attention_mask": mask}, tokens, name_of_first)
        yield _call(run, args, kwargs, tokens, name_of_first)

    alone = "the output equals the reference on each rank's own tokens alone: context parallelism is silently off"
    if run.ranks.size > 1:
        for outputs in calls(run.parallel.args, run.parallel.kwargs, None):
            yield alone, outputs

        def shard(value: Any) -> Any:
            if (
                not isinstance(value, Tensor)
                or value.dim() < 2
                or value.shape[1] != seq
                or value.shape[0] not in (1, rows)
            ):
                return value
            full = value.expand(rows, *value.shape[1:]).flatten(0, 1)
            return full[tokens.to(full.device)].view(*run.parallel.shape, *full.shape[1:])

        kwargs = {name: shard(value) for name, value in whole.kwargs.items()}
        for outputs in calls(tuple(map(shard, whole.args)), kwargs, None):
            yield alone, outputs
    for name in (name for name in parameters if "pos" in name):
        for meaning, numbers in _wrong_positions(run):
            present = whole.kwargs.get(name)
            ids = numbers.view(rows, seq).to(whole.ids.device)
            ids = ids[0] if isinstance(present, Tensor) and present.dim() == 1 else ids
            for outputs in calls(whole.args, whole.kwargs | {name: ids}, tokens):
                yield f"the output equals the reference with {meaning} as {name}", outputs
    for name, value in whole.kwargs.items():
        optional = parameters.get(name) is None or parameters[name].default is not inspect.Parameter.empty
        if isinstance(value, Tensor) and value is not whole.ids and optional:
            kwargs = {key: other for key, other in whole.kwargs.items() if key != name}
            yield (
                f"the output equals the reference without its argument {name}: it is dropped",
                _call(run, whole.args, kwargs, tokens, name_of_first),
            )


def _wrong_positions(run: ModelRun) -> Iterator[tuple[str, Tensor]]:
    """Yield common mistakes in the position of every token of the batch."""
    rows, seq = run.reference.shape
    restarting = torch.empty(rows * seq, dtype=torch.int64)
    contiguous = torch.empty(rows * seq, dtype=torch.int64)
    first = 0
    for tokens in run.every_token:
        local = len(tokens) // run.parallel.shape[0]
        restarting[tokens] = torch.arange(len(tokens)) % local
        contiguous[tokens] = (first + torch.arange(len(tokens)) % local) % seq
        first += local
    yield "local positions, which restart on every rank,", restarting
    yield "the positions of contiguous shards", contiguous
    yield "positions that do not restart with a document", torch.arange(rows * seq) % seq


def _call(
    run: ModelRun, args: tuple[Any, ...], kwargs: dict[str, Any], tokens: Tensor | None, name: str
) -> _Outputs | None:
    """Call the reference without gradients; return the rows of ``tokens`` (None: all) of two modules' outputs.

    These are the model and the module ``name``. None where the call fails or gives no such rows.
    """
    model, outputs = run.reference.model, dict[str, Any]()
    names = names_of(model)
    shape = run.parallel.shape if tokens is None else run.reference.shape

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        rows = rows_of(output, shape)
        called = names[id(module)]
        if rows is not None:
            outputs.setdefault(called, rows[1] if tokens is None else rows[1][tokens.to(rows[1].device)])

    hooks = [x.register_forward_hook(keep) for x in model.modules() if names.get(id(x)) in (name, "")]
    try:
        with suppress(Exception), torch.no_grad():
            model(*args, **kwargs)
            return outputs if outputs.keys() == {name, ""} else None
    finally:
        for hook in hooks:
            hook.remove()
    return None


def _fits(run: ModelRun, name: str, output: Tensor, check: ModelCheck) -> bool:
    """Return whether every local token's row of a parallel module's output equals that of ``output``."""
    assert check.first_difference is not None
    error = check.first_difference.error if name == check.first_difference.name else check.logits
    if error is None:
        return False
    own = run.parallel.outputs[name][0].double()
    difference, size = (x.square().mean(1).sqrt() for x in (own - output.double().to(own.device), own))
    return bool((difference <= TOKEN_FACTOR * error.allowed_rms * size.clamp_min(size.mean())).all())


def _seen_tokens(run: ModelRun, check: ModelCheck) -> list[str]:
    """Trace on which tokens the first wrong token depends, in both models, through gradients. Collective.

    The step runs again, with the gradient of the first differing module's output replaced by a random one at the token
    and 0 elsewhere. The gradient of the first module's output then shows which tokens it depends on.
    """
    first = check.first_difference
    assert first is not None
    if first.error.first_token is None:
        return []
    sources = [name for name, call in run.modules if name not in ("", first.name) and not call]
    token = first.error.first_token
    own_index = (run.tokens == token).nonzero()
    index = int(own_index[0]) if len(own_index) else None
    own = _dependence(run, first.name, sources, index, parallel=True)
    whole = _dependence(run, first.name, sources, token, parallel=False)
    known = own is not None and whole is not None
    if not all(bool(row[0]) for row in gather_numbers([float(known)], run.ranks)):
        return []
    assert own is not None and whole is not None
    # Ranks may hold different numbers of tokens: each fills in its own of the whole batch.
    full = torch.zeros(math.prod(run.reference.shape), dtype=torch.float64)
    full[run.tokens] = own
    seen = torch.tensor(gather_numbers(full.tolist(), run.ranks)).sum(0)
    leaks = ((whole == 0) & (seen > NEGLIGIBLE * seen.max())).nonzero()[:, 0]
    missing = ((seen == 0) & (whole > NEGLIGIBLE * whole.max())).nonzero()[:, 0]
    where = f"{token_in_words(token, check.batch)} on rank {first.error.first_rank}"
    reasons = []
    if len(leaks):
        reasons.append(_leak_in_words(run, check, token, leaks, where, whole))
    if len(missing):
        ranks = [
            str(number) for number, tokens in zip(run.ranks.numbers, run.every_token, strict=True)
            if torch.isin(missing, tokens).any() and not (seen[tokens] > 0).any()
        ]  # fmt: skip
        of_ranks = f": nothing of rank {', '.join(ranks)} reaches it" if ranks else ""
        first_missing = token_in_words(int(missing[0]), check.batch)
        reasons.append(
            f"{where} does not see {len(missing)} token{'s' * (len(missing) > 1)} that it should (the first:"
            f" {first_missing}){of_ranks}"
        )
    return reasons


def _leak_in_words(
    run: ModelRun, check: ModelCheck, token: int, leaks: Tensor, where: str, visible: Tensor
) -> str:  # fmt: skip
    """Say which tokens a token sees that the reference hides, and which mask hides them there."""
    seq = check.batch[1]
    leak = int(leaks[0])
    kind = "mask"
    padded = [
        value for value in run.reference.kwargs.values()
        if isinstance(value, Tensor) and value.shape == run.reference.shape and value.dtype in (torch.bool, torch.int64)
        and set(value.flatten().tolist()) <= {0, 1}
    ]  # fmt: skip
    if leak // seq != token // seq:
        kind = "separation of the rows"
    elif any(not bool(mask.flatten()[leak]) for mask in padded):
        kind = "padding mask"
    elif int(leaks.min()) > token:
        kind = "causal mask"
    elif leak < token:
        # A document shows its first token nothing before it; a window shows all but the keys that it has just left.
        begin = int((visible > 0).nonzero()[0])
        kind = "mask of packed documents" if begin == token else "mask of packed documents or of a window"
        if begin < token and leaks.tolist() == [begin - 1]:
            kind = f"window of {token - begin + 1} tokens"
    return (
        f"{where} sees {len(leaks)} token{'s' * (len(leaks) > 1)} that the reference hides (the first:"
        f" {token_in_words(leak, check.batch)}): the {kind} is dropped"
    )


def _dependence(run: ModelRun, name: str, sources: list[str], token: int | None, *, parallel: bool) -> Tensor | None:
    """Return the size of the gradient of each token's source row, for a gradient at one row of a module's output.

    ``token`` is the row, None where another rank holds it. The source is the first of ``sources`` with a gradient.
    """
    gathered: list[Tensor] = []
    shape = (run.parallel if parallel else run.reference).shape

    def change(called: str, module: nn.Module, output: Any) -> None:
        rows = rows_of(output, shape) if called in (name, "") or (called in sources and not gathered) else None
        if rows is None or not rows[0].requires_grad:
            return
        tensor = rows[0]
        if called in (name, ""):
            generator = torch.Generator().manual_seed(0)
            direction = torch.randn(rows[1].shape[1], generator=generator).to(tensor)

            def replace(gradient: Tensor) -> Tensor:
                injected = torch.zeros_like(gradient)
                if called == name and token is not None:
                    injected.view(-1, injected[0, 0].numel())[token] = direction
                return injected

            tensor.register_hook(replace)  # type: ignore[no-untyped-call]
        else:
            gathered.append(torch.zeros(shape[0] * shape[1], dtype=torch.float64))
            size = gathered[0]

            def collect(gradient: Tensor) -> None:
                rows_of_gradient = rows_of(gradient, shape)
                assert rows_of_gradient is not None
                size.add_(rows_of_gradient[1].double().norm(dim=1).cpu())

            tensor.register_hook(collect)  # type: ignore[no-untyped-call]

    if parallel:
        run.run_parallel("the parallel step that traces gradients", change=change)
    else:
        run.run_reference("the reference that traces gradients", change=change)
    return gathered[0] if gathered else None


# --- only the loss, or only gradients differ ----------------------------------------------------


def _explain_loss(run: ModelRun, check: ModelCheck) -> list[str]:
    """Explain a wrong gradient of the output where the output is right: labels, weights of ranks. Collective."""
    own, whole = run.parallel.output_gradient, run.reference.output_gradient
    usable = own is not None and whole is not None and own.shape[1] == whole.shape[1]
    if not all(bool(row[0]) for row in gather_numbers([float(usable)], run.ranks)):
        return []
    assert own is not None and whole is not None
    own = own.double()
    mine = whole.double()[run.tokens.to(whole.device)].to(own.device)
    # The gradient of a cross entropy is softmax - 1 at the label: negative there alone, and 0 for an ignored token.
    used, right = (torch.where((x != 0).any(1), x.argmin(1), -1) for x in (own, mine))
    wrong = (used != right).cpu()
    sizes = (own.norm() / mine.norm()).item() if mine.any() else 1.0
    tokens = run.tokens
    first = int(tokens[wrong].min()) if wrong.any() else -1
    local = int((tokens == first).nonzero()[0]) if first >= 0 else -1
    # A border: the next token of the sequence is not the next on this rank.
    follows = torch.zeros_like(tokens, dtype=torch.bool)
    follows[:-1] = tokens[1:] == tokens[:-1] + 1
    row = [
        float(wrong.sum()), float((wrong & ~follows).sum()), float(first),
        float(used[local]) if first >= 0 else -1.0, float(right[local]) if first >= 0 else -1.0, sizes,
    ]  # fmt: skip
    rows = gather_numbers(row, run.ranks)
    if any(row[0] for row in rows):
        rank = min((number for number, row in enumerate(rows) if row[0]), key=lambda number: rows[number][2])
        count, at_borders = (int(sum(row[index] for row in rows)) for index in (0, 1))
        _, _, token, label, expected, _ = rows[rank]
        at_all = "shifted across shard borders" if count == at_borders else "wrong"
        words = ["ignored" if value < 0 else f"label {int(value)}" for value in (label, expected)]
        return [
            f"the labels are {at_all}: {count} tokens differ only in the loss, the first is"
            f" {token_in_words(int(token), check.batch)} on rank {rank} ({words[0]}, in the reference {words[1]})"
        ]
    ratios = [row[5] for row in rows]
    if check.wrong_parameters and max(ratios) > min(ratios) * (1 + RATIO_TOLERANCE):
        shown = ", ".join(f"{ratio:.3g}" for ratio in ratios[:8])
        return [
            f"the ranks' losses are weighted unequally: the output's gradient is {shown} times the reference's, by rank"
            " (a mean over each rank's own tokens, where the ranks have different numbers of labels?)"
        ]
    return []


def _explain_gradients(run: ModelRun, check: ModelCheck) -> list[str]:
    """Explain wrong gradients of parameters where the loss is right: their scale, or no reduction. Collective."""
    scaled: dict[str, int] = {}
    unreduced: dict[str, int] = {}
    for name, error in check.wrong_parameters.items():
        reference, own = run.reference.gradients[name], run.parallel.gradients[name]
        if error.residual <= max(error.allowed_rms, RATIO_TOLERANCE) and error.ratio:
            words = _ratio_in_words(error.ratio, run)
            scaled[words] = scaled.get(words, 0) + 1
        elif reference is not None and run.ranks.size > 1:
            total = (torch.zeros_like(reference) if own is None else own.to(reference, copy=True)).to(run.ranks.device)
            dist.all_reduce(total, group=run.ranks.group)
            summed, exact = total.to(reference).double(), reference.double()
            ratio = ((summed * exact).sum() / exact.square().sum()).item()
            if ratio and relative_rms(summed - ratio * exact, ratio * exact) <= max(error.allowed_rms, RATIO_TOLERANCE):
                right = abs(ratio - 1) < RATIO_TOLERANCE
                words = "right" if right else f"the reference's times {_ratio_in_words(ratio, run)}"
                unreduced[words] = unreduced.get(words, 0) + 1
    wrong = len(check.wrong_parameters)
    return [
        *(f"the gradients of {count} parameters are not reduced over all ranks: their sum over the ranks is {words}"
          for words, count in unreduced.items()),
        *(f"the gradients of {count} of {wrong} differing parameters are the reference's times {words}"
          for words, count in scaled.items()),
    ]  # fmt: skip


def _ratio_in_words(ratio: float, run: ModelRun) -> str:
    """Return a ratio as words: a number of ranks, or its inverse, where it is one."""
    row = run.every_token[0][0] // run.reference.shape[1]
    sharing = sum(bool((tokens // run.reference.shape[1] == row).any()) for tokens in run.every_token)
    sizes = {
        "the number of ranks": run.ranks.size, "the number of ranks that share a row": sharing,
        "the number of groups of ranks that share a row": run.ranks.size / sharing,
    }  # fmt: skip
    for words, size in sizes.items():
        if size > 1 and abs(ratio / size - 1) < RATIO_TOLERANCE:
            return f"{ratio:.3g}, {words}: summed where they are to be averaged, or scaled twice"
        if size > 1 and abs(ratio * size - 1) < RATIO_TOLERANCE:
            words = words.removeprefix("the number of ")
            return f"{ratio:.3g}, 1 / {words}: averaged where they are to be summed, or scaled twice"
    return f"{ratio:.3g}"
