"""Refuse private language: docstrings that lean on the line before, variables that name nothing, private words.

Run by ``make lint``. Prints one line per finding and exits 1 where there is any.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("ringprof", "strategies", "scripts", "dev", "tests")
LEANING = re.compile(r"(As|Of|The same|By|Those|That|To|It|What)\b")
EMPTY_NAMES = {"one", "found", "told", "asked", "made", "given", "place", "at"}
PRIVATE = re.compile(
    r"\b(foresee\w*|foresight|foreseen|parcels?|homeward|lifeline|diary|tapes?|strangers?|dearest)\b",
    re.IGNORECASE,
)


def findings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and reason of everything in one Python file or page that the rules refuse."""
    text = path.read_text("utf-8")
    for node in ast.walk(ast.parse(text if path.suffix == ".py" else "")):
        body = getattr(node, "body", None)
        for item in body if isinstance(body, list) else ():
            value = getattr(item, "value", None)
            prose = value.value if isinstance(item, ast.Expr) and isinstance(value, ast.Constant) else None
            if isinstance(prose, str) and (start := LEANING.match(prose.strip())):
                yield item.lineno, f"docstring begins with {start[0]!r}"
        if isinstance(node, ast.arg) and node.arg in EMPTY_NAMES:
            yield node.lineno, f"parameter {node.arg!r} does not say what it holds"
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in EMPTY_NAMES:
            yield node.lineno, f"variable {node.id!r} does not say what it holds"
    for number, line in enumerate(text.splitlines(), 1):
        if word := PRIVATE.search(line):
            yield number, f"private word {word[0]!r}"


def main() -> int:
    """Print every finding; return 1 where there is any."""
    root = Path(__file__).resolve().parent.parent
    count = 0
    paths = [path for folder in FOLDERS for path in (root / folder).rglob("*.py") if not path.is_symlink()]
    for path in sorted([*paths, *root.glob("*.md"), *root.glob("docs/*.md")]):
        name = str(path.relative_to(root))
        if ("strategies" in path.parts and name.startswith("ringprof/")) or name == "scripts/lint_words.py":
            continue
        for line, reason in findings(path):
            count += 1
            print(f"{name}:{line}: {reason}")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
