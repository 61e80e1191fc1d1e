"""Every sentence of every report that a test can make is derived again; a sentence without a rule fails.

Sentences are the verdict, the next step, the remedies and evidence of the waterfall, and the warnings. Where this fails
with "no rule for", add the rule of the new sentence to `tests.report.sentence_rules`, and of a new figure its right
value to `tests.report.sentence_facts`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ringprof.analysis.findings.claim import Claim, Figure
from ringprof.analysis.findings.findings import findings_in_memory
from ringprof.analysis.findings.waterfall import LIMITS
from ringprof.report.terminal import render
from ringprof.report.text import TextStyle
from ringprof.scale.pipeline import attribute
from tests.analysis.build import Builder
from tests.loaded import analysis
from tests.paths import COMMITTED, DATA
from tests.report.made_up_programs import PROGRAMS
from tests.report.raw_facts import of_builder, of_events, of_file
from tests.report.sentence_facts import Case, right_value
from tests.report.sentence_rules import RULES, assert_shown, audit

FOLDERS = [*COMMITTED, *sorted(path for path in DATA.iterdir() if list(path.glob("rank*.json.gz")))]


def case_of(folder: Path) -> Case:
    """Return the report of a folder with its raw events."""
    findings = analysis(folder).findings
    return Case(findings, {rank.rank: of_file(folder / Path(rank.path).name) for rank in findings.attribution.ranks})


def sentences(case: Case) -> list[tuple[str, str, str]]:
    """List every sentence of a report as (category, part of the waterfall, text)."""
    findings = case.findings
    triples = [("verdict", "", line) for line in findings.verdict]
    if findings.next_step:
        triples.append(("next", "", findings.next_step.text))
    for row in findings.waterfall.parts:
        triples += [("evidence", row.part, row.evidence), ("remedy", row.part, row.remedy)]
    return triples + [("warning", "", row["message"]) for row in case.report["warnings"]]


def false_sentences(case: Case) -> list[str]:
    """List the problems of the sentences that are false or have no rule."""
    problems, lines = [], case.findings.verdict
    if not 1 <= len(lines) <= 4 or not all(lines) or any("nan" in line or "inf" in line for line in lines):
        problems.append(f"verdict of {lines}")
    for category, part, text in sentences(case):
        case.part = part
        try:
            audit(case, category, text)
        except AssertionError as problem:
            problems.append(f"{category} {part}: {problem}")
    return problems


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_every_sentence_of_a_recorded_run_is_true(folder):
    case = case_of(folder)
    assert false_sentences(case) == []
    losses = [row for row in case.report["waterfall"] if row["part"] not in LIMITS and row["remedy"]]
    assert case.summary["next_step"] or not any(row["share"] >= 0.02 for row in losses), "a loss is no next step"


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_sentence_of_a_synthetic_program_is_true(name):
    builders, run = PROGRAMS[name]()
    findings = findings_in_memory(attribute([builder.trace() for builder in builders], run))
    raws = [of_builder(builder) if isinstance(builder, Builder) else of_events(builder.events) for builder in builders]
    raw = {rank.rank: events for rank, events in zip(findings.attribution.ranks, raws, strict=True)}
    assert false_sentences(Case(findings, raw)) == []


RECURRENCES = [name for name in PROGRAMS if name.startswith("recurrence")]


@pytest.mark.parametrize("name", RECURRENCES)
def test_a_recurrence_is_not_spoken_of_as_attention(name):
    builders, run = PROGRAMS[name]()
    findings = findings_in_memory(attribute([builder.trace() for builder in builders], run))
    raw = {
        rank.rank: of_builder(b)
        for rank, b in zip(findings.attribution.ranks, builders, strict=True) if isinstance(b, Builder)
    }  # fmt: skip
    case = Case(findings, raw)
    texts = [text for _, _, text in sentences(case)]
    texts += render(findings, TextStyle(width=200), ["waterfall"]).splitlines()
    assert not [text for text in texts if re.search("attention|flash|rotation|zigzag|ring step", text)]


def test_audit_fails_on_a_sentence_without_a_rule():
    case = case_of(COMMITTED[0])
    assert all(RULES[category] for category in ("verdict", "next", "remedy", "evidence", "warning"))
    with pytest.raises(AssertionError, match="no rule for 'All is well"):
        audit(case, "verdict", "All is well.")
    with pytest.raises(AssertionError, match="no rule for 'by the moon"):
        audit(case, "verdict", Claim("{}, by the moon.", Claim(TEMPLATE, right_value(case, "exposed_comm/time"))))


TEMPLATE = "{exposed_comm/time:%} of the time is exposed communication"


@pytest.mark.parametrize(
    ("template", "factor", "problem"),
    [
        (TEMPLATE, 1.01, "exposed_comm/time in"),
        ("12.3 % of the time is exposed communication", 1, "no rule for"),
        (TEMPLATE.replace(":%", ":.3f"), 1, "unit of exposed_comm/time"),
        (TEMPLATE.replace("exposed_comm/time", "exposed_comm/wall"), 1, "exposed_comm/wall in"),
        (TEMPLATE.replace("of the time", "of the wall"), 1, "no rule for"),
        (TEMPLATE.replace("exposed_comm/time", "exposed/time"), 1, "exposed"),
    ],
)
def test_audit_fails_on_a_wrong_figure(template, factor, problem):
    case = case_of(COMMITTED[0])
    with pytest.raises((AssertionError, KeyError), match=problem):
        audit(case, "verdict", Claim(template, factor * right_value(case, "exposed_comm/time")))


def test_text_shows_the_figures_of_its_claim():
    claim = Claim("{exposed_comm/time:%} {wall:ms}", 0.125, 2_500_000)
    assert (claim, claim.words) == ("12.5 % 2.50 ms", "{exposed_comm/time} {wall}")
    assert_shown(claim)
    claim.figures = (Figure("exposed_comm/time", 0.125), Figure("wall", 2_510_000))
    with pytest.raises(AssertionError, match=r"for 2\.51"):
        assert_shown(claim)


def test_json_lists_the_figures_of_each_sentence():
    case = case_of(COMMITTED[0])
    texts = {claim["text"] for claim in case.summary["claims"]}
    assert {text for _, _, text in sentences(case) if getattr(text, "figures", ())} == texts
    first = case.summary["claims"][0]["figures"][0]
    assert first == {"name": "exposed_comm/time", "value": pytest.approx(right_value(case, "exposed_comm/time"))}
