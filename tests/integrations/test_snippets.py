"""Each training step that README and docs/ print trains ten steps as one process does, with a masked prompt."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the integration needs transformers")

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy, pad

import ringprof
from ringprof.integrations.batches import shard_batch
from ringprof.integrations.transformers import register
from ringprof.strategies import create
from tests.integrations.test_transformers import SEQ, SIZES, build, whole_batch
from tests.paths import ROOT
from tests.strategies.ranks import run_ranks

STEPS = 10
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
pytestmark = pytest.mark.processes

BLOCKS = {
    f"{path.name} {number}": block
    for path in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text("utf-8"), re.DOTALL))
    # The loop that skips a batch runs in tests/strategies/test_one_rank_raises.py.
    if re.search(r"\bloss = |\.loss\b", block) and "recoverable" not in block
}


def test_every_training_step_of_the_docs_is_found() -> None:
    assert [name.split()[0] for name in BLOCKS] == ["integrations.md"] * 3 + ["training.md"] * 2


def batch_of(step: int) -> dict[str, Any]:
    batch = {name: value.roll(step, 1) for name, value in whole_batch(2).items()}
    batch["labels"][:, :20] = -100
    return batch


class Lightning:
    """The part of LightningModule that a snippet uses."""

    def log(self, name: str, value: Any, *, sync_dist: bool) -> None:
        assert sync_dist


def names(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def _trained(rank: int, block: str, folder: Path) -> tuple[list[float], list[Any]]:
    """Run what a block does before it uses a batch once, and the rest in every step."""
    strategy = create("zigzag")
    register(strategy)
    torch.manual_seed(0)
    space: dict[str, Any] = {
        "strategy": strategy, "create": create, "register": register, "shard_batch": shard_batch, "torch": torch,
        "cross_entropy": cross_entropy, "mesh": init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), "path": folder,
        "AutoModelForCausalLM": transformers.AutoModelForCausalLM, "config": transformers.LlamaConfig(**SIZES),
        "accelerator": SimpleNamespace(backward=lambda loss: loss.backward()), "LightningModule": Lightning,
        "model": build("llama", "ringprof"),
    }  # fmt: skip
    nodes = ast.parse(block).body
    first = next((i for i, node in enumerate(nodes) if names(node) & {"batch", "labels", "ids"}), len(nodes))
    module = next((i for i, node in enumerate(nodes) if isinstance(node, ast.ClassDef)), None)
    before, after = (nodes[:first], nodes[first:]) if module is None else (nodes[: module + 1], [])
    torch.manual_seed(0)
    exec(compile(ast.Module(before, []), "before", "exec"), space)
    llama, losses = space["model"].train(False), []
    optimizer = torch.optim.SGD(llama.parameters(), lr=0.1)
    if "model(tokens, positions)" in block:
        space["positions"] = strategy.positions(SEQ)
        space["model"] = lambda ids, positions: llama(ids, position_ids=positions[None], use_cache=False).logits
    for step in range(STEPS):
        batch = batch_of(step)
        space |= {"batch": batch, "ids": batch["input_ids"], "tokens": batch["input_ids"], "labels": batch["labels"]}
        if "tokens" in names(ast.parse(block)):
            space["labels"] = pad(batch["labels"][:, 1:], (0, 1), value=-100)
        elif "positions" in names(ast.parse(block)):
            space["positions"] = torch.arange(SEQ).repeat(2, 1)
        exec(compile(ast.Module(after, []), "after", "exec"), space)
        if module is not None:
            loop = space["Module"]()
            loop.model = llama
            space["loss"] = loop.training_step(batch, step)
        loss = space["outputs"].loss if "outputs" in space else space["loss"]
        if "backward" not in block:
            loss.backward()
        mean = loss.detach().clone()
        for x in (mean, *(parameter.grad for parameter in llama.parameters())):
            dist.all_reduce(x)
            x /= 2
        losses.append(mean.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [parameter.detach().numpy() for parameter in llama.parameters()]


@pytest.mark.parametrize("name", BLOCKS)
def test_a_step_of_the_docs_trains_as_one_process(name: str, tmp_path: Path) -> None:
    model, losses = build("llama", "eager"), []
    model.save_pretrained(tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        loss = model(**batch_of(step)).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    for own, parameters in run_ranks(2, _trained, BLOCKS[name], tmp_path):
        assert own == pytest.approx(losses, rel=1e-5)
        for mine, right in zip(parameters, model.parameters(), strict=True):
            torch.testing.assert_close(torch.from_numpy(mine), right.detach(), rtol=1e-5, atol=1e-5)


def _checked(rank: int) -> Any:
    page = (ROOT / "docs" / "checking.md").read_text("utf-8")
    block = re.search(
        r"\n(    import torch, torch.distributed as dist\n.*?)\n\n    \$ ringprof check --model", page, re.DOTALL
    )
    assert block is not None
    space: dict[str, Any] = {}
    exec(textwrap.dedent(block[1]), space)
    return ringprof.check_model(*space["training_step"]())


def test_the_step_that_checking_prints_is_equal() -> None:
    for check in run_ranks(2, _checked):
        assert check.equal and check.loss_is == "sum"
