"""Small stand-ins on disk for data of the hub, in its formats. Their questions are our own."""

import csv

from datasets import ClassLabel, Dataset, Features, Sequence, Value

from kl_comedy.tasks.mmlu import LETTERS, SUBJECTS

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
