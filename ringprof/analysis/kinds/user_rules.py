"""Rules of the user's own: a small text file that says what kernels and copies are.

    # kind        pattern
    flash_fwd     my_fused_attention
    send_recv     ring_push_*
    copy_engine   Memcpy DtoD*

One rule a line: a kind, then the rest of the line is the pattern. A pattern with ``*`` or ``?`` must fit the whole
name, any other must occur in it; upper and lower case are the same. Empty lines, and lines that begin with ``#``,
count for nothing. The first rule that fits wins, before any rule of ringprof's own.
"""

from __future__ import annotations

import difflib
import re

from ringprof.analysis.kinds.kinds import KINDS, OTHER_GROUPS
from ringprof.analysis.kinds.rules import Rule
from ringprof.errors import UsageError

KNOWN = tuple(kind for kind in KINDS if kind != OTHER_GROUPS)
"""The kinds that a rule may give."""

_STARS = re.compile(r"\*+")


def parse_rules(text: str, name: str) -> tuple[Rule, ...]:
    """The rules in ``text``; ``name`` stands for it in errors. Raises `UsageError` naming the line."""
    rules = []
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            rules.append(_rule(stripped, f"{name}:{number}"))
    if not rules:
        raise UsageError(f"{name}: no rule in it; write one a line: a kind, then part of a kernel's name")
    return tuple(rules)


def _rule(line: str, where: str) -> Rule:
    kind, *rest = line.split(maxsplit=1)
    if kind not in KNOWN:
        near = difflib.get_close_matches(kind, KNOWN, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UsageError(f"{where}: {kind!r} is not a kind; {hint}there are: {', '.join(KNOWN)}")
    if not rest:
        raise UsageError(f"{where}: no pattern after {kind!r}; write part of a kernel's name, or one with * or ?")
    return Rule(kind, "", _expression(rest[0]))


def _expression(pattern: str) -> str:
    """As a regular expression that is searched for."""
    if "*" not in pattern and "?" not in pattern:
        return re.escape(pattern)
    return rf"\A{wildcards(pattern)}\Z"


def wildcards(pattern: str) -> str:
    """A regular expression for the whole of a name, of a pattern in which ``*`` and ``?`` stand for anything.

    What stands between two ``*`` is taken where it first occurs and never again: trying all places of all takes for
    ever.
    """
    first, *others = (re.escape(part).replace(r"\?", ".") for part in _STARS.split(pattern))
    once = [f"(?=(?P<p{place}>.*?{part}))(?P=p{place})" for place, part in enumerate(others[:-1])]
    return "".join([first, *once, *(f".*{last}" for last in others[-1:])])
