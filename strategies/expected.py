"""What a strategy is expected to hold in memory and to compute, before it runs: for the plan of a recording."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Load:
    """One attention problem as one of ``size`` ranks holds it; the properties are bytes.

    ``seq`` is the global sequence length, ``item_bytes`` the size of one number of the inputs.
    """

    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    item_bytes: int
    size: int
    backward: bool = True
    controls: bool = False
    """Whether the controls of a recording run, too."""
    kv_length: int = 0
    """Keys of a sequence, where they are more than ``seq``, its new tokens."""

    @property
    def q(self) -> int:
        """This rank's queries, as many as its output, their gradients."""
        return self.batch * -(-self.seq // self.size) * self.heads * self.head_dim * self.item_bytes

    @property
    def kv(self) -> int:
        """This rank's keys and values together."""
        return 2 * self.q // self.heads * self.kv_heads

    @property
    def q_wide(self) -> int:
        """Queries in float32."""
        return 4 * self.q // self.item_bytes

    @property
    def kv_wide(self) -> int:
        """Keys and values in float32."""
        return 4 * self.kv // self.item_bytes

    @property
    def own(self) -> int:
        """What every strategy holds in a backward pass: q, k, v, out and dout, and the gradients of one block."""
        return 4 * self.q + 2 * self.kv


def forward_bytes(load: Load, kv_sets: int = 3) -> int:
    """The peak of a forward pass: q, k, v and the output of one rank alone.

    Where more ranks merge, another output and one in float32, and ``kv_sets`` of K and V that travel.
    """
    alone = 2 * load.q + load.kv
    return alone if load.size == 1 else alone + load.q + load.q_wide + kv_sets * load.kv


def ring_bytes(load: Load, grad_wire: str = "fp32") -> int:
    """The peak of a ring of K and V, with dK and dV in float32 behind them.

    That is dQ in float32, the kernel's own sum of it, three sets of K and V (held, arriving, and sent but not yet given
    back) and two of dK and dV; copied hops arrive in places that are as many. Between two ranks dK and dV that are not
    asked for in float32 take the places of K and V. One rank alone holds the larger of the kernel's sum and its dK and
    dV.
    """
    if not load.backward:
        return forward_bytes(load)
    if load.size == 1:
        return load.own + max(load.q_wide, load.kv_wide)
    gradients = 0 if load.size == 2 and grad_wire != "fp32" else 2 * load.kv_wide
    return load.own + 2 * load.q_wide + 3 * load.kv + gradients


def contiguous_imbalance(size: int) -> float:
    """Work of the busiest of N = ``size`` ranks over the mean, with a causal mask and a piece of the sequence each.

    Rank r sees r + 1/2 squares of keys: the last rank N - 1/2, the mean N / 2.
    """
    return 2 - 1 / size


class Expectations:
    """The two figures that every strategy class brings itself; None where it says nothing.

    They are not inherited: another strategy's figures, even a parent's, are not one's own. A bundled class without them
    cannot be made (TypeError); a user's own counts as unknown, and so does other people's code.
    """

    @classmethod
    def memory_bytes(cls, load: Load, **params: Any) -> int | None:
        """The most that one rank holds; ``params`` are the strategy's own parameters, where they are known."""
        return None

    @classmethod
    def imbalance(cls, size: int, *, causal: bool, **params: Any) -> float | None:
        """Work of the busiest of ``size`` ranks over the mean."""
        return None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("memory_bytes", "imbalance"):
            if name in vars(cls):
                continue
            if _bundled(cls.__module__):
                raise TypeError(f"{cls.__module__}.{cls.__name__} must say {name} itself: a parent's is not its own")
            setattr(cls, name, vars(Expectations)[name])


def _bundled(module: str) -> bool:
    """Whether it holds strategies of ours: the base classes are none, and those in `foreign` call other people's."""
    return module.startswith(f"{__package__}.") and not module.startswith(
        (f"{__package__}.base", f"{__package__}.cached", f"{__package__}.foreign.")
    )
