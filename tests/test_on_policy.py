"""TRL's stock trainers on equal terms: the KL they really have, and runs that survive a kill."""

import itertools
import multiprocessing
import os
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from kl_comedy import trainer as module
from kl_comedy.optimum import kl_optimum
from kl_comedy.placement import CHOICES, KLConfig, kl_surrogate
from kl_comedy.policy import load_policy
from kl_comedy.runs import Run
from kl_comedy.sweeps import load_sweep, plan
from kl_comedy.tasks import problems, to_dataset
from kl_comedy.trainer import (
    COMPLETE,
    Recorder,
    build_trainer,
    resume_point,
    snapshot,
    stock_trainer,
)

ROOT = Path(__file__).parents[1]
STOCK = {
    "none": KLConfig(placement="none", beta=0),
    "k1_reward": KLConfig("k1", "reward", 1.0),
    "k3_loss": KLConfig("k3", "loss", 1.0),
    "corrected": KLConfig("k3", "both", 1.0, credit="token", importance="token"),
}
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


def tiny_trainer(config, output_dir, steps=1, callbacks=(), learning_rate=1e-3):
    model, tokenizer = load_policy()
    dataset = to_dataset(problems("sum", "train", int(2 * steps)))
    return build_trainer(
        config, model, tokenizer, dataset, mean_digit, output_dir, seed=0,
        learning_rate=learning_rate, warmup_steps=0, prompts_per_step=2, group_size=GROUP,
        max_length=12, save_steps=1, callbacks=callbacks,
    )


# The KL that TRL's loss really has


def gradients(config, output_dir):
    """Of TRL's loss on one batch, and of the same objective written down by hand."""
    trainer = tiny_trainer(config, output_dir)
    torch.manual_seed(1)
    with torch.no_grad():  # away from the reference, where every KL would be 0
        for parameter in trainer.model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    trainer.compute_loss(trainer.model, batch).backward()
    found = take_gradient(trainer.model)

    mask = batch["completion_mask"].bool()
    logp = token_logp(trainer.model, batch)
    ref_logp = token_logp(load_policy()[0], batch).detach()
    returns = torch.tensor(list(trainer._logs["rewards"]["mean_digit"]))
    penalty = torch.zeros(())
    if config.placement == "reward":
        returns = returns - config.beta * ((logp - ref_logp) * mask).sum(-1).detach()
    else:
        penalty = config.beta * kl_surrogate(logp, ref_logp, mask, config, logp.detach())
    groups = returns.view(-1, GROUP)
    others = (groups.sum(1, keepdim=True) - groups) / (GROUP - 1)
    advantage = (groups - others).flatten()
    assert advantage.abs().max() > 0.01, "without a reward signal nothing is tested"
    (penalty - (advantage * (logp * mask).sum(-1)).mean()).backward()
    return found, take_gradient(trainer.model)


def token_logp(model, batch):
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    logits = model(ids, attention_mask=attention).logits[:, :-1]
    logp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return logp[:, -batch["completion_ids"].shape[1] :]


def take_gradient(model):
    vector = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return vector


@pytest.mark.parametrize("name", STOCK)
def test_the_loss_of_trl_has_the_gradient_of_the_configuration(name, tmp_path):
    found, expected = gradients(STOCK[name], tmp_path)
    assert (found - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("none", {"beta": 1.0}),
        ("k1_reward", {"beta": 0.0}),
        ("k1_reward", {"beta": 0.9}),
        ("k1_reward", {"normalize_advantages": True}),
        ("k3_loss", {"use_bias_correction_kl": True}),
        ("corrected", {"use_bias_correction_kl": False}),
    ],
    ids=str,
)
def test_a_wrong_flag_of_the_kl_is_seen(name, fault, tmp_path, monkeypatch):
    def faulty(config):
        trainer_class, config_class, settings = stock_trainer(config)
        return trainer_class, config_class, settings | fault

    monkeypatch.setattr(module, "stock_trainer", faulty)
    found, expected = gradients(STOCK[name], tmp_path)
    assert (found - expected).norm() > 1e-2 * expected.norm()


