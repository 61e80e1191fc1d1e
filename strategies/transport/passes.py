"""Passes of a group's strategies: what the other ranks see where one raises in the middle, and how all go on.

A rank that raises in a pass has made some of its hops. The hops of its next call would fill those that the others still
wait for, and their results would be wrong without an error. So a rank whose pass raises writes why to the store of
torch.distributed, and aborts the communicators of its channels. A thread of each rank reads it twice a second, and
ends what the rank and its streams wait for; over gloo, a transfer that is waited for at two looks. They raise
`RankRaised` in that call or at a later one, and no rank sends until all have called `recover`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cached_property, wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..errors import PeerLost, RankRaised, Unsupported
from .call_comparison import forget_comparison, look_regularly, wake_comparison
from .copy_engine import drain_copies, stop_copies
from .groups import (
    abort_channels,
    channel_groups,
    close_gloo,
    forget_channels,
    raise_if_stopped,
    stopped,
    timeout,
    waiting,
)
from .handshake import forget_calls
from .hop_comparison import forget_hops
from .ring_channel import Meter

_F = TypeVar("_F", bound=Callable[..., Any])
_REFUSALS = (ValueError, TypeError, LookupError, NotImplementedError, ImportError)
"""Errors of arguments, `Unsupported` among them: before a rank has sent anything, all ranks raise them alike."""
_RECOVER_INTERVAL_S = 0.02
"""Seconds between two looks at whether all ranks have come to recover."""
NO_PASS = nullcontext()
"""The context manager of a pass where there is no other rank."""

_passes: WeakKeyDictionary[Any, GroupPasses] = WeakKeyDictionary()


def passes_of(group: dist.ProcessGroup, token: str) -> GroupPasses:
    """Return the state of a group's passes, which all its strategies share; ``token`` is equal on all its ranks."""
    if group not in _passes:
        _passes[group] = GroupPasses(group, token)
    return _passes[group]


def in_pass(phase: str) -> Callable[[_F], _F]:
    """Decorate a function that makes a pass; its first argument has the communicator as ``comm``.

    ``phase`` is ``forward`` or ``backward``.
    """

    def decorate(function: _F) -> _F:
        @wraps(function)
        def passing(owner: Any, *args: Any, **options: Any) -> Any:
            with owner.comm.passing(phase):
                return function(owner, *args, **options)

        decorated: Any = passing
        return decorated  # type: ignore[no-any-return]

    return decorate


