"""Runs of training that differ in the KL alone, and survive a kill."""

import multiprocessing
import os
import signal

import numpy as np
import pandas as pd
import pytest
import torch

from kl_comedy.lab.optimum import kl_optimum
from kl_comedy.policies.policy import load_policy
from kl_comedy.study.runs import Run
from kl_comedy.study.training import COMPLETE, Exam, Recorder, build_trainer, resume_point
from kl_comedy.study.training import train as fit
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
    return build_trainer(
        config,
        model,
        tokenizer,
        dataset,
        mean_digit,
        output_dir,
        seed=0,
        learning_rate=learning_rate,
        warmup_steps=0,
        prompts_per_step=2,
        group_size=GROUP,
        max_length=12,
        callbacks=callbacks,
        **{"save_steps": 1} | settings,
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
    tests = {task: problems(task, "test", 1) for task in ("sum", "add", "sort")}
    run = Run(folder)
    exam = Exam(tokenizer, reference, tests, n_samples=1, seed=0)
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
        "in the test": (recorder, "measure"),
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
    context.set_forkserver_preload(["kl_comedy.study.training", "kl_comedy.study.runs"])
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
