"""Options that an input cannot use, and the commands and options that texts name."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import click
import pytest

from ringprof import cli
from ringprof.cli.commands import COMMANDS, group
from tests.paths import LOGS, ROOT, TRACES


def options_of(name: str) -> set[str]:
    command = group.get_command(click.Context(group), name)
    assert command is not None
    return {text for param in command.params for text in (*param.opts, *param.secondary_opts)}


LOG = str(next(LOGS.glob("001_*")))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", LOG, "--window", "x", "--show", "steps"], "--window, --show steps: not for a benchmark log"),
        (["report", LOG, "--show", "steps"], "--show steps: not for a benchmark log"),
        (["report", LOG, "--fail-if", "idle > 5%"], "--fail-if: not for a benchmark log"),
        (["report", LOG, "--iters", "3"], "--iters: not for a benchmark log"),
        (["report", LOG, "--csv", "steps"], "no table steps of a benchmark log"),
        (["report", LOG, "--setting", "head=4"], "no such setting (did you mean 'heads'?)"),
        (["report", LOG, "--setting", "heads=0"], "--setting heads: 0 is not at least 1"),
        (["report", LOG, "--setting", "heads"], "'heads' is not KEY=VALUE"),
        (["report", LOG, "--setting", "nic=400"], "--setting nic goes with --machine"),
        (["report", str(TRACES / "cpu4-burst-4096"), "--wall", "3"], "--wall: not for a run or traces"),
        (["report", str(TRACES / "cpu4-burst-4096"), "--show", "rows"], "--show rows: not for a run or traces"),
        (["report", str(TRACES / "cpu4-burst-4096"), "--csv", "rows"], "no table rows of a run or traces"),
        (["report", str(TRACES / "cpu4-burst-4096"), "--machine", "h20"], "(did you mean 'h200'?)"),
        (["compare", LOG, LOG, "--window", "x"], "--window: not for printed tables and benchmark logs"),
        (["plot", "comparison", LOG, LOG, "--jobs", "2"], "--jobs: not for printed tables and benchmark logs"),
        (["bench", "--seq", "1k"], "--strategies: name those to record, or let --until-decided choose"),
        (["bench", "--seq", "1k", "--strategies", "ring", "--rounds", "4"], "--rounds goes with --until-decided"),
        (["bench", "--until-decided", "--seq", "1k,2k"], "at one --seq"),
        (["bench", "--until-decided", "--seq", "1k", "-p", "a=1"], "-p: not with --until-decided"),
        (["bench", "--until-decided", "--seq", "1k", "--format", "csv"], "--until-decided has text or json"),
        (["predict", "--strategy", "ring", "--seq", "1k", "--slow", "1=2"], "--slow goes with --replay RUN"),
        (["predict", "--replay", "x", "--seq", "1k"], "--seq beside --replay: leave one of them out"),
        (["predict", "--replay", "x", "--hops", "auto"], "--hops auto: does not go with --replay"),
    ],
)  # fmt: skip
def test_options_that_an_input_cannot_use_are_refused_by_name(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_a_saved_prediction_is_scored_and_takes_no_options_of_traces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forecast = tmp_path / "forecast.txt"  # with its fields in another order, as other tools write them
    run = str(TRACES / "h200x4-zigzag-65536")
    assert cli.run(["predict", "--like", run, "--machine", "h200", "--format", "json"]) == 0
    forecast.write_text(json.dumps(json.loads(capsys.readouterr().out), sort_keys=True))
    assert cli.run(["compare", str(forecast), run, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["count"] == 1
    for options, message in (
        (["--window", "x", "--same-work"], "--same-work: not for a saved prediction"),
        (["--format", "csv"], "--format csv: a saved prediction is scored as text or json"),
    ):
        assert cli.run(["compare", str(forecast), run, *options]) == 2
        assert message in capsys.readouterr().err
    assert cli.run(["compare", str(forecast)]) == 2
    assert "add recorded runs or tables of measurements" in capsys.readouterr().err


OTHERS = {
    *("--nproc --nproc-per-node --world-size --gpus --num-gpus --ranks --nnodes --rdzv-backend --rdzv-endpoint"
      " --standalone --gpus-per-task").split(),
    *"--type --trace --hip-trace --query-gpu --collector --attention-dropout --context-parallel-size".split(),
    *"--cp-comm-type --hierarchical-context-parallel-sizes --compile --module --parallelism --training".split(),
    *"--hosts --gpus-per-host --ranks-per-host --check --measure".split(),
}  # fmt: skip
"""Options that the package names although no command has them: of other programs, and the former ones."""


def test_texts_name_only_commands_and_options_that_exist() -> None:
    """Search the package, the pages, the notebooks and what runs ringprof for commands, and the package for options."""
    patterns = ["*.py", "*.md", "*.ipynb", "*.json", "Makefile", ".ci/*"]
    listing = ["git", "ls-files", "-co", "--exclude-standard", *patterns]
    listed = subprocess.run(
        listing, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()  # fmt: skip
    left_out = ("tests/", "dev/benchmarks/data/", "traces/")  # commands as they were typed
    texts = {name: (ROOT / name).read_text("utf-8") for name in listed if not name.startswith(left_out)}
    texts["CHANGELOG.md"] = re.sub(r"^  \| [^|]*", "", texts["CHANGELOG.md"], flags=re.MULTILINE)  # the former commands
    options = {name: options_of(name) | {"--help"} for name in COMMANDS}
    known, wrong, count = set().union(*options.values()) | OTHERS, [], 0
    for name, text in texts.items():
        for command, rest in re.findall(r"(?:\bringprof |`)([a-z-]+)\b((?: [^\n`\"')]*)?)", text):
            if command in COMMANDS:
                unknown = set(re.findall(r"(?<!\S)--[a-z-]+", rest)) - options[command]
                wrong += [f"{name}: {command}{rest}"] * bool(unknown)
                count += 1
        if name != "ringprof/cli/commands.py":
            wrong += [
                f"{name}: {former}"
                for former in re.findall(r"\bringprof (?:logs|runs|settle|tune|what-if|balance)\b", text)
            ]
        if name.startswith("ringprof/"):
            wrong += [f"{name}: {option}" for option in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - known]
    assert wrong == [] and count > 300
