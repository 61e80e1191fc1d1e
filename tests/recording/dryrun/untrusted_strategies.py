"""User strategies that do more than compute when they are created or run."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import torch
import torch.distributed as dist

from ringprof.strategies.algorithms.zigzag import Zigzag

CREATED: list[str] = []


class _SideEffect(Zigzag):
    """Strategy with a side effect when it is created."""

    def __init__(self, context: Any, **params: Any) -> None:
        super().__init__(context, **params)
        CREATED.append(type(self).__name__)
        self.act()

    def act(self) -> None:
        """Have the side effect."""


class Prints(_SideEffect):
    def act(self) -> None:
        print("loud")
        sys.stderr.write("louder")
        os.write(1, b"loudest")


class Hangs(_SideEffect):
    def act(self) -> None:
        threading.Event().wait()


class Exits(_SideEffect):
    def act(self) -> None:
        sys.exit(3)


class Dies(_SideEffect):
    def act(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Raises(_SideEffect):
    def act(self) -> None:
        raise LookupError("no such\nthing")


class Sends(_SideEffect):
    def act(self) -> None:
        dist.all_reduce(torch.ones(1))


class Multiplies(_SideEffect):
    """Strategy that multiplies matrices; torch's threads would wait for each other forever in a fork."""

    def act(self) -> None:
        torch.ones(500, 500) @ torch.ones(500, 500)


class Forked(_SideEffect):
    """Strategy that raises torch's error for a backward pass after one on devices before the fork."""

    def act(self) -> None:
        raise RuntimeError(
            "Unable to handle autograd's threading in combination with fork-based multiprocessing. See x"
        )
