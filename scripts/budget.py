"""Compare the size of the product and its tests with the budget in pyproject.toml.

``python scripts/budget.py`` prints what each package has left and fails where one is above its budget.
``python scripts/budget.py --write`` sets each package's budget to its size; the totals stay as they are.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = ROOT / "pyproject.toml"
MEASURES = ("lines", "classes", "helpers")
"""Lines of Python, classes, and private functions that are named once: where they are called."""
VALUE_TYPES = ("dataclass", "Struct", "NamedTuple", "TypedDict")


def package_of(file: str) -> str:
    """Return the part of the budget that a file counts for: a package of ringprof, the strategies, or the tests."""
    first, *rest = file.split("/")
    return first if first != "ringprof" else f"ringprof/{rest[0]}" if len(rest) > 1 else "ringprof/*.py"


def measure(text: str) -> Counter[str]:
    """Count lines, lines of docstrings, classes, value types, helpers, ``Any`` and ``dict[str`` of a module."""
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    names = Counter(node.id for node in nodes if isinstance(node, ast.Name))
    names.update(node.attr for node in nodes if isinstance(node, ast.Attribute))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    return Counter(
        lines=text.count("\n"),
        docstrings=sum(
            node.end_lineno - node.lineno + 1
            for parent in nodes
            for node in (parent.body if isinstance(getattr(parent, "body", None), list) else ())
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.end_lineno
        ),
        classes=len(classes),
        value_types=sum(
            any(kind in ast.unparse(part) for part in (*node.bases, *node.decorator_list) for kind in VALUE_TYPES)
            for node in classes
        ),
        helpers=sum(function.name.startswith("_") and names[function.name] == 1 for function in functions),
        any=names["Any"],
        dict_str=text.count("dict[str"),
    )


def sizes() -> dict[str, Counter[str]]:
    """Measure every package of the checkout, and the totals ``product`` and ``tests``."""
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "ringprof", "strategies", "tests"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    counts_of: dict[str, Counter[str]] = {}
    for file in files:
        if file.endswith(".py") and (ROOT / file).is_file():
            counts = measure((ROOT / file).read_text("utf-8"))
            for part in {package_of(file), "tests" if file.startswith("tests/") else "product"}:
                counts_of.setdefault(part, Counter()).update(counts)
    return counts_of


def main() -> None:
    """Print what is left of each budget; exit with 1 where one is exceeded."""
    text = SETTINGS.read_text("utf-8")
    budget, measured, over = tomllib.loads(text)["tool"]["budget"], sizes(), []
    if "--write" in sys.argv:
        for part, counts in measured.items():
            if part not in ("product", "tests"):
                row = ", ".join(f"{name} = {counts[name]}" for name in MEASURES)
                text = re.sub(rf'^"{re.escape(part)}" = \{{.*\}}$', f'"{part}" = {{ {row} }}', text, flags=re.MULTILINE)
        SETTINGS.write_text(text, "utf-8")
        return
    for part in sorted({*budget, *measured}):
        left = {name: most - measured.get(part, Counter())[name] for name, most in budget.get(part, {}).items()}
        over += [f"{part}: {-number} {name} too many" for name, number in left.items() if number < 0]
        if part not in budget:
            over.append(f"{part}: no budget; add one to [tool.budget] in pyproject.toml, and say what it buys")
    total = measured["product"]
    share = total["docstrings"] / total["lines"]
    if share < budget["least_docstrings"]:
        over.append(f"docstrings are {share:.1%} of the product's lines, at least {budget['least_docstrings']:.1%}")
    free = {name: budget["product"][name] - total[name] for name in budget["product"]}
    print("free of the budget: product", ", ".join(f"{number} {name}" for name, number in free.items()), end="; ")
    print(f"tests {budget['tests']['lines'] - measured['tests']['lines']} lines")
    sys.exit("\n".join(over) if over else 0)


if __name__ == "__main__":
    main()
