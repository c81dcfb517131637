"""Every task: right answers pass, wrong and odd ones do not, and splits never meet."""

import math
import time
from dataclasses import replace
from random import Random

import pytest

from kl_comedy.tasks.characters import SPLITS, TASKS, demonstration, split_index, split_size
from kl_comedy.tasks.dataset import is_correct, problems, reward, to_dataset
from kl_comedy.tasks.problem import Problem

NAMES = list(TASKS)


CHAINS = ["sum", "backward", "wrap"]


DIGIT_TASKS = ["sort", "reverse", "add", "subtract"]


RECORDED = {
    "sum": "M",
    "backward": "X",
    "wrap": "Y",
    "sort": "S",
    "reverse": "R",
    "add": "A",
    "subtract": "D",
    "countdown": "C",
}


def test_the_tasks_of_the_recorded_runs_are_what_they_were():
    assert {name: TASKS[name].letter for name in RECORDED} == RECORDED
    assert [name for name in RECORDED if TASKS[name].in_domain] == ["sum"]
    assert [name for name in RECORDED if TASKS[name].at_risk] == ["backward", "wrap"]


def test_every_task_has_a_name_and_a_letter_of_its_own_and_says_what_it_does():
    assert all(name == task.name for name, task in TASKS.items())
    assert len({task.letter for task in TASKS.values()}) == len(TASKS)
    for task in TASKS.values():
        for function in (task.problem, task.demonstrate, task.verify):
            assert function.__doc__, (task.name, function)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", NAMES)
def test_right_answers_pass_and_their_corruptions_do_not(name, split):
    rng = Random(name)
    for problem in problems(name, split, 100, seed=3):
        answer = demonstration(problem, rng, noise=0)
        assert is_correct(problem, answer)
        last = answer[-2]
        corruptions = [
            answer[:-1],
            answer + ".",
            answer + "\n",
            answer + "<eos>",
            answer + "0",
            answer[:-2] + ".",
            answer[:-1] + "0.",
            answer.replace(last, "x"),
            "",
            ".",
        ]
        if last.isdigit():
            other, full_width = (int(last) + rng.randint(1, 9)) % 10, chr(ord("０") + int(last))
            corruptions += [answer[:-2] + f"{other}.", answer[:-2] + f"{full_width}."]
        if name != "countdown":  # where only the last attempt counts
            corruptions += [" " + answer, problem.prompt + answer, "x" + answer]
        for wrong in corruptions:
            assert not is_correct(problem, wrong), (problem, wrong)


@pytest.mark.parametrize("name", NAMES)
def test_another_gold_answer_makes_a_right_answer_wrong(name):
    for problem in problems(name, "test", 50):
        answer = demonstration(problem, Random(0), noise=0)
        assert not is_correct(replace(problem, gold=problem.gold + "0"), answer)


@pytest.mark.parametrize("name", NAMES)
def test_demonstrations_are_right_as_often_as_the_task_says(name):
    n, rng = 4000, Random(f"noise/{name}")
    pool = problems(name, "train", min(1000, split_size(TASKS[name], "train")))
    right = sum(is_correct(p, demonstration(p, rng)) for p in rng.choices(pool, k=n)) / n
    rate = TASKS[name].demonstrated
    assert abs(right - rate) < 4 * math.sqrt(rate * (1 - rate) / n)


@pytest.mark.parametrize("name", DIGIT_TASKS)
def test_noise_changes_one_digit_of_the_answer(name):
    rng = Random(1)
    for problem in problems(name, "train", 300):
        answer = demonstration(problem, rng, noise=1)
        assert len(answer) == len(problem.gold) + 1
        assert sum(a != b for a, b in zip(answer, problem.gold + ".", strict=True)) <= 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "text",
    [
        "9" * 10**6,
        "=" * 10**6,
        "1=" * 10**5,
        "1+1=2," * 10**5 + ".",
        "\ud800",
        "\x00",
        "٢٨",
        "=٢٨.",
        "=28.\u200b",
        "nan",
        "None",
    ],
)
def test_no_verifier_is_slow_or_raises_on_odd_text(name, text):
    problem = problems(name, "test", 1)[0]
    started = time.process_time()
    assert not is_correct(problem, text)
    assert time.process_time() - started < 60  # with the square of the text it would be hours


@pytest.mark.parametrize("name", [*CHAINS, "add", "subtract", "countdown"])
def test_splits_that_can_be_listed_do_not_meet_and_leave_nothing_out(name):
    task = TASKS[name]
    train, test = (
        {problem.prompt for problem in problems(name, split, split_size(task, split))}
        for split in SPLITS
    )
    assert not train & test
    assert len(train) == split_size(task, "train") and len(test) == split_size(task, "test")
    assert task.size - len(train | test) < 5


