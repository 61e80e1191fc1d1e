"""Flight Recorder dumps: batches, states, groups, where ranks stand, and dumps that are damaged or hostile."""

from __future__ import annotations

import json
import pickle
import resource
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ringprof.common.limits import Limits, MemoryBudget
from ringprof.errors import InputError
from ringprof.printed.communication.comm_log_report import CommLogAnalysis, load_comm_logs
from ringprof.printed.communication.flight_recorder import parse_dump
from ringprof.printed.communication.operations import RankLog
from ringprof.printed.communication.pickle_values import decode_values

MS = 1_000_000
START = 1_790_000_000_000_000_000


def entry(name: str, number: int, posted_ms: float, **changes: Any) -> dict[str, Any]:
    """Build an entry of a completed operation, seen 1 ms after it was posted."""
    is_p2p = name.startswith(("send", "recv")) or changes.get("is_p2p", False)
    posted = START + round(posted_ms * MS)
    fields = {
        "record_id": 0, "process_group": ("1", "cp"), "collective_seq_id": 0 if is_p2p else number,
        "p2p_seq_id": number if is_p2p else 0, "profiling_name": f"nccl:{name}", "is_p2p": is_p2p, "retired": True,
        "time_created_ns": posted, "input_sizes": [[2, 64]], "input_dtypes": ["BFloat16"], "output_sizes": [[2, 64]],
        "output_dtypes": ["BFloat16"], "state": "completed", "time_discovered_started_ns": posted + MS,
        "time_discovered_completed_ns": posted + MS, "frames": [
            {"filename": "/venv/lib/site-packages/torch/distributed/distributed_c10d.py", "line": 7, "name": "inner"},
            {"filename": "/home/user/ring.py", "line": 42, "name": "exchange"},
        ],
    }  # fmt: skip
    return fields | changes


OPEN: dict[str, Any] = {
    "state": "scheduled",
    "time_discovered_started_ns": None,
    "time_discovered_completed_ns": None,
    "retired": False,
}


def hop(rank: int, number: int, posted_ms: float, *, world: int = 2, **changes: Any) -> list[dict[str, Any]]:
    """Build the entries of one ring hop: a send, a receive and the entry with their times."""
    to, source = (rank + 1) % world, (rank - 1) % world
    return [
        entry(f"send {rank}->{to}", number, posted_ms, **OPEN),
        entry(f"recv {rank}<-{source}", number, posted_ms, **OPEN),
        entry("coalesced", number, posted_ms, is_p2p=True, **changes),
    ]


def dump(entries: list[dict[str, Any]], world: int = 2) -> dict[str, Any]:
    for record, item in enumerate(entries):
        item["record_id"] = record
    config = {"1": {"name": "1", "desc": "cp", "ranks": str([*range(world)])}}
    return {"version": "2.10", "comm_lib_version": "2.28.9", "pg_config": config, "entries": entries}


def write(folder: Path, dumps: list[dict[str, Any]]) -> CommLogAnalysis:
    folder.mkdir(exist_ok=True)
    for rank, content in enumerate(dumps):
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(content, protocol=2))
    return load_comm_logs(folder)


def parse(content: Any) -> RankLog:
    return parse_dump(pickle.dumps(content, protocol=2), "dump_0", 0, MemoryBudget())


def test_a_batch_is_one_hop_with_the_times_of_its_last_entry() -> None:
    log = parse(dump([*hop(0, 1, 10), entry("all_reduce", 1, 20), *hop(0, 2, 30, **OPEN)]))
    assert [(item.name, item.state, item.sequence) for item in log.operations] == [
        ("send_recv", "completed", 1), ("all_reduce", "completed", 1), ("send_recv", "scheduled", 2),
    ]  # fmt: skip
    first = log.operations[0]
    assert [(message.peer, message.size_bytes) for message in first.sends + first.receives] == [(1, 256), (1, 256)]
    assert (first.posted_ns, first.completed_by_ns, first.most_ns) == (START + 10 * MS, START + 11 * MS, MS)
    assert first.location == "ring.py:42 exchange"


def test_peers_are_ranks_of_the_job_in_groups_that_do_not_begin_at_0() -> None:
    content = dump(hop(0, 1, 0))
    content["pg_config"]["1"]["ranks"] = "[4, 6]"
    (item,) = parse(content).operations
    assert {message.peer for message in item.sends + item.receives} == {6}


def test_gloo_marks_what_is_over_as_retired() -> None:
    done = entry("x", 1, 0, **OPEN) | {"profiling_name": "gloo:all_reduce", "retired": True}
    waiting = entry("x", 2, 0, **OPEN) | {"profiling_name": "gloo:all_reduce"}
    assert [item.state for item in parse(dump([done, waiting])).operations] == ["completed", "scheduled"]


