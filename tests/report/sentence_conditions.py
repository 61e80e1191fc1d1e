"""Conditions of the sentences of a report, on the JSON report and the raw events of its traces.

A condition gets the case, the match of a clause and the values of the clause's figures, and returns whether the clause
is true, or raises `AssertionError`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ringprof.analysis.findings.claim import Claim
from ringprof.analysis.kinds.kinds import COMMUNICATION, COMPUTE, COMPUTE_PARTS, KIND, MEMORY
from ringprof.analysis.kinds.rules import rule_for
from ringprof.common.formatting import milliseconds
from tests.report.raw_facts import LONG_NS, is_copy_with_host, union_ns
from tests.report.sentence_facts import (
    ATTENTION_PARTS,
    COMMUNICATION_PARTS,
    IDLE_PARTS,
    MACHINES,
    MIN_LOSS_SHARE,
    Case,
    attention_ns,
    calibrated_ms,
    gain_ns,
    kernels_one_by_one,
    longest_on_wire,
    mean,
    right_value,
    unlaunched_idle_ns,
)

Values = Sequence[float]
Condition = Callable[[Case, re.Match[str], Values], object]


def always(c: Case, m: re.Match[str], v: Values) -> object:
    return True


# --- the verdict: what communication cost ---------------------------------------------------------------

FAMILIES = {
    "all-reduce": "AllReduce", "all-gather": "AllGather", "reduce-scatter": "ReduceScatter", "broadcast": "Broadcast",
    "send/recv": "SendRecv|AllToAll", "all-to-all": "SendRecv|AllToAll", "peer copies": "Memcpy PtoP",
}  # fmt: skip
OPERATIONS = {KIND[kind].operation or KIND[kind].label: kind for kind in COMMUNICATION}


def silent(c: Case) -> bool:
    return not any(row["comm_ns"] for row in c.ranks.values())


def alone(c: Case, m: re.Match[str], v: Values) -> object:
    assert len(c.ranks) == 1 and silent(c) and (m[1] == "process") == c.on_cpu
    assert all(rank.world_size in (None, 1) for rank in c.reported)
    return len({a.device for a in c.activities()}) <= 1


def unknown_kinds(c: Case, m: re.Match[str], v: Values) -> object:
    time_of_name: Counter[str] = Counter()
    for activity in c.activities():
        if rule_for(activity.name) is None:
            time_of_name[activity.name[:80]] += activity.end - activity.start
    assert time_of_name[m[1]] == max(time_of_name.values()) and v[0] >= 0.1
    assert not any(a.kind == "comm" for a in c.activities())
    return len(c.ranks) > 1 or any((rank.world_size or 1) > 1 for rank in c.reported)


def at_once(c: Case, m: re.Match[str], v: Values) -> object:
    (claim,) = (line for line in c.findings.verdict if m[0] in line)
    assert isinstance(claim, Claim)
    shares = [figure.value for figure in claim.figures if figure.name == "exposed_kind/time"]
    return len(shares) == 2 and sum(shares) > mean(c.exposed) / c.mean_wall


def kind_exposed(c: Case, m: re.Match[str], v: Values) -> object:
    if m[1] == "blocked in waiting for a transfer" or c.on_cpu:
        return v[0] <= mean(c.exposed) / c.mean_wall + 1e-6
    exposed_ns = sum(raw.exposed_ns(re.compile(FAMILIES[m[1]])) for raw in c.raw.values())
    share = exposed_ns / sum(c.swept("wall"))
    is_only_kind = len({k for k in c.kinds if k in ("send_recv", "all_to_all")}) < 2 or "Send" not in FAMILIES[m[1]]
    if m[2] or not is_only_kind or c.by_copies:
        return v[0] <= share + 1e-6 + c.by_copies
    return v[0] == pytest.approx(share)


# --- the verdict: where it came from --------------------------------------------------------------------


def largest(part: str) -> Condition:
    """Return the condition that a part is the largest of those of communication."""
    return lambda c, m, v: c.of(part) == max(c.of(name) for name in COMMUNICATION_PARTS)


def waited_for(c: Case, m: re.Match[str], v: Values) -> object:
    """Check a rank's share of all waiting by an independent count, and that the rank is among the largest.

    The tolerance is 2 %, or 10 % where hops are copies, of which only departures are counted.
    """
    total_ns, (rank, said) = sum(c.waited_for.values()), v
    assert total_ns, "nobody waits for anybody"
    share = c.waited_for[int(rank)] / total_ns
    assert abs(share - said) < (0.1 if c.by_copies else 0.02), f"rank {rank} is waited for {share:.3f} of all"
    return share >= 0.18 or share >= max(c.waited_for.values()) / total_ns - 0.02


def waits_for_peers(c: Case, m: re.Match[str], v: Values) -> object:
    assert largest("peer_wait")(c, m, v) and bool(m[1]) != bool(m[3])
    # Ranks that are done wait for no peer.
    return m[2] or mean(c.wall - row["wall_ns"] for row in c.ranks.values()) <= 0.1 * c.of("peer_wait")


def worst_step(c: Case, m: re.Match[str], v: Values) -> object:
    key = {"forward": "fwd", "backward": "bwd"}[m[1]], v[1]
    times = [step["exposed_ns"] for step in c.report["steps"] if (step["phase"], step["step"]) == key]
    return v[0] >= 0.5 and v[2] == pytest.approx(mean(times))


def between_hosts(c: Case, m: re.Match[str], v: Values) -> object:
    rows = {(row["kind"], row["link"]): row["wire_gbps"] for row in c.summary["communication"]}
    within = {kind: rate for (kind, link), rate in rows.items() if link == "same_host" and rate}
    assert v[0] == rows[OPERATIONS[m[1]], "other_host"] and len({rank.host for rank in c.reported}) > 1
    return not v[1:] if not within else v[1] == within[OPERATIONS[m[2] or m[1]]] == max(within.values())


def slow_ranks(c: Case, m: re.Match[str], v: Values) -> object:
    names = re.findall(r"\{[a-z][^{}]*\}", m[0])
    ranks = [value for name, value in zip(names, v, strict=True) if name == "{rank}"]
    slow = [rank for rank, rate in c.gbps.items() if 3 * rate <= max(c.gbps.values()) * (1 + 1e-9)]
    return ranks[: len(slow)] == slow and set(ranks) <= set(slow) and m[0].startswith("ranks" if slow[1:] else "rank ")


def waited(c: Case, m: re.Match[str], v: Values) -> object:
    row = c.ranks[int(v[1])]
    waits = row["waits"][OPERATIONS[m[1]]]
    assert v[0] == pytest.approx(waits["wait_ns"] / (waits["wait_ns"] + waits["wire_ns"]))
    assert row["compute_ns"] == min(c.compute.values()) and largest("imbalance")(c, m, v)
    return c.waited_for and max(c.waited_for, key=lambda rank: c.waited_for[rank]) != row["rank"]


def rises(c: Case, m: re.Match[str], v: Values) -> object:
    times = [raw.attention_ns for raw in c.raw.values()]
    assert not (c.run and c.run["strategy"]) and len(times) > 2
    return times == sorted(set(times)) and times[-1] >= 1.5 * times[0]


# --- the verdict: what could be gained ------------------------------------------------------------------


def bound(name: str) -> Condition:
    """Return the condition that a bound is one, and known."""

    def holds(c: Case, m: re.Match[str], v: Values) -> object:
        if name == "balanced":
            return v[0] < c.wall and c.of("imbalance") > 0
        # Communication that computation cannot hide keeps its time, which must be known.
        is_known = name == "free_communication" or (not c.of("exposed_unsplit") and v[0] >= mean(c.unhidden))
        return v[0] < c.wall and is_known

    return holds


# --- the verdict: idle time -----------------------------------------------------------------------------


def not_launched(c: Case, m: re.Match[str], v: Values) -> object:
    host, gap, predicted = c.idle["host"], c.idle["gap"], bool(c.run and c.run.get("predicted"))
    assert bool(m[1]) == predicted and (m[2] or m[3])
    # A cause that is not named is a small part of the idle time.
    return (m[3] or predicted or gap <= 0.01 * (host + gap)) and (m[2] or host <= 0.01 * (host + gap))


def host_call(c: Case, m: re.Match[str], v: Values) -> object:
    in_call = sum(time for time, name in c.host_pieces if name == m[1])
    return v[0] == pytest.approx(in_call / sum(c.idle.values()))


def short_host(c: Case, m: re.Match[str], v: Values) -> object:
    whole, short = sum(c.idle.values()), sum(time for time, _ in c.host_pieces if time < LONG_NS)
    return c.idle["gap"] / whole - 1e-6 <= v[0] <= (short + c.idle["gap"]) / whole + 1e-6


def blocked_on(c: Case, m: re.Match[str], v: Values) -> object:
    known = {correlation for raw in c.raw.values() for correlation in raw.launches}
    pageable = sum(
        after.start - launched for raw in c.raw.values() for _, launched, after in raw.stretches
        if after.start - launched >= 5_000 and after.correlation in known and "ageable" in after.name
    )  # fmt: skip
    if "pageable" in m[1]:
        return v[1] == pytest.approx(pageable / sum(c.idle.values()))
    return v[1] <= (c.idle["blocked"] - pageable - unlaunched_idle_ns(c)) / sum(c.idle.values()) + 1e-6


def blocked_in_hops(c: Case, m: re.Match[str], v: Values) -> object:
    crossing = {e["channel"] for work in c.work for e in work["sent"] if e["link"] == "other_host"}
    assert set(m[1].split(", ")) <= crossing and c.on_cpu
    return sum(v) == pytest.approx(mean(c.exposed) / c.mean_wall)


# --- the verdict: computation ---------------------------------------------------------------------------

NAMES = {
    "imbalance": "imbalance between ranks", "exposed_wire": "exposed wire", "peer_wait": "peer wait",
    "exposed_unsplit": "exposed wire, wait and imbalance", "other_groups": "other groups' communication",
    "attention": "attention kernels", "kernel": "attention kernel below peak", "repeated": "repeated work",
    "slower_kernel": "kernel slower than the fastest known",
    "slowdown": "slow-down beside communication", "launch_gaps": "host-bound idle", "blocked": "blocked idle",
    "recurrence": "linear recurrences", "matrix_products": "matrix products", "optimizer": "the optimizer",
    "other_compute": "other computation",
}  # fmt: skip
"""Name of each part of the waterfall in a sentence; merges and copies have names of their own."""
RATE = r"(?: \({(attention|matrix_products)_tflops}( at most: attention masks are not recorded)?\))?"
"""Rate of a part, after its share."""


def names_of(c: Case, part: str) -> set[str]:
    """Return the names that a part of the computation may have, given the report's kinds."""
    if part != "merge_and_copies":
        return {NAMES[part]}
    kinds = {kind for kind in (*COMPUTE_PARTS[part], *MEMORY) if kind in c.kinds}
    if "merge" in kinds or not kinds:
        return {"merges and copies"}
    return {KIND[next(iter(kinds))].label} if len(kinds) == 1 else {"copies and permutations"}


