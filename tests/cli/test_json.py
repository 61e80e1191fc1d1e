"""JSON of commands: each names its schema, has its fields, and the schema is in docs/file-formats.md."""

from __future__ import annotations

import json
import math
import re

import pytest

pytest.importorskip("torch", reason="strategies and kernels need it")

from ringprof import cli
from ringprof.common.json_object import json_text
from ringprof.proof.result import TensorCheck
from tests.cli.test_width import CHECK
from tests.paths import ROOT


@pytest.mark.parametrize(
    ("command", "schema", "rows", "fields"),
    [
        ("advise --seq 64 --documents 40,24 --gpus-per-node 4", "balance", "rows",
         "strategy params reason layout busiest steps needed"),
        ("advise --seq 64 --documents 40,24 --gpus-per-node 4 --cp-sizes 2,4 --tokens-per-rank 16", "cp-sizes", "rows",
         "ranks size documents documents_share tokens_share flops_share sequences steps filled busiest time_ns reason"),
        ("kernels", "kernels", "rows",
         "kernel here types head_dim tried windows documents softcap deterministic delta grouped_heads proofs"),
        ("calibrate --rates --device cpu --seq 64 --heads 2 --head-dim 8", "kernel-rates", "rates",
         "kernel mask forward_ns backward_ns forward_tflops backward_tflops reason"),
        ("check json:thing --layout zigzag", "attention-check", "sent", "operations size_bytes"),
    ],
)  # fmt: skip
def test_json_has_the_fields_of_its_schema(
    command: str, schema: str, rows: str, fields: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("ringprof.cli.check.run_check", lambda _: CHECK)
    monkeypatch.setattr("ringprof.prediction.measured_rates.WARM_UP", 0)
    monkeypatch.setattr("ringprof.prediction.measured_rates.CALLS", 1)
    cli.run([*command.split(), "--format", "json"])
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == f"ringprof.{schema}/1"
    assert document[rows] and all(set(row) == set(fields.split()) for row in document[rows])
    others = {
        "attention-check": "equal workload ranks layout device calls call variant errors seen reasons skipped",
        "kernel-rates": "device device_type workload",
    }
    assert set(document) == {"schema", rows, *others.get(schema, "").split()}


def test_every_schema_is_documented() -> None:
    source = "".join(path.read_text() for path in (ROOT / "ringprof").rglob("*.py"))
    used = set(re.findall(r"\"(ringprof\.[a-z-]+/[0-9])\"", source))
    documented = re.findall(r"`(ringprof\.[a-z-]+/[0-9])`", (ROOT / "docs/file-formats.md").read_text())
    assert len(used) >= 15 and used == {*documented} and len(documented) == len(used)


def test_non_finite_numbers_are_null_in_json() -> None:
    """Write NaN and infinity as null: JSON has neither, and other readers refuse what Python's encoder writes."""
    worst = TensorCheck(
        max_abs=math.nan, rms=math.inf, kernel_rms=0.25, allowed_rms=1.0, rank=0, wrong_tokens=2, first_token=0,
        first_rank=0,
    )  # fmt: skip
    text = json_text({"of Größe": [worst, -math.inf]})
    assert text.isascii() and text.endswith("]\n}\n")
    (row, last) = json.loads(text, parse_constant=lambda name: pytest.fail(name))["of Größe"]
    assert (row["max_abs"], row["rms"], row["kernel_rms"], last) == (None, None, 0.25, None)
