"""Options that say what is to be foreseen: the problem, the cluster, the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ringprof.cli.recording import all_of, masks, workload_of, workload_options
from ringprof.cli.values import KERNEL_NAMES, Known, Number, Tokens
from ringprof.cli.write import formats
from ringprof.errors import UsageError
from ringprof.foresee.links import Cluster
from ringprof.json_object import Options
from ringprof.run import Workload

_CLUSTER = (
    click.option("--forward-only", is_flag=True, help="No backward pass."),
    click.option("--kernel", default="auto", show_default=True, type=Known(KERNEL_NAMES),
                 help="A kernel that the machine's file has curves of."),
    click.option("--hosts", type=click.IntRange(1, 1 << 16), default=1, show_default=True, help="Hosts."),
    click.option("--gpus-per-host", type=click.IntRange(1, 1024), default=8, show_default=True, help="GPUs of each."),
    click.option("--nic", type=Number(min=0, min_open=True), metavar="GBIT",
                 help="Line rate of a NIC in Gbit/s; one a GPU unless --gpus-per-nic says otherwise."),
    click.option("--gpus-per-nic", type=click.IntRange(min=1), default=1, show_default=True, help="GPUs to a NIC."),
    click.option("--oversubscription", type=Number(min=1), default=1.0, show_default=True,
                 help="A host's NICs over its up-links."),
    click.option("--net-channels", type=click.IntRange(1, 64), help="NCCL_NCHANNELS_PER_NET_PEER, where it is set."),
    click.option("--machine", required=True, metavar="FILE_OR_NAME",
                 help="A calibration: h200, h100, b200, a800, or a file of `ringprof calibrate`."),
    formats("json"),
)  # fmt: skip


def asks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the options of a problem, a cluster and a machine."""
    seq = click.option("--seq", type=Tokens(), help="Global sequence length in tokens: 131072 or 128k.")
    return seq(workload_options()(masks(all_of(*_CLUSTER)(function))))


def asked_workload(options: Options) -> Workload:
    """Raises `UsageError` where there is no length."""
    if options["seq"] is None:
        raise UsageError("--seq: the sequence length is needed, in tokens")
    return workload_of(options, options["seq"], backward=not options["forward_only"])


def asked_cluster(options: Options) -> Cluster:
    return Cluster(
        hosts=options["hosts"], gpus_per_host=options["gpus_per_host"], nic_gbit=options["nic"],
        gpus_per_nic=options["gpus_per_nic"], oversubscription=options["oversubscription"],
        net_channels=options["net_channels"],
    )  # fmt: skip