def assert_rate(c: Case, part: str, rated: str | None, masks: str | None) -> None:
    """Assert that a rate is shown exactly where the report has one, with what is not known of the masks."""
    row = c.rates.get(part)
    assert (rated == part) == bool(row and row["tflops"] is not None and row["coverage"] >= 0.1) == bool(rated)
    assert not rated or (row and bool(masks) == bool(row["mask_unknown"]))


def beside_attention(c: Case, m: re.Match[str], v: Values) -> object:
    part, share = m[4], c.of(m[4]) / c.mean_wall
    assert m[6] in names_of(c, part)
    assert_rate(c, part, m[8], m[9])
    assert bool(m[1]) == (not m[5]) and (m[1] or attention_ns(c) / c.mean_wall < share + 1e-6)
    if m[1]:
        assert_rate(c, "attention", m[2], m[3])
    kinds = (*COMPUTE_PARTS[part], *(MEMORY if part == "merge_and_copies" else ()))
    times = {kind: c.kinds[kind]["time_ns"] for kind in kinds if kind in c.kinds}
    longest = max(times, key=lambda kind: times[kind])
    assert not m[7] or (m[7] == KIND[longest].label and times[longest] > sum(times.values()) / 2)
    return c.of(part) == max(c.of(name) for name in (*COMPUTE_PARTS, *IDLE_PARTS))


