"""Countdown: exact values, and nothing that a policy writes is run."""

import time
import warnings
from random import Random

import pytest

from kl_comedy.tasks.characters import demonstration
from kl_comedy.tasks.countdown import countdown_problems, evaluate_expression, expressions
from kl_comedy.tasks.dataset import is_correct, problems
from kl_comedy.tasks.problem import Problem, numbers_in

COUNTDOWN = Problem("countdown", "C3,5,7=22:", "22")


def test_a_countdown_demonstration_states_true_values_and_uses_every_number():
    rng = Random(2)
    for problem in problems("countdown", "train", 500):
        *numbers, target = numbers_in(problem.prompt)
        attempts = demonstration(problem, rng)[:-1].split(";")
        assert 1 <= len(attempts) <= 3
        for i, attempt in enumerate(attempts):
            text, value = attempt.split("=")
            assert evaluate_expression(text) == (int(value), numbers)
            assert i == len(attempts) - 1 or int(value) != target


def test_everything_three_numbers_make_has_the_value_it_is_listed_with():
    for problem in countdown_problems():
        *numbers, target = numbers_in(problem.prompt)
        values = expressions(tuple(numbers)).values()
        assert target in values and len(set(values)) > 1  # can be hit, and missed
    for numbers in {tuple(numbers_in(p.prompt)[:3]) for p in countdown_problems()}:
        for text, value in expressions(numbers).items():
            assert evaluate_expression(text) == (value, list(numbers))


@pytest.mark.parametrize("text", ["3*5+7", "(3*5)+7", "((3*5)+7)", "7+5*3", "7+(3*5)", "5*3+7"])
def test_countdown_accepts(text):
    assert is_correct(COUNTDOWN, text + "=22.")
    assert is_correct(COUNTDOWN, "rubbish;1/0=3;" + text + "=22.")
    assert not is_correct(COUNTDOWN, text + "=22;3+5+7=15.")


def test_countdown_is_exact_where_floats_are_not():
    assert is_correct(Problem("countdown", "C3,7,9=21:", "21"), "9/(3/7)=21.")
    assert is_correct(Problem("countdown", "C1,3,6=2:", "2"), "6*(1/3)=2.")
    assert not is_correct(Problem("countdown", "C1,3,6=3:", "3"), "6/3+1/1=3.")


HOSTILE = [
    "__import__('os').system('touch hacked')",
    "exit()",
    "().__class__",
    "(lambda:22)()",
    "[22][0]",
    "{22}",
    "22",
    "+22",
    "-3*5+37",
    "--3*5+7",
    "+3*5+7",
    "3*+5+7",
    "3*5+7*1",
    "3*5+7+0",
    "3*5+7-0",
    "3*5",
    "3*5+7+7-7",
    "35-7-6",
    "3*57",
    "3(5)+7",
    "(3)(5)+7",
    "3*5+7()",
    "3**5+7",
    "9**9**9",
    "3//5+7",
    "3%5+7",
    "3<<5",
    "3|5",
    "~3",
    "3*5+7 ",
    " 3*5+7",
    "3*5\n+7",
    "3*5+7\n",
    "3*5+7\x00",
    "3*5+7#",
    "3*5+7\\",
    "3.0*5+7",
    "3e0*5+7",
    "0x3*5+7",
    "3_0",
    "3j",
    "03*5+7",
    "3*5+07",
    "３*5+7",
    "3×5+7",
    "3*5+7if 1else 0",
    "3,5,7",
    "(3*5+7",
    "3*5+7)",
    ")(",
    "3*5+7==22",
    "22=3*5+7",
    "1/0",
    "3/(5-5)",
    "7/(3*5-15)",
    "",
    "()",
    "*",
    "3*",
    "9" * 39,
    "9" * 10**6,
    "(" * 10**6,
    "(" * 39,
    "3*5+7" + "+0" * 10**5,
    "3*5+7" + ")" * 200,
    "-" * 39 + "3",
    "((((((((((((((((((((3*5+7",
    "=" * 10**5,
    "3*5+7;" * 10**4,
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:20]))
def test_countdown_refuses_and_runs_nothing(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for ending in ("=22.", ".", "=22", ""):
            assert not is_correct(COUNTDOWN, text + ending)
    assert time.process_time() - started < 60  # with the square of the text it would be hours
    assert list(tmp_path.iterdir()) == []
