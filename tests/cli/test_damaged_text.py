"""Logs and run files with changed, dropped, inserted and repeated bytes give a result, or exit code 2 and one line."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from ringprof import cli
from tests.paths import ROOT

LOGS = sorted((ROOT / "tests" / "data" / "logs").glob("*.txt"))
RUN = ROOT / "traces" / "h200x4-zigzag-65536"


def mutated(data: bytes, chance: random.Random, most: int) -> bytes:
    damaged = bytearray(data)
    for _ in range(chance.randrange(1, most)):
        offset, kind = chance.randrange(len(damaged)), chance.randrange(4)
        if kind == 0:
            damaged[offset] = chance.randrange(256)
        elif kind == 1:
            del damaged[offset : offset + chance.randrange(1, 60)]
        elif kind == 2:
            damaged[offset:offset] = chance.randbytes(chance.randrange(1, 20))
        else:
            other = chance.randrange(len(damaged))
            damaged[offset:offset] = damaged[other : other + chance.randrange(1, 200)]
    return bytes(damaged)


def check(arguments: list[str], capsys: pytest.CaptureFixture[str], seed: int) -> None:
    code = cli.run(arguments)
    err = capsys.readouterr().err
    assert code in (0, 2), (seed, err)
    assert code == 0 or err.count("\n") == 1, (seed, err)


def few_and_many(few: int, many: int) -> list[object]:
    return [few, pytest.param(many, marks=pytest.mark.long)]


@pytest.mark.parametrize("count", few_and_many(40, 4000))
@pytest.mark.parametrize("options", [(), ("--show", "rows")])
def test_a_damaged_log_is_read_or_refused(
    options: tuple[str, ...], count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, texts = tmp_path / "some.log", [log.read_bytes() for log in LOGS]
    for seed in range(count):
        chance = random.Random(seed)
        path.write_bytes(mutated(chance.choice(texts), chance, 40))
        check(["report", str(path), *options], capsys, seed)


@pytest.mark.parametrize("count", few_and_many(20, 1000))
def test_a_damaged_run_file_is_read_or_refused(count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    shutil.copytree(RUN, folder)
    data = (RUN / "run.json").read_bytes()
    for seed in range(count):
        (folder / "run.json").write_bytes(mutated(data, random.Random(seed), 4))
        check(["report", str(folder / "run.json")], capsys, seed)


def test_a_table_that_lost_its_main_backward_row_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Read a table with more forward than backward calls: no number of calls per iteration fits both."""
    log = next(path for path in LOGS if path.name.startswith("002"))
    kept = [line for line in log.read_text().splitlines() if "flash_bwd_dq_dk_dv" not in line]
    path = tmp_path / "some.log"
    path.write_text("\n".join(kept))
    check(["report", str(path)], capsys, 0)
