"""``ringprof strategies``: what there is, and what each takes."""

from __future__ import annotations

import click

from ringprof.cli.values import INFERENCE, STRATEGIES, Known
from ringprof.cli.write import text_style
from ringprof.strategies.catalog import CACHED, PEERS, SPECS


@click.command("strategies")
@click.argument("name", required=False, type=Known(STRATEGIES + INFERENCE))
def command(name: str | None) -> None:
    """List the strategies, or the parameters of strategy NAME (set with: ringprof record -p key=value).

    NAME may be package.module:Class, which imports that module.
    """
    style = text_style(None)
    click.echo(style.finish(style.fit("\n".join(_listing() if name is None else _parameters(name)))), nl=False)


def _listing() -> list[str]:
    ours, inference, theirs = (list(specs.values()) for specs in (SPECS, CACHED, PEERS))
    width = max(len(spec.name) for spec in ours + inference + theirs)
    lacking = {spec.name.partition("/")[0]: spec.install for spec in theirs if spec.missing()}
    return [
        *(f"{spec.name:<{width}}  {spec.summary} ({spec.reference})" for spec in ours),
        "",
        "for --phase prefill and decode, forward only:",
        *(f"{spec.name:<{width}}  {spec.summary} ({spec.reference})" for spec in inference),
        "",
        "other people's, called as they are:",
        *(f"{spec.name:<{width}}  {spec.summary} ({'not ' * bool(spec.missing())}installed)" for spec in theirs),
        *(f"to get {name}: {install}" for name, install in lacking.items()),
    ]


def _parameters(name: str) -> list[str]:
    from ringprof.record.resolve import load_strategy, strategy_errors
    from ringprof.strategies.registry import find, parameters

    strategy = load_strategy(name)
    with strategy_errors():
        spec, found = find(name), parameters(strategy)
    lines = [f"{name}: {spec.summary}" + (f" ({spec.reference})" if spec.reference else "")]
    if not found:
        return [*lines, "  no parameters"]
    width = max(len(parameter.name) for parameter in found)
    for parameter in found:
        default = "required" if parameter.required else f"default {_shown(parameter.default)}"
        lines.append(f"  {parameter.name:<{width}}  {parameter.kind}, {default}: {parameter.help}".rstrip(": "))
    return lines


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return "automatic" if default is None else str(default)
