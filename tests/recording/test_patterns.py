"""Layers of hybrid models: several ranks train to the losses of one process, and every part is verified and counted."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="recording needs torch")

import msgspec
import torch
from torch import Tensor

from ringprof.cli import run as run_command
from ringprof.iteration.layer import Layers, LayersShard, parallelize
from ringprof.proof.verify_recurrence import recurrences_of
from ringprof.recording import RecordRequest, record
from ringprof.results.load import load
from ringprof.run import Run, read_run, write_run
from ringprof.strategies import create, create_recurrent
from ringprof.strategies.recurrent.state_strategies import StateScan
from ringprof.workload.workload import LayerAround, Workload
from tests.paths import ROOT
from tests.recording.layer_training import losses_of_one_process, losses_over_ranks
from tests.strategies.ranks import run_ranks

AROUND = LayerAround(
    parallel="ddp", mlp_size=24, pattern=("gdn", "mamba2", "simple-gla", "gla", "attention"),
    recurrent_strategy="state-scan",
)  # fmt: skip
WORK = Workload(batch=2, seq=32, heads=4, kv_heads=2, head_dim=8, layers=5, layer=AROUND)
DOCUMENTS = msgspec.structs.replace(WORK, documents=(5, 11, 16))
RATE = 0.1


def create_layers(strategy: Any, recurrent: Any, workload: Workload) -> Layers:
    torch.manual_seed(0)
    return Layers(workload, strategy, recurrent).double()


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float64).eps).sqrt() * weight


def plain_layers(x: Tensor, weights: dict[str, Tensor], workload: Workload) -> Tensor:
    lengths = workload.documents or (32,)
    spans = [(sum(lengths[:n]), sum(lengths[: n + 1])) for n in range(len(lengths))]
    for number, operator in enumerate(workload.pattern):
        prefix = f"layers.{number}."
        w = {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}
        normed = norm(x, w["before_attention.weight"])
        mixed = plain_attention if operator == "attention" else plain_recurrence
        x = x + torch.cat([mixed(normed[:, first:end], w, operator, first) for first, end in spans], 1)
        gate, up = (norm(x, w["before_mlp.weight"]) @ w["gate_up.weight"].T).chunk(2, -1)
        x = x + (gate * gate.sigmoid() * up) @ w["down.weight"].T
    return x


def plain_attention(x: Tensor, w: dict[str, Tensor], operator: str, first: int) -> Tensor:
    tokens = torch.arange(first, first + x.shape[1])
    angles = tokens[:, None] * 10_000.0 ** -(torch.arange(4, dtype=torch.float64) / 4)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def turned(x: Tensor) -> Tensor:
        pairs = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat([pairs.real, pairs.imag], -1)

    heads = (x @ w["qkv.weight"].T).unflatten(-1, (8, 8))
    q, k, v = turned(heads[:, :, :4]), turned(heads[:, :, 4:6]), heads[:, :, 6:]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) / 8**0.5
    seen = tokens <= tokens[:, None]
    out = torch.einsum(
        "bhqk,bkhd->bqhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v.repeat_interleave(2, 2)
    )
    return out.flatten(2) @ w["out.weight"].T


def plain_recurrence(x: Tensor, w: dict[str, Tensor], operator: str, first: int) -> Tensor:
    """Compute a recurrent layer as its papers write it, for each token in turn."""
    w = {name.removeprefix("mixer."): tensor for name, tensor in w.items() if name.startswith("mixer.")}
    heads, size, hidden = 4, 8, 32
    channels = hidden + 2 * (size if operator == "mamba2" else hidden)
    own, z, gates = (x @ w["projection.weight"].T).split([channels, hidden, w["projection.weight"].shape[0] - channels
                                                         - hidden], -1)  # fmt: skip
    if operator in ("gdn", "mamba2"):
        padded = torch.cat([torch.zeros_like(own[:, :1]).expand(-1, 3, -1), own], 1)
        convolved = sum(padded[:, back : back + own.shape[1]] * w["conv"][:, back] for back in range(4))
        assert isinstance(convolved, Tensor)
        own = convolved * convolved.sigmoid()
    scale, skipped, beta = size**-0.5, torch.zeros(()), None
    if operator == "mamba2":
        v = own[..., :hidden].unflatten(-1, (heads, size))
        k, q = (own[..., hidden + n * size :][..., :size].unsqueeze(2).expand(-1, -1, heads, -1) for n in (0, 1))
        dt = (gates + w["bias"]).exp().add(1).log()
        g, skipped, v, scale = -w["log_rates"].exp() * dt, v * w["skip"][:, None], v * dt.unsqueeze(-1), 1.0
    else:
        q, k, v = (part.unflatten(-1, (heads, size)) for part in own.chunk(3, -1))
        g = (gates.sigmoid().log() / 16).unflatten(-1, (heads, -1)) if operator == "gla" else None
        if operator == "simple-gla":
            g = gates.sigmoid().log() / 16
        if operator == "gdn":
            g = -w["log_rates"].exp() * (gates[..., :heads] + w["bias"]).exp().add(1).log()
            beta = gates[..., heads:].sigmoid()
            q, k = (part / part.norm(dim=-1, keepdim=True) for part in (q, k))
    assert g is not None
    state, outputs = torch.zeros(2, heads, size, size, dtype=x.dtype), []
    for t in range(x.shape[1]):
        state = state * g[:, t].reshape(2, heads, -1, 1).exp()
        written = v[:, t]
        if beta is not None:
            written = beta[:, t, :, None] * (written - (k[:, t].unsqueeze(-2) @ state).squeeze(-2))
        state = state + k[:, t].unsqueeze(-1) * written.unsqueeze(-2)
        outputs.append(scale * (q[:, t].unsqueeze(-2) @ state).squeeze(-2))
    out = torch.stack(outputs, 1) + skipped
    gate = z * z.sigmoid()
    if operator == "mamba2":
        mixed = norm(out.flatten(2) * gate, w["norm.weight"])
    else:
        mixed = norm(out, w["norm.weight"]).flatten(2) * gate
    return mixed @ w["out.weight"].T


def losses(rank: int, workload: Workload, attention: str) -> list[float]:
    """Train on all ranks; return the losses of the whole sequence, which are the mean of the ranks' losses."""
    assert workload.layer is not None
    strategy = create(attention, kernel="reference")
    recurrent = create_recurrent(str(workload.layer.recurrent_strategy), kernel="reference")
    model = parallelize(create_layers(strategy, recurrent, workload), workload.layer.parallel, torch.device("cpu"))
    return losses_over_ranks(model, recurrent, RATE)


