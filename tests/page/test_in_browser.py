"""Tests of the pages of committed runs in a real browser, from disk: nothing fetched, no error, everything works."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Iterator
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

import ringprof
from ringprof.report.terms import LABELS
from ringprof.report.timeline import label_and_colour, timeline_of
from tests.loaded import analysis
from tests.page.shown import shows
from tests.page.test_page import HOSTILE, page_of
from tests.paths import COMMITTED, TRACES
from tests.scale.runs import write_ring

browser = pytest.importorskip("tests.page.browser", reason="websocket-client is not installed", exc_type=ImportError)
pytestmark = [pytest.mark.processes, pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium here")]
TIMELINE = "Bokeh.documents[0].roots().flatMap(root => root.children ?? [root]).find(plot => plot.tags[0]?.timeline)"

OVERVIEW = TIMELINE.replace("?.timeline", "?.overview")


@pytest.fixture
def tab() -> Iterator[Any]:
    with browser.Browser() as browser_tab:
        yield browser_tab


def open_page(tab: Any, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(analysis(folder).to_html(), encoding="utf-8")
    tab.open(path)
    assert [url for url in tab.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert tab.messages == []


def check_figures(tab: Any, folder: Path) -> None:
    report = analysis(folder).report()
    rows = tab.run(
        "[...document.querySelectorAll('#breakdown tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    assert all(shows(row[2], rank["wall_ns"] / 1e6) for row, rank in zip(rows, report["ranks"], strict=True))
    step = report["summary"]["next_step"]
    first = step["text"] if step else report["summary"]["verdict"][0]
    assert tab.run("document.querySelector('.headline').innerText").startswith(" ".join(first.split()))
    widths = tab.run(
        "[...document.querySelectorAll('#breakdown .track i')].map(bar => bar.getBoundingClientRect().width)"
    )
    assert len(widths) >= len(rows) and max(widths) > 100
    # Nothing overflows the page to the side.
    assert tab.run("document.documentElement.scrollWidth <= window.innerWidth")


def test_a_page_opens_from_disk_with_its_figures(tab: Any, tmp_path: Path) -> None:
    open_page(tab, TRACES / "h200x4-zigzag-262144", tmp_path)
    check_figures(tab, TRACES / "h200x4-zigzag-262144")


@pytest.mark.long
@pytest.mark.parametrize("folder", COMMITTED, ids=lambda path: path.name)
def test_every_committed_run_opens_from_disk(tab: Any, folder: Path, tmp_path: Path) -> None:
    open_page(tab, folder, tmp_path)
    check_figures(tab, folder)


def opened_timeline(tab: Any, tmp_path: Path, name: str = "h200x4-zigzag-262144") -> tuple[float, float]:
    """Open a run's page at its timeline; return a position over the first lane of rank 0."""
    open_page(tab, TRACES / name, tmp_path)
    tab.run("document.querySelector('#timeline').scrollIntoView()")
    return lane(tab, 0)


def lane(tab: Any, rank: int, share: float = 0.5) -> tuple[float, float]:
    """Return the position over the first lane of a rank, at a share of the width."""
    x, y = tab.run(f"""(() => {{
      const plot = {TIMELINE}, view = Bokeh.index.find_one(plot);
      const box = view.el.getBoundingClientRect(), frame = view.frame.bbox;
      const rows = plot.renderers.filter(layer => layer.data_source.data.kind).flatMap(
        layer => [...layer.data_source.data.y].filter((_, index) => layer.data_source.data.rank[index] === {rank}));
      const y = (plot.y_range.end - Math.max(...rows)) / (plot.y_range.end - plot.y_range.start);
      return [box.left + frame.left + {share} * frame.width, box.top + frame.top + y * frame.height]; }})()""")
    return x, y


def shown_range(tab: Any) -> tuple[float, float]:
    start, end = tab.run(f"[{TIMELINE}.x_range.start, {TIMELINE}.x_range.end]")
    return start, end


