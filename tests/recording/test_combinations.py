"""Every rule of which features go together, asked through the table, a workload and a request."""

from __future__ import annotations

from typing import Any

import pytest

from ringprof.errors import UsageError
from ringprof.workload.combinations import COMBINATIONS, raise_if_refused, why_refused
from ringprof.workload.workload import Workload

VALUES: dict[str, Any] = {
    "operator": "gdn", "phase": "decode", "hops": "copy", "causal": False, "pattern": ("gdn", "attention"),
    "conv_width": 4, "window_size": 8, "prefix": 2, "softcap": 2.0, "sinks": "learned", "kv_length": 128,
    "layer": "ddp", "layers": 2, "mlp_size": 8, "checkpoint": True, "recurrent_strategy": "state-scan",
    "documents": (3, 5), "v_head_dim": 4, "controls": True, "cuda_graph": True, "cp_sizes": (2, 1), "cpu": True,
    "ranks_per_host": 2, "param": {"a": 1},
}  # fmt: skip
NEEDED = {
    "phase": ("kv_length",), "kv_length": ("phase",), "conv_width": ("operator",), "prefix": ("window_size",),
    "pattern": ("layer",), "recurrent_strategy": ("pattern", "layer"), "layers": ("layer",), "mlp_size": ("layer",),
    "checkpoint": ("layer",),
}  # fmt: skip
OF = {"no_causal": "causal", "recurrences": "pattern"}
"""Value that makes a feature that is none itself."""


def values_of(*features: str) -> dict[str, Any]:
    names = [OF.get(feature, feature) for feature in features]
    return {name: VALUES[name] for name in names + [needed for name in names for needed in NEEDED.get(name, ())]}


@pytest.mark.parametrize("name", VALUES)
def test_a_feature_alone_with_what_it_needs_is_taken(name: str) -> None:
    assert why_refused(values_of(name)) is None


def test_unset_features_go_with_all() -> None:
    unset = dict.fromkeys(VALUES, None) | {"operator": "attention", "phase": "training", "hops": "nccl", "causal": True}
    for name in VALUES:
        assert why_refused(unset | values_of(name)) is None


PAIRS = [(rule.feature, other) for rule in COMBINATIONS for other in rule.excludes]


@pytest.mark.parametrize(("feature", "other"), PAIRS)
def test_excluded_pairs_are_refused_by_a_sentence(feature: str, other: str) -> None:
    reason = why_refused(values_of(feature, other))
    assert reason is not None and "{" not in reason and "None" not in reason
    with pytest.raises(UsageError):
        raise_if_refused(values_of(feature, other))


@pytest.mark.parametrize("name", NEEDED)
def test_missing_needs_are_refused_by_a_sentence(name: str) -> None:
    reason = why_refused({name: VALUES[name]})
    assert reason is not None and "--" in reason and "{" not in reason


@pytest.mark.parametrize(("feature", "other"), PAIRS)
def test_a_workload_refuses_the_pairs_of_its_own_features(feature: str, other: str) -> None:
    own = Workload(seq=8, heads=4, kv_heads=4, head_dim=8)
    values = {name: value for name, value in values_of(feature, other).items() if name not in ("layer", "pattern")}
    fields = {"window" if name == "window_size" else name: value for name, value in values.items()}
    if fields.keys() <= set(own.__struct_fields__) and why_refused(values):
        with pytest.raises(ValueError, match="--"):
            Workload(seq=8, heads=4, kv_heads=4, head_dim=8, backward="phase" not in fields, **fields)
