"""Tests of the pages of committed runs in a real browser, from disk: nothing fetched, no error, everything works."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

import ringprof
from tests.loaded import analysis
from tests.page.test_page import HOSTILE, page_of
from tests.paths import COMMITTED, TRACES

browser = pytest.importorskip("tests.page.browser", reason="websocket-client is not installed", exc_type=ImportError)
pytestmark = [pytest.mark.processes, pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium here")]
_LABEL = "ms from the first activity"
TIMELINE = f"Bokeh.documents[0].roots().find(plot => plot.below?.some(part => part.axis_label === '{_LABEL}'))"


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
    rows = tab.run("[...document.querySelectorAll('#breakdown tbody tr')].map(r => [...r.cells].map(c => c.innerText))")
    assert [row[2] for row in rows] == [f"{rank['wall_ns'] / 1e6:,.3f}" for rank in report["ranks"]]
    assert tab.run("document.querySelector('.verdict').innerText").split("\n")[0] in report["summary"]["verdict"]
    assert tab.run("document.querySelectorAll('.figure canvas, .figure .bk-Figure').length") > 0
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


def test_zoom_hover_and_sort_work(tab: Any, tmp_path: Path) -> None:
    open_page(tab, TRACES / "h200x4-zigzag-262144", tmp_path)
    tab.run("document.querySelector('#timeline').scrollIntoView()")
    box = tab.run("(() => { const b = document.querySelector('#timeline .figure').getBoundingClientRect();"
                  "return [b.left, b.top, b.width, b.height]; })()")  # fmt: skip
    x, y = box[0] + box[2] / 2, box[1] + box[3] / 3
    before = tab.run(f"[{TIMELINE}.x_range.start, {TIMELINE}.x_range.end]")
    tab.mouse("mouseMoved", x, y)
    tab.mouse("mouseWheel", x, y, deltaX=0, deltaY=-400)
    tab.until(f"{TIMELINE}.x_range.end - {TIMELINE}.x_range.start < {0.95 * (before[1] - before[0])}")
    # A hovered bar shows its rank, kind and time.
    tab.run(TOOLTIP)
    for step in range(60):
        # The pointer moves diagonally, so that it is not always between two lanes.
        tab.mouse("mouseMoved", x + 4 * step, y + 5 * (step % 7))
        if tab.run("tip()"):
            break
    assert "time:" in tab.run("tip()") and "start:" in tab.run("tip()") and "stream" in tab.run("tip()")
    assert "step: fwd" in tab.run("tip()") or "step: bwd" in tab.run("tip()")
    _sorts(tab)
    assert tab.messages == []


def test_two_timelines_zoom_together(tab: Any, tmp_path: Path) -> None:
    names = ("h200x4-zigzag-65536", "h200x4-zigzag-65536-copied")
    path = tmp_path / "page.html"
    path.write_text(ringprof.compare(*(analysis(TRACES / name) for name in names)).to_html(), encoding="utf-8")
    tab.open(path)
    tab.run("document.querySelector('#timelines').scrollIntoView()")
    on_axis = f"p => p.below?.some(a => a.axis_label === '{_LABEL}')"
    plots = f"Bokeh.documents[0].roots().flatMap(r => r.children ?? []).filter({on_axis})"
    assert tab.run(f"{plots}.length") == 2
    box = tab.run("(() => { const b = document.querySelector('#timelines .figure').getBoundingClientRect();"
                  "return [b.left, b.top, b.width]; })()")  # fmt: skip
    x, y = box[0] + box[2] / 2, box[1] + 70
    before = tab.run(f"{plots}[0].x_range.end - {plots}[0].x_range.start")
    tab.mouse("mouseMoved", x, y)
    tab.mouse("mouseWheel", x, y, deltaX=0, deltaY=-400)
    tab.until(f"{plots}[1].x_range.end - {plots}[1].x_range.start < {0.95 * before}")
    assert tab.run(f"{plots}[0].x_range.start === {plots}[1].x_range.start")
    assert tab.messages == []
    assert tab.run("document.documentElement.scrollWidth <= window.innerWidth")


TOOLTIP = """
window.tip = () => {
  const all = (root) => [...root.querySelectorAll('*')].flatMap(
    (element) => (element.shadowRoot ? [element, ...all(element.shadowRoot)] : [element]));
  const tooltip = all(document).find(
    (element) => /tooltip/i.test(element.className) && (element.shadowRoot ?? element).textContent);
  return tooltip ? (tooltip.shadowRoot ?? tooltip).textContent : '';
};
true
"""


def _sorts(tab: Any) -> None:
    column = "[...document.querySelectorAll('#steps tbody tr')].map(r => Number(r.cells[4].dataset.key))"
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
def test_page_does_not_overflow_and_labels_fit_the_figure(tab: Any, tmp_path: Path, width: int) -> None:
    tab.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    open_page(tab, TRACES / "h200x4-zigzag-262144", tmp_path)
    assert tab.run("document.documentElement.scrollWidth <= window.innerWidth")
    # Each label's width in the font that it is drawn in, beside the figure's.
    glyph = "Bokeh.documents[0].roots()[0].renderers.filter(renderer => renderer.glyph.type === 'Text')"
    script = f"""(() => {{
      const pen = document.createElement('canvas').getContext('2d');
      pen.font = '12px helvetica, arial, sans-serif';
      return {glyph}.flatMap(renderer => renderer.data_source.get_array(renderer.glyph.text.field))
        .map(text => pen.measureText(text).width); }})()"""
    available = tab.run("document.querySelector('#waterfall .figure').getBoundingClientRect().width")
    widths = tab.run(script)
    assert len(widths) >= 10 and 0 < max(widths) < available - 10


@pytest.fixture(scope="module")
def other_pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """Write pages that do not show a single recorded run; return each with the start of its verdict."""
    folder = tmp_path_factory.mktemp("pages")
    workload = ringprof.Workload(seq=65536, heads=8, kv_heads=8, head_dim=128)
    cluster = ringprof.Cluster(hosts=2, gpus_per_host=1, nic_gbit=200.0)
    recommended = ringprof.advise(workload, cluster, machine="h200", strategies=("zigzag",))
    ringprof.predict("zigzag", workload, cluster, machine="h200").write(folder / "predicted")
    predicted = ringprof.load(folder / "predicted")
    pair = ringprof.compare(*(analysis(TRACES / f"h200x4-zigzag-65536{name}") for name in ("", "-copied")))
    pages = {
        "advise": (recommended.to_html(), f"choose {recommended.choices().choice[0]}: "),
        "predict": (predicted.to_html(), predicted.verdict[0]),
        "compare": (pair.to_html(), f"{pair.entries[1].label}: faster by 6."),
    }
    for name, (text, _) in pages.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: (folder / f"{name}.html", first) for name, (_, first) in pages.items()}


@pytest.mark.parametrize("width", [420, 1280, pytest.param(1920, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["advise", "predict", "compare"])
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
    assert figures and all(0.8 * available < wide <= available and pieces for wide, pieces in figures)
    assert tab.run("[...document.querySelectorAll('table')].every(t => t.tBodies[0].rows.length > 0)")
    assert "@" not in tab.run("document.body.innerText")
    assert [url for url in tab.requests if not url.startswith(("file:", "data:", "blob:"))] == [] and tab.messages == []


def test_a_table_is_saved_as_csv(tab: Any, tmp_path: Path) -> None:
    open_page(tab, TRACES / "h200x4-zigzag-262144", tmp_path)
    tab.run("""(() => {
      window.saved = [];
      URL.createObjectURL = (blob) => { blob.text().then((text) => window.saved.push(text)); return "blob:none"; };
      HTMLAnchorElement.prototype.click = function () { window.named = this.download; };
      document.querySelector('#breakdown .below button').click(); })()""")
    tab.until("window.saved.length")
    header, *rows = tab.run("window.saved[0]").splitlines()
    ranks = analysis(TRACES / "h200x4-zigzag-262144").report()["ranks"]
    assert header.startswith("rank,host,wall ms,compute ms,") and tab.run("window.named") == "breakdown.csv"
    assert [row.split(",")[2] for row in rows] == [f"{rank['wall_ns'] / 1e6:.3f}" for rank in ranks]
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
    assert "<script>alert(1)</script>" in tab.run("document.querySelector('#kernels').innerText")


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
        # WCAG 2.1, 1.4.3: 4.5 to 1 for body text.
        assert min(tab.run(script)) >= 4.5
        assert (tab.run("matchMedia('(prefers-color-scheme: dark)').matches")) is dark
