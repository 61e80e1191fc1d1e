"""Lengths of packed documents, parsed from the value of ``--documents``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from ringprof.common.files import read_whole
from ringprof.common.validation import whole
from ringprof.errors import UsageError

MOST = 1 << 20
"""Maximum number of documents in one sequence."""

_ITEM = re.compile(r"([0-9]{1,12})([km]?)(?:x([0-9]{1,7}))?", re.IGNORECASE)
FACTORS = {"": 1, "k": 1 << 10, "m": 1 << 20}
"""Multipliers of token counts by their suffix."""
_LOGNORMAL = "lognormal:"


def document_lengths(text: str, seq: int) -> tuple[int, ...]:
    """Parse ``text`` into the document lengths of a sequence of ``seq`` tokens.

    - ``65536,32768x4``: five documents, which must fill the sequence exactly.
    - ``lognormal:mean=8192,sigma=1.2,seed=7``: lengths are drawn until the sequence is full. ``mean`` is that of the
      lengths, ``sigma`` that of their logarithm.
    - The path of a file of lengths: lengths are read until the sequence is full.

    The last document drawn or read is truncated to fit. Raises `UsageError`.
    """
    if text.startswith(_LOGNORMAL):
        return _filled(_drawn(text), seq)
    # pathlib would raise an error for a list of lengths that is longer than a path can be.
    if os.path.isfile(text):
        return _filled(_in_file(Path(text)), seq)
    lengths = tuple(_listed(text))
    if sum(lengths) != seq:
        raise UsageError(
            f"--documents {_short(text)}: these are {sum(lengths)} tokens together, the sequence has {seq}"
        )
    return lengths


def _filled(lengths: Iterable[int], seq: int) -> tuple[int, ...]:
    kept, left = [], seq
    for length in islice(lengths, MOST):
        kept.append(min(length, left))
        left -= kept[-1]
        if left == 0:
            return tuple(kept)
    raise UsageError(f"--documents: {len(kept)} documents are {seq - left} tokens, and the sequence has {seq}")


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
            raise UsageError(f"--documents {_short(text)}: {_short(item)!r} is not a valid document length")
        yield from [length] * times


def _in_file(path: Path) -> Iterable[int]:
    for item in read_whole(str(path)).decode(errors="replace").replace(",", " ").split():
        length = whole(item)
        if not length:
            raise UsageError(f"{path}: {item[:40]!r} is not a valid token count")
        yield length


def _drawn(text: str) -> Iterable[int]:
    import numpy as np

    pairs = dict(part.partition("=")[::2] for part in text.removeprefix(_LOGNORMAL).split(","))
    settings = {"mean": 0.0, "sigma": 1.0, "seed": 0.0}
    try:
        settings |= {name: float(value) for name, value in pairs.items()}
    except ValueError:
        settings = {}
    valid = set(settings) == {"mean", "sigma", "seed"} and 1 <= settings["mean"] <= 1e12
    valid = valid and 0 <= settings["sigma"] <= 5 and settings["seed"].is_integer() and settings["seed"] >= 0
    if not valid:
        raise UsageError(f"--documents {_short(text)}: as in lognormal:mean=8192,sigma=1.2,seed=7")
    generator = np.random.default_rng(int(settings["seed"]))
    logarithm = np.log(settings["mean"]) - settings["sigma"] ** 2 / 2
    while True:
        yield max(1, round(float(generator.lognormal(logarithm, settings["sigma"]))))


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
