"""Damaged user inputs other than traces: machines, measurements, lengths, rules, conditions; hostile names."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import random
import re
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ringprof import cli
from ringprof.analysis.findings.conditions import parse_condition
from ringprof.analysis.kinds.rules import rule_for
from ringprof.analysis.kinds.user_rules import parse_rules
from ringprof.dryrun.schedule import Schedule
from ringprof.errors import UsageError
from ringprof.prediction.calibration import parse_calibration
from ringprof.prediction.measured import read_rows, unknown_columns
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import predict, prediction_dict
from ringprof.prediction.query import Query
from ringprof.prediction.score import check_rows, check_text
from ringprof.prediction.text import prediction_text
from ringprof.report.text import TextStyle
from ringprof.workload.documents import document_lengths
from ringprof.workload.workload import Workload

QUERY = Query("ring", Workload(seq=65536, heads=8, kv_heads=8, head_dim=128), Cluster(gpus_per_host=4))
MEASURED = """id,strategy,seq_global,heads,kv_heads,head_dim,n_gpus,hosts,causal,pass,kernel,degrees,time_ms,tflops
a,ulysses,131072,64,8,128,16,2,False,fwd,fa3,,61.33,
b,ulysses,131072,64,8,128,16,2,True,fwd+bwd,fa3,,,1937
c,burst,524288,40,40,128,8,1,True,bwd,cudnn,window=4,61.33,400
d,usp,65536,40,40,128,8,2,True,fwd,auto,ulysses=4,9.5,
"""
RULES = """# kind        pattern
flash_fwd     my_fused_attention
send_recv     ring_push_*
copy_engine   Memcpy Dto? *(*)*
"""
LENGTHS = ("65536,32768x4,8192", "lognormal:mean=8192,sigma=1.2,seed=7", "4096 8192\n16384,1024\n")
CONDITIONS = ("tflops < 0.95 * base", "exposed_comm > 5%", "max(wall_ms) >= 80", "idle != 1e-3")
NAMES = ("void my_kernel<float>(int)", "ring_push_bf16", "Memcpy DtoD (Device -> Device)", "a" * 8000)
CELLS = (
    "", "nan", "inf", "-1", "0", "1e400", "9" * 400, "1e3", "1_000", "٣", "²", "\x1b[2J", "💥", "=1+1", '"', ",", "\n",
    "*", "?" * 50, "*a" * 50, "(", "x", "%", "* base", "65536", "True", "\x00", "0.5",
)  # fmt: skip
HOSTILE_NAMES = (
    "\x1b]0;owned\x07", "\x1b[2J", "\x9b31m", "\r", "\x00", "\u202e", "=cmd|' /C calc'!A0", "+1", "@SUM(A1)", "-2+3",
    "\t=1", "</script><script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "| a | b |", "`x`", "\n# title",
    "é\ud800", "{{7*7}}", "%s%n", "💥", "$HOME", "*", "_" * 300, '","ph":"X"',
)  # fmt: skip


def cut_up(text: str, chance: random.Random) -> str:
    """Replace, drop or repeat some pieces of a text."""
    pieces = re.split(r"([\s,;:=x<>()%*]+)", text)
    for _ in range(chance.randint(1, 4)):
        index = chance.randrange(len(pieces))
        pieces[index] = chance.choice(
            (chance.choice(CELLS), "", pieces[index] * chance.choice((2, 200)), chance.choice(pieces))
        )
    damaged = "".join(pieces)
    return damaged[: chance.randrange(len(damaged) + 1)] if chance.random() < 0.1 else damaged


@contextlib.contextmanager
def in_file(text: str, name: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        yield str(path)


# --- prediction -----------------------------------------------------------------------------------------


@cache
def machine() -> Any:
    return json.loads((files("ringprof.prediction") / "machines" / "h100.json").read_bytes())


@cache
def programs() -> Schedule:
    """Return the schedule of the query, which is the same on every machine."""
    from ringprof.prediction.schedules import schedule_of

    return schedule_of(QUERY, QUERY.cluster, None)


def read_machine(data: bytes) -> None:
    """Read a calibration file, and predict with it."""
    prediction = predict(QUERY, parse_calibration(data, "machine.json"), lambda *_: programs())
    assert all(math.isfinite(ms) and ms >= 0 for ms in prediction.interval_ms), prediction.interval_ms
    json.loads(json.dumps(prediction_dict(prediction), allow_nan=False))
    assert_quiet(prediction_text(prediction, TextStyle()))


def measurements(chance: random.Random) -> str:
    """Make a table of measurements with damaged cells."""
    rows = list(csv.reader(io.StringIO(MEASURED)))
    for _ in range(chance.randint(1, 5)):
        row = chance.choice(rows[1:] if chance.random() < 0.9 else rows)
        if row:
            row[chance.randrange(len(row))] = chance.choice((chance.choice(CELLS), chance.choice(chance.choice(rows))))
    out = io.StringIO()
    csv.writer(out).writerows(rows)
    return cut_up(out.getvalue(), chance) if chance.random() < 0.2 else out.getvalue()


def read_measurements(text: str) -> None:
    """Compare measurements with a machine, without the dry runs of strategies."""
    known = parse_calibration(json.dumps(machine()).encode(), "h100")

    def refused(*_: object) -> Schedule:
        raise UsageError("no dry run in this test")

    with in_file(text, "table.csv") as path:
        rows = read_rows(path)
        scores, unknown = check_rows(rows, known, refused, Cluster()), unknown_columns(rows)
    assert_quiet(check_text(scores, unknown, "terminal", TextStyle()))
    as_json = check_text(scores, unknown, "json", TextStyle())
    strict = json.loads(as_json, parse_constant=lambda name: fails(f"{name} in JSON"))
    assert len(strict["rows"]) == len(scores)


def fails(why: str) -> None:
    raise AssertionError(why)


# --- command-line input ---------------------------------------------------------------------------------


def read_lengths(text: str) -> None:
    """Parse document lengths from an option and from a file."""
    for option in (text, None):
        with in_file(text, "lengths.txt") as path, contextlib.suppress(UsageError):
            lengths = document_lengths(path if option is None else option.replace("\0", ""), 65536)
            assert sum(lengths) == 65536 and min(lengths) > 0


def read_rules(text: str) -> None:
    """Parse a user's rules, and apply them to names."""
    rules = parse_rules(text, "my.rules")
    for name in NAMES:
        rule_for(name, rules)


