"""Settings of the tests of strategies."""

import torch

# torch 2.13's first vectorised exp or log of a process is now and then 4e-11 wrong in float64 where two threads share
# it (`x.logsumexp(-1)` twice over 2 x 4 x 64 x 65 numbers), and a truth must not be. Ranks have one thread as well.
torch.set_num_threads(1)
