"""Features of a workload and of a recording that exclude or need each other: one table for options, requests and files.

Features are named like the parameters of the command line. A feature is set if its value is true, with these
exceptions: ``operator`` is set for a recurrence, ``phase`` for inference, ``hops`` for copy engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ringprof.errors import UsageError

_UNSET = {"operator": "attention", "phase": "training", "hops": "auto"}
_ALSO_UNSET = {"hops": "nccl"}
_NAMES = {"ranks_per_host": "ranks-per-node"}
_WITH_VALUE = ("operator", "phase", "hops")


class Combination(NamedTuple):
    """Features that exclude a feature, or of which it needs one; ``sentence`` is the refusal of any other use.

    The sentence names the feature as ``{feature}``, its value as ``{value}``, and an excluded one as ``{other}``.
    """

    feature: str
    excludes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    sentence: str = "{other} does not go with {feature}"


_SCORES_AND_HEADS = ("softcap", "sinks", "v_head_dim")
_AROUND_ATTENTION = "{feature} goes with --layer ddp or --layer fsdp2"

COMBINATIONS = (
    Combination("conv_width", needs=("operator",),
                sentence="{feature} {value} goes with a recurrence, such as --operator gdn"),
    Combination("operator", ("window_size", "prefix", "softcap", "sinks", "kv_length", "layer", "cp_sizes", "hops",
                             "param")),
    Combination("operator", ("no_causal",), sentence="{other}: {feature} reads the tokens in their order"),
    Combination("layers", needs=("layer",), sentence=_AROUND_ATTENTION),
    Combination("mlp_size", needs=("layer",), sentence=_AROUND_ATTENTION),
    Combination("checkpoint", needs=("layer",), sentence=_AROUND_ATTENTION),
    Combination("pattern", needs=("layer",), sentence=_AROUND_ATTENTION),
    Combination("recurrences", needs=("attention",),
                sentence="--pattern {value}: needs a layer of attention, which --strategy computes"),
    Combination("recurrences", ("no_causal",),
                sentence="{other}: a pattern's recurrences read the tokens in their order"),
    Combination("recurrent_strategy", needs=("recurrences",),
                sentence="{feature} goes with a --pattern that has recurrences, such as gdn,attention"),
    Combination("kv_length", needs=("phase",), sentence="{feature} goes with --phase prefill or --phase decode"),
    Combination("phase", needs=("kv_length",), sentence="{feature} needs --kv-length, the keys of each sequence"),
    Combination("phase", ("documents", "layer", "controls")),
    Combination("layer", ("controls", "cuda_graph", *_SCORES_AND_HEADS)),
    Combination("prefix", needs=("window_size", "no_causal"),
                sentence="{feature} {value} needs --window-size or, for a prefix LM, --no-causal:"
                " under a plain causal mask every token attends to the prefix already"),
    Combination("cp_sizes", ("controls", "cuda_graph", "layer", "phase", "documents", "window_size", "prefix",
                             "ranks_per_host", *_SCORES_AND_HEADS)),
    Combination("cuda_graph", ("cpu",), sentence="{feature} needs GPUs"),
    Combination("cuda_graph", ("hops",), sentence="{feature}: hops by copy engine need increasing counters, which a"
                " graph cannot replay: use --hops nccl"),
    Combination("cuda_graph", ("controls",),
                sentence="{feature}: the controls run other calls than the graph: leave --controls out"),
    Combination("hops", ("cpu",),
                sentence="{feature}: copy engines are GPUs'; on CPU hops go by gloo (leave --hops out)"),
)  # fmt: skip


def why_refused(values: Mapping[str, Any]) -> str | None:
    """Return why the values of these features, by name, do not go together; None if they do.

    ``causal`` stands for the feature ``no_causal``, and ``pattern`` for those that its operators make.
    """
    features = {
        name: value
        for name, value in values.items()
        if value and value not in (_UNSET.get(name, ""), _ALSO_UNSET.get(name, ""))
    }
    pattern = features.get("pattern") or ()
    features["no_causal"] = values.get("causal") is False
    features["attention"] = "attention" in pattern
    features["recurrences"] = ",".join(pattern) if set(pattern) - {"attention"} else ""
    for feature, excludes, needs, sentence in COMBINATIONS:
        if not features.get(feature):
            continue
        others = [other for other in excludes if features.get(other)]
        if others or (needs and not any(map(features.get, needs))):
            shown = {
                name: f"--{_NAMES.get(name, name.replace('_', '-'))}"
                + (f" {features[name]}" if name in _WITH_VALUE else "")
                for name in (feature, *others[:1])
            }
            return sentence.format(feature=shown[feature], value=features[feature], other=shown.get((*others, "")[0]))
    return None


def raise_if_refused(values: Mapping[str, Any]) -> None:
    """Raise `UsageError` where the values of these features do not go together."""
    if reason := why_refused(values):
        raise UsageError(reason)
