"""The shared options of all commands that read traces, which every command honours."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
import pytest

from ringprof import cli
from ringprof.cli import commands
from tests.analysis.test_real_runs import NVLINK
from tests.loaded import analysis
from tests.paths import DATA, ROOT

FOLDER = str(DATA / NVLINK)
RUN = str(ROOT / "traces" / "h200x4-zigzag-65536")
NAMES = ("window", "between", "group", "rules", "machine", "ranks_per_host", "limit_bytes", "jobs", "scheduler")
READERS = {
    "report": ["report", FOLDER],
    "compare": ["compare", FOLDER, FOLDER],
    "plot": ["plot", "breakdown", FOLDER, "-o", "out.svg"],
    "plot of several": ["plot", "comparison", FOLDER, FOLDER, "-o", "out.svg"],
    "export": ["export", FOLDER, "-o", "out.json"],
}


def options_of(name: str) -> dict[str, click.Option]:
    command = commands.group.get_command(click.Context(commands.group), name)
    assert command is not None
    return {option.name or "": option for option in command.params if isinstance(option, click.Option)}


@pytest.mark.parametrize("name", ["compare", "plot", "export"])
def test_reading_commands_share_the_options_of_report(name: str) -> None:
    report_options, other_options = options_of("report"), options_of(name)
    for option in NAMES:
        expected, actual = report_options[option], other_options[option]
        assert (expected.opts, expected.help, expected.type.name) == (actual.opts, actual.help, actual.type.name)


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--group", "nobody"], "--group 'nobody'"),
        (["--window", "nothing like it"], "has no such range"),
        (["--between", "500s,501s"], "nothing ran"),
        (["--between", "1,2"], "write two times with units"),
        (["--rules", "nowhere.txt"], "nowhere.txt"),
        (["--machine", "nowhere.json"], "nowhere.json"),
        (["--scheduler", "nowhere"], "--scheduler nowhere"),
    ],
)
def test_reading_commands_obey_the_options_of_report(
    command: str, option: list[str], message: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if "--scheduler" in option:
        pytest.importorskip("distributed")
    monkeypatch.chdir(tmp_path)
    assert cli.run([*READERS[command], *option]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_compare_uses_the_chosen_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["compare", FOLDER, FOLDER, "--between", "10ms,20ms", "--format", "json"]) == 0
    (first, second) = json.loads(capsys.readouterr().out)["entries"]
    walls = analysis(FOLDER, between="10ms,20ms").breakdown()["wall_ns"]
    assert (
        first["figures"]["wall_ms"]["value"]
        == second["figures"]["wall_ms"]["value"]
        == pytest.approx(walls.mean() / 1e6)
    )
    assert max(walls) <= 10_000_000


def test_export_uses_the_chosen_times(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert cli.run(["export", RUN, "--between", "10ms,20ms", "-o", str(out)]) == 0
    slices = [event for event in json.loads(out.read_text())["traceEvents"] if event["ph"] == "X"]
    ends = [event["ts"] + event["dur"] for event in slices if event["tid"] >= 100]
    assert 9_000 < max(ends) - min(event["ts"] for event in slices if event["tid"] >= 100) <= 10_000 + 1e-3


@pytest.mark.parametrize("backend", [None, "module://of_a_notebook"])
def test_plot_keeps_the_matplotlib_backend_variable(
    backend: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MPLBACKEND", raising=False)
    if backend:
        monkeypatch.setenv("MPLBACKEND", backend)
    assert cli.run(["plot", "breakdown", FOLDER, "-o", str(tmp_path / "out.svg")]) == 0
    assert os.environ.get("MPLBACKEND") == backend


def test_plot_uses_the_chosen_times(tmp_path: Path) -> None:
    """Check that the axis of a timeline ends with the chosen interval."""
    axes = analysis(RUN, between="10ms,20ms").plot.timeline()
    assert 9 < axes.dataLim.x1 <= 10 and axes.dataLim.x0 >= 0


@pytest.mark.parametrize("matmul", [800.0, None])
@pytest.mark.parametrize(("device", "name"), [("NVIDIA H200", "mine"), ("NVIDIA H100 80GB HBM3", "h200")])
def test_kernels_are_compared_by_the_users_own_calibration_of_the_device(
    device: str, name: str, matmul: float | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another kernel has ten times cuDNN's rate there. A calibration of another device is not used."""
    rows = [
        {"kernel": kernel, "phase": phase, "head_dim": 128, "group": 1, "causal": causal, "tokens": 16384,
         "tflops": tflops, "spread": 0.01}
        for kernel, tflops in (("cudnn", 60), ("flash-attn", 600))
        for phase in ("forward", "backward") for causal in (True, False)
    ]  # fmt: skip
    machine = {"name": "mine", "device": device, "kernel_rates": rows, "matmul_tflops": matmul and {"value": matmul}}
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine))
    assert cli.run(["report", RUN, "--machine", str(path), "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    other, parts = report["summary"]["other_kernels"], {row["part"] for row in report["waterfall"]}
    assert other["calibration"] == name and "slower_kernel" in parts
    if name == "mine":
        assert (other["fastest"], other["matmul_tflops"]) == ("flash-attn", matmul)
        assert ("kernel" in parts, "kernel_limit" in parts) == (matmul is None, matmul is not None)
        assert other["saved_share"] == pytest.approx(0.9) and other["own_ns"] == pytest.approx(10 * other["fastest_ns"])
        assert report["summary"]["next_step"]["text"].endswith("To try: --kernel flash-attn (ringprof kernels).")
