"""The command group: each command is a module that is loaded on its first use, so ``ringprof --help`` is instant."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem, FishComplete, add_completion_class

from ringprof._version import __version__
from ringprof.cli.write import say
from ringprof.errors import RingprofError, UsageError, install_command, nearest

GROUPS = {
    "Analyze": {
        "report": "Show where the time of a run, trace or log went.",
        "compare": "Compare runs, traces and logs, or score a saved prediction.",
        "plot": "Draw a plot as PNG, SVG or PDF.",
        "export": "Merge all ranks into one trace for Perfetto.",
    },
    "Record": {
        "record": "Run a strategy, check it, time it and profile it.",
        "bench": "Record many strategies: each once, or in turns until one is faster.",
        "check": "Compare a distributed attention with dense attention.",
        "calibrate": "Measure a machine, to predict runs on it.",
    },
    "Plan": {
        "predict": "Predict a run on a given cluster, or replay one with changes.",
        "advise": "Recommend a strategy for a cluster, or compare load balance.",
    },
    "List": {
        "strategies": "List the strategies, or the parameters of one strategy.",
        "kernels": "List the attention kernels and their features.",
    },
}
"""Help line of each command by its name, by the heading under which ``--help`` lists it."""
COMMANDS = {name: line for group in GROUPS.values() for name, line in group.items()}
"""Help line of each command by its name; the module of that name defines it as ``command``."""
_FORMER_COMMANDS = {
    "logs": "report FILE...", "runs": "report FOLDER", "settle": "compare FORECAST MEASURED...",
    "tune": "bench --until-decided", "what-if": "predict --replay RUN", "balance": "advise without --machine",
}  # fmt: skip
"""Command line that does the work of a former command, by the name of that command."""


class _Fish(FishComplete):
    """Completion for fish that keeps commas: click's script cuts a completion at its first comma."""

    source_template = FishComplete.source_template.replace("string split ", "string split -m 1 ")


add_completion_class(_Fish)

LEFT = 128 + signal.SIGPIPE
"""Exit code after the reader closed the output (`| head`): not an error, and nothing more can be printed."""


@contextmanager
def _exit_if_pipe_closes() -> Iterator[None]:
    """Exit with `LEFT` on a closed pipe; click would exit with 1, which means that a condition holds."""
    try:
        yield
    except BrokenPipeError:
        raise click.exceptions.Exit(LEFT) from None


class _LazyCommands(click.Group):
    """Command group that imports the module of a command when the command is used."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _exit_if_pipe_closes():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _exit_if_pipe_closes():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return _OWN_COMMANDS.get(cmd_name)
        module = f"ringprof.cli.{cmd_name}"
        with nullcontext() if module in sys.modules else _quick_start():
            command: click.Command = import_module(module).command
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the name of a command without importing the modules of the commands."""
        return [CompletionItem(name, help=help) for name, help in COMMANDS.items() if name.startswith(incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for heading, commands in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), line) for name, line in commands.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in {*COMMANDS, *_OWN_COMMANDS, *_FORMER_COMMANDS} and _is_path(name):
            args = ["report", *args]
        elif not name.startswith("-"):
            self.refuse_unknown(name)
        return super().resolve_command(ctx, args)

    def refuse_unknown(self, name: str) -> None:
        """Raise an error for the name of no command, with the nearest one or the one that took its place."""
        if name in _FORMER_COMMANDS:
            path = f" (the path: ringprof report ./{name})" if os.path.exists(name) else ""
            raise UsageError(f"{name} is now: ringprof {_FORMER_COMMANDS[name]}{path}")
        if name not in COMMANDS and name not in _OWN_COMMANDS:
            raise click.UsageError(
                f"no command {name!r}{nearest(name, [*COMMANDS, *_OWN_COMMANDS])}; there are: {', '.join(COMMANDS)}"
            )


def _is_path(text: str) -> bool:
    """Return whether a word in the place of a command is a path to report on: a file, a URL, or ``-`` for a pipe."""
    return text == "-" or "/" in text or text.endswith((".json", ".json.gz")) or os.path.exists(text)


@click.command("help")
@click.argument("name", metavar="[COMMAND]", required=False)
@click.pass_context
def _help(context: click.Context, name: str | None) -> None:
    """Show the help of COMMAND, or the list of all commands."""
    parent = context.parent
    assert parent is not None and isinstance(parent.command, _LazyCommands)
    if name is not None:
        parent.command.refuse_unknown(name)
        command = parent.command.get_command(parent, name)
        assert command is not None
        parent = click.Context(command, info_name=name, parent=parent)
    click.echo(parent.get_help())


@click.command("version")
def _version() -> None:
    """Show the version."""
    click.echo(f"ringprof, version {__version__}")


_OWN_COMMANDS = {"help": _help, "version": _version}
"""Commands on the command line itself, beside those of `COMMANDS`."""


