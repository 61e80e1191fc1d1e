"""Train a tiny model of every causal class of transformers on 2 ranks, and compare it with one process.

    python scripts/sweep_models.py sweep.jsonl            # resumable: models in the file are not run again
    python scripts/sweep_models.py sweep.jsonl --page docs/transformers-models.md

Each model has 4 layers, a hidden size of 32 and random weights in float64, or in float32 where it cannot run so. It
trains on a batch with ignored labels and on packed documents, whose truth is each document alone. Its answer is equal
(loss and every gradient), whole (packed documents are refused), refused (`Unsupported` on every rank), fault, or not
run (it has no tiny configuration, or is not built within 2 s).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import textwrap
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ringprof.integrations.batches import shard_batch
from ringprof.integrations.transformers import register
from ringprof.strategies import Unsupported, create
from tests.strategies.ranks import run_ranks

VOCABULARY, DOCUMENTS = 64, (0, 10, 11, 40, 64)
TOLERANCE = 1e-5
"""Largest relative error of the loss and of each gradient's norm, or of a thousandth of the largest gradient's."""
BUILD_S, MEMORY = 2.0, 16 << 30
TINY: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "dim_model", "embed_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "dim_head", "kv_channels", "global_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "dim_ff", "ffn_hidden_size"), 64),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_d_head", "mamba_head_dim", "mamba_d_state"), 8),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
    "sliding_window": 16, "hidden_size_per_layer_input": 8, "query_pre_attn_scalar": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

# Sizes to set also where a default is None.
NEEDED = {"head_dim", "num_key_value_heads", "num_experts_per_tok", "n_routed_experts", "n_shared_experts"}


def tiny(default: Any, **options: Any) -> Any:
    """Return a configuration of the class of ``default`` with small sizes, no dropout and larger random weights."""
    names = set(default.to_dict()) | set(default.attribute_map)
    sizes: dict[str, Any] = {}
    for name in names & set(TINY):
        try:
            if getattr(default, name) is not None or name in NEEDED:
                sizes[name] = TINY[name]
        except AttributeError:  # its value is one per layer
            continue
    if sizes.get("num_key_value_heads") and default.num_key_value_heads in (None, default.num_attention_heads):
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    for name in names:
        if "drop" in name and isinstance(getattr(default, name, None), float):
            sizes[name] = 0.0
    if "initializer_range" in names:
        sizes["initializer_range"] = 0.1
    return type(default)(**sizes, **options)


def build(name: str, attention: str, dtype: torch.dtype) -> Any:
    """Return a model of type ``name`` with the same random weights for every ``attention``."""
    default = transformers.AutoConfig.for_model(name)
    kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])
    text = default.get_text_config(decoder=True)
    options = {"attn_implementation": attention, "use_cache": False}
    if type(text) is type(default):
        config = tiny(default, **options)
    elif kind.config_class is type(text):
        config = tiny(text, **options)
    else:
        raise ValueError("it has parts beside its text model")
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    torch.manual_seed(0)
    return kind(config).to(dtype).train(False)


def batches() -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2, DOCUMENTS[-1]), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)
    positions = torch.cat([torch.arange(end - begin) for begin, end in pairwise(DOCUMENTS)])[None]
    whole = {"input_ids": ids, "labels": labels}
    return {"whole": whole, "packed": {"input_ids": ids[:1], "labels": labels[:1], "position_ids": positions}}


def mean_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean loss over all labels of one process that sees each document alone."""
    documents = DOCUMENTS if "position_ids" in batch else (0, DOCUMENTS[-1])
    total, count = torch.zeros((), dtype=torch.float64), 0
    for begin, end in pairwise(documents):
        ids, labels = (batch[name][:, begin:end] for name in ("input_ids", "labels"))
        if labels_in := int((labels[:, 1:] != -100).sum()):
            total = total + labels_in * model(input_ids=ids, labels=labels, use_cache=False).loss
            count += labels_in
    return total / count


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def on_ranks(rank: int, name: str, dtype: torch.dtype, truth: dict[str, Any]) -> tuple[str, str]:
    """Return this rank's answer and its reason, from two steps on each batch."""
    strategy = create("zigzag")
    register(strategy)
    kind, reason = "fault", ""
    try:
        model = build(name, "ringprof", dtype)
        for case, batch in batches().items():
            for _ in range(2):  # the second shard_batch notices that no strategy was called
                loss = model(**shard_batch(batch, strategy)).loss
                own = gradients(model, loss)
            right_loss, right = truth[case]
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            errors = {"loss": abs(float(mean) / 2 - right_loss) / right_loss}
            largest = max(float(x.norm()) for x in right.values())
            for key, expected in right.items():
                total = own.get(key, torch.zeros_like(expected)).clone()
                dist.all_reduce(total)
                errors[key] = float((total / 2 - expected).norm()) / max(float(expected.norm()), 1e-3 * largest)
            worst = max(errors, key=lambda key: errors[key])
            if not errors[worst] < TOLERANCE:
                return "fault", f"{case}: {worst} is off by {errors[worst]:.1e}"
            kind, reason = ("equal", "") if case == "packed" else ("whole", "")
    except Unsupported as error:
        return ("whole" if kind == "whole" else "refused"), str(error)
    except Exception as error:
        try:
            register(strategy, model=build(name, "eager", dtype))
        except Unsupported as refusal:
            return "refused", str(refusal)
        return "fault", f"{type(error).__name__}: {error}"
    return kind, reason


