"""Every option of the commands that became part of others, and what does its work now."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest

from ringprof import cli
from ringprof.cli.benchmark_logs import LOG_SETTINGS
from ringprof.cli.commands import COMMANDS, group
from tests.paths import LOGS, ROOT, TRACES

RECORDING = (
    "batch heads kv-heads head-dim causal no-causal dtype documents window-size prefix v-head-dim softcap sinks device"
    " world hops ranks-per-node warmup iters controls verify no-verify"
)
"""Options of every recording, which keep their names."""
SAME = {
    ("logs", "report"): "output width machine spread max-bytes max-memory strict format",
    ("runs", "report"): "format output",
    ("settle", "compare"): "format",
    ("tune", "bench"): f"seq kernel {RECORDING} forward-only machine top rounds minutes format output",
    ("what-if", "predict"): "link slow kernel-speed kernel hops ranks-per-node kv-heads param machine format",
    ("balance", "advise"):
        "seq documents window-size prefix heads cp-sizes tokens-per-rank machine kv-heads strategy gpus-per-node nic"
        " causal no-causal format output",
    ("kernels", "calibrate"): "seq heads kv-heads head-dim dtype device",
}  # fmt: skip
"""Options with the same name in the command that does the work now, by the former command and that one."""
OTHER = {
    ("logs", "batch"): "--setting batch", ("logs", "heads"): "--setting heads",
    ("logs", "head-dim"): "--setting head-dim",
    ("logs", "world"): "--setting world", ("logs", "causal"): "--setting causal",
    ("logs", "device"): "--setting device", ("logs", "gpus-per-node"): "--setting gpus-per-node",
    ("logs", "nic"): "--setting nic", ("tune", "strategy"): "bench --strategies",
    ("balance", "world"): "advise --nodes",
    ("kernels", "measure"): "calibrate --rates", ("predict", "check"): "predict --against",
    **{("report", name): f"--show {name}" for name in
       "waterfall steps idle kernels gemms collectives layers annotations hops".split()},
}  # fmt: skip
"""Options that stand for one with another name, by the former command and the option."""


def options_of(name: str) -> set[str]:
    command = group.get_command(click.Context(group), name)
    assert command is not None
    return {text for param in command.params for text in (*param.opts, *param.secondary_opts)}


def choices_of_show() -> list[str]:
    command = group.get_command(click.Context(group), "report")
    assert command is not None
    show: Any = next(param.type for param in command.params if param.name == "show")
    return list(show.kind.choices)


@pytest.mark.parametrize(("former", "now"), SAME)
def test_every_option_of_a_former_command_is_one_of_the_new(former: str, now: str) -> None:
    assert {f"--{name}" for name in SAME[former, now].split()} <= options_of(now)


def test_options_with_another_name() -> None:
    shown = choices_of_show()
    for now in OTHER.values():
        command, option, *value = now.split() if now.split()[0] in COMMANDS else ("report", *now.split())
        assert option in options_of(command)
        assert not value or value[0] in (LOG_SETTINGS if option == "--setting" else shown), now


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
    *"--hosts --gpus-per-host --ranks-per-host --check".split(),
}  # fmt: skip
"""Options that the package names although no command has them: of other programs, and the former ones."""


def test_texts_name_only_commands_and_options_that_exist() -> None:
    """Search the package, the pages, the notebooks and what runs ringprof for commands, and the package for options."""
    patterns = ["*.py", "*.md", "*.ipynb", "*.json", "Makefile", ".ci/*"]
    listing = ["git", "ls-files", "-co", "--exclude-standard", *patterns]
    listed = subprocess.run(
        listing, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()  # fmt: skip
    # What was, and commands as they were typed.
    left_out = ("tests/", "dev/benchmarks/data/", "CHANGELOG.md", "traces/")
    texts = {name: (ROOT / name).read_text("utf-8") for name in listed if not name.startswith(left_out)}
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