class GroupPasses:
    """Whether a rank of one group has raised in the middle of a pass, as far as this rank knows."""

    def __init__(self, group: dist.ProcessGroup, token: str) -> None:
        # The group is the key of a weak dictionary and must not be kept.
        self._ranks, self._rank, self._name = dist.get_process_group_ranks(group), dist.get_rank(), group.group_name
        self._world, self._token = ref(c10d._get_default_group()), token
        self.generation = 0
        """Number of times that the ranks have recovered."""
        self.calls = 0
        """Number of calls of this rank, of all strategies over the group."""
        self.entered = 0
        """Number of passes that this rank is in, one inside another."""
        self._own = False
        """Whether it is this rank that has raised, where one has."""
        stopped.pop(self._name, None)  # of a group before torch.distributed was started again
        self._waiting: set[object] = set()
        """Transfers that this process waited for at the last look since it knows that another has raised."""
        self._lock = threading.Lock()
        look_regularly(self, "ringprof-passes")

    @cached_property
    def _store(self) -> Any:
        # A client of its own: a request does not wait for the answer to another thread's.
        store: Any = c10d._world.pg_map[c10d._get_default_group()][1]
        return store.clone()

    @property
    def _key(self) -> str:
        return f"ringprof:passes:{self._token}:{self.generation}"

    def check(self) -> None:
        """Raise `RankRaised` if a rank has left a pass in the middle, and the ranks have not recovered."""
        raise_if_stopped(self._name)

    def look(self) -> bool:
        """Read once whether another rank has raised; return whether to read again. Runs in a thread.

        On a CPU, a rank waits inside of passes only. On a GPU, its streams may wait at any time.
        """
        if dist.group.WORLD is not self._world():
            return False
        if self._name in stopped:
            with self._lock:
                # What all have sent arrives between two looks. The rest waits for the rank that has raised.
                if self._name in stopped and self._waiting & waiting:
                    close_gloo(self._name)
                self._waiting = set(waiting)
        elif self.entered or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            with self._lock:
                if self._name not in stopped and self._store.check([self._key]):
                    self._stop(self._store.get(self._key).decode(), own=False)
                    self._waiting = set(waiting)
        return True

    def left(self, error: BaseException, phase: str, *, has_sent: bool) -> None:
        """Tell the other ranks that this one has left a pass by an ``error``, unless it follows from theirs.

        Raises `RankRaised` from an ``error`` of the transport that follows from another rank's.
        """
        refused = isinstance(error, Unsupported if phase == "step" else _REFUSALS)
        # By the last, torch's checkpoint ends a recomputation that has all it needs, on all ranks.
        planned = isinstance(error, RankRaised) or type(error).__name__ == "_StopRecomputationError"
        if planned or (refused and not has_sent):
            return
        after = {"forward": "", "backward": "a backward pass after ", "step": "a step after "}[phase]
        call = f"{after}call {self.calls}"
        with self._lock:
            if self._name not in stopped:
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".rstrip(": ")
                self._mark(
                    f"rank {self._rank} raised in {call} ({reason})", f"this rank left {call} half-way ({reason})"
                )
        if not self._own and isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            raise RankRaised(stopped[self._name]) from error

    def _mark(self, for_others: str, for_own: str) -> None:
        """Write to the store that this rank has raised, unless another has been faster; stop all transfers."""
        own, text = True, for_own
        with suppress(RuntimeError):  # the store has ended, and with it the job
            if self._store.check([self._key]):
                own, text = False, self._store.get(self._key).decode()
            else:
                self._store.set(self._key, for_others)
                # Once this is answered, ranks that lose their connection to this one find the reason.
                self._store.check([self._key])
        self._stop(text, own=own)

    def _stop(self, reason: str, *, own: bool) -> None:
        """End all transfers of the group on this rank, and all waits for them."""
        self._own, stopped[self._name] = own, f"{reason}; call strategy.recover() on all ranks"
        wake_comparison(self._name)
        stop_copies(stopped[self._name], channel_groups(self._name))
        abort_channels(self._name)

    def recover(self, group: dist.ProcessGroup) -> None:
        """Drop unfinished transfers, and let channels connect anew. Collective over ``group``.

        Raises `PeerLost` where a rank does not come within the group's timeout.
        """
        with self._lock:
            if self._name not in stopped:
                self._mark(f"rank {self._rank} has called recover()", "this rank has called recover()")
            drain_copies(channel_groups(self._name))
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()
            keys = {rank: f"{self._key}:{rank}" for rank in self._ranks}
            self._store.set(keys[self._rank], "")
            until = time.monotonic() + timeout().total_seconds()
            while not self._store.check(list(keys.values())):
                if time.monotonic() > until:
                    missing = [str(rank) for rank, key in keys.items() if not self._store.check([key])]
                    raise PeerLost(f"all ranks must call recover(): rank {', '.join(missing)} does not come")
                time.sleep(_RECOVER_INTERVAL_S)
            # Nobody sends any more.
            forget_channels(self._name)
            forget_comparison(group)
            forget_calls(group)
            forget_hops(group)
            self._waiting.clear()  # a transfer holds its tensors
            del stopped[self._name]
            self.generation += 1


class Pass:
    """A context manager for one pass of a strategy: ``forward`` (a call), ``backward``, or a ``step`` of several."""

    __slots__ = ("_begin", "_meter", "_passes", "_phase")

    def __init__(self, passes: GroupPasses, phase: str, meter: Meter) -> None:
        self._passes, self._phase, self._meter, self._begin = passes, phase, meter, meter.operations

    def __enter__(self) -> None:
        self._passes.entered += 1
        if self._phase == "forward":
            self._passes.calls += 1

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._passes.entered -= 1
        if error is not None:
            # In a step, refusals of passes that have sent something are known already.
            has_sent = self._phase != "step" and self._meter.operations != self._begin
            self._passes.left(error, self._phase, has_sent=has_sent)
