"""Runs of training that differ in the KL alone, and survive a kill."""

import multiprocessing
import os
import re
import signal
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas as pd
import papermill
import pytest
import torch

from kl_comedy.lab.optimum import kl_optimum
from kl_comedy.policies.evaluation import evaluate
from kl_comedy.policies.policy import load_policy
from kl_comedy.policies.sft import MIXTURE
from kl_comedy.study.checkpoints import COMPLETE, resume_point
from kl_comedy.study.exam import Exam, TrainedTest
from kl_comedy.study.recorder import Recorder
from kl_comedy.study.recorder import train as fit
from kl_comedy.study.runs import Run, read_status
from kl_comedy.study.training import TrainSettings, build_trainer
from kl_comedy.tasks.dataset import problems, to_dataset
from kl_comedy.theory.config import KLConfig

K1_REWARD = KLConfig("k1", "reward", 1.0)
GROUP = 3


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def mean_digit(prompts, completions, **_):
    """A reward in which hardly two answers are equal."""
    return [sum(int(c) for c in text if c.isdigit()) / 9 / len(text) for text in completions]


def tiny_trainer(config, output_dir, steps=1, callbacks=(), learning_rate=1e-3, **settings):
    model, tokenizer = load_policy()
    dataset = to_dataset(problems("sum", "train", int(2 * steps)))
    settings = TrainSettings(
        seed=0,
        learning_rate=learning_rate,
        warmup_steps=0,
        prompts_per_step=2,
        group_size=GROUP,
        max_length=12,
        **{"save_steps": 1} | settings,
    )
    return build_trainer(
        config, model, tokenizer, dataset, mean_digit, output_dir, settings, callbacks
    )


@pytest.mark.parametrize(
    ("steps", "settings", "words"),
    [
        (1.5, {}, "dataset has 3 prompts.*prompts_per_step=2"),
        (3, {"minibatches": 2, "save_steps": 2}, "steps=3: a multiple of minibatches=2"),
        (4, {"minibatches": 2}, "save_steps=1: a multiple of minibatches=2"),
    ],
)
def test_numbers_that_do_not_divide_are_refused(steps, settings, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        tiny_trainer(K1_REWARD, tmp_path / "unused", steps=steps, **settings)
    assert not (tmp_path / "unused").exists()


# Runs


def train(folder, eval_every=1, steps=3, learning_rate=1e-3, kill=None, **settings):
    """Start a run in `folder`, or go on with it; `kill` names the moment of a SIGKILL."""
    torch.set_num_threads(1)
    reference, tokenizer = load_policy()
    run = Run(folder)
    own = TrainedTest(tokenizer, reference, problems("sum", "test", 1), n_samples=1, seed=0)
    exam = Exam("sum", own, {task: problems(task, "test", 1) for task in ("add", "sort")})
    recorder = Recorder(run, exam, eval_every)
    trainer = tiny_trainer(
        K1_REWARD, f"{folder}/checkpoint", steps, [recorder], learning_rate, **settings
    )
    if kill:
        plant(kill, trainer, recorder)
    fit(trainer, recorder, resume_point(run, f"{folder}/checkpoint"))
    return recorder, run.metrics()


def plant(kill, trainer, recorder):
    """Let the process kill itself at a moment of step 2, or when that is over."""
    owner, method = {
        "in the test": (recorder.exam.own, "forward_kl"),
        "weights saved, optimizer not": (trainer, "_save_optimizer_and_scheduler"),
        "saved, not marked": (trainer.callback_handler, "on_save"),
        "in the next step": (trainer.callback_handler, "on_step_begin"),
    }[kill]
    original = getattr(owner, method)

    def deadly(*args, **kwargs):
        if trainer.state.global_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, method, deadly)


