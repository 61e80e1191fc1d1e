"""A strategy in torchtitan's Llama 3: loss and gradients equal those of one process, or the model is refused."""

from __future__ import annotations

import copy
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the record extra is not installed")

import torch

from tests.strategies.ranks import refusal, run_ranks

missing = [name for name in ("torchtitan", "triton", "datasets", "tensorboard") if find_spec(name) is None]
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}"),
    pytest.mark.filterwarnings("ignore"),
]
SEQ, VOCABULARY = 64, 128


def _modules() -> Any:
    """Import torchtitan for CPUs, and return what the tests use. At import it decides on the device for good."""
    utils: Any = torch._utils
    utils._get_available_device_type = lambda: "cpu"
    names = {
        "torchtitan.config": ["CompileConfig", "ParallelismConfig", "TrainingConfig"],
        "torchtitan.distributed": ["ParallelDims"],
        "torchtitan.models.common.attention": ["ScaledDotProductAttention"],
        "ringprof.integrations.torchtitan": ["trainer", "with_strategy"],
    }
    imported = {name: getattr(import_module(module), name) for module, named in names.items() for name in named}
    return SimpleNamespace(**imported)


def _config(titan: Any, family: str = "llama3") -> Any:
    """Return what `with_strategy` changes of a Trainer.Config: a model of two layers."""
    registry = import_module(f"torchtitan.models.{family}").model_registry
    spec = copy.deepcopy(registry("debugmodel", attn_backend="flex"))
    spec.model.layers = spec.model.layers[:2]
    spec.model.vocab_size = spec.model.tok_embeddings.num_embeddings = spec.model.lm_head.out_features = VOCABULARY
    return SimpleNamespace(model_spec=spec, training=titan.TrainingConfig())


def _model(config: Any) -> Any:
    torch.manual_seed(0)
    model = config.model_spec.model.build()
    model.init_states(buffer_device=torch.device("cpu"))
    return model


def _batch(documents: tuple[int, ...]) -> tuple[Any, Any, Any]:
    tokens = torch.randint(VOCABULARY, (1, SEQ + 1), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in documents])[None]
    return tokens[:, :-1], tokens[:, 1:], positions


def _summed(logits: Any, labels: Any) -> Any:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def _dense(titan: Any, family: str, documents: tuple[int, ...]) -> tuple[float, list[Any]]:
    """Return the summed loss and its gradients, each document alone through torchtitan's own attention."""
    config = _config(titan, family)
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = titan.ScaledDotProductAttention.Config()
    model = _model(config)
    parts = [x.split(documents, 1) for x in _batch(documents)]
    loss = sum(_summed(model(tokens, positions), labels) for tokens, labels, positions in zip(*parts, strict=True))
    loss.backward()
    return loss.item(), [parameter.grad for parameter in model.parameters()]


def _step(rank: int, family: str, strategy: str, documents: tuple[int, ...]) -> tuple[float, float]:
    titan = _modules()
    parallelism = titan.ParallelismConfig(context_parallel_degree=2, spmd_backend="partial_dtensor")
    config = titan.with_strategy(_config(titan, family), strategy)
    model, dims = _model(config), titan.ParallelDims.from_config(parallelism, 2)
    # FSDP is left out: gloo cannot reduce as torchtitan asks it to. Gradients are summed below.
    apply = config.model_spec.parallelize_fn.args[0].__globals__
    apply["apply_fsdp_to_decoder"] = lambda *unused, **options: None
    model = config.model_spec.parallelize_fn(
        model, parallel_dims=dims, training=config.training, parallelism=parallelism,
        compile_config=titan.CompileConfig(), ac_config=None, dump_folder="",
    )  # fmt: skip
    tokens, labels, positions = _batch(documents)
    tokens, labels, extra = titan.trainer.prepare_context_parallel_input(
        tokens, labels, {"positions": positions}, dims.get_mesh("cp"), torch.device("cpu"), "headtail", None
    )
    assert tokens.shape == labels.shape == (1, SEQ // 2)
    loss = _summed(model(tokens, **extra), labels)
    loss.backward()
    truth, expected = _dense(titan, family, documents)
    total, worst = loss.detach().clone(), 0.0
    torch.distributed.all_reduce(total)
    for parameter, right in zip(model.parameters(), expected, strict=True):
        torch.distributed.all_reduce(parameter.grad)
        worst = max(worst, float((parameter.grad - right).norm() / right.norm()))
    return total.item() / truth - 1, worst


@pytest.mark.parametrize(
    ("family", "strategy", "documents"),
    [
        ("llama3", "zigzag", (SEQ,)),
        ("llama3", "stripe", (SEQ,)),
        ("llama3", "zigzag", (10, 1, 29, 24)),
        ("llama3", "ulysses", (10, 1, 29, 24)),
        ("qwen3", "zigzag", (10, 1, 29, 24)),
    ],
)
def test_loss_and_gradients_equal_those_of_one_process(family: str, strategy: str, documents: tuple[int, ...]) -> None:
    for loss, worst in run_ranks(2, _step, family, strategy, documents):
        assert abs(loss) < 1e-5
        assert worst < 1e-5


def _refusals(rank: int) -> list[str]:
    titan, messages = _modules(), []
    off = {"tp_enabled": False, "pp_enabled": False, "cp_enabled": True}
    eager = SimpleNamespace(enable=False, components=[])
    compiled = SimpleNamespace(enable=True, components=["model"])
    for dims, compile_config in (
        ({**off, "tp_enabled": True}, eager), ({**off, "pp_enabled": True}, eager),
        ({**off, "cp_enabled": False}, eager), (off, compiled),
    ):  # fmt: skip
        spec = titan.with_strategy(_config(titan), "zigzag").model_spec
        options = {"parallel_dims": SimpleNamespace(**dims), "compile_config": compile_config}
        messages.append(refusal(spec.parallelize_fn, None, **options))
    config = _config(titan)
    config.model_spec.model.layers = [SimpleNamespace(attention=None)]
    return [*messages, refusal(titan.with_strategy, config, "zigzag")]


def test_what_would_be_wrong_is_refused_by_name() -> None:
    (messages,) = run_ranks(1, _refusals)
    for message, name in zip(
        messages, ["tensor parallelism", "pipeline parallelism", "degree of 1", "--compile", "NoneType"], strict=True
    ):
        assert name in message
