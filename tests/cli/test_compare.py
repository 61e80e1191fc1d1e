"""``ringprof compare`` on committed runs, traces, tables and logs."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import ringprof
from ringprof import cli
from ringprof.report.text import TextStyle
from ringprof.results import comparison as comparing
from tests.loaded import analysis
from tests.paths import ROOT
from tests.renamed import with_gpu_named

ZIGZAG, RING, BURST = (str(ROOT / "traces" / f"h200x4-{name}-262144") for name in ("zigzag", "ring", "burst"))
TRACES = str(ROOT / "tests" / "data" / "h200x8-zigzag-131072")
TABLE, LOG = (str(next((ROOT / "tests" / "data" / "logs").glob(f"{number}_*.txt"))) for number in ("002", "001"))


@pytest.fixture(autouse=True, scope="module")
def read_once() -> Iterator[None]:
    """Read each path once: reading takes most of the time, and other tests are about it."""
    read = cache(comparing._loaded)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparing, "_loaded", lambda source, reading: read(source, replace(reading, notify=None)))
        yield


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.run(["compare", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_compare_two_runs_as_json(capsys):
    code, out, _ = run(capsys, ZIGZAG, RING, "--format", "json")
    document = json.loads(out)
    assert code == 0 and document["schema"] == "ringprof.compare/1"
    assert document["differing"]["strategy"] == ["zigzag", "ring"]
    assert "seq" not in document["differing"]
    reports = [ringprof.load(path).report() for path in (ZIGZAG, RING)]
    for entry, report in zip(document["entries"], reports, strict=True):
        assert entry["figures"]["tflops"]["value"] == pytest.approx(report["summary"]["tflops"])
        mean = sum(rank["exposed_comm_ns"] for rank in report["ranks"]) / len(report["ranks"])
        assert entry["figures"]["exposed_comm_ms"]["value"] == pytest.approx(mean / 1e6)
    verdicts = {difference["figure"]: difference["verdict"] for difference in document["differences"]}
    assert verdicts["tflops"] == verdicts["iteration_ms"] == "worse"


def test_markdown_for_a_pull_request(capsys):
    _, out, _ = run(capsys, ZIGZAG, RING, "--format", "markdown")
    blocks = out.strip().split("\n\n")
    assert blocks[0].startswith("**1: slower by 71.0 % (")
    assert "imbalance between ranks" in blocks[0]
    table = next(block.split("\n") for block in blocks if block.startswith("| figure"))
    assert {line.count("|") for line in table} == {4}
    assert re.search(r"^\| iteration_ms \| 1,180\.3 \| 2,018\.5 +1\.71x- \|$", out, re.MULTILINE)


def test_compare_shows_waterfall_parts(capsys):
    _, out, _ = run(capsys, ZIGZAG, RING, "--format", "json")
    entries = json.loads(out)["entries"]
    for entry, path in zip(entries, (ZIGZAG, RING), strict=True):
        parts = {name: f["value"] for name, f in entry["figures"].items() if name.startswith("waterfall.")}
        wall = analysis(path).summary.slowest_wall_ns / 1e6
        assert sum(parts.values()) == pytest.approx(wall)
    _, out, _ = run(capsys, ZIGZAG, RING)
    heading, below = out.split("waterfall: parts of the slowest rank's wall")
    assert "imbalance_ms" in below
    assert "imbalance_ms" not in heading


def test_difference_between_similar_runs_is_noise(capsys):
    _, out, _ = run(capsys, ZIGZAG, BURST)
    line = next(line for line in out.splitlines() if line.startswith("tflops"))
    assert line.endswith("1.00x~")
    assert "~ noise" in out


def test_comparison_reports_the_warnings_of_an_entry(capsys, tmp_path):
    """Leave a truncated trace out of all figures, and report it in the comparison."""
    whole, cut = ROOT / "traces" / "h200x4-zigzag-65536", tmp_path / "cut"
    shutil.copytree(whole, cut)
    (cut / "rank2.json.gz").write_bytes((whole / "rank2.json.gz").read_bytes()[:16_000])
    code, out, _ = run(capsys, str(whole), str(cut), "--html", str(tmp_path / "page.html"))
    assert code == 0 and "[left_out]" in out and "1: 1 of 4 ranks have no trace: 2 [missing_ranks]" in out
    assert "left_out" in (tmp_path / "page.html").read_text()
    entries = json.loads(run(capsys, str(whole), str(cut), "--format", "json")[1])["entries"]
    assert entries[0]["warnings"] == [] and any("[left_out]" in text for text in entries[1]["warnings"])
    rates = [entry["figures"]["block_tflops"]["value"] for entry in entries]
    assert rates[1] == pytest.approx(rates[0], rel=0.02)
    assert "warnings" not in run(capsys, str(whole), str(whole))[1]


def test_compare_run_trace_table_and_log(capsys):
    code, out, err = run(capsys, ZIGZAG, TRACES, TABLE, LOG)
    assert code == 0, err
    for part in ("(run)", "(trace)", "(table)", "(log)"):
        assert part in out
    assert out.startswith("Different work (seq 131072 against 262144): times and memory of ")
    assert "(work)" not in out and re.search(r"^figures left out, as they depend on the work: \d+ ", out, re.MULTILINE)
    _, text, _ = run(capsys, ZIGZAG, TRACES, TABLE, LOG, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert {row["source"] for row in rows} == {"run", "trace", "table", "log"}
    assert all(row["ratio"] == "" for row in rows if row["verdict"] == "not comparable")


def test_a_condition_sets_the_exit_code(capsys):
    code, _, err = run(capsys, ZIGZAG, RING, "--fail-if", "tflops < 0.95 * base")
    assert code == 1
    assert "h200x4-ring-262144: tflops is 305" in err
    assert run(capsys, ZIGZAG, BURST, "--fail-if", "tflops < 0.95 * base")[0] == 0
    # Shares are written as in a report: the mean over ranks, and the worst rank's.
    assert run(capsys, ZIGZAG, RING, "--fail-if", "exposed_comm > 5%")[0] == 1
    assert run(capsys, ZIGZAG, BURST, "--fail-if", "exposed_comm > 5%")[0] == 0
    assert run(capsys, ZIGZAG, RING, "--fail-if", "max(exposed_comm) > 80%")[0] == 1


def test_undecided_condition_is_reported_and_passes_by_default(capsys):
    """Compare burst with zigzag: it takes 0.3 % longer, which its iterations do not prove."""
    code, _, err = run(capsys, ZIGZAG, BURST, "--fail-if", "tflops < 0.998 * base")
    assert code == 0 and "undecided: tflops < 0.998 * base" in err and "times the base" in err
    # Burst is 0.1 % from that limit.
    assert "(deciding takes more than 30 recordings per side)" in err
    assert run(capsys, ZIGZAG, BURST, "--fail-if", "tflops < 0.998 * base", "--undecided", "fail")[0] == 1
    assert run(capsys, ZIGZAG, BURST, "--fail-if", "tflops < 0.95 * base", "--undecided", "fail")[0] == 0


def test_single_recordings_leave_small_differences_undecided(capsys):
    """Compare burst with usp: it takes 0.9 % longer; recordings of one program differ by about as much."""
    sides = [str(ROOT / "traces" / "h200x4-usp-262144"), BURST]
    condition = "iteration_ms > 1.001 * base"
    code, out, err = run(capsys, *sides, "--fail-if", condition)
    assert code == 0 and f"undecided: {condition} (deciding takes more than 30 recordings per side)" in err
    assert "no difference proved: slower by 0.9 % (-2." in out and "recordings per side" in out
    assert "recordings of one program differ by 1.0 % (standard deviation; from 70 programs timed" in flat(out)
    # 1.9 % from the limit, with 1.43 % between two recordings: (2.447 + 0.906) / sqrt(7) of it is 1.81 %.
    assert run(capsys, *sides, "--fail-if", "iteration_ms > 0.99 * base")[2].endswith(
        ": undecided: iteration_ms > 0.99 * base (deciding takes about 7 recordings per side)\n"
    )
    assert run(capsys, *sides, "--fail-if", "iteration_ms > 0.97 * base")[0] == 1
    document = json.loads(run(capsys, *sides, "--format", "json")[1])
    compared = {difference["figure"]: difference for difference in document["differences"]}
    assert compared["iteration_ms"]["assumed_spread"]["share"] == pytest.approx(0.01, rel=0.01)
    assert compared["iteration_ms"]["verdict"] == "noise" and 20 < compared["iteration_ms"]["recordings_to_decide"] < 30
    assert compared["wall_ms"]["assumed_spread"] is None


@pytest.mark.parametrize("path", [ZIGZAG, TRACES])
def test_figures_are_equal_in_report_and_comparison(path):
    """Compare every name that both know, and recompute the shares and times of each part."""
    loaded = ringprof.load(path)
    figures, report = loaded.figures(), loaded.report()
    (entry,) = loaded.entries("x")
    assert entry.values() == figures
    ranks = report["ranks"]
    for part in ("compute", "exposed_comm", "exposed_memory", "idle"):
        times = [rank[f"{part}_ns"] for rank in ranks]
        assert figures[part] == pytest.approx(sum(times) / sum(rank["wall_ns"] for rank in ranks))
        # One iteration was profiled.
        assert figures[f"{part}_ms"] == pytest.approx(sum(times) / len(ranks) / 1e6)
        assert figures[f"max({part}_ns)"] == max(times)
    for name in entry.figures:
        assert name.endswith(("_ms", "_mib")) == (entry.figures[name].unit in ("ms", "MiB"))


def test_compare_combines_recordings_of_each_side(capsys, tmp_path):
    """Record three times per side, each recording 1 % slower than the last: an 8 % difference is still found."""
    folders: dict[str, list[str]] = {}
    for side, factor in (("main", 1.0), ("branch", 1.08)):
        for number in range(3):
            folder = tmp_path / f"{side}-{number}"
            shutil.copytree(ZIGZAG, folder)
            recorded = json.loads((folder / "run.json").read_text())
            times = recorded["timings"]["iterations_ns"]
            scaled = [[round(time * factor * (1 + number / 100)) for time in rank] for rank in times]
            recorded["timings"]["iterations_ns"] = scaled
            (folder / "run.json").write_text(json.dumps(recorded))
            folders.setdefault(side, []).append(str(folder))
    arguments = [*folders["main"], "vs", *folders["branch"]]
    _, out, _ = run(capsys, *arguments)
    assert "base: main-0 and 2 more (run)" in out
    assert re.search(r"1: slower by 8\.0 % \(5\.\d to 10\.\d\)", out)
    entries = json.loads(run(capsys, *arguments, "--format", "json")[1])["entries"]
    assert [entry["recordings"] for entry in entries] == [3, 3]
    assert run(capsys, *arguments, "--fail-if", "iteration_ms > 1.2 * base")[0] == 0
    assert run(capsys, *arguments, "--fail-if", "iteration_ms > 1.01 * base")[0] == 1


def test_ten_percent_slowdown_with_an_outlier_shows_its_interval(capsys, tmp_path):
    """Compare 50 iterations of 80.9 ms, one of which takes 91 ms, with 50 of 89 ms."""
    for name, middle in (("main", 80_900_000), ("branch", 89_000_000)):
        shutil.copytree(ZIGZAG, tmp_path / name)
        recorded = json.loads((tmp_path / name / "run.json").read_text())
        times = [middle + 10_000 * ((17 * number) % 50 - 25) for number in range(50)]
        if name == "main":
            times[20] = 91_000_000
        recorded["timings"]["iterations_ns"] = [times] * 4
        (tmp_path / name / "run.json").write_text(json.dumps(recorded))
    both = [str(tmp_path / "main"), str(tmp_path / "branch")]
    _, out, _ = run(capsys, *both)
    # Recordings of 81 and 89 ms differ by hypot(1 %, 0.24 ms) each: 1.43 % together, 1.96 times that is 2.8 % of 110 %.
    ((low, high),) = [map(float, ends) for ends in re.findall(r"1: slower by 10\.0 % \(([\d.]+) to ([\d.]+)\)", out)]
    assert 6.6 < low < 7.0 and 13.0 < high < 13.5
    assert run(capsys, *both, "--fail-if", "iteration_ms > 1.05 * base")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([ZIGZAG], "two measurements"),
        ([ZIGZAG, "nowhere"], "nowhere"),
        ([ZIGZAG, RING, "--fail-if", "tflop < 1"], "did you mean tflops?"),
        ([ZIGZAG, RING, "--fail-if", "import os"], "FIGURE OP NUMBER"),
        ([ZIGZAG, RING, "--fail-if", "exposed_comm > 5"], "did you mean 'exposed_comm > 5%'?"),
        ([ZIGZAG, RING, "--fail-if", "exposed_comm_ms > 5%"], "exposed_comm_ms is no share"),
        (
            [ZIGZAG, LOG, "--fail-if", "iteration_ms > 1.1 * base"],
            "not known to do the same work as the base",
        ),
        ([ZIGZAG, "vs"], "two measurements"),
    ],
)
def test_wrong_usage_is_one_line(capsys, arguments, part):
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert part in err and len(err.strip().splitlines()) == 1


def test_objects_can_be_compared_from_python():
    runs = [ringprof.load(ZIGZAG), ringprof.load(RING)]
    comparison = ringprof.compare(*runs)
    assert [(entry.label, entry.source) for entry in comparison.entries] == [(run.name, "run") for run in runs]


def test_compare_in_python_prints_the_command_output(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    _, out, _ = run(capsys, str(ZIGZAG), str(RING))
    assert out == ringprof.compare(ZIGZAG, RING).to_terminal(TextStyle(width=100))


def test_nine_runs_fit_80_columns_with_one_run_per_row(capsys, monkeypatch):
    paths = [str(path) for path in sorted((ROOT / "traces").glob("h200x4-*-262144"))]
    assert len(paths) == 9
    _, wide, _ = run(capsys, *paths)
    monkeypatch.setenv("COLUMNS", "80")
    _, narrow, _ = run(capsys, *paths)
    assert max(map(len, narrow.splitlines())) <= 80 and "…" not in narrow
    assert re.search(r"^h200x4-usp-262144 +1,173.4 +0.59x\+ +524.7 +1.71x\+ ", narrow, re.MULTILINE)
    figure = re.compile(r"\d[\d,]*\.\d+")
    assert sorted(figure.findall(narrow)) == sorted(figure.findall(wide))


def flat(out: str) -> str:
    """Join printed lines with spaces."""
    return " ".join(out.split())


def changed(name: str, folder: Path, change: Callable[[list[dict[str, Any]]], None]) -> str:
    """Copy the folder of traces with changed events of rank 3; returns its path."""
    shutil.copytree(TRACES, folder / name)
    path = folder / name / "rank3.json.gz"
    trace = json.loads(gzip.decompress(path.read_bytes()))
    change(trace["traceEvents"])
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    return str(folder / name)


def test_traces_compared_with_themselves_are_the_same(capsys):
    code, out, _ = run(capsys, TRACES, TRACES)
    assert code == 0 and "(work)" not in out and "--same-work" not in out
    assert "1: the same" in out.splitlines()
    assert "1: taken as the same work: the same 808 computation kernels" in flat(out)
    document = json.loads(run(capsys, TRACES, TRACES, "--format", "json")[1])
    assert len(document["differences"]) >= 20
    assert {(difference["ratio"], difference["verdict"]) for difference in document["differences"]} == {(1.0, "same")}
    assert document["entries"][0]["work"] is None
    assert document["entries"][1]["work"]["same"] is True and document["entries"][1]["work"]["by"] == "traces"
    # 8 kernels of flash forward, 24 backward, 7 merges, 52 elementwise, 7 casts and 3 permutations on each of 8 ranks.
    assert "808 computation kernels" in document["entries"][1]["work"]["text"]
    assert run(capsys, TRACES, TRACES, "--fail-if", "wall_ms > 1.0 * base")[0] == 0


def test_autotuned_kernel_is_same_work_missing_kernel_is_not(capsys, tmp_path):
    def rename(events):
        for event in events:
            if event.get("cat") == "kernel":
                event["name"] = event["name"].replace("knob_7_64x128x128", "knob_9_128x128x128")

    def drop(events):
        events.remove(next(e for e in events if e.get("cat") == "kernel" and "flash_bprop" in e["name"]))

    renamed, dropped = changed("renamed", tmp_path, rename), changed("dropped", tmp_path, drop)
    _, out, _ = run(capsys, TRACES, renamed)
    assert "equal by kind, 8 of them with other names, the same bytes sent; shapes and masks are not compared" in flat(
        out
    )
    _, out, _ = run(capsys, TRACES, dropped)
    assert flat(out).startswith(
        "Work not known to be the same (rank 3 runs 23 calls of kind flash backward per iteration against 24): "
        "times and memory are not compared. If it is the same, add --same-work."
    )
    assert "wall_ms" not in out and "exposed_comm %" in out and "(work)" not in out
    document = json.loads(run(capsys, TRACES, dropped, "--format", "json")[1])
    left_out = {row["figure"] for row in document["differences"] if row["verdict"] in ("not comparable", "missing")}
    assert f"figures left out, as they depend on the work: {len(left_out)} (--format json has them)" in flat(out)
    code, out, _ = run(capsys, TRACES, dropped, "--same-work")
    assert code == 0 and "wall_ms" in out and "Work not known" not in out
    markdown = run(capsys, TRACES, dropped, "--format", "markdown")[1]
    assert markdown.startswith("**Work not known to be the same (rank 3 ") and "wall_ms" not in markdown


def test_different_sequence_lengths_are_not_the_same_work(capsys, tmp_path):
    """Compare runs of 64k and 256k tokens: they launch the same kernels, but send different numbers of bytes."""
    folders = []
    for tokens in (65536, 262144):
        folder = tmp_path / str(tokens)
        folder.mkdir()
        for path in (ROOT / "traces" / f"h200x4-zigzag-{tokens}-copied").glob("rank*.json.gz"):
            shutil.copy(path, folder)
        folders.append(str(folder))
    _, out, _ = run(capsys, *folders)
    assert flat(out).startswith("Work not known to be the same (rank 0 sends 18.8 GB per iteration against 4.7 GB):")
    code, _, err = run(capsys, *folders, "--fail-if", "wall_ms > 1.1 * base")
    assert code == 2 and "--same-work" in err


def test_condition_on_a_part_requires_it_in_both_runs(capsys, tmp_path):
    known = ROOT / "traces" / "h200x4-zigzag-65536"
    unknown = str(with_gpu_named(known, "NVIDIA RTX PRO 6000", tmp_path / "unknown"))
    for pair in ((unknown, str(known)), (str(known), unknown)):
        code, out, err = run(capsys, *pair, "--fail-if", "waterfall.attention_ms > 1.01 * base")
        assert (code, err) == (0, "")
        assert "1: the same" in out.splitlines() and "of the base's profiled wall" not in out
        assert (
            "waterfall: attention holds peak, vendor_peak, kernel_limit, slower_kernel, repeated, slowdown: not every"
            " entry tells these apart" in flat(out)
        )
    code, _, err = run(capsys, unknown, str(known), "--fail-if", "waterfall.peak_ms > 1.01 * base")
    assert code == 2 and "waterfall.peak_ms" in err


@pytest.mark.parametrize(("name", "transport"), [("cpu4-burst-4096", "gloo"), (Path(ZIGZAG).name, "nccl")])
def test_transport_is_that_of_the_recorded_backend(
    name: str, transport: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(ROOT / "traces" / name)
    _, out, _ = run(capsys, path, path, "--format", "json")
    assert {entry["settings"]["hops"] for entry in json.loads(out)["entries"]} == {transport}