def press(tab: Any, key: str) -> None:
    tab.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=key if len(key) == 1 else "")
    tab.call("Input.dispatchKeyEvent", type="keyUp", key=key)


def test_the_wheel_scrolls_and_keys_and_ctrl_wheel_zoom(tab: Any, tmp_path: Path) -> None:
    x, y = opened_timeline(tab, tmp_path)
    before, top = shown_range(tab), tab.run("scrollY")
    tab.mouse("mouseMoved", x, y)
    tab.mouse("mouseWheel", x, y, deltaX=0, deltaY=120)
    tab.until(f"scrollY > {top}")
    assert shown_range(tab) == before
    tab.run("document.querySelector('#timeline').scrollIntoView()")
    x, y = lane(tab, 0)
    tab.mouse("mouseMoved", x, y)
    tab.mouse("mouseWheel", x, y, deltaX=0, deltaY=-400, modifiers=2)
    tab.until(f"{TIMELINE}.x_range.end - {TIMELINE}.x_range.start < {0.9 * (before[1] - before[0])}")
    lengths = {}
    for key in "wsad":
        start, end = shown_range(tab)
        press(tab, key)
        moved = shown_range(tab)
        lengths[key] = (moved[1] - moved[0]) / (end - start), moved[0] - start
    assert lengths["w"][0] < 0.95 and lengths["s"][0] > 1.05
    assert lengths["a"][1] < 0 < lengths["d"][1] and lengths["a"][0] == pytest.approx(1) == lengths["d"][0]
    # The minimap shows what the timeline shows.
    overlay = f"{OVERVIEW}.toolbar.tools[0].overlay"
    assert tab.run(f"[{overlay}.left, {overlay}.right]") == pytest.approx(list(shown_range(tab)))
    assert tab.messages == []


def test_a_hovered_bar_shows_its_details_beside_the_pointer(tab: Any, tmp_path: Path) -> None:
    opened_timeline(tab, tmp_path)
    x, y = lane(tab, 0, 0.2)
    tab.mouse("mouseMoved", x, y)
    tab.until("!document.querySelector('.tip').hidden")
    text = tab.run("document.querySelector('.tip').textContent")
    assert text.startswith("rank 0, stream ") and "flash forward" in text and "time: " in text and "step: fwd" in text
    box = tab.run("(() => { const b = document.querySelector('.tip').getBoundingClientRect();"
                  "return [b.left, b.top, b.right, b.bottom]; })()")  # fmt: skip
    assert not (box[0] <= x <= box[2] and box[1] <= y <= box[3]) and box[2] <= 1280
    assert box[2] - box[0] <= 26 * 16 + 1  # names wrap
    _sorts(tab)
    assert tab.messages == []


def test_an_area_is_summed_by_kind(tab: Any, tmp_path: Path) -> None:
    """Drag from rank 0 to rank 2; the truth is a sum over the drawn bars, clipped one by one."""
    opened_timeline(tab, tmp_path)
    x, y = lane(tab, 0, 0.3)
    end_x, end_y = lane(tab, 2, 0.6)
    tab.mouse("mouseMoved", x, y - 6)
    tab.mouse("mousePressed", x, y - 6, button="left", buttons=1, clickCount=1)
    for step in range(1, 6):
        tab.mouse("mouseMoved", x + (end_x - x) * step / 5, y + (end_y + 8 - y) * step / 5, button="left", buttons=1)
    tab.mouse("mouseReleased", end_x, end_y + 8, button="left", clickCount=1)
    tab.until("document.querySelector('.selected table')")
    box = f"{TIMELINE}.center.find(part => part.name === 'selection')"
    left, right = tab.run(f"[{box}.left, {box}.right]")
    findings = analysis(TRACES / "h200x4-zigzag-262144").findings
    drawn = timeline_of(findings.attribution, findings.steps, findings.finder.by_activity)
    truth: dict[str, float] = defaultdict(float)
    for bar in drawn.bars:
        # All lanes of ranks 0 and 1, and the first lane of rank 2.
        time_ms = min(bar.end_ns / 1e6, right) - max(bar.start_ns / 1e6, left)
        if time_ms > 0 and (bar.rank in (0, 1) or (bar.rank == 2 and bar.lane == "compute")):
            kind, label = LABELS.get(bar.kind, bar.kind), label_and_colour(bar.category)[0]
            truth[kind if kind == label else f"{kind}, {label}"] += time_ms
    rows = tab.run("[...document.querySelectorAll('.selected tr')].map(row => [...row.cells].map(c => c.textContent))")
    units = {"s": 1e3, "ms": 1.0, "µs": 1e-3}
    shown = {row[0]: float(row[1].split()[0]) * units[row[1].split()[1]] for row in rows}
    assert shown == pytest.approx(dict(truth), rel=1e-3)
    assert "on 3 ranks" in tab.run("document.querySelector('.selected p').textContent")
    press(tab, "Escape")
    assert tab.run("document.querySelector('.selected table') === null") and tab.messages == []


