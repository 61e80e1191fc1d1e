"""Base of all results: what can be done with one works on every other, or raises with the reason and what to use."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ringprof.common.files import write_atomically
from ringprof.common.json_object import json_text
from ringprof.errors import UsageError, nearest
from ringprof.report.text import TextStyle

if TYPE_CHECKING:
    import pandas as pd

_Path = str | os.PathLike[str]


class Result(ABC):
    """Result of reading, comparing or predicting: as values, text, JSON, page, data frames, plots and sentences."""

    _frames: ClassVar[Sequence[str]]
    """Names of the data frames; the first is the default."""

    @abstractmethod
    def report(self) -> Any:
        """Return plain values, as ``--format json`` prints them."""

    @abstractmethod
    def to_terminal(self, style: TextStyle | None = None) -> str:
        """Return the text that the command prints."""

    def to_json(self, path: _Path | None = None) -> str:
        """Return the report as JSON text, and write it to ``path`` if one is given."""
        return _written(json_text(self.report()), path)

    def to_html(self, path: _Path | None = None) -> str:
        """Return the result as one self-contained HTML page, and write it to ``path`` if one is given."""
        return _written(self._page(), path)

    def frame(self, name: str = "") -> pd.DataFrame:
        """Return the data frame ``name``, by default the main one. Raises `UsageError` for an unknown name."""
        if name and name not in self._frames:
            raise UsageError(f"no frame {name!r}{nearest(name, self._frames)}; there are: {', '.join(self._frames)}")
        return self._frame(name or self._frames[0])

    def to_frame(self, name: str = "") -> pd.DataFrame:
        """Return the same as `frame`."""
        return self.frame(name)

    @property
    @abstractmethod
    def verdict(self) -> list[str]:
        """Sentences on what the result means. Raises `UsageError` where nothing follows from its figures."""

    @property
    def plot(self) -> Any:
        """Plots, as methods and by name. Raises `UsageError` where there are none."""
        raise UsageError(f"{type(self).__name__} has no plots: draw its data frame, frame()")

    def _frame(self, name: str) -> pd.DataFrame:
        frame: pd.DataFrame = getattr(self, name)()
        return frame

    def _page(self) -> str:
        title = escape(type(self).__name__)
        return f'<!doctype html>\n<meta charset="utf-8">\n<title>{title}</title>\n{self._repr_html_()}\n'

    def _repr_html_(self) -> str:
        """Return the text as HTML, for notebooks."""
        return f'<pre style="line-height: 1.2">{escape(self.to_terminal())}</pre>'


def _written(text: str, path: _Path | None) -> str:
    if path is not None:
        write_atomically(Path(path), text.encode())
    return text
