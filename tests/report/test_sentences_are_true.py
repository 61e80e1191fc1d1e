"""Every sentence of every report that a test can make is derived again; one without a rule fails.

Sentences are the verdict, the next step, the remedies and evidence of the waterfall, and the warnings. Where this fails
with "no rule for", add the rule of the new sentence to `tests.report.sentence_rules` and its siblings.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ringprof.analysis.findings.findings import findings_in_memory
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
    """The report of a folder beside its raw events."""
    findings = analysis(folder).findings
    return Case(findings, {rank.rank: of_file(folder / Path(rank.path).name) for rank in findings.attribution.ranks})


def sentences(case: Case) -> list[tuple[str, str, str]]:
    """(place, part of the waterfall, text) of every sentence of a report."""
    found = [("verdict", "", line) for line in case.summary["verdict"]]
    if case.summary["next_step"]:
        found.append(("next", "", case.summary["next_step"]["text"]))
    for row in case.report["waterfall"]:
        found += [(place, row["part"], row[place]) for place in ("evidence", "remedy") if row[place]]
    return found + [("warning", "", row["message"]) for row in case.report["warnings"]]


def false_sentences(case: Case) -> list[str]:
    """What is wrong with each sentence that is false, or has no rule."""
    problems = []
    for place, part, text in sentences(case):
        case.part = part
        try:
            audit(case, place, text)
        except AssertionError as problem:
            problems.append(f"{place} {part}: {problem}")
    return problems


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_every_sentence_of_a_recorded_run_is_true(folder):
    assert false_sentences(case_of(folder)) == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_sentence_of_a_made_up_program_is_true(name):
    builders, run = PROGRAMS[name]()
    findings = findings_in_memory(attribute([builder.trace() for builder in builders], run))
    raws = [of_builder(one) if isinstance(one, Builder) else of_events(one.events) for one in builders]
    raw = {rank.rank: events for rank, events in zip(findings.attribution.ranks, raws, strict=True)}
    assert false_sentences(Case(findings, raw)) == []


def test_a_sentence_without_a_rule_fails():
    case = case_of(COMMITTED[0])
    assert all(RULES[place] for place in ("verdict", "next", "remedy", "evidence", "warning")) and RULE_MODULES
    with pytest.raises(AssertionError, match="no rule for 'All is well"):
        audit(case, "verdict", "All is well.")
    with pytest.raises(AssertionError, match="no rule for 'by the moon"):
        audit(case, "verdict", f"{case.summary['verdict'][0][:-1]}, by the moon.")


def test_a_wrong_number_fails():
    case = case_of(COMMITTED[0])
    line = case.summary["verdict"][0]
    share = line.split(" %")[0]
    wrong = f"{float(share) + 0.1:.1f}"
    with pytest.raises(AssertionError, match=f": {wrong} for "):
        audit(case, "verdict", line.replace(share, wrong, 1))