def every_way(rank: int, workload: Workload) -> dict[str, list[float]]:
    ways = [("ddp", False, "state-scan"), ("fsdp2", True, "state-ring"), ("fsdp2", False, "state-a2a")]
    return {
        f"{parallel} {recomputed} {name}": losses(
            rank,
            msgspec.structs.replace(
                workload,
                layer=msgspec.structs.replace(
                    AROUND, parallel=parallel, checkpoint=recomputed, recurrent_strategy=name
                ),
            ),
            "ring",
        )
        for parallel, recomputed, name in ways
    }  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize("workload", [WORK, DOCUMENTS], ids=["one document", "documents"])
def test_hybrid_layers_train_to_the_losses_of_one_process(workload: Workload) -> None:
    truth = losses_of_one_process(create_layers(None, None, workload), partial(plain_layers, workload=workload), RATE)
    assert truth[-1] < truth[0] - 0.02, "it learns"
    for way, mine in run_ranks(2, every_way, workload)[0].items():
        assert mine == pytest.approx(truth, rel=1e-9), way


# --- counts -------------------------------------------------------------------------------------------


def test_flops_are_those_of_each_layers_operator() -> None:
    attention = Workload(batch=2, seq=32, heads=4, kv_heads=2, head_dim=8)
    alone = {part.operator: part for part in recurrences_of(WORK)}
    assert list(alone) == ["gdn", "mamba2", "simple-gla", "gla"]
    # Matrices of one layer: projections and output of 32 columns, and the MLP's 3 · 32 · 24.
    matrices = {
        "attention": 32 * (32 + 32 + 32), "gdn": 32 * (3 * 32 + 32 + 2 * 4) + 32 * 32,
        "mamba2": 32 * (32 + 2 * 8 + 32 + 4) + 32 * 32, "simple-gla": 32 * (3 * 32 + 32 + 4) + 32 * 32,
        "gla": 32 * (3 * 32 + 32 + 32) + 32 * 32,
    }  # fmt: skip
    around = sum(6 * 64 * (count + 3 * 32 * 24) for count in matrices.values())
    blocks = attention.model_flops() + sum(part.model_flops() for part in alone.values())
    assert WORK.model_flops() == blocks + around
    assert msgspec.structs.replace(WORK, layers=10).model_flops() == 2 * WORK.model_flops()
    # The rate of the attention kernels counts attention alone.
    assert WORK.exact_flops() == attention.exact_flops()
    for name, module in create_layers(None, None, WORK).named_children():
        assert name == "layers"
        for operator, layer in zip(WORK.pattern, module.children(), strict=True):
            counted = sum(x.numel() for n, x in layer.named_parameters() if x.dim() == 2 and not n.endswith("conv"))
            assert counted == WORK.parameters(operator)


@pytest.mark.parametrize(
    "changes",
    [{"layers": 4}, {"layer": msgspec.structs.replace(AROUND, recurrent_strategy=None)},
     {"layer": msgspec.structs.replace(AROUND, pattern=("gdn",)), "layers": 1}],
)  # fmt: skip
def test_a_pattern_that_is_none_is_refused(changes: Any) -> None:
    with pytest.raises(ValueError, match="pattern"):
        msgspec.structs.replace(WORK, **changes)


