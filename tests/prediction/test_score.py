"""A row of measurements is either understood, or not predicted: nothing is guessed silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

pytest.importorskip("torch", reason="names of strategies and kernels")

from ringprof.errors import InputError, UsageError
from ringprof.prediction.calibration import KernelSample, assumed_calibration, read_calibration
from ringprof.prediction.measured import read_rows, unknown_columns
from ringprof.prediction.network import Cluster
from ringprof.prediction.score import check_rows
from tests.prediction.test_kernel_model import block, law

ROW = {"strategy": "zigzag", "seq_global": "65536", "heads": "40", "n_gpus": "8", "time_ms": "40"}


def query_of(**changes: str) -> tuple[Any, str]:
    """Return the query of a row, and the reason if there is none."""

    def refuse(*_: object) -> Any:
        raise UsageError("reached")

    (checked,) = check_rows([{**ROW, **changes}], read_calibration("h200"), refuse, Cluster())
    return checked.measured.query, "" if checked.reason == "reached" else checked.reason


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ("pass", {"forward": False, "fwd": False, "FWD": False, "backward": True, "fwd+bwd": True, "": True}),
        ("causal", {"True": True, "t": True, "y": True, "1": True, "": True, "no": False, "FALSE": False, "f": False}),
    ],
)
def test_names_of_passes_and_masks_in_tables(column: str, words: dict[str, bool]) -> None:
    for word, expected in words.items():
        workload = query_of(**{column: word})[0].workload
        assert (workload.backward if column == "pass" else workload.causal) is expected


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("", "auto"), ("cuDNN 9.3", "cudnn"), ("FA2", "flash-attn"), ("flash-attn 2.4.3", "flash-attn"),
        ("flash_attn", "flash-attn"), ("Flash Attention v3", "flash-attn-3"), ("fa4", "flash-attn-4"),
        ("torch-flash", "torch-flash"),
    ],
)  # fmt: skip
def test_names_of_kernels(kernel: str, expected: str) -> None:
    assert query_of(kernel=kernel)[0].kernel == expected


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pass": "training"}, "pass 'training' is none of fwd, forward, bwd, backward"),
        ({"causal": "maybe"}, "causal 'maybe' is none of true"),
        ({"dtype": "int8"}, "dtype 'int8' is none of bf16"),
        ({"time_ms": "40 ms"}, "time_ms '40 ms' is no such number"),
        ({"time_ms": "-4"}, "time_ms '-4' is no such number"),
        ({"heads": ""}, "no heads"),
        ({"kernel": "triton"}, "a kernel that ringprof has not, 'triton'"),
        ({"strategy": "zigzag_llama3"}, "a strategy that ringprof has not"),
        ({"hardware": "A100-SXM4-80GB"}, "measured on A100, and the machine is H200"),
        ({"hosts": "2", "gpus_per_host": "3"}, "n_gpus 8 is not 2 hosts of 3"),
        ({"n_gpus": "15", "hosts": "2"}, "n_gpus 15 is not 2 hosts of 7"),
        ({"n_gpus": "12"}, "n_gpus 12 is not 1 hosts of 8"),
    ],
)
def test_a_row_with_an_unknown_value_is_not_predicted(changes: dict[str, str], reason: str) -> None:
    query, why = query_of(**changes)
    assert query is None and why.startswith(reason)


@pytest.mark.parametrize(
    ("changes", "hosts", "per_host"),
    [
        ({}, 1, 8), ({"n_gpus": "4"}, 1, 4), ({"n_gpus": "64"}, 8, 8), ({"n_gpus": "16", "gpus_per_host": "4"}, 4, 4),
        ({"n_gpus": "15", "hosts": "3"}, 3, 5), ({"n_gpus": "4", "gpus_per_host": "8"}, 1, 4),
        ({"n_gpus": "16.0", "hosts": "16"}, 16, 1),
    ],
)  # fmt: skip
def test_hosts_are_derived_from_table_columns(changes: dict[str, str], hosts: int, per_host: int) -> None:
    cluster = query_of(**changes)[0].cluster
    assert (cluster.hosts, cluster.gpus_per_host) == (hosts, per_host)


@pytest.mark.parametrize(
    "text",
    [
        "strategy,seq_global,heads,n_gpus,time_ms,window\nzigzag,65536,40,8,40,\n",
        "\ufeffStrategy, SEQ_global,Heads,n_gpus,time_ms,window\r\nzigzag,65536,40,8,40,\r\n",
        "strategy;seq_global;heads;n_gpus;time_ms;window\nzigzag;65536;40;8;40;\n",
        '"strategy"\t"seq_global"\t"heads"\t"n_gpus"\t"time_ms"\t"window"\nzigzag\t65536\t40\t8\t40\t\n',
    ],
)
def test_tables_written_by_spreadsheets_are_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_bytes(text.encode())
    rows = read_rows(str(tmp_path / "table.csv"))
    assert rows == [{**ROW, "window": ""}] and unknown_columns(rows) == ["window"]


@pytest.mark.parametrize(
    ("system", "pairwise"),
    [("TransformerEngine p2p", True), ("Megatron-RingAttention (TE p2p)", True), ("BurstAttention (torch)", False),
     ("MagiAttention cp_benchmark: ring_p2p", True), ("MagiAttention cp_benchmark: ulysses", False), ("", False)],
)  # fmt: skip
def test_programs_that_send_outside_a_batch_are_known_by_name(system: str, pairwise: bool) -> None:
    assert query_of(system=system)[0].pairwise == pairwise
    assert unknown_columns([{**ROW, "system": system}]) == []


@pytest.mark.parametrize(
    ("system", "kernel", "one_stream", "repacks"),
    [("MagiAttention cp_benchmark: ring_p2p", "flash-attn 3 (FFA for magi)", True, True),
     ("MagiAttention cp_benchmark: ring_p2p", "cudnn", True, False), ("TransformerEngine p2p", "fa3", False, False)],
)  # fmt: skip
def test_programs_with_copies_around_their_blocks_are_known_by_name(
    system: str, kernel: str, one_stream: bool, repacks: bool
) -> None:
    query = query_of(system=system, kernel=kernel)[0]
    assert (query.one_stream, query.repacks) == (one_stream, repacks)


def test_a_table_without_a_time_is_refused(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("strategy,seq_global,heads,n_gpus,time_s\nzigzag,65536,40,8,0.04\n")
    with pytest.raises(InputError, match="it needs strategy, seq_global, heads, n_gpus, time_ms"):
        read_rows(str(tmp_path / "table.csv"))


def test_a_rate_is_compared_with_the_kernel_at_any_length_not_with_the_longest_sample() -> None:
    """The samples are of 1024 to 4096 tokens, and the kernel's rate still grows: 600 TFLOP/s x L / (L + 300).

    At a million tokens it reaches 600: published rows between that and the longest sample's rate are possible.
    """
    samples = []
    for op in [block(length, length) for length in (1024, 2048, 4096)]:
        shape = {name: getattr(op, name) for name in ("phase", "q", "kv", "heads", "kv_heads", "head_dim", "causal")}
        samples.append(KernelSample(ns=law(op), origin="measured", source="a law", **shape))
    base = assumed_calibration("made-up", "a device of no known peak", 132, 80 << 30)
    kernel = replace(base.kernels[0], name="cudnn", samples=samples)
    machine = replace(base, kernels=[kernel], throttling=replace(base.throttling, value=0.0))
    longest_sample = max(sample.tflops for sample in samples)
    assert longest_sample < 560

    def flags(tflops: float) -> list[str]:
        row = {"strategy": "zigzag", "seq_global": "1048576", "heads": "32", "n_gpus": "1", "kernel": "cudnn",
               "pass": "fwd", "tflops": str(tflops)}  # fmt: skip
        (checked,) = check_rows([row], machine, lambda *_: (_ for _ in ()).throw(UsageError("no schedule")), Cluster())
        return [code for code, _ in checked.flags]

    assert 1.05 * longest_sample < 595 and flags(595) == [] and flags(700) == ["above_kernel"]
