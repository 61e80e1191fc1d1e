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
NEED_A_GPU = ("copies.py", "fused.py")
"""Files of ``strategies/`` that nothing runs without CUDA; their tests are those marked ``gpu``."""


@dataclass(frozen=True)
class Mutant:
    """One change at one place: ``before`` and ``after`` are the expression, ``text`` is the whole changed file."""

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
    """What makes each mutant of a file; a list for each place in the code."""
    text = path.read_text("utf-8")
    wrapper, visitor, functions = MetadataWrapper(cst.parse_module(text)), Places(), _functions(text)
    module = wrapper.visit(visitor)
    positions = wrapper.resolve(PositionProvider)

    def maker(mutation: Mutation, at: Any) -> Callable[[], Mutant]:
        def make() -> Mutant:
            before, after = (module.code_for_node(node) for node in (mutation.original_node, mutation.mutated_node))
            changed = deep_replace(module, mutation.original_node, mutation.mutated_node)
            assert isinstance(changed, cst.Module)
            name = functions.get(at.line, "")
            file = str(path.relative_to(ROOT))
            return Mutant(file, at.line, at.column, name, before.strip(), after.strip(), changed.code)

        return make

    found: dict[tuple[int, int], list[Callable[[], Mutant]]] = defaultdict(list)
    for mutation in visitor.mutations:
        # The wording of a sentence is nobody's behaviour.
        if isinstance(mutation.original_node, cst.SimpleString) and " " in mutation.original_node.raw_value:
            continue
        at = positions[mutation.original_node].start
        found[at.line, at.column].append(maker(mutation, at))
    return list(found.values())


def _functions(text: str) -> dict[int, str]:
    """The innermost function or class of each line."""
    names = {}
    for node in ast.walk(ast.parse(text)):  # breadth first: the inner come later
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.update(dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), node.name))
    return names


def sample(rooms: Iterable[str], number: int, seed: int) -> list[Mutant]:
    """Mutants of different places, in the order of the files."""
    chance = random.Random(seed)
    files = [path for room in rooms for path in sorted((ROOT / room).rglob("*.py")) if path.name not in NEED_A_GPU]
    every = [place for path in files for place in places(path)]
    chosen = sorted(chance.sample(range(len(every)), min(number, len(every))))
    return [chance.choice(every[index])() for index in chosen]
