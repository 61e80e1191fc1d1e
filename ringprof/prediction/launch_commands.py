"""Commands that run a predicted choice: ringprof's recorder, and Megatron-LM's flags where it has the strategy."""

from __future__ import annotations

from shlex import quote

from ringprof.prediction.query import Query

_CP_COMM_TYPES = {"megatron": "p2p", "ulysses": "a2a", "allgather": "all_gather", "usp": "a2a+p2p"}
"""Megatron-LM's and Transformer Engine's ``cp_comm_type`` by strategy."""


def record_command(query: Query) -> str | None:
    """Return the shell command that records a query; None for documents, windows and other masks.

    On several nodes the command runs on each of them, with ``HEAD_NODE`` replaced by the name of the first.
    """
    workload, cluster = query.workload, query.cluster
    if not workload.mask().plain:
        return None
    words = ["ringprof", "record", "--world", str(cluster.size)]
    if cluster.hosts > 1:
        words = [
            "torchrun", "--nnodes", str(cluster.hosts), "--nproc-per-node", str(cluster.gpus_per_host),
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "HEAD_NODE:29500", "-m", "ringprof", "record",
        ]  # fmt: skip
    words += ["--strategy", query.strategy]
    for name, value in query.params.items():
        words += ["-p", f"{name}={value}"]
    sizes = (
        ("seq", workload.seq, None), ("batch", workload.batch, 1), ("heads", workload.heads, None),
        ("kv-heads", workload.kv_heads, workload.heads), ("head-dim", workload.head_dim, 128),
    )  # fmt: skip
    for name, size, default in sizes:
        words += [f"--{name}", str(size)] if size != default else []
    words += ["--no-causal"] if not workload.causal else []
    words += ["--forward-only"] if not workload.backward else []
    words += ["--dtype", workload.dtype] if workload.dtype != "bf16" else []
    words += ["--kernel", query.kernel, "--hops", query.hops]
    return " ".join(map(quote, words))


def megatron_flags(query: Query) -> str | None:
    """Return Megatron-LM's command-line flags for a query; None if Megatron-LM has no such strategy.

    With ``usp`` the flags give two sizes: of the groups of adjacent GPUs, which exchange heads, and of the rings over
    these groups. Megatron-LM has no ring-first placement.
    """
    comm_type = _CP_COMM_TYPES.get(query.strategy)
    if comm_type is None or query.params.get("placement", "head-first") != "head-first":
        return None
    flags = f"--context-parallel-size {query.cluster.size} --cp-comm-type {comm_type}"
    if query.strategy != "usp":
        return flags
    degree = int(query.params["ulysses_degree"])
    return f"{flags} --hierarchical-context-parallel-sizes {degree} {query.cluster.size // degree}"
