"""Fakes of a launcher and of a job, for tests that start no ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ringprof.ranks.launcher import RankInfo
from ringprof.ranks.progress import Reporter


@dataclass
class FakeLauncher:
    """Launcher that runs no job: it returns ``outcome``, or raises it if it is an exception."""

    outcome: Any
    jobs: list[Any] = field(default_factory=list)
    """Jobs that were to run."""

    def run(self, job: Any, reporter: Reporter) -> Any:
        self.jobs.append(job)
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


@dataclass
class FakeTask:
    """Task whose result is its scratch folder."""

    scratch: str
    discarded: bool = False
    job = "fake"
    request = None

    def limit_of(self, phase: str | None) -> float | None:
        return 1.0 if phase is None else None

    def result(self) -> str:
        return self.scratch

    def discard(self) -> None:
        self.discarded = True


@dataclass
class FakeJob:
    """Job that stores its task, and returns its rank and reporter when it runs as a rank."""

    refusal: Exception | None = None
    """Error that `prepare` raises."""
    task: FakeTask | None = None

    def prepare(self, reporter: Reporter, scratch: str) -> FakeTask:
        self.task = FakeTask(scratch)
        if self.refusal is not None:
            raise self.refusal
        return self.task

    def run_as_rank(self, rank_info: RankInfo, reporter: Reporter) -> Any:
        return rank_info, reporter
