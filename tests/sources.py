"""Data for tests: stand-ins on disk for data of the hub, and labelled answers from a file.

The stand-ins have the formats of the hub; their questions are our own.
"""

import csv
import json
from pathlib import Path

import pytest
from datasets import ClassLabel, Dataset, Features, Sequence, Value

from kl_comedy.tasks.mmlu import LETTERS, SUBJECTS

ROOT = Path(__file__).resolve().parent.parent

FEATURES = Features(
    {
        "question": Value("string"),
        "subject": Value("string"),
        "choices": Sequence(Value("string")),
        "answer": ClassLabel(names=[*LETTERS]),
    }
)


def mmlu_of_the_hub(folder, rows):
    """A part for each subject, in parquet, with the answer as a class label, as `cais/mmlu`."""
    parts = ""
    for subject in SUBJECTS:
        path = folder / subject / "test-00000-of-00001.parquet"
        path.parent.mkdir(parents=True)
        Dataset.from_list(
            [
                {"question": question, "subject": subject, "choices": choices, "answer": letter}
                for question, choices, letter in rows
            ],
            features=FEATURES,
        ).to_parquet(path)
        parts += (
            f"- config_name: {subject}\n  data_files:\n"
            f"  - split: test\n    path: {subject}/test-*\n"
        )
    (folder / "README.md").write_text(f"---\nconfigs:\n{parts}---\n")
    return folder


def mmlu_of_the_authors(folder, rows):
    """A file for each subject, without a header."""
    (folder / "test").mkdir(parents=True, exist_ok=True)
    for subject in SUBJECTS:
        with (folder / "test" / f"{subject}_test.csv").open("w", newline="") as file:
            csv.writer(file).writerows([q, *choices, letter] for q, choices, letter in rows)
    return folder


def math2_of_the_hub(folder, header, rows):
    """One file of comma-separated values, named as the published one; the header is a guess."""
    folder.mkdir(exist_ok=True)
    with (folder / "math^2_final.csv").open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return folder


SOLUTIONS = ROOT.parent / "shared" / "data" / "gsm8k_completions" / "example_model_solutions.jsonl"


def gsm8k_completions():
    """(gold, completion, label) of 300 real answers by four models; the labels are OpenAI's.

    The test is skipped where the file is not there.
    """
    if not SOLUTIONS.exists():
        pytest.skip("the completions of GSM8K are not here")
    with SOLUTIONS.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file][::17][:75]
    models = ["6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"]
    solved = []
    for row in rows:
        gold = row["ground_truth"].rsplit("A: ", 1)[1]
        for model in models:
            text, mark, answer = row[model]["solution"].rpartition("A: ")
            solved.append(
                (gold, rf"{text}\boxed{{{answer}}}" if mark else answer, row[model]["is_correct"])
            )
    assert len(solved) == 300 and 60 < sum(label for _, _, label in solved) < 240
    return solved
