"""Tests that pages made of hostile names run nothing in a real browser, with and without their policy."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from importlib.resources import files
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

import ringprof
from ringprof.report.page.html import render
from ringprof.report.page.pages import sweep_document
from ringprof.report.sweep import COLUMNS
from tests.paths import TRACES

browser = pytest.importorskip("tests.page.browser", reason="websocket-client is not installed", exc_type=ImportError)
pytestmark = [pytest.mark.processes, pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium here")]

MARK_SCRIPT = "window.ran=1;document.title='ran'"
PAYLOADS = (
    f"</script><script>{MARK_SCRIPT}</script>",
    f'<img src=x onerror="{MARK_SCRIPT}">',
    f'"\'><svg onload="{MARK_SCRIPT}">',
    f'</textarea></title></style><iframe srcdoc="<script>parent.{MARK_SCRIPT}</script>"></iframe>',
    "<!--<script>",
    f"{{{{constructor.constructor('{MARK_SCRIPT}')()}}}}${{{MARK_SCRIPT}}}@{{x}}{{safe}}",
    f"javascript:{MARK_SCRIPT}",
    f"\u2028\u2029{MARK_SCRIPT}//\\u003cscript>",
    f'<a href="javascript:{MARK_SCRIPT}">x</a><details open ontoggle="{MARK_SCRIPT}">',
    "@$name{custom}<b>",
)
KEPT_FIELDS = {
    "schema",
    "path",
    "reduced",
    "dtype",
    "device_type",
    "backend",
    "phase",
    "operation",
    "operator",
    "part",
    "link",
    "layout",
    "origin",
}
"""Fields that must keep their values for the file to be read."""


def hostile(tree: Any, names: Iterator[str], key: str = "") -> Any:
    """Return a copy of the tree with a payload for each text."""
    if isinstance(tree, dict):
        return {name: value if name in KEPT_FIELDS else hostile(value, names, name) for name, value in tree.items()}
    if isinstance(tree, list):
        return [hostile(item, names, key) for item in tree]
    return next(names) if isinstance(tree, str) else tree


def run_folder(folder: Path) -> Path:
    """Copy a committed run and make every text in its run.json a payload."""
    shutil.copytree(TRACES / "h200x4-zigzag-65536", folder)
    run = json.loads((folder / "run.json").read_text())
    run = hostile(run, cycle(PAYLOADS)) | {"created": run["created"]}
    run["strategy"]["params"] = {name: name for name in PAYLOADS}
    run["environment"]["variables"] = {name: name for name in PAYLOADS}
    run["topology"]["hosts"] = [PAYLOADS[1]] * run["topology"]["world_size"]
    (folder / "run.json").write_text(json.dumps(run))
    return folder


def machine_file(folder: Path) -> str:
    """Write a machine file with payloads for its names; kernels keep their names, which identify them."""
    original = json.loads((files("ringprof.prediction") / "machines" / "h100.json").read_bytes())
    changed = hostile({name: value for name, value in original.items() if name != "kernels"}, cycle(PAYLOADS))
    for link in ("same_host", "other_host"):
        changed[link]["collective_gb_s"] = original[link]["collective_gb_s"]
    changed |= {"nccl": original["nccl"], "kernels": original["kernels"], "created": original["created"]}
    path = folder / "machine.json"
    path.write_text(json.dumps(changed))
    return str(path)


def sweep_rows() -> list[dict[str, Any]]:
    """Return rows of a sweep whose strategies, parameters, kernels, masks, statuses and reasons are payloads."""
    rows = []
    names = cycle(PAYLOADS)
    for seq in (1024, 2048, 4096):
        for payload in PAYLOADS:
            row: dict[str, Any] = dict.fromkeys(
                [*(column.key for column in COLUMNS), "compute_share", "exposed_comm_share"], 0.5
            )
            row |= {name: next(names) for name in ("params", "kernel", "mask", "dtype")}
            row |= {"strategy": payload, "seq": seq, "batch": 1, "status": "ok", "reason": None, "peer": False}
            row |= {
                "forward_backward_ms": 4.0,
                "tflops": 100.0,
                "iterations_ms": [4.0, 4.1, 4.0],
                "exposed_comm_ms": 0.1,
            }
            rows.append(row)
    return [*rows, *({**rows[0], "status": name, "reason": name} for name in PAYLOADS)]


def pages(folder: Path) -> dict[str, str]:
    workload = ringprof.Workload(seq=65536, heads=8, kv_heads=8, head_dim=128)
    cluster = ringprof.Cluster(hosts=2, gpus_per_host=1, nic_gbit=200.0)
    run = ringprof.load(run_folder(folder / PAYLOADS[0].replace("/", "")))
    return {
        "report": run.to_html(),
        "compare": ringprof.compare(run, TRACES / "h200x4-zigzag-65536-copied").to_html(),
        "advise": ringprof.advise(
            workload, cluster, machine=machine_file(folder), strategies=("zigzag", "burst")
        ).to_html(),
        "bench": render(sweep_document(sweep_rows(), PAYLOADS[0])),
    }


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hostile")
    paths = {}
    for name, text in pages(folder).items():
        assert "ran=1" in text  # the payloads have reached the page
        for kind, content in {
            "policy": text,
            "bare": re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text),
        }.items():
            paths[f"{name} {kind}"] = folder / f"{name}-{kind}.html"
            paths[f"{name} {kind}"].write_text(content, encoding="utf-8")
    return paths


# Find the traces of a payload: its mark, or an element or attribute that no page of ringprof has, also in shadow trees.
FIND_TRACES = """(() => {
  const traces = [], look = (root) => { for (const element of root.querySelectorAll('*')) {
    if (['IFRAME', 'OBJECT', 'EMBED'].includes(element.tagName)) traces.push(element.tagName);
    if (element.tagName === 'IMG' && !element.src.startsWith('data:')) traces.push('IMG');
    if (element.tagName === 'A' && /^javascript:/i.test(element.href)) traces.push('javascript:');
    for (const attribute of element.attributes) if (/^on/.test(attribute.name)) traces.push(attribute.name);
    if (element.shadowRoot) look(element.shadowRoot); } };
  look(document); return [window.ran || 0, document.title === 'ran', traces]; })()"""


def test_detector_notices_an_executed_payload(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(f"<!doctype html><body>{PAYLOADS[0]}{PAYLOADS[1]}{PAYLOADS[8]}", encoding="utf-8")
    with browser.Browser() as tab:
        tab.open(path)
        tab.until("document.title === 'ran'")
        ran, renamed, traces = tab.run(FIND_TRACES)
    assert ran == 1 and renamed and set(traces) >= {"IMG", "onerror", "javascript:", "ontoggle"}


@pytest.mark.parametrize("kind", ["policy", "bare"])
@pytest.mark.parametrize("name", ["report", "compare", "advise", "bench"])
def test_no_payload_runs_in_any_page(written: dict[str, Path], name: str, kind: str) -> None:
    path = written[f"{name} {kind}"]
    with browser.Browser() as tab:
        tab.open(path)
        tab.run("document.querySelectorAll('details').forEach(details => details.open = true)")
        figures = tab.run("document.querySelectorAll('.figure').length")
        assert figures
        for number in range(figures):
            x, y, width, height = tab.run(f"""(() => {{ const figure = document.querySelectorAll('.figure')[{number}];
                figure.scrollIntoView({{block: 'center'}}); const box = figure.getBoundingClientRect();
                return [box.x, box.y, box.width, box.height]; }})()""")
            for x_step in range(1, 12):
                for y_share in (0.15, 0.35, 0.5, 0.7, 0.9):
                    tab.mouse("mouseMoved", x + width * x_step / 12, y + height * y_share)
        # Clicked bars, searches and rows show names, too.
        tab.run("""(() => { for (const field of document.querySelectorAll('.find, .filter')) {
            field.value = '<'; field.dispatchEvent(new Event('input')); } })()""")
        tab.run("document.querySelectorAll('[data-bars-by] tbody tr:first-child').forEach(row => row.click())")
        assert tab.run(FIND_TRACES) == [0, False, []]
        assert tab.messages == []
        assert [url for url in tab.requests if not url.startswith(("file:", "data:", "blob:"))] == []