def selected_bars(tab: Any) -> int:
    """Return how many bars are highlighted."""
    layers = f"{TIMELINE}.renderers.filter(layer => layer.data_source.data.kind)"
    count: int = tab.run(f"{layers}.flatMap(l => [...l.data_source.selected.indices]).filter(i => i >= 0).length")
    return count


def test_rows_lead_to_bars_and_bars_to_rows(tab: Any, tmp_path: Path) -> None:
    opened_timeline(tab, tmp_path)
    run = analysis(TRACES / "h200x4-zigzag-262144")
    kernels = run.kernels()
    merges = kernels[kernels.kind == "merge"].iloc[0]
    rows = tab.run("[...document.querySelectorAll('#kernels tbody tr')].map(row => row.cells[0].textContent)")
    tab.run(f"document.querySelectorAll('#kernels tbody tr')[{rows.index(merges['name'])}].click()")
    assert selected_bars(tab) == merges.calls
    # The longest stretch, as a walk over the report's steps cannot tell it: the row says where it is.
    row = "document.querySelector('#timeline tbody tr')"
    start, end = (float(tab.run(f"{row}.dataset.{name}")) for name in ("from", "to"))
    tab.run(f"{row}.click()")
    shown = shown_range(tab)
    assert shown[0] <= start < end <= shown[1] and shown[1] - shown[0] < 2 * (end - start)
    press(tab, "Escape")
    tab.run("document.querySelector('[data-act=all]').click()")
    tab.run("document.querySelector('#timeline').scrollIntoView()")
    x, y = lane(tab, 0, 0.2)
    tab.mouse("mouseMoved", x, y)
    tab.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
    tab.mouse("mouseReleased", x, y, button="left", clickCount=1)
    tab.until("document.querySelector('.selected .go')")
    links = tab.run("[...document.querySelectorAll('.selected .go')].map(link => link.textContent)")
    assert {"row in Kernels", "row in Ring steps", "row in By kind"} <= set(links)
    name = tab.run("[...document.querySelectorAll('.selected p')].at(-2).textContent")
    tab.run("[...document.querySelectorAll('.selected .go')].find(l => l.textContent === 'row in Kernels').click()")
    assert tab.run("document.querySelector('tr.flash').cells[0].textContent") == name
    assert tab.run("document.querySelector('#kernels').open")
    find = "document.querySelector('.find')"
    tab.run(f"{find}.value = 'flash forward'; {find}.dispatchEvent(new Event('input'))")
    assert selected_bars(tab) == kernels[kernels.kind == "flash_fwd"].calls.sum()
    assert tab.messages == []


