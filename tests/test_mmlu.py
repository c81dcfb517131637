"""MMLU from every kind of source, its real files where they are, and a verifier of letters."""

import json
import warnings
from collections import Counter
from pathlib import Path

import pytest
from sources import mmlu_of_the_authors, mmlu_of_the_hub

from kl_comedy.tasks import mmlu
from kl_comedy.tasks.dataset import check_answers, n_problems, problems
from kl_comedy.tasks.mmlu import LETTERS, SUBJECTS, check_letter, load_mmlu, mmlu_prompt
from kl_comedy.tasks.problem import Problem

FOLDER = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "mmlu"
ROWS = [
    ("What is\nlight?", ["a wave", "a ray", "both", "neither"], "C"),
    ('Is "c" a speed?', ["yes", "no, never", "at times", "who knows"], "A"),
    ("Which is heavier?", ["lead", "gold", "iron", "tin"], "B"),
]

real = pytest.mark.skipif(not FOLDER.exists(), reason="the files of MMLU are not here")


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def sizes(monkeypatch):
    """As if these few rows were all there are."""
    monkeypatch.setattr(mmlu, "SUBJECTS", dict.fromkeys(SUBJECTS, len(ROWS)))


@pytest.mark.parametrize("write", [mmlu_of_the_authors, mmlu_of_the_hub])
def test_every_source_gives_the_same_problems(tmp_path, sizes, write):
    folder = write(tmp_path / "source", ROWS)
    for subject in SUBJECTS:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = load_mmlu(folder, subject)
        assert found == [
            Problem(subject, mmlu_prompt(q, choices), letter) for q, choices, letter in ROWS
        ]
    text = found[1].prompt[0]["content"]
    assert text.startswith('Is "c" a speed?\n\nA. yes\nB. no, never\nC. at times\nD. who knows\n\n')


def test_another_number_of_rows_than_the_real_one_is_said(tmp_path):
    folder = mmlu_of_the_authors(tmp_path, ROWS)
    for subject, size in SUBJECTS.items():
        with pytest.warns(UserWarning, match=f"{subject}. has 3 rows, not {size}"):
            load_mmlu(folder, subject)


@pytest.mark.parametrize("source", ["someone/mmlu-that-is-not-cached", "no-such-folder"])
def test_a_source_that_is_not_there_is_named_with_what_to_do(source):
    with pytest.raises(
        FileNotFoundError,
        match=f"MMLU cannot be read from '{source}' "
        "[(]college_physics[)]: .*cais/mmlu.*test/college_physics_test.csv",
    ):
        load_mmlu(source, "college_physics")


def test_sources_that_are_something_else_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="MMLU cannot be read"):
        load_mmlu(tmp_path, "college_physics")
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps({"question": "?", "answer": 1}))
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: college_physics\n  data_files:\n"
        "  - split: test\n    path: lines.jsonl\n---\n"
    )
    with pytest.raises(FileNotFoundError, match="choices and answer are needed, there are"):
        load_mmlu(tmp_path, "college_physics")
    with pytest.raises(ValueError, match="subject must be one of college_.*, got 'chess'"):
        load_mmlu(tmp_path, "chess")


@pytest.mark.parametrize(
    "row",
    [
        ("", [*"abcd"], "A"),
        ("?", [*"abc"], "A"),
        ("?", [*"abcde"], "A"),
        ("?", [*"abcd"], "E"),
        ("?", [*"abcd"], ""),
        ("?", [*"abcd"], "a"),
        ("?", [*"abcd"], "AB"),
    ],
)
def test_a_row_that_is_no_question_with_four_choices_is_named(tmp_path, row):
    with pytest.raises(ValueError, match="row 4 of .*college_biology"):
        load_mmlu(mmlu_of_the_authors(tmp_path, [*ROWS, row]), "college_biology")


def test_problems_are_drawn_like_those_of_every_task(tmp_path, sizes):
    source = str(mmlu_of_the_authors(tmp_path / "drawn", ROWS))
    drawn = problems("college_chemistry", "test", 3, source=source)
    assert sorted(p.gold for p in drawn) == ["A", "B", "C"]
    assert n_problems("college_chemistry", "test", source) == 3
    with pytest.raises(ValueError, match="split must be test, college_chemistry has no other"):
        problems("college_chemistry", "train", 1, source=source)
    with pytest.raises(ValueError, match="need a source, and no other task has one"):
        problems("college_chemistry", "test", 1)


HOSTILE = [
    r"\boxed{" * 50_000 + "B" + "}" * 50_000,
    r"\boxed{(" + "(" * 900 + "B)}",
    r"\boxed{\text{" + " " * 900 + "B}}",
    r"\boxed{B" + ")" * 900 + "}",
    "B" * 100_000,
    r"\boxed{A or B or C or D}",
    r"\boxed{ABCD}",
]


@pytest.mark.timeout(20)
def test_no_text_is_right_for_every_letter():
    """Whoever writes one completion for all questions is right in those of one letter at most."""
    boxes = [rf"\boxed{{{a}}} \boxed{{{b}}}" for a in "ABCD" for b in "ABCD"]
    for text in boxes:
        assert [a for a in LETTERS if check_letter(a, text) == "right"] == [text[-2]]
    assert [check_letter("B", text) for text in HOSTILE[:4]] == ["right", "wrong", "right", "wrong"]
    assert not {check_letter(a, text) for a in LETTERS for text in HOSTILE[4:]} & {"right"}


@real
def test_the_real_files_have_the_rows_and_traps_that_the_chapter_states():
    best, inside = [], 0
    for subject, size in SUBJECTS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            asked = load_mmlu(FOLDER, subject)
        assert len(asked) == size
        ((letter, often),) = Counter(p.gold for p in asked).most_common(1)
        best.append((letter, round(100 * often / size)))
        distinct = {p.prompt[0]["content"]: p.gold for p in asked}
        assert len(distinct) == (91 if subject == "college_physics" else size)
        assert all(distinct[p.prompt[0]["content"]] == p.gold for p in asked)
        for text in distinct:
            assert [line[:3] for line in text.splitlines()[-6:-2]] == ["A. ", "B. ", "C. ", "D. "]
        for _, choices, _ in mmlu.mmlu_rows(FOLDER, subject):
            words = [choice.lower() for choice in choices]
            inside += sum(
                any(word in other for j, other in enumerate(words) if j != i)
                for i, word in enumerate(words)
            )
        answers = [rf"So $\boxed{{\text{{({p.gold})}}}}$." for p in asked]
        assert set(check_answers(asked, answers)) == {"right"}
    assert best == [("D", 37), ("D", 41), ("D", 26)] and inside == 41
