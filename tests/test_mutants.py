"""Small bugs are noticed: a seeded sample of generated mutants, and sets of mutants written by hand."""

from __future__ import annotations

import ast
import builtins
import os
import re
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest

from tests.paths import ROOT

NUMBER = os.environ.get("RINGPROF_MUTANTS", "600")
MEASURED = ["ringprof/analysis", "ringprof/trace", "strategies"]
"""Folders whose share is known, see docs/mutation-testing.md."""
MUTANTS = ROOT / "dev" / "mutants"


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the rules of all hand-written sets."""
    monkeypatch.syspath_prepend(str(MUTANTS))
    return [rule for name in ("first_set", "second_set", "third_set") for rule in import_module(name).RULES]


def test_every_hand_written_bug_can_be_planted(rules: list[Any]) -> None:
    """Each rule quotes text that stands once in its file, so a rename of product code must adapt the rule."""
    counts = {(rule.file, rule.before): (ROOT / rule.file).read_text("utf-8").count(rule.before) for rule in rules}
    assert {quote: count for quote, count in counts.items() if count != 1} == {}
    assert [rule.test for rule in rules if rule.test and not (ROOT / rule.test).is_file()] == []


def test_every_planted_bug_uses_names_of_its_file(rules: list[Any]) -> None:
    """A bug with an outdated name would raise NameError, which any test notices."""
    for rule in rules:
        text = (ROOT / rule.file).read_text("utf-8")
        planted = unbound_names(text.replace(rule.before, rule.after))
        assert not planted or planted <= unbound_names(text), (rule.file, rule.after)


def unbound_names(text: str) -> set[str]:
    """Return the names that code reads and nothing in it binds, except built-in names."""
    nodes = list(ast.walk(ast.parse(text)))
    methods = {id(item) for node in nodes if isinstance(node, ast.ClassDef) for item in node.body}
    names = [node for node in nodes if isinstance(node, ast.Name)]
    bound = {node.id for node in names if isinstance(node.ctx, ast.Store)} | set(dir(builtins))
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
    definitions = (node for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef)))
    bound |= {node.name for node in definitions if id(node) not in methods}
    return {node.id for node in names} - bound


def test_equivalent_mutants_are_at_the_documented_places() -> None:
    page = (MUTANTS / "equivalent.md").read_text("utf-8")
    rows = re.findall(r"^\| (\S+\.py) (\w*) \| `(.*?)` \| `", page, re.MULTILINE)
    assert len(rows) == page.count("\n| ") - 2, "a row is not read"
    assert [
        row for row in rows if not any(row[2].replace("\\|", "|") in text for text in sources(row[0], row[1]))
    ] == []


def sources(file: str, name: str) -> list[str]:
    """Return the source of each function and class of this name in one line; the whole file for an empty name."""
    text = (ROOT / file).read_text("utf-8")
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.FunctionDef, ast.ClassDef)))
    parts = [ast.get_source_segment(text, node) or "" for node in nodes if node.name == name] if name else [text]
    return [" ".join(part.split()) for part in parts]


def plant(*arguments: str) -> None:
    """Run a script of dev/mutants, which ends with 0 where enough mutants are noticed."""
    pytest.importorskip("mutmut", reason="mutmut has no build for this Python")
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_tests_catch_85_percent_of_random_mutants() -> None:
    """Set RINGPROF_MUTANTS for fewer or more than 600. docs/mutation-testing.md says what the survivors are."""
    plant(str(MUTANTS), "--number", NUMBER, "--packages", *MEASURED, "--least", "85")


@pytest.mark.long
@pytest.mark.timeout(2 * 3600)
def test_tests_catch_90_percent_of_hand_written_bugs() -> None:
    plant(str(MUTANTS / "by_hand.py"), "--least", "90")
