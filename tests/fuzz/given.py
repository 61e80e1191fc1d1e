"""Damage to what users give beside traces: machines, measurements, lengths, rules, conditions; and names in outputs."""

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
from ringprof.documents import document_lengths
from ringprof.errors import UsageError
from ringprof.prediction.calibration import parse_calibration
from ringprof.prediction.network import Cluster
from ringprof.prediction.predict import predict, prediction_dict
from ringprof.prediction.query import Query
from ringprof.prediction.score import check_rows, check_text, read_rows, unknown_columns
from ringprof.prediction.text import prediction_text
from ringprof.record.dryrun.schedule import Schedule
from ringprof.report.text import TextStyle
from ringprof.run import Workload

ASKED = Query("ring", Workload(seq=65536, heads=8, kv_heads=8, head_dim=128), Cluster(gpus_per_host=4))
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
    """A text of which some pieces are something else, missing, or there many times."""
    pieces = re.split(r"([\s,;:=x<>()%*]+)", text)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(pieces))
        pieces[at] = chance.choice(
            (chance.choice(CELLS), "", pieces[at] * chance.choice((2, 200)), chance.choice(pieces))
        )
    found = "".join(pieces)
    return found[: chance.randrange(len(found) + 1)] if chance.random() < 0.1 else found


@contextlib.contextmanager
def in_file(text: str, name: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        yield str(path)


# --- foresight ------------------------------------------------------------------------------------------


@cache
def machine() -> Any:
    return json.loads((files("ringprof.prediction") / "machines" / "h100.json").read_bytes())


@cache
def programs() -> Schedule:
    """Of the question; they are the same on every machine."""
    from ringprof.prediction.schedules import schedule_of

    return schedule_of(ASKED, ASKED.cluster, None)


def read_machine(data: bytes) -> None:
    """A calibration file, and a prediction by it."""
    found = predict(ASKED, parse_calibration(data, "machine.json"), lambda *_: programs())
    assert all(math.isfinite(ms) and ms >= 0 for ms in found.interval_ms), found.interval_ms
    json.loads(json.dumps(prediction_dict(found), allow_nan=False))
    assert_quiet(prediction_text(found, TextStyle()))


def measurements(chance: random.Random) -> str:
    """A table of measurements whose cells are damaged."""
    rows = list(csv.reader(io.StringIO(MEASURED)))
    for _ in range(chance.randint(1, 5)):
        row = chance.choice(rows[1:] if chance.random() < 0.9 else rows)
        if row:
            row[chance.randrange(len(row))] = chance.choice((chance.choice(CELLS), chance.choice(chance.choice(rows))))
    out = io.StringIO()
    csv.writer(out).writerows(rows)
    return cut_up(out.getvalue(), chance) if chance.random() < 0.2 else out.getvalue()


def read_measurements(text: str) -> None:
    """Held against a machine, up to where strategies would be run through."""
    known = parse_calibration(json.dumps(machine()).encode(), "h100")

    def refused(*_: object) -> Schedule:
        raise UsageError("not foreseen")

    with in_file(text, "table.csv") as path:
        rows = read_rows(path)
        found, unknown = check_rows(rows, known, refused, Cluster()), unknown_columns(rows)
    assert_quiet(check_text(found, unknown, "terminal", TextStyle()))
    as_json = check_text(found, unknown, "json", TextStyle())
    strict = json.loads(as_json, parse_constant=lambda name: fails(f"{name} in JSON"))
    assert len(strict["rows"]) == len(found)


def fails(why: str) -> None:
    raise AssertionError(why)


# --- what is typed --------------------------------------------------------------------------------------


def read_lengths(text: str) -> None:
    """As an option, and in a file."""
    for given in (text, None):
        with in_file(text, "lengths.txt") as path, contextlib.suppress(UsageError):
            found = document_lengths(path if given is None else given.replace("\0", ""), 65536)
            assert sum(found) == 65536 and min(found) > 0


def read_rules(text: str) -> None:
    """Rules of the user's own, and what they make of names."""
    rules = parse_rules(text, "my.rules")
    for name in NAMES:
        rule_for(name, rules)


def read_condition(text: str) -> None:
    """A gate's condition."""
    found = parse_condition(text)
    figures = {"tflops": 400.0, "exposed_comm": 0.05, "max(wall_ms)": 80.0, "idle": 0.001}
    assert found.holds(figures, figures, shares=("exposed_comm", "idle")) in (True, False)
    assert found.holds(figures, figures, interval=(0.9, 1.1)) in (True, False, None)


# --- names in outputs -----------------------------------------------------------------------------------


def named(tree: Any, chance: random.Random) -> Any:
    """A trace with hostile names of kernels, ranges, groups, streams and devices."""
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
    """Whatever ringprof writes of the trace commands nothing that shows it."""
    with in_file(text, "rank0.json") as path:
        folder = Path(path).parent
        said(["report", path, "--steps", "--hops", "--kernels", "--annotations"])
        said(["report", path, "--format", "markdown"])
        said(["compare", path, path, "--mixed-runs"])
        cells = said(["report", path, "--csv", "kernels"]) + said(["compare", path, path, "--format", "csv"])
        for row in csv.reader(io.StringIO(cells)):
            assert not [cell for cell in row if re.match(r"[=+@\t\r]|-(?![0-9.]|$)", cell)], row
        if said(["report", path, "--html", str(folder / "page.html")]):
            page = (folder / "page.html").read_text("utf-8")
            assert "<script>alert(1)" not in page and "<img src=x" not in page
        if cli.run(["export", path, "-o", str(folder / "out.json")]) == 0:
            json.loads((folder / "out.json").read_bytes())


def said(arguments: list[str]) -> str:
    """What a command prints."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        assert cli.run(arguments) in (0, 1, 2)
    assert "Traceback" not in errors.getvalue()
    assert_quiet(out.getvalue() + errors.getvalue())
    return out.getvalue()


def assert_quiet(text: str) -> None:
    """Nothing in it is a command to a terminal."""
    found = re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    assert not found, found
