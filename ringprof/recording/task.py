"""Task of one rank of a recording."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import msgspec

from ringprof.iteration.request import RecordRequest
from ringprof.recording.run_folder import discard
from ringprof.run import Run, read_run


class RankTask(msgspec.Struct, frozen=True, kw_only=True):
    """Task of the ranks of a recording: a resolved request, and the folders that the ranks work in."""

    job: ClassVar[str] = "record"
    request: RecordRequest
    name: str
    """Name of the run and of its folder."""
    staging: str
    """Folder that the ranks write to. It is renamed to the run's name when it is complete."""
    token: str
    """Token by which a rank recognises that it sees the staging folder."""
    scratch: str | None
    """Folder of the logs of ranks that ringprof started; None for ranks of an external launcher."""
    created: str
    """Time of creation: UTC, ISO 8601."""
    time_limit: float
    """Time limit of the whole recording, in seconds."""

    def limit_of(self, phase: str | None) -> float | None:
        """Return the time limit in seconds for the phase None, before the first, and None for later ones.

        A recording has a single limit, which starts with the ranks.
        """
        return self.time_limit if phase is None else None

    def result(self) -> Run:
        """Read the run that rank 0 has published."""
        return read_run(self.request.output)

    def discard(self) -> None:
        """Remove the half-written run."""
        discard(Path(self.staging))