def read_condition(text: str) -> None:
    """Parse and evaluate a condition of ``--fail-if``."""
    condition = parse_condition(text)
    figures = {"tflops": 400.0, "exposed_comm": 0.05, "max(wall_ms)": 80.0, "idle": 0.001}
    assert condition.holds(figures, figures, shares=("exposed_comm", "idle")) in (True, False)
    assert condition.holds(figures, figures, interval=(0.9, 1.1)) in (True, False, None)


# --- names in outputs -----------------------------------------------------------------------------------


def named(tree: Any, chance: random.Random) -> Any:
    """Give kernels, ranges, groups, streams and devices of a trace hostile names."""
    events = tree["traceEvents"]
    for event in chance.sample(events, min(len(events), 60)):
        event["name"] = chance.choice(HOSTILE_NAMES) + str(event.get("name", "")) * chance.randrange(2)
        for key, value in (event.get("args") or {}).items():
            if isinstance(value, str) and chance.random() < 0.3:
                event["args"][key] = chance.choice(HOSTILE_NAMES)
    for device in tree.get("deviceProperties") or []:
        device["name"] = chance.choice(HOSTILE_NAMES)
    for group in (tree.get("distributedInfo") or {}).get("pg_config") or []:
        group["pg_desc"] = group["pg_name"] = chance.choice(HOSTILE_NAMES)
    return tree


def read_names(text: str) -> None:
    """Check that no output about the trace contains commands for the program that shows it."""
    with in_file(text, "rank0.json") as path:
        folder = Path(path).parent
        output_of(["report", path, "--show", "steps,hops,kernels,annotations"])
        output_of(["report", path, "--format", "markdown"])
        output_of(["compare", path, path, "--mixed-runs"])
        cells = output_of(["report", path, "--csv", "kernels"]) + output_of(["compare", path, path, "--format", "csv"])
        for row in csv.reader(io.StringIO(cells)):
            assert not [cell for cell in row if re.match(r"[=+@\t\r]|-(?![0-9.]|$)", cell)], row
        if output_of(["report", path, "--html", str(folder / "page.html")]):
            page = (folder / "page.html").read_text("utf-8")
            assert "<script>alert(1)" not in page and "<img src=x" not in page
        if cli.run(["export", path, "-o", str(folder / "out.json")]) == 0:
            json.loads((folder / "out.json").read_bytes())


def output_of(arguments: list[str]) -> str:
    """Run a command and return its output."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        assert cli.run(arguments) in (0, 1, 2)
    assert "Traceback" not in errors.getvalue()
    assert_quiet(out.getvalue() + errors.getvalue())
    return out.getvalue()


def assert_quiet(text: str) -> None:
    """Assert that a text contains no control characters for a terminal."""
    controls = re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    assert not controls, controls
