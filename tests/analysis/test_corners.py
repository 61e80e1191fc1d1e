"""Edge cases of the analysis: no data, or too little for an answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from ringprof.analysis.findings.parts import _waiting_share
from ringprof.analysis.kinds.classify import classify
from ringprof.analysis.kinds.groups import refuse_unknown_group
from ringprof.analysis.transfers.clocks import UNKNOWN_NS, Pair
from ringprof.analysis.transfers.transfers import _collective_sent_bytes, _messages
from ringprof.errors import TraceFormatError, UsageError
from ringprof.scale.pipeline import attribute
from ringprof.trace.columns import CommRecord, Message
from ringprof.trace.kineto import parse_trace
from tests.analysis.build import FLASH, Builder, collective, kind_names
from tests.trace.kineto_text import document, kernel


def test_chosen_group_is_refused_where_no_trace_records_groups() -> None:
    with pytest.raises(UsageError, match=r"^--group 'cp': no trace records the group .* \(CPU traces never do\)$"):
        refuse_unknown_group("cp", [])


def test_operators_of_zero_duration_are_refused() -> None:
    trace = parse_trace(document([kernel(0, cat="cpu_op", name="aten::add", dur=0, args={})], deviceProperties=[]))
    with pytest.raises(TraceFormatError, match="its CPU operators span no time: nothing to report"):
        attribute([trace])


def test_rank_without_timed_transfers_has_zero_waiting_share() -> None:
    rows = (SimpleNamespace(timed=0, kind="send_recv", wait_ns=7, wire_ns=9),)
    untimed: Any = SimpleNamespace(link_totals=rows)
    assert _waiting_share(untimed) == (0.0, "communication")


@pytest.mark.parametrize(
    ("kind", "name", "elements", "size", "leaving"),
    [
        # 4 ranks; 1000 numbers of 2 bytes. A ring of all-gather passes 3 of 4 parts on, all-reduce 2 x 3/4 of all.
        ("all_gather", "_allgather_base", 1000, 4, 6000),
        ("all_reduce", "allreduce", 1000, 4, 3000),
        ("reduce_scatter", "_reduce_scatter_base", 1000, 4, 1500),
        ("all_to_all", "all_to_all", 1000, 4, 1500),
        ("all_gather", "_allgather_base", None, 4, None),
        ("all_gather", "_allgather_base", 1000, None, None),
        ("broadcast", "broadcast", 1000, 4, None),
    ],
)
def test_bytes_sent_by_a_rank_in_a_collective(
    kind: str, name: str, elements: int | None, size: int | None, leaving: int | None
) -> None:
    call = CommRecord(
        name=name, group="1", group_description=None, group_ranks=None, group_size=size, in_elements=elements,
        out_elements=elements, dtype="BFloat16", source_rank=None, destination_rank=None,
    )  # fmt: skip
    assert _collective_sent_bytes(call, kind, 0) == leaving


def test_all_to_all_rotation_is_a_send_and_a_receive() -> None:
    """1000 numbers of 2 bytes go to rank 2 of four, and 500 come from rank 0."""
    call = collective("all_to_all", in_split=(0, 0, 1000, 0), out_split=(500, 0, 0, 0), out_elements=500)
    assert _messages((call,), "send_recv", 1) == ((Message(2, 2000),), (Message(0, 1000),))


def test_one_collective_over_two_hosts_is_split_by_both_clocks() -> None:
    """Rank 1 begins 400 ns after rank 0 by clocks that must be fitted to this single collective."""
    call = collective("allreduce", group_ranks=(0, 1), group_size=2)
    ranks = []
    for rank, (start, end) in enumerate([(1_000, 101_000), (1_400, 101_000)]):
        builder = Builder(rank=rank, world_size=2, host=f"host{rank}")
        ranks.append(
            builder.run("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", start, end, launched=500, own=call).trace()
        )
    attribution = attribute(ranks)
    assert attribution.clocks.several and [len(rank.splits) for rank in attribution.ranks] == [1, 1]


def test_hosts_without_traffic_have_an_infinite_residual() -> None:
    attribution = attribute(
        [Builder(rank=rank, world_size=3, host=f"host{rank}").run(FLASH, 0, 9).trace() for rank in range(3)]
    )
    pair = Pair(hosts=("host0", "host2"), residual_ns=70, transfers=3)
    between, number = msgspec.structs.replace(attribution.clocks, pairs=(pair,)).residuals()
    unknown = UNKNOWN_NS
    assert number == {"host0": 0, "host1": 1, "host2": 2} and between.dtype == np.int64
    assert between.tolist() == [[0, unknown, 70], [unknown, 0, unknown], [70, unknown, 0]]


@pytest.mark.parametrize(
    ("name", "kernel", "kind"),
    [
        ("coalesced", "AllGather", "all_gather"), ("permute", "SendRecv", "send_recv"),
        ("new", "AllReduce", "all_reduce"),
        ("barrier", "AllReduce", "comm_other"), ("gather", "SendRecv", "comm_other"),
        ("all_to_all", "SendRecv", "all_to_all"),
    ],
)  # fmt: skip
def test_an_unknown_name_of_a_collective_never_beats_the_kernels_own(name: str, kernel: str, kind: str) -> None:
    b = Builder().run(f"ncclDevKernel_{kernel}_RING_LL", 0, 10, launched=1, own=collective(name))
    assert kind_names(classify(b.trace())) == [kind]


def test_launches_are_joined_by_external_id_where_no_correlation_is_given() -> None:
    events = []
    for number in range(3):
        args = {"External id": 100 + number}
        events.append(kernel(number, cat="cuda_runtime", name="cudaLaunchKernel", ts=300 * number, dur=5, args=args))
        own = {**args, "device": 0, "stream": 7}
        events.append(kernel(number, name="gemm", ts=300 * number + 20, dur=100, args=own))
    (rank,) = attribute([parse_trace(document(events))]).ranks
    assert rank.idle is not None and rank.launches is not None
    # Each gap of 200 us lasts until 15 us before the next kernel: until its launch call returns.
    assert (rank.idle.host_ns, rank.idle.gap_ns + rank.idle.blocked_ns, rank.launches.count) == (370_000, 30_000, 3)


def test_an_external_id_of_several_launches_joins_nothing() -> None:
    args = {"External id": 7}
    events = [kernel(n, cat="cuda_runtime", name="cudaLaunchKernel", ts=300 * n, dur=5, args=args) for n in range(2)]
    own = {**args, "device": 0, "stream": 7}
    events += [kernel(number, name="gemm", ts=300 * number + 20, dur=100, args=own) for number in range(2)]
    assert attribute([parse_trace(document(events))]).ranks[0].launches is None
