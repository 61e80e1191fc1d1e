"""Rules for remedies: each must be possible for the program, and must address a loss that exists."""

from __future__ import annotations

import re
from collections import Counter

from tests.report.raw_facts import is_copy_with_host
from tests.report.sentence_communication import assert_waited_for
from tests.report.sentence_rules import MS, Case, P, milliseconds, rule

# --- remedies: possible for this program, and against what is there -------------------------------------------


def recorded_strategy(case: Case) -> dict[str, object]:
    """Return the strategy of a run that `ringprof record` made; fail for traces and captured blocks."""
    assert case.run and case.run["strategy"] and (case.run["timings"] or case.run["predicted"])
    strategy: dict[str, object] = case.run["strategy"]
    return strategy


def sends_by_nccl(case: Case) -> bool:
    """Return whether the communicator sent hops by send/recv kernels; only such hops can use another transport."""
    return any(e["operation"] == "send_recv" for work in case.run["work"] or [] for e in work["sent"] or [])


@rule("remedy", r"a faster attention kernel")
def _attention(case: Case, m: re.Match[str]) -> None:
    assert case.of("attention") > 0


@rule("remedy", r"another kernel \(ringprof calibrate --rates\)")
def _kernel(case: Case, m: re.Match[str]) -> None:
    assert case.run["strategy"] and case.of("kernel", "kernel_limit") > 0 and "slower_kernel" not in case.parts


@rule("remedy", r"--kernel ([a-z0-9-]+) \(ringprof kernels\)")
def _faster_kernel(case: Case, m: re.Match[str]) -> None:
    recorded_strategy(case)
    assert case.of("slower_kernel") > 0 and m[1] != case.run["kernel"]


@rule("remedy", r"more tokens per rank")
def _tokens(case: Case, m: re.Match[str]) -> None:
    assert (case.run and case.run["strategy"]) or any(row["hops"] for row in case.ranks.values())
    assert not (case.run and case.run["workload"] and case.run["workload"]["phase"] == "decode"), "one token a step"


@rule("remedy", r"a strategy that computes nothing twice|less activation checkpointing")
def _repeated(case: Case, m: re.Match[str]) -> None:
    layer = case.run["workload"]["layer"]
    again = not (case.run["timings"] or case.run["predicted"]) or bool(layer and layer["checkpoint"])
    assert case.of("repeated") > 0 and ("checkpointing" in m[0]) == again


@rule("remedy", r"--hops copy")
def _hops_copy(case: Case, m: re.Match[str]) -> None:
    used = recorded_strategy(case)
    assert not case.on_cpu and used["hops"] != "copy" and not used["cuda_graph"] and sends_by_nccl(case)
    assert len(set(case.run["topology"]["hosts"])) == 1 and case.run["timings"]
    assert case.run["workload"]["operator"] == "attention", "states are not copied"


@rule("remedy", r"--cuda-graph")
def _cuda_graph(case: Case, m: re.Match[str]) -> None:
    used = recorded_strategy(case)
    assert not case.on_cpu and used["hops"] != "copy" and not used["cuda_graph"] and case.run["timings"]
    work = case.run["workload"]
    peer = work["operator"] != "attention" and "/" in str(used["name"])
    assert not (work["layer"] or work["sequences"] or peer), "refused together"


@rule("remedy", r"fewer NCCL channels")
def _channels(case: Case, m: re.Match[str]) -> None:
    assert any(a.name.startswith("nccl") for raw in case.raw.values() for a in raw.activities)


@rule("remedy", r"zigzag or stripe \(the same causal work for all\)")
def _zigzag(case: Case, m: re.Match[str]) -> None:
    work, used = case.run["workload"], case.run["strategy"]
    assert work["operator"] == "attention"
    assert work["causal"] and used["layout"] == "contiguous" and work["phase"] == "training"
    assert not work["documents"] and not work["window"]
    flops = [rank_work["block_flops"] for rank_work in case.run["work"] or []]
    assert not flops or max(flops) > 1.02 * min(flops), "all ranks have the same work already"


