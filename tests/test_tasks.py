"""The tasks: right answers pass, wrong and hostile ones do not, splits never meet."""

import math
import time
import warnings
from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from kl_comedy.tasks.characters import SPLITS, TASKS, demonstration, split_index, split_size
from kl_comedy.tasks.countdown import countdown_problems, evaluate_expression, expressions
from kl_comedy.tasks.dataset import is_correct, problems, reward, to_dataset
from kl_comedy.tasks.problem import Problem, numbers_in

NAMES = list(TASKS)
CHAINS = ["sum", "backward", "wrap"]
DIGIT_TASKS = ["sort", "reverse", "add", "subtract"]
COUNTDOWN = Problem("countdown", "C3,5,7=22:", "22")


def test_the_eight_tasks():
    assert [(task.name, task.letter) for task in TASKS.values()] == [
        ("sum", "M"),
        ("backward", "X"),
        ("wrap", "Y"),
        ("sort", "S"),
        ("reverse", "R"),
        ("add", "A"),
        ("subtract", "D"),
        ("countdown", "C"),
    ]
    assert [name for name in NAMES if TASKS[name].in_domain] == ["sum"]
    assert [name for name in NAMES if TASKS[name].at_risk] == ["backward", "wrap"]
    assert all(
        TASKS[name].verify.__doc__
        and TASKS[name].demonstrate.__doc__
        and TASKS[name].problem.__doc__
        for name in NAMES
    )


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", NAMES)
def test_right_answers_pass_and_their_corruptions_do_not(name, split):
    rng = Random(name)
    for problem in problems(name, split, 100, seed=3):
        answer = demonstration(problem, rng, noise=0)
        assert is_correct(problem, answer)
        digit = answer[-2]
        corruptions = [
            answer[:-1],
            answer + ".",
            answer + "\n",
            answer + "<eos>",
            answer + "0",
            answer[:-2] + str((int(digit) + rng.randint(1, 9)) % 10) + ".",
            answer[:-2] + ".",
            answer[:-1] + "0.",
            answer.replace(digit, "x"),
            "",
            ".",
            answer[:-2] + chr(ord("０") + int(digit)) + ".",
        ]  # full-width digit
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


@pytest.mark.parametrize("name", DIGIT_TASKS)
def test_noise_changes_one_digit_of_the_answer(name):
    rng = Random(1)
    for problem in problems(name, "train", 300):
        answer = demonstration(problem, rng, noise=1)
        assert len(answer) == len(problem.gold) + 1
        assert sum(a != b for a, b in zip(answer, problem.gold + ".", strict=True)) <= 1


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


def test_numbers_that_are_held_out_in_sum_are_held_out_in_the_tasks_at_risk():
    held_out = [
        {tuple(numbers_in(p.prompt)) for p in problems(name, "test", 11_809)} for name in CHAINS
    ]
    assert held_out[0] == held_out[1] == held_out[2]


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
    assert all(problem.prompt[0] == TASKS[name].letter for problem in drawn)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("chess", "train", 1),
            "task must be one of sum, backward, wrap, sort, reverse, add, subtract, countdown",
        ),
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
    assert data.column_names == ["prompt", "gold", "task"] and len(data) == 24
    rng = Random(0)
    answers = [demonstration(problem, rng, noise=i % 2) for i, problem in enumerate(asked)]
    given = reward(
        prompts=data["prompt"],
        completions=answers,
        completion_ids=[[1]] * 24,
        gold=data["gold"],
        task=data["task"],
        trainer_state=object(),
    )
    assert given == [float(is_correct(p, a)) for p, a in zip(asked, answers, strict=True)]
    assert given[::2] == [1.0] * 12 and sum(given) < 24
    with pytest.raises(ValueError, match="zip"):
        reward(data["prompt"], answers[:-1], gold=data["gold"], task=data["task"])
