"""Sweeps: every combination once, rows that fail, resuming after an interruption."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

pytest.importorskip("torch", reason="recording needs torch")

from ringprof import cli
from ringprof.analysis.findings.summary import summarise
from ringprof.errors import (
    InputError,
    Interrupted,
    OutOfMemory,
    RecordError,
    UnsupportedWorkloadError,
    UsageError,
    VerificationError,
)
from ringprof.ranks.progress import SilentReporter
from ringprof.recording import RecordRequest
from ringprof.report.sweep import COLUMNS, SweepTable, render_markdown
from ringprof.report.text import TextStyle
from ringprof.run import Baselines, write_run
from ringprof.scale.pipeline import attribute
from ringprof.trials import sweep, turns
from ringprof.workload.workload import Workload
from tests.analysis.findings.test_summary import ring_with_compute
from tests.analysis.recorded import recorded_run
from tests.paths import ROOT

BASE = RecordRequest(workload=Workload(seq=1, heads=8, kv_heads=8, head_dim=64), strategy="")


class Recorder:
    """Fake of `record` that writes a run without traces, or raises a given error."""

    def __init__(self, errors: dict[tuple[str, int], BaseException]) -> None:
        self.errors, self.calls = errors, []  # type: tuple[dict[tuple[str, int], BaseException], list[Any]]

    def __call__(self, request: RecordRequest, reporter: Any) -> Any:
        self.calls.append((request.strategy, request.workload.seq, request.workload.backward))
        error = self.errors.get((request.strategy, request.workload.seq))
        if error is not None and request.workload.backward:
            raise error
        name = f"run{len(list(Path(request.output).parent.iterdir()))}"
        run = recorded_run(name=name, workload=request.workload)
        folder = Path(request.output).parent / name
        folder.mkdir()
        write_run(run, folder / "run.json")
        return run


@pytest.fixture
def swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs a sweep of two strategies and two lengths with given failures: (rows, recorder)."""
    monkeypatch.setattr(sweep, "analysis_of", lambda row, folder: None)

    def go(
        errors: dict[tuple[str, int], BaseException], messages: list[str] | None = None, **changes: Any
    ) -> tuple[list[sweep.Row], Recorder]:
        recorder, reporter = Recorder(errors), SilentReporter()
        if messages is not None:
            monkeypatch.setattr(reporter, "say", messages.append)
        monkeypatch.setattr(turns, "record", recorder)
        requests = sweep.sweep_requests(
            replace(BASE, **changes),
            ["burst", "usp"],
            [1024, 2048],
            ["auto"],
            {"usp.ulysses_degree": "2", "grad_wire": "fp32"},
        )
        rows = [row for row, _ in sweep.run_sweep(requests, tmp_path / "sweep.json", reporter)]
        return rows, recorder

    return go


def test_every_combination_has_a_row_with_its_own_parameters(swept):
    rows, recorder = swept({})
    assert [(row.strategy, row.workload.seq, row.status) for row in rows] == [
        ("burst", 1024, "ok"), ("burst", 2048, "ok"), ("usp", 1024, "ok"), ("usp", 2048, "ok"),
    ]  # fmt: skip
    assert rows[0].params == {"grad_wire": "fp32"}
    assert rows[2].params == {"ulysses_degree": "2", "grad_wire": "fp32"}
    # A forward pass alone, then forward and backward; the median slowest rank of the run written is 3 ms.
    assert recorder.calls[:2] == [("burst", 1024, False), ("burst", 1024, True)]
    assert rows[0].forward_ns == 3e6


def test_failed_row_has_a_reason_and_the_sweep_continues(swept):
    rows, _ = swept(
        {
            ("burst", 1024): OutOfMemory("rank 1 failed: out of memory: use a shorter sequence"),
            ("burst", 2048): VerificationError("wrong result on rank 0"),
            ("usp", 1024): UnsupportedWorkloadError("needs a multiple"),
        }
    )
    assert [row.status for row in rows] == ["oom", "failed", "unfit", "ok"]
    assert rows[1].reason == "wrong result on rank 0"


