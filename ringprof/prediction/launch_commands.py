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


def framework_flags(query: Query) -> dict[str, str]:
    """Return what makes other programs run a query, by program; nothing for programs that lack the strategy.

    Megatron-LM's flags are of its command line. With ``usp`` they give two sizes: of the groups of adjacent GPUs, which
    exchange heads, and of the rings over these groups; there is no ring-first placement. Transformer Engine takes
    arguments of `DotProductAttention.set_context_parallel_group`, for ``usp`` two groups. torchtitan 0.3 gathers keys
    and values, with a zigzag layout (``headtail``) or a contiguous one.
    """
    flags: dict[str, str] = {}
    size, params = query.cluster.size, query.params
    comm_type = _CP_COMM_TYPES.get(query.strategy)
    if comm_type is not None and params.get("placement", "head-first") == "head-first":
        flags["Megatron-LM"] = f"--context-parallel-size {size} --cp-comm-type {comm_type}"
        groups = "group, ranks"
        if query.strategy == "usp":
            degree = int(params["ulysses_degree"])
            flags["Megatron-LM"] += f" --hierarchical-context-parallel-sizes {degree} {size // degree}"
            groups = f"[group_of_{degree}, group_of_{size // degree}], ranks"
        flags["Transformer Engine"] = f'set_context_parallel_group({groups}, stream, cp_comm_type="{comm_type}")'
    balancer = {"zigzag": "headtail", "contiguous": "None"}.get(str(params.get("layout")))
    if query.strategy == "allgather" and balancer and query.workload.documents is None:
        flags["torchtitan"] = (
            f"--parallelism.context_parallel_degree {size} --parallelism.context_parallel_load_balancer {balancer}"
        )
    return flags