def test_every_table_filters_its_rows(tab: Any, tmp_path: Path) -> None:
    open_page(tab, TRACES / "h200x4-zigzag-262144", tmp_path)
    steps = analysis(TRACES / "h200x4-zigzag-262144").steps()

    def filtered(text: str) -> int:
        field = "document.querySelector('#steps .filter')"
        tab.run(f"{field}.value = {text!r}; {field}.dispatchEvent(new Event('input'))")
        count: int = tab.run("[...document.querySelectorAll('#steps tbody tr')].filter(row => !row.hidden).length")
        return count

    assert filtered("rank:1") == (steps["rank"] == 1).sum()
    assert filtered("pass:bwd exposed>1") == ((steps.phase == "bwd") & (steps.exposed_ns > 1e6)).sum()
    assert filtered("compute") == (steps.bound == "compute").sum()
    assert filtered("nothing has this") == 0
    assert filtered("") == len(steps)
    tab.run("(() => { const s = document.querySelector('#steps select'); s.value = '2';"
            "s.dispatchEvent(new Event('change')); })()")  # fmt: skip
    assert (
        tab.run("document.querySelector('#steps .count').textContent")
        == f"{(steps['rank'] == 2).sum()} of {len(steps)} rows"
    )
    tables = tab.run("[...document.querySelectorAll('.scroll table')].filter(t => t.tBodies[0].rows.length > 1).length")
    assert tab.run("document.querySelectorAll('input.filter').length") == tables
    assert tab.messages == []


@pytest.mark.parametrize("world", [4, 8, 20, 64])
def test_the_first_screen_has_the_answer_the_bars_and_the_overview(tab: Any, tmp_path: Path, world: int) -> None:
    tab.call("Emulation.setDeviceMetricsOverride", width=1280, height=800, deviceScaleFactor=1, mobile=False)
    folder = TRACES / "h200x4-zigzag-262144"
    if world > 4:
        (folder := tmp_path / "ring").mkdir()
        write_ring(folder, world)
    open_page(tab, folder, tmp_path)
    labelled = tab.run("""[...document.querySelectorAll('#breakdown .bar-row:not(.axis) .label')].filter(
      label => getComputedStyle(label).visibility == 'visible').map(label => label.getBoundingClientRect().top)""")
    assert len(labelled) >= min(world, 5) and all(b - a > 10 for a, b in pairwise(labelled))
    bottoms = tab.run("""['.headline', '#breakdown .bars', '#timeline .figure'].map(
      selector => document.querySelector(selector).getBoundingClientRect()).map(box => box.bottom)""")
    assert bottoms[0] < bottoms[1] < 800
    assert tab.run(f"Bokeh.index.find_one({OVERVIEW}).el.getBoundingClientRect().bottom") < 800
    assert tab.run("scrollY") == 0


def test_two_timelines_zoom_together(tab: Any, tmp_path: Path) -> None:
    names = ("h200x4-zigzag-65536", "h200x4-zigzag-65536-copied")
    path = tmp_path / "page.html"
    path.write_text(ringprof.compare(*(analysis(TRACES / name) for name in names)).to_html(), encoding="utf-8")
    tab.open(path)
    tab.run("document.querySelector('#timelines').scrollIntoView()")
    plots = "Bokeh.documents[0].roots().flatMap(r => r.children ?? [r]).filter(p => p.tags[0]?.timeline)"
    assert tab.run(f"{plots}.length") == 2
    x, y = lane(tab, 0)
    before = tab.run(f"{plots}[0].x_range.end - {plots}[0].x_range.start")
    tab.mouse("mouseMoved", x, y)
    tab.mouse("mouseWheel", x, y, deltaX=0, deltaY=-400, modifiers=2)
    tab.until(f"{plots}[1].x_range.end - {plots}[1].x_range.start < {0.95 * before}")
    assert tab.run(f"{plots}[0].x_range.start === {plots}[1].x_range.start")
    assert tab.messages == []
    assert tab.run("document.documentElement.scrollWidth <= window.innerWidth")


def _sorts(tab: Any) -> None:
    column = (
        "[...document.querySelectorAll('#steps tbody tr')].map(r => r.cells[4])"
        ".map(cell => Number(cell.dataset.key ?? cell.textContent))"
    )
    click = "document.querySelectorAll('#steps th button')[4].click()"
    values = tab.run(column)
    tab.run(click)
    assert tab.run(column) == sorted(values, reverse=True)
    tab.run(click)
    assert tab.run(column) == sorted(values)
    assert tab.run("document.querySelectorAll('#steps th')[4].getAttribute('aria-sort')") == "ascending"
    # By keyboard: headings are buttons, reached with Tab.
    assert tab.run("document.querySelectorAll('#steps th button')[0].tabIndex") == 0