@pytest.mark.parametrize(
    ("errors", "code"),
    [
        ([], 0),
        ([RecordError("rank 1 was killed (SIGKILL)")], 3),
        ([VerificationError("wrong result on rank 0")], 3),
        ([OutOfMemory("rank 1 failed: out of memory")], 0),
        ([UnsupportedWorkloadError("needs a multiple"), OutOfMemory("out of memory")], 3),
    ],
)
def test_a_sweep_with_a_row_that_failed_ends_with_3(monkeypatch, tmp_path, errors, code):
    """Give the first of two rows these errors; a row that cannot be recorded is not a failure if another row can."""
    lengths = [1024, 2048]
    failing = {("zigzag", seq): error for seq, error in zip(lengths, errors, strict=False)}
    monkeypatch.setattr(turns, "record", Recorder(failing))
    monkeypatch.setattr(sweep, "analysis_of", lambda row, folder: None)
    arguments = ["--strategies", "zigzag", "--seq", "1024,2048", "--heads", "8", "--device", "cpu", "--format", "json"]
    assert cli.run(["bench", *arguments, "-o", str(tmp_path / "sweep.json")]) == code


def test_interrupted_sweep_resumes(swept):
    with pytest.raises(Interrupted):
        swept({("usp", 1024): Interrupted("interrupted")})
    rows, recorder = swept({})
    assert [row.status for row in rows] == ["ok"] * 4
    assert {call[0] for call in recorder.calls} == {"usp"}


def test_failed_rows_are_retried_except_out_of_memory(swept):
    swept({("burst", 1024): OutOfMemory("x: out of memory"), ("burst", 2048): RecordError("rank 1 failed: other")})
    rows, recorder = swept({})
    assert [row.status for row in rows] == ["oom", "ok", "ok", "ok"]
    assert recorder.calls == [("burst", 2048, False), ("burst", 2048, True)]


CONTROLS = Baselines(
    warmup=1, rounds=1, ordinary_ns=[[3000]] * 4, compute_only_ns=[[2000]] * 4, communication_only_ns=[[1000]] * 4,
    solo_ns=[[1500]] * 4, solo_flops=[10**9] * 4,
)  # fmt: skip


@pytest.mark.parametrize(("controls", "share"), [(CONTROLS, 1500 / 3000), (None, None)])
def test_kernel_rate_is_the_solo_rate_if_known(controls, share):
    run = recorded_run(controls=controls)
    assert run.workload is not None
    analysis: Any = SimpleNamespace(
        run=run, summary=summarise(attribute([b.trace() for b in ring_with_compute()], run))
    )
    row = sweep.Row(strategy="burst", params={}, kernel="auto", workload=run.workload, status="ok")
    figures = sweep.row_figures(row, analysis)
    # Without it: the achieved rate over the attention kernels', whose 1e9 FLOPs take 1000 to 1300 ns.
    achieved = run.workload.model_flops() / 4 / 3e-3 / 1e12
    kernels = sum(1e9 / (1000 + 100 * rank) / 1e3 for rank in range(4)) / 4
    assert figures["iterations_ms"] == [2.0, 3.0, 4.0]
    assert figures["of_kernel_rate"] == pytest.approx(achieved / kernels if share is None else share)


def test_row_without_controls_is_recorded_again_if_requested(swept, monkeypatch):
    swept({})
    monkeypatch.setattr(sys.modules[__name__], "BASE", replace(BASE, controls=True))
    rows, recorder = swept({})
    assert [row.status for row in rows] == ["ok"] * 4 and len(recorder.calls) == 8


def test_peers_are_recorded_without_unsupported_controls(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "analysis_of", lambda row, folder: None)
    requested: dict[str, bool] = {}

    class RequestRecorder(Recorder):
        def __call__(self, request: RecordRequest, reporter: Any) -> Any:
            requested[request.strategy] = request.controls or requested.get(request.strategy, False)
            return super().__call__(request, reporter)

    monkeypatch.setattr(turns, "record", recorder := RequestRecorder({}))
    base = replace(BASE, controls=True)
    requests = sweep.sweep_requests(base, ["zigzag", "torch-cp"], [1024], ["auto"], {})
    for _ in range(2):
        rows = [row for row, _ in sweep.run_sweep(requests, tmp_path / "sweep.json", SilentReporter())]
        assert [row.status for row in rows] == ["ok", "ok"]
    assert requested == {"zigzag": True, "torch-cp": False}
    # The fake's runs have no baselines: zigzag's is recorded again, the peer's is not.
    assert [call[0] for call in recorder.calls] == ["zigzag", "zigzag", "torch-cp", "torch-cp", "zigzag", "zigzag"]
    assert [sweep.row_figures(row, None)["peer"] for row in rows] == [False, True]


