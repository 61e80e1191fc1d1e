"""Time a strategy over the many GPUs of one host on two of them.

    torchrun --nproc-per-node 2 examples/two_gpus_as_many.py --ranks 8 --strategy zigzag --seq 131072 --heads 40

Each process runs one real rank of the strategy over ``--ranks`` ranks: its blocks, merges and hops, with their real
sizes. Every hop goes to the other process, which stands for the next and for the previous rank, and the hop of that
process arrives. Both compute as much as the ranks that they stand for, so a message is sent when a neighbour would send
it. The messages have the right sizes and the wrong values: the results are not those of attention.

The time of an iteration is that of the slower process. It holds for GPUs that NVLink switches connect, where each pair
has the bandwidth that it has alone, and for strategies that send in rings and all-to-alls. The slowest of many GPUs is
slower than the slower of two: docs/prediction.md has the differences from runs on four GPUs, up to 3 %. NCCL carries a
message of less than 128 MiB on more channels between two ranks than in a larger communicator: where such hops decide,
the time is too short (by 14 % for zigzag over 16,384 tokens on four H200).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from ringprof.iteration.clock import clock_for
from ringprof.iteration.shard import WorkloadShard
from ringprof.strategies import Unsupported, find
from ringprof.strategies.base import Context
from ringprof.strategies.registry import parse_parameter
from ringprof.strategies.transport.communicator import Communicator
from ringprof.strategies.transport.groups import process_group
from ringprof.strategies.transport.hosts import Hosts
from ringprof.strategies.transport.ring_channel import Channel, Hop, RankGroup
from ringprof.strategies.transport.torch_transport import CopyTransport, TorchTransport
from ringprof.workload.workload import Workload


def exchange(channel: Channel, comm: RankGroup, shares: Any, keeps: Any) -> TorchTransport:
    """Connect a channel of many ranks to the other process, which stands for all its other members; a `Connect`."""
    own = dist.get_rank()
    copies = comm.hops == "copy" and not keeps
    group = None if copies else getattr(shares, "group", None)
    if group is None:
        # Two members share one ring of copies per group: channels that have rings of their own need own groups.
        group = process_group(channel.channel, (0, 1), "two GPUs as many", dist.group.WORLD)
    pair: Any = SimpleNamespace(channel=channel.channel, size=2, following=1 - own, previous=1 - own)
    both: Any = SimpleNamespace(group=dist.group.WORLD, processes={0: None, 1: None})
    return (CopyTransport if copies else Exchange)(pair, group, both)


class Exchange(TorchTransport):
    """Hops and all-to-alls between two processes, each of which stands for all other members of a channel."""

    def collective(self, channel: Channel, operation: str, tensor: Tensor) -> Hop:
        """Start an all-to-all in which the piece of every other member goes to, and comes from, the other process."""
        if operation != "all_to_all":
            raise Unsupported(f"{operation}: two GPUs stand for more in rings and all-to-alls only")
        size = channel.size
        pieces = [1 if process == dist.get_rank() else size - 1 for process in (0, 1)]
        received = torch.empty_like(tensor)
        into, out = received.view(size, -1), tensor.view(size, -1)
        if not self._has_nccl:
            into, out = into.view(torch.uint8), out.view(torch.uint8)
        options = c10d.AllToAllOptions()
        options.asyncOp = True
        channel.count_collective(operation, tensor.nbytes // size)
        return Hop([self.group.alltoall_base(into, out, pieces, pieces, options)], [tensor], [received])


def rank_shard(
    strategy: str, params: Sequence[str], workload: Workload, rank: int, ranks: int, kernel: str, hops: str,
    device: torch.device,
) -> WorkloadShard:  # fmt: skip
    """Return one rank's share of a workload over ``ranks`` ranks of one host, whose peers are the other process."""
    comm = Communicator(hops=hops, connect=exchange, dry_run=(rank, Hosts(dict.fromkeys(range(ranks), 0))))
    strategy_class = find(strategy).load()
    pairs = [param.split("=", 1) for param in params]
    parsed = {key: parse_parameter(strategy_class, strategy, key, value) for key, value in pairs}
    return WorkloadShard.create(strategy_class(Context(comm, kernel), **parsed), workload, device)


def iteration_ms(shard: WorkloadShard, device: torch.device, warmup: int, iters: int) -> list[float]:
    """Return the milliseconds of each iteration in the slower process. Collective."""
    for _ in range(warmup):
        clock_for(device).run(shard.run_iteration)
    clock = clock_for(device)
    for _ in range(iters):
        clock.run(shard.run_iteration)
    times = torch.tensor(clock.times_ns(), dtype=torch.int64, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return [time / 1e6 for time in times.tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--strategy", default="zigzag")
    parser.add_argument("--param", "-p", action="append", default=[], help="parameter of the strategy, NAME=VALUE")
    parser.add_argument("--ranks", type=int, default=4, help="ranks that the two processes stand for")
    parser.add_argument(
        "--as-ranks", type=int, nargs=2, help="ranks that the processes run (default: the first and the last)"
    )
    parser.add_argument("--seq", type=int, default=1024, help="tokens over all ranks")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--hops", choices=("nccl", "copy"), default="nccl")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--iters", type=int, default=6)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    if dist.get_world_size() != 2:
        raise SystemExit("two processes stand for all ranks: torchrun --nproc-per-node 2")
    stands_for = (options.as_ranks or [0, options.ranks - 1])[dist.get_rank()]
    workload = Workload(
        seq=options.seq, heads=options.heads, kv_heads=options.kv_heads or options.heads, head_dim=options.head_dim
    )
    shard = rank_shard(
        options.strategy, options.param, workload, stands_for, options.ranks, options.kernel, options.hops, device
    )
    try:
        times = iteration_ms(shard, device, options.warmup, options.iters)
    except Unsupported as refusal:
        raise SystemExit(str(refusal)) from None
    sent_bytes = sum(size for _, size in shard.strategy.comm.meter.sent.values()) / (options.warmup + options.iters)
    if dist.get_rank() == 0:
        print(f"{options.strategy} over {options.ranks} ranks: {statistics.median(times):.2f} ms an iteration")
        print(f"shortest {min(times):.2f} ms, longest {max(times):.2f} ms")
        print(f"{sent_bytes / 1e6:.3f} MB sent per iteration and rank")
    dist.barrier()
    sys.stdout.flush()
    # torch can abort a process that ends while the groups of the channels still have threads.
    os._exit(0)


if __name__ == "__main__":
    main()
