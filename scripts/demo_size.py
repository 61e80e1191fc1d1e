"""Print the options of a small recording that suits this machine: a second or two of work."""

from __future__ import annotations

import torch

if torch.cuda.is_available():
    print("--seq 65536")
else:
    print("--seq 4096 --heads 8 --head-dim 64 --warmup 1 --iters 3")
