"""Values of options, and shell completion."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import BashComplete, get_completion_class

from ringprof import cli
from ringprof.cli.commands import group
from ringprof.cli.values import INFERENCE, KERNEL_NAMES, STRATEGIES, ListOf, Tokens
from tests.paths import ROOT
from tests.recording.command import HANGS_S


@pytest.mark.parametrize(
    ("text", "tokens"), [("131072", 131_072), ("128k", 131_072), ("128K", 131_072), ("1m", 1_048_576), (" 8k ", 8_192)]
)
def test_lengths_in_tokens(text: str, tokens: int) -> None:
    assert Tokens().convert(text, None, None) == tokens
    assert ListOf(Tokens()).convert(f"{text},64", None, None) == [tokens, 64]


@pytest.mark.parametrize("text", ["", "k", "1.5k", "-1", "12g", "1k2"])
def test_invalid_token_counts_are_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="such as 131072 or 128k"):
        Tokens().convert(text, None, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["advise", "--seq", "1m", "--machine", "h100", "--nic", "50GB"], "'--nic': '50GB' is not a number ("),
        (["advise", "--seq", "64k", "--nodes", "x"], "'--nodes': 'x' is not a whole number ("),
    ],
)
def test_text_in_place_of_a_number_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == 2
    assert message in capsys.readouterr().err


def test_completion_names_equal_the_registries() -> None:
    strategies = pytest.importorskip("ringprof.strategies", reason="needs torch")
    from ringprof.strategies.kernels.registry import KERNELS as KNOWN

    assert list(STRATEGIES) == strategies.names()
    assert list(INFERENCE) == strategies.for_inference()
    assert KERNEL_NAMES == ("auto", *KNOWN)


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("ringprof re", ["report", "record"]),
        ("ringprof record --strategy zi", ["zigzag"]),
        ("ringprof bench --strategies burst,u", ["burst,ulysses", "burst,usp"]),
        ("ringprof record --kernel c", ["cudnn", "cpu-flash"]),
        ("ringprof strategies dou", ["double-ring"]),
        ("ringprof report --sho", ["--show"]),
        ("ringprof report --show hops,ste", ["hops,steps"]),
    ],
)
def test_completion_of_commands_options_and_names(
    words: str, completed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    lines = BashComplete(group, {}, "ringprof", "_RINGPROF_COMPLETE").complete().splitlines()
    assert [line.split(",", 1)[1] for line in lines] == completed


BASH = """
eval "$(_RINGPROF_COMPLETE=bash_source ringprof)"
COMP_WORDS=($LINE) COMP_CWORD=$(( $(wc -w <<< "$LINE") - 1 ))
_ringprof_completion ringprof 2> /dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = """
_RINGPROF_COMPLETE=fish_source ringprof | source
complete -C $LINE | string replace -r "\\t.*" ""
"""
ZSH = """
compdef() { :; }
_describe() { print -l -- ${completions_with_descriptions%%:*}; }; compadd() { print -l -- $completions; }
eval "$(_RINGPROF_COMPLETE=zsh_source ringprof)"
words=(${=LINE}) CURRENT=${#words}
_ringprof_completion
"""


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("ringprof rec", ["record"]),
        ("ringprof record --strategy zi", ["zigzag"]),
        ("ringprof bench --strategies burst,u", ["burst,ulysses", "burst,usp"]),
    ],
)
@pytest.mark.parametrize(("shell", "script"), [("bash", BASH), ("zsh", ZSH), ("fish", FISH)])
def test_completion_script_of_the_guide_works_in_the_shell(
    shell: str, script: str, line: str, completed: list[str], tmp_path: Path
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    command = tmp_path / "ringprof"
    command.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m ringprof "$@"\n')
    command.chmod(0o755)
    variables = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "LINE": line, "HOME": str(tmp_path)}
    done = subprocess.run(
        [shell, "-c", script], capture_output=True, text=True, env=variables, check=False, timeout=HANGS_S
    )
    assert sorted(done.stdout.split()) == completed, done.stderr


def test_guide_has_a_completion_line_for_every_shell() -> None:
    guide = (ROOT / "docs" / "reading-a-report.md").read_text(encoding="utf-8")
    for shell, script in (("bash", BASH), ("zsh", ZSH), ("fish", FISH)):
        line = next(line for line in script.splitlines() if f"{shell}_source" in line)
        assert line.replace("|", "\\|") in guide


def test_list_value_is_one_completion_in_fish() -> None:
    """Check the script for fish, which splits an answer at the first comma only, without running fish."""
    fish = get_completion_class("fish")
    assert fish is not None
    script = fish(group, {}, "ringprof", "_RINGPROF_COMPLETE").source()
    assert 'string split -m 1 "," $completion' in script
