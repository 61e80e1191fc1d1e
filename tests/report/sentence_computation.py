"""Rules for the verdict's sentences about idle time and computation, and for the next step."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ringprof
from ringprof.analysis.kinds.kinds import COMPUTE, COMPUTE_PARTS, KIND, MEMORY
from tests.report.raw_facts import LONG_NS
from tests.report.sentence_rules import (
    ATTENTION_PARTS,
    COMMUNICATION_PARTS,
    IDLE_PARTS,
    KERNEL_PARTS,
    MIN_LOSS_SHARE,
    MS,
    Case,
    P,
    R,
    audit,
    mean,
    milliseconds,
    percent,
    rule,
    three_digits,
)

PHASES = {True: {"forward", "backward"}, False: {"forward"}}
MACHINES = Path(ringprof.__file__).parent / "prediction" / "machines"
RATE = rf" \({R} ([PTG])FLOP/s( at most: attention masks are not recorded)?\)"
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

# --- where it came from: idle time -----------------------------------------------------------------------------


@rule("verdict", rf"{P} of the time nothing runs on the GPU until pages of managed memory move, which the host or the "
      r"GPU touches")  # fmt: skip
def _migrates(case: Case, m: re.Match[str]) -> None:
    (raw,) = case.raw.values()
    migrations = [row for row in raw.stretches if row[2].name.startswith("Page migration")]
    waits = [after.start - start for start, _, after in migrations]
    percent(m[1], sum(wait for wait in waits if wait >= 5000) / raw.swept["wall"])


BECAUSE = r"(because its next work is not launched yet)?( or )?(in gaps below 5 us)?"


@rule("verdict", rf"{P} of the (predicted )?time the GPU is idle {BECAUSE}")
def _not_launched(case: Case, m: re.Match[str]) -> None:
    times, predicted = case.idle, bool(case.run and case.run.get("predicted"))
    percent(m[1], (times["host"] + times["gap"]) / sum(case.swept("wall")))
    assert bool(m[2]) == predicted and (m[3] or m[5])
    # A cause that is not named is a small part of the idle time.
    assert m[5] or predicted or times["gap"] <= 0.01 * (times["host"] + times["gap"])
    assert m[3] or times["host"] <= 0.01 * (times["host"] + times["gap"])


@rule("verdict", rf"for {P} of its idle time the host is in (.+?)( \(data loader\)| \(compilation or graph capture\))?"
      r"(?=\.$|; what computes)")  # fmt: skip
def _host_call(case: Case, m: re.Match[str]) -> None:
    pieces = [piece for raw in case.raw.values() for piece in raw.host_pieces]
    percent(m[1], sum(time for time, name in pieces if name == m[2]) / sum(case.idle.values()))


@rule("verdict", rf"{P} of its idle time is short host work \(pieces below 0\.1 ms\) and gaps below 5 us")
def _launch_bound(case: Case, m: re.Match[str]) -> None:
    whole = sum(case.idle.values())
    short = sum(time for raw in case.raw.values() for time, _ in raw.host_pieces if time < LONG_NS)
    assert float(m[1]) <= 100 * (short + case.idle["gap"]) / whole + 0.06
    assert float(m[1]) >= 100 * case.idle["gap"] / whole - 0.06


@rule("verdict", rf"for {P} of its idle time the launching thread has no operator, runtime call or range open")
def _nothing_open(case: Case, m: re.Match[str]) -> None:
    pieces = [piece for raw in case.raw.values() for piece in raw.host_pieces]
    percent(m[1], sum(time for time, name in pieces if not name) / sum(case.idle.values()))


@rule("verdict", r"these traces do not hold what the host did meanwhile")
def _not_kept(case: Case, m: re.Match[str]) -> None:
    assert not any(raw.host for raw in case.raw.values())


@rule("verdict", rf"{P} of the (predicted )?time the GPU is idle although its next work is launched")
def _blocked(case: Case, m: re.Match[str]) -> None:
    unlaunched = unlaunched_idle_ns(case)
    percent(m[1], (case.idle["blocked"] - (0 if m[2] else unlaunched)) / sum(case.swept("wall")))


def unlaunched_idle_ns(case: Case) -> int:
    """Sum the idle time before activities whose launch is not recorded."""
    stretches = [
        (raw, stretch)
        for raw in case.raw.values()
        for stretch in raw.stretches
        if stretch[2].correlation not in raw.launches
    ]
    return sum(following.start - start for _, (start, _, following) in stretches if following.start - start >= 5_000)


BLOCKED_ON = r"a copy is staged through pageable memory|it waits for another stream|it waits for something that the " \
    r"trace does not record"  # fmt: skip


@rule("verdict", rf"for {P} of its idle time ({BLOCKED_ON})")
def _blocked_on(case: Case, m: re.Match[str]) -> None:
    whole = sum(case.idle.values())
    stretches = [s for raw in case.raw.values() for s in raw.stretches if s[2].start - s[1] >= 5_000]
    known = {correlation for raw in case.raw.values() for correlation in raw.launches}
    launched = [stretch for stretch in stretches if stretch[2].correlation in known]
    pageable = sum(
        following.start - launched_at for _, launched_at, following in launched if "ageable" in following.name
    )
    if "pageable" in m[2]:
        percent(m[1], pageable / whole)
    else:
        assert float(m[1]) <= 100 * (case.idle["blocked"] - pageable - unlaunched_idle_ns(case)) / whole + 0.06


@rule("verdict", rf"{P} of the time nothing runs on the GPU and the launch of what follows is not recorded, so the "
      r"cause cannot be told")  # fmt: skip
def _no_launch(case: Case, m: re.Match[str]) -> None:
    percent(m[1], unlaunched_idle_ns(case) / sum(case.swept("wall")))


@rule("verdict", rf"{P} of the time nothing computes( and nothing waits|; waiting is not recorded)")
def _cpu_idle(case: Case, m: re.Match[str]) -> None:
    assert case.on_cpu and ("not recorded" in m[2]) == ("cpu_no_wait_marks" in case.codes)
    percent(m[1], case.of("launch_gaps") / case.mean_wall)


@rule(
    "verdict",
    rf"{P} of the time ranks are blocked in channels that cross hosts \(([^)]*)\), {P} in channels within a host",
)
def _blocked_in_hops(case: Case, m: re.Match[str]) -> None:
    crossing = {e["channel"] for work in case.run["work"] for e in work["sent"] if e["link"] == "other_host"}
    assert set(m[2].split(", ")) <= crossing and case.on_cpu
    assert abs(float(m[1]) + float(m[3]) - 100 * mean(case.exposed) / case.mean_wall) < 0.11


@rule("verdict", rf"{R} MB leave each host (?:per iteration|in the captured block), {R} MB/s")
def _leaving(case: Case, m: re.Match[str]) -> None:
    hosts = len(set(case.run["topology"]["hosts"]))
    bytes_per_host = (
        sum(e["sent_bytes"] for work in case.run["work"] for e in work["sent"] if e["link"] == "other_host") / hosts
    )
    three_digits(m[1], bytes_per_host / 1e6)
    three_digits(m[2], bytes_per_host / 1e6 / (case.mean_wall / case.summary["iterations"] / 1e9))


@rule("verdict", rf"On CPU ranks are blocked or done on average for {P} of the slowest rank's time: waiting and "
      r"transfer cannot be separated")  # fmt: skip
def _cpu_blocked(case: Case, m: re.Match[str]) -> None:
    percent(m[1], case.of("exposed_unsplit") / case.wall)
    assert case.on_cpu


# --- where it came from: computation ----------------------------------------------------------------------------


def attention_share(case: Case) -> float:
    """Return the share of the mean wall with attention kernels.

    At most 2 % of the wall may be attention that only annotations identify.
    """
    reported = mean(rank.breakdown.flash_ns for rank in case.findings.attribution.ranks) / case.mean_wall
    by_name = mean(raw.attention_ns for raw in case.raw.values()) / case.mean_wall
    assert case.on_cpu or by_name - 1e-9 <= reported <= by_name + 0.02
    return reported


def assert_rate(case: Case, part: str, number: str | None, unit: str | None, masks: str | None) -> None:
    """Assert that a rate is shown exactly where the report has one, and that the values agree."""
    rates = {row["part"]: row for row in (case.summary["step_rates"] or {"parts": []})["parts"]}
    row = rates.get(part)
    assert bool(number) == bool(row and row["tflops"] is not None and row["coverage"] >= 0.1)
    if row and number:
        three_digits(number, row["tflops"] / {"P": 1e3, "T": 1, "G": 1e-3}[unit or "T"])
        assert bool(masks) == bool(row["mask_unknown"])


def names_of(case: Case, part: str) -> set[str]:
    """Return the names that a part of the computation may have, given the report's kinds."""
    if part != "merge_and_copies":
        return {NAMES[part]}
    kinds = {kind for kind in (*COMPUTE_PARTS[part], *MEMORY) if kind in case.kinds}
    if "merge" in kinds or not kinds:
        return {"merges and copies"}
    return {KIND[next(iter(kinds))].label} if len(kinds) == 1 else {"copies and permutations"}


