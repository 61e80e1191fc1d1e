"""``ringprof strategies``: list the strategies, or the parameters of one."""

from __future__ import annotations

import click

from ringprof.cli.values import FOR_RECURRENCES, INFERENCE, STRATEGIES, StrategyName
from ringprof.cli.write import text_style
from ringprof.strategies.catalog import ALIASES, CACHED, PEERS, RECURRENT, RECURRENT_PEERS, SPECS, Spec, find
from ringprof.workload.recurrences import RECURRENCES


@click.command("strategies")
@click.argument("name", required=False, type=StrategyName(STRATEGIES + INFERENCE + FOR_RECURRENCES))
def command(name: str | None) -> None:
    """List the strategies, or the parameters of strategy NAME, which `ringprof record -p key=value` sets.

    NAME may be package.module:Class; the module is imported.
    """
    style = text_style(None)
    click.echo(style.finish(style.fit("\n".join(_listing() if name is None else _parameters(name)))), nl=False)


def _listing() -> list[str]:
    """List all strategies in lines: ringprof's own, those for inference, and third-party ones."""
    own, inference, recurrent, peers = (
        list(specs.values()) for specs in (SPECS, CACHED, RECURRENT, {**PEERS, **RECURRENT_PEERS})
    )
    width = max(len(spec.name) for spec in own + inference + recurrent + peers)
    missing = {spec.name.partition("/")[0]: spec.install for spec in peers if spec.missing()}
    return [
        *(f"{spec.name:<{width}}  {spec.summary} ({spec.reference})" for spec in own),
        f"Transformer Engine's names also work: {', '.join(f'{alias} for {name}' for alias, name in ALIASES.items())}",
        "",
        "for --phase prefill and decode, forward only:",
        *(f"{spec.name:<{width}}  {spec.summary} ({spec.reference})" for spec in inference),
        "",
        f"for linear recurrences, --operator {', '.join(RECURRENCES)}:",
        *(f"{spec.name:<{width}}  {spec.summary} ({spec.reference})" for spec in recurrent),
        "",
        "third-party implementations, called unchanged:",
        *(f"{spec.name:<{width}}  {spec.summary} ({_installation(spec)})" for spec in peers),
        *(f"to get {name}: {install}" for name, install in missing.items()),
    ]


def _installation(spec: Spec) -> str:
    """Return whether the packages of a strategy are installed, and in which version."""
    if spec.missing():
        return "not installed"
    version = spec.version()
    return f"installed, {version}" if version else "installed"


def _parameters(name: str) -> list[str]:
    """List the parameters of a strategy in lines, with type, default and help."""
    from ringprof.iteration.resolve import load_any_strategy, strategy_errors
    from ringprof.strategies.recurrent.state_strategies import RecurrentStrategy
    from ringprof.strategies.registry import parameters

    strategy = load_any_strategy(name)
    with strategy_errors():
        spec, listed = find(name), parameters(strategy)
    lines = [f"{name}: {spec.summary}" + (f" ({spec.reference})" if spec.reference else "")]
    if issubclass(strategy, RecurrentStrategy):
        lines.append(f"  for --operator {', '.join(strategy.operators)}")
    if not listed:
        return [*lines, "  no parameters"]
    width = max(len(parameter.name) for parameter in listed)
    for parameter in listed:
        default = "required" if parameter.required else f"default {_shown(parameter.default)}"
        lines.append(f"  {parameter.name:<{width}}  {parameter.kind}, {default}: {parameter.help}".rstrip(": "))
    return lines


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return "automatic" if default is None else str(default)