def no_loss(c: Case, m: re.Match[str], v: Values) -> object:
    outside = {part: time for part, time in c.parts.items() if part not in (*ATTENTION_PARTS, "background")}
    assert max(outside.values()) < MIN_LOSS_SHARE * c.wall, max(outside, key=lambda part: outside[part])
    return abs(v[0] - attention_ns(c) / c.mean_wall) <= 5e-4


def computed_shares(c: Case) -> dict[str, tuple[str, float]]:
    """Return label -> (part or kind, share of the mean wall) of each kind of computation.

    Attention is one entry, and so are matrix products.
    """
    matrix = [kind for kind in COMPUTE_PARTS["matrix_products"] if kind in c.kinds]
    label = " and ".join({"gemm": "matrix products", "convolution": "convolutions"}[kind] for kind in matrix)
    names = {
        KIND[kind].label: kind for kind in c.kinds
        if kind in COMPUTE and kind not in ("flash_fwd", "flash_bwd", *matrix)
    } | {"attention": "attention"} | ({label: "matrix_products"} if matrix else {})  # fmt: skip
    shares = {label: (name, right_value(c, f"busy({name})/time")) for label, name in names.items()}
    return {label: row for label, row in shares.items() if row[1]}


def computes_longest(c: Case, m: re.Match[str], v: Values) -> object:
    shares = computed_shares(c)
    ordered = sorted((share for _, share in shares.values()), reverse=True)
    named = re.findall(rf"([a-z][a-z -]*?)(?: \(most of it (.+?)\))? {{busy\((\w+)\)/time}}{RATE}", m[1])
    assert len(named) == min(2, len(ordered))
    for (label, kernel, part, rated, masks), share in zip(named, ordered, strict=False):
        label = label.removeprefix("then ")
        assert shares[label][0] == part and abs(shares[label][1] - share) < 1e-6 and share <= 1
        assert_rate(c, part, rated or None, masks or None)
        assert not kernel or label == "other compute"
        if label == "other compute":
            assert_most_of_other(c, kernel)
    return True