@rule("verdict", rf"(?:{P} of the time is attention(?:{RATE})?, )?{P}( of the time)? is ([a-z][a-z -]*?)(?:, most of "
      rf"it ([a-z /-]+?))?(?:{RATE})?(?=\.$|; MFU|; shapes|; what)")  # fmt: skip
def _beside_attention(case: Case, m: re.Match[str]) -> None:
    part = next(part for part in COMPUTE_PARTS if m[7] in names_of(case, part))
    percent(m[5], case.of(part) / case.mean_wall)
    assert_rate(case, part, *m.group(9, 10, 11))
    attention = attention_share(case)
    assert bool(m[1]) == (not m[6]) and (m[1] or attention < float(m[5]) / 100 + 0.0006)
    if m[1]:
        percent(m[1], attention)
        assert_rate(case, "attention", *m.group(2, 3, 4))
    kinds = (*COMPUTE_PARTS[part], *(MEMORY if part == "merge_and_copies" else ()))
    longest = max((kind for kind in kinds if kind in case.kinds), key=lambda kind: case.kinds[kind]["time_ns"])
    if m[8]:
        assert m[8] == KIND[longest].label
        assert case.kinds[longest]["time_ns"] > sum(case.kinds[k]["time_ns"] for k in kinds if k in case.kinds) / 2
    all_parts = [case.of(name) for name in (*COMPUTE_PARTS, *IDLE_PARTS)]
    assert case.of(part) == max(all_parts)


