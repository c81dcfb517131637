"""MATH from every kind of source, and beside the other tasks. The problems here are our own."""

import json
import warnings
from random import Random

import pytest
from sources import math2_of_the_hub

from kl_comedy.tasks import math as math_task
from kl_comedy.tasks.characters import demonstration
from kl_comedy.tasks.dataset import is_correct, math_verifier, problems, reward, to_dataset
from kl_comedy.tasks.math import load_math, load_math2, math_gold, math_prompt
from kl_comedy.tasks.problem import Problem

ROWS = [
    ("What is $2+3$?", "We add: $\\boxed{5}$.", "5"),
    ("Halve $3$.", "Not $\\boxed{1}$ but $\\boxed{\\frac{3}{2}}$.", "\\frac{3}{2}"),
    ("What is $9-2$?", "It is $\\boxed 7$.", "7"),
    (
        "Write the column.",
        "$\\boxed{\\begin{pmatrix} 1 \\\\\n2 \\end{pmatrix}}$",
        "\\begin{pmatrix} 1 \\\\\n2 \\end{pmatrix}",
    ),
    ("Say nothing.", "$\\boxed{}$", ""),
    ("Say it without a box.", "It is 4.", ""),
]
GOLDS = [gold for _, _, gold in ROWS if gold]


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def sizes(monkeypatch):
    """As if these few rows were all there are."""
    monkeypatch.setattr(math_task, "MATH_SIZES", {"train": (6,), "test": (4, 6)})


def original(folder):
    """One indented JSON file a problem, in folders of subjects."""
    for split in ("train", "test"):
        for i, (problem, solution, _) in enumerate(ROWS):
            path = folder / split / ("algebra" if i % 2 else "geometry") / f"{i}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                json.dumps(
                    {
                        "problem": problem,
                        "type": "Algebra",
                        "level": "Level ?",
                        "solution": solution,
                    },
                    indent=4 if i else None,
                )
            )
    return folder