@rule("remedy", r"the same causal work for every rank, as zigzag has")
def _as_zigzag(case: Case, m: re.Match[str]) -> None:
    times = [raw.attention_ns for raw in case.raw.values()]
    assert not (case.run and case.run["strategy"]) and times == sorted(set(times)) and times[-1] >= 1.5 * times[0]


@rule("remedy", r"another layout \(ringprof advise compares them\)")
def _layout(case: Case, m: re.Match[str]) -> None:
    assert case.run["workload"]["documents"] and case.run["workload"]["operator"] == "attention"


@rule("remedy", r"look at the GPUs' clocks \(same work, other speed\)")
def _clocks(case: Case, m: re.Match[str]) -> None:
    flops = [rank_work["block_flops"] for rank_work in case.run["work"]]
    assert not case.on_cpu and max(flops) <= 1.02 * min(flops)
    # The longer computation must be attention: FLOPs say nothing about anything else.
    shortest, longest = sorted(case.raw.values(), key=lambda raw: raw.swept["compute"])[:: len(case.raw) - 1]
    difference = longest.swept["compute"] - shortest.swept["compute"]
    assert difference == 0 or longest.attention_ns - shortest.attention_ns >= difference / 2


@rule("remedy", r"compare what ranks compute beside attention \(--show kernels\)")
def _beside_attention(case: Case, m: re.Match[str]) -> None:
    shortest, longest = sorted(case.raw.values(), key=lambda raw: raw.swept["compute"])[:: len(case.raw) - 1]
    difference = longest.swept["compute"] - shortest.swept["compute"]
    assert longest.attention_ns - shortest.attention_ns < difference / 2


@rule("remedy", r"compare what ranks compute \(--show kernels\)")
def _compute_of_recurrence(case: Case, m: re.Match[str]) -> None:
    assert case.run["workload"]["operator"] != "attention" and not case.on_cpu
    flops = {rank_work["block_flops"] for rank_work in case.run["work"]}
    assert len(flops) == 1, "every token costs the same"


@rule("remedy", r"state-scan \((messages that do not grow with the sequence|about log2\(N\) hops in place of N - 1)\)")
def _state_scan(case: Case, m: re.Match[str]) -> None:
    used = recorded_strategy(case)["name"]
    assert used == ("state-a2a" if "messages" in m[1] else "state-ring")
    # On two ranks both pass one state in one hop.
    assert used == "state-a2a" or case.run["topology"]["world_size"] > 2


@rule("remedy", r"the same work for every rank")
def _same_work(case: Case, m: re.Match[str]) -> None:
    compute = [row["compute_ns"] for row in case.ranks.values()]
    assert max(compute) > min(compute)


@rule("remedy", rf"ranks? (\d+)(?: and (\d+))? computes?(?: at least)? {MS}, all others at most {MS}")
def _ranks_that_compute_longest(case: Case, m: re.Match[str]) -> None:
    named = {int(rank) for rank in (m[1], m[2]) if rank}
    times = {rank: row["compute_ns"] for rank, row in case.ranks.items()}
    others = [time for rank, time in times.items() if rank not in named]
    milliseconds(m[3], min(times[rank] for rank in named))
    milliseconds(m[4], max(others))
    assert min(times[rank] for rank in named) > 1.02 * max(others) and len(others) > len(named)


@rule("remedy", r"((?:zigzag|double-ring|burst|usp)(?:(?:, | or )(?:double-ring|burst|usp))*) "
      r"\((hops beside blocks|less between hosts)\)")  # fmt: skip
def _strategies(case: Case, m: re.Match[str]) -> None:
    used = case.run["strategy"]
    assert case.run["workload"]["operator"] == "attention"
    assert used["name"] not in re.split(", | or ", m[1]) and case.run["workload"]["phase"] == "training"
    if m[2] == "hops beside blocks":
        assert used["name"] in ("allgather", "ulysses")
    else:
        between = any(row["link"] == "other_host" for row in case.summary["communication"])
        assert between or len(set(case.run["topology"]["hosts"])) > 1


