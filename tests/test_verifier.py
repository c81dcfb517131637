"""The pool of workers: no completion stops the check, and no worker outlives it."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
from sources import gsm8k_completions

from kl_comedy.tasks.answers import MAX_ANSWER, last_boxed
from kl_comedy.tasks.verifier import VERDICTS, WORKER_MEMORY, Verifier, check_pairs

ROOT = Path(__file__).resolve().parent.parent

# What follows runs workers with a stand-in for math-verify that misbehaves on demand, so
# that each fault is certain. Further down the workers have math-verify itself.

STAND_IN = textwrap.dedent(r"""
    import os, sys, time

    class LatexExtractionConfig:
        pass

    def parse(text, extraction_config, parsing_timeout, raise_on_error):
        assert parsing_timeout is None and raise_on_error and text.startswith("\\boxed{")
        text = text[7:-1]
        print("noise")
        print("noise", file=sys.stderr)
        if text == "freeze":
            10**10**10
        if text == "eat":
            bytearray(2**34)
        if text == "die":
            os._exit(0)
        if text == "crash":
            os.abort()
        if text == "raise":
            raise ArithmeticError
        if text == "deep":
            return parse(text, extraction_config, None, True)
        if text.startswith("sleep"):
            time.sleep(float(text[5:]))
        return [] if text == "unreadable" else [{"0.5x": "\\frac{x}{2}"}.get(text, text)]

    def verify(gold, answer, timeout_seconds, raise_on_error):
        assert timeout_seconds is None and raise_on_error
        return gold == answer
