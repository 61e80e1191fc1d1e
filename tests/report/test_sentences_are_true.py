"""Every sentence of every report that a test can make is derived again; a sentence without a rule fails.

Sentences are the verdict, the next step, the remedies and evidence of the waterfall, and the warnings. Where this fails
with "no rule for", add the rule of the new sentence to `tests.report.sentence_rules` or the modules beside it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ringprof.analysis.findings.findings import findings_in_memory
from ringprof.report.terminal import render
from ringprof.report.text import TextStyle
from ringprof.scale.pipeline import attribute
from tests.analysis.build import Builder
from tests.loaded import analysis
from tests.paths import COMMITTED, DATA
from tests.report import sentence_communication, sentence_computation, sentence_evidence, sentence_remedies
from tests.report.made_up_programs import PROGRAMS
from tests.report.raw_facts import of_builder, of_events, of_file
from tests.report.sentence_rules import RULES, Case, audit

FOLDERS = [*COMMITTED, *sorted(path for path in DATA.iterdir() if list(path.glob("rank*.json.gz")))]
RULE_MODULES = (sentence_communication, sentence_computation, sentence_evidence, sentence_remedies)


def case_of(folder: Path) -> Case:
    """Return the report of a folder with its raw events."""
    findings = analysis(folder).findings
    return Case(findings, {rank.rank: of_file(folder / Path(rank.path).name) for rank in findings.attribution.ranks})


def sentences(case: Case) -> list[tuple[str, str, str]]:
    """List every sentence of a report as (category, part of the waterfall, text)."""
    triples = [("verdict", "", line) for line in case.summary["verdict"]]
    if case.summary["next_step"]:
        triples.append(("next", "", case.summary["next_step"]["text"]))
    for row in case.report["waterfall"]:
        triples += [(category, row["part"], row[category]) for category in ("evidence", "remedy") if row[category]]
    return triples + [("warning", "", row["message"]) for row in case.report["warnings"]]


def false_sentences(case: Case) -> list[str]:
    """List the problems of the sentences that are false or have no rule."""
    problems = []
    for category, part, text in sentences(case):
        case.part = part
        try:
            audit(case, category, text)
        except AssertionError as problem:
            problems.append(f"{category} {part}: {problem}")
    return problems


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_every_sentence_of_a_recorded_run_is_true(folder):
    assert false_sentences(case_of(folder)) == []


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
    assert all(RULES[category] for category in ("verdict", "next", "remedy", "evidence", "warning")) and RULE_MODULES
    with pytest.raises(AssertionError, match="no rule for 'All is well"):
        audit(case, "verdict", "All is well.")
    with pytest.raises(AssertionError, match="no rule for 'by the moon"):
        audit(case, "verdict", f"{case.summary['verdict'][0][:-1]}, by the moon.")


def test_audit_fails_on_a_wrong_number():
    case = case_of(COMMITTED[0])
    line = case.summary["verdict"][0]
    share = line.split(" %")[0]
    wrong = f"{float(share) + 0.1:.1f}"
    with pytest.raises(AssertionError, match=f": {wrong} for "):
        audit(case, "verdict", line.replace(share, wrong, 1))
