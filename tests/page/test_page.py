"""Tests of the HTML report without a browser: figures equal the JSON report's, the policy is strict, names are text."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

import ringprof
from ringprof import cli
from ringprof.analysis.findings.findings import findings_in_memory
from ringprof.analysis.findings.parts import WATERFALL_LABELS
from ringprof.errors import UsageError
from ringprof.report import timeline
from ringprof.report.page import bars
from ringprof.report.page.document import PageContext
from ringprof.report.page.html import drawing, render
from ringprof.report.page.pages import comparison_document, run_document, sweep_document
from ringprof.report.sections import hops
from ringprof.report.terms import LABELS
from ringprof.report.timeline import timeline_of
from ringprof.scale.pipeline import attribute
from tests.analysis.build import Builder
from tests.analysis.rings import ring_pass
from tests.loaded import analysis
from tests.page.shown import shows
from tests.paths import COMMITTED, ROOT, TRACES, VARIED
from tests.tiers import tiered

RUN = ROOT / "traces" / "h200x4-zigzag-262144-copied"
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e{{7*7}}@name"


class Page(HTMLParser):
    """Parsed page: tables by the heading above them, and everything that could load or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.scripts: list[str] = []
        self.loads: list[str] = []
        self.policy = ""
        self._heading, self._in, self._row = "", "", [""]
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.loads += [value for name, value in attrs if name in ("src", "srcset", "action", "data") and value]
        self.loads += [
            values["href"] or "" for _ in [0] if "href" in values and not (values["href"] or "").startswith("#")
        ]
        assert not [name for name, _ in attrs if name.startswith("on")], "a script in an attribute"
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"] or ""
        if tag == "script":
            self.scripts.append("")
        if tag == "h2":
            self._heading = ""
        if tag == "tr":
            self._row = []
        if tag in ("td", "th"):
            self._row.append("")
        self._in = tag

    def handle_endtag(self, tag: str) -> None:
        if tag == "tr":
            self.tables.setdefault(self._heading, []).append(self._row)
            # Text after a table belongs to none of its cells.
            self._row = [""]
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            self.scripts[-1] += data
        elif self._in == "h2":
            self._heading += data
        elif self._in in ("td", "button"):
            self._row[-1] += data


def page_of(*builders: Builder) -> str:
    attribution = attribute([builder.trace() for builder in builders])
    findings = findings_in_memory(attribution)
    return render(run_document(findings, ["x"], "x"))


def test_hops_start_on_one_clock_across_hosts() -> None:
    """Rank 1's clock is an hour ahead, so an hour is subtracted from its times."""
    hour = 3_600_000_000_000
    builders = ring_pass()
    attribution = attribute([builder.trace() for builder in builders])
    offsets = {rank.rank: 0 if rank.rank != 1 else -hour for rank in attribution.ranks}
    shifted_attribution = msgspec.structs.replace(
        attribution, clocks=msgspec.structs.replace(attribution.clocks, offset_ns=offsets)
    )
    plain, shifted = (findings_in_memory(attributed) for attributed in (attribution, shifted_attribution))
    starts = []
    for findings in (plain, shifted):
        content = hops.html(findings, PageContext(drawing(), ["x"]))
        assert content is not None
        starts.append({(row[0].text, row[1].text): float(row[4].key) for row in content.tables[1].rows})
    # An hour less for rank 1, so its first hop is the first of all, and the others' are an hour later.
    assert min(starts[1].values()) == 0
    # Starts are in ms.
    assert all(
        starts[1][key] - starts[0][key] == pytest.approx(0 if key[0] == "1" else hour / 1e6, abs=0.01)
        for key in starts[0]
    )


@pytest.fixture(scope="module")
def text() -> str:
    return analysis(RUN).to_html()