@rule("verdict", r"MFU ([\d.]+) % of ([\d.]+) TFLOP/s \((\w+)\)")
def _mfu(case: Case, m: re.Match[str]) -> None:
    rates = case.summary["step_rates"]
    percent(m[1], rates["flops"] / case.wall / 1e3 / float(m[2]))
    assert (float(m[2]), m[3]) == (rates["peak_tflops"], rates["peak_dtype"])


@rule("verdict", r"shapes are recorded for (.*?), and rates are of that time(?=\.$)")
def _shapes(case: Case, m: re.Match[str]) -> None:
    parts = {row["part"]: row["coverage"] for row in case.summary["step_rates"]["parts"]}
    names = {"attention": "attention", "matrix-product": "matrix_products"}
    for share, name in re.findall(r"([\d.]+) % of the ([a-z-]+) time", m[1]):
        percent(share, parts[names[name]])
        assert 0.1 <= parts[names[name]] < 0.99


@rule("verdict", rf"No loss outside the attention kernels reaches 2 %: {P} of the time is attention kernels"
      rf"(?: at {R} TFLOP/s(?:, {P} of the device's peak)?)?(?:{RATE})?")  # fmt: skip
def _no_loss(case: Case, m: re.Match[str]) -> None:
    outside = {part: time for part, time in case.parts.items() if part not in (*ATTENTION_PARTS, "background")}
    assert max(outside.values()) < MIN_LOSS_SHARE * case.wall, max(outside, key=lambda part: outside[part])
    percent(m[1], attention_share(case))
    if m[2]:
        assert abs(float(m[2].replace(",", "")) - case.summary["block_tflops"]) <= 0.5
    if m[3]:
        percent(m[3], case.summary["block_tflops"] / case.summary["peak"]["tflops"])


MOSTLY = r"(?: \(most of it (.+?)\))?"


