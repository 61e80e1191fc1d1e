"""Renew the report in the README: ``python scripts/draw_example.py`` runs the command and rewrites the example."""

from __future__ import annotations

import sys
from pathlib import Path

import ringprof
from ringprof.report.text import TextStyle

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RUN = "traces/h200x4-zigzag-262144"


def example() -> str:
    """Return the report of the committed run from its first line to the largest loss, and its table of times."""
    paragraphs = ringprof.load(ROOT / RUN).to_terminal(TextStyle(width=80)).strip("\n").split("\n\n")
    last = next(number for number, text in enumerate(paragraphs) if text.startswith("Largest loss"))
    times = next(text for text in paragraphs if text.startswith("where the time went"))
    text = "\n\n".join(paragraphs[: last + 1]) + f"\n...\n{times}"
    return "\n".join(f"    {line}" if line else "" for line in text.split("\n"))


def main() -> int:
    page = README.read_text(encoding="utf-8")
    before, heading, rest = page.partition("## A report\n")
    intro, _, rest = rest.partition("\n\n    ")
    _, _, after = rest.partition("\n\n[Reading a report]")
    README.write_text(f"{before}{heading}{intro}\n\n{example()}\n\n[Reading a report]{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