def selected(folder):
    """The columns of MATH-500, one JSON line a problem, for testing only."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "test.jsonl").write_text(
        "".join(
            json.dumps(
                {
                    "problem": problem,
                    "solution": "As in $\\boxed{0}$.",
                    "answer": gold,
                    "subject": "Algebra",
                    "level": 1 + i,
                    "unique_id": f"test/{i}",
                }
            )
            + "\n"
            for i, (problem, _, gold) in enumerate(ROWS)
        )
    )
    return folder


def in_parts(folder):
    """A data set with a part for each subject, as some copies on the hub are."""
    folder.mkdir()
    for i, part in enumerate(("algebra", "geometry")):
        (folder / f"{part}.jsonl").write_text(
            "".join(
                json.dumps({"problem": problem, "solution": solution}) + "\n"
                for problem, solution, _ in ROWS[3 * i : 3 * i + 3]
            )
        )
    (folder / "README.md").write_text(
        "---\nconfigs:\n"
        + "".join(
            f"- config_name: {part}\n  data_files:\n  - split: train\n    path: {part}.jsonl\n"
            for part in ("algebra", "geometry")
        )
        + "---\n"
    )
    return folder


@pytest.mark.parametrize(
    ("write", "split", "inside"),
    [
        (original, "train", ""),
        (original, "test", ""),
        (selected, "test", ""),
        (selected, "test", "test.jsonl"),
        (in_parts, "train", ""),
    ],
)
def test_every_source_gives_the_same_problems(tmp_path, sizes, write, split, inside):
    folder = write(tmp_path / "source")
    with pytest.warns(UserWarning, match="2 of 6 rows of .* have no gold answer") as caught:
        found = load_math(folder / inside, split)
    assert len(caught) == 1
    found.sort(key=lambda problem: GOLDS.index(problem.gold))  # files come in any order
    assert found == [Problem("math", math_prompt(text), gold) for text, _, gold in ROWS if gold]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert len(load_math(str(folder / inside), split)) == 4


def test_another_number_of_rows_than_the_real_one_is_said(tmp_path):
    folder = original(tmp_path / "source")
    for split, said in (("train", "6 rows, not 7,500"), ("test", "6 rows, not 5,000 or 500")):
        with pytest.warns(UserWarning) as caught:
            load_math(folder, split)
        assert [str(w.message).split(f"({split}) ")[1] for w in caught] == [
            f"has {said}",
            "have no gold answer and are dropped",
        ]


@pytest.mark.parametrize("source", ["someone/math-that-is-not-cached", "no-such-folder"])
def test_a_source_that_is_not_there_is_named_with_what_to_do(source):
    with pytest.raises(
        FileNotFoundError,
        match=f"MATH cannot be read from '{source}' .train.: .*"
        "folder with train and test.*ships no problems of MATH",
    ):
        load_math(source, "train")


def test_sources_that_are_something_else_are_refused(tmp_path):
    folder = selected(tmp_path / "only test")
    with pytest.raises(FileNotFoundError, match="(?s)MATH cannot be read .*only test. .train"):
        load_math(folder, "train")
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"problem": "x", \n oh')
    for source in (empty, broken):
        with pytest.raises(FileNotFoundError, match="MATH cannot be read"):
            load_math(source, "test")
    other = tmp_path / "other.jsonl"
    other.write_text('{"question": "x", "answer": "y"}\n')
    with pytest.raises(
        ValueError,
        match="needs the columns problem and solution or answer, it has question, answer",
    ):
        load_math(other, "test")
    with pytest.raises(ValueError, match="split must be one of train, test, got 'dev'"):
        load_math(other, "dev")


@pytest.mark.parametrize(
    ("row", "gold"),
    [
        ({"solution": "$\\boxed{1}$ $\\boxed 2$"}, "2"),
        ({"solution": "1"}, ""),
        ({"answer": ""}, ""),
        ({"solution": "\\boxed{1}", "answer": "3 "}, "3"),
        ({"solution": "\\boxed{1}", "answer": None}, ""),
    ],
)
def test_the_gold_answer_of_a_row(row, gold):
    assert math_gold(row) == gold


@pytest.fixture
def as_published(tmp_path):
    """A folder with the file of the hub for each header."""

    def write(header, rows):
        return math2_of_the_hub(tmp_path / "-".join(header), header, rows)

    return write


ANSWERS = [(text, solution, gold) for text, solution, gold in ROWS if gold]


@pytest.mark.parametrize(
    "header, rows",
    [
        (["problem", "answer"], [(text, gold) for text, _, gold in ANSWERS]),
        (
            ["Skill 1", "Question", "Answer"],
            [("x", text, f"${gold}$") for text, _, gold in ANSWERS],
        ),
        (["QUESTION", "Solution"], [row[:2] for row in ANSWERS]),
        (
            ["question", "solution", "answer"],
            [(t, "No box", solution) for t, solution, _ in ANSWERS],
        ),
    ],
)
def test_math2_is_read_whatever_its_split_is_called(as_published, header, rows):
    folder = as_published(header, rows)
    for source in (folder, str(folder / "math^2_final.csv")):
        with pytest.warns(UserWarning) as caught:
            found = load_math2(source)
        assert found == [Problem("math", math_prompt(t), gold) for t, _, gold in ANSWERS]
        assert [str(w.message).split("' ")[1] for w in caught] == ["has 4 rows, not 210"]
        assert caught[0].filename == __file__


def test_math2_of_numbers_alone_is_text(as_published):
    folder = as_published(["question", "answer"], [("What is $2+2$?", 4), ("Halve $5$.", 2.5)])
    with pytest.warns(UserWarning, match="2 rows, not 210"):
        assert [
            is_correct(p, rf"\boxed{{{gold}}}")
            for p, gold in zip(load_math2(folder), ("4", r"\frac{5}{2}"), strict=True)
        ] == [True, True]


def test_math2_drops_what_no_answer_could_equal(as_published):
    folder = as_published(
        ["question", "answer"],
        [("What is $2+2$?", "We add them, so it is $4$."), ("Halve $6$.", "3"), ("Nothing?", "")],
    )
    with pytest.warns(UserWarning, match="2 of 3 rows of .* have no gold answer and are dropped"):
        (found,) = load_math2(folder)
    assert found.gold == "3"


def test_math2_with_other_columns_is_refused_with_those_that_it_has(as_published):
    folder = as_published(["q", "final answer"], [("What is $2+2$?", "4")])
    with pytest.raises(
        ValueError,
        match="needs the columns problem or question, and answer or "
        "solution, it has q, final answer",
    ):
        load_math2(folder)
    folder = as_published(["question", "solution"], [("What is $2+2$?", "It is $4$.")])
    with pytest.raises(ValueError, match="no row has in its column solution an answer"):
        load_math2(folder)


@pytest.mark.parametrize("source", ["someone/math2-that-is-not-cached", "no-such-folder"])
def test_math2_that_is_not_there_is_named(source):
    with pytest.raises(FileNotFoundError, match=f"MATH.2 cannot be read from '{source}'"):
        load_math2(source)


@pytest.fixture
def source(tmp_path, sizes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = str(original(tmp_path / "source"))
        problems("math", "train", 1, source=folder)
        yield folder


def test_problems_are_drawn_like_those_of_every_task(source):
    drawn = problems("math", "train", 4, seed=3, source=source)
    assert sorted(p.gold for p in drawn) == sorted(GOLDS)
    assert drawn == problems("math", "train", 4, seed=3, source=source)
    orders = {
        tuple(p.gold for p in problems("math", "train", 4, seed, source)) for seed in range(9)
    }
    assert len(orders) > 3
    with pytest.raises(ValueError, match="n must be from 1 to 4 .math, train., got 5"):
        problems("math", "train", 5, source=source)


def test_math_needs_a_source_and_the_others_have_none(source):
    with pytest.raises(ValueError, match="need a source, .*: got task 'math' and source None"):
        problems("math", "train", 1)
    with pytest.raises(ValueError, match="no other task has one: got task 'sum'"):
        problems("sum", "train", 1, source=source)
    with pytest.raises(ValueError, match="task must be one of"):
        demonstration(Problem("math", math_prompt("x"), "5"), Random(0))


def test_reward_asks_the_verifier_of_the_task(source):
    (asked,) = [p for p in problems("math", "train", 4, source=source) if p.gold == "7"]
    data = to_dataset([asked] * 4)
    assert data[0] == {"prompt": asked.prompt, "gold": "7", "task": "math"}
    texts = [r"$\boxed{7}$", r"\boxed{8}", "7", r"$\boxed{x=7}$"]
    logged, before = {}, dict(math_verifier().counts)
    for completions in (texts, [[{"role": "assistant", "content": text}] for text in texts]):
        assert reward(
            data["prompt"],
            completions,
            gold=data["gold"],
            task=data["task"],
            log_metric=logged.__setitem__,
            trainer_state=object(),
        ) == [1, 0, 0, 0]
    assert logged == {"math/no box": 0.25, "math/timeout": 0, "math/error": 0}
    counted = {name: n - before[name] for name, n in math_verifier().counts.items()}
    assert counted == {"right": 2, "wrong": 4, "no box": 2, "timeout": 0, "error": 0}
    assert [is_correct(asked, text) for text in texts] == [True, False, False, False]


def test_tasks_may_be_mixed_in_one_batch():
    asked = [
        Problem("math", math_prompt("x"), "5"),
        *problems("add", "test", 1),
        Problem("math", math_prompt("y"), "6"),
    ]
    right = demonstration(asked[1], Random(0), noise=0)
    columns = {
        "prompts": [p.prompt for p in asked],
        "gold": [p.gold for p in asked],
        "task": [p.task for p in asked],
    }
    assert reward(completions=[r"\boxed{5}", right, r"\boxed{5}"], **columns) == [1, 1, 0]
    assert reward(completions=[r"\boxed{6}", right[1:], r"\boxed{6}"], **columns) == [0, 0, 1]
    logged = {}
    reward([asked[1].prompt], [right], [asked[1].gold], ["add"], log_metric=logged.__setitem__)
    assert logged == {}