@pytest.mark.parametrize("start", [0, 10**6, 199_990_000])
def test_splits_of_the_large_tasks_do_not_meet(start):
    test = {split_index("test", k) for k in range(start, start + 2000)}
    train = {split_index("train", k) for k in range(4 * start, 4 * (start + 2000))}
    assert test | train == set(range(5 * start, 5 * (start + 2000))) and not test & train


def test_the_held_out_place_is_as_good_as_random():
    places = [split_index("test", block) % 5 for block in range(10_000)]
    for place in range(5):
        assert abs(places.count(place) - 2000) < 4 * math.sqrt(10_000 * 0.2 * 0.8) + 80  # 256 % 5


def test_problems_are_the_same_on_every_machine():
    """Literals on purpose: a change of these lines changes every run that was recorded."""
    assert [p.prompt for p in problems("sum", "train", 2, seed=0)] == SUM_PROMPTS
    assert [p.prompt for p in problems("countdown", "test", 2, seed=5)] == COUNTDOWN_PROMPTS
    assert demonstration(problems("sum", "train", 1)[0], Random(0)) == SUM_DEMONSTRATION


SUM_PROMPTS = ["M4,9,4,3,8:", "M4,6,5,2,5:"]


COUNTDOWN_PROMPTS = ["C1,3,6=24:", "C1,7,8=49:"]


SUM_DEMONSTRATION = "4+9=13,13+4=17,17+3=20,20+8=28."


@pytest.mark.parametrize("name", NAMES)
def test_problems_are_different_and_follow_the_seed(name):
    drawn = problems(name, "train", 200, seed=1)
    assert len({problem.prompt for problem in drawn}) == 200
    assert drawn == problems(name, "train", 200, seed=1)
    assert drawn != problems(name, "train", 200, seed=2)
    assert all(problem.prompt.startswith(TASKS[name].letter) for problem in drawn)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("chess", "train", 1), f"task must be one of {', '.join(TASKS)}, got 'chess'"),
        (("", "train", 1), "task must be"),
        (("sum", "validation", 1), "split must be one of train, test, got 'validation'"),
        (("sum", "", 1), "split must be"),
        (("sum", "train", 0), "n must be from 1 to 47,236 (sum, train), got 0"),
        (("sum", "train", -3), "got -3"),
        (("sum", "train", 2.0), "got 2.0"),
        (("sum", "train", "2"), "got '2'"),
        (("backward", "train", 47_237), "n must be from 1 to 47,236 (backward, train)"),
        (("wrap", "test", 11_810), "n must be from 1 to 11,809 (wrap, test), got 11810"),
        (("countdown", "test", 429), "n must be from 1 to 428 (countdown, test), got 429"),
        (("sort", "test", 10**9), "n must be from 1 to 20,000,000"),
    ],
)
def test_bad_requests_are_refused(arguments, message):
    with pytest.raises(ValueError) as refusal:
        problems(*arguments)
    assert message in str(refusal.value)


def test_bad_answers_are_refused():
    with pytest.raises(ValueError, match="task must be one of"):
        is_correct(Problem("chess", "e4", "e5"), "e5.")
    with pytest.raises(ValueError, match="task must be one of"):
        demonstration(Problem("chess", "e4", "e5"), Random(0))
    for odd in (None, 28, b"28.", [{"role": "assistant", "content": "28."}]):
        with pytest.raises(TypeError, match="completion must be a string"):
            is_correct(Problem("sum", "M4,7,9,3,5:", "28"), odd)


def test_reward_takes_what_trl_passes():
    asked = [problem for name in NAMES for problem in problems(name, "train", 3)]
    data = to_dataset(asked)
    assert data.column_names == ["prompt", "gold", "task"] and len(data) == 3 * len(NAMES)
    rng = Random(0)
    answers = [demonstration(problem, rng, noise=i % 2) for i, problem in enumerate(asked)]
    given = reward(
        prompts=data["prompt"],
        completions=answers,
        completion_ids=[[1]] * len(data),
        gold=data["gold"],
        task=data["task"],
        trainer_state=object(),
    )
    assert given == [float(is_correct(p, a)) for p, a in zip(asked, answers, strict=True)]
    assert set(given[::2]) == {1.0} and sum(given) < len(given)
    with pytest.raises(ValueError, match="zip"):
        reward(data["prompt"], answers[:-1], gold=data["gold"], task=data["task"])