def test_rows_recorded_with_other_options_are_kept_and_flagged(swept):
    swept({}, iters=3)
    messages: list[str] = []
    rows, recorder = swept({}, messages, iters=10)
    assert [row.status for row in rows] == ["ok"] * 4 and recorder.calls == []
    assert len(messages) == 4 and "burst 1024: taken from " in messages[0] and "--iters 3, not 10" in messages[0]
    messages.clear()
    swept({}, messages, iters=3)
    assert messages == []


def test_each_world_size_has_its_own_rows(swept):
    swept({}, world=2)
    rows, recorder = swept({}, world=4)
    assert len(rows) == 4 and len(recorder.calls) == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategies": ["burst", "ulyses"]}, "did you mean 'ulysses'"),
        ({"kernels": ["auto", "flash-atn"]}, "no kernel 'flash-atn'"),
        ({"params": {"burst.ring_windows": "2"}}, "ring_window"),
        ({"seqs": [1024, 0]}, "--seq must be at least 1"),
        ({"base": replace(BASE, warmup=-1)}, "--warmup must be at least 0"),
    ],
)
def test_names_and_options_are_checked_before_recording(tmp_path, monkeypatch, changes, message):
    recorder = Recorder({})
    monkeypatch.setattr(turns, "record", recorder)
    arguments: dict[str, Any] = {
        "base": BASE,
        "strategies": ["burst"],
        "seqs": [1024],
        "kernels": ["auto"],
        "params": {},
    }
    requests = sweep.sweep_requests(**(arguments | changes))
    with pytest.raises(UsageError, match=message):
        list(sweep.run_sweep(requests, tmp_path / "sweep.json", SilentReporter()))
    assert recorder.calls == [] and list(tmp_path.iterdir()) == []


def test_a_parameter_of_a_strategy_that_is_not_swept_is_refused():
    with pytest.raises(UsageError, match="not swept"):
        sweep.sweep_requests(BASE, ["burst"], [8], ["auto"], {"usp.ulysses_degree": "2"})


def test_each_length_packs_documents_of_its_own():
    drawn = {64: (40, 24), 128: (100, 28)}
    requests = sweep.sweep_requests(BASE, ["zigzag", "ulysses"], [64, 128], ["auto"], {}, drawn)
    packed = [(request.strategy, request.workload.seq, request.workload.documents) for request in requests]
    lengths = [("zigzag", 64, (40, 24)), ("zigzag", 128, (100, 28))]
    assert packed == [*lengths, *(("ulysses", *rest) for _, *rest in lengths)]


@pytest.mark.long
def test_packed_and_plain_workloads_have_separate_rows(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    small = ["--heads", "2", "--head-dim", "16", "--iters", "1", "--world", "2", "--device", "cpu", "--dtype", "fp32"]
    arguments = ["bench", "--strategies", "zigzag", "--seq", "64", *small, "--sinks", "learned"]
    assert cli.run([*arguments, "--documents", "40,24"]) == 0
    assert cli.run(arguments) == 0
    kept = sweep.read_sweep(tmp_path / "traces/bench/sweep.json").rows
    assert [row.workload.documents for row in kept] == [(40, 24), None]
    assert [row.workload.sinks for row in kept] == ["learned", "learned"]
    capsys.readouterr()
    assert cli.run([*arguments, "--documents", "40,25"]) == 2
    assert "65 tokens together, the sequence has 64" in capsys.readouterr().err


@pytest.mark.parametrize("run", ["../elsewhere", "/etc", "link", "", "a/../../b"])
def test_a_run_outside_the_sweeps_folder_is_refused(swept, capsys, tmp_path, run):
    """The file may be another user's: it must not make ringprof read runs in other folders."""
    swept({})
    (tmp_path / "link").symlink_to(tmp_path.parent)
    path = tmp_path / "sweep.json"
    content = json.loads(path.read_text())
    content["rows"][1]["run"] = run
    path.write_text(json.dumps(content))
    with pytest.raises(InputError) as error:
        sweep.read_sweep(path)
    assert str(error.value) == f"{path}: run {run!r} is not inside the folder of the sweep"


def test_reason_that_is_not_utf_8_is_escaped(swept):
    rows, _ = swept({("burst", 1024): RecordError("rank 1 failed; log: /tmp/\udcff/rank1.log")})
    again, _ = swept({})
    assert rows[0].reason == "rank 1 failed; log: /tmp/\\udcff/rank1.log" and again[0].status == "ok"


@pytest.mark.parametrize("text", ["", "[]", '{"schema": "ringprof.sweep/9"}', "{"])
def test_invalid_sweep_file_is_refused(tmp_path, text):
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(InputError):
        sweep.read_sweep(tmp_path / "sweep.json")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--strategies", "zigzagg", "--seq", "64"], "did you mean"),
        (["--strategies", "zigzag", "--seq", "many"], "'many' is not a number of tokens"),
        (["--strategies", "zigzag", "--seq", "64", "-p", "x"], "KEY=VALUE"),
        (["--strategies", "zigzag"], "--seq"),
    ],
)
def test_wrong_usage_is_one_line(capsys, tmp_path, monkeypatch, arguments, part):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["bench", "--device", "cpu", *arguments]) == 2
    err = capsys.readouterr().err
    assert part in err and "Traceback" not in err