@tiered("folder", COMMITTED, [TRACES / name for name in VARIED], ids=lambda path: path.name)
def test_committed_pages_have_the_figures_of_the_json_report(folder: Path) -> None:
    """Assert that the tables and tiles of a run's page show the figures of its JSON report."""
    text, report = analysis(folder).to_html(), analysis(folder).report()
    # Modest in size: the library and the figures, or neither on CPU, where no timeline is drawn.
    on_cpu = analysis(folder).findings.attribution.on_cpu
    assert len(text) < 2e5 if on_cpu else 1e6 < len(text) < 5e6
    page, summary = Page(text), report["summary"]
    _, *rows = page.tables["Breakdown by rank"]
    for row, rank in zip(rows, report["ranks"], strict=True):
        parts = ("wall", "compute", "exposed_comm", "exposed_memory", "idle")
        assert row[0] == str(rank["rank"])
        assert all(shows(cell, rank[f"{name}_ns"] / 1e6) for cell, name in zip(row[2:7], parts, strict=True))
    _, *rows = page.tables["Waterfall"]
    for row, part in zip(rows, report["waterfall"], strict=True):
        assert shows(row[1], part["time_ns"] / 1e6) and shows(row[2], 100 * part["share"], 3)
    for row, step in zip(page.tables.get("Ring steps", [])[1:], report["steps"], strict=True):
        assert (row[0], row[1], row[3]) == (str(step["rank"]), step["phase"], str(step["step"]))
        assert shows(row[-2], step["exposed_ns"] / 1e6) and row[-1] == (step["bound"] or "-")
    kinds = {row[0]: row[1] for row in page.tables["By kind"][1:]}
    for kind, shown in kinds.items():
        code = next(name for name, label in LABELS.items() if label == kind)
        mean = sum(rank["kinds_ns"].get(code, 0) for rank in report["ranks"]) / len(report["ranks"])
        assert shows(shown, mean / 1e6)
    for line in summary["verdict"]:
        assert line.replace("'", "&#39;") in text
    rates = [(summary["tflops"], "achieved, per device"), (summary["block_tflops"], "attention kernels in the run")]
    tiles = dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", text))
    for value, label in rates:
        assert value is None or tiles[label] == (
            f"{value:,.1f} TFLOP/s" if value >= 1 else f"{1e3 * value:,.1f} GFLOP/s"
        )
    share = summary["exposed_comm_share"]["mean"]
    assert tiles["exposed communication, of the mean wall"] == f"{100 * share:.1f} %"


def test_page_runs_only_its_own_scripts_and_loads_nothing(text: str) -> None:
    page = Page(text)
    directives = dict(part.strip().split(" ", 1) for part in page.policy.split(";"))
    assert directives["default-src"] == "'none'"
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in page.scripts]
    assert directives["script-src"].split() == [f"'sha256-{digest}'" for digest in hashes]
    assert "unsafe" not in directives["script-src"]
    assert page.loads == []
    assert len(text) < 15e6


def test_names_from_a_trace_are_escaped_in_the_page() -> None:
    builders = ring_pass()
    builders[0].run(HOSTILE, 20_000, 21_000, launched=99_000)
    page = Page(page_of(*builders))
    # The library, the figures and the sorting: no script came in with the name.
    assert len(page.scripts) == len(Page(page_of(*ring_pass())).scripts)
    shown = next(row[0] for row in page.tables["Kernels"] if "alert(1)" in row[0])
    assert shown.startswith("</script><script>alert(1)</script><img src=x onerror=alert(2)>")
    assert "\x1b" not in shown and "\u202e" not in shown


def test_view_is_part_of_the_page_in_an_iframe() -> None:
    run = analysis(RUN)
    view = run.view()
    assert [heading for heading in Page(view.html).tables if heading] == ["Timeline", "Waterfall"]
    assert view.html.index("<h2>Timeline</h2>") < view.html.index("<h2>Waterfall</h2>")
    cell = view._repr_html_()
    assert cell.startswith('<iframe sandbox="allow-scripts allow-downloads" ') and cell.count("<") == 2
    # As the browser reads the attribute, it is the page.
    assert unescape(cell.partition('srcdoc="')[2].removesuffix('"></iframe>')) == view.html
    assert repr(view).startswith("<ringprof view of timeline, waterfall:")
    assert "height: 400px" in run.view("steps", height=400)._repr_html_()
    with pytest.raises(UsageError, match=r"no section 'stpes' .did you mean 'steps'.*there are: breakdown, "):
        run.view("stpes")
    # A CPU run has no timeline.
    assert list(Page(analysis(ROOT / "traces" / "cpu4-burst-4096").view().html).tables) == ["Waterfall"]
    comparison_view = ringprof.compare(RUN, ROOT / "traces" / "h200x4-ring-262144").view()
    assert "Both timelines" in comparison_view.html and "run.view()" in run._repr_html_()


