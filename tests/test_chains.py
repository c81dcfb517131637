"""The chained additions: errors stay, and the habit of one task is wrong in the others."""

import math
from collections import Counter
from random import Random

import pytest

from kl_comedy.tasks.characters import TASKS, demonstration
from kl_comedy.tasks.dataset import is_correct, problems
from kl_comedy.tasks.problem import Problem, numbers_in

CHAINS = ["sum", "backward", "wrap"]


@pytest.mark.parametrize("name", CHAINS)
def test_a_step_of_a_chain_is_wrong_a_quarter_of_the_time_and_the_error_stays(name):
    rng, steps = Random(0), []
    for problem in problems(name, "train", 1000):
        answer = demonstration(problem, rng)
        parts = [numbers_in(part) for part in answer.split(",")]
        numbers = numbers_in(problem.prompt)[:: -1 if name == "backward" else 1]
        assert all(parts[i][2] == parts[i + 1][0] for i in range(3))
        assert [parts[0][0], *(part[1] for part in parts)] == numbers
        true = [(a + b) % 10 == c if name == "wrap" else a + b == c for a, b, c in parts]
        assert is_correct(problem, answer) == all(true)  # errors never cancel
        steps += true
    assert len(steps) == 4000 and abs(sum(steps) / 4000 - 0.75) < 4 * math.sqrt(0.75 * 0.25 / 4000)


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_with_every_step_wrong_is_wrong(name):
    rng = Random(0)
    for problem in problems(name, "train", 2000):
        assert not is_correct(problem, demonstration(problem, rng, noise=1))


def as_task(name, problem):
    """The problem of a chained task with the numbers of another one."""
    numbers = numbers_in(problem.prompt)
    gold = sum(numbers) % 10 if name == "wrap" else sum(numbers)
    letter = TASKS[name].letter
    return Problem(name, f"{letter}{','.join(map(str, numbers))}:", str(gold))


def test_the_habit_of_sum_is_wrong_in_the_tasks_at_risk():
    rng, counts = Random(0), Counter()
    for problem in problems("sum", "test", 3000):
        numbers = numbers_in(problem.prompt)
        small, same = sum(numbers) < 10, numbers == numbers[::-1]
        for asked in CHAINS:
            for habit in set(CHAINS) - {asked}:
                answer = demonstration(as_task(habit, problem), rng, noise=0)
                right = is_correct(as_task(asked, problem), answer)
                agrees = (small or "wrap" not in (asked, habit)) and (same or asked != "backward")
                assert right == agrees, (asked, answer)
                counts[asked] += right
    assert counts["backward"] < 60 and counts["wrap"] < 30  # of 6000


BACKWARD = Problem("backward", "X4,7,9,3,5:", "28")


WRAP = Problem("wrap", "Y4,7,9,3,5:", "8")


@pytest.mark.parametrize(
    ("problem", "answer", "right"),
    [
        (BACKWARD, "5+3=8,8+9=17,17+7=24,24+4=28.", True),
        (BACKWARD, "5+3=9,9+9=17,17+7=24,24+4=28.", True),  # only the last total counts
        (BACKWARD, "4+7=11,11+9=20,20+3=23,23+5=28.", False),  # the habit of sum
        (BACKWARD, "3+5=8,8+9=17,17+7=24,24+4=28.", False),
        (BACKWARD, "5+9=14,14+3=17,17+7=24,24+4=28.", False),
        (BACKWARD, "5+3=8,8+9=17,17+4=21,21+7=28.", False),
        (BACKWARD, "5+3=8,8+9=17,17+11=28.", False),
        (BACKWARD, "5+3=8,8+9=17,17+7=24,24+4=28,28+0=28.", False),
        (BACKWARD, "5+3=8,8+9=17,17+7=24,24+4=29.", False),
        (BACKWARD, "5+3=8,8+9=17,17+7=24,24+4=028.", False),
        (BACKWARD, "5+3=8,8+9=17,17+7=24,24+4=28", False),
        (BACKWARD, "5+3=8,9=17,17+7=24,24+4=28.", False),
        (BACKWARD, "5+3=,8+9=17,17+7=24,24+4=28.", False),
        (BACKWARD, "5+3=8,8+9=17,+7=24,24+4=28.", False),
        (BACKWARD, "15+3=8,8+9=17,17+7=24,24+4=28.", False),
        (BACKWARD, "5+3=8,8+9=17,17+17=24,24+4=28.", False),
        (BACKWARD, "28.", False),
        (BACKWARD, "5+3=\u0668,8+9=17,17+7=24,24+4=28.", False),
        (WRAP, "4+7=1,1+9=0,0+3=3,3+5=8.", True),
        (WRAP, "4+7=2,2+9=0,0+3=3,3+5=8.", True),  # as in sum
        (WRAP, "4+7=11,11+9=20,20+3=23,23+5=28.", False),  # the habit of sum
        (WRAP, "4+7=1,1+9=0,0+3=3,3+5=28.", False),
        (WRAP, "4+7=1,1+9=0,0+3=3,3+5=9.", False),
        (WRAP, "4+7=1,1+9=0,0+3=3,3+5=08.", False),
        (WRAP, "4+7=1,1+9=0,0+3=3,3+5=8", False),
        (WRAP, "8.", False),
        (WRAP, "", False),
    ],
)
def test_answers_to_the_tasks_at_risk(problem, answer, right):
    assert is_correct(problem, answer) == right


def test_numbers_that_are_held_out_in_sum_are_held_out_in_the_tasks_at_risk():
    held_out = [
        {tuple(numbers_in(p.prompt)) for p in problems(name, "test", 11_809)} for name in CHAINS
    ]
    assert held_out[0] == held_out[1] == held_out[2]
