"""Values of options, and what a shell completes."""

from __future__ import annotations

import os
import subprocess
import sys

import click
import pytest

from ringprof.cli.values import INFERENCE, KERNEL_NAMES, STRATEGIES, ListOf, Tokens
from tests.paths import ROOT


@pytest.mark.parametrize(
    ("text", "tokens"), [("131072", 131_072), ("128k", 131_072), ("128K", 131_072), ("1m", 1_048_576), (" 8k ", 8_192)]
)
def test_lengths_in_tokens(text: str, tokens: int) -> None:
    assert Tokens().convert(text, None, None) == tokens
    assert ListOf(Tokens()).convert(f"{text},64", None, None) == [tokens, 64]


@pytest.mark.parametrize("text", ["", "k", "1.5k", "-1", "12g", "1k2"])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="such as 131072 or 128k"):
        Tokens().convert(text, None, None)


def test_the_names_to_complete_are_those_that_there_are() -> None:
    strategies = pytest.importorskip("ringprof.strategies", reason="needs torch")
    from ringprof.strategies.kernels import KERNELS as KNOWN

    assert list(STRATEGIES) == strategies.names()
    assert list(INFERENCE) == strategies.for_inference()
    assert KERNEL_NAMES == ("auto", *KNOWN)


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("ringprof re", ["record", "report"]),
        ("ringprof record --strategy zi", ["zigzag"]),
        ("ringprof bench --strategies burst,u", ["burst,ulysses", "burst,usp"]),
        ("ringprof record --kernel c", ["cudnn", "cpu-flash"]),
        ("ringprof strategies dou", ["double-ring"]),
        ("ringprof report --ste", ["--steps"]),
    ],
)
def test_a_shell_completes_commands_options_and_names(words: str, completed: list[str]) -> None:
    asked = {"_RINGPROF_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv = ['ringprof']; from ringprof.cli import main; main()"],
        capture_output=True, text=True, env={**os.environ, **asked}, check=False, cwd=ROOT,
    )  # fmt: skip
    assert [line.split(",", 1)[1] for line in done.stdout.splitlines()] == completed, done.stderr
