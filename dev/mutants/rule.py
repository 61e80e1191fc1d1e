"""One small bug that was written by hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Rule:
    """A change of product code that a test should notice."""

    file: str
    """Path from the root of the checkout."""
    before: str
    """Text that stands in the file once."""
    after: str
    effect: str
    """Effect that a user would see."""
    equivalent: bool = False
    """Whether the change turned out to have no effect, for the reason that ``effect`` gives."""
    test: str = ""
    """Test file to run first, where `by_hand.tests_near` does not find it by its name."""

    def planted_in(self, root: Path) -> str:
        """Return the text of the file with the bug. Raises ValueError unless ``before`` stands once."""
        text = (root / self.file).read_text("utf-8")
        count = text.count(self.before)
        if count != 1:
            raise ValueError(f"{self.file} has {self.before!r} {count} times: adapt the rule to the code")
        return text.replace(self.before, self.after)
