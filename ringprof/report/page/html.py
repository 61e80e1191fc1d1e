"""One self-contained HTML file from a document: the plotting library inside, a strict content policy, nothing fetched.

Everything that came from a trace or a file is text: the template escapes it, and figures get it as JSON in which no
character can end a script.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from ringprof.errors import MissingExtraError
from ringprof.report.page.document import Document


def render(document: Document) -> str:
    """The page as text. Raises `MissingExtraError` where the plotting library is not installed."""
    from jinja2 import Environment, StrictUndefined  # here, as Bokeh below: both take longer than most reports

    bokeh = _bokeh()
    figures = [section.content.figure for section in document.sections if section.content.figure is not None]
    script, divisions = bokeh.components(figures, wrap_script=False) if figures else ("", ())
    scripts = [_inline(source) for source in (*bokeh.library, script, _asset("page.js"))]
    places = iter(divisions)
    shown = [(section, next(places) if section.content.figure is not None else "") for section in document.sections]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page: str = environment.from_string(_asset("page.html.j2")).render(
        document=document,
        sections=shown,
        scripts=scripts,
        policy=_policy(scripts),
        style=_asset("page.css"),
    )
    return page


class _Bokeh(NamedTuple):
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
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _asset(name: str) -> str:
    return (files("ringprof.report.page") / "templates" / name).read_text(encoding="utf-8")