@pytest.mark.parametrize(
    "fault", [{"loss_type": "dapo"}, {"loss_type": "dr_grpo"}, {"scale_rewards": "group"}], ids=str
)
def test_a_wrong_scale_is_seen(fault, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SEQUENCE_SUM", module.SEQUENCE_SUM | fault)
    found, expected = gradients(STOCK["k3_loss"], tmp_path)
    assert (found - expected).norm() > 1e-2 * expected.norm()


def every_config():
    for values in itertools.product(*CHOICES.values()):
        try:
            yield KLConfig(**dict(zip(CHOICES, values, strict=True)), beta=1.0)
        except ValueError:  # a combination that means nothing
            continue


def test_every_other_configuration_is_refused():
    kept = []
    for config in every_config():
        try:
            stock_trainer(config)
            kept.append(config)
        except ValueError as error:
            assert str(config) in str(error) and "stock trainers have no KL" in str(error)
    kept = {str(config) for config in kept if config.active}
    assert kept == {"k1-reward-b1", "k3-loss-b1", "k3-both-token-wtoken-b1"}


@pytest.mark.parametrize("config", [STOCK["none"], KLConfig("k3", "loss", 0)], ids=str)
def test_no_kl_costs_no_reference(config, tmp_path):
    assert tiny_trainer(config, tmp_path).ref_model is None


def test_a_broken_number_of_steps_is_refused(tmp_path):
    with pytest.raises(ValueError, match="dataset has 3 prompts.*prompts_per_step=2"):
        tiny_trainer(STOCK["none"], tmp_path / "unused", steps=1.5)
    assert not (tmp_path / "unused").exists()


# Runs


def train(folder, eval_every=1, steps=3, learning_rate=1e-3, kill=None):
    """Start a run in `folder`, or go on with it; `kill` names the moment of a SIGKILL."""
    torch.set_num_threads(1)
    reference, tokenizer = load_policy()
    tests = {task: problems(task, "test", 1) for task in ("sum", "add", "sort")}
    run = Run(folder)
    measure = partial(snapshot, tokenizer=tokenizer, reference=reference, tests=tests,
                      n_samples=1, seed=0)
    recorder = Recorder(run, measure, eval_every)
    trainer = tiny_trainer(STOCK["k1_reward"], f"{folder}/checkpoint", steps, [recorder],
                           learning_rate)
    if kill:
        plant(kill, trainer, recorder)
    trainer.train(resume_from_checkpoint=resume_point(run, f"{folder}/checkpoint"))
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
    context.set_forkserver_preload(["kl_comedy.trainer", "kl_comedy.runs"])
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
    trained = ["loss", "reward", "grad_norm", "learning_rate", "train_entropy", "trl_kl", "length",
               "truncated", "step_time"]
    tested = ["pass_sum", "pass_add", "pass_sort", "pass_out", "kl", "kl_k1", "entropy",
              "test_length"]
    assert set(whole) == {"step", *trained, *tested}
    assert whole[tested].notna().all(axis=None)
    assert whole.loc[1:, trained].notna().all(axis=None) and whole.loc[0, trained].isna().all()
    assert abs(whole.kl[0]) < 1e-6 < whole.kl[3]


def test_testing_the_policy_does_not_disturb_its_training(whole, tmp_path):
    recorder, rare = train(tmp_path, eval_every=100)
    assert recorder.failure is None
    assert rare.kl.notna().tolist() == [True, False, False, True]
    trained = ["loss", "reward", "grad_norm", "train_entropy", "trl_kl", "length", "truncated"]
    pd.testing.assert_frame_equal(rare.loc[1:, trained], whole.loc[1:, trained], check_exact=True)


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


# The sweep


@pytest.mark.parametrize("scale", ["smoke", "quick", "cpu"])
def test_the_sweep_has_the_four_stock_configurations(scale):
    runs = plan(load_sweep(ROOT / "data/sweeps/on_policy.yaml", ROOT), scale)
    names = ["estimator", "placement", "beta", "credit", "importance"]
    configs = [KLConfig(**{name: run[name] for name in names}) for run in runs.values()]
    for config in configs:
        stock_trainer(config)
    assert {config.label for config in configs} == {config.label for config in STOCK.values()}