def assert_most_of_other(c: Case, named: str) -> None:
    """Assert that the named kernel takes over half of the time of kind ``other``, or that none does."""
    other_ns = sum(row["kinds_ns"].get("other", 0) for row in c.ranks.values())
    names = {k.name for k in c.findings.attribution.kernels if k.kind == "other"}
    times = [(sum(a.end - a.start for a in c.activities() if a.name == name), name) for name in names]
    time, longest = max(times, default=(0, ""))
    assert bool(named) == (2 * time > other_ns) and longest.removeprefix("void ").startswith(named)


def also_rated(c: Case, m: re.Match[str], v: Values) -> object:
    assert_rate(c, m[2], m[3], m[4])
    return computed_shares(c)[m[1]][0] == m[2]


# --- the next step --------------------------------------------------------------------------------------


def largest_loss(c: Case, m: re.Match[str], v: Values) -> object:
    step = c.summary["next_step"]
    part, losses = step["part"], [name for name in c.parts if name not in ("peak", "background", "attention")]
    assert part not in ("peak", "vendor_peak", "kernel_limit", "kernel"), "no loss that a change is known to remove"
    loss_parts = COMMUNICATION_PARTS if m[3] else (part,)
    loss_ns = c.of(*loss_parts)
    assert 0 < loss_ns <= c.wall and loss_ns == v[0]
    assert (m[3] or m[2]) in (names_of(c, part) if part == "merge_and_copies" else {NAMES[part]})
    # Computation that nothing is known to shorten is work, and no loss; it is named where it takes longer.
    work = [row["part"] for row in c.report["waterfall"] if row["part"] in COMPUTE_PARTS and not row["remedy"]]
    losses = [name for name in losses if name not in work]
    longer = [name.replace("_", " ") for name in work if c.of(name) > loss_ns]
    if part not in ATTENTION_PARTS and c.of(*ATTENTION_PARTS) > loss_ns:
        longer = ["attention", *longer]
    scope = (m[1] or "").replace("other computation", "other compute").replace("linear recurrences", "recurrence")
    assert sorted(re.split(", | and ", scope)) == sorted(longer or [""])
    outside = [name for name in losses if name not in ATTENTION_PARTS]
    if part == "slower_kernel":
        singles = [c.of(name) for name in outside if name not in COMMUNICATION_PARTS]
        assert loss_ns == step["time_ns"] > max(c.of(*COMMUNICATION_PARTS), *singles)
        return loss_ns >= MIN_LOSS_SHARE * c.wall
    if part in ATTENTION_PARTS:
        assert all(c.of(name) < MIN_LOSS_SHARE * c.wall for name in outside)
        return loss_ns == max(c.of(name) for name in [*losses, "attention"] if name != "vendor_peak")
    assert c.of("slower_kernel") <= max(loss_ns, c.of(*COMMUNICATION_PARTS)), "attention loses more"
    assert loss_ns >= max((c.of(name) for name in outside if name not in loss_parts), default=0), "another is longer"
    if m[3]:
        assert m[2] == "imbalance and exposed communication" and largest(part)(c, m, v)
    gain = gain_ns(c, part)
    assert step["time_ns"] == gain and step["share"] == gain / c.wall
    return bool(m[4]) == (gain < c.of(part))


