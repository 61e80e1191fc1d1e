"""Lengths of packed documents, from what a user writes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from ringprof.errors import UsageError
from ringprof.files import read_whole
from ringprof.validation import whole

MOST = 1 << 20
"""Documents in one sequence."""

_ITEM = re.compile(r"([0-9]{1,12})([km]?)(?:x([0-9]{1,7}))?", re.IGNORECASE)
FACTORS = {"": 1, "k": 1 << 10, "m": 1 << 20}
_LOGNORMAL = "lognormal:"


def document_lengths(text: str, seq: int) -> tuple[int, ...]:
    """The lengths that ``text`` means for a sequence of ``seq`` tokens.

    ``65536,32768x4`` are five documents that must fill the sequence; ``lognormal:mean=8192,sigma=1.2,seed=7`` draws
    lengths of that mean (of the lengths) and sigma (of their logarithm) until it is full; anything else is a file of
    lengths, of which those are taken that fill it. Of the last document drawn or read, what fits is kept. Raises
    `UsageError`.
    """
    if text.startswith(_LOGNORMAL):
        return _filled(_drawn(_settings(text)), seq)
    # A list may be longer than a path can be, at which pathlib raises an error.
    if os.path.isfile(text):
        return _filled(_in_file(Path(text)), seq)
    lengths = tuple(_listed(text))
    if sum(lengths) != seq:
        raise UsageError(
            f"--documents {_short(text)}: these are {sum(lengths)} tokens together, the sequence has {seq}"
        )
    return lengths


def _filled(lengths: Iterable[int], seq: int) -> tuple[int, ...]:
    found, left = [], seq
    for length in islice(lengths, MOST):
        found.append(min(length, left))
        left -= found[-1]
        if left == 0:
            return tuple(found)
    raise UsageError(f"--documents: {len(found)} documents are {seq - left} tokens, and the sequence has {seq}")


def _listed(text: str) -> Iterable[int]:
    for item in text.split(","):
        match = _ITEM.fullmatch(item.strip())
        if match is None:
            raise UsageError(
                f"--documents {_short(text)}: {_short(item)!r} is neither a file nor a length such as 65536, 64k or"
                " 8192x4"
            )
        length, times = int(match[1]) * FACTORS[match[2].lower()], int(match[3] or 1)
        if length < 1 or not 1 <= times <= MOST:
            raise UsageError(f"--documents {_short(text)}: {_short(item)!r} is no document")
        yield from [length] * times


def _in_file(path: Path) -> Iterable[int]:
    for item in read_whole(str(path)).decode(errors="replace").replace(",", " ").split():
        length = whole(item)
        if not length:
            raise UsageError(f"{path}: {item[:40]!r} is no length in tokens")
        yield length


def _settings(text: str) -> dict[str, float]:
    given = dict(part.partition("=")[::2] for part in text.removeprefix(_LOGNORMAL).split(","))
    settings = {"mean": 0.0, "sigma": 1.0, "seed": 0.0}
    try:
        settings |= {name: float(value) for name, value in given.items()}
    except ValueError:
        settings = {}
    sound = set(settings) == {"mean", "sigma", "seed"} and 1 <= settings["mean"] <= 1e12
    sound = sound and 0 <= settings["sigma"] <= 5 and settings["seed"].is_integer() and settings["seed"] >= 0
    if not sound:
        raise UsageError(f"--documents {_short(text)}: as in lognormal:mean=8192,sigma=1.2,seed=7")
    return settings


def _drawn(settings: dict[str, float]) -> Iterable[int]:
    import numpy as np

    generator = np.random.default_rng(int(settings["seed"]))
    logarithm = np.log(settings["mean"]) - settings["sigma"] ** 2 / 2
    while True:
        yield max(1, round(float(generator.lognormal(logarithm, settings["sigma"]))))


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