@rule("remedy", r"faster links")
def _links(case: Case, m: re.Match[str]) -> None:
    rates = [row["hops"]["wire_gbps"] for row in case.ranks.values() if row["hops"] and row["hops"]["wire_gbps"]]
    between = any(row["link"] == "other_host" for row in case.summary["communication"])
    assert between or (case.on_cpu and len(set(case.run["topology"]["hosts"])) > 1) or max(rates) >= 3 * min(rates)


@rule("remedy", r"fewer bytes( over the slow ones)?|more computation beside them")
def _bytes(case: Case, m: re.Match[str]) -> None:
    assert any(row["comm_ns"] or row["exposed_comm_ns"] for row in case.ranks.values())


@rule("remedy", r"-p grad_wire=input")
def _grad_wire(case: Case, m: re.Match[str]) -> None:
    assert case.run["strategy"]["params"]["grad_wire"] in ("exact", "fp32") and case.run["workload"]["backward"]


@rule("remedy", r"find what makes (rank .*?) late")
def _late(case: Case, m: re.Match[str]) -> None:
    for rank, share in re.findall(rf"rank (\d+) \({P} of all waiting is for it\)", m[1]):
        assert_waited_for(case, int(rank), share)


@rule("remedy", rf"rank (\d+) idles {MS}(?: \(--show idle\))?")
def _idles(case: Case, m: re.Match[str]) -> None:
    milliseconds(m[2], case.ranks[int(m[1])]["idle_ns"])


@rule("remedy", r"record all ranks to tell wire from wait")
def _record_all(case: Case, m: re.Match[str]) -> None:
    assert "missing_ranks" in case.codes and not case.on_cpu


@rule("remedy", r"other groups' communication beside computation")
def _other_groups(case: Case, m: re.Match[str]) -> None:
    assert case.of("other_groups")


@rule("remedy", r"fewer (merges|permutations and copies|memory sets|copies)( on the GPU)?")
def _copies(case: Case, m: re.Match[str]) -> None:
    kinds = {"merges": "merge", "permutations and copies": "permute", "memory sets": "memset", "copies": "memcpy"}
    times = {
        kind: case.kinds[kind]["time_ns"] for kind in ("merge", "permute", "memset", "memcpy") if kind in case.kinds
    }
    assert max(times, key=lambda kind: times[kind]) == kinds[m[1]]
    assert not (m[2] and case.on_cpu)


@rule("remedy", r"pinned memory and non_blocking copies, fewer copies from and to the host|fewer copies from and to "
      r"the host, from pinned memory and beside computation")  # fmt: skip
def _host_copies(case: Case, m: re.Match[str]) -> None:
    copies = [a for raw in case.raw.values() for a in raw.activities if a.category == 1 and a.kind == "memory"]
    assert any(is_copy_with_host(a.name) for a in copies)
    assert m[0].startswith("fewer") or any("ageable" in a.name for a in copies)


WORDS = {
    "torch": ("torch.profiler.record_function", "ProfilerActivity.CPU"),
    "nsys": ("NVTX ranges", "nsys profile --trace cuda,nvtx"), "rocprof": ("roctx ranges", "rocprofv3 --hip-trace"),
    "ascend": ("mstx ranges", "torch_npu.profiler with ProfilerActivity.CPU"),
    "xla": ("jax.profiler.TraceAnnotation", "jax.profiler's host tracer"),
}  # fmt: skip
"""Words of each writer of traces for the marks of phases, and for recording launches."""


def words_of(case: Case) -> tuple[str, str]:
    return WORDS[case.findings.attribution.ranks[0].producer]


def on_amd(case: Case) -> bool:
    devices = [rank.device or "" for rank in case.findings.attribution.ranks]
    calls = [event.name for raw in case.raw.values() for event in raw.host]
    return words_of(case) == WORDS["rocprof"] or "AMD" in devices[0] or any(name.startswith("hip") for name in calls)