def in_attention(c: Case, m: re.Match[str], v: Values) -> object:
    assert c.summary["next_step"]["part"] in ("kernel", "kernel_limit") and not c.on_cpu
    losses = [c.of(name) for name in c.parts if name not in (*ATTENTION_PARTS, "background")]
    return max(*losses, c.of("slower_kernel")) < MIN_LOSS_SHARE * c.wall


def machine_of(c: Case, name: str) -> dict[str, Any]:
    """Return the bundled calibration of this name, which is one of the run's device, as plain JSON."""
    machine: dict[str, Any] = json.loads((MACHINES / f"{name}.json").read_bytes())
    assert {machine["device"]} == set(c.run["environment"]["devices"])
    return machine


def plain_training(c: Case) -> bool:
    """Return whether a run's blocks are those that rates of plain blocks of 16-bit attention tell."""
    unusual = ("documents", "window", "prefix", "softcap", "v_head_dim", "sequences", "kv_length")
    is_plain = c.workload["phase"] == "training" and c.workload["dtype"] == "bf16"
    return is_plain and not any(c.workload[name] for name in unusual)


def faster_kernel(c: Case, m: re.Match[str], v: Values) -> object:
    machine = machine_of(c, m[3])
    fast, own = calibrated_ms(c, machine, m[1]), calibrated_ms(c, machine, m[2])
    assert fast and own and m[2] == c.run["kernel"] and fast < own
    assert v == pytest.approx([1 - fast / own, fast, own], rel=1e-6)
    rivals = [calibrated_ms(c, machine, kernel["name"]) for kernel in machine["kernels"]]
    assert fast == pytest.approx(min(time for time in rivals if time))
    assert plain_training(c) and not c.run["strategy"]["params"].get("deterministic")
    # What the part says is that share of the run's own kernels, without repeated work and what is slower beside hops.
    alone_ns = c.of("peak", "kernel", "vendor_peak", "kernel_limit", "slower_kernel")
    return abs(c.of("slower_kernel") - alone_ns * (1 - fast / own)) <= 2


def fastest_kernel(c: Case, m: re.Match[str], v: Values) -> object:
    machine = machine_of(c, m[1])
    own, *times = (calibrated_ms(c, machine, name) for name in (m[2], *(row["name"] for row in machine["kernels"])))
    # None is faster by more than twice what both are uncertain by.
    assert own and m[2] == c.run["kernel"] and min(time for time in times if time) > 0.8 * own
    return not c.of("slower_kernel") and plain_training(c)


