"""One self-contained HTML file from sections: the plotting library inside, a strict content policy, nothing fetched.

Everything that came from a trace or a file is text: the template escapes it, and figures get it as JSON in which no
character can end a script.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from ringprof.errors import MissingExtraError
from ringprof.report.text import clean


@dataclass(frozen=True)
class Cell:
    """One cell of a table: what is shown, and what it is sorted by."""

    text: str
    key: float | str
    numeric: bool = False


@dataclass(frozen=True)
class Table:
    """A sortable table."""

    titles: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""

    def numeric(self, column: int) -> bool:
        """Whether a column holds figures, which stand to the right."""
        return any(row[column].numeric for row in self.rows)


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading of its own."""

    anchor: str
    title: str
    meaning: str = ""
    figure: Any = None
    """A Bokeh model."""
    tables: Sequence[Table] = ()
    lines: Sequence[str] = ()


@dataclass(frozen=True)
class Document:
    """All of a page."""

    title: str
    subtitle: str
    verdict: Sequence[str]
    tiles: Sequence[tuple[str, str]]
    """(figure, what it is), the few that matter most."""
    sections: Sequence[Section] = field(default_factory=tuple)


def text(value: object) -> Cell:
    """A cell of words."""
    shown = clean(str(value))
    return Cell(shown, shown.lower())


def number(value: float | None, digits: int = 3, scale: float = 1.0) -> Cell:
    """A cell with a figure; a dash, sorted below all, where it is not known."""
    if value is None:
        return Cell("-", float("-inf"), numeric=True)
    return Cell(f"{value / scale:,.{digits}f}", value, numeric=True)


def render(document: Document) -> str:
    """The page as text. Raises `MissingExtraError` where the plotting library is not installed."""
    bokeh = _bokeh()
    figures = [section.figure for section in document.sections if section.figure is not None]
    script, divisions = bokeh.components(figures, wrap_script=False) if figures else ("", ())
    scripts = [_inline(source) for source in (*bokeh.library, script, _asset("page.js"))]
    places = iter(divisions)
    shown = [(section, next(places) if section.figure is not None else "") for section in document.sections]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page: str = environment.from_string(_asset("page.html.j2")).render(
        document=document,
        sections=shown,
        scripts=scripts,
        policy=_policy(scripts),
        style=_asset("page.css"),
    )
    return page


@dataclass(frozen=True)
class _Bokeh:
    components: Any
    library: Sequence[str]


def _bokeh() -> _Bokeh:
    try:
        from bokeh.embed import components
        from bokeh.resources import Resources
    except ImportError:
        raise MissingExtraError("the HTML report needs Bokeh: pip install 'ringprof[html]'") from None
    return _Bokeh(components, Resources(mode="inline", components=["bokeh"]).js_raw)


def drawing() -> Any:
    """The module of the figures. Raises `MissingExtraError` where the plotting library is not installed."""
    _bokeh()
    from ringprof.report.page import figures

    return figures


def _inline(source: str) -> str:
    """A script that can stand in a page: nothing in it ends the element that holds it."""
    return source.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _policy(scripts: Sequence[str]) -> str:
    """Only these scripts may run, nothing may be fetched; styles are set by the plotting library as it draws."""
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _asset(name: str) -> str:
    return (files("ringprof.report.page") / "templates" / name).read_text(encoding="utf-8")
