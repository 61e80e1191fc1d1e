"""Options for reading traces, shared by `ringprof.load` and every command that reads traces."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ringprof.analysis.kinds.rules import Rule
from ringprof.analysis.kinds.user_rules import parse_rules
from ringprof.analysis.timeline.window import Focus, parse_between
from ringprof.common.files import read_whole
from ringprof.common.limits import EXPANDED_BYTES, MEMORY_BYTES, Limits
from ringprof.common.validation import refuse_below_one
from ringprof.errors import InputError, UsageError
from ringprof.kernel_rates import DeviceRates, read_rates
from ringprof.scale.workers import Notify

_TEXTS = {"window": "train_step*", "between": "10ms,20ms", "group": "cp,dp"}
_MOST_RULES = Limits(memory_bytes=1 << 25)


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options for reading traces; each field is the parameter of `ringprof.load` with the same name."""

    window: str | None = None
    between: str | None = None
    group: str | None = None
    rules: str | os.PathLike[str] | None = None
    machine: str | os.PathLike[str] | None = None
    mixed_runs: bool = False
    ranks_per_host: int | None = None
    memory_bytes: int | None = None
    limit_bytes: int | None = None
    jobs: int | None = None
    scheduler: str | None = None
    notify: Notify | None = None

    def __post_init__(self) -> None:
        """Raise `UsageError` for values that Python code can pass but no option accepts."""
        refuse_below_one(
            {name: getattr(self, name) for name in ("ranks_per_host", "memory_bytes", "limit_bytes", "jobs")}
        )
        for name, example in _TEXTS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise UsageError(f"{name} is one text, such as {example!r}, not {value!r}")

    def limits(self) -> Limits:
        """Return the memory limits of the process that reads."""
        return Limits(self.memory_bytes or MEMORY_BYTES, self.limit_bytes or EXPANDED_BYTES)

    def focus(self) -> Focus:
        """Return the part of the traces to analyse. Reads the file of rules."""
        return Focus(
            window=self.window,
            between_ns=parse_between(self.between) if self.between else None,
            group=self.group,
            rules=_read_rules(self.rules) if self.rules else (),
            mixed_runs=self.mixed_runs,
        )

    def calibration(self) -> DeviceRates | None:
        """Return the user's calibration; None for the bundled ones. Raises `InputError`."""
        return read_rates(self.machine) if self.machine else None


def _read_rules(path: str | os.PathLike[str]) -> tuple[Rule, ...]:
    name = os.fspath(path)
    try:
        return parse_rules(read_whole(name, _MOST_RULES).decode("utf-8"), name)
    except UnicodeDecodeError:
        raise InputError(f"{name}: not UTF-8 text: write the rules as plain text") from None