def unknown_kernels(c: Case, m: re.Match[str], v: Values) -> object:
    devices = {json.loads(path.read_bytes())["device"] for path in MACHINES.glob("*.json")}
    assert (c.run["environment"]["devices"][0] in devices) != bool(m[1]) and "slower_kernel" not in c.parts
    assert not m[2] or not plain_training(c) or not calibrated_ms(c, machine_of(c, m[2]), m[3])
    return not m[4] or c.run["strategy"]["params"]["deterministic"]


def matrix_product(c: Case, m: re.Match[str], v: Values) -> object:
    machine = machine_of(c, m[1])
    tflops = machine["matmul_tflops"]["value"]
    assert v[0] == tflops and v[1:] == [mhz for mhz in [machine["matmul_clock_mhz"]] if mhz]
    at_product_ns = c.of("peak") * c.summary["peak"]["tflops"] / tflops
    return c.of("kernel_limit") <= 0 or abs(c.of("peak", "vendor_peak") - at_product_ns) <= 2


def rate_to_hide(c: Case, m: re.Match[str], v: Values) -> object:
    longest = longest_on_wire(c)
    assert (m[1] is None) == (len(c.summary["communication"]) == 1), "whose bytes these are is not said"
    kind = KIND[longest["kind"]]
    return m[1] in (None, kind.operation or kind.label) and v[1] > longest["wire_gbps"]


# --- evidence -------------------------------------------------------------------------------------------


def union_of_attention(c: Case, m: re.Match[str], v: Values) -> object:
    by_name = mean(raw.attention_ns for raw in c.raw.values())
    # Calls of attention also launch kernels that fill a tensor, whose names say nothing of attention.
    is_union = by_name - 1 < c.of("attention") < by_name * (1.01 if c.findings.layers else 1) + 1
    return c.summary["peak"] is None and is_union


def rate_in_run(c: Case, m: re.Match[str], v: Values) -> object:
    flops = [work["block_flops"] for work in c.work]
    times = [row["kinds_ns"].get("flash_fwd") for row in c.ranks.values()]
    rates = [flop / time for flop, time in zip(flops, times, strict=False) if flop]
    return not rates or v[0] <= 1.01 * max(rates) * c.summary["iterations"] / 1e3


def rates_on_wire(c: Case, m: re.Match[str], v: Values) -> object:
    rows = [row for row in c.summary["communication"] if row["wire_gbps"] is not None][:3]
    assert re.findall(r"(\w+) {wire_gbps} GB/s", m[1]) == [row["kind"] for row in rows]
    return v == [row["wire_gbps"] for row in rows] and (rows or m[1] == "rates not known")


def kinds(c: Case, m: re.Match[str], v: Values) -> object:
    recurrence = c.run is not None and (c.run["workload"] or {}).get("operator", "attention") != "attention"
    assert bool(m[1]) != recurrence and not (recurrence and {"flash_fwd", "flash_bwd"} & set(c.kinds))
    named = re.findall(r"(\w+) {kind}", m[2])
    return v == [c.kinds[kind]["time_ns"] for kind in named] and set(named) <= set(KIND) and (named or m[2] == "none")


def idle_of(part: str, *causes: str) -> Condition:
    """Return the condition that a part is the idle time of these causes."""
    return lambda c, m, v: abs(c.of(part) * len(c.ranks) - sum(c.idle[name] for name in causes)) < 2 * len(c.ranks)


# --- remedies: possible for this program, and against what is there -------------------------------------


def recorded(c: Case) -> dict[str, Any]:
    """Return the strategy of a run that `ringprof record` made; fail for traces and captured blocks."""
    assert c.run and c.run["strategy"] and (c.run["timings"] or c.run["predicted"])
    strategy: dict[str, Any] = c.run["strategy"]
    return strategy


def more_tokens(c: Case, m: re.Match[str], v: Values) -> object:
    assert not (c.run and c.run["workload"] and c.workload["phase"] == "decode"), "one token a step"
    return (c.run and c.run["strategy"]) or any(row["hops"] for row in c.ranks.values())


