"""Settings of the documentation site: ``make docs``. The pages are those that GitHub shows; nothing is fetched."""

from __future__ import annotations

import re
from pathlib import Path

import ringprof

ROOT = Path(__file__).resolve().parent.parent

project = "ringprof"
version = release = ringprof.__version__
copyright = "The ringprof authors, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
# The sources are those of the repository, so that links between pages and to files are the same here and on GitHub.
root_doc = "docs/index"
include_patterns = ["docs/*.md", "docs/*.rst", "SKILL.md", "CHANGELOG.md", "CONTRIBUTING.md", "traces/README.md"]
exclude_patterns = [".*", "build", "dist", "ringprof", "strategies", "tests", "notebooks"]
html_theme = "furo"
html_title = f"ringprof {ringprof.__version__}"
html_copy_source = False
highlight_language = "none"
default_role = "code"  # docstrings have names in single backticks
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}

MODULES = (
    "ringprof.strategies",
    "ringprof.strategies.base",
    "ringprof.strategies.registry",
    "ringprof.run",
    "ringprof.results.frames",
    "ringprof.report.plots",
    "ringprof.analysis.steps.steps",
    "ringprof.analysis.findings.waterfall",
    "ringprof.analysis.findings.conditions",
    "ringprof.trace.reduced",
    "ringprof.proof.result",
    "ringprof.errors",
)
"""Modules of the reference beside the public names of `ringprof`."""


def _contents(text: str) -> str:
    """Return a table of contents for each part of the index, from the links in it."""
    trees = []
    for part in text.split("\n## ")[1:]:
        title, _, body = part.partition("\n")
        links = re.findall(r"^\| \[([^]]+)\]\(([\w./-]+)\)", body, re.MULTILINE)
        pages = [f"{name} </{('docs/' + link).replace('docs/../', '')}>" for name, link in links]
        trees.append("\n".join([f"```{{toctree}}\n:hidden:\n:caption: {title}", *pages, "```"]))
    return "\n\n".join(trees)


def _imports(drawing: re.Match[str]) -> str:
    """Return a Mermaid drawing as a table: Mermaid would need a script from the network."""
    imports: dict[str, list[str]] = {}
    for module, imported in re.findall(r"^    (\w+) --> (\w+)$", drawing[1], re.MULTILINE):
        imports.setdefault(module, []).append(f"`{imported}`")
    rows = [f"| `{module}` | {', '.join(names)} |" for module, names in imports.items()]
    return "\n".join(["| module | imports |", "| --- | --- |", *rows])


def _reference() -> str:
    """Return the directives that document the public names and modules."""
    lines = ["ringprof", "--------", "", ".. automodule:: ringprof", "   :no-members:", ""]
    for name in sorted(set(ringprof.__all__) - {"__version__"}):
        kind = "autoclass" if isinstance(getattr(ringprof, name), type) else "autofunction"
        lines += [f".. {kind}:: ringprof.{name}", ""]
    for module in MODULES:
        lines += [module, "-" * len(module), "", f".. automodule:: {module}", ""]
    return "\n".join(lines)


def _read(_app: object, page: str, text: list[str]) -> None:
    if page == root_doc:
        text[0] += "\n\n" + _contents(text[0])
    elif page == "docs/api":
        text[0] += "\n" + _reference()
    elif page == "docs/architecture":
        text[0] = re.sub(r"```mermaid\n(.+?)```", _imports, text[0], flags=re.DOTALL)


def _without_fences(_app: object, _what: str, _name: str, _object: object, _options: object, lines: list[str]) -> None:
    """Turn code between Markdown fences into code blocks, in place."""
    inside = False
    for number, line in enumerate(lines):
        if line.startswith("```"):
            inside = not inside
            lines[number] = ".. code-block:: python\n" if inside else ""
        elif inside:
            lines[number] = f"   {line}"
    lines[:] = "\n".join(lines).split("\n")


def setup(app: object) -> None:
    """Connect the events of the build."""
    app.connect("source-read", _read)  # type: ignore[attr-defined]
    app.connect("autodoc-process-docstring", _without_fences)  # type: ignore[attr-defined]