def test_timeline_of_a_large_run_is_thinned_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringprof.report.timeline.MAX_BARS", 200)
    builders = ring_pass(world=8, names="ringprof::{phase}/step={step}/block")
    attribution = attribute([builder.trace() for builder in builders])
    drawn = timeline_of(attribution, ())
    total = sum(len(rank.window.activities()) for rank in attribution.ranks)
    assert total > 200 and drawn.thinned
    assert sum(bar.activities for bar in drawn.bars if bar.category not in ("wait", "idle")) == total
    text = page_of(*builders)
    assert "Neighbouring short activities are drawn as one bar" in text
    assert len(text) < 15e6


def test_a_comparison_and_a_sweep_have_pages() -> None:
    comparison = ringprof.compare(RUN, ROOT / "traces" / "h200x4-ring-262144")
    page = Page(render(comparison_document(comparison)))
    first = next(row for row in page.tables["Every figure"] if row[0] == "tflops")
    values = [entry.figures["tflops"].value for entry in comparison.entries]
    assert all(map(shows, first[2:4], values))
    row = {
        "status": "ok", "reason": None, "dtype": "bf16", "batch": 1, "strategy": "zigzag", "params": "",
        "kernel": "cudnn", "forward_ms": 1.0, "memory_mib": 5.0, "flash_share": 0.9, "comm_share": 0.2,
        "overlap_ratio": 0.8, "exposed_comm_ms": 0.1, "of_kernel_rate": 0.9,
        "compute_share": 0.93, "exposed_comm_share": 0.05, "iterations_ms": [4.0] * 3,
    }  # fmt: skip
    rows = [{**row, "seq": seq, "tflops": 100.0 + seq / 1e3, "forward_backward_ms": 4.0} for seq in (1024, 2048)]
    rows.append({"status": "oom", "reason": "<b>out of memory</b>", **dict.fromkeys(("dtype", "batch", "seq"), 1),
                 "strategy": "burst", "params": "", "kernel": "cudnn", "forward_ms": None})  # fmt: skip
    page = Page(render(sweep_document(rows, "sweep")))
    assert [cells[-1] for cells in page.tables["Every row"][1:]] == ["ok", "ok", "oom: <b>out of memory</b>"]


def test_sweep_page_names_only_a_proved_fastest() -> None:
    """One of three strategies is 0.1 % behind the first, within the scatter of 2 %, and one 50 %."""
    times = {"burst": 100.0, "zigzag": 100.1, "ring": 150.0}
    off_by = (3, -1, 0, 4, -4, 1, -3, 2, -2)
    rows = [
        {"status": "ok", "reason": None, "strategy": name, "params": "", "kernel": "cudnn", "seq": 1024,
         "forward_backward_ms": middle, "tflops": 5e4 / middle, "of_kernel_rate": None, "memory_mib": None,
         "compute_share": 0.9, "exposed_comm_share": 0.1, "iterations_ms": [middle + off for off in off_by]}
        for name, middle in times.items()
    ]  # fmt: skip
    sentence = sweep_document(rows, "sweep").headline
    assert sentence.startswith(
        "1,024 tokens: burst cudnn took the least time, 100.0 ms, 500.0 TFLOP/s; not proved slower: "
    )
    not_slower, slower = re.findall(r"(\w+) cudnn \(([\d.]+) %, (-?[\d.]+) to ([\d.]+)\)", sentence)
    assert not_slower[:2] == ("zigzag", "0.1") and float(not_slower[2]) < 0 < float(not_slower[3])
    assert slower[:2] == ("ring", "50.0") and 40 < float(slower[2]) < 50 < float(slower[3]) < 60
    assert sweep_document([rows[0], rows[2]], "sweep").headline.startswith("1,024 tokens: burst cudnn is fastest")


