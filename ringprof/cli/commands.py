"""The commands: each is a module, loaded when it is first used, so that ``ringprof --help`` is instant."""

from __future__ import annotations

import gc
import os
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
from ringprof.errors import RingprofError, UsageError, nearest

COMMANDS = {
    "record": "Run a strategy, check it, time it and profile it.",
    "balance": "Compare how evenly layouts deal out packed documents.",
    "bench": "Record every combination of strategies, lengths and kernels.",
    "check": "Compare any attention over several ranks with dense attention.",
    "compare": "Set runs, traces, tables and logs side by side.",
    "export": "Merge all ranks into one trace for Perfetto.",
    "kernels": "List the attention kernels and what each can.",
    "logs": "Read benchmark logs into one table and audit them.",
    "predict": "Foresee a run on a cluster that is not here.",
    "what-if": "Replay a recorded run with something changed.",
    "advise": "Find the strategy and degrees for a problem and a cluster.",
    "calibrate": "Measure a machine, so that runs on it can be foreseen.",
    "plot": "Draw a plot as PNG, SVG or PDF.",
    "report": "Show where the time of a run or trace went.",
    "runs": "List the runs of a folder.",
    "strategies": "List the strategies, or one strategy's parameters.",
}
"""In one line for --help, by name; each is ``command`` of the module of its name."""


class _Fish(FishComplete):
    """A list with commas in it is one completion: click's script cuts it at its first comma."""

    source_template = FishComplete.source_template.replace("string split ", "string split -m 1 ")


add_completion_class(_Fish)

LEFT = 128 + signal.SIGPIPE
"""The exit code where the reader of our output left (`| head`): not an error, and nothing more can be said."""


@contextmanager
def _readers_may_leave() -> Iterator[None]:
    """Click would exit with 1, which says that a condition holds."""
    try:
        yield
    except BrokenPipeError:
        raise click.exceptions.Exit(LEFT) from None


class _LazyCommands(click.Group):
    """Loads a command's module when the command is used, and turns errors into one line."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _readers_may_leave():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _readers_may_leave():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = f"ringprof.cli.{cmd_name.replace('-', '_')}"
        with nullcontext() if module in sys.modules else _quick_start():
            command: click.Command = import_module(module).command
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Without loading the commands."""
        return [CompletionItem(name, help=help) for name, help in COMMANDS.items() if name.startswith(incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(
                f"no command {args[0]!r}{nearest(args[0], COMMANDS)}; there are: {', '.join(COMMANDS)}"
            )
        return super().resolve_command(ctx, args)


@contextmanager
def _quick_start() -> Iterator[None]:
    """Load modules in two thirds of the time: nothing of them is garbage, and no report multiplies matrices."""
    variable = "OPENBLAS_NUM_THREADS"
    given = os.environ.get(variable)
    gc.disable()
    # NumPy's library starts a thread for every CPU as it is loaded. Processes started later are not meant.
    os.environ.setdefault(variable, "1")
    try:
        yield
    finally:
        if given is None:
            del os.environ[variable]
        gc.freeze()
        gc.enable()


@click.group(cls=_LazyCommands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ringprof")
@click.pass_context
def group(context: click.Context) -> None:
    """Record ring attention (context parallelism) and see where its time goes.

    \b
    ringprof record --strategy burst --seq 524288    record on all GPUs of this host
    ringprof report traces/run.json                  show the newest run
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
    """Run one command line and return its exit code, every error as one line on stderr."""
    try:
        result = group.main(args, prog_name="ringprof", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except (click.exceptions.Abort, KeyboardInterrupt):
        return _fail("interrupted", 130)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        return _fail(error.format_message() + _hint(error), 2)
    except RingprofError as error:
        return _fail(str(error), error.exit_code)
    except ImportError as error:
        package = str(error.name).partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and package in ("torch", "psutil"):
            return _fail(f"this needs {package}, which is not installed: pip install 'ringprof[record]'", 2)
        # One that is installed, and broken: a library of the system's is missing, or there is no memory for it.
        return _fail(f"a package cannot be loaded: {error}", 2)
    except OSError as error:
        # Nothing is assumed about a path that the user gives: too long, in a circle, on a disk that is gone.
        named = f"{error.filename}: " if error.filename else ""
        return _fail(f"{named}{error.strerror or error}", 2)


_RANKS = ("--nproc", "--nproc-per-node", "--nproc_per_node", "--world-size", "--gpus", "--num-gpus", "--ranks")
"""What other launchers call the number of ranks."""


def _hint(error: click.ClickException) -> str:
    if not isinstance(error, click.UsageError) or not error.ctx:
        return ""
    meant = ""
    if isinstance(error, click.NoSuchOption) and error.option_name.partition("=")[0] in _RANKS:
        known = {option.name for option in error.ctx.command.params}
        meant = "--world sets the number of ranks; " if "world" in known else ""
    return f" ({meant}see: {error.ctx.command_path} --help)"


def _fail(message: str, code: int) -> int:
    say(f"ringprof: {message}")
    return code