""")


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Workers import this module as `math_verify`."""
    package = tmp_path / "modules" / "math_verify.py"
    package.parent.mkdir()
    package.write_text(STAND_IN)
    path = os.pathsep.join([str(package.parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    return package


def boxed(*answers):
    return [rf"\boxed{{{answer}}}" for answer in answers]


def gone(processes, within):
    """Whether the processes are no more, or only wait to be reaped by others."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if all(
            not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
            for pid in processes
        ):
            return True
        time.sleep(0.05)
    return False


def pids(verifier):
    return [worker.process.pid for worker in verifier.workers]


@pytest.mark.parametrize("workers", [1, 3])
def test_verdicts_come_in_order_and_are_counted(stand_in, workers):
    golds = [f"a{i}" for i in range(40)]
    answers = boxed(*(f"a{i}" if i % 3 else f"b{i}" for i in range(40)))
    with Verifier(workers) as verifier:
        given = verifier.check([*golds, "a", "4"], [*answers, "no", r"\boxed{5}"])
        assert given == ["right" if i % 3 else "wrong" for i in range(40)] + ["no box", "wrong"]
        assert verifier.check([], []) == [] and len(verifier.workers) <= workers
        verifier.check(["a"], boxed("raise"))
        assert verifier.counts == {"right": 26, "wrong": 15, "no box": 1, "timeout": 0, "error": 1}
        assert list(verifier.counts) == list(VERDICTS)


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        ("freeze", "timeout"),
        ("sleep9", "timeout"),
        ("eat", "error"),
        ("die", "error"),
        ("crash", "error"),
        ("raise", "error"),
        ("deep", "error"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_fault_costs_its_own_pair_only(stand_in, workers, fault, verdict):
    with Verifier(workers, seconds=1) as verifier:
        verifier.check(["a"], boxed("b"))
        assert verifier.check(["a"] * 5, boxed("sleep0", fault, "sleep0", fault, "sleep0")) == [
            "wrong",
            verdict,
            "wrong",
            verdict,
            "wrong",
        ]
        assert verifier.check(["a"], boxed("sleep0")) == ["wrong"]  # and goes on
        assert verifier.counts[verdict] == 2


def test_a_gold_answer_that_cannot_be_read_is_an_error(stand_in):
    with Verifier(1) as verifier:
        assert verifier.check(
            ["unreadable", "raise", "a" * (MAX_ANSWER + 1), "a"], boxed("b", "b", "b", "b")
        ) == ["error"] * 3 + ["wrong"]


@pytest.mark.parametrize(
    "answer", ["\x00", "\ud800", "é\u2028\n\r", '"', "\\", "٣" * 500, "\U0001f600" * 1000]
)
def test_any_text_reaches_a_worker_and_comes_back(stand_in, answer):
    with Verifier(1) as verifier:
        assert verifier.check([f"a{answer}"[:MAX_ANSWER]] * 2, boxed("b", "b")) == ["wrong"] * 2


def test_nothing_is_left_when_closed(stand_in):
    with Verifier(2) as verifier:
        verifier.check(["a"] * 4, boxed("sleep.2", "b", "b", "b"))
        processes = pids(verifier)
    assert len(processes) == 2 and gone(processes, 0.1)
    verifier.close()
    with pytest.raises(ValueError, match="the verifier is closed"):
        verifier.check(["a"], boxed("b"))


def test_nothing_is_left_when_forgotten(stand_in):
    verifier = Verifier(1)
    verifier.check(["a"], boxed("b"))
    processes = pids(verifier)
    del verifier
    assert gone(processes, 1)


PARENT = """
import sys, threading
from kl_comedy.tasks.verifier import Verifier
verifier = Verifier(1, seconds=1)
verifier.check(["a"], [r"\\boxed{b}"])
print(verifier.workers[0].process.pid, flush=True)
if sys.argv[1] == "busy":
    threading.Thread(target=verifier.check, args=(["a"], [r"\\boxed{freeze}"])).start()
if sys.argv[1] != "exit":
    sys.stdin.read()
"""


@pytest.mark.parametrize("state", ["exit", "idle", "busy"])
def test_workers_die_with_their_parent(stand_in, state):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, state], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    worker = int(parent.stdout.readline())
    if state == "busy":
        time.sleep(0.5)
    if state != "exit":
        assert psutil.pid_exists(worker)
        parent.kill()
    parent.wait()
    assert gone([worker], 15)  # a frozen one after at most 2 * seconds + 1 of processor time
    parent.stdin.close()
    parent.stdout.close()


def test_no_signal_of_this_process_is_touched(stand_in):
    handler = signal.getsignal(signal.SIGALRM)
    signal.alarm(500)
    try:
        with Verifier(1, seconds=1) as verifier:
            assert verifier.check(["a"] * 2, boxed("freeze", "b")) == ["timeout", "wrong"]
    finally:
        left = signal.alarm(0)
    assert left > 400 and signal.getsignal(signal.SIGALRM) is handler


def test_threads_share_a_verifier(stand_in):
    given = {}
    with Verifier(2, seconds=2) as verifier:
        threads = [
            threading.Thread(
                target=lambda i=i: given.update(
                    {i: verifier.check([f"a{i}"] * 6, boxed(*[f"a{i}", "b"] * 2, "die", f"a{i} "))}
                )
            )
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert given == {i: ["right", "wrong"] * 2 + ["error", "right"] for i in range(4)}


def test_an_interrupt_leaves_no_worker_at_a_pair(stand_in):
    with Verifier(2, seconds=30) as verifier:
        verifier.check(["a"] * 2, boxed("sleep.2", "b"))
        processes = pids(verifier)
        main, started = threading.main_thread().ident, time.monotonic()
        threading.Timer(0.5, signal.pthread_kill, [main, signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            verifier.check(["a"], boxed("freeze"))
        assert time.monotonic() - started < 30  # seconds of the pair
        assert gone(processes, 0.5) and verifier.workers == []
        assert verifier.check(["a"], boxed("sleep0")) == ["wrong"]


def test_a_worker_killed_while_idle_costs_nothing(stand_in):
    with Verifier(1) as verifier:
        verifier.check(["a"], boxed("b"))
        os.kill(pids(verifier)[0], signal.SIGKILL)
        time.sleep(0.2)
        assert verifier.check(["a"], boxed("sleep0")) == ["wrong"]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('torn apart')", "ImportError.*torn apart"),
        ("import os; os._exit(3)", "exit code"),
        (STAND_IN.replace("gold == answer", "True"), "does not tell x/2 from x/3"),
        (STAND_IN.replace("gold == answer", "False"), "does not tell x/2 from x/3"),
        (STAND_IN.replace("def verify", "def other"), "ImportError.*verify"),
    ],
)
def test_a_broken_math_verify_is_an_error_and_not_a_reward_of_zero(stand_in, source, reason):
    stand_in.write_text(source)
    with Verifier(2) as verifier:
        with pytest.raises(RuntimeError, match=f"math-verify cannot be used: .*{reason}"):
            verifier.check(["a"], boxed("b"))
        assert verifier.workers == [] and sum(verifier.counts.values()) == 0
        stand_in.write_text(STAND_IN)
        assert verifier.check(["a"], boxed("b")) == ["wrong"]


@pytest.mark.parametrize("workers", [0, -1, 1.5, "2"])
def test_bad_limits_are_refused(workers):
    with pytest.raises(ValueError, match="workers must be 1 or more, got"):
        Verifier(workers)


def test_gold_answers_and_completions_have_to_pair_up():
    with Verifier() as verifier:
        with pytest.raises(ValueError, match="zip"):
            verifier.check(["a"], [])


# From here on the workers have math-verify itself.


@pytest.fixture(scope="module")
def verifier():
    with Verifier(1) as verifier:
        yield verifier


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        (r"3\sqrt{13}", r"\sqrt{117}", "right"),
        (r"3\sqrt{13}", "3", "wrong"),
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", "right"),
        ("x^2+2x+1", "(x+1)^2", "right"),
        ("2+\\pi", r"\pi+\sqrt{4}", "right"),
        ("2\\pi", "6.28", "wrong"),
        ("(1,2)", "(2,1)", "wrong"),
        (r"\left(3, \frac{\pi}{2}\right)", r"(3,\pi/2)", "right"),
        ("[1,2]", "(1,2)", "wrong"),
        (r"\{1,2\}", r"\{2,1\}", "right"),
        ("1,2", "2,1", "right"),
        ("1,2", "1", "wrong"),
        ("x=4", "4", "right"),
        ("40_9", "40_{9}", "right"),
        (r"\text{Ann}", "Ann", "right"),
        (r"\text{Ann}", r"\text{Bob}", "wrong"),
        ("x+1", "y+1", "wrong"),
        ("p-q", "q-p", "wrong"),
        (
            r"\begin{pmatrix}1\\2\end{pmatrix}",
            "\\begin{pmatrix} 1 \\\\\n 2 \\end{pmatrix}",
            "right",
        ),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}", "wrong"),
    ],
)
def test_answers_that_math_verify_decides(verifier, gold, answer, verdict):
    assert verifier.check([gold], [rf"So it is $\boxed{{{answer}}}$."]) == [verdict]


@pytest.fixture(scope="module")
def solved():
    return gsm8k_completions()


def test_math_verify_agrees_with_the_labels_of_real_completions(verifier, solved):
    """Without the rules, which decide nearly all of these."""
    pairs = [
        (i, gold, last_boxed(text)) for i, (gold, text, _) in enumerate(solved) if last_boxed(text)
    ]
    found = check_pairs(pairs, verifier.workers, 1, 5.0, WORKER_MEMORY)
    assert len(found) > 280
    assert [i for i, verdict in found.items() if (verdict == "right") != solved[i][2]] == []


HOSTILE = [
    r"10^{10^{10}}\pi",
    "9^{9^{9^{9}}}",
    "((((10!)!)!)!)!",
    "100000!!+\\pi",
    "(" * 300 + "x" + ")" * 300,
    "{" * 400 + "x" + "}" * 400,
    "+".join(rf"\frac{{1}}{{{i}x}}" for i in range(1, 60)),
    r"\sqrt{" * 100 + "x" + "}" * 100,
    r"\int_0^1 x^{x^{x^x}} dx",
    "(x+y+z)^{99999}",
    r"\sum_{i=1}^{10^{9}} \frac{1}{i^i}",
]


def test_hostile_answers_end_in_time_and_others_are_answered(verifier):
    answers = [text for hostile in HOSTILE for text in (hostile, r"\pi+\sqrt{4}")]
    assert all(len(answer) <= MAX_ANSWER for answer in answers)
    given = verifier.check([r"2+\pi"] * len(answers), boxed(*answers))
    assert "right" not in given[::2] and given[1::2] == ["right"] * len(HOSTILE)


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{" + "(" * 2000 + "x" + ")" * 2000 + "}",
        r"\boxed{x}" * 50_000 + r"\boxed{1}",
        r"\boxed{1} and \boxed{2+\pi}" + r" \boxed{3}",
    ],
)
def test_a_completion_full_of_boxes_or_parentheses_is_not_right(verifier, text):
    assert verifier.check([r"2+\pi"], [text])[0] in ("no box", "wrong")
