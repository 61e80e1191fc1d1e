"""Imports are at the top of a module, except for slow modules that only some functions need."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ringprof.cli.commands import COMMANDS

ROOT = Path(__file__).parents[1]
SLOW = {
    "torch", "pandas", "matplotlib", "bokeh", "jinja2", "rich", "joblib", "distributed", "fsspec", "sqlite3", "hta",
    "multiprocessing", "numpy", "pyarrow", "psutil", "triton", "webbrowser", "hashlib", "torch.distributed.fsdp",
}  # fmt: skip
"""Modules that take longer to import than reading a small trace, or are not installed everywhere."""
OWN_SLOW = {
    "ringprof.report.page.html", "ringprof.report.page.pages", "ringprof.report.plots", "ringprof.report.notebook",
    "ringprof.printed.tables", "ringprof.printed.benchmarks", "ringprof.prediction", "ringprof.recording",
    "ringprof.printed.communication.analyse", "ringprof.cli.benchmark_logs",
}  # fmt: skip
"""Modules of ringprof that a report of a trace in a terminal does not need (tests/cli/test_start.py)."""
NOT_EVERYWHERE = {
    "pynvml", "zstandard", "compression", "flash_attn", "flash_attn_interface", "ring_flash_attn",
    "transformer_engine", "yunchang", "fla",
}  # fmt: skip
OTHERWISE = {
    "ringprof.cli": "signal handlers are installed before the commands are loaded",
    "ringprof.strategies.catalog": "versions are asked for by the list of strategies alone",
    "ringprof.strategies.kernels.merge": "compiles kernels where there is Triton",
    "ringprof.strategies.recurrent.kernels": "flash-linear-attention may be missing, and imports Triton",
    "ringprof.strategies.recurrent.registry": "flash-linear-attention may be missing, and imports Triton",
}


def file_of(module: str) -> Path | None:
    path = ROOT / module.replace(".", "/")
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.exists()), None)


def named(node: ast.Import | ast.ImportFrom, module: str) -> list[str]:
    """List the modules that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    path = file_of(module)
    assert path is not None
    levels = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    base = [*levels[: len(levels) - node.level + 1], *filter(None, [node.module])] if node.level else [node.module]
    name = ".".join(filter(None, base))
    return [f"{name}.{alias.name}" if file_of(f"{name}.{alias.name}") else name for alias in node.names]


def at_the_top(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.Try):
            yield from at_the_top(node.body)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            yield from at_the_top(node.body)


@cache
def loads(module: str) -> set[str]:
    """Collect all modules that importing a module imports, including its parent packages."""
    imported, waiting = set[str](), [module]
    while waiting:
        parts = waiting.pop().split(".")
        for name in (".".join(parts[:count]) for count in range(1, len(parts) + 1)):
            if name not in imported:
                imported.add(name)
                waiting.extend(directly(name))
    return imported


@cache
def directly(module: str) -> list[str]:
    path = file_of(module) if module.startswith("ringprof") else None
    if path is None:
        return []
    return [name for node in at_the_top(ast.parse(path.read_text()).body) for name in named(node, module)]


@cache
def late() -> list[tuple[str, int, str]]:
    """List the module, the line and the imported name of every import in a function."""
    imports = []
    for path in sorted((ROOT / "ringprof").rglob("*.py")) + sorted((ROOT / "ringprof" / "strategies").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for node in ast.walk(function):
                    if isinstance(node, (ast.Import, ast.ImportFrom)):
                        imports += [(module, node.lineno, name) for name in named(node, module)]
    return imports


def test_late_imports_are_slow_or_optional_modules() -> None:
    late_imports = sorted({*late()})
    assert len(late_imports) > 50
    wrong = []
    for module, line, name in late_imports:
        # Submodules of torch import more than torch itself.
        foreign = name.startswith("torch.") or name.partition(".")[0] in NOT_EVERYWHERE
        if not foreign and module not in OTHERWISE and not (SLOW | OWN_SLOW) & (loads(name) - loads(module)):
            wrong.append(f"{module}:{line}: {name}")
    assert not wrong, "\n".join(wrong)


def test_list_of_late_import_exceptions_is_current() -> None:
    assert set(OTHERWISE) <= {module for module, _, _ in late()}


WITHOUT_TORCH = """
import shlex, sys
class NotHere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "psutil"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NotHere())
from ringprof.cli import run
sys.exit(max(run(shlex.split(line)) for line in sys.argv[1:]))
"""


def without_torch(*lines: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, *lines]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})


def test_every_command_prints_help_without_torch() -> None:
    done = without_torch(*(f"{name} --help" for name in COMMANDS))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: ringprof") == len(COMMANDS)


def test_commands_needing_torch_explain_how_to_install_it(tmp_path: Path) -> None:
    run = ROOT / "traces" / "h200x4-zigzag-65536"
    cluster = "--seq 128k --nodes 1 --machine h200"
    lines = [
        "record --strategy burst --seq 1k", "bench --strategies burst --seq 1k", "check json:b --layout zigzag",
        "kernels", f"calibrate -o '{tmp_path}/m.json'", "strategies burst", "advise --seq 64k --documents 32k,32k",
        f"predict --strategy burst {cluster}", f"advise {cluster}", f"predict --replay '{run}' --hops copy",
    ]  # fmt: skip
    done = without_torch(*lines)
    assert done.returncode == 2
    messages = done.stderr.splitlines()
    assert len(messages) == len(lines), done.stderr
    for line, message in zip(lines, messages, strict=True):
        assert message.endswith("pip install '.[record]' in a clone of ringprof"), (line, message)


def test_strategies_are_listed_without_torch() -> None:
    done = without_torch("strategies")
    assert done.returncode == 0 and done.stderr == ""
    assert "double-ring" in done.stdout and "torch-cp" in done.stdout