@pytest.mark.processes
def test_real_sweep_on_two_ranks_and_rerun(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Import this checkout, not an installed package.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    small = ["--heads", "2", "--head-dim", "16", "--iters", "2", "--world", "2", "--device", "cpu"]
    arguments = ["bench", "--strategies", "zigzag", "--seq", "256,258", *small]
    assert cli.run(arguments) == 0
    out = capsys.readouterr().out
    assert "FWD+BWD ms" in out and "UNFIT" in out and "divisible by 4" in out
    runs = sorted(path.name for path in (tmp_path / "traces/bench").iterdir())
    assert cli.run([*arguments, "--format", "csv"]) == 0
    row, unfit = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert sorted(path.name for path in (tmp_path / "traces/bench").iterdir()) == runs
    assert float(row["forward_backward_ms"]) > 0 and float(row["forward_ms"]) > 0 and unfit["status"] == "unfit"
    assert cli.run([*arguments, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "ringprof.bench/1"
    assert cli.run([*arguments, "--format", "markdown"]) == 0
    assert capsys.readouterr().out.startswith("| Dtype | B | Seq Len |")


def test_masked_sweep_has_a_mask_column():
    masks = [workload.mask_in_short() for workload in (
        Workload(seq=8, heads=1, kv_heads=1, head_dim=2, documents=(5, 3), window=4, softcap=30.0),
        Workload(seq=8, heads=1, kv_heads=1, head_dim=2, causal=False, sinks="learned"),
    )]  # fmt: skip
    assert masks == ["causal, 2 documents, window 4, softcap 30", "full, learned sinks"]
    wide = TextStyle(width=250)
    assert "mask" in SweepTable(wide, masks).header and "mask" not in SweepTable(wide, ["causal"]).header
    figures = {column.key: 1.0 if column.form else "n" for column in COLUMNS} | {
        "status": "ok",
        "reason": None,
        "mask": masks[1],
    }
    assert masks[1] in SweepTable(wide, masks).line(figures)
    assert "no room for" in SweepTable(TextStyle(width=80), masks).header
    assert f"| {masks[1]} |" in render_markdown([figures])


@pytest.mark.parametrize(("tflops", "shown"), [(521.74, "521.7"), (0.0015372, "0.001537")])
def test_small_rates_are_shown_with_significant_digits(tflops, shown):
    figures = {column.key: tflops if column.key == "tflops" else None for column in COLUMNS} | {
        "status": "ok",
        "reason": None,
    }
    assert f" {shown} " in SweepTable(TextStyle(width=250)).line(figures)
    assert f"| {shown} |" in render_markdown([figures])


@pytest.mark.parametrize(("width", "title"), [(80, "no room for"), (200, "parameters")])
def test_a_row_fits_the_terminal(width, title):
    table = SweepTable(TextStyle(width=width))
    figures = {column.key: 1234.5 / column.factor if column.form else "n" for column in COLUMNS}
    row = table.line({**figures, "status": "ok", "reason": None})
    assert title in table.header and max(map(len, [*table.header.splitlines(), row])) <= width
    assert len(row) == len(table.header.splitlines()[0])
    assert table.line({**figures, "status": "oom", "reason": "too long"}).endswith("  OOM: too long")
