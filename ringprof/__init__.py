"""ringprof: a profiler and trace analyser for distributed training, ring attention (context parallelism) above all.

```python
import ringprof

run = ringprof.load("traces/run.json")      # or a trace, or a folder of traces
run.verdict                                 # what communication costs, why, and what a fix would gain
run.breakdown()                             # pandas frame, one row per rank; others: hops(), steps(), kernels(), ...
run.steps().attrs["columns"]                # what each column means
run.plot.timeline()                         # matplotlib axes
run.view()                                  # in a notebook: interactive timeline and waterfall

ringprof.compare("traces/main", "traces/branch").frame()
ringprof.load_tables("some.log").report()   # printed kernel tables
print(ringprof.load_comm_logs("dumps").to_terminal())   # Flight Recorder dumps, NCCL Inspector files

with ringprof.capture("traces/mine"):       # in your own torchrun script
    step()
print(ringprof.check(attention, "zigzag"))  # in the same script: compare your attention with dense attention

with ringprof.monitor("exposed.jsonl", every=200):      # around your training loop: one sample every 200 steps
    train()
```

Predict the performance on a given cluster:

```python
problem = ringprof.Workload(seq=1 << 20, heads=40, kv_heads=8, head_dim=128)
cluster = ringprof.Cluster(hosts=4, gpus_per_host=8, nic_gbit=400)
ringprof.advise(problem, cluster, machine="h100").choices()
ringprof.predict("burst", problem, cluster, machine="h100").plot()
ringprof.balance(problem, world=32)         # load balance of each layout, from the mask alone
```

Importing this module does not load torch, pandas or matplotlib. Each public name loads what it needs on its first
use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ringprof._version import __version__

if TYPE_CHECKING:
    from ringprof.prediction.api import advise, balance, predict
    from ringprof.prediction.network import Cluster
    from ringprof.printed.benchmarks.logs import logs
    from ringprof.printed.communication.comm_log_report import CommLogAnalysis, load_comm_logs
    from ringprof.printed.tables.table_analysis import TableAnalysis, load_tables
    from ringprof.results.analysis import Analysis
    from ringprof.results.comparison import compare
    from ringprof.results.load import load
    from ringprof.results.options import LoadOptions
    from ringprof.training.api import capture, check, check_model, monitor, prove
    from ringprof.workload.workload import Workload

_HOME = {
    "Analysis": "ringprof.results.analysis",
    "Cluster": "ringprof.prediction.network",
    "CommLogAnalysis": "ringprof.printed.communication.comm_log_report",
    "LoadOptions": "ringprof.results.options",
    "TableAnalysis": "ringprof.printed.tables.table_analysis",
    "Workload": "ringprof.workload.workload",
    "advise": "ringprof.prediction.api",
    "balance": "ringprof.prediction.api",
    "capture": "ringprof.training.api",
    "check": "ringprof.training.api",
    "check_model": "ringprof.training.api",
    "compare": "ringprof.results.comparison",
    "load": "ringprof.results.load",
    "load_comm_logs": "ringprof.printed.communication.comm_log_report",
    "load_tables": "ringprof.printed.tables.table_analysis",
    "logs": "ringprof.printed.benchmarks.logs",
    "monitor": "ringprof.training.api",
    "predict": "ringprof.prediction.api",
    "prove": "ringprof.training.api",
}

__all__ = [
    "Analysis",
    "Cluster",
    "CommLogAnalysis",
    "LoadOptions",
    "TableAnalysis",
    "Workload",
    "__version__",
    "advise",
    "balance",
    "capture",
    "check",
    "check_model",
    "compare",
    "load",
    "load_comm_logs",
    "load_tables",
    "logs",
    "monitor",
    "predict",
    "prove",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'ringprof' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
