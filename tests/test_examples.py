"""The scripts under ``examples/`` train as one process does, and write runs that a report reads."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ringprof
from tests.paths import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]
torch = pytest.importorskip("torch", reason="the record extra is not installed")

EXAMPLES = ROOT / "examples"
STEPS, SEQ = 10, 128


def run_example(name: str, ranks: int, folder: Path, *options: str) -> str:
    """Run an example under torchrun and return what it printed; without options it gets the folder of its output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(EXAMPLES / f"{name}.py"), *(options or (str(folder),))],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def printed(text: str) -> list[tuple[float, float]]:
    """Return loss and gradient norm of every printed step."""
    lines = re.findall(r"step (\d+): loss ([\d.]+), gradient norm ([\d.]+)", text)
    assert [int(step) for step, *_ in lines] == list(range(STEPS)), text
    return [(float(loss), float(norm)) for _, loss, norm in lines]


def trained_alone(model: Any, loss_of: Callable[[int], Any]) -> list[tuple[float, float]]:
    """Train ``model`` in this process, without ringprof. Return loss and gradient norm of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = []
    for step in range(STEPS):
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rows.append((loss.item(), norm.item()))
    return rows


@pytest.fixture(scope="module")
def tiny() -> Iterator[Any]:
    """The module ``examples/tiny_model.py``."""
    spec = importlib.util.spec_from_file_location("tiny_model", EXAMPLES / "tiny_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module


def tiny_trained_alone(tiny: Any, replicas: int) -> list[tuple[float, float]]:
    model = tiny.Model(tiny.dense_attention)

    def loss_of(step: int) -> Any:
        rows = [tiny.batch(step, SEQ, replica) for replica in range(replicas)]
        tokens, labels = (torch.cat(parts) for parts in zip(*rows, strict=True))
        return torch.nn.functional.cross_entropy(model(tokens, torch.arange(SEQ)).flatten(0, 1), labels.flatten())

    return trained_alone(model, loss_of)


def assert_equal(rows: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
    for row, truth in zip(rows, expected, strict=True):
        assert row == pytest.approx(truth, rel=1e-5, abs=1e-5)  # five decimals are printed


@pytest.mark.parametrize(
    ("name", "ranks", "replicas"), [("plain_loop", 2, 1), ("ddp", 2, 1), ("fsdp2", 2, 1), ("dp_cp_mesh", 4, 2)]
)
def test_example_trains_as_one_process_does(name: str, ranks: int, replicas: int, tiny: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert_equal(printed(run_example(name, ranks, folder)), tiny_trained_alone(tiny, replicas))
    run = ringprof.load(folder)
    assert len(run.breakdown()) == ranks
    # The strategy's blocks are in the run; its workload only where the example states it.
    assert ("block_tflops" in run.figures(), "tflops" in run.figures()) == (True, name == "dp_cp_mesh")


@pytest.mark.parametrize("name", ["hugging_face", "lightning_trainer"])
def test_hugging_face_example_trains_as_one_process_does(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the dev extra is not installed")
    if name == "lightning_trainer":
        pytest.importorskip("pytorch_lightning", reason="pytorch-lightning is not installed")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=SEQ, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)

    def loss_of(step: int) -> Any:
        tokens = torch.randint(256, (1, SEQ), generator=torch.Generator().manual_seed(step))
        logits = model(input_ids=tokens, use_cache=False).logits
        labels = tokens.index_fill(1, torch.arange(SEQ // 8), -100)
        return torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:])

    folder = tmp_path / "run"
    assert_equal(printed(run_example(name, 2, folder)), trained_alone(model, loss_of))
    if name == "hugging_face":
        assert len(ringprof.load(folder).breakdown()) == 2
    else:
        (sample,) = map(json.loads, (folder / "exposed.jsonl").read_text("utf-8").splitlines())
        assert sample["step"] == STEPS and sample["ranks"] == 2


def test_profiler_example_writes_traces_that_a_report_reads(tmp_path: Path) -> None:
    run_example("profiler_only", 2, tmp_path / "traces")
    run = ringprof.load(tmp_path / "traces")
    assert len(run.breakdown()) == 2
    assert run.figures()["all_reduce_ms"] > 0


@pytest.mark.gpu
def test_stamps_within_a_fused_ring_show_injected_delays(tmp_path: Path) -> None:
    """The example itself compares the stamps with the delays, to 2 µs; its ranges are in the traces."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    text = run_example("fused_ring_stamps", 2, tmp_path / "traces")
    assert text.count("waits") == 12 and "MISSED" not in text
    for path in (tmp_path / "traces").iterdir():
        assert_steps_are_within_kernels(json.loads(path.read_text("utf-8"))["traceEvents"])


def assert_steps_are_within_kernels(events: list[dict[str, Any]]) -> None:
    """Assert that the ranges of all 12 steps of 12 launches lie within the ring's kernels, to 1 µs."""
    kernels = [event for event in events if event.get("cat") == "kernel" and "ring_kernel" in event["name"]]
    steps = [event for event in events if event["name"].startswith("ring step ")]
    assert len(kernels) == 12 and len(steps) == 2 * 12 * 12
    spans = [(event["ts"] - 1, event["ts"] + event["dur"] + 1) for event in kernels]
    for step in steps:
        assert any(start <= step["ts"] and step["ts"] + step["dur"] <= end for start, end in spans)


def test_every_example_is_in_the_docs_and_has_a_test() -> None:
    scripts = {path.stem for path in EXAMPLES.glob("*.py")} - {"tiny_model", "setup_ranks"}
    pages = "".join(
        (ROOT / "docs" / name).read_text("utf-8") for name in ("training.md", "prediction.md", "workloads.md")
    )
    assert all(f"](../examples/{name}.py)" in pages for name in scripts)
    # Those that need GPUs are tested in tests/integrations, the one over a cache in tests/strategies.
    elsewhere = {"transformers_trainer", "torchtitan_llama", "megatron_gpt", "prefill_to_decode"}
    assert all(f'"{name}"' in Path(__file__).read_text("utf-8") for name in scripts - elsewhere)


def test_two_processes_send_what_a_rank_of_four_sends(tmp_path: Path) -> None:
    """Zigzag sends K and V three times forward, and three times backward, with dK and dV in float32 three times.

    K and V of 256 tokens, 4 heads of 128 in bfloat16 have 524,288 bytes; a float32 hop has twice as many.
    """
    text = run_example("two_gpus_as_many", 2, tmp_path, "--ranks", "4", "--iters", "2", "--warmup", "1")
    bytes_sent = 3 * 524_288 + 3 * 524_288 + 3 * 2 * 524_288
    assert f"{bytes_sent / 1e6:.3f} MB sent per iteration and rank" in text, text
    ulysses = run_example("two_gpus_as_many", 2, tmp_path, "--strategy", "ulysses", "--iters", "1")
    # Three of four pieces of q, k, v and the output leave a rank, and as much of their gradients.
    assert f"{2 * 4 * 262_144 * 3 / 4 / 1e6:.3f} MB sent per iteration and rank" in ulysses, ulysses
