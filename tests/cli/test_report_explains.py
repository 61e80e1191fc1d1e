"""Optional tables of ``ringprof report``, and conditions for CI."""

from __future__ import annotations

import json

import pytest

from ringprof import cli
from ringprof.analysis.findings.conditions import parse_condition
from ringprof.errors import UsageError
from tests.loaded import analysis
from tests.paths import ROOT

RUN = ROOT / "traces" / "h200x4-ring-262144"
TABLE = ROOT / "tests" / "data" / "logs" / "002_24cf2d6a9b1ed1f8.txt"


def report(capsys, *options, path=RUN):
    code = cli.run(["report", str(path), "--width", "140", *options])
    return code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("condition", "held"),
    [
        ("exposed_comm > 5%", True),
        ("exposed_comm > 50%", False),
        ("max(exposed_comm) > 50%", True),
        ("min(exposed_comm) > 5%", False),
        ("waterfall.imbalance >= 0.2", True),
        ("tflops < 320", True),
        ("hops != 9", True),
        ("MAX( idle ) <= 1%", True),
        ("exposed_comm > 0.05", True),
        ("exposed_comm <= 1", True),
    ],
)
def test_condition_that_holds_exits_with_1_and_prints_the_figure(capsys, condition, held):
    code, out, err = report(capsys, "--fail-if", condition)
    assert code == int(held)
    assert "exposed communication" in out
    assert err.count("\n") == int(held)
    if held:
        figure = parse_condition(condition).figure
        # Figures that were timed repeatedly have an interval.
        value, percent = analysis(RUN).figures()[figure], "%" in condition
        assert err.startswith(f"ringprof: {figure} is {100 * value if percent else value:.6g}{'%' * percent}")
        assert err.endswith(f": {condition}\n")


def test_every_figure_is_that_of_the_json_report():
    run = analysis(RUN)
    figures, data = run.figures(), run.report()
    shares = [rank["exposed_comm_ns"] / rank["wall_ns"] for rank in data["ranks"]]
    assert figures["max(exposed_comm)"] == max(shares) == data["summary"]["exposed_comm_share"]["worst"]
    assert figures["min(exposed_comm)"] == min(shares)
    assert figures["exposed_comm"] == data["summary"]["exposed_comm_share"]["mean"]
    assert figures["tflops"] == data["summary"]["tflops"]
    assert figures["wall_ns"] == sum(rank["wall_ns"] for rank in data["ranks"]) / 4
    assert figures["max(hop_bytes)"] == max(rank["hops"]["bytes"] for rank in data["ranks"])
    assert {f"waterfall.{part['part']}": part["share"] for part in data["waterfall"]}.items() <= figures.items()


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("exposed > 5%", "no figure 'exposed' here; did you mean "),
        ("speed > 5", "no figure 'speed' here; there are: exposed_comm, max(exposed_comm), idle, "),
        ("tflops < 0.95 * base", "one report has no base"),
        ("tflops = 5", "write FIGURE OP NUMBER"),
        ("__import__('os') > 1", "write FIGURE OP NUMBER"),
        ("mean(idle) > 1", "write FIGURE OP NUMBER"),
        ("exposed_com > 5%", "no figure 'exposed_com' here; did you mean exposed_comm"),
        ("exposed_comm > 5", "exposed_comm is a share: did you mean 'exposed_comm > 5%'?"),
        ("max(idle) >= 2", "did you mean 'max(idle) >= 2%'?"),
        ("waterfall.imbalance > 10", "did you mean"),
        ("tflops < 95%", "tflops is no share: did you mean 'tflops < 0.95 * base'?"),
    ],
)
def test_invalid_condition_exits_with_2_and_one_line(capsys, condition, message):
    code, _, err = report(capsys, "--fail-if", condition)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_failed_condition_is_told_in_its_own_unit(capsys):
    share = analysis(RUN).figures()["exposed_comm"]
    for condition, shown in (("exposed_comm > 1%", f"{100 * share:.6g}%"), ("exposed_comm > 0.01", f"{share:.6g}")):
        assert report(capsys, "--fail-if", condition)[2] == f"ringprof: exposed_comm is {shown}: {condition}\n"


def test_annotations_of_a_cpu_run_say_why_there_are_none(capsys):
    out = report(capsys, "--show", "annotations", path=ROOT / "traces" / "cpu4-burst-4096")[1]
    assert "annotations: not on CPU: they are the times of ranges on a device" in " ".join(out.split())


def test_condition_applies_to_a_kernel_table(capsys):
    code, _, err = report(capsys, "--fail-if", "send_recv_ns > 1", path=TABLE)
    assert code == 1
    assert "send_recv_ns is 1.1306e+10" in err


def test_further_tables_are_shown_on_request(capsys):
    _, plain, _ = report(capsys)
    assert "ring steps" not in plain
    code, out, _ = report(capsys, "--show", "steps,hops,waterfall,kernels,annotations", "--all")
    assert code == 0
    for title in ("ring steps", "hops", "waterfall", "kernels", "annotations"):
        assert any(line.startswith(title) for line in out.splitlines())
    assert "rank 0 fwd 0" in out
    assert "bound by" in out
    assert "needed work at peak" in out
    assert "next: ringprof report traces/h200x4-ring-262144 --html report.html · --format json" in out


def test_a_step_row_shows_the_json_reports_figures(capsys):
    _, out, _ = report(capsys, "--show", "steps", "--all")
    step = json.loads(report(capsys, "--format", "json")[1])["steps"][0]
    row = next(line for line in out.splitlines() if line.startswith("rank 0 fwd 0")).split()
    times = [step["block_ns"], step["end_ns"] - step["start_ns"]]
    assert row[4:6] == [f"{time / 1e6:.3f}" for time in times]
    assert row[-1] == step["bound"]


def test_window_and_between_select_the_reported_time(capsys):
    wall = json.loads(report(capsys, "--format", "json", "--between", "100ms,600ms")[1])["ranks"][0]["wall_ns"]
    assert wall <= 500_000_000
    code, _, err = report(capsys, "--window", "nothing like it")
    assert (code, err.count("\n")) == (2, 1)
    assert "has no such range" in err


def test_condition_without_a_figure_is_refused():
    with pytest.raises(UsageError):
        parse_condition("> 5%")