def in_process(**kwargs):
    """Run `train` in a process of its own; its exit code."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kl_comedy.study.training", "kl_comedy.study.recorder"])
    process = context.Process(target=train, kwargs=kwargs)
    process.start()
    process.join(120)
    assert process.exitcode is not None, "the run hangs"
    return process.exitcode


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The metrics of a run that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole")
    assert in_process(folder=folder) == 0
    return Run(folder).metrics()


KILLS = ["in the test", "weights saved, optimizer not", "saved, not marked", "in the next step"]


@pytest.mark.parametrize("kill", KILLS)
def test_a_killed_run_ends_with_the_same_bits(kill, whole, tmp_path):
    assert in_process(folder=tmp_path, kill=kill) == -signal.SIGKILL
    left = [path.parent.name for path in tmp_path.glob(f"checkpoint/*/{COMPLETE}")]
    assert ("checkpoint-2" in left) == (kill == "in the next step")
    assert in_process(folder=tmp_path) == 0
    same = [column for column in whole if column != "step_time"]
    pd.testing.assert_frame_equal(Run(tmp_path).metrics()[same], whole[same], check_exact=True)


def test_every_metric_is_recorded_at_every_step(whole):
    assert whole.step.tolist() == [0, 1, 2, 3]
    trained = [
        "loss",
        "reward",
        "grad_norm",
        "learning_rate",
        "train_entropy",
        "train_k1",
        "train_k2",
        "train_k3",
        "train_kl",
        "train_forward",
        "kl_share",
        "extreme_tokens",
        "ratio_clipped",
        "length",
        "truncated",
        "step_time",
    ]
    tested = [
        "pass_sum",
        "pass_add",
        "pass_sort",
        "pass_out",
        "kl",
        "kl_forward",
        "kl_k1",
        "entropy",
        "test_length",
    ]
    assert set(whole) == {"step", *trained, *tested}
    assert whole[tested].notna().all(axis=None)
    assert whole.loc[1:, trained].notna().all(axis=None) and whole.loc[0, trained].isna().all()
    assert abs(whole.kl[0]) < 1e-6 < whole.kl[3]


def test_testing_the_policy_does_not_disturb_its_training(whole, tmp_path):
    recorder, rare = train(tmp_path, eval_every=100)
    assert recorder.failure is None
    assert rare.kl.notna().tolist() == [True, False, False, True]
    trained = ["loss", "reward", "grad_norm", "train_entropy", "train_k1", "length", "truncated"]
    pd.testing.assert_frame_equal(rare.loc[1:, trained], whole.loc[1:, trained], check_exact=True)


def test_minibatches_are_recorded_step_by_step(tmp_path):
    """Rewards belong to the batch: the steps after its first have none."""
    recorder, metrics = train(tmp_path, eval_every=100, steps=4, minibatches=2, save_steps=2)
    assert recorder.failure is None and metrics.step.tolist() == [0, 1, 2, 3, 4]
    assert metrics.reward.notna().tolist() == [False, True, False, True, False]
    assert metrics.loss[1:].notna().all() and metrics.train_k1[1:].notna().all()


def test_a_policy_that_is_no_longer_finite_ends_the_run(tmp_path):
    recorder, metrics = train(tmp_path, eval_every=100, learning_rate=1e38)
    step, cause = recorder.failure
    assert metrics.step.iloc[-1] == step < 3 and "not finite" in cause
    assert not (tmp_path / f"checkpoint/checkpoint-{step}").exists()


# The task that is measured is the one that was trained


@pytest.fixture(scope="module")
def reverse(tmp_path_factory):
    """The folder of a run of two steps on another task than the study's."""
    folder = tmp_path_factory.mktemp("reverse")
    notebook = Path(__file__).parents[1] / "nbs/experiments/20_on_policy.ipynb"
    papermill.execute_notebook(
        notebook,
        folder / "run.ipynb",
        {"run_dir": str(folder), "task": "reverse", "base_samples": 2, "learning_rate": 1e-3},
        progress_bar=False,
        cwd=notebook.parent,
    )
    return folder


def test_the_tests_of_a_run_are_those_of_its_task(reverse):
    metrics = Run(reverse).metrics()
    reference, tokenizer = load_policy()
    expected = evaluate(reference, tokenizer, problems("reverse", "test", 4), 1, 0, reference)
    start = metrics.iloc[0]
    assert start.pass_reverse == expected["pass_at_1"]
    assert start.entropy == pytest.approx(expected["entropy"], rel=1e-4)
    assert start.test_length == expected["length"]
    others = [f"pass_{name}" for name in MIXTURE if name != "reverse"]
    assert metrics.pass_out.tolist() == pytest.approx(metrics[others].mean(axis=1).tolist())
    assert "pass_risk" not in metrics, "the tasks at risk are those of sum"


def test_the_summary_of_a_run_is_that_of_its_task(reverse):
    metrics, status = Run(reverse).metrics().set_index("step"), read_status(reverse)
    assert status["state"] == "done" and status["final_pass_reverse"] == metrics.pass_reverse[2]
    assert "final_pass_sum" not in status and status["final_kl"] == metrics.kl[2]
    base = pd.read_csv(reverse / "base_pass_rates.csv")
    assert set(base.prompt) == {p.prompt for p in problems("reverse", "test", 4)}
    printed = re.findall(r"step (\d) of 2: pass@1 ([.\d]+)", (reverse / "run.ipynb").read_text())
    assert printed == [(str(step), f"{metrics.pass_reverse[step]:.3f}") for step in (1, 2)]


def test_an_exam_names_the_trained_task():
    reference, tokenizer = load_policy()
    tests = {task: problems(task, "test", 2) for task in ("sum", "reverse", "wrap")}
    own = TrainedTest(tokenizer, reference, tests.pop("reverse"), n_samples=1, seed=0)
    exams = [Exam("reverse", own, dict(order)) for order in (tests.items(), [*tests.items()][::-1])]
    first, second = (exam(reference) for exam in exams)
    assert first == second and "pass_in" not in first
    assert first["pass_out"] == fmean([first["pass_sum"], first["pass_wrap"]])
    with pytest.raises(ValueError, match="others has 'sum', the trained task"):
        Exam("sum", own, tests)
    with pytest.raises(ValueError, match="trained='sort', and the problems of `own` are of 'rev"):
        Exam("sort", own, tests)


# The yardstick


@pytest.mark.parametrize("beta", [0.05, 0.3, 1.0, 20.0])
def test_the_optimum_is_that_of_brute_force(beta):
    rng = np.random.default_rng(0)
    reference = rng.dirichlet(np.ones(5))  # five answers, two of them right
    right = np.array([1, 0, 0, 1, 0])
    best, kl = kl_optimum(right @ reference, beta)
    objective = best - beta * kl

    optimum = reference * np.exp(right / beta) / (reference @ np.exp(right / beta))
    assert best == pytest.approx(right @ optimum)
    assert kl == pytest.approx(optimum @ np.log(optimum / reference), abs=1e-12)
    for policy in rng.dirichlet(np.ones(5), size=2000):
        assert right @ policy - beta * policy @ np.log(policy / reference) <= objective


def test_the_optimum_at_the_ends():
    best, kl = kl_optimum([0.0, 0.3, 1.0], 1e-3)
    assert best == pytest.approx([0, 1, 1]) and kl == pytest.approx([0, -np.log(0.3), 0])


@pytest.mark.parametrize("beta", [0, -1, np.inf, np.nan])
def test_the_optimum_needs_a_penalty(beta):
    with pytest.raises(ValueError, match="beta="):
        kl_optimum(0.3, beta)
