"""Rendering of a document as one self-contained HTML file: the plotting library is inside, and nothing is fetched.

Everything that came from a trace or a file is text. The template escapes it, and figures get it as JSON in which no
character can end a script. A strict content security policy allows only the page's own scripts.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from ringprof.report.page.document import Document


def render(document: Document) -> str:
    """Render the page as text."""
    # Jinja2 and Bokeh are imported where they are needed: both imports take longer than most reports.
    from jinja2 import Environment, StrictUndefined

    figures = [section.content.figure for section in document.sections if section.content.figure is not None]
    sources = [_read_asset("page.js")]
    figure_elements: Sequence[str] = ()
    if figures:
        from bokeh.embed import components
        from bokeh.resources import Resources

        script, figure_elements = components(figures, wrap_script=False)
        sources = [*Resources(mode="inline", components=["bokeh"]).js_raw, script, *sources]
    # Nothing in a script may end the HTML element around it.
    scripts = [source.replace("</script", "<\\/script").replace("<!--", "<\\!--") for source in sources]
    elements = iter(figure_elements)
    sections_with_figures = [
        (section, next(elements) if section.content.figure is not None else "") for section in document.sections
    ]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page: str = environment.from_string(_read_asset("page.html.j2")).render(
        document=document,
        sections=sections_with_figures,
        scripts=scripts,
        policy=_content_policy(scripts),
        style=_read_asset("page.css"),
    )
    return page


def drawing() -> Any:
    """Return the module that draws figures; it imports Bokeh, which takes longer than most reports."""
    from ringprof.report.page import figures

    return figures


def _content_policy(scripts: Sequence[str]) -> str:
    """Build the content security policy: only these scripts may run, and nothing may be fetched.

    Inline styles are allowed because Bokeh sets them as it draws.
    """
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _read_asset(name: str) -> str:
    return (files("ringprof.report.page") / "templates" / name).read_text(encoding="utf-8")