@pytest.mark.parametrize("width", [420, 1280, 1920])
def test_page_does_not_overflow_and_labels_and_legends_are_whole(tab: Any, tmp_path: Path, width: int) -> None:
    tab.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    open_page(tab, TRACES / "h200x4-zigzag-262144", tmp_path)
    assert tab.run("document.documentElement.scrollWidth <= window.innerWidth")
    tab.run("document.querySelectorAll('details.section').forEach(details => details.open = true)")
    cut = tab.run("""[...document.querySelectorAll('.legend li, .bars .label, .bars .value')].filter(part => {
      const box = part.getBoundingClientRect();
      return box.width && (box.left < 0 || box.right > window.innerWidth || part.scrollWidth > part.clientWidth + 1);
    }).map(part => part.textContent)""")
    assert cut == []
    assert tab.run("document.querySelectorAll('.legend li').length") > 10
    fonts = tab.run("[...document.querySelectorAll('.bars .label')].map(part => getComputedStyle(part).fontFamily)")
    assert set(fonts) == {tab.run("getComputedStyle(document.body).fontFamily")}


@pytest.fixture(scope="module")
def other_pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """Write pages that do not show a single recorded run; return each with the start of its verdict."""
    folder = tmp_path_factory.mktemp("pages")
    workload = ringprof.Workload(seq=65536, heads=8, kv_heads=8, head_dim=128)
    cluster = ringprof.Cluster(hosts=2, gpus_per_host=1, nic_gbit=200.0)
    recommended = ringprof.advise(workload, cluster, machine="h200", strategies=("zigzag",))
    prediction = ringprof.predict("zigzag", workload, cluster, machine="h200")
    prediction.write(folder / "predicted")
    predicted = ringprof.load(folder / "predicted")
    pair = ringprof.compare(*(analysis(TRACES / f"h200x4-zigzag-65536{name}") for name in ("", "-copied")))
    pages = {
        "advise": (recommended.to_html(), f"choose {recommended.choices().choice[0]}: "),
        "predicted": (predicted.to_html(), predicted.findings.next_step.text if predicted.findings.next_step else ""),
        "predict": (prediction.to_html(), "Predicted: "),
        "compare": (pair.to_html(), f"{pair.entries[1].label}: faster by 6."),
    }
    for name, (text, _) in pages.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: (folder / f"{name}.html", first) for name, (_, first) in pages.items()}


