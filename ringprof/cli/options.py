"""Options and commands with what click lacks: the nearest of several choices, and a heading for advanced options."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import click
from click.core import ParameterSource

from ringprof.errors import UsageError, nearest

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def all_of(*options: Decorator) -> Decorator:
    """Return a decorator that adds these options to a command, in this order."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def options_set() -> dict[str, str]:
    """Return the options that the command line sets, as ``--help`` writes them, by their names."""
    context = click.get_current_context()
    return {
        option.name: option.opts[0]
        for option in context.command.params
        if option.name and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
    }


def refuse_unused(words: str, *, used: Container[str] | None = None, unused: Container[str] = ()) -> None:
    """Raise `UsageError` for the first option on the command line that is in ``unused``, or not in ``used``.

    ``words`` follow the option in the message.
    """
    for name, shown in options_set().items():
        if name in unused or (used is not None and name not in used):
            raise UsageError(f"{shown}{words}")


class Advanced(click.Option):
    """Option that few need; `Command` lists it under a heading of its own."""


class Command(click.Command):
    """Command whose ``--help`` lists its `Advanced` options after the others."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, advanced in (("Options", False), ("Advanced options", True)):
            options = [option for option in self.get_params(ctx) if isinstance(option, click.Option)]
            of_heading = [option for option in options if isinstance(option, Advanced) is advanced]
            records = [record for option in of_heading if (record := option.get_help_record(ctx)) is not None]
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


class OneOf(click.Choice):  # type: ignore[type-arg]
    """One of several values; the message about another value has the nearest."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            shown = str(value)[:40]
            self.fail(f"{shown!r} is not one of {', '.join(self.choices)}{nearest(shown, self.choices)}", param, ctx)
