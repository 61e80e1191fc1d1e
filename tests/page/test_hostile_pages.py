"""Pages made of hostile names run nothing in a real browser, hovered all over, with and without their policy."""

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

RAN = "window.ran=1;document.title='ran'"
PAYLOADS = (
    f"</script><script>{RAN}</script>",
    f'<img src=x onerror="{RAN}">',
    f'"\'><svg onload="{RAN}">',
    f'</textarea></title></style><iframe srcdoc="<script>parent.{RAN}</script>"></iframe>',
    "<!--<script>",
    f"{{{{constructor.constructor('{RAN}')()}}}}${{{RAN}}}@{{x}}{{safe}}",
    f"javascript:{RAN}",
    f"\u2028\u2029{RAN}//\\u003cscript>",
    f'<a href="javascript:{RAN}">x</a><details open ontoggle="{RAN}">',
    "@$name{custom}<b>",
)
KEPT = {
    "schema",
    "path",
    "reduced",
    "dtype",
    "device_type",
    "backend",
    "phase",
    "operation",
    "link",
    "layout",
    "origin",
}
"""Fields that must be what they are for the file to be read."""


def hostile(tree: Any, names: Iterator[str], key: str = "") -> Any:
    """The same tree with a payload for each text."""
    if isinstance(tree, dict):
        return {name: value if name in KEPT else hostile(value, names, name) for name, value in tree.items()}
    if isinstance(tree, list):
        return [hostile(item, names, key) for item in tree]
    return next(names) if isinstance(tree, str) else tree


def run_folder(folder: Path) -> Path:
    """A committed run in whose run.json every text is a payload."""
    shutil.copytree(TRACES / "h200x4-zigzag-65536", folder)
    run = json.loads((folder / "run.json").read_text())
    run = hostile(run, cycle(PAYLOADS)) | {"created": run["created"]}
    run["strategy"]["params"] = {name: name for name in PAYLOADS}
    run["environment"]["variables"] = {name: name for name in PAYLOADS}
    run["topology"]["hosts"] = [PAYLOADS[1]] * run["topology"]["world_size"]
    (folder / "run.json").write_text(json.dumps(run))
    return folder


def machine(folder: Path) -> str:
    """A machine file with payloads for its names; those of kernels are told by their names."""
    known = json.loads((files("ringprof.prediction") / "machines" / "h100.json").read_bytes())
    changed = hostile({name: value for name, value in known.items() if name != "kernels"}, cycle(PAYLOADS))
    for link in ("same_host", "other_host"):
        changed[link]["collective_gb_s"] = known[link]["collective_gb_s"]
    changed |= {"nccl": known["nccl"], "kernels": known["kernels"], "created": known["created"]}
    path = folder / "machine.json"
    path.write_text(json.dumps(changed))
    return str(path)


def sweep_rows() -> list[dict[str, Any]]:
    """Rows of a sweep whose strategies, parameters, kernels, masks, statuses and reasons are payloads."""
    rows = []
    names = cycle(PAYLOADS)
    for seq in (1024, 2048, 4096):
        for payload in PAYLOADS:
            row: dict[str, Any] = dict.fromkeys(
                [*(one.key for one in COLUMNS), "compute_share", "exposed_comm_share"], 0.5
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
    problem = ringprof.Workload(seq=65536, heads=8, kv_heads=8, head_dim=128)
    hosts = ringprof.Cluster(hosts=2, gpus_per_host=1, nic_gbit=200.0)
    run = ringprof.load(run_folder(folder / PAYLOADS[0].replace("/", "")))
    return {
        "report": run.to_html(),
        "compare": ringprof.compare(run, TRACES / "h200x4-zigzag-65536-copied").to_html(),
        "advise": ringprof.advise(problem, hosts, machine=machine(folder), strategies=("zigzag", "burst")).to_html(),
        "bench": render(sweep_document(sweep_rows(), PAYLOADS[0])),
    }


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hostile")
    found = {}
    for name, text in pages(folder).items():
        assert "ran=1" in text  # the payloads have come as far as the page
        for kind, content in {
            "policy": text,
            "bare": re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text),
        }.items():
            found[f"{name} {kind}"] = folder / f"{name}-{kind}.html"
            found[f"{name} {kind}"].write_text(content, encoding="utf-8")
    return found


# What a payload leaves behind: a mark, an element or attribute that no page of ringprof has, here or in a shadow tree.
LEFT_BEHIND = """(() => {
  const found = [], look = (root) => { for (const element of root.querySelectorAll('*')) {
    if (['IFRAME', 'OBJECT', 'EMBED'].includes(element.tagName)) found.push(element.tagName);
    if (element.tagName === 'IMG' && !element.src.startsWith('data:')) found.push('IMG');
    if (element.tagName === 'A' && /^javascript:/i.test(element.href)) found.push('javascript:');
    for (const one of element.attributes) if (/^on/.test(one.name)) found.push(one.name);
    if (element.shadowRoot) look(element.shadowRoot); } };
  look(document); return [window.ran || 0, document.title === 'ran', found]; })()"""


def test_what_a_payload_leaves_behind_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(f"<!doctype html><body>{PAYLOADS[0]}{PAYLOADS[1]}{PAYLOADS[8]}", encoding="utf-8")
    with browser.Browser() as tab:
        tab.open(path)
        tab.until("document.title === 'ran'")
        ran, renamed, found = tab.run(LEFT_BEHIND)
    assert ran == 1 and renamed and set(found) >= {"IMG", "onerror", "javascript:", "ontoggle"}


@pytest.mark.parametrize("kind", ["policy", "bare"])
@pytest.mark.parametrize("name", ["report", "compare", "advise", "bench"])
def test_nothing_runs(written: dict[str, Path], name: str, kind: str) -> None:
    path = written[f"{name} {kind}"]
    with browser.Browser() as tab:
        tab.open(path)
        tab.run("document.querySelectorAll('details').forEach(one => one.open = true)")
        figures = tab.run("document.querySelectorAll('.figure').length")
        assert figures
        for number in range(figures):
            x, y, wide, high = tab.run(f"""(() => {{ const one = document.querySelectorAll('.figure')[{number}];
                one.scrollIntoView({{block: 'center'}}); const box = one.getBoundingClientRect();
                return [box.x, box.y, box.width, box.height]; }})()""")
            for across in range(1, 12):
                for down in (0.15, 0.35, 0.5, 0.7, 0.9):
                    tab.mouse("mouseMoved", x + wide * across / 12, y + high * down)
        assert tab.run(LEFT_BEHIND) == [0, False, []]
        assert tab.messages == []
        assert [url for url in tab.requests if not url.startswith(("file:", "data:", "blob:"))] == []