@rule("verdict", rf"[Ww]hat computes longest is ([a-z -]+?){MOSTLY} {P}(?:{RATE})?"
      rf"(?:, then ([a-z -]+?){MOSTLY} {P}(?:{RATE})?)? of the time")  # fmt: skip
def _longest(case: Case, m: re.Match[str]) -> None:
    shares = computed_shares(case)
    ordered = sorted(shares.values(), reverse=True)
    assert abs(shares[m[1]] - ordered[0]) < 1e-6
    percent(m[3], shares[m[1]])
    assert bool(m[7]) == (len(ordered) > 1)
    if m[7]:
        percent(m[9], shares[m[7]])
        assert abs(shares[m[7]] - ordered[1]) < 1e-6
    for name, kernel, rate in ((m[1], m[2], m.group(4, 5, 6)), (m[7], m[8], m.group(10, 11, 12))):
        part = "attention" if name == "attention" else "matrix_products" if name and "matrix" in name else ""
        assert_rate(case, part, *rate)
        assert not kernel or name == "other compute"
        if name == "other compute":
            assert_most_of_other(case, kernel)
    assert all(float(share) <= 100 for share in (m[3], m[9]) if share), "more than all of the time"


def assert_most_of_other(case: Case, named: str | None) -> None:
    """Assert that the named kernel takes over half of the time of kind ``other``, or that none does."""
    other_ns = sum(row["kinds_ns"].get("other", 0) for row in case.ranks.values())
    names = {k.name for k in case.findings.attribution.kernels if k.kind == "other"}
    times = [sum(a.end - a.start for raw in case.raw.values() for a in raw.activities if a.name == n) for n in names]
    assert bool(named) == (2 * max(times, default=0) > other_ns)
    if named:
        longest = max(zip(times, names, strict=True))[1]
        assert longest.removeprefix("void ").startswith(named)


@rule("verdict", rf"(?<=; )([a-z -]+?) {P}{RATE}")
def _also_rated(case: Case, m: re.Match[str]) -> None:
    percent(m[2], computed_shares(case)[m[1]])
    assert_rate(case, "attention" if m[1] == "attention" else "matrix_products", *m.group(3, 4, 5))


def busy_ns(case: Case, kind: str) -> int:
    """Sum over ranks the time in which a kind of computation runs.

    The time is at most that of the kind's kernels and at most all computation; where kernels never overlap, it equals
    the former.
    """
    times = [(row["kinds_ns"].get(kind, 0), row["compute_ns"]) for row in case.ranks.values()]
    kinds_by_rank = [rank.breakdown.kinds for rank in case.findings.attribution.ranks]
    reported_ns = sum(kinds[kind].busy_ns for kinds in kinds_by_rank if kind in kinds)
    assert reported_ns <= sum(min(pair) for pair in times)
    kernels = [a.end - a.start for raw in case.raw.values() for a in raw.activities if a.kind == "compute"]
    sequential = sum(kernels) == sum(case.swept("compute")) if kernels else False
    assert not sequential or reported_ns == sum(time for time, _ in times)
    return reported_ns


def computed_shares(case: Case) -> dict[str, float]:
    """Return label -> share of the mean wall for each kind of computation.

    Attention is one entry, and so are matrix products.
    """
    matrix = [kind for kind in COMPUTE_PARTS["matrix_products"] if kind in case.kinds]
    label = " and ".join({"gemm": "matrix products", "convolution": "convolutions"}[kind] for kind in matrix)
    shares = {
        KIND[kind].label: busy_ns(case, kind) / sum(row["wall_ns"] for row in case.ranks.values())
        for kind in case.kinds
        if kind in COMPUTE and kind not in ("flash_fwd", "flash_bwd", *matrix)
    }
    rates = {row["part"]: row["share"] for row in (case.summary["step_rates"] or {"parts": []})["parts"]}
    flash = sum(rank.breakdown.flash_ns for rank in case.findings.attribution.ranks) / len(case.ranks)
    shares["attention"] = rates.get("attention", flash / case.mean_wall)
    if matrix:
        shares[label] = rates.get("matrix_products", case.of("matrix_products") / case.mean_wall)
    return {name: share for name, share in shares.items() if share}


