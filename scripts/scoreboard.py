"""Write the scoreboard of docs/prediction.md from the table of every scored row, families that fail first.

    python benchmarks/prediction.py --csv benchmarks/data/prediction_scores.csv
    python -m scripts.scoreboard

Rows of machines that nobody here has are published ones; ``replays`` are no predictions and are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.prediction import BEATS_KERNEL, NOT_COMPARABLE, Score, left_out, read_csv

ROOT = Path(__file__).parents[1]
PAGE, TABLE = ROOT / "docs" / "prediction.md", ROOT / "benchmarks" / "data" / "prediction_scores.csv"
BEGIN, END = "<!-- scoreboard: python -m scripts.scoreboard -->\n", "<!-- end of the scoreboard -->\n"
PUBLISHED = ("h100", "b200", "a800")
"""Parts of published rows."""
_LEAST, _MOST = 0.75, 0.85
"""Shares inside the 80 % interval between which a family passes."""
_WORST = 20


def scoreboard() -> str:
    """Return the scoreboard as Markdown."""
    scores_by_part = read_csv(TABLE)
    everything = [score for part in PUBLISHED for score in scores_by_part[part]]
    published = [score for score in everything if score.name.split()[0] not in BEATS_KERNEL]
    apart = [score for score in everything if score not in published]
    own = [
        score
        for part, scores in scores_by_part.items()
        if part not in (*PUBLISHED, "replays", "strategies", "lengths", "plain_masks")
        for score in scores
    ]
    lines = [
        f"{len(published)} published rows and {len(own)} runs of our own, by family, machine and pass; predicted over"
        " measured, less 1.", "",
        f"{len(apart)} published rows are scored apart, {', '.join(score.name.split()[0] for score in apart)}: they are"
        f" of one program in one log, of which `predict --check` finds some faster than the kernel alone."
        f" {sum(bool(score.inside) for score in apart)} of them lie inside; their mean error is {_mean(apart):.0f} %.",
        "",
        "**Families over all published rows**, those outside 75 to 85 % first. *Other machines* and *other families*:"
        " inside, if the family's spread is taken from these alone.", "",
        "| family | rows | inside | other machines | other families | mean error |",
        "| --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    families = []
    for family, count, by_machine, by_family in left_out(published):
        members = [score for score in published if score.family == family]
        inside = sum(bool(score.inside) for score in members) / count
        cells = f"{inside:.0%} | {by_machine / count:.0%} | {by_family / count:.0%} | {_mean(members):.1f} %"
        families.append((_LEAST <= inside <= _MOST, inside, f"| {family} | {count} | {cells} |"))
    lines += [text for *_, text in sorted(families)]
    lines += ["", "**Published rows**, the least covered first", "", *_groups(published)]
    lines += ["", "**Runs of our own** (one host), the least covered first", "", *_groups(own)]
    worst = sorted((score for score in published if not score.inside), key=lambda score: -abs(score.error))
    lines += [
        "", f"**The {_WORST} worst of {len(worst)} published rows outside their interval**", "",
        "| row | family, GPUs, tokens, pass, mask | machine | measured | predicted | error | |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for score in worst[:_WORST]:
        row, _, rest = score.name.partition(" ")
        times = f"{score.measured:,.1f} ms | {score.low:,.1f} to {score.high:,.1f} ms"
        reason = NOT_COMPARABLE.get(row, "")
        lines.append(f"| {row} | {rest} | {score.machine} | {times} | {100 * score.error:+.0f} % | {reason} |")
    return "\n".join(lines).replace("-0.0 %", "0.0 %") + "\n"


def _groups(scores: Sequence[Score]) -> list[str]:
    """Return a table of scores by family, machine and pass."""
    lines = [
        "| family | machine | pass | rows | mean error | bias | range | inside |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    groups: dict[tuple[str, str, str], list[Score]] = {}
    for score in scores:
        groups.setdefault(score.group, []).append(score)

    def covered(item: tuple[tuple[str, str, str], list[Score]]) -> tuple[float, float]:
        return sum(bool(score.inside) for score in item[1]) / len(item[1]), -_mean(item[1])

    for (family, machine, part), members in sorted(groups.items(), key=covered):
        errors = [100 * score.error for score in members]
        inside = sum(bool(score.inside) for score in members) / len(members)
        spread = f"{min(errors):+.1f} to {max(errors):+.1f} %"
        bias = f"{sum(errors) / len(errors):+.1f} %"
        counts = f"{len(members)} | {_mean(members):.1f} % | {bias} | {spread} | {inside:.0%}"
        lines.append(f"| {family} | {machine} | {part} | {counts} |")
    return lines


def _mean(scores: Sequence[Score]) -> float:
    return 100 * sum(abs(score.error) for score in scores) / len(scores)


def with_scoreboard(page: str) -> str:
    """Return the page with a new scoreboard between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{scoreboard()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_scoreboard(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"Wrote the scoreboard of {PAGE}")
