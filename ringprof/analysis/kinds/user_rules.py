"""User rules: a small text file that gives kernels and copies their kinds.

    # kind        pattern
    flash_fwd     my_fused_attention
    send_recv     ring_push_*
    copy_engine   Memcpy DtoD*

Each line is one rule: a kind, then a pattern up to the end of the line. A pattern with ``*`` or ``?`` must match the
whole name; any other must occur in it. Case does not matter. Empty lines and lines that begin with ``#`` are ignored.
The first matching rule wins, before any built-in rule.
"""

from __future__ import annotations

import difflib
import re

from ringprof.analysis.kinds.kinds import KINDS, OTHER_GROUPS
from ringprof.analysis.kinds.rules import Rule
from ringprof.errors import UsageError

KNOWN = tuple(kind for kind in KINDS if kind != OTHER_GROUPS)
"""Kinds that a rule may assign."""

_STARS = re.compile(r"\*+")


def parse_rules(text: str, name: str) -> tuple[Rule, ...]:
    """Parse the rules in ``text``; ``name`` stands for it in errors. Raises `UsageError` naming the line."""
    rules = []
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            where = f"{name}:{number}"
            kind, *rest = stripped.split(maxsplit=1)
            if kind not in KNOWN:
                near = difflib.get_close_matches(kind, KNOWN, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise UsageError(f"{where}: {kind!r} is not a kind; {hint}there are: {', '.join(KNOWN)}")
            if not rest:
                raise UsageError(
                    f"{where}: no pattern after {kind!r}; write part of a kernel's name, or one with * or ?"
                )
            has_wildcard = "*" in rest[0] or "?" in rest[0]
            rules.append(Rule(kind, "", rf"\A{wildcards(rest[0])}\Z" if has_wildcard else re.escape(rest[0])))
    if not rules:
        raise UsageError(f"{name}: no rule in it; write one a line: a kind, then part of a kernel's name")
    return tuple(rules)


def wildcards(pattern: str) -> str:
    """Return a regular expression for a whole name, from a pattern with ``*`` and ``?`` as wildcards.

    Text between two ``*`` matches its first occurrence only: trying every combination of positions takes far too long.
    """
    first, *rest = (re.escape(text).replace(r"\?", ".") for text in _STARS.split(pattern))
    once = [f"(?=(?P<p{index}>.*?{text}))(?P=p{index})" for index, text in enumerate(rest[:-1])]
    return "".join([first, *once, *(f".*{last}" for last in rest[-1:])])