def repeated(c: Case, m: re.Match[str], v: Values) -> object:
    layer = c.workload["layer"]
    again = not (c.run["timings"] or c.run["predicted"]) or bool(layer and layer["checkpoint"])
    return c.of("repeated") > 0 and ("checkpointing" in m[0]) == again


def hops_copy(c: Case, m: re.Match[str], v: Values) -> object:
    used = recorded(c)
    # Only hops that the communicator sent by send/recv kernels can use another transport; states are not copied.
    assert any(e["operation"] == "send_recv" for work in c.work for e in work["sent"] or [])
    assert not c.on_cpu and used["hops"] != "copy" and not used["cuda_graph"] and c.run["timings"]
    return c.hosts == 1 and c.workload["operator"] == "attention"


def cuda_graph(c: Case, m: re.Match[str], v: Values) -> object:
    used = recorded(c)
    assert not c.on_cpu and used["hops"] != "copy" and not used["cuda_graph"] and c.run["timings"]
    is_peer = c.workload["operator"] != "attention" and "/" in str(used["name"])
    return not (c.workload["layer"] or c.workload["sequences"] or is_peer)  # refused together


def zigzag(c: Case, m: re.Match[str], v: Values) -> object:
    work, flops = c.workload, [rank_work["block_flops"] for rank_work in c.work]
    assert work["operator"] == "attention" and work["causal"] and work["phase"] == "training"
    assert c.run["strategy"]["layout"] == "contiguous" and not work["documents"] and not work["window"]
    return not flops or max(flops) > 1.02 * min(flops)


def difference_of_attention(c: Case) -> tuple[int, int]:
    """Return how much longer the rank that computes longest computes attention, and anything, than the shortest."""
    shortest, longest = sorted(c.raw.values(), key=lambda raw: raw.swept["compute"])[:: len(c.raw) - 1]
    return longest.attention_ns - shortest.attention_ns, longest.swept["compute"] - shortest.swept["compute"]


def clocks(c: Case, m: re.Match[str], v: Values) -> object:
    flops = [rank_work["block_flops"] for rank_work in c.work]
    assert not c.on_cpu and max(flops) <= 1.02 * min(flops)
    # The longer computation must be attention: FLOPs say nothing about anything else.
    attention, all_computation = difference_of_attention(c)
    return all_computation == 0 or attention >= all_computation / 2


def beside(c: Case, m: re.Match[str], v: Values) -> object:
    attention, all_computation = difference_of_attention(c)
    return attention < all_computation / 2


def state_scan(c: Case, m: re.Match[str], v: Values) -> object:
    used = recorded(c)["name"]
    assert used == ("state-a2a" if "messages" in m[1] else "state-ring")
    # On two ranks both pass one state in one hop.
    return used == "state-a2a" or c.run["topology"]["world_size"] > 2


def compute_longest(c: Case, m: re.Match[str], v: Values) -> object:
    *ranks, named_ns, others_ns = v
    named = [c.compute[int(rank)] for rank in ranks]
    others = [time for rank, time in c.compute.items() if rank not in ranks]
    assert (named_ns, others_ns) == (min(named), max(others))
    return min(named) > 1.02 * max(others) and len(others) > len(named)


def strategies(c: Case, m: re.Match[str], v: Values) -> object:
    used = c.run["strategy"]["name"]
    assert c.workload["operator"] == "attention" and c.workload["phase"] == "training"
    assert used not in re.split(", | or ", m[1])
    return used in ("allgather", "ulysses") if m[2] == "hops beside blocks" else between(c) or c.hosts > 1


def between(c: Case) -> bool:
    return any(row["link"] == "other_host" for row in c.summary["communication"])


def copies(c: Case, m: re.Match[str], v: Values) -> object:
    kinds = {"merges": "merge", "permutations and copies": "permute", "memory sets": "memset", "copies": "memcpy"}
    times = {kind: c.kinds[kind]["time_ns"] for kind in kinds.values() if kind in c.kinds}
    return max(times, key=lambda kind: times[kind]) == kinds[m[1]] and not (m[2] and c.on_cpu)


def host_copies(c: Case, m: re.Match[str], v: Values) -> object:
    names = [a.name for a in c.activities() if a.category == 1 and a.kind == "memory"]
    return any(map(is_copy_with_host, names)) and (m[0].startswith("fewer") or any("ageable" in name for name in names))


