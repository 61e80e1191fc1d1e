"""Methods that work on one result work on all seven, or say why not."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import ringprof
from ringprof import cli
from ringprof.errors import UsageError
from ringprof.report.result import Result
from tests.loaded import analysis
from tests.paths import DATA, TRACES

RUN, OTHER = TRACES / "h200x4-zigzag-65536", TRACES / "h200x4-zigzag-65536-copied"
TABLE, COMM_LOGS = DATA / "tables" / "nsys.txt", DATA / "comm-logs" / "flight-recorder"
LOG = DATA / "logs" / "000_6ad8b6078955b01f.txt"
WORK, CLUSTER = ringprof.Workload(seq=65536, heads=16, kv_heads=8, head_dim=128), ringprof.Cluster(gpus_per_host=2)


RESULTS: dict[str, Callable[[], Result]] = {
    "Analysis": lambda: analysis(RUN),
    "TableAnalysis": lambda: ringprof.load_tables(TABLE),
    "CommLogAnalysis": lambda: ringprof.load_comm_logs(COMM_LOGS),
    "BenchmarkLogs": lambda: ringprof.logs(LOG),
    "RunComparison": lambda: ringprof.compare(analysis(RUN), analysis(OTHER)),
    "Prediction": lambda: ringprof.predict("zigzag", WORK, CLUSTER, machine="h200"),
    "Recommendation": lambda: ringprof.advise(WORK, CLUSTER, machine="h200", strategies=("zigzag", "ulysses")),
}
WITHOUT = {"plot": {"TableAnalysis", "CommLogAnalysis", "BenchmarkLogs"}, "verdict": {"TableAnalysis"}}


@cache
def result(kind: str) -> Result:
    if kind in ("Prediction", "Recommendation"):
        pytest.importorskip("torch", reason="a prediction runs strategies on shapes")
    return RESULTS[kind]()


@pytest.mark.parametrize("kind", RESULTS)
def test_every_result_has_every_form(kind: str, tmp_path: Path) -> None:
    loaded = result(kind)
    assert type(loaded).__name__ == kind
    assert json.loads(loaded.to_json(tmp_path / "x.json")) == json.loads((tmp_path / "x.json").read_text())
    assert loaded.report()["schema"] == json.loads(loaded.to_json())["schema"]
    page = loaded.to_html(tmp_path / "x.html")
    assert (tmp_path / "x.html").read_text(encoding="utf-8") == page and "<!doctype html>" in page.lower()[:100]
    assert loaded.to_terminal().endswith("\n") and loaded._repr_html_().startswith("<")
    frame = loaded.to_frame()
    assert len(frame) and frame.equals(loaded.frame())
    with pytest.raises(UsageError, match="no frame 'bogus'; there are: "):
        loaded.frame("bogus")


@pytest.mark.parametrize("name", WITHOUT)
@pytest.mark.parametrize("kind", RESULTS)
def test_results_have_plots_and_a_verdict_or_say_why_not(kind: str, name: str) -> None:
    loaded = result(kind)
    if kind in WITHOUT[name]:
        with pytest.raises(UsageError, match=r"frame\(\)|report\(\)"):
            getattr(loaded, name)
    elif name == "plot":
        pytest.importorskip("matplotlib", reason="plots need the plot extra")
        assert loaded.plot().get_xlabel()
        with pytest.raises(UsageError, match="no plot 'bogus'; there are: "):
            loaded.plot("bogus")
    else:
        assert loaded.verdict and all(sentence and isinstance(sentence, str) for sentence in loaded.verdict)


def test_json_of_results_is_what_the_commands_print(capsys: pytest.CaptureFixture[str]) -> None:
    commands = {
        "CommLogAnalysis": ["report", str(COMM_LOGS)],
        "RunComparison": ["compare", str(RUN), str(OTHER)],
        "TableAnalysis": ["report", str(TABLE)],
    }
    for kind, arguments in commands.items():
        assert cli.run([*arguments, "--format", "json"]) == 0
        printed, own = json.loads(capsys.readouterr().out), json.loads(result(kind).to_json())
        # The labels of a comparison are what the user named: here loaded runs, there paths.
        assert printed.pop("entries", None) is None or own.pop("entries")
        assert printed == own


def test_verdict_of_a_comparison_has_the_ratio_of_the_times() -> None:
    comparison = ringprof.compare(analysis(RUN), analysis(OTHER))
    base, other = (entry.figures["iteration_ms"].value for entry in comparison.entries)
    word, change = ("slower", other / base - 1) if other > base else ("faster", 1 - other / base)
    label = comparison.entries[1].label
    assert any(line.startswith(f"{label}: {word} by {100 * change:.1f} %") for line in comparison.verdict)


def test_frames_of_tables_and_communication_logs_have_every_row() -> None:
    tables, logs = ringprof.load_tables(TABLE), ringprof.load_comm_logs(COMM_LOGS)
    of_largest = tables.frame().query("line == @line", local_dict={"line": tables.report()["table"]["line"]})
    times = dict(zip(of_largest.kind, of_largest.time_ns, strict=True))
    assert times == {kind: time for kind, time in tables.report()["table"]["kinds_ns"].items() if kind in times}
    assert sum(times.values()) == pytest.approx(tables.report()["table"]["total_ns"])
    assert len(logs.frame()) == logs.figures()["operations"]
    assert logs.frame("ranks").unfinished.sum() == logs.figures()["unfinished"]
    assert list(analysis(RUN).frame("hops").columns) == list(analysis(RUN).hops().columns)