def test_an_operation_that_pytorch_gave_up_on_is_not_complete() -> None:
    (item,) = parse(dump([entry("all_reduce", 1, 0, **(OPEN | {"retired": True}))])).operations
    assert item.state == "scheduled" and item.timed_out


@pytest.mark.parametrize("group", ["cp", "world"])
def test_missing_dumps_are_asked_for_only_where_they_can_name_a_rank(tmp_path: Path, group: str) -> None:
    """Ranks 0 and 1 of three wait in one group. Rank 2, without a dump, is a member of the group ``world`` alone."""

    def content() -> dict[str, Any]:
        entries = [
            entry("all_reduce", 1, 0, process_group=(key, name), **(OPEN if name == group else {}))
            for key, name in (("0", "world"), ("1", "cp"))
        ]
        result = dump(entries)
        result["pg_config"]["0"] = {"name": "0", "desc": "world", "ranks": "[0, 1, 2]"}
        return result

    verdict = write(tmp_path, [content(), content()]).verdict
    assert verdict[0] == "2 operations had not ended when the dumps were written."
    assert ("needs the dumps of all ranks: 1 of 3 ranks have no log here: 2." in verdict[-1]) == (group == "world")


def test_the_rank_that_stopped_posting_is_named_with_its_ring_step(tmp_path: Path) -> None:
    """Three iterations of three hops of different sizes; in the third, rank 1 of 3 stops before the second hop."""

    def ring(rank: int, hops: int, done: int) -> list[dict[str, Any]]:
        entries = []
        for number in range(1, hops + 1):
            three = hop(rank, number, number, world=3, **(OPEN if number > done else {}))
            for item in three[:2]:
                item["input_sizes"] = item["output_sizes"] = [[64 * (number % 3 + 1)]]
            entries += three
        return entries

    analysis = write(tmp_path, [dump(ring(rank, 7 if rank == 1 else 8, 7), 3) for rank in range(3)])
    text = analysis.to_terminal().replace("\n", " ")
    assert "2 operations had not ended when the dumps were written." in text
    assert (
        "Rank 1 had not posted its part of send/recv 8, step 2 of 3 of group cp, which rank 0 posted from ring.py:42"
        " exchange, and stands at send/recv 7, step 1 of 3." in text
    )
    stands = {
        item["rank"]: (item["sequence"], item["step"], item["waits_for"]) for item in analysis.report()["standings"]
    }
    assert stands == {0: (8, 2, [1]), 1: (7, 1, []), 2: (8, 2, [1])}


def test_a_rank_that_misses_a_collective_is_named(tmp_path: Path) -> None:
    both = [entry("all_reduce", 1, 0), entry("_all_gather_base", 2, 1)]
    third = entry("all_reduce", 3, 2, **OPEN)
    analysis = write(tmp_path, [dump([*both, third]), dump([*map(dict, both)])])
    assert "Rank 1 had not posted its part of all-reduce 3" in " ".join(analysis.verdict)
    assert analysis.figures()["unfinished"] == 1


def test_an_open_operation_that_all_have_posted_blames_no_rank(tmp_path: Path) -> None:
    analysis = write(tmp_path, [dump(hop(rank, 1, 0, **OPEN)) for rank in range(2)])
    text = " ".join(analysis.verdict)
    assert "All ranks had posted send/recv 1 of group cp" in text and "had not posted" not in text


def test_finished_dumps_have_no_word_on_a_hang(tmp_path: Path) -> None:
    analysis = write(
        tmp_path, [dump([item for n in (1, 2, 3, 4) for item in hop(rank, n, n + rank / 4)]) for rank in (0, 1)]
    )
    (sentence,) = analysis.verdict
    assert sentence.startswith("Rank 1 posted its part last in 4 of 4 operations, 0.250 ms after the first rank")
    assert not analysis.report()["standings"]


def test_disagreeing_sizes_and_collectives_are_named(tmp_path: Path) -> None:
    first, second = hop(0, 1, 0), hop(1, 1, 0)
    second[1]["output_sizes"] = [[2, 65]]
    text = " ".join(write(tmp_path / "sizes", [dump(first), dump(second)]).verdict)
    assert "The ranks disagree in 1 operation, first in number 1 of group cp: rank 0 sends 256 bytes" in text
    assert "rank 1 sends 256 bytes and receives 260 bytes" in text
    pair = [dump([entry("all_reduce", 1, 0, **OPEN)]), dump([entry("broadcast", 1, 0, **OPEN)])]
    text = " ".join(write(tmp_path / "names", pair).verdict)
    assert "rank 0 all-reduce of 128 BFloat16, rank 1 broadcast of 128 BFloat16" in text