WORDS = {
    "torch": ("torch.profiler.record_function", "ProfilerActivity.CPU"),
    "nsys": ("NVTX ranges", "nsys profile --trace cuda,nvtx"), "rocprof": ("roctx ranges", "rocprofv3 --hip-trace"),
    "ascend": ("mstx ranges", "torch_npu.profiler with ProfilerActivity.CPU"),
    "xla": ("jax.profiler.TraceAnnotation", "jax.profiler's host tracer"),
}  # fmt: skip
"""Words of each writer of traces for the marks of phases, and for recording launches."""


def graphs(c: Case, m: re.Match[str], v: Values) -> object:
    calls = [event.name for raw in c.raw.values() for event in raw.host]
    producer, device = c.reported[0].producer, c.reported[0].device or ""
    on_amd = producer == "rocprof" or "AMD" in device or any(name.startswith("hip") for name in calls)
    kernels = [a.name for a in c.activities() if a.category == 0]
    assert not c.on_cpu and "cuda_graph" not in c.codes and (m[1] == "HIP") == on_amd
    assert bool(m[3]) == (len(kernels_one_by_one(c)) < len(kernels)) and not (m[2] and m[3])
    compiled = any(name.startswith(("triton_poi", "triton_red", "triton_per")) for name in kernels)
    return bool(m[2]) == (producer == "torch" and not m[3] and not compiled)


def of_the_host(c: Case, m: re.Match[str], v: Values) -> object:
    names = [name for _, name in c.host_pieces]
    said = next((name for name in m.groups() if name), None)
    assert not m["cuda"] or (said or "").startswith("cu"), "no variable of this GPU's software"
    return said in names if said else any(re.search("DataLoader|Capture|Graph|compile|nvrtc|Load", n) for n in names)


# --- warnings, whose numbers are not figures of a claim -------------------------------------------------


def missing_ranks(c: Case, m: re.Match[str], v: Values) -> object:
    listed = {int(number) for number in re.findall(r"\d+", m[3])}
    absent = set(range(int(m[2]))) - set(c.ranks)
    return int(m[1]) == len(absent) and listed <= absent and bool(m[4]) == (len(absent) > len(listed))


def launched_before(c: Case, m: re.Match[str], v: Values) -> object:
    (raw,) = c.raw.values()
    first, last = raw.activities[0].start, max(a.end for a in raw.activities)
    beside = [a for a in raw.outside if a.correlation not in raw.launches and a.start < last and a.end > first]
    spans = [(max(a.start, first), min(a.end, last), a.kind) for a in beside]
    times = (union_ns(span[:2] for span in spans if kind in ("", span[2])) for kind in ("", "comm"))
    return int(m[1]) == len(beside) and [m[2], m[3]] == [*map(milliseconds, times)]


def clocks_apart(c: Case, m: re.Match[str], v: Values) -> object:
    sent = [[a for a in raw.activities if a.kind == "comm"] for raw in c.raw.values()]
    assert any(max(a.start for a in calls) > min(a.end for a in calls) for calls in zip(*sent, strict=True))
    return all(part.wire_ns is None for rank in c.reported for part in rank.splits)


def fitted_clocks(c: Case, m: re.Match[str], v: Values) -> object:
    fitted = c.summary["clocks"]
    assert int(m[1]) == fitted["hosts"] and (m[3] is None) == (fitted["residual_ns"] is None)
    return abs(float(m[2].replace(",", "")) - max(map(abs, fitted["offsets_ns"].values())) / 1e3) <= 0.051


def several_devices(c: Case, m: re.Match[str], v: Values) -> object:
    busy_ns: Counter[int] = Counter()
    for activity in c.activities():
        busy_ns[activity.device] += activity.end - activity.start
    (busiest, longest_ns), *others = busy_ns.most_common()
    return (
        (int(m[1]), int(m[2])) == (len(busy_ns), busiest)
        and others
        and m[3] == milliseconds(busy_ns.total() - longest_ns)
    )
