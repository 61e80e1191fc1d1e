"""Rules for the sentences of a report, and the audit of a text by them.

A rule is a regular expression of a whole clause, in which the names of figures stand in their places, and the condition
under which the clause is true, if it claims more than its figures. `audit` reads a text from its start to its end; a
clause without a rule fails. Figures are compared with `tests.report.sentence_facts`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from ringprof.analysis.findings.claim import Claim
from ringprof.analysis.kinds.kinds import COMMUNICATION, KIND
from tests.report import sentence_conditions as check
from tests.report.sentence_conditions import RATE, WORDS, Condition
from tests.report.sentence_facts import OWN, Case, mean, right_value, unit_of

_SEPARATOR = re.compile(r"; |, |: |\. |\.$")
_FIGURE = re.compile(r"\{[a-z][^{}\\]*\}")
_SHOWN = r"(-?[\d,.]+)(?: ?(%|ms|s|[PTG]FLOP/s))?"
_UNITS = {"%": 0.01, "ms": 1e6, "s": 1e9, "PFLOP/s": 1e3, "TFLOP/s": 1, "GFLOP/s": 1e-3, None: 1}
LABELS = "|".join(KIND[kind].label for kind in COMMUNICATION)
MS, R = r"(-?[\d,]+\.\d+ m?s)", r"([\d,.]+)"
MISSING = {
    "the end of what is cut off, so that all figures are of what comes before": {"truncated", "damaged_compression"},
    "traces that are left out": {"left_out"},
    "a moment that all traces have in common": {"mixed_runs"},
    "anything launched in the marked iterations; the whole trace is shown": {"window_empty"},
}
UNKNOWN = r"there is no calibration of (.+?)|calibration (\w+) does not cover these blocks by ([a-z0-9-]+)|the run " \
    r"does not name its strategy and kernel|the strategy is not ringprof's own and may support other kernels only|" \
    r"(no kernel is calibrated in its deterministic mode)"  # fmt: skip
UNMATCHED = (
    "transfers whose peers' traces are not here", "transfers that two ranks count differently",
    "transfers whose bytes two ranks record differently", "communication kernels without a record of peers and bytes",
    "kernels wait less than the clocks of their hosts can tell",
)  # fmt: skip
BOUNDS = {"free_communication": "free communication", "balanced": "perfect balance",
          "all_hidden": "perfect balance and overlap"}  # fmt: skip


def remedy(case: Case, m: re.Match[str], v: Sequence[float]) -> object:
    case.part = case.summary["next_step"]["part"]
    _audit_words(case, "remedy", m[1], v)
    return True


_COMPUTES = (
    (r"(?<=wall: )rank {rank} computes {compute}, rank {rank} computes {compute}|"
     r"^rank {rank} computes {compute}, rank {rank} computes {compute}$",
     lambda c, m, v: [c.compute[rank] for rank in v[::2]] == v[1::2] == [f(c.compute.values()) for f in (min, max)]),
)  # fmt: skip
_KERNELS = (
    (r"([a-z0-9-]+) takes {saved} less time than ([a-z0-9-]+) for these blocks \({fastest_ms} ms "
     r"against {own_ms} ms per GPU by calibration (\w+)\)", check.faster_kernel),
    (r"by calibration (\w+) no kernel is known to be faster than ([a-z0-9-]+) for these blocks", check.fastest_kernel),
    (rf"what another kernel takes is not known: (?:{UNKNOWN})(?=\. |\.$|$)", check.unknown_kernels),
)  # fmt: skip
TABLE: dict[str, Sequence[str | tuple[str, Condition]]] = {
"verdict": (
    (r"one (GPU|process): nothing is communicated",
     check.alone),
    (r"no communication in these traces",
     lambda c, m, v: check.silent(c) and not any(
         a.kind == "comm" for raw in c.raw.values() for a in (*raw.activities, *raw.outside))),
    (r"no communication in what is reported; the rest of these traces has {mean(left_out)} of it per "
     r"(GPU|process)", lambda c, m, v: check.silent(c) and (m[1] == "process") == c.on_cpu),
    (r"no known communication; {unknown_kinds/time} of the time is kernels of unknown kind, the longest (.+)$",
     check.unknown_kinds),
    r"{exposed_comm/time} of the time is exposed communication",
    (r"{max(exposed_comm)} at worst \(rank {rank}\)",
     lambda c, m, v: v[0] == c.ranks[v[1]]["exposed_comm_ns"] / c.ranks[v[1]]["wall_ns"]),
    (r"time blocked in waiting for a transfer", lambda c, m, v: c.on_cpu),
    (r"{overlap_ratio} of all communication is hidden behind computation",
     lambda c, m, v: sum(c.swept("overlapped")) == sum(row["overlapped_ns"] for row in c.ranks.values())),
    (r"partly at the same time", check.at_once),
    (rf"{{exposed_kind/time}} (blocked in waiting for a transfer|{LABELS})(?: of group (\S+?))?"
     r"(?=, {exposed_kind/time}|, partly|\.$)", check.kind_exposed),
    (r"Missing: all that ran on the GPU\. The times are the CPU's, which launches it and waits for it "
     r"\(no_device_activities\)", lambda c, m, v: "no_device_activities" in c.codes and c.on_cpu),
    *((rf"(?:Missing: )?{words}(?: \(see warnings\))?", lambda c, m, v, codes=codes: codes & c.codes)
      for words, codes in MISSING.items()),
    (r"{exposed_wire/time} of the time is bytes on a wire with nothing to hide them",
     lambda c, m, v: check.largest("exposed_wire")(c, m, v) and c.of("exposed_wire") <= mean(c.exposed)),
    (r"{peer_wait/wall} of the slowest rank's wall is waiting for peers( whose hops are slow)?"
     r"(, or for the slowest rank to end)?(,? beyond what their computation differs by)?",
     check.waits_for_peers),
    r"{exposed_wire/wall} wire",
    (r"(?:most waited for: )?rank {rank} \({waited_for} of all waiting\)", check.waited_for),
    (r"of what ring steps expose, {exposed_in_pass} is in the (forward|backward) pass, most in step {step} "
     r"\(mean {max(step)}\)",
     check.worst_step),
    (r"(\S+|peer copy) between hosts moves {between_hosts_gbps} GB/s(?:, (?:(\S+|peer copy) )?"
     r"{within_host_gbps} within a host)?", check.between_hosts),
    (r"ranks? {rank}(?:, {rank})*(?: and {rank})? sends? at {min(slow_gbps)}(?: to {max(slow_gbps)})? GB/s, the others "
     r"at {min(others_gbps)}(?: to {max(others_gbps)})?(?: \((?:{rank} to {rank}(?:, )?)+\))?", check.slow_ranks),
    (r"{waiting_of_kind} of rank {rank}'s (\S+|peer copy) time was waiting for ranks", check.waited),
    (r"(?<=for ranks) with up to {work_ratio} times its (causal )?work",
     lambda c, m, v: bool(m[1]) == c.workload["causal"]),
    r"(?<=for ranks) that compute up to {max(compute)}, where it computes {min(compute)}",
    (r"[iI]mbalance takes {imbalance/wall} of the slowest rank's wall", check.largest("imbalance")),
    (r"work rises with the rank, as in contiguous pieces under a causal mask: see zigzag and stripe", check.rises),
    (r"How much of it is waiting and how much wire is not known \(see warnings\)",
     lambda c, m, v: check.largest("exposed_unsplit")(c, m, v) and c.codes & {
         "peer_missing", "no_record", "counts_differ", "bytes_differ", "clocks_disagree",
         "clocks_inconclusive", "mixed_runs", "missing_ranks"}),
    r"{other_groups/time} of the time is exposed communication of other groups",
    (r"{wall} could be ", lambda c, m, v: len(c.ranks) > 1),
    *((rf"{{{name}}} \({{gain({name})}}(?: less)?\) with {said}", check.bound(name)) for name, said in BOUNDS.items()),
    (r"{migrations/time} of the time nothing runs on the GPU until pages of managed memory move, which the "
     r"host or the GPU touches"),
    (r"{launch_gaps/time} of the (predicted )?time the GPU is idle (because its next work is not launched "
     r"yet)?(?: or )?(in gaps below 5 us)?", check.not_launched),
    (r"for {host_call/idle} of its idle time the host is in (.+?)(?: \(data loader\)| \(compilation or graph "
     r"capture\))?(?=\.$|; what computes)", check.host_call),
    (r"{short_host/idle} of its idle time is short host work \(pieces below 0\.1 ms\) and gaps below 5 us",
     check.short_host),
    r"for {nothing_open/idle} of its idle time the launching thread has no operator, runtime call or range open",
    (r"these traces do not hold what the host did meanwhile",
     lambda c, m, v: not any(raw.host for raw in c.raw.values())),
    (r"{blocked/time} of the predicted time the GPU is idle although its next work is launched",
     lambda c, m, v: c.run["predicted"]),
    (r"{launched_blocked/time} of the time the GPU is idle although its next work is launched: for "
     r"{blocked_cause/idle} of its idle time (a copy is staged through pageable memory|it waits for another stream|it "
     r"waits for something that the trace does not record)", check.blocked_on),
    (r"{unlaunched/time} of the time nothing runs on the GPU and the launch of what follows is not recorded, "
     r"so the cause cannot be told"),
    (r"{launch_gaps/time} of the time nothing computes( and nothing waits|; waiting is not recorded)",
     lambda c, m, v: c.on_cpu and ("not recorded" in m[1]) == ("cpu_no_wait_marks" in c.codes)),
    (r"{blocked_between_hosts/time} of the time ranks are blocked in channels that cross hosts \(([^)]*)\), "
     r"{blocked_within_hosts/time} in channels within a host", check.blocked_in_hops),
    r"{leaving_mb} MB leave each host (?:(per iteration)|in the captured block), {leaving_mbps} MB/s",
    (r"On CPU ranks are blocked or done on average for {exposed_unsplit/wall} of the slowest rank's time: "
     r"waiting and transfer cannot be separated", lambda c, m, v: c.on_cpu),
    (rf"(?:({{busy(attention)/time}}) of the time is attention{RATE}, )?{{(\w+)/time}}( of the time)? is "
     rf"([a-z][a-z -]*?)(?:, most of it ([a-z /-]+?))?{RATE}(?=\.$|; MFU|; shapes|; what)", check.beside_attention),
    (r"MFU {mfu} of {step_peak_tflops} TFLOP/s \((\w+)\)",
     lambda c, m, v: m[1] == c.summary["step_rates"]["peak_dtype"]),
    (r"shapes are recorded for (?:(?:{attention_coverage} of the attention|{matrix_products_coverage} of the "
     r"matrix-product) time(?: and )?)+(, and rates are of that time)?(?=\.$)",
     lambda c, m, v: bool(m[1]) == any(
         row["tflops"] is not None and row["coverage"] >= 0.1 for row in c.rates.values())),
    (r"No loss outside the attention kernels reaches 2 %: {attention_parts/time} of the time is attention "
     rf"kernels(?: at {{block_tflops}} TFLOP/s(?:, {{block_tflops/peak_tflops}} of the device's peak)?)?{RATE}",
     check.no_loss),
    (rf"[Ww]hat computes longest is (.*?{{busy\(\w+\)/time}}{RATE}) of the time", check.computes_longest),
    (rf"(?<=; )([a-z -]+?) {{busy\((\w+)\)/time}}{RATE}", check.also_rated),
    *_COMPUTES,
),
"next": (
    (r"Largest loss(?: outside ([a-z, ]+?))?: (.+?), (?:{loss}|{communication}) of {wall}(?:, its largest part "
     r"([a-z ,-]+) \({loss}\))?(?:(, of which free communication would gain {gain}))?(?=\. To try|: |\.$)",
     check.largest_loss),
    (r"In the attention kernels", check.in_attention),
    (r"To try: (.*?)(?=\.$|; 10 % faster|; {mean\(compute\)} of comp)", remedy),
    r"10 % faster attention saves {attention_parts/10}",
    (r"{mean(compute)} of computation can hide (?:these bytes|the bytes of ([\w ]+?) alone) from {rate_to_hide} "
     r"GB/s per rank on", check.rate_to_hide),
    (r"(?:what most of it waits for|the cause) is not recorded",
     lambda c, m, v: c.summary["next_step"]["part"] == "blocked"),
    (r"which of these it is cannot be told on CPU", lambda c, m, v: c.on_cpu),
    (r"why these cannot be told apart is among the warnings", lambda c, m, v: c.report["warnings"] and not c.on_cpu),
    *_KERNELS,
),
"evidence": (
    (r"a plain matrix product reaches {matmul_tflops} TFLOP/s(?: at {matmul_mhz} MHz)? by calibration (\w+): "
     r"a distance that no change of the program removes", check.matrix_product),
    (r"attention operators, mean {mean(flash)}", lambda c, m, v: c.on_cpu),
    (r"union of the attention kernels; (?:the traces do not tell the work|no peak is known that fits|the "
     r"stated workload does not fit the counted FLOPs): not compared with a peak", check.union_of_attention),
    r"{needed_tflop} TFLOP per device at {peak_tflops} TFLOP/s \([^)]*\)",
    (r"blocks of {done/needed} times the work that the mask needs",
     lambda c, m, v: (v[0] >= 1.00005) >= (c.of("repeated") > 0.001 * c.wall)),
    r"the same blocks alone: {solo_tflops} TFLOP/s, {solo_tflops/peak_tflops} of peak",
    (r"{rate_in_run} TFLOP/s in the run(?: against {solo_tflops} alone)?", check.rate_in_run),
    (r"no solo rate:( repeated work and)? slow-down beside communication is in it",
     lambda c, m, v: c.summary["solo_tflops"] is None and bool(m[1]) == ("repeated" not in c.parts)),
    (r"each rank computes {max(compute)}$", lambda c, m, v: len(set(c.compute.values())) == 1),
    (r"on the wire with no computation beside it; (.*)$", check.rates_on_wire),
    (r"(not beside attention; )?mean of all: (.*)$", check.kinds),
    (r"waiting beyond what the ranks' computation differs by|its kernels have no wait and wire \(see "
     r"warnings\): exposed wire, peer wait and imbalance in one|communication of groups that were not asked for, with "
     r"nothing beside it|other work of the device runs, launched outside the window",
     lambda c, m, v: not c.on_cpu and ("see warnings" not in m[0] or c.report["warnings"])),
    (r"nothing ran on the device before the next activity was launched, and in gaps below 5 us",
     check.idle_of("launch_gaps", "host", "gap")),
    (r"nothing ran on the device, although the next activity had been launched, or no launch is recorded",
     check.idle_of("blocked", "blocked")),
    (r"neither computing nor blocked|blocked in wait: on CPU wire, peer wait and imbalance are not told apart",
     lambda c, m, v: c.on_cpu),
    *_COMPUTES,
    *_KERNELS,
),
"remedy": (
    (r"a faster attention kernel", lambda c, m, v: c.of("attention") > 0),
    (r"another kernel \(ringprof calibrate --rates\)",
     lambda c, m, v: c.run["strategy"] and c.of("kernel", "kernel_limit") > 0 and "slower_kernel" not in c.parts),
    (r"--kernel ([a-z0-9-]+) \(ringprof kernels\)",
     lambda c, m, v: check.recorded(c) and c.of("slower_kernel") > 0 and m[1] != c.run["kernel"]),
    (r"more tokens per rank", check.more_tokens),
    (r"a strategy that computes nothing twice|less activation checkpointing", check.repeated),
    (r"--hops copy", check.hops_copy),
    (r"--cuda-graph", check.cuda_graph),
    (r"fewer NCCL channels", lambda c, m, v: any(a.name.startswith("nccl") for a in c.activities())),
    (r"zigzag or stripe \(the same causal work for all\)", check.zigzag),
    (r"the same causal work for every rank, as zigzag has", check.rises),
    (r"another layout \(ringprof advise compares them\)",
     lambda c, m, v: c.workload["documents"] and c.workload["operator"] == "attention"),
    (r"look at the GPUs' clocks \(same work, other speed\)", check.clocks),
    (r"compare what ranks compute beside attention \(--show kernels\)", check.beside),
    (r"compare what ranks compute \(--show kernels\)",
     lambda c, m, v: c.workload["operator"] != "attention" and not c.on_cpu and len(set(c.flops.values())) == 1),
    (r"state-scan \((messages that do not grow with the sequence|about log2\(N\) hops in place of N - 1)\)",
     check.state_scan),
    (r"the same work for every rank", lambda c, m, v: max(c.compute.values()) > min(c.compute.values())),
    (r"ranks? {rank}(?: and {rank})? computes?(?: at least)? {min(named_compute)}, all others at most "
     r"{max(others_compute)}", check.compute_longest),
    (r"((?:zigzag|double-ring|burst|usp)(?:(?:, | or )(?:double-ring|burst|usp))*) "
     r"\((hops beside blocks|less between hosts)\)", check.strategies),
    (r"faster links",
     lambda c, m, v: check.between(c) or (c.on_cpu and c.hosts > 1) or max(c.gbps.values()) >= 3 * min(c.gbps.values())
     ),
    (r"fewer bytes( over the slow ones)?|more computation beside them",
     lambda c, m, v: any(row["comm_ns"] or row["exposed_comm_ns"] for row in c.ranks.values())),
    (r"-p grad_wire=input",
     lambda c, m, v: c.run["strategy"]["params"]["grad_wire"] in ("exact", "fp32") and c.workload["backward"]),
    (r"(?:find what makes )?rank {rank} \({waited_for} of all waiting is for it\)(?: and (?=rank)| late)",
     check.waited_for),
    (r"rank {rank} idles {idle_of_rank}(?: \(--show idle\))?", lambda c, m, v: v[1] == c.ranks[v[0]]["idle_ns"]),
    (r"record all ranks to tell wire from wait", lambda c, m, v: "missing_ranks" in c.codes and not c.on_cpu),
    (r"other groups' communication beside computation", lambda c, m, v: c.of("other_groups")),
    (r"fewer (merges|permutations and copies|memory sets|copies)( on the GPU)?", check.copies),
    (r"pinned memory and non_blocking copies, fewer copies from and to the host|fewer copies from and to "
     r"the host, from pinned memory and beside computation", check.host_copies),
    (r"(CUDA|HIP) graphs( or torch\.compile)?(?: for the ({one_by_one}) of {kernels} kernels still launched one "
     r"by one(?: \((.*?)\))?)?", check.graphs),
    (r"graph mode|more of the step in one jax\.jit", lambda c, m, v: c.reported[0].producer in ("ascend", "xla")),
    (r"cudaMemPrefetchAsync before managed memory is touched, or memory that does not move",
     lambda c, m, v: any(a.name.startswith("Page migration") for a in c.activities())),
    (r"fewer and longer kernels", lambda c, m, v: not c.on_cpu),
    (r"more DataLoader workers, prefetching, pinned memory|keep memory allocated, so that the step needs no (\S+)|"
     r"fewer calls that wait for the GPU, such as (\S+)|profile after compilation and graph capture are over \(more "
     r"warm-up\)|find why single (\S+) calls take long: kernels loaded at first use \(warm up before profiling"
     r"(?P<cuda>, or CUDA_MODULE_LOADING=EAGER)?\), or a busy CPU|find what holds the host up in (.+?) \(first use, a "
     r"busy CPU\)", check.of_the_host),
    (r"name the program's phases with (.*?) to see what it does meanwhile",
     lambda c, m, v: m[1] == WORDS[c.reported[0].producer][0] and any(not name for _, name in c.host_pieces)),
    (r"fewer dependencies between streams",
     lambda c, m, v: any(len({a.stream for a in raw.activities}) > 1 for raw in c.raw.values())),
    (r"pinned memory for copies from and to the host",
     lambda c, m, v: any("ageable" in a.name for a in c.activities())),
    (r"record the CPU's launches as well \((.*?)\) to see the cause",
     lambda c, m, v: m[1] == WORDS[c.reported[0].producer][1] and any(
         a.correlation not in raw.launches for raw in c.raw.values() for a in raw.activities)),
),
"warning": (
    (r"(\d+) of (\d+) ranks have no trace: ([\d, ]+)( \.\.\.)?$", check.missing_ranks),
    (rf"(\d+) kernels or copies beside the window have no launch record, as if launched before profiling: {MS}, "
     rf"{MS} of it communication, count as background", check.launched_before),
    (r"(\d+) copied hops do not tell which rank they write to: time blocked on a peer counts as idle",
     lambda c, m, v: 0 < int(m[1]) <= sum(a.name.startswith("Memcpy PtoP") for a in c.activities())
     and not any(row.get("blocked_on_peer_ns") for row in c.report["ranks"])),
    (r"(\d+) kernels or copies are 0 ns long",
     lambda c, m, v: int(m[1]) == sum(a.start == a.end for a in c.activities())),
    (r"(\d+) activities were replayed by CUDA graphs, whose launches are not recorded one by one: .*$",
     lambda c, m, v: int(m[1]) <= max(len(raw.activities) for raw in c.raw.values())),
    (rf"the clocks of (\d+) hosts are aligned by their transfers, not known to agree: offsets up to {R} us, the "
     rf"largest residual (?:is not known|is {R} us)", check.fitted_clocks),
    (r"a transfer ends before its partner begins: no wait and wire"
     r"(?:: if these ranks are of several nodes, --ranks-per-node has their clocks fitted)?$", check.clocks_apart),
    (rf"(?:{'|'.join(UNMATCHED)}): no wait and wire for them",
     lambda c, m, v: any(part.wire_ns is None for rank in c.reported for part in rank.splits)
     and ("not here" not in m[0] or "missing_ranks" in c.codes)),
    (rf"attention FLOPs of (\d+) ranks? \((\d+) per workload\): {R} [MGTPE]?FLOP stated, {R} [MGTPE]?FLOP counted "
     rf"\({R} times\); TFLOP/s use the stated workload: .*$",
     lambda c, m, v: int(m[1]) == c.run["topology"]["world_size"] and abs(float(m[5]) - 1) > 0.01),
    (r"on CPU a transfer's own time is not recorded: no overlap, wait and wire",
     lambda c, m, v: c.on_cpu and all(row["waits"] is None for row in c.ranks.values())),
    (r"no ringprof::wait or gloo range: what communication cost is not in the trace",
     lambda c, m, v: c.on_cpu and not any(raw.blocked_ns for raw in c.raw.values())),
    (r"no activity was launched in the marked iterations: the whole trace is shown",
     lambda c, m, v: any(raw.marked for raw in c.raw.values())),
    (rf".*of (\d+) devices only (\d+) is reported, the busiest; others are busy for {MS}", check.several_devices),
    (r"communication kernels have no record of their group: matched as the n-th of a stream on every rank, "
     rf"which all end within {R} us of one another", lambda c, m, v: len(c.ranks) > 1),
    (r"the run used a GPU, and nothing of what ran there is in the trace: .*|what ran on the device is not "
     r"read: .*", lambda c, m, v: c.on_cpu),
),
}  # fmt: skip
"""Rules of verdict, next step, evidence and remedies, and of warnings, whose numbers are not figures of a claim."""
RULES = {
    category: [
        (re.compile(_FIGURE.sub(lambda figure: re.escape(figure[0]), pattern)), condition)
        for pattern, condition in ((row, check.always) if isinstance(row, str) else row for row in rows)
    ]
    for category, rows in TABLE.items()
}


def audit(case: Case, category: str, text: str) -> None:
    """Check every figure and every clause of a text. Raises `AssertionError` where one is false or has no rule."""
    figures = [(figure.name, figure.value) for figure in getattr(text, "figures", ())]
    if isinstance(text, Claim):
        assert_shown(text)
    for name, value in figures:
        if name not in OWN:
            # Times of the waterfall are whole nanoseconds.
            tolerance = {"ns": 2.0, "share": 2 / case.mean_wall}.get(unit_of(name), 2e-6)
            assert value == pytest.approx(right_value(case, name), rel=1e-6, abs=tolerance), f"{name} in {text!r}"
    _audit_words(case, category, getattr(text, "words", text), [value for _, value in figures])


def _audit_words(case: Case, category: str, words: str, values: Sequence[float]) -> None:
    position = 0
    while position < len(words):
        matches = [
            (m, condition)
            for pattern, condition in RULES[category]
            if (m := pattern.match(words, position)) and m.end() > position
        ]
        assert matches, f"no rule for {words[position:]!r} in {words!r}"
        match, condition = max(matches, key=lambda candidate: candidate[0].end())
        first, count = len(_FIGURE.findall(words[:position])), len(_FIGURE.findall(match[0]))
        try:
            assert condition(case, match, values[first : first + count]), f"figures {values[first : first + count]}"
        except AssertionError as problem:
            raise AssertionError(f"{match[0]!r} in {words!r}: {problem}") from problem
        position = match.end()
        separator = _SEPARATOR.match(words, position)
        position = separator.end() if separator else position


def assert_shown(claim: Claim) -> None:
    """Assert that a text shows each figure of its claim to the last digit, in its unit and its place."""
    pattern = re.escape(claim.words)
    for figure in claim.figures:
        pattern = pattern.replace(re.escape(f"{{{figure.name}}}"), _SHOWN, 1)
    match = re.fullmatch(pattern, claim)
    assert match, f"{claim!r} does not show its figures"
    for index, figure in enumerate(claim.figures):
        number, unit = match[2 * index + 1], match[2 * index + 2]
        assert (unit == "%") == (unit_of(figure.name) == "share"), f"unit of {figure.name} in {claim!r}"
        assert (unit in ("ms", "s")) == (unit_of(figure.name) == "ns"), f"unit of {figure.name} in {claim!r}"
        assert (unit == "s") == (unit_of(figure.name) == "ns" and figure.value >= 999_950_000), claim
        half = 0.5 * 10.0 ** -len(number.partition(".")[2])
        value = figure.value / _UNITS[unit]
        assert abs(float(number.replace(",", "")) - value) <= half * (1 + 1e-6) + 1e-9, f"{number} for {value}"
