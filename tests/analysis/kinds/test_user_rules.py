"""User rules: parsing, and their precedence over other evidence."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis.strategies import text

from ringprof.analysis.kinds.classify import classify
from ringprof.analysis.kinds.rules import rule_for
from ringprof.analysis.kinds.user_rules import parse_rules, wildcards
from ringprof.errors import UsageError
from tests.analysis.build import FLASH, NCCL, Builder, collective, kind_names


def kinds(builder, text):
    return kind_names(classify(builder.trace(), parse_rules(text, "my.rules")))


def test_comments_and_empty_lines_are_ignored():
    rules = parse_rules("# mine\n\n  gemm   my kernel  \n", "my.rules")
    assert [rule.kind for rule in rules] == ["gemm"]
    assert rule_for("void my kernel<float>(int)", rules) == rules[0]


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("push", "ring_PUSH_bf16", True),
        ("push*", "ring_push_bf16", False),
        ("ring_*_bf16", "ring_push_bf16", True),
        ("ring_????_bf16", "ring_push_bf16", True),
        ("k<float>[1]", "void k<float>[1]()", True),
        ("void a kernel", "void another kernel()", False),
        ("a.c", "abc", False),
        ("*(int*)*", "void k(int*, float)", True),
        ("*ab*ab", "xabab", True),
        ("*ab*ab", "xab", False),
        ("a*a", "a", False),
        ("**b?*", "abc", True),
        ("*a*b*c*", "c b a b c", True),
        ("*a*b*c*", "c b a c b", False),
    ],
)
def test_pattern_matches_a_substring_or_the_whole_name(pattern, name, fits):
    assert (rule_for(name, parse_rules(f"gemm {pattern}", "r")) is not None) == fits


@given(text("ab*?", max_size=8), text("ab\n", max_size=12))
def test_wildcards_follow_shell_rules(pattern, name):
    assert bool(re.fullmatch(wildcards(pattern), name, re.DOTALL)) == fnmatchcase(name, pattern)


def test_many_wildcards_match_in_linear_time():
    """Check a pattern for which trying every combination of positions would take longer than the universe is old."""
    assert rule_for("a" * 8000, parse_rules(f"gemm {'*a' * 60}*b", "r")) is None


def test_first_user_rule_wins_over_later_and_built_in_rules():
    b = Builder().run(FLASH, 0, 1, launched=1).run("flash_fwd_other", 1, 2, launched=2)
    assert kinds(b, "merge flash_fwd_other\ngemm flash_fwd") == ["gemm", "merge"]


def test_user_rule_takes_precedence_over_operators_and_ranges():
    b = Builder().run("my_kernel", 0, 1, launched=5)
    b.operate("aten::_scaled_dot_product_flash_attention", 0, 10).mark("ringprof::fwd/merge", 0, 10)
    assert kind_names(classify(b.trace())) == ["flash_fwd"]
    assert kinds(b, "gemm my_kernel") == ["gemm"]


def test_user_rule_can_make_a_copy_communication():
    b = Builder().run("Memcpy DtoD (Device -> Device)", 0, 1, launched=1, category=1)
    assert kinds(b, "copy_engine Memcpy DtoD*") == ["copy_engine"]


def test_collective_record_takes_precedence_over_user_rule():
    b = Builder().run(NCCL, 0, 1, launched=1, own=collective("all_to_all"))
    assert kinds(b, "send_recv ncclDevKernel*") == ["all_to_all"]


def test_kernel_classified_as_communication_takes_preceding_records():
    b = Builder().record(1, 3, collective("send", destination_rank=1)).run("my_ring", 10, 20, launched=5)
    classified = classify(b.trace(), parse_rules("send_recv my_ring", "r"))
    assert [call.name for call in classified.calls[0]] == ["send"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "gemm a\nflash_fw b",
            r"my.rules:2: 'flash_fw' is not a kind; did you mean 'flash_fwd'\? there are: flash_fwd,",
        ),
        ("\n\nother_groups b", r"my.rules:3: 'other_groups' is not a kind; there are"),
        ("gemm", r"my.rules:1: no pattern after 'gemm'"),
        ("# nothing\n", "my.rules: no rule in it"),
        ("", "my.rules: no rule in it"),
    ],
)
def test_rule_errors_name_the_line(text, message):
    with pytest.raises(UsageError, match=message):
        parse_rules(text, "my.rules")
