"""The command group: each command is a module that is loaded on its first use, so ``ringprof --help`` is instant."""

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
    "balance": "Compare the load balance of layouts for packed documents.",
    "bench": "Record every combination of strategies, lengths and kernels.",
    "check": "Compare a distributed attention with dense attention.",
    "compare": "Compare runs, traces, kernel tables and benchmark logs.",
    "export": "Merge all ranks into one trace for Perfetto.",
    "kernels": "List the attention kernels and their features.",
    "logs": "Read benchmark logs into one table and audit them.",
    "predict": "Predict the performance of a run on a given cluster.",
    "what-if": "Replay a recorded run with changes, such as faster links.",
    "advise": "Recommend a strategy and its degrees for a given cluster.",
    "calibrate": "Measure a machine, to predict runs on it.",
    "plot": "Draw a plot as PNG, SVG or PDF.",
    "report": "Show where the time of a run or trace went.",
    "runs": "List the runs of a folder.",
    "strategies": "List the strategies, or the parameters of one strategy.",
}
"""Help line of each command by its name; the module of that name defines it as ``command``."""


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
            return None
        module = f"ringprof.cli.{cmd_name.replace('-', '_')}"
        with nullcontext() if module in sys.modules else _quick_start():
            command: click.Command = import_module(module).command
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the name of a command without importing the modules of the commands."""
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


@click.group(cls=_LazyCommands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ringprof")
@click.pass_context
def group(context: click.Context) -> None:
    """Profile distributed training: record ring attention, read PyTorch traces, and see where the time goes.

    \b
    ringprof record --strategy burst --seq 524288    record on all GPUs of this host
    ringprof report traces/run.json                  show where the time of the newest run went
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
        return _fail(error.format_message() + _hint(error), 2)
    except RingprofError as error:
        return _fail(str(error), error.exit_code)
    except ImportError as error:
        package = str(error.name).partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and package in ("torch", "psutil"):
            return _fail(f"this needs {package}, which is not installed: pip install 'ringprof[record]'", 2)
        # The package is installed but broken: a system library is missing, or there is not enough memory.
        return _fail(f"a package cannot be loaded: {error}", 2)
    except OSError as error:
        # A path from the user may be invalid in any way: too long, a loop of links, on a failed disk.
        path = f"{error.filename}: " if error.filename else ""
        return _fail(f"{path}{error.strerror or error}", 2)


_RANKS = ("--nproc", "--nproc-per-node", "--nproc_per_node", "--world-size", "--gpus", "--num-gpus", "--ranks")
"""Options of other launchers for the number of ranks."""


def _hint(error: click.ClickException) -> str:
    """Return where to find help on a usage error, and the right option for the number of ranks."""
    if not isinstance(error, click.UsageError) or not error.ctx:
        return ""
    suggestion = ""
    if isinstance(error, click.NoSuchOption) and error.option_name.partition("=")[0] in _RANKS:
        known = {option.name for option in error.ctx.command.params}
        suggestion = "--world sets the number of ranks; " if "world" in known else ""
    return f" ({suggestion}see: {error.ctx.command_path} --help)"


def _fail(message: str, code: int) -> int:
    say(f"ringprof: {message}")
    return code
