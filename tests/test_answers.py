"""Answers in boxes: what is read, and what the rules decide."""

import time
from collections import Counter
from random import Random

import pytest
from sources import gsm8k_completions

from kl_comedy.tasks.answers import (
    MAX_ANSWER,
    check_by_rules,
    last_boxed,
    plain_number,
    rule_verdict,
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{7}", "7"),
        (r"$\boxed{ 7 }$.", "7"),
        (r"\boxed 7", "7"),
        (r"$\boxed 12$", "12"),
        ("\\boxed\n{7}", "7"),
        (r"\fbox{7}", "7"),
        (r"\boxed{1} \fbox{2}", "2"),
        (r"\fbox{1} \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{\left\{1\right.}", r"\left\{1\right."),
        (r"\boxed{a\\b}", r"a\\b"),
        ("\\boxed{a\nb}", "a\nb"),
        (r"\boxed{}", ""),
        (r"\boxed{ }", ""),
        (r"\boxed{1} \boxed{}", ""),
        (r"\boxed{1} \boxed{2", "1"),
        (r"{\boxed{1}", "1"),
        (r"}}\boxed{1}", "1"),
        (r"\boxed{\boxed{1}}", "1"),
        (r"\boxed{\boxed{1}, 2", "1"),
        (r"\boxed{\text{\fbox{3}}}", "3"),
        (r"\boxed{\frac{1}{2}, {", None),
        (r"\boxed{1\}", None),
        ("", None),
        ("7", None),
        (r"\boxed", None),
        ("boxed{7}", None),
        (r"\\boxed{7}", None),
        (r"\boxedtext{7}", None),
        (r"\boxed}7{", None),
        (r"\boxed $7$", None),
        (rf"\boxed{{{'7' * MAX_ANSWER}}}", "7" * MAX_ANSWER),
        (rf"\boxed{{{'7' * (MAX_ANSWER + 1)}}}", None),
        (rf"\boxed{{1}} \boxed{{{'7' * (MAX_ANSWER + 1)}}}", None),
    ],
)
def test_the_last_balanced_box(text, answer):
    assert last_boxed(text) == answer
    assert last_boxed("so " + text) == answer


def last_boxed_slowly(text):
    """From the last box to the first, the first whose braces close."""
    for start in reversed(range(len(text))):
        if text[start:].startswith("\\boxed{") and text[:start][-1:] != "\\":
            depth, inside = 1, text[start + 7 :]
            for i, character in enumerate(inside):
                depth += (character == "{") - (character == "}")
                if not depth:
                    return inside[:i].strip()
    return None


def test_boxes_at_random_against_a_slow_search():
    rng, found = Random(0), Counter()
    for _ in range(4000):
        text = "".join(rng.choices([r"\boxed{", "{", "}", "1", " ", r"\pi"], k=rng.randint(0, 14)))
        assert last_boxed(text) == last_boxed_slowly(text), text
        found[last_boxed(text) is None] += 1
    assert min(found[True], found[False]) > 500


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{1}" * 50_000,
        r"\boxed{" * 50_000 + "}" * 50_000,
        r"\boxed{" * 200_000,
        "{" * 10**6,
        "}" * 10**6,
        "{}" * 500_000,
        "\\" * 10**6,
        "\\boxed" + " " * 10**6,
        "\\boxed " * 10**5,
        r"\boxed{" + "1" * 10**6 + "}",
        r"\boxed " + "1" * 10**6,
        "\x00" * 10**6,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_the_time_to_find_a_box_grows_with_the_text(text):
    started = time.process_time()
    last_boxed(text)
    assert time.process_time() - started < 60  # with its square it would be hours


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("4", "3=4"),
        ("4", "x=4"),
        ("0", "x+y=0"),
        ("4", r"x\leq4"),
        ("4", "x<4"),
        ("4", r"x\ne 3"),
        ("4", r"\approx 4"),
        ("[0,4]", r"x\in[0,4]"),
        ("10", r"10\%"),
        ("10", "10%"),
        ("10", r"10\text{ percent}"),
        ("40_9", "40"),
        ("40_9", "40_8"),
        ("40_{9}", "40_{8}"),
        ("40", "40_9"),
        ("2A_{16}", "2A"),
        ("2A_{16}", "2A_{8}"),
        (r"40_{\text{9}}", "40"),
        (r"\frac{1}{3}", "0.333333"),
        (r"\frac13", "0.3333333333333333"),
        ("0.33", "1/3"),
        ("12", "1"),
        ("-1", "1"),
        ("1234", "1,235"),
        ("0", "-1"),
        ("2", ""),
    ],
)
def test_the_rules_refuse(gold, answer):
    assert rule_verdict(gold, answer) == "wrong"
    assert rule_verdict(answer, answer) == ("right" if answer else "wrong")


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("4", " 4 "),
        ("4", "4.00"),
        ("4", "+4"),
        ("4", "8/2"),
        (r"\frac{1}{2}", "0.5"),
        (r"-\frac{1}{2}", r"\dfrac{-1}{2}"),
        (r"\tfrac12", ".5"),
        ("10,000", "10000"),
        (r"10,\!000", "10000"),
        ("10{,}000", "10,000"),
        ("1000000", "1,000,000.0"),
        ("0", "-0"),
        ("x = 4", "x=4"),
        (r"10 \%", r"10\%"),
        ("(1, 2)", "(1,2)"),
        (r"\text{Ann}", r"\text{Ann}"),
    ],
)
def test_the_rules_accept(gold, answer):
    assert rule_verdict(gold, answer) == "right"


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\sqrt{2}", "1.414214"),
        ("x+1", "1+x"),
        ("(1,2)", "[1,2]"),
        ("12", "1 2"),
        ("1,2", "2,1"),
        ("x_1", "x_2"),
        (r"\infty", "1"),
        (r"\text{Ann}", "Ann"),
        ("x=4", "4"),
        ("x=4", "3=4"),
        (r"10\%", "10"),
        ("3", r"\left(3\right)"),
        ("3", "1+2"),
        ("1", "1/0"),
        (r"\sin x", "1"),
        ("1", "２"),
        ("10000", "1e4"),
        ("10", r"\$10"),
        (r"\int_0^1 x", "1"),
    ],
)
def test_the_rules_leave_the_rest_open(gold, answer):
    assert rule_verdict(gold, answer) is None


def test_plain_numbers_are_exact():
    rng = Random(0)
    for _ in range(2000):
        a, b = rng.randint(-(10**6), 10**6), rng.randint(1, 99)
        assert plain_number(f"{a:,}/{b}") == plain_number(f"{a}/{b}")
        assert plain_number(rf"\frac{{{a}}}{{{b}}}") * b == a == plain_number(f"{a:,}.0")
        assert plain_number(f"{a}.{b:02d}") != a


@pytest.fixture(scope="module")
def solved():
    return gsm8k_completions()


def test_the_rules_agree_with_the_labels_of_real_completions(solved):
    found, left = check_by_rules([gold for gold, _, _ in solved], [text for _, text, _ in solved])
    assert len(left) < 10
    for i, verdict in found.items():
        assert (verdict == "right") == solved[i][2], solved[i]