# --- what to do about it --------------------------------------------------------------------------------------


OF_WHICH = rf"(?:, of which free communication would gain {MS})?"


@rule("next", rf"Largest loss(?: outside ([a-z, ]+?))?: (.+?), {MS} of {MS}(?:, its largest part ([a-z ,-]+) \({MS}\))?"
      rf"{OF_WHICH}(?=\. To try|: |\.$)")  # fmt: skip
def _largest_loss(case: Case, m: re.Match[str]) -> None:
    step = case.summary["next_step"]
    part, losses = step["part"], [name for name in case.parts if name not in ("peak", "background", "attention")]
    assert part not in ("peak", "vendor_peak", "kernel_limit", "kernel"), "no loss that a change is known to remove"
    attention = case.of(*ATTENTION_PARTS)
    loss_parts = COMMUNICATION_PARTS if m[5] else (part,)
    milliseconds(m[3], case.of(*loss_parts))
    assert 0 < case.of(*loss_parts) <= case.wall
    milliseconds(m[4], case.wall)
    assert (m[5] or m[2]) in (names_of(case, part) if part == "merge_and_copies" else {NAMES[part]})
    # Computation that nothing is known to shorten is work, and no loss; it is named where it takes longer.
    work = needed_work(case)
    losses = [name for name in losses if name not in work]
    longer = [name.replace("_", " ") for name in work if case.of(name) > case.of(*loss_parts)]
    if part not in ATTENTION_PARTS and attention > case.of(*loss_parts):
        longer = ["attention", *longer]
    scope = (m[1] or "").replace("other computation", "other compute").replace("linear recurrences", "recurrence")
    assert sorted(re.split(", | and ", scope)) == sorted(longer or [""])
    others = [name for name in losses if name not in ATTENTION_PARTS]
    if part == "slower_kernel":
        singles = [case.of(name) for name in others if name not in COMMUNICATION_PARTS]
        outside = [case.of(*COMMUNICATION_PARTS), *singles]
        assert case.of(part) == step["time_ns"] > max(*outside, MIN_LOSS_SHARE * case.wall)
        assert case.of(part) >= MIN_LOSS_SHARE * case.wall
        return
    if part in ATTENTION_PARTS:
        assert all(case.of(name) < MIN_LOSS_SHARE * case.wall for name in losses if name not in ATTENTION_PARTS)
        assert case.of(part) == max(case.of(name) for name in [*losses, "attention"] if name != "vendor_peak")
        return
    assert case.of("slower_kernel") <= max(case.of(*loss_parts), case.of(*COMMUNICATION_PARTS)), "attention loses more"
    rivals = [name for name in losses if name not in (*ATTENTION_PARTS, *loss_parts)]
    assert case.of(*loss_parts) >= max((case.of(name) for name in rivals), default=0), "another part is longer"
    if m[5]:
        assert m[2] == "imbalance and exposed communication" and case.of(part) == max(
            case.of(name) for name in loss_parts
        )
        milliseconds(m[6], case.of(part))
    assert_gain(case, part, step, m[7])


def needed_work(case: Case) -> list[str]:
    """List the parts of computation outside attention for which the report has no remedy."""
    rows = case.report["waterfall"]
    return [row["part"] for row in rows if row["part"] in COMPUTE_PARTS and not row["remedy"]]


def assert_gain(case: Case, part: str, step: dict[str, int], shown: str | None) -> None:
    """Assert that a gain is at most its part, and at most the wall less the bound.

    The gain is shown only where it is shorter than the part.
    """
    bound = {"imbalance": case.bounds["balanced"]}.get(part, 0)
    if part in ("exposed_wire", "peer_wait", "exposed_unsplit"):
        bound = case.bounds["free_communication"]
    assert step["time_ns"] == max(0, min(case.of(part), case.wall - bound))
    assert step["share"] == step["time_ns"] / case.wall
    assert bool(shown) == (step["time_ns"] < case.of(part))
    if shown:
        milliseconds(shown, step["time_ns"])