EVEN = ["all_reduce", "allreduce_coalesced", "broadcast", "_broadcast_oop", "reduce", "_reduce_oop", "barrier",
        "_all_gather_base", "_reduce_scatter_base"]  # fmt: skip
UNEVEN = ["all_to_all", "all_to_allv", "gather", "scatter", "allgather", "reduce_scatter", "all_gather_v"]
VARIANTS: dict[str, dict[str, Any]] = {
    "shape": {"input_sizes": [[128]]}, "size": {"input_sizes": [[4, 64]]}, "type": {"input_dtypes": ["Half"]},
    "wider type": {"input_dtypes": ["Float"]}, "tensors": {"input_sizes": [[2, 64]] * 2, "input_dtypes": ["Float"] * 2},
}  # fmt: skip


@pytest.mark.parametrize("name", [*EVEN, *UNEVEN])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("ended", [True, False])
def test_inputs_that_must_be_equal_are_compared(tmp_path: Path, name: str, variant: str, ended: bool) -> None:
    state: dict[str, Any] = {} if ended else {**OPEN, "state": "started"}
    dumps = [[entry(name, 1, 0), entry(name, 2, 10, **state, **(VARIANTS[variant] if rank == 2 else {}))]
             for rank in range(3)]  # fmt: skip
    result = write(tmp_path / "dumps", [dump(entries, 3) for entries in dumps])
    # A shape of as many elements is the same message.
    differs = name in EVEN and variant != "shape"
    text = " ".join(result.verdict)
    assert text.startswith("The ranks disagree in 1 operation, first in number 2 of group cp: ranks 0, 1 ") == differs
    assert ("128 BFloat16, rank 2 " in text) == differs == ("disagree" in text)
    # That the network hangs is said only where nothing else explains it.
    assert ("or the network" in text) == (not ended and not differs)


def test_clocks_that_contradict_each_other_are_not_compared(tmp_path: Path) -> None:
    """Rank 1's clock is 5 s ahead: rank 0 would have received before rank 1 had sent."""
    dumps = [dump([item for n in range(1, 4) for item in hop(rank, n, n * 10 + rank * 5_000)]) for rank in (0, 1)]
    analysis = write(tmp_path, dumps)
    assert [notice.code for notice in analysis.warnings] == ["clocks_differ"]
    assert "differ by at least 4.999 s" in analysis.warnings[0].message
    assert not analysis.findings.late and analysis.findings.ranks[0].wait_least_ns is None


def test_overwritten_dumps_are_matched_by_number(tmp_path: Path) -> None:
    dumps = []
    for rank, first in ((0, 5), (1, 6)):
        content = dump([item for n in range(first, 12) for item in hop(rank, n, n)])
        for item in content["entries"]:
            item["record_id"] += 12
        dumps.append(content)
    analysis = write(tmp_path, dumps)
    assert {notice.code for notice in analysis.warnings} == {"overwritten", "unmatched_messages"}
    assert analysis.findings.ranks[0].compared == 0  # both post at the same time
    complete = [row for row in analysis.findings.rows if row.bounds.wait_least_ns is not None]
    assert {row.operation.sequence for row in complete} == set(range(6, 12))
    assert all(row.step is None for row in analysis.findings.rows)


