"""Untrusted files cannot run code, nor make a regular expression take too long."""

from __future__ import annotations

import ast
import gzip
import importlib
import pkgutil
import re
import zlib
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import ringprof
from ringprof import cli
from ringprof.trace.one_run import rank_in_name
from ringprof.trace.reduced import MAGIC
from tests.growth import PART, assert_linear, spent_s

PACKAGE = Path(ringprof.__file__).parent
SOURCES = sorted({path.resolve() for part in (PACKAGE, PACKAGE / "strategies") for path in part.rglob("*.py")})
RUNS_CODE = {"eval", "exec", "compile", "__import__", "execfile"}
UNPICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle", "yaml"}


@cache
def parsed() -> list[tuple[str, list[ast.AST]]]:
    """List the product's files with the nodes of each."""
    return [
        (str(path.relative_to(PACKAGE.parent)), list(ast.walk(ast.parse(path.read_text("utf-8"))))) for path in SOURCES
    ]


def offences(node: ast.AST) -> set[str]:
    """List what a node imports or calls that unpickles data or runs code."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names} & UNPICKLES
    if isinstance(node, ast.ImportFrom):
        return {(node.module or "").partition(".")[0]} & UNPICKLES
    if not isinstance(node, ast.Call):
        return set()
    called = {word.arg or "" for word in node.keywords} & {"allow_pickle"}
    if isinstance(node.func, ast.Name):
        called |= {node.func.id} & RUNS_CODE
    if isinstance(node.func, ast.Attribute):
        owner = node.func.value
        name = f"{owner.id}.{node.func.attr}" if isinstance(owner, ast.Name) else node.func.attr
        called |= {name} & {"torch.load", "np.load", "numpy.load", "joblib.load", "pd.read_pickle"}
    return called


def test_no_file_is_unpickled_or_run() -> None:
    assert len(parsed()) > 300
    assert [(name, reasons) for name, nodes in parsed() for node in nodes if (reasons := offences(node))] == []


@pytest.mark.parametrize(
    "text",
    ["import pickle", "import yaml.nodes", "from dill import load", "eval(x)", "torch.load(f)", "f(allow_pickle=True)"],
)
def test_unpickling_and_evaluating_are_detected(text: str) -> None:
    assert any(map(offences, ast.walk(ast.parse(text))))


def imported_by_name() -> set[str]:
    """Find the files that import a module whose name is not in their text."""
    return {
        name
        for name, nodes in parsed()
        for node in nodes
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", getattr(node.func, "attr", "")) == "import_module"
        and not isinstance(node.args[0], ast.Constant)
    }


def test_only_modules_named_by_the_user_are_imported() -> None:
    """Allow imports of the user's strategy or function, and of modules in a file's own table."""
    assert imported_by_name() <= {
        "ringprof/__init__.py",
        "ringprof/cli/commands.py",
        "ringprof/integrations/lightning.py",
        "ringprof/proof/launch.py",
        "ringprof/training/sinks.py",
        "strategies/__init__.py",
        "strategies/catalog.py",
    }


def test_only_ascii_digits_are_matched_as_digits() -> None:
    r"""Refuse ``\d``, which matches the digits of every script: rank٣.json would be rank 3."""
    names = {path.name for path in SOURCES if r"\d" in path.read_text("utf-8")}
    assert names <= {"rules.py", "operators.py"}  # no number is read from names of kernels and operators
    assert [rank_in_name(f"rank{digit}.json") for digit in "3٣೩²"] == [3, None, None, None]


# --- regular expressions --------------------------------------------------------------------------------


def patterns() -> Iterator[tuple[str, re.Pattern[Any]]]:
    """Yield every compiled pattern at the top level of the modules that read and analyse files."""
    # Modules that parse the user's own input (conditions, times, groups) are excluded.
    names = ["ringprof.common.log_lines"]
    for part in ("trace", "analysis", "report", "printed"):
        package = importlib.import_module(f"ringprof.{part}")
        names += [module.name for module in pkgutil.walk_packages(package.__path__, f"ringprof.{part}.")]
    for module in names:
        # The figures of the page need Bokeh, and read no text.
        if module.rpartition(".")[2] not in ("conditions", "focus", "groups", "user_rules", "figures"):
            for name, value in vars(importlib.import_module(module)).items():
                yield from ((f"{module}.{name}", pattern) for pattern in within(value))


def within(value: object, depth: int = 3) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, dict):
        yield from within((*value.keys(), *value.values()), depth)
    elif isinstance(value, (tuple, list, set, frozenset)) and depth:
        for item in value:
            yield from within(item, depth - 1)
    elif depth and hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        yield from within(tuple(getattr(value, name) for name in value.__dataclass_fields__), depth - 1)


PATTERNS = {(pattern.pattern, pattern.flags): (name, pattern) for name, pattern in patterns()}
LENGTH = 20_000
FIRST_LOOK, SUSPICIOUS_S = LENGTH // 2, 0.025
"""Length of a first text, and the time from which longer ones are tried, to tell a slow pattern from a busy machine."""


@lru_cache
def used(name: str) -> tuple[str, ...]:
    """List the methods that a module calls on a pattern."""
    module, _, variable = name.rpartition(".")
    text = Path(str(importlib.import_module(module).__file__)).read_text("utf-8")
    ways = dict.fromkeys(re.findall(rf"\b{variable}\.(search|match|fullmatch|finditer|findall|sub|split)\(", text))
    # For a pattern in a table: all methods that the module calls on any pattern.
    ways = ways or dict.fromkeys(re.findall(r"\.(search|match|fullmatch|finditer|findall|sub|split)\(", text))
    simple = {"finditer": "search", "findall": "search", "sub": "search", "split": "search"}
    return tuple(dict.fromkeys(simple.get(way, way) for way in ways)) or ("search", "match", "fullmatch")


def hostile(pattern: re.Pattern[Any]) -> Iterator[Callable[[int], str]]:
    """Yield functions of a length that repeat parts of the pattern, and end in text that it cannot match."""
    text = pattern.pattern.decode("latin-1") if isinstance(pattern.pattern, bytes) else pattern.pattern
    words = re.findall(r"[A-Za-z0-9]{2,}", text)[:6]
    letters = dict.fromkeys([*' 0a-|.=:,_([\t%"\\/', *(word[0] for word in words)])
    pieces = [*letters, *words, "0.", "0 ", "a ", "1,", "- ", "a:", "(0", "::a", "a<", "--", "| ", " |", "0/"]
    for piece, start, end in product(pieces, ("", *words[:2]), ("", "\n!")):
        yield partial(repeated, piece, start, end)


def repeated(piece: str, start: str, end: str, length: int) -> str:
    return start + piece * (length // len(piece)) + end


@pytest.mark.parametrize("key", sorted(PATTERNS, key=str), ids=lambda key: PATTERNS[key][0])
def test_regular_expressions_are_fast_on_hostile_text(key: tuple[Any, int]) -> None:
    name, pattern = PATTERNS[key]
    for text in hostile(pattern):
        for way in used(name):
            assert_bounded_time(pattern, way, text)


@pytest.mark.long
def test_slow_regular_expression_is_detected() -> None:
    with pytest.raises(AssertionError):
        assert_bounded_time(re.compile(r"a+b"), "search", lambda length: "a" * length)


def assert_bounded_time(pattern: re.Pattern[Any], way: str, text: Callable[[int], str]) -> None:
    """Fail if the time grows faster than the text."""

    def subject(length: int) -> str | bytes:
        return text(length).encode() if isinstance(pattern.pattern, bytes) else text(length)

    use = getattr(pattern, way)
    if spent_s(use, subject(FIRST_LOOK)) > SUSPICIOUS_S:
        assert_linear(use, subject(PART * LENGTH), subject(LENGTH))


# --- memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "name", "data"),
    [
        ([], "some.log", b"Self CUDA\n" * 1000),
        (["--show", "rows"], "some.log", b"| a | b |\n" * 1000),
        ([], "rank0.json.gz", gzip.compress(b'{"traceEvents": [' + b" " * 100_000)),
        ([], "rank0.ringprof", MAGIC + zlib.compress(bytes(100_000))),
    ],
)
def test_input_limits_have_an_option(options: list[str], name: str, data: bytes, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    assert cli.run(["report", str(path), *options, "--max-bytes", "5000"]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and "--max-bytes" in errors


# --- docs/security.md --------------------------------------------------------------------------------------


def test_every_security_promise_names_an_existing_test() -> None:
    text = (PACKAGE.parent / "docs" / "security.md").read_text("utf-8")
    promises = re.findall(r"^\* (.+(?:\n  .+)*)", text.partition("## Not promised")[0], re.MULTILINE)
    assert len(promises) > 8
    for promise in promises:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", promise)
        assert named, promise
        for path, name in named:
            assert f"\ndef {name}(" in (PACKAGE.parent / path).read_text("utf-8"), (path, name)