@rule("next", r"In the attention kernels")
def _in_attention(case: Case, m: re.Match[str]) -> None:
    step = case.summary["next_step"]
    assert step["part"] in ("kernel", "kernel_limit") and not case.on_cpu
    outside = [case.of(name) for name in case.parts if name not in (*ATTENTION_PARTS, "background")]
    assert max(outside) < MIN_LOSS_SHARE * case.wall and case.of("slower_kernel") < MIN_LOSS_SHARE * case.wall


def machine_of(case: Case, name: str) -> dict[str, Any]:
    """Return the bundled calibration of this name, which is one of the run's device, as plain JSON."""
    machine: dict[str, Any] = json.loads((MACHINES / f"{name}.json").read_bytes())
    assert {machine["device"]} == set(case.run["environment"]["devices"])
    return machine


def calibrated_ms(case: Case, machine: dict[str, Any], kernel: str) -> float | None:
    """Return milliseconds per GPU and iteration of a kernel for the run's blocks; None if a rank's are not covered.

    By the machine's rates at square blocks with as many pairs as the run's blocks have in the mean, causal and full.
    """
    work, total = case.run["workload"], 0.0
    if not all(
        rank["block_flops"] and rank["block_calls"].keys() >= PHASES[work["backward"]] for rank in case.run["work"]
    ):
        return None
    factors = {"forward": 4, "backward": 10} if work["backward"] else {"forward": 4}
    group = work["heads"] / work["kv_heads"]
    for rank in case.run["work"]:
        pairs = rank["block_flops"] / (sum(factors.values()) * work["batch"] * work["heads"] * work["head_dim"])
        for phase, factor in factors.items():
            flops = factor / sum(factors.values()) * rank["block_flops"]
            times = []
            for causal in {True, work["causal"]} & {work["causal"]} | {False}:
                rows = [
                    row for row in machine["kernel_rates"]
                    if row["kernel"] == kernel and row["phase"] == phase and row["causal"] == causal
                    and row["head_dim"] == work["head_dim"] and max(row["group"] / group, group / row["group"]) <= 2
                ]  # fmt: skip
                if not rows:
                    continue
                nearest = min((abs(np.log(row["group"] / group)), row["group"]) for row in rows)[1]
                curve = sorted((row["tokens"], row["tflops"]) for row in rows if row["group"] == nearest)
                tokens = np.sqrt(pairs / rank["block_calls"][phase] * (1 + causal))
                if curve[0][0] / 2 <= tokens <= 2 * curve[-1][0]:
                    rate = np.interp(np.log(tokens), np.log([x for x, _ in curve]), [y for _, y in curve])
                    times.append(flops / rate / 1e9)
            if not times:
                return None
            total += mean(times)
    return total / len(case.run["work"])


@rule("next|evidence", rf"([a-z0-9-]+) takes {P} less time than ([a-z0-9-]+) for these blocks "
      rf"\({R} ms against {R} ms per GPU by calibration (\w+)\)")  # fmt: skip
def _faster_kernel(case: Case, m: re.Match[str]) -> None:
    machine = machine_of(case, m[6])
    fast, own = calibrated_ms(case, machine, m[1]), calibrated_ms(case, machine, m[3])
    assert fast and own and m[3] == case.run["kernel"] and fast < own
    assert float(m[2]) == pytest.approx(100 * (1 - fast / own), abs=0.051)
    three_digits(m[4], fast)
    three_digits(m[5], own)
    rivals = [calibrated_ms(case, machine, kernel["name"]) for kernel in machine["kernels"]]
    assert fast == pytest.approx(min(time for time in rivals if time))
    assert plain_training(case) and not case.run["strategy"]["params"].get("deterministic")
    # What the part says is that share of the run's own kernels, without repeated work and what is slower beside hops.
    alone_ns = case.of("peak", *KERNEL_PARTS)
    assert abs(case.of("slower_kernel") - alone_ns * (1 - fast / own)) <= 2


def plain_training(case: Case) -> bool:
    """Return whether a run's blocks are those that rates of plain blocks of 16-bit attention tell."""
    work = case.run["workload"]
    unusual = ("documents", "window", "prefix", "softcap", "v_head_dim", "sequences", "kv_length")
    return work["phase"] == "training" and work["dtype"] == "bf16" and not any(work[name] for name in unusual)


