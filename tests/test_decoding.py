"""The sampler of our own against that of transformers: the same tokens, also under TRL."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from kl_comedy import decoding, training
from kl_comedy.decoding import draw, fast_decoding
from kl_comedy.placement import KLConfig
from kl_comedy.policy import end_tokens, load_policy, sampling
from kl_comedy.runs import Run
from kl_comedy.tasks import TASKS, problems, reward, stream, to_dataset


@pytest.fixture(scope="module")
def base():
    return load_policy()


def prompts(tokenizer, names, each):
    asked = [problem.prompt for name in names for problem in problems(name, "test", each)]
    return tokenizer(asked, padding=True, return_tensors="pt")


@pytest.mark.parametrize("seed", range(5))
def test_the_same_tokens_from_prompts_of_all_tasks(base, seed):
    model, tokenizer = base
    encoded = prompts(tokenizer, TASKS, 6)
    found = []
    for fast in (draw, None):
        with sampling(model, tokenizer, seed, 1.0):
            found.append(model.generate(**encoded, custom_generate=fast))
    assert torch.equal(*found)


@pytest.mark.parametrize("settings", [dict(temperature=0.5), dict(top_k=2), dict(top_p=0.5),
                                      dict(max_new_tokens=1), dict(min_new_tokens=39),
                                      dict(eos_token_id=[1, 5])])
def test_settings_act_as_in_transformers(base, settings):
    model, tokenizer = base
    encoded, found = prompts(tokenizer, ("sum", "sort"), 8), []
    config = GenerationConfig(**dict(do_sample=True, temperature=1.0, top_k=0, max_new_tokens=40,
                                     eos_token_id=end_tokens(model, tokenizer),
                                     pad_token_id=tokenizer.pad_token_id) | settings)
    for fast in (draw, None):
        torch.manual_seed(0)
        found.append(model.generate(**encoded, generation_config=config, custom_generate=fast))
    assert torch.equal(*found)


def test_generate_is_put_back_whatever_happens(base):
    model, _ = base
    with pytest.raises(RuntimeError), fast_decoding(model):
        assert "generate" in model.__dict__
        raise RuntimeError
    assert "generate" not in model.__dict__


def test_training_draws_with_it_and_learns_the_same(base, tmp_path, monkeypatch):
    """Two runs: as shipped, and with the sampler of transformers. The same samples and losses."""
    calls = []

    def counted(*args, **kwargs):
        calls.append(1)
        return draw(*args, **kwargs)

    @contextmanager
    def slow(model):
        yield

    monkeypatch.setattr(decoding, "draw", counted)
    logged, drawn = [], []
    for name in ("fast", "slow"):
        if name == "slow":
            monkeypatch.setattr(training, "fast_decoding", slow)
        model, tokenizer = load_policy()
        run = Run(tmp_path / name, {})
        trainer = training.build_trainer(
            KLConfig("k1", "reward", 0.1), model, tokenizer,
            to_dataset(stream("sum", "train", 6, 0)), reward, tmp_path / name / "checkpoint",
            seed=0, learning_rate=4.5e-4, warmup_steps=1, prompts_per_step=2, group_size=5,
            max_length=40, save_steps=3)
        recorder = training.Recorder(run, lambda model, n=None: {"pass_sum": 0.0, "kl": 0.0}, 1)
        trainer.add_callback(recorder)
        training.train(trainer, recorder)
        names = ["reward", "train_k1", "grad_norm", "length"]
        logged.append(run.metrics().set_index("step").loc[1:, names])
        drawn.append(len(calls))
    assert drawn == [3, 3]
    assert np.allclose(*logged, rtol=1e-3, atol=1e-5)
    assert (logged[0].length == logged[1].length).all() and len(logged[0]) == 3
