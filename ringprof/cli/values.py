"""Types of option values: lengths in tokens, numbers, names with shell completion and lists."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import find_spec
from itertools import islice
from typing import Any

import click
from click.shell_completion import CompletionItem

from ringprof.errors import UnknownStrategyError, UsageError, nearest
from ringprof.strategies.catalog import CACHED, RECURRENT, SPECS, find
from ringprof.strategies.errors import UnknownName
from ringprof.workload.documents import FACTORS

STRATEGIES, INFERENCE, FOR_RECURRENCES = tuple(SPECS), tuple(CACHED), tuple(RECURRENT)
# These names repeat those of the kernels' classes, since importing torch takes seconds and shell completion must be
# fast. A test compares the two.
KERNEL_NAMES = (
    "auto", "flash-attn-3", "flash-attn-4", "cudnn", "flash-attn", "torch-flash", "torch-efficient", "cpu-flash",
    "flex", "reference",
)  # fmt: skip

_LENGTH = re.compile(r"([0-9]{1,13})([km]?)", re.IGNORECASE)


class Tokens(click.ParamType):  # type: ignore[type-arg]
    """Number of tokens: ``131072``, or ``128k`` with k for 1024 and m for 1024 k."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = _LENGTH.fullmatch(str(value).strip())
        if match is None:
            self.fail(f"{str(value)[:40]!r} is not a number of tokens, such as 131072 or 128k", param, ctx)
        return int(match[1]) * FACTORS[match[2].lower()]


def _in_words(kind: click.IntRange | click.FloatRange) -> str:
    """Return the range of a number as ``--help`` and errors show it, such as ``at least 1``."""
    if kind.min is not None and kind.max is not None and not kind.min_open:
        return f"from {kind.min:,.10g} to {kind.max:,.10g}"
    limits = [f"{'above' if kind.min_open else 'at least'} {kind.min:,.10g}"] if kind.min is not None else []
    return " and ".join([*limits, *([f"at most {kind.max:,.10g}"] if kind.max is not None else [])])


class Whole(click.IntRange):
    """Whole number in a range."""

    name = "integer"

    def _describe_range(self) -> str:
        return _in_words(self)


class Number(click.FloatRange):
    """Finite number in a range; click itself accepts NaN in every range, and infinity."""

    name = "number"

    def _describe_range(self) -> str:
        return _in_words(self)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class Known(click.ParamType):  # type: ignore[type-arg]
    """Any name; the known names are offered by shell completion."""

    name = "name"

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value).strip()

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in self.names if name.startswith(incomplete)]


class StrategyName(Known):
    """Name of a strategy, an alias of one, or ``package.module:Class``; others are refused without importing torch."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        name = super().convert(value, param, ctx)
        if ":" in name:
            refuse_missing_module(name)
        try:
            return find(name).name
        except UnknownName as error:
            raise UnknownStrategyError(str(error)) from None


def refuse_missing_module(target: str) -> None:
    """Raise `UsageError` if no module of ``module:name`` is installed or in the current folder; imports nothing."""
    module, colon, _ = target.partition(":")
    package, folder = module.partition(".")[0], os.getcwd()
    with suppress(ValueError):  # a module without a spec
        if package and colon and (PathFinder.find_spec(package, [folder]) is None and find_spec(package) is None):
            names = [entry.name for entry in islice(os.scandir(folder), 500)]
            modules = [name.removesuffix(".py") for name in names if name.endswith(".py") or "." not in name]
            raise UsageError(
                f"{target!r}: no module {package!r} is installed or in the current folder{nearest(package, modules)}"
            )


class ListOf(click.ParamType):  # type: ignore[type-arg]
    """List of values separated by commas."""

    name = "list"

    def __init__(self, kind: click.ParamType[Any]) -> None:
        self.kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[Any]:
        values = [self.kind.convert(part, param, ctx) for part in str(value).split(",") if part.strip()]
        return values or self.fail("the list is empty", param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, comma, last = incomplete.rpartition(",")
        return [CompletionItem(f"{before}{comma}{item.value}") for item in self.kind.shell_complete(ctx, param, last)]