def one_process(name: str, dtype: torch.dtype) -> dict[str, tuple[float, dict[str, Tensor]]]:
    """Return loss and gradients of each batch. Raises where the model is not built in time, or does not run."""
    started = time.perf_counter()
    try:
        model = build(name, "eager", dtype)
    except ValueError:
        model = build(name, "sdpa", dtype)
    if (seconds := time.perf_counter() - started) > BUILD_S:
        raise TimeoutError(f"its tiny configuration takes {seconds:.0f} s to build")
    losses = {case: mean_loss(model, batch) for case, batch in batches().items()}
    return {case: (float(loss.detach()), gradients(model, loss)) for case, loss in losses.items()}


PAGE = """# Causal models of transformers

Each class of transformers {version} that `AutoModelForCausalLM` builds, with a tiny configuration and random weights,
on 2 CPU ranks with `zigzag`, against one process: the loss and every gradient, to 1e-5, on a batch with ignored labels
and on packed documents. [Integrations](integrations.md) says how to use a model, and what is refused. The
configurations are the defaults with small sizes: a checkpoint whose layers are of other kinds, or whose rotary
embeddings depend on the length, may be refused. A model that raises an error of its own counts as refused where
`register(strategy, model=model)` names the reason. This command writes the page, for any version:

    python scripts/sweep_models.py sweep.jsonl --page docs/transformers-models.md
"""
HEADINGS = {
    "equal": "Equal",
    "whole": "Equal, but packed documents are refused",
    "refused": "Refused with a sentence that says why",
    "fault": "Faults",
    "not run": "Not run: no tiny configuration, or not built within 2 s",
}


def page(rows: list[dict[str, str]]) -> str:
    """Return the page of a log: for each answer the model types, and the sentences that refuse."""
    text = PAGE.format(version=transformers.__version__)
    for answer, heading in HEADINGS.items():
        reasons: dict[str, list[str]] = {}
        for row in rows:
            if row["answer"] == answer:
                # The sentence without the class that it names, which differs from model to model.
                reason = re.sub(r"^\w+ (?=takes|counts|computes|does|gets)", "the model ", row["reason"])
                reason = re.split(r"[:;.(]", reason, maxsplit=1)[0] if answer == "refused" else ""
                reason = reason[:1].upper() + reason[1:]
                reasons.setdefault(reason, []).append(f"`{row['model']}`")
        if reasons:
            text += f"\n## {heading}: {sum(map(len, reasons.values()))}\n"
        for reason, names in sorted(reasons.items()):
            lines = textwrap.wrap(f"{reason.strip()}: {', '.join(names)}" if reason else ", ".join(names), 120)
            text += "\n" + "\n".join(lines) + "\n"
    return text


def isolated(pipe: Any, name: str) -> None:
    """Send the truth's type, then the answer; or the answer alone where one process cannot run the model."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])  # its import is not part of the time to build
    for dtype in (torch.float64, torch.float32):
        try:
            truth = one_process(name, dtype)
            break
        except Exception as error:
            if dtype is torch.float32 or isinstance(error, TimeoutError):
                pipe.send(("not run", f"{type(error).__name__}: {error}"))
                return
    pipe.send(None)
    answers = run_ranks(2, on_ranks, name, dtype, truth)
    pipe.send(answers[0] if answers[0][0] == answers[1][0] else ("fault", f"the ranks differ: {answers}"))


def run(name: str, limit: float) -> tuple[str, str]:
    """Return the answer for one model from a process of its own; one process and the ranks have ``limit`` seconds."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=isolated, args=(sender, name))
    process.start()
    sender.close()
    answer: tuple[str, str] | None = None
    try:
        for kind in ("not run", "fault"):
            answer = receiver.recv() if receiver.poll(limit) else (kind, f"no answer within {limit:.0f} s")
            if answer is not None:
                break
    except EOFError:
        answer = "fault", "its process ended without an answer"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    assert answer is not None
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("log", type=Path, help="a line of JSON per model; models in it are not run again")
    parser.add_argument("--only", help="run these model types alone, separated by commas")
    parser.add_argument("--limit", type=float, default=60.0, metavar="S", help="time for one model")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the answers of the log as a page, too")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.log.read_text().splitlines()] if options.log.exists() else []
    done = {row["model"] for row in rows}
    for name in options.only.split(",") if options.only else sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        if name not in done:
            kind, reason = run(name, options.limit)
            with options.log.open("a") as file:
                print(json.dumps({"model": name, "answer": kind, "reason": reason[:400]}), file=file)
            print(f"{name:<24} {kind:<8} {reason[:150]}", flush=True)
    if options.page:
        rows = [json.loads(line) for line in options.log.read_text().splitlines()]
        options.page.write_text(page(rows), "utf-8")


if __name__ == "__main__":
    main()
