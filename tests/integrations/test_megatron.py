"""A strategy in Megatron's GPT: loss and gradients equal those of one process with Megatron's own attention."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest

if find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

import torch
import torch.distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron warns of every optional package that is missing
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.utils import get_batch_on_this_cp_rank

    from ringprof.integrations.megatron import core_attention

from tests.strategies.ranks import refusal, run_ranks

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore")]
SEQ, VOCABULARY, DOCUMENTS = 64, 128, (8, 40, 16)


def _on_cpu() -> None:
    """Let Megatron run without CUDA: it copies rotary embeddings there and forks CUDA's random state for dropout."""
    library: Any = torch
    library.cuda.current_device = lambda: "cpu"
    library.tensor = lambda *args, tensor=torch.tensor, pin_memory=False, **options: tensor(*args, **options)
    library.Tensor.cuda = lambda x, **unused: x
    parallel: Any = tensor_parallel
    parallel.get_cuda_rng_tracker = lambda: SimpleNamespace(fork=nullcontext)


def _model(ranks: int, attention: Any = None, **options: Any) -> Any:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, use_cpu_initialization=True,
        hidden_dropout=0.0, context_parallel_size=ranks, bias_dropout_fusion=False,
        **{"attention_dropout": 0.0, **options},
    )  # fmt: skip
    spec = get_gpt_layer_local_spec()
    if attention is not None:
        spec.submodules.self_attention.submodules.core_attention = attention
    torch.manual_seed(0)
    return GPTModel(config, spec, VOCABULARY, SEQ, position_embedding_type="rope")


def _loss(model: Any, tokens: Any, positions: Any, labels: Any, packed: Any = None) -> Any:
    mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1]).triu(1).bool()
    logits = model(tokens, positions, mask, packed_seq_params=packed)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


def _step(rank: int, strategy: str, documents: tuple[int, ...] | None) -> tuple[float, float]:
    _on_cpu()
    tokens = torch.randint(VOCABULARY, (1, SEQ + 1), generator=torch.Generator().manual_seed(1))
    parts = documents or (SEQ,)
    positions = torch.cat([torch.arange(length) for length in parts])[None]
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].contiguous(), "positions": positions}
    model = _model(1)
    rows = zip(*(batch[name].split(parts, 1) for name in ("tokens", "positions", "labels")), strict=True)
    truth = sum(_loss(model, *row) for row in rows)
    truth.backward()
    expected = [parameter.grad for parameter in model.parameters()]

    model, packed = _model(2, core_attention(strategy)), None
    if documents is None:
        local = get_batch_on_this_cp_rank(dict(batch))
    else:
        lengths = torch.tensor([0, *accumulate(documents)], dtype=torch.int32)
        packed = PackedSeqParams("thd", lengths, lengths, max_seqlen_q=max(documents), max_seqlen_kv=max(documents))
        # Each document by itself in zigzag order, as Transformer Engine's thd_get_partitioned_indices has it.
        pieces = [get_batch_on_this_cp_rank({name: x for name, x in zip(batch, row, strict=True)})
                  for row in zip(*(x.split(documents, 1) for x in batch.values()), strict=True)]  # fmt: skip
        local = {name: torch.cat([piece[name] for piece in pieces], 1) for name in batch}
    loss = _loss(model, local["tokens"], local["positions"], local["labels"], packed)
    loss.backward()
    total, worst = loss.detach().clone(), 0.0
    dist.all_reduce(total)
    for parameter, right in zip(model.parameters(), expected, strict=True):
        dist.all_reduce(parameter.grad)
        worst = max(worst, float((parameter.grad - right).norm() / right.norm().clamp_min(1e-6)))
    return total.item() / truth.item() - 1, worst


@pytest.mark.parametrize("strategy", ["zigzag", "megatron"])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "packed"])
def test_loss_and_gradients_equal_those_of_one_process(strategy: str, documents: tuple[int, ...] | None) -> None:
    for loss, worst in run_ranks(2, _step, strategy, documents):
        assert abs(loss) < 1e-5
        assert worst < 1e-5


def _refusals(rank: int) -> list[str]:
    _on_cpu()
    messages = []
    for name, options in (
        ("ulysses", {}), ("zigzag", {"attention_dropout": 0.1}), ("zigzag", {"window_size": (8, 0)}),
        ("zigzag", {"apply_query_key_layer_scaling": True}),
    ):  # fmt: skip
        messages.append(refusal(lambda name=name, options=options: _model(2, core_attention(name), **options)))
    attention = _model(2, core_attention()).decoder.layers[0].self_attention.core_attention
    q = torch.randn(8, 1, 2, 8)
    return [*messages, refusal(attention, q, q, q, None, attn_mask_type=AttnMaskType.no_mask)]


def test_what_would_be_wrong_is_refused_by_name() -> None:
    for messages in run_ranks(2, _refusals):
        for message, name in zip(messages, ["ulysses", "dropout", "windows", "scaling", "no_mask"], strict=True):
            assert name in message
