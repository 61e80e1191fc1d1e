"""``ringprof check``: local and torchrun ranks, exit codes, and one-line errors for every failure of a rank."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="checking needs torch")

from ringprof import cli
from tests.paths import ROOT
from tests.recording.command import TORCHRUN, run, started_in

pytestmark = pytest.mark.processes

HERE = ["--device", "cpu"]
SMALL = ["--layout", "zigzag", "--heads", "2", "--head-dim", "16", *HERE]

MINE = '''
import os
import time

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from ringprof.strategies import create

calls = 0


class Zigzag:
    strategy = None

    def attend(self, q, k, v):
        self.strategy = self.strategy or create("zigzag")
        return self.strategy.attention(q, k, v)


right = Zigzag()


def alone(q, k, v):
    out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    return out.transpose(1, 2)


def fails(q, k, v):
    """On rank 1, in its second call, while rank 0 waits for it in a collective."""
    global calls
    calls += 1
    if calls == 2 and dist.get_rank() == 1:
        raise ValueError("boom")
    dist.all_reduce(torch.ones(1))
    return alone(q, k, v)


def leaves(q, k, v):
    os._exit(0)


def leaves_alone(q, k, v):
    """On rank 1; rank 0 would wait for it until the time limit."""
    if dist.get_rank() == 1:
        os._exit(0)
    return alone(q, k, v)


def says_too_much(q, k, v):
    raise ValueError("y" * 10_000_000)


def returns_no_tensor(q, k, v):
    return "text"


def hangs(q, k, v):
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.all_reduce(torch.ones(1))
    return alone(q, k, v)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def test_check_on_locally_started_ranks(folder: Path) -> None:
    done = run(["check", "mine:alone", "--world", "2", "--format", "json", *SMALL], folder)
    assert (done.returncode, done.stderr) == (1, "")
    said = json.loads(done.stdout)
    assert said["equal"] is False and said["ranks"] == 2 and said["workload"]["seq"] == 128
    assert said["errors"]["out"]["first_token"] == 32 and said["sent"][1] == {"operations": {}, "size_bytes": 0}


def test_check_on_ranks_of_torchrun(folder: Path) -> None:
    done = run(["-m", "ringprof", "check", "mine:right.attend", *SMALL], folder, TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal to dense attention over 128 tokens: 2 ranks, 64 tokens each, zigzag") == 1
    assert "sent by a rank in a call: " in done.stdout


def test_the_documented_example_of_a_model_is_equal_and_its_mistake_is_named(folder: Path) -> None:
    page = (ROOT / "docs" / "checking.md").read_text()
    example = textwrap.dedent(re.findall(r"one process:\n\n((?:    .*\n|\n)+?)    \$ (.*)\n", page)[0][0])
    (folder / "models.py").write_text(example)
    shifted = 'local["ids"].roll(-1, 1).masked_fill(local["labels"] == -100, -100)'
    (folder / "wrong.py").write_text(example.replace('local["labels"]', shifted))
    done = run(["check", "--model", "models:training_step", *HERE, "--world", "2"], folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("equal to one process: 2 ranks, 2 x 128 tokens, float32, cpu")
    command = ["-m", "ringprof", "check", "--model", "wrong:training_step", *HERE, "--format", "json"]
    done = run(command, folder, TORCHRUN)
    said = json.loads(done.stdout)
    assert said["schema"] == "ringprof.model-check/1" and said["equal"] is False
    assert said["reasons"][0].startswith("the labels are shifted across shard borders: 2 tokens differ only in")


@pytest.mark.parametrize(("arguments", "message"), [
    (["--model", "mine:step", "--layout", "zigzag"], "--layout: not with --model"),
    (["--model", "mine:step", "--documents", "3"], "--documents: not with --model"),
    (["--model", "mine:step", "--forward-only"], "--forward-only: not with --model"),
    (["mine:alone"], "--layout is missing"),
    (["mine", *SMALL], "'mine' is not module:function, such as mypackage.attention:ring_attention"),
])  # fmt: skip
def test_arguments_that_do_not_fit_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["check", *arguments]) == 2
    assert message in capsys.readouterr().err


FAILURES = [
    ("fails", 3,
     "rank 1 failed in call 2 of the attention, with another call between its passes: ValueError: boom; log: "),
    ("leaves", 3, "rank [01] exited with code 0 and printed no error; log: "),
    ("leaves_alone", 3, "rank 1 exited with code 0 and printed no error; log: "),
    # Of 10 MB.
    ("says_too_much", 3, r"rank [01] failed in call 1 of the attention \(batch 2, 2 heads of 16, bf16; try --batch 1,"
                         r" --dtype fp32\): ValueError: y{1000,}\.\.\.; log: "),
    ("nothing", 2, "'mine:nothing' cannot be imported: AttributeError: module 'mine' has no attribute 'nothing'"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "code", "message"), FAILURES, ids=[function for function, *_ in FAILURES])
def test_a_failure_ends_the_check_in_one_line(folder: Path, function: str, code: int, message: str) -> None:
    done = run(["check", f"mine:{function}", "--world", "2", *SMALL], folder)
    assert (done.returncode, done.stdout) == (code, "") and not started_in(folder)
    assert re.match(f"ringprof: .*{message}", done.stderr)
    assert done.stderr.count("\n") == 1 and len(done.stderr) < 2500


def test_refused_check_keeps_no_logs(folder: Path) -> None:
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    done = run(["check", "mine:returns_no_tensor", "--world", "2", *SMALL], folder, TMPDIR=str(temporary))
    assert (done.returncode, done.stderr) == (2, "ringprof: the attention returned str, not a tensor\n")
    assert list(temporary.iterdir()) == []


def test_hanging_rank_ends_the_check(folder: Path) -> None:
    """The other waits for it in a collective, where no Python runs."""
    done = run(["check", "mine:hangs", "--world", "2", "--time-limit", "1", *SMALL], folder)
    assert done.returncode == 3
    assert "all 2 ranks hung in call 1 of 5, step 1, when the time limit of 6 s was over; logs kept in" in done.stderr
    log = Path(done.stderr.split("logs kept in ")[1].strip()) / "rank1.log"
    assert "in hangs" in log.read_text()
    assert done.stderr.count("\n") == 1 and not started_in(folder)