@rule("remedy", r"(CUDA|HIP) graphs( or torch\.compile)?"
      r"(?: for the ([\d,]+) of ([\d,]+) kernels still launched one by one(?: \((.*?)\))?)?")  # fmt: skip
def _graphs(case: Case, m: re.Match[str]) -> None:
    kernels = [(raw, a) for raw in case.raw.values() for a in raw.activities if a.category == 0]
    calls = Counter((id(raw), a.correlation) for raw, a in kernels if a.correlation in raw.launches)
    single = [a for raw, a in kernels if calls[id(raw), a.correlation] < 8]
    assert not case.on_cpu and "cuda_graph" not in case.codes and (m[1] == "HIP") == on_amd(case)
    assert bool(m[3]) == (len(single) < len(kernels)) and not (m[2] and m[3])
    if m[3]:
        assert (m[3], m[4]) == (f"{len(single):,}", f"{len(kernels):,}")
    compiled = any(a.name.startswith(("triton_poi", "triton_red", "triton_per")) for _, a in kernels)
    assert bool(m[2]) == (words_of(case) == WORDS["torch"] and not m[3] and not compiled)


@rule("remedy", r"graph mode|more of the step in one jax\.jit")
def _other_graphs(case: Case, m: re.Match[str]) -> None:
    assert words_of(case) in (WORDS["ascend"], WORDS["xla"])


@rule("remedy", r"cudaMemPrefetchAsync before managed memory is touched, or memory that does not move")
def _prefetch(case: Case, m: re.Match[str]) -> None:
    assert any(a.name.startswith("Page migration") for raw in case.raw.values() for a in raw.activities)


@rule("remedy", r"fewer and longer kernels")
def _longer_kernels(case: Case, m: re.Match[str]) -> None:
    assert not case.on_cpu


OF_THE_HOST = (
    r"more DataLoader workers, prefetching, pinned memory",
    r"keep memory allocated, so that the step needs no (\S+)",
    r"fewer calls that wait for the GPU, such as (\S+)",
    r"profile after compilation and graph capture are over \(more warm-up\)",
    r"find why single (\S+) calls take long: kernels loaded at first use \(warm up before profiling"
    r"(?P<cuda>, or CUDA_MODULE_LOADING=EAGER)?\), or a busy CPU",
    r"find what holds the host up in (.+?) \(first use, a busy CPU\)",
)


@rule("remedy", "|".join(OF_THE_HOST))
def _of_the_host(case: Case, m: re.Match[str]) -> None:
    event_names = [name for raw in case.raw.values() for _, name in raw.host_pieces]
    event_name = next((name for name in m.groups() if name), None)
    assert not m["cuda"] or (event_name or "").startswith("cu"), "no variable of this GPU's software"
    assert (
        event_name in event_names
        if event_name
        else any(re.search("DataLoader|Capture|Graph|compile|nvrtc|Load", n) for n in event_names)
    )


@rule("remedy", r"name the program's phases with (.*?) to see what it does meanwhile")
def _phases(case: Case, m: re.Match[str]) -> None:
    assert m[1] == words_of(case)[0]
    assert any(not name for raw in case.raw.values() for _, name in raw.host_pieces)


@rule("remedy", r"fewer dependencies between streams")
def _streams(case: Case, m: re.Match[str]) -> None:
    assert any(len({a.stream for a in raw.activities}) > 1 for raw in case.raw.values())


@rule("remedy", r"pinned memory for copies from and to the host")
def _pinned(case: Case, m: re.Match[str]) -> None:
    assert any("ageable" in a.name for raw in case.raw.values() for a in raw.activities)


@rule("remedy", r"record the CPU's launches as well \((.*?)\) to see the cause")
def _launches(case: Case, m: re.Match[str]) -> None:
    assert m[1] == words_of(case)[1]
    assert any(a.correlation not in raw.launches for raw in case.raw.values() for a in raw.activities)
