"""The list of commands, help, short forms and former spellings of the command line."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from ringprof import __version__, cli
from ringprof.cli.commands import COMMANDS, GROUPS, group
from ringprof.cli.options import Advanced
from tests.paths import ROOT, TRACES

RUN = str(TRACES / "h200x4-zigzag-65536")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.run([*arguments])
    return code, *capsys.readouterr()


def test_help_lists_every_command_once_under_its_heading(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--help")
    sections = dict(re.findall(r"^(\w+):\n((?:  .*\n)+)", out, re.MULTILINE))
    assert list(sections)[-4:] == ["Analyze", "Record", "Plan", "List"] == list(GROUPS)
    listed = {heading: re.findall(r"^  ([a-z-]+) ", sections[heading], re.MULTILINE) for heading in GROUPS}
    assert listed == {
        "Analyze": ["report", "compare", "plot", "export"],
        "Record": ["record", "bench", "check", "calibrate"],
        "Plan": ["predict", "advise"],
        "List": ["strategies", "kernels"],
    }
    modules = {path.stem for path in (ROOT / "ringprof" / "cli").glob("*.py")}
    assert {name for names in listed.values() for name in names} == set(COMMANDS) <= modules


def test_help_loads_no_command() -> None:
    program = (
        "import sys\nfrom ringprof.cli import run\nrun(['--help'])\n"
        "loaded = [name for name in sys.modules if name.partition('.')[0] in ('numpy', 'pandas', 'rich', 'torch')]\n"
        f"loaded += [name for name in {list(COMMANDS)} if 'ringprof.cli.' + name in sys.modules]\n"
        "sys.exit(str(loaded) if loaded else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_help_and_version_are_commands_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "help") == run(capsys, "--help") == run(capsys)
    assert run(capsys, "help", "advise") == run(capsys, "advise", "--help")
    assert run(capsys, "help", "report")[1].startswith("Usage: ringprof report ")
    assert run(capsys, "version") == run(capsys, "--version")
    assert __version__ in run(capsys, "version")[1]


def test_path_in_the_place_of_a_command_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, RUN, "--format", "json") == run(capsys, "report", RUN, "--format", "json")
    monkeypatch.chdir(TRACES)
    assert run(capsys, "h200x4-zigzag-65536") == run(capsys, "report", "h200x4-zigzag-65536")
    code, _, err = run(capsys, "no/such.json")
    assert code == 2 and "no/such.json: no such file or folder" in err
    code, _, err = run(capsys, "h200x4-zigzag-65536", "--no-such-option")
    assert code == 2 and "(see: ringprof report --help)" in err


@pytest.mark.parametrize(
    ("name", "usual", "advanced"),
    [
        ("report", {"--format", "--html", "--open", "--show", "--fail-if", "--window"},
         {"--scheduler", "--max-memory", "--max-bytes", "--jobs", "--wall", "--iters", "--ranks-per-node"}),
        ("record", {"--strategy", "--seq", "--heads", "--world", "--iters", "--documents"},
         {"--cp-sizes", "--profile-iters", "--time-limit", "--softcap", "--mlp-size", "--ranks-per-node"}),
    ],
)  # fmt: skip
def test_advanced_options_have_a_heading_of_their_own(
    name: str, usual: set[str], advanced: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before, _, after = run(capsys, name, "--help")[1].partition("\nAdvanced options:\n")
    upper, lower = (set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", text, re.MULTILINE)) for text in (before, after))
    assert usual <= upper and advanced <= lower and not upper & lower
    command = group.get_command(click.Context(group), name)
    assert command is not None
    shown = {option.opts[-1] for option in command.params if isinstance(option, click.Option) and not option.hidden}
    assert upper | lower == shown | {"--help"}
    assert lower == {option.opts[-1] for option in command.params if isinstance(option, Advanced)}


@pytest.mark.parametrize(
    ("name", "now"),
    [
        ("logs", "report FILE..."), ("runs", "report FOLDER"), ("settle", "compare FORECAST MEASURED..."),
        ("tune", "bench --until-decided"), ("what-if", "predict --replay RUN"), ("balance", "advise without --machine"),
    ],
)  # fmt: skip
def test_former_commands_name_the_new_one(
    name: str, now: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    message = f"ringprof: {name} is now: ringprof {now}"
    for arguments in ([name], [name, "traces", "--format", "json"], ["help", name]):
        assert run(capsys, *arguments) == (2, "", f"{message}\n")
    shutil.copytree(TRACES / "cpu4-burst-4096", tmp_path / name)
    assert run(capsys, name) == (2, "", f"{message} (the path: ringprof report ./{name})\n")
    code, out, _ = run(capsys, f"./{name}")
    assert code == 0 and out.startswith("4 ranks")


@pytest.mark.parametrize(
    ("arguments", "now"),
    [
        (["report", RUN, "--ranks-per-host", "2"], "--ranks-per-node"), (["predict", "--hosts=2"], "--nodes"),
        (["advise", "--gpus-per-host", "2"], "--gpus-per-node"), (["predict", "--check", "x.csv"], "--against"),
        (["advise", "--world", "4"], "--nodes and --gpus-per-node"),
        (["kernels", "--measure"], "ringprof calibrate --rates"), (["report", RUN, "--layers"], "--show layers"),
        (["report", "x.txt", "--no-causal"], "--setting causal=VALUE"), (["report", RUN, "--hops"], "--show hops"),
    ],
)  # fmt: skip
def test_former_options_name_the_new_one(arguments: list[str], now: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2 and f"(now {now}; see: ringprof {arguments[0]} --help)" in err


def test_numbers_are_described_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        text = " ".join(run(capsys, name, "--help")[1].split())
        assert not re.search(r"RANGE|\[[^]]*[<>]=?[^]]*\]|per-host|--hosts", text), name
    assert "[default: 1; from 1 to 65,536]" in " ".join(run(capsys, "predict", "--help")[1].split())
    problem = ["predict", "--strategy", "ring", "--seq", "64", "--machine", "h200"]
    cases = (
        ("--nodes", "0", "0 is not from 1 to 65,536"), ("--heads", "0", "0 is not at least 1"),
        ("--nic", "0", "0.0 is not above 0"), ("--nic", "x", "'x' is not a number"),
    )  # fmt: skip
    for option, value, words in cases:
        code, _, err = run(capsys, *problem, option, value)
        assert code == 2 and f"Invalid value for '{option}': {words} (see:" in err


def test_commands_and_options_stay_few() -> None:
    """Twelve commands, and at most 275 options as their help pages list them, ``--help`` included."""
    context = click.Context(group)
    commands = [group.get_command(context, name) for name in group.list_commands(context)]
    listed = [
        option for command in commands if command is not None for option in command.get_params(click.Context(command))
        if isinstance(option, click.Option) and not option.hidden
    ]  # fmt: skip
    assert len(commands) == 12 and len(listed) <= 275


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--rates", "--seconds", "9"], "--seconds: not with --rates"), (["--heads", "2"], "--heads: goes with --rates"),
     (["--format", "json"], "--format: goes with --rates"), (["--rates", RUN], "runs: not with --rates"),
     ([RUN, "--parts", "links"], "--parts: not with recorded runs, which are not measured again")],
)  # fmt: skip
def test_options_of_rates_and_of_calibrations_do_not_mix(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "calibrate", *options) == (2, "", f"ringprof: {message}\n")
