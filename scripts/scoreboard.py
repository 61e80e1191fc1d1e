"""Write the tables of errors in docs/prediction.md and docs/prediction-accuracy.md from the table of every scored row.

    python dev/benchmarks/prediction.py --csv dev/benchmarks/data/prediction_scores.csv
    python -m scripts.scoreboard

In the scoreboard, families that fail come first. Rows of machines that nobody here has are published ones; ``replays``
are no predictions and are left out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from dev.benchmarks.prediction import BEATS_KERNEL, FITTED, NOT_COMPARABLE, PARTS, Score, left_out, read_csv

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "dev" / "benchmarks" / "data" / "prediction_scores.csv"
_END = "<!-- end -->\n"
PUBLISHED = ("h100", "b200", "a800")
"""Parts of published rows."""
_LEAST, _MOST = 0.75, 0.85
"""Shares inside the 80 % interval between which a family passes."""
_WORST = 20
QUESTIONS = {
    "attention on one node of H200 or H100, by curves fitted to none of these runs": (
        "shapes", "short", "later", "last", "h100_shapes", "h200_later", "h200_kernels", "grid",
    ),
    "the same where the host decides, mostly below 5 ms": ("host", "host_elsewhere", "grid_host"),
    "packed documents and windows; other head sizes, MLA, sinks": ("masks", "h100_masks", "other_heads"),
    "other projects' programs (torch's context parallelism, ring-flash-attn)": ("peers",),
    "8 to 64 H100, published": ("h100",),
    "8 to 64 B200, published; its curves are published, too": ("b200",),
    "32 A800 on 4 nodes, published": ("a800",),
    "prefill and decode": ("inference",),
    "a whole training step": ("steps",),
    "a recorded run replayed, as `predict --replay` does before it changes anything": ("replays",),
}  # fmt: skip
"""Parts of `dev.benchmarks.prediction.PARTS` by what a user asks for."""


def by_question() -> str:
    """Return the errors by what a user asks for, as Markdown."""
    scores_by_part = read_csv(TABLE)
    lines = [f"| what is predicted | {_HEAD}", _LINE]
    for question, parts in QUESTIONS.items():
        scores = [score for part in parts for score in scores_by_part[part]]
        comparable = [score for score in scores if score.name.split()[0] not in BEATS_KERNEL]
        lines.append(f"| {question} | {_figures(comparable)}")
    return "\n".join(lines) + "\n"


def by_part() -> str:
    """Return the errors of each part of dev/benchmarks/prediction.py, and what its machine was fitted to."""
    lines = [f"| part | what it scores | {_HEAD}", f"| --- {_LINE}"]
    parts_by_source: dict[str, list[str]] = {}
    for part, scores in read_csv(TABLE).items():
        scored = (PARTS[part].__doc__ or "").splitlines()[0].removeprefix("Score ").rstrip(".")
        lines.append(f"| `{part}` | {scored} | {_figures(scores)}")
        parts_by_source.setdefault(FITTED[part], []).append(f"`{part}`")
    lines += ["", "Machines of these parts were fitted to:", ""]
    lines += [f"* {', '.join(parts)}: {source}" for source, parts in parts_by_source.items()]
    return "\n".join(lines) + "\n"


_HEAD = "cases | mean error | bias | range | inside |"
_LINE = "| --- | --- | --- | --- | --- | --- |"


def _figures(scores: Sequence[Score]) -> str:
    """Return number, mean error, bias, range and coverage of some scores as cells of a table."""
    errors = [100 * score.error for score in scores]
    flags = [score.inside for score in scores if score.inside is not None]
    inside = f"{sum(flags) / len(flags):.0%}" if flags else ""
    spread = f"{min(errors):+.1f} to {max(errors):+.1f} %"
    return f"{len(scores)} | {_mean(scores):.1f} % | {sum(errors) / len(errors):+.1f} % | {spread} | {inside} |"


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
        f" of one program in one log, of which `predict --against` finds some faster than the kernel alone."
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
    return "\n".join(lines) + "\n"


def _groups(scores: Sequence[Score]) -> list[str]:
    """Return a table of scores by family, machine and pass."""
    lines = [f"| family | machine | pass | {_HEAD}", f"| --- | --- {_LINE}"]
    groups: dict[tuple[str, str, str], list[Score]] = {}
    for score in scores:
        groups.setdefault(score.group, []).append(score)

    def covered(item: tuple[tuple[str, str, str], list[Score]]) -> tuple[float, float]:
        return sum(bool(score.inside) for score in item[1]) / len(item[1]), -_mean(item[1])

    for (family, machine, part), members in sorted(groups.items(), key=covered):
        lines.append(f"| {family} | {machine} | {part} | {_figures(members)}")
    return lines


def _mean(scores: Sequence[Score]) -> float:
    return 100 * sum(abs(score.error) for score in scores) / len(scores)


GENERATED: dict[str, dict[str, Callable[[], str]]] = {
    "prediction.md": {"by question": by_question},
    "prediction-accuracy.md": {"by part": by_part, "scoreboard": scoreboard},
}
"""Functions of the generated tables, by page and by the name in the mark before the table."""


def with_tables(name: str, page: str) -> str:
    """Return a page of docs/ with its generated tables renewed."""
    for table, create in GENERATED[name].items():
        begin = f"<!-- {table}: python -m scripts.scoreboard -->\n"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(_END)
        page = f"{before}{begin}\n{create()}\n{_END}{after}"
    return page.replace("-0.0 %", "0.0 %").replace("+0.0 %", "0.0 %")


if __name__ == "__main__":
    for name in GENERATED:
        path = ROOT / "docs" / name
        path.write_text(with_tables(name, path.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"Wrote the tables of {path}")