@pytest.mark.parametrize("width", [420, 1280, pytest.param(1920, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["advise", "predict", "predicted", "compare"])
def test_other_pages_fit_every_window(
    tab: Any, other_pages: dict[str, tuple[Path, str]], name: str, width: int
) -> None:
    tab.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    path, first = other_pages[name]
    tab.open(path)
    assert tab.run("document.querySelector('.verdict').innerText").startswith(first)
    assert tab.run("document.documentElement.scrollWidth <= window.innerWidth")
    # Each figure is drawn as wide as its section, in one piece, and every table has its rows.
    figures = tab.run(
        "[...document.querySelectorAll('.figure')].map(f => [f.getBoundingClientRect().width, f.children.length])"
    )
    available = tab.run("document.querySelector('main').getBoundingClientRect().width")
    assert bool(figures) is (name != "predict")
    assert all(0.8 * available < wide <= available and pieces for wide, pieces in figures)
    assert tab.run("[...document.querySelectorAll('table')].every(t => t.tBodies[0].rows.length > 0)")
    assert "@" not in tab.run("document.body.innerText")
    assert [url for url in tab.requests if not url.startswith(("file:", "data:", "blob:"))] == [] and tab.messages == []


def test_a_table_is_saved_as_csv(tab: Any, tmp_path: Path) -> None:
    open_page(tab, TRACES / "h200x4-zigzag-262144", tmp_path)
    tab.run("""(() => {
      window.saved = [];
      URL.createObjectURL = (blob) => { blob.text().then((text) => window.saved.push(text)); return "blob:none"; };
      HTMLAnchorElement.prototype.click = function () { window.named = this.download; };
      document.querySelector('#breakdown .csv').click(); })()""")
    tab.until("window.saved.length")
    header, *rows = tab.run("window.saved[0]").splitlines()
    ranks = analysis(TRACES / "h200x4-zigzag-262144").report()["ranks"]
    assert header.startswith("rank,host,wall ms,compute ms,") and tab.run("window.named") == "breakdown.csv"
    # Numbers have all their digits.
    assert [float(row.split(",")[2]) for row in rows] == [rank["wall_ns"] / 1e6 for rank in ranks]
    assert tab.messages == []


def test_notebook_view_is_drawn_in_its_cell(tab: Any, tmp_path: Path) -> None:
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><body>{analysis(TRACES / 'h200x4-zigzag-262144').view()._repr_html_()}</body>")
    tab.call("Emulation.setDeviceMetricsOverride", width=1000, height=1200, deviceScaleFactor=1, mobile=False)
    tab.open(path)
    # The debugger cannot reach into the frame, so the test looks at a screenshot.
    # The bars of flash attention are #0072B2.
    for _ in range(200):
        png = base64.b64decode(tab.call("Page.captureScreenshot", format="png")["data"])
        pixels = (255 * imread(BytesIO(png))[:, :, :3]).round().astype(int)
        if (blue := int((pixels == (0x00, 0x72, 0xB2)).all(axis=2).sum())) > 5_000:
            break
    assert blue > 5_000
    assert tab.messages == [] and {url.partition(":")[0] for url in tab.requests} <= {"file", "data", "blob", "about"}


def test_hostile_name_does_not_run_a_script(tab: Any, tmp_path: Path) -> None:
    from tests.analysis.rings import ring_pass

    builders = ring_pass()
    builders[0].run(HOSTILE, 20_000, 21_000, launched=99_000)
    path = tmp_path / "page.html"
    path.write_text(page_of(*builders), encoding="utf-8")
    tab.open(path)
    assert tab.messages == []
    assert tab.run("document.querySelectorAll('img').length") == 0
    assert "<script>alert(1)</script>" in tab.run("document.querySelector('#kernels').textContent")


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_contrast_in_light_and_dark_mode(dark: bool, tmp_path: Path) -> None:
    with browser.Browser(dark=dark) as tab:
        open_page(tab, TRACES / "h200x4-zigzag-262144", tmp_path)
        script = """(() => {
          const light = (text) => { const [r, g, b] = text.match(/\\d+/g).map(Number).map(
            (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
          const paper = light(getComputedStyle(document.body).backgroundColor);
          return ['h1', '.meaning', 'td', 'nav a', 'footer'].map((name) => {
            const ink = light(getComputedStyle(document.querySelector(name)).color);
            return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05); });
        })()"""
        # WCAG 2.1, 1.4.3: 4.5 to 1 for body text, in figures too.
        assert min(tab.run(script)) >= 4.5
        tab.run("document.querySelectorAll('details').forEach(details => details.open = true)")
        in_figures = """(() => {
          const light = (rgb) => { const [r, g, b] = rgb.map(
            (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
          const paper = light(getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number));
          const names = ['major_label_text_color', 'axis_label_text_color', 'title_text_color', 'label_text_color'];
          return [...Bokeh.documents[0].all_models].flatMap(model => names.map(name => model[name])).filter(Boolean)
            .map(text => light([1, 3, 5].map(at => parseInt(text.slice(at, at + 2), 16))))
            .map(ink => (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05)); })()"""
        ratios = tab.run(in_figures)
        assert len(ratios) > 10 and min(ratios) >= 4.5
        assert (tab.run("matchMedia('(prefers-color-scheme: dark)').matches")) is dark
