"""The list of commands, help, short forms and former spellings of the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys

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
        "Analyze": ["report", "compare", "plot", "export", "logs"],
        "Record": ["record", "bench", "check", "calibrate"],
        "Plan": ["predict", "advise", "tune", "settle", "what-if", "balance"],
        "List": ["runs", "strategies", "kernels"],
    }
    modules = {path.stem.replace("_", "-") for path in (ROOT / "ringprof" / "cli").glob("*.py")}
    assert {name for names in listed.values() for name in names} == set(COMMANDS) <= modules


def test_help_loads_no_command() -> None:
    program = (
        "import sys\nfrom ringprof.cli import run\nrun(['--help'])\n"
        "loaded = [name for name in sys.modules if name.partition('.')[0] in ('numpy', 'pandas', 'rich', 'torch')]\n"
        f"loaded += [name for name in {list(COMMANDS)} if 'ringprof.cli.' + name.replace('-', '_') in sys.modules]\n"
        "sys.exit(str(loaded) if loaded else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_help_and_version_are_commands_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "help") == run(capsys, "--help") == run(capsys)
    assert run(capsys, "help", "what-if") == run(capsys, "what-if", "--help")
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
        ("report", {"--format", "--html", "--open", "--steps", "--fail-if", "--window"},
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


def test_former_spellings_work_and_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        assert "per-host" not in (text := run(capsys, name, "--help")[1]) and "--hosts" not in text, name
    former, present = (
        run(capsys, "report", RUN, option, "2", "--format", "json")[1]
        for option in ("--ranks-per-host", "--ranks-per-node")
    )
    assert json.loads(former) == json.loads(present) != json.loads(run(capsys, "report", RUN, "--format", "json")[1])
    problem = ["predict", "--strategy", "ring", "--seq", "64", "--machine", "h200"]
    for options in (["--hosts", "0"], ["--nodes=0"], ["--gpus-per-host=0"], ["--gpus-per-node", "0"]):
        code, _, err = run(capsys, *problem, *options)
        assert code == 2 and re.search(r"Invalid value for '--(nodes|gpus-per-node)': 0 is not in the range", err)


def test_former_kernels_measure_says_where_it_went(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--device", "cpu", "--seq", "16", "--heads", "1", "--head-dim", "8", "--format", "json")
    code, former, err = run(capsys, "kernels", "--measure", *sizes)
    note = "kernels --measure is now calibrate --rates, and will go with the next release"
    assert (code, err) == (0, f"ringprof: {note}\n")
    code, present, err = run(capsys, "calibrate", "--rates", *sizes)
    assert (code, err) == (0, "")
    kernels = [[(rate["kernel"], rate["mask"]) for rate in json.loads(text)["rates"]] for text in (former, present)]
    assert kernels[0] == kernels[1] and json.loads(present)["schema"] == "ringprof.kernel-rates/1"


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--rates", "--seconds", "9"], "--seconds: not with --rates"), (["--heads", "2"], "--heads: goes with --rates"),
     (["--format", "json"], "--format: goes with --rates"), (["--rates", RUN], "runs: not with --rates")],
)  # fmt: skip
def test_options_of_rates_and_of_calibrations_do_not_mix(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "calibrate", *options) == (2, "", f"ringprof: {message}\n")
