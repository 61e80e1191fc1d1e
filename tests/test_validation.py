"""Strict parsing of users' numbers: in variables, options and notebook cells."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringprof.common.validation import whole
from ringprof.errors import InputError, UsageError
from ringprof.prediction.calibration import read_calibration
from ringprof.prediction.measured import read_rows
from ringprof.prediction.network import Cluster
from ringprof.prediction.score import check_rows
from ringprof.workload.documents import document_lengths


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("007", 7), ("9" * 18, 10**18 - 1)])
def test_plain_digits_are_whole_numbers(text: str, number: int) -> None:
    assert whole(text) == number


@pytest.mark.parametrize("text", ["", "1e3", "1_000", "²", "٣", "-1", "+1", " 1", "1\n", "1.0", "9" * 19, "9" * 6000])
def test_other_texts_are_not_whole_numbers(text: str) -> None:
    assert whole(text) is None


@pytest.mark.parametrize("text", ["9" * 6000, "٣ ٢", "1e3", "0", "-5"])
def test_lengths_from_a_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    with pytest.raises(UsageError, match="is not a valid token count"):
        document_lengths(str(path), 1024)


@pytest.mark.parametrize("text", ["9" * 6000, "9" * 13, "1x" + "9" * 8, "mean=1"])
def test_lengths_with_too_many_digits_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is neither a file nor a length") as refused:
        document_lengths(text, 1024)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("text", ["mean=inf,sigma=1", "mean=9,sigma=nan", "seed=nan", "mean=9,seed=inf", "seed=.5"])
def test_length_distribution_without_numbers_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="as in lognormal:mean=8192"):
        document_lengths(f"lognormal:{text}", 1024)


def test_list_of_lengths_longer_than_a_path_is_read() -> None:
    assert document_lengths(",".join(["16"] * 5000), 80_000) == (16,) * 5000


TITLES = "strategy,seq_global,heads,n_gpus,time_ms\n"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("zigzag,65536,1e3,4,5", "heads '1e3' is no such number"),
        ("zigzag,65536,40,nan,5", "n_gpus 'nan' is no such number"),
        ("zigzag,99999999999999999999,40,4,5", "seq_global '99999999999999999999' is no such number"),
        ("zigzag,65536,40,0,5", "n_gpus '0' is no such number"),
    ],
)
def test_row_with_an_invalid_number_is_not_predicted(row: str, reason: str, tmp_path: Path) -> None:
    """Refuse the row: a default value would silently be compared with the prediction."""
    path = tmp_path / "table.csv"
    path.write_text(TITLES + row)
    (score,) = check_rows(
        read_rows(str(path)), read_calibration("h100"), lambda *_: pytest.fail("not asked"), Cluster()
    )
    assert (score.reason, score.predicted_ms) == (reason, None)


def test_too_wide_table_cell_is_an_input_error(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(TITLES + "zigzag,65536,40,4," + "1" * 200_000)
    with pytest.raises(InputError, match="not a table of measurements: field larger"):
        read_rows(str(path))


@pytest.mark.parametrize(
    ("hosts", "seq", "heads", "reason"),
    [
        (65536, 1 << 30, 40, "67108864 ranks cannot be predicted: at most 1048576"),
        (1000, 4096, 40, "4096 tokens on 1024000 ranks are less than one each"),
        (1, 1 << 30, 1 << 40, "more bytes than 64 bits count"),
    ],
)
def test_prediction_of_too_many_ranks_or_tokens_is_refused(hosts: int, seq: int, heads: int, reason: str) -> None:
    pytest.importorskip("torch")
    from ringprof.prediction.query import Query
    from ringprof.prediction.schedules import schedule_of
    from ringprof.workload.workload import Workload

    cluster = Cluster(hosts=hosts, gpus_per_host=1024)
    workload = Workload(seq=seq, heads=heads, kv_heads=heads, head_dim=128)
    with pytest.raises(UsageError, match=reason):
        schedule_of(Query("ring", workload, cluster, "cudnn"), cluster, None)