# --- a recording --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recording(tmp_path_factory: Any) -> Run:
    """Record a step of a hybrid model on 2 CPU ranks."""
    layer = LayerAround(
        parallel="fsdp2", mlp_size=64, pattern=("gdn", "gdn", "gdn", "attention"), recurrent_strategy="state-scan"
    )
    workload = Workload(seq=128, heads=4, kv_heads=2, head_dim=16, layers=4, layer=layer, dtype="bf16")
    folder = tmp_path_factory.mktemp("hybrid") / "run"
    record(RecordRequest(strategy="ring", workload=workload, output=str(folder), device="cpu", world=2, iters=1))
    return read_run(folder)


@pytest.mark.processes
def test_both_parts_of_a_hybrid_step_are_verified(recording: Run) -> None:
    verification = recording.verification
    assert verification is not None
    assert verification.timed is not None
    expected = {"out", "dq", "dk", "dv", "gdn out", "gdn dchannels", "gdn dweight", "gdn dg", "gdn dbeta"}
    assert expected <= set(verification.errors)
    assert set(verification.timed.errors) == expected
    assert recording.work is not None
    channels = {each.channel for each in recording.work[0].sent or ()}
    assert {"halo", "state_1"} < channels


def wrong_timed(rank: int) -> str:
    """Return why a recurrence that loses its state in the timed step is refused."""
    strategy, recurrent = create("ring", kernel="reference"), create_recurrent("state-scan", kernel="reference")
    layer = LayerAround(parallel="ddp", mlp_size=24, pattern=("gdn", "attention"), recurrent_strategy="state-scan")
    workload = msgspec.structs.replace(WORK, layers=2, layer=layer, dtype="fp32", seq=64)
    before = verified_before(strategy, recurrent, workload)
    untyped: Any = recurrent
    untyped.pass_state = lambda carry, takes, gives, known, x, reach, reverse: (known, [])
    shard = LayersShard.create(strategy, workload, torch.device("cpu"), recurrent=recurrent)
    shard.run_for_verification()
    from ringprof.errors import VerificationError
    from ringprof.proof.verify_recurrence import verify_timed_layers

    try:
        verify_timed_layers(shard, before, before)
    except VerificationError as error:
        return str(error)
    return ""


def verified_before(strategy: Any, recurrent: Any, workload: Workload) -> Any:
    from ringprof.proof.verify import verify
    from ringprof.proof.verify_recurrence import join_verifications, verify_recurrence

    (part,) = recurrences_of(workload)
    device = torch.device("cpu")
    verification = join_verifications(
        verify(strategy, workload, device), verify_recurrence(recurrent, part, device), "gdn"
    )
    return msgspec.structs.replace(verification, timed=timed_of(verification))


def timed_of(verification: Any) -> Any:
    from ringprof.run import TimedVerification

    return TimedVerification(
        seq=64, places=1, kv_head=0, same_output=True, errors=dict(verification.errors), took_ns=0
    )  # fmt: skip


@pytest.mark.processes
def test_a_state_that_is_lost_in_the_timed_step_is_found() -> None:
    assert "wrong result on rank" in run_ranks(2, wrong_timed)[0]


# --- a step of two H200 -------------------------------------------------------------------------------

HYBRID = ROOT / "tests/data/hybrid-4-layers"
"""Reduced traces of gdn,gdn,gdn,attention with FSDP2, 32,768 tokens, `state-scan` and ulysses."""


def test_a_recorded_step_is_explained_by_layer() -> None:
    run = load(HYBRID)
    assert not run.warnings
    layers, breakdown = run.layers(), run.breakdown().set_index("rank")
    for rank, rows in layers.groupby("rank"):
        assert rows["compute_ns"].sum() == breakdown.loc[rank, "compute_ns"]
        assert rows["exposed_ns"].sum() == breakdown.loc[rank, "exposed_comm_ns"]
        attention = rows.set_index("layer")["attention_ns"]
        assert list(attention.index[attention > 0]) == ["layers.3"]
    text = run.to_terminal(sections=["layers"])
    for number, operator in enumerate(("gdn", "gdn", "gdn", "attention")):
        assert f"layers.{number} {operator} " in text


def test_a_trace_with_more_recurrences_than_the_pattern_has_is_warned_of(tmp_path: Path) -> None:
    for path in HYBRID.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    run = read_run(HYBRID / "run.json")
    assert run.workload is not None
    assert run.workload.layer is not None
    layer = msgspec.structs.replace(run.workload.layer, pattern=("gdn", "gdn", "attention"))
    workload = msgspec.structs.replace(run.workload, layer=layer, layers=3)
    write_run(msgspec.structs.replace(run, workload=workload), tmp_path / "run.json")
    (warning, *_) = load(tmp_path).warnings
    assert "4 forward blocks, run.json counts 3" in warning.message


def test_a_pattern_asks_its_recurrent_strategy_all_that_a_recurrence_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setattr(StateScan, "operators", ("gdn",))
    common = ["record", "--layer", "ddp", "--seq", "64", "--device", "cpu", "--world", "2", "-o", str(tmp_path / "r")]
    assert run_command([*common, "--strategy", "ring", "--pattern", "gla,attention"]) == 2
    assert "strategy 'state-scan' cannot run this: it computes gdn alone" in capsys.readouterr().err
