"""Every kernel that public traces and projects are known to run is told as what it is."""

from __future__ import annotations

import pytest

from ringprof.analysis.kinds.classify import classify
from ringprof.analysis.kinds.kinds import KINDS
from tests.analysis.build import Builder, kind_names
from tests.analysis.kinds.truth import Row, rows, side

ROWS = rows()


def told(row: Row) -> str:
    """The kind of the row's kernel, launched as the row says."""
    b = Builder()
    for depth, name in enumerate(row.operators):
        (b.mark if name.startswith(("Optimizer", "nccl:", "merge")) else b.operate)(name, depth, 100 - depth)
    b.run(row.name, 200, 300, launched=50)
    return kind_names(classify(b.trace()))[0]


@pytest.mark.parametrize("kind", sorted({row.kind for row in ROWS}))
def test_every_kernel_of_the_table_is_told(kind):
    wrong = [(found, row) for row in ROWS if row.kind == kind and (found := told(row)) != kind]
    if kind == "optimizer":
        # Launched before its trace began: no operator says that this product is an optimizer's.
        wrong = [(found, row) for found, row in wrong if row.operators or "addcmul" not in row.name]
    assert not wrong


def test_nothing_is_mistaken_for_communication_or_attention_nor_they_for_it():
    assert not [(row.kind, found, row.name) for row in ROWS if side(found := told(row)) != side(row.kind)]


def test_the_table_holds_every_kind_that_a_kernel_can_be():
    assert set(KINDS) - {row.kind for row in ROWS} == {"copy_engine", "other", "other_groups"}
