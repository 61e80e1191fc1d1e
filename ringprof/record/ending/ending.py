"""Ending a run on somebody else's launcher: all ranks within seconds of the first trouble, one of them says why.

Rank 0 hears of every trouble, waits a moment for the cause to show among its effects, tells all to end, and speaks. If
it is rank 0 that has gone, rank 1 speaks, and on every other host the host's first rank.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ringprof.claim import sees
from ringprof.errors import RecordError, RingprofError
from ringprof.record.ending.account import TIME_LIMIT, Account, write_log
from ringprof.record.ending.failure import full_text, is_effect, kind_of, message_of
from ringprof.record.ending.lifeline import Hub, Line, Word
from ringprof.record.ending.siblings import GRACE_S, end_siblings
from ringprof.record.folder import discard
from ringprof.record.progress import Standing
from ringprof.record.request import Task
from ringprof.scratch import remove_all

SETTLE_S = 0.5
"""From the first trouble to the judgement: a cause may be heard of after its effects."""
LAST_WORDS_S = 2.0
BACKUP_S = 15.0
"""After the time limit, which is rank 0's to see: then the others end by themselves."""


class SaidElsewhere(RecordError):
    """This rank's run has failed, and another rank says why."""


@dataclass
class Scene:
    """One rank of a run, as its ending needs to know it."""

    task: Task
    rank: int
    hosts: Sequence[str]
    standing: Standing
    hops: Callable[[], int | None]
    siblings: Mapping[int, int]
    """The processes of this host's other ranks, by rank."""

    def stopped(self, reason: str) -> Word:
        return Word(kind="stopped", where=self.standing.where(), hops=self.hops(), reason=reason)

    def failed(self, error: BaseException) -> Word:
        kind, message = kind_of(error), message_of(error)
        return Word(
            kind="failed", where=self.standing.where(), hops=self.hops(), reason=kind, message=message,
            effect=is_effect(kind, message), detail=full_text(error),
        )  # fmt: skip


class FirstRank:
    """Rank 0's ending of a run."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._own: Word | None = None
        self._concluding = threading.Lock()
        self._sealed = False
        self.hub = Hub(len(scene.hosts), self._trouble)

    def seal(self) -> None:
        """Everything is here: what happens to the others from now on changes nothing."""
        if not self._concluding.acquire(blocking=False):
            _wait_for_the_end()
        self._sealed = True
        self.hub.calm()

    def done(self) -> None:
        """The run is written."""
        self.hub.farewell()

    def failed(self, error: BaseException) -> RingprofError:
        """The error to raise for the whole run, when this rank has one."""
        self._own = self._own or self._scene.failed(error)
        if not self._sealed and not self._concluding.acquire(blocking=False):
            _wait_for_the_end()
        return self._conclude()

    def stopped(self, reason: str, code: int) -> None:
        """Called by the watch: ends the process."""
        self._own = self._own or self._scene.stopped(reason)
        if self._concluding.acquire(timeout=LAST_WORDS_S + SETTLE_S):
            self._speak(self._conclude())
        _leave(code)

    def _trouble(self) -> None:
        if self._concluding.acquire(blocking=False):
            self._own = self._own or self._scene.stopped("")
            self._speak(self._conclude())

    def _conclude(self) -> RingprofError:
        time.sleep(SETTLE_S)
        gone = list(self.hub.gone)
        self.hub.end_all(LAST_WORDS_S)
        self.hub.close()
        words = {**({0: self._own} if self._own else {}), **self.hub.words}
        account = Account(self._scene.hosts, words, gone, self._scene.task.time_limit)
        error = _closed(self._scene.task, account)
        # They have been told, and have had their time for last words.
        end_siblings(self._scene.siblings, GRACE_S - LAST_WORDS_S)
        return error

    def _speak(self, error: RingprofError) -> NoReturn:
        _print(error)
        _leave(error.exit_code)


class OtherRank:
    """Any other rank's ending of a run."""

    def __init__(self, scene: Scene, address: str, port: int, token: str) -> None:
        """Raises OSError where rank 0 cannot be reached."""
        self._scene = scene
        self._said = False
        self._speaking = threading.Lock()
        self.line = Line(address, port, token, scene.rank, self._told)

    def done(self) -> None:
        """This rank has nothing more to do for the run."""
        self.line.close()
        self.line.say(Word(kind="done"))

    def failed(self, error: BaseException) -> RingprofError:
        """Tell rank 0, and leave the speaking to it if it can."""
        word = self._scene.failed(error)
        self._say(word)
        # Rank 0 tells this rank to end, or is found to be gone: both end the process.
        time.sleep(GRACE_S)
        return SaidElsewhere(word.message)

    def stopped(self, reason: str, code: int) -> None:
        """Called by the watch: ends the process. At the time limit, rank 0 has not seen to it."""
        if reason == TIME_LIMIT:
            if self._speaks():
                self._speak_for_rank_0(Account(self._scene.hosts, {}, (), self._scene.task.time_limit, overdue=True))
        elif not self._say(self._scene.stopped(reason)) and self._speaks():
            self._speak_for_rank_0(self._without_rank_0())
        _leave(code)

    def _say(self, word: Word) -> bool:
        self._said = True
        return self.line.say(word)

    def _told(self, by_rank_0: bool) -> NoReturn:
        if by_rank_0:
            if not self._said:
                self._say(self._scene.stopped(""))
        elif self._speaks():
            self._speak_for_rank_0(self._without_rank_0())
        scene = self._scene
        if scene.rank == scene.hosts.index(scene.hosts[scene.rank]):
            # The first rank of a host sees to it that the host's others end; rank 0 does on its own.
            end_siblings(scene.siblings)
        _leave(RecordError.exit_code)

    def _speaks(self) -> bool:
        hosts, rank = self._scene.hosts, self._scene.rank
        return rank == 1 or (rank == hosts.index(hosts[rank]) and hosts[rank] not in hosts[:2])

    def _without_rank_0(self) -> Account:
        return Account(self._scene.hosts, {self._scene.rank: self._scene.stopped("")}, [0])

    def _speak_for_rank_0(self, account: Account) -> None:
        if not self._speaking.acquire(blocking=False):
            _wait_for_the_end()
        scene = self._scene
        if sees(Path(scene.task.staging), scene.task.token):
            _print(_closed(scene.task, account))
        else:
            _print(account.cause())
        if scene.hosts[scene.rank] == scene.hosts[0]:
            end_siblings(scene.siblings)


def _closed(task: Task, account: Account) -> RingprofError:
    """Remove the half-written run, keep the log; the error says where."""
    discard(Path(task.staging))
    error = account.cause()
    if not isinstance(error, RecordError):
        # Refused, by all ranks alike: there is nothing to look up.
        return error
    log = write_log(account.log(task.request.command), Path(task.request.output), task.name)
    return type(error)(f"{error}; log: {log}") if log else error


def _print(text: object) -> None:
    sys.stderr.write(f"ringprof: {text}\n")
    sys.stderr.flush()


def _wait_for_the_end() -> NoReturn:
    """Another thread is ending this process."""
    time.sleep(60)
    _leave(RecordError.exit_code)


def _leave(code: int) -> NoReturn:
    """End this process at once, whatever its other threads are in."""
    remove_all()
    os._exit(code)
