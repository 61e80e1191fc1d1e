"""Names of the strategies' public interface that changed keep their old spelling for one release."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="strategies need torch")

import ringprof.strategies
from ringprof.strategies.algorithms.ring import Ring
from ringprof.strategies.base import Shape

SHAPE = Shape(batch=1, seq=64, heads=4, kv_heads=2, head_dim=16)


def test_a_class_may_define_the_old_name() -> None:
    with pytest.warns(DeprecationWarning, match="Mine.unfit is now called why_unsupported"):

        class Mine(Ring):
            @classmethod
            def unfit(cls, shape: Shape, size: int, **params: object) -> str | None:
                return super().unfit(shape, size, **params) or f"{cls.__name__} refuses"  # type: ignore[misc]

    assert Mine.why_unsupported(SHAPE, 2) == "Mine refuses"
    assert Mine.why_unsupported(SHAPE, 3) == Ring.why_unsupported(SHAPE, 3) != "Mine refuses"


def test_the_old_name_can_be_called() -> None:
    class Newer(Ring):
        @classmethod
        def why_unsupported(cls, shape: Shape, size: int, **params: object) -> str | None:
            return "never"

    assert Newer.unfit(SHAPE, 2) == "never"  # type: ignore[attr-defined]
    assert Ring.unfit(SHAPE, 2) is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("own_block", "local_block"), ("over", "forward_over_ring"), ("cut", "sharded_mask"),
        ("placed", "with_placement"), ("computing", "layout_while_computing"),
        ("smaller_v_travels", "sends_smaller_v"),
    ],
)  # fmt: skip
def test_renamed_methods_can_be_called_by_their_old_names(old: str, new: str) -> None:
    assert getattr(Ring, old) == getattr(Ring, new)


def test_the_old_exception_is_the_new_one() -> None:
    with pytest.warns(DeprecationWarning, match="now called Unsupported"):
        assert ringprof.strategies.Unfit is ringprof.strategies.Unsupported


def test_unknown_names_are_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Fit'"):
        _ = ringprof.strategies.Fit