def test_sweep_of_one_length_draws_a_bar_per_strategy_under_its_own_title() -> None:
    row = {
        "status": "ok", "reason": None, "params": "", "kernel": "cudnn", "seq": 131072, "forward_backward_ms": 9.0,
        "of_kernel_rate": 0.9, "memory_mib": 5.0, "compute_share": 0.9, "exposed_comm_share": 0.1,
        "iterations_ms": [9.0] * 3,
    }  # fmt: skip
    speeds = {"ring": 250.0, "burst": 500.0}
    rows = [{**row, "strategy": name, "tflops": speed} for name, speed in speeds.items()]
    document = sweep_document(rows, "s.json")
    assert document.title == "Benchmark: ring, burst at 128k tokens" and document.subtitle.startswith("s.json · ")
    (chart,) = next(section for section in document.sections if section.anchor == "speed").content.charts
    assert [drawn.label for drawn in chart.rows] == ["burst cudnn", "ring cudnn"]
    widths = [drawn.bars[0].width for drawn in chart.rows]
    assert widths[0] == pytest.approx(2 * widths[1], rel=1e-3) and 90 < widths[0] <= 100
    assert sweep_document([*rows, {**rows[0], "seq": 262144}], "s").title.endswith(" at 128k to 256k tokens")


def test_overview_has_a_row_from_first_to_last_activity_of_each_rank_and_its_stretches() -> None:
    run = analysis(ROOT / "traces" / "h200x4-zigzag-262144")
    content = timeline.html(run.findings, PageContext(drawing(), ["x"]))
    assert content is not None
    overview = content.figure.children[0]
    ranks, *marks = [renderer.data_source.data for renderer in overview.renderers]
    offset = run.findings.attribution.clocks.offset_ns
    starts = [rank.breakdown.start_ns + offset[rank.rank] for rank in run.attribution.ranks]
    ends = [rank.breakdown.end_ns + offset[rank.rank] for rank in run.attribution.ranks]
    assert list(ranks["left"]) == pytest.approx([(start - min(starts)) / 1e6 for start in starts])
    assert list(ranks["right"]) == pytest.approx([(end - min(starts)) / 1e6 for end in ends])
    # Marks cover no more than what is exposed or idle, and most of it.
    drawn = sum(sum(data["right"]) - sum(data["left"]) for data in marks)
    lost = sum(rank.breakdown.exposed_comm_ns + rank.breakdown.idle_ns for rank in run.attribution.ranks) / 1e6
    assert 0.8 * lost < drawn <= lost * (1 + 1e-9)


def test_waterfall_draws_small_parts_again_in_a_panel_of_their_own_scale() -> None:
    waterfall = analysis(RUN).findings.waterfall
    whole, zoomed = bars.waterfall(waterfall)
    parts = [part for part in waterfall.parts if abs(part.time_ns) >= 0.0005 * waterfall.wall_ns]
    assert [row.label for row in whole.rows] == [WATERFALL_LABELS[part.part] for part in parts]
    lengths = [row.bars[0].width for row in whole.rows]
    assert lengths == pytest.approx([100 * abs(part.time_ns) / waterfall.wall_ns / 1.02 for part in parts], abs=1e-3)
    small = sorted((part for part in parts if part.share < 0.1), key=lambda part: -part.time_ns)
    assert [row.label for row in zoomed.rows] == [WATERFALL_LABELS[part.part] for part in small]
    assert max(row.bars[0].width for row in zoomed.rows) > 90