@rule("next|evidence", r"by calibration (\w+) no kernel is known to be faster than ([a-z0-9-]+) for these blocks")
def _fastest(case: Case, m: re.Match[str]) -> None:
    machine = machine_of(case, m[1])
    times = [calibrated_ms(case, machine, kernel["name"]) for kernel in machine["kernels"]]
    own = calibrated_ms(case, machine, m[2])
    # None is faster by more than twice what both are uncertain by.
    assert own and m[2] == case.run["kernel"] and min(time for time in times if time) > 0.8 * own
    assert not case.of("slower_kernel") and plain_training(case)


UNKNOWN = r"there is no calibration of (.+?)|calibration (\w+) does not cover these blocks by ([a-z0-9-]+)|the run " \
    r"does not name its strategy and kernel|the strategy is not ringprof's own and may support other kernels only|" \
    r"(no kernel is calibrated in its deterministic mode)"  # fmt: skip


@rule("next|evidence", rf"what another kernel takes is not known: (?:{UNKNOWN})(?=\. |\.$|$)")
def _unknown_kernels(case: Case, m: re.Match[str]) -> None:
    devices = {json.loads(path.read_bytes())["device"] for path in MACHINES.glob("*.json")}
    used = case.run["environment"]["devices"][0]
    assert (used in devices) != bool(m[1]) and "slower_kernel" not in case.parts
    if m[2]:
        machine = machine_of(case, m[2])
        assert not plain_training(case) or not calibrated_ms(case, machine, m[3])
    assert not m[4] or case.run["strategy"]["params"]["deterministic"]


@rule("evidence", rf"a plain matrix product reaches {R} TFLOP/s(?: at {R} MHz)? by calibration (\w+): a distance that "
      r"no change of the program removes")  # fmt: skip
def _matrix_product(case: Case, m: re.Match[str]) -> None:
    machine = machine_of(case, m[3])
    three_digits(m[1], machine["matmul_tflops"]["value"])
    assert bool(m[2]) == bool(machine["matmul_clock_mhz"])
    if case.of("kernel_limit") > 0:
        at_product_ns = case.of("peak") * case.summary["peak"]["tflops"] / machine["matmul_tflops"]["value"]
        assert abs(case.of("peak", "vendor_peak") - at_product_ns) <= 2


@rule("next", r"To try: (.*?)(?=\.$|; 10 % faster|; [\d,.]+ ms of comp)")
def _remedy(case: Case, m: re.Match[str]) -> None:
    case.part = case.summary["next_step"]["part"]
    audit(case, "remedy", m[1])


@rule("next", rf"10 % faster attention saves {MS}")
def _tenth(case: Case, m: re.Match[str]) -> None:
    milliseconds(m[1], case.of(*ATTENTION_PARTS) / 10)


@rule("next", rf"{MS} of computation can hide (?:these bytes|the bytes of ([\w ]+?) alone) from {R} GB/s per rank on")
def _rate_to_hide(case: Case, m: re.Match[str]) -> None:
    compute = mean(row["compute_ns"] for row in case.ranks.values())
    rows = [row for row in case.summary["communication"] if row["wire_gbps"] and row["bytes"]]
    longest = max(rows, key=lambda row: row["bytes"] / row["wire_gbps"])
    milliseconds(m[1], compute)
    three_digits(m[3], longest["bytes"] / len(case.ranks) / compute)
    assert (m[2] is None) == (len(case.summary["communication"]) == 1), "whose bytes these are is not said"
    assert m[2] in (None, KIND[longest["kind"]].operation or KIND[longest["kind"]].label)
    assert longest["bytes"] / len(case.ranks) / compute > longest["wire_gbps"]


@rule("next", r"(?:what most of it waits for|the cause) is not recorded")
def _unrecorded(case: Case, m: re.Match[str]) -> None:
    assert case.summary["next_step"]["part"] == "blocked"


@rule("next", r"which of these it is cannot be told on CPU")
def _unknown_on_cpu(case: Case, m: re.Match[str]) -> None:
    assert case.on_cpu


@rule("next", r"why these cannot be told apart is among the warnings")
def _among_warnings(case: Case, m: re.Match[str]) -> None:
    assert case.report["warnings"] and not case.on_cpu
