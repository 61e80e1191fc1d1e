"""Strategies as strangers write them, which do more than compute when they are made or run."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import torch
import torch.distributed as dist

from ringprof.strategies.algorithms.zigzag import Zigzag

MADE: list[str] = []


class _Does(Zigzag):
    """Does something when it is made."""

    def __init__(self, context: Any, **given: Any) -> None:
        super().__init__(context, **given)
        MADE.append(type(self).__name__)
        self.do()

    def do(self) -> None:
        """The something."""


class Prints(_Does):
    def do(self) -> None:
        print("loud")
        sys.stderr.write("louder")
        os.write(1, b"loudest")


class Hangs(_Does):
    def do(self) -> None:
        threading.Event().wait()


class Exits(_Does):
    def do(self) -> None:
        sys.exit(3)


class Dies(_Does):
    def do(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Raises(_Does):
    def do(self) -> None:
        raise LookupError("no such\nthing")


class Sends(_Does):
    def do(self) -> None:
        dist.all_reduce(torch.ones(1))


class Multiplies(_Does):
    """As many threads as torch likes would wait for each other for ever in a fork."""

    def do(self) -> None:
        torch.ones(500, 500) @ torch.ones(500, 500)


class Forked(_Does):
    """What torch says of a backward pass where one was there on devices before the fork."""

    def do(self) -> None:
        raise RuntimeError(
            "Unable to handle autograd's threading in combination with fork-based multiprocessing. See x"
        )