@contextmanager
def _quick_start() -> Iterator[None]:
    """Import modules in two thirds of the time: without garbage collection and without OpenBLAS threads."""
    variable = "OPENBLAS_NUM_THREADS"
    previous = os.environ.get(variable)
    gc.disable()
    # OpenBLAS starts one thread per CPU when NumPy is imported. Child processes keep the original setting.
    os.environ.setdefault(variable, "1")
    try:
        yield
    finally:
        if previous is None:
            del os.environ[variable]
        gc.freeze()
        gc.enable()


@click.group(
    cls=_LazyCommands, invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="`ringprof PATH` is `ringprof report PATH`; `ringprof help COMMAND` is `ringprof COMMAND --help`.",
)  # fmt: skip
@click.version_option(__version__, prog_name="ringprof")
@click.pass_context
def group(context: click.Context) -> None:
    """Profile distributed training: record ring attention, read PyTorch traces, and see where the time goes.

    \b
    ringprof report traces/run.json                  show where the time of a run or trace went
    ringprof compare traces/main traces/branch       show what changed between two runs
    ringprof record --strategy zigzag --seq 512k     record on all GPUs of this node
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
    else:
        _refuse_removed_folder()


def _refuse_removed_folder() -> None:
    """Raise `UsageError` where the current folder is gone: relative paths lead nowhere, and torch does not load."""
    try:
        os.getcwd()
    except FileNotFoundError:
        try:
            name = os.readlink("/proc/self/cwd").removesuffix(" (deleted)")
        except OSError:  # not Linux
            name = os.environ.get("PWD", ".")
        raise UsageError(f"{name}: the current folder has been removed: change to another one with cd") from None


def run(args: list[str]) -> int:
    """Run one command line and return its exit code; every error becomes one line on stderr."""
    try:
        result = group.main(args, prog_name="ringprof", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except (click.exceptions.Abort, KeyboardInterrupt):
        return _fail("interrupted", 130)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        return _fail(_usage_message(error), 2)
    except RingprofError as error:
        return _fail(str(error), error.exit_code)
    except ImportError as error:
        package = str(error.name).partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and package in ("torch", "psutil"):
            return _fail(f"this needs {package}, which is not installed: {install_command('record')}", 2)
        # The package is installed but broken: a system library is missing, or there is not enough memory.
        return _fail(f"a package cannot be loaded: {error}", 2)
    except OSError as error:
        # A path from the user may be invalid in any way: too long, a loop of links, on a failed disk.
        path = f"{error.filename}: " if error.filename else ""
        return _fail(f"{path}{error.strerror or error}", 2)


_RANKS = (
    "--nproc", "--nproc-per-node", "--nproc_per_node", "--world-size", "--gpus", "--num-gpus", "--ranks", "--nodes",
    "--gpus-per-node",
)  # fmt: skip
"""Options for the number of ranks of other launchers, and of predictions."""
_FORMER_OPTIONS = {
    "--hosts": "--nodes", "--gpus-per-host": "--gpus-per-node", "--ranks-per-host": "--ranks-per-node",
    "--check": "--against", "--world": "--nodes and --gpus-per-node", "--measure": "ringprof calibrate --rates",
}  # fmt: skip
"""Present options, or the command, by former options."""
_NUMBERS = {
    r"is not a valid (?:float|number)\.": "is not a number", r"is not a valid integer\.": "is not a whole number",
    r"is not in the range (.*)\.": r"is not \1",
}  # fmt: skip
"""Words for what click says of a number that it refuses."""


def _usage_message(error: click.ClickException) -> str:
    """Return the message of a usage error: what is wrong, the option that was meant if it is known, where help is."""
    if not isinstance(error, click.UsageError) or not error.ctx:
        return error.format_message()
    help_line = f"see: {error.ctx.command_path} --help"
    if isinstance(error, click.NoSuchOption) and (meant := _meant_option(error.option_name, error.ctx.command)):
        return f"{error.message} ({meant}; {help_line})"
    message = error.format_message()
    for pattern, words in _NUMBERS.items():
        message = re.sub(pattern, words, message)
    return f"{message} ({help_line})"


def _meant_option(name: str, command: click.Command) -> str:
    """Return what to write for an option of other programs or of earlier versions."""
    name = name.partition("=")[0]
    options = {option.name: option for option in command.params}
    formats = options["form"].type if "form" in options else None
    if isinstance(formats, click.Choice) and name[2:] in formats.choices:
        return f"use --format {name[2:]}"
    now = _FORMER_OPTIONS.get(name, "")
    if now.startswith("ringprof") or any(now.partition(" ")[0] in option.opts for option in command.params):
        return f"now {now}"
    from ringprof.cli.benchmark_logs import LOG_SETTINGS  # imported here, since few command lines are wrong

    if "settings" in options and (setting := name[2:].removeprefix("no-")) in LOG_SETTINGS:
        return f"now --setting {setting}=VALUE"
    show = next((option for option in command.params if option.name == "show"), None)
    if show is not None and name[2:] in show.type.kind.choices:  # type: ignore[attr-defined]
        return f"now --show {name[2:]}"
    return "--world sets the number of ranks" if name in _RANKS and "world" in options else ""


def _fail(message: str, code: int) -> int:
    say(f"ringprof: {message}")
    return code
