"""Print options for a small recording on this machine that takes a second or two."""

from __future__ import annotations

import torch

if torch.cuda.is_available():
    print("--seq 65536")
else:
    print("--seq 4096 --heads 8 --head-dim 64 --warmup 1 --iters 3")
