"""The face of the package: what `from kl_comedy import ...` gives, and when; its examples run."""

import doctest
import json
import subprocess
import sys

import pytest
from website import ROOT

import kl_comedy

HEAVY = ("torch", "numpy", "pandas", "transformers", "trl", "datasets", "matplotlib", "papermill")


def loaded_by(code):
    """Which of the heavy packages a fresh Python has loaded after `code`."""
    shown = f"{code}\nimport json, sys\nprint(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    ran = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "code, heavy",
    [
        ("import kl_comedy; dir(kl_comedy)", []),
        ("from kl_comedy import cli; cli.parser().format_help()", []),
        ("from kl_comedy import KLConfig, kl_surrogate, k1, k2, k3, exact_kl", ["torch", "numpy"]),
        ("from kl_comedy import audit", ["torch", "numpy"]),
    ],
)
def test_a_name_loads_what_it_needs(code, heavy):
    assert sorted(loaded_by(code)) == sorted(heavy)


def test_the_face_is_what_the_readme_says():
    expected = [
        "KLConfig",
        "KLGRPOTrainer",
        "KLRLOOTrainer",
        "audit",
        "exact_kl",
        "k1",
        "k2",
        "k3",
        "kl_surrogate",
    ]
    assert sorted(kl_comedy.__all__) == expected
    assert {*expected} <= {*dir(kl_comedy)}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'k4'"):
        kl_comedy.k4  # noqa: B018
    assert not hasattr(kl_comedy, "k4")


def test_the_function_audit_is_not_hidden_by_the_room_that_it_lives_in():
    import kl_comedy.auditing.audit as module
    from kl_comedy import audit

    assert audit is module.audit and callable(audit)


@pytest.mark.parametrize("name", kl_comedy.__all__)
def test_each_name_has_an_example_that_runs(name):
    subject = getattr(kl_comedy, name)
    finder = doctest.DocTestFinder(recurse=False)
    (test,) = finder.find(subject, name, globs={})
    run = [example for example in test.examples if not example.options.get(doctest.SKIP)]
    assert run, f"{name} has no example"
    failed, tried = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test)
    assert tried >= len(run) and failed == 0
