"""A seeded sample of the small bugs that mutmut can plant."""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.file_mutation import Mutation, MutationVisitor, deep_replace
from mutmut.mutation.mutators import mutation_operators
from mutmut.mutation.pragma_handling import IgnoredCode

ROOT = Path(__file__).resolve().parents[2]
NEED_A_GPU = ("copy_engine.py", "fused.py")
"""Files of ``strategies/`` that nothing runs without CUDA; their tests are those marked ``gpu``."""


@dataclass(frozen=True)
class Mutant:
    """One change of one expression from ``before`` to ``after``; ``text`` is the whole changed file."""

    file: str
    line: int
    column: int
    function: str
    before: str
    after: str
    text: str


class Places(MutationVisitor):
    """mutmut's mutations of a whole module; mutmut itself leaves out decorated functions and tables."""

    def __init__(self) -> None:
        super().__init__(mutation_operators, IgnoredCode(set(), set(), set()))

    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.FunctionDef):
            return False
        if isinstance(node, cst.If) and getattr(node.test, "value", "") == "TYPE_CHECKING":
            return True
        if isinstance(node, cst.Assign) and getattr(node.targets[0].target, "value", "") == "__all__":
            return True
        return bool(super()._skip_node_and_children(node))


def places(path: Path) -> list[list[Callable[[], Mutant]]]:
    """Return functions that make the mutants of a file: one list per place in the code."""
    text = path.read_text("utf-8")
    wrapper, visitor, functions = MetadataWrapper(cst.parse_module(text)), Places(), _functions(text)
    module = wrapper.visit(visitor)
    positions = wrapper.resolve(PositionProvider)

    def maker(mutation: Mutation, position: Any) -> Callable[[], Mutant]:
        def make() -> Mutant:
            before, after = (module.code_for_node(node) for node in (mutation.original_node, mutation.mutated_node))
            changed = deep_replace(module, mutation.original_node, mutation.mutated_node)
            assert isinstance(changed, cst.Module)
            name = functions.get(position.line, "")
            file = str(path.relative_to(ROOT))
            return Mutant(file, position.line, position.column, name, before.strip(), after.strip(), changed.code)

        return make

    makers: dict[tuple[int, int], list[Callable[[], Mutant]]] = defaultdict(list)
    for mutation in visitor.mutations:
        # No behaviour depends on the wording of a sentence.
        if isinstance(mutation.original_node, cst.SimpleString) and " " in mutation.original_node.raw_value:
            continue
        position = positions[mutation.original_node].start
        makers[position.line, position.column].append(maker(mutation, position))
    return list(makers.values())


def _functions(text: str) -> dict[int, str]:
    """Return the name of the innermost function or class of each line."""
    names = {}
    for node in ast.walk(ast.parse(text)):  # breadth first, so inner ones overwrite outer ones
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.update(dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), node.name))
    return names


def sample(packages: Iterable[str], number: int, seed: int) -> list[Mutant]:
    """Draw mutants of ``number`` different places in these folders, in the order of the files."""
    generator = random.Random(seed)
    files = [path for folder in packages for path in sorted((ROOT / folder).rglob("*.py"))]
    makers = [makers for path in files if path.name not in NEED_A_GPU for makers in places(path)]
    chosen = sorted(generator.sample(range(len(makers)), min(number, len(makers))))
    return [generator.choice(makers[index])() for index in chosen]
