"""Random cases of recurrences over ranks, and their comparison with the token-by-token oracle."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from ringprof.strategies.recurrent.registry import STRATEGIES, create_recurrent
from tests.strategies.recurrent import oracle

OPERATORS = ("gated_delta_rule", "simple_gla", "gla", "mamba2")
TOLERANCE = 1e-10


def errors_of_cases(rank: int, size: int, seeds: list[int]) -> list[tuple[str, float]]:
    """Run the cases with these seeds on every rank. Return, on rank 0, each case and its largest relative error."""
    strategies: dict[str, Any] = {}
    return [error_of_case(rank, size, seed, strategies) for seed in seeds]


def documents_of(draw: random.Random, local: int, size: int) -> list[int] | None:
    """Return cumulative lengths of documents: inside ranks, at their edges, over several ranks; some are empty."""
    seq = local * size
    kind = draw.choice(["none", "few", "many", "edges", "mixed"])
    if kind == "none":
        return None
    count = {"few": 1, "many": seq // 3, "edges": 0, "mixed": 2}[kind]
    inner = [draw.randrange(seq + 1) for _ in range(count)]
    if kind in ("edges", "mixed"):
        inner += [local * edge for edge in range(1, size) if draw.random() < 0.5]
    return [0, *sorted(inner), seq]


def error_of_case(rank: int, size: int, seed: int, strategies: dict[str, Any]) -> tuple[str, float]:
    """Run one case; every rank must call it with the same seed."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    name, operator = draw.choice(list(STRATEGIES)), draw.choice(OPERATORS)
    if name not in strategies:
        strategies[name] = create_recurrent(name, kernel="reference")
    strategy = strategies[name]
    batch, local = draw.choice([1, 1, 2]), draw.choice([1, 2, 5, 16, 31, 32, 33, draw.randrange(3, 50)])
    groups = draw.choice([1, 2, 3])
    heads = groups * draw.choice([1, 2])
    if name == "state-a2a":
        heads *= size
    keys, values, seq = draw.randrange(1, 8), draw.randrange(1, 8), local * size
    documents = documents_of(draw, local, size)
    final, has_initial = draw.random() < 0.5, draw.random() < 0.5
    case = f"{name} {operator} on {size} ranks, seed {seed}: {batch=} {local=} {heads=} {groups=} {documents=}"

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64)

    initial = normal(batch, heads, keys, values) if has_initial else None
    replicated: dict[str, Tensor] = {}
    if operator == "mamba2":
        inputs = {
            "x": normal(batch, seq, heads, values), "dt": normal(batch, seq, heads).exp() / 2,
            "b": normal(batch, seq, groups, keys), "c": normal(batch, seq, groups, keys),
        }  # fmt: skip
        replicated = {"a": -normal(heads).exp(), "d": normal(heads)}
    else:
        gate = (batch, seq, heads, keys) if operator == "gla" else (batch, seq, heads)
        inputs = {
            "q": normal(batch, seq, groups, keys),
            "k": torch.nn.functional.normalize(normal(batch, seq, groups, keys), dim=-1),
            "v": normal(batch, seq, heads, values),
            # From no decay at all to a decay that leaves nothing.
            "g": -torch.rand(gate, dtype=torch.float64) ** 4 * draw.choice([0.0, 1.0, 50.0]),
        }  # fmt: skip
        if operator == "gated_delta_rule":
            inputs["beta"] = 2 * torch.rand(gate, dtype=torch.float64)
    weight, final_weight = normal(batch, seq, heads, values), normal(batch, heads, keys, values)

    # Over the ranks.
    own = {key: strategy.shard(x).requires_grad_() for key, x in inputs.items()}
    shared = {key: x.clone().requires_grad_() for key, x in replicated.items()}
    first = None if initial is None else initial.clone().requires_grad_()
    result = getattr(strategy, operator)(
        **own, **shared, initial_state=first, return_final_state=final, cu_seqlens=documents
    )
    out, last = result if final else (result, None)
    loss = (out * strategy.shard(weight)).sum()
    if last is not None:
        # The gradient of the final state is the sum over the ranks, here in unequal shares.
        loss = loss + (last * final_weight).sum() * 2 * (rank + 1) / (size * (size + 1))
    loss.backward()
    actual = {"out": strategy.unshard(out), **{f"d{key}": strategy.unshard(x.grad) for key, x in own.items()}}
    summed = {f"d{key}": x.grad for key, x in shared.items()} | ({"dinitial": first.grad} if first is not None else {})
    actual |= {key: sum(strategy.comm.all_gather(x)) for key, x in summed.items()}
    if last is not None:
        actual["final"] = last
    if rank:
        return case, 0.0

    # By the oracle.
    whole = {key: x.clone().requires_grad_() for key, x in (inputs | replicated).items()}
    first = None if initial is None else initial.clone().requires_grad_()
    bounds = [0, seq] if documents is None else documents
    # The oracle's last state is that of the last document with tokens.
    if operator == "mamba2":
        out, last = oracle.mamba2(
            whole["x"], whole["dt"], whole["a"], whole["b"], whole["c"], whole["d"], bounds, first
        )
    else:
        q, k = (whole[key].repeat_interleave(heads // groups, 2) for key in "qk")
        out, last = oracle.recurrence(q, k, whole["v"], whole["g"], whole.get("beta"), keys**-0.5, bounds, first)
    loss = (out * weight).sum()
    if final:
        loss = loss + (last * final_weight).sum()
    loss.backward()
    expected: dict[str, Any] = {
        "out": out.detach(),
        "final": last.detach(),
        **{f"d{key}": x.grad for key, x in whole.items()},
    }
    if first is not None:
        expected["dinitial"] = torch.zeros_like(first) if first.grad is None else first.grad
    errors = [(x - expected[key]).abs().max() / (1 + expected[key].abs().max()) for key, x in actual.items()]
    return case, float(torch.stack(errors).detach().max())