def test_speed_plot_has_the_kernel_rate_as_ceiling_and_dotted_peers() -> None:
    figures = pytest.importorskip("ringprof.report.page.figures")
    series = {"zigzag": [(2048, 5.0), (1024, 4.0)], "torch-cp": [(1024, 3.0)], "the kernel": [(1024, 8.0)]}
    plot = figures.lines("TFLOP/s", series, "the kernel", {"torch-cp"})
    lines = {
        renderer.data_source.data["name"][0]: renderer
        for renderer in plot.renderers
        if type(renderer.glyph).__name__ == "Line"
    }
    assert {name: renderer.glyph.line_dash for name, renderer in lines.items()} == {
        "zigzag": [], "torch-cp": [2, 4], "the kernel": [6],
    }  # fmt: skip
    assert list(lines["zigzag"].data_source.data["x"]) == [1024, 2048]
    assert plot.yaxis[0].axis_label == "TFLOP/s" and plot.y_range.start == 0


def test_comparison_page_begins_with_what_changed() -> None:
    comparison = ringprof.compare(
        ROOT / "traces" / "h200x4-zigzag-65536", ROOT / "traces" / "h200x4-zigzag-65536-copied"
    )
    document = comparison_document(comparison)
    assert document.headline.startswith("h200x4-zigzag-65536-copied: faster by 6.")
    assert "exposed wire" in document.verdict[0]
    text = render(document)
    page, parts = Page(text), comparison.changes.parts if comparison.changes else ()
    for row, change in zip(page.tables["What changed"][1:], parts, strict=True):
        assert shows(row[1], change.base_ns / 1e6) and shows(row[2], change.other_ns / 1e6)
    assert [section.title for section in document.sections][:2] == ["What changed", "Both timelines"]
    interval = next(row[5] for row in page.tables["Every figure"] if row[0] == "iteration")
    difference = comparison.against_base("iteration_ms", 1)
    assert difference is not None and interval == f"{difference.low:.3f} to {difference.high:.3f}"


def test_page_has_the_terminal_tables_and_the_settings() -> None:
    run = analysis(ROOT / "traces" / "h200x4-zigzag-65536")
    assert run.run is not None
    page = Page(run.to_html())
    settings = dict(row[:2] for row in page.tables["Settings and environment"][1:])
    assert settings["version: torch"] == run.run.environment.versions["torch"]
    assert settings["verification"].startswith("result verified against float64 at ")
    assert settings["command"].startswith("ringprof record --strategy zigzag")
    assert not [value for value in settings.values() if value.startswith(("{", "["))]
    controls = run.run.controls
    assert controls is not None
    row = page.tables["Speed and controls"][1]
    slowest = sorted(max(times) for times in zip(*controls.ordinary_ns, strict=True))
    assert shows(row[1], (slowest[3] + slowest[4]) / 2 / 1e6)
    kinds = [row for row in page.tables["By kind"] if row[0] == "flash backward"]
    mean = sum(rank["kinds_ns"]["flash_bwd"] for rank in run.report()["ranks"]) / 4
    assert shows(kinds[0][1], mean / 1e6)


def test_page_puts_important_warnings_first(tmp_path: Path) -> None:
    complete, cut = ROOT / "traces" / "h200x4-zigzag-65536", tmp_path / "cut"
    shutil.copytree(complete, cut)
    (cut / "rank2.json.gz").unlink()
    loaded = ringprof.load(str(cut))
    document = run_document(loaded.findings, loaded.given, loaded.name)
    assert document.sections[0].anchor == "warnings"
    assert document.subtitle.startswith("zigzag · ")
    assert document.headline.startswith(loaded.findings.next_step.text if loaded.findings.next_step else "none")
    assert not document.sections[0].folded
    # Warnings that every valid CPU run has stay at the end.
    on_cpu = analysis(ROOT / "traces" / "cpu4-burst-4096-two-hosts")
    assert run_document(on_cpu.findings, [], "x").sections[0].anchor == "breakdown"


def test_html_option_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.html"
    assert cli.run(["report", str(RUN), "--html", str(path)]) == 0
    assert capsys.readouterr().err == f"Wrote {path}\n"
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert cli.run(["report", str(RUN), "--html", str(tmp_path / "no" / "out.html")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
