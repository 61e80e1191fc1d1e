"""Context parallelism of recurrences by other packages, called as in their authors' own examples.

Source: flash-linear-attention 0.6 (fla/ops/cp): the ranks gather each other's transitions in one all-gather.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from fla.ops.cp import build_cp_context
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from torch import Tensor

from ..errors import Unsupported
from ..transport.communicator import Communicator
from ..transport.passes import in_pass
from ..transport.ring_channel import Hop
from .kernel import Carry, Inputs
from .state_strategies import Documents, RecurrentStrategy, Result


class FlaContextParallel(RecurrentStrategy):
    """The gated delta rule by flash-linear-attention, with its kernels and its communication, which are not counted.

    Takes one batch entry, and no initial or final states.
    """

    operators = ("gdn",)
    takes_batches = False
    takes_states = False
    counts_all_sent = False

    def __init__(self, comm: Communicator, kernel: str = "auto") -> None:
        super().__init__(comm, kernel)
        if kernel == "reference":
            raise Unsupported("fla/cp runs the kernels of flash-linear-attention: kernel fla or auto")
        if comm.group is None:
            raise Unsupported("fla/cp needs torch.distributed: start it with torchrun")
        self._context = lru_cache(maxsize=8)(self._build_context)

    @in_pass("forward")
    def _run(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, scale: float | None,
        initial: Tensor | None, final: bool, cu_seqlens: Documents,
    ) -> Result:  # fmt: skip
        documents = self._documents(cu_seqlens, q.shape[1])
        tensors = (q, k, v, g) if beta is None else (q, k, v, g, beta)
        self._check_call("delta rule of fla/cp", documents, tensors, final, initial)
        if beta is None:
            raise Unsupported("fla/cp computes the gated delta rule, not linear attention")
        if not q.is_cuda or q.shape[0] > 1 or initial is not None or final:
            raise Unsupported("fla/cp takes tensors on a GPU, one batch entry, and no initial or final state")
        context = self._context(documents, q.device)
        out: Tensor = chunk_gated_delta_rule(q, k, v, g.squeeze(-1).float(), beta.float(), scale, cp_context=context)[0]
        return out

    def _build_context(self, documents: tuple[int, ...], device: torch.device) -> Any:
        return build_cp_context(torch.tensor(documents, device=device), group=self.comm.group)

    def pass_state(
        self, carry: Carry, takes: bool, gives: bool, known: Tensor | None, x: Inputs, reach: int, *, reverse: bool
    ) -> tuple[Tensor | None, list[Hop]]:
        raise NotImplementedError("computed by flash-linear-attention")