class _Attack:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return open, ("/tmp/ringprof-was-run",)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_that_would_run_code_is_refused(protocol: int) -> None:
    data = pickle.dumps({"version": "2.10", "pg_config": _Attack()}, protocol)
    with pytest.raises(InputError, match=r"^dump_0: a pickle with an instruction \(0x[0-9a-f]{2}\)") as refused:
        parse_dump(data, "dump_0", 0, MemoryBudget())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_are_decoded_as_the_standard_library_does(protocol: int) -> None:
    shared = {"name": "f", "line": 7}
    numbers = [1, -1, 255, 256, 65_536, -(2**31), 2**63, 1.5, None, True, False]
    tuples = ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4))
    value = {
        "a": [*numbers, "é\n", "x" * 300],
        "b": tuples,
        "c": {},
        "d": [],
        "e": [shared, shared],
        "f": [*range(2000)],
    }
    assert decode_values(pickle.dumps(value, protocol), "x", 1 << 24) == value


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("version",), "3.0", r"\$\.version"), (("version",), None, r"\$\.version"),
        (("entries", 0, "time_created_ns"), "x", r"\$\.entries\[0\]\.time_created_ns"),
        (("entries", 0, "input_sizes"), [[-1]], r"\$\.entries\[0\]\.input_sizes"),
        (("entries", 1, "process_group"), ["1"], r"\$\.entries\[1\]\.process_group"),
        (("entries", 0, "profiling_name"), 7, r"\$\.entries\[0\]\.profiling_name"),
        (("pg_config",), [], r"\$\.pg_config"), (("entries",), {}, r"\$\.entries"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(path: tuple[Any, ...], value: Any, field: str) -> None:
    content = dump(hop(0, 1, 0))
    part: Any = content
    for step in path[:-1]:
        part = part[step]
    part[path[-1]] = value
    for data in (pickle.dumps(content, protocol=2), json.dumps(content).encode()):
        with pytest.raises(InputError, match=f"^dump_0: .*{field}") as refused:
            parse_dump(data, "dump_0", 0, MemoryBudget())
        assert "\n" not in str(refused.value)


LARGE = [entry("all_reduce", 1, 0, input_sizes=[[1]] * 20_000)]
BOMBS = {
    "a memo index of 4 billion": b"\x80\x02}r\xff\xff\xff\xff.",
    "four million empty lists": b"\x80\x02}X\x07\x00\x00\x00entries(" + b"]" * 4_000_000,
    "one entry a million times": pickle.dumps({"version": "2.10", "pg_config": {}, "entries": LARGE * 1_000_000}, 2),
    "one shape of 64 lengths many times": pickle.dumps(
        {"version": "2.10", "pg_config": {}, "entries": [entry("x", 1, 0, input_sizes=[[1] * 64] * 1_000)] * 1_000}, 2
    ),
    "lists of lists of lists": b"\x80\x02}X\x07\x00\x00\x00entries" + b"]q\x01(" + b"h\x01h\x01" * 1000 + b"es.",
    "nested deeply": b"\x80\x02}X\x07\x00\x00\x00version" + b"]" * 100_000 + b"a" * 99_999 + b"s.",
    "a tuple nested deeply as a key": b"\x80\x02})" + b"\x85" * 200_000 + b"Ns.",
    "keys of one hash": pickle.dumps({"version": "2.10", "x": {k * (2**61 - 1): None for k in range(9)}}, 2),
    "groups of different long texts of ranks": pickle.dumps(
        {"version": "2.10", "pg_config": {k: {"ranks": k + "1 " * 1_000_000} for k in "abcdefghij"}}, 2
    ),
    "a text of 4 GB": b"\x80\x02}X\xff\xff\xff\xffab",
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_small_hostile_pickles_are_refused_in_little_memory(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError) as refused:
        parse_dump(BOMBS[name], "dump_0", 0, MemoryBudget(Limits(1 << 28)))
    assert "\n" not in str(refused.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 700_000  # kB


def test_what_a_dump_shares_is_read_once() -> None:
    """Check 20,000 references to frames of one path, 500 to one text of ranks, and as many groups of own names."""
    frame = {"filename": "x" * 1_000_000 + "/torch/", "line": 1, "name": "f"}
    ranks = {"desc": "same", "ranks": "1 " * 500_000}
    content = dump([entry("all_reduce", 1, 0, frames=[frame] * 64)] * 20_000)
    content["pg_config"] |= {f"g{k}": ranks for k in range(500)} | {f"h{k}": {"desc": f"d{k}"} for k in range(20_000)}
    begin = time.process_time()
    log = parse(content)
    assert time.process_time() - begin < 20  # 340 s where each reference is read again
    assert log.groups["g499"].ranks == (1,) * 500_000 and log.groups["g7"].label == "group g7"
    assert (log.groups["h3"].label, log.operations[0].location) == ("d3", "")


def test_damaged_pickles_are_read_or_refused_in_one_line() -> None:
    random, sound = Random(7), pickle.dumps(dump([*hop(0, 1, 0), entry("all_reduce", 1, 2)]), protocol=2)
    refused = 0
    for _ in range(3000):
        data = bytearray(sound)
        for _ in range(random.choice((1, 2, 8))):
            offset = random.randrange(len(data))
            choice = random.randrange(3)
            if choice == 0:
                data[offset] = random.randrange(256)
            elif choice == 1:
                del data[offset : offset + random.randrange(1, 9)]
            else:
                data[offset:offset] = bytes(random.randrange(256) for _ in range(random.randrange(1, 9)))
        try:
            log = parse_dump(bytes(data), "dump_0", 0, MemoryBudget(Limits(1 << 26)))
            assert log.rank == 0
        except InputError as error:
            refused += 1
            assert "\n" not in str(error) and str(error).startswith("dump_0: ")
    assert 1000 < refused < 3000
