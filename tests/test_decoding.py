"""What is computed once must be what is computed for each: tokens, log-probs and gradients."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig

from kl_comedy.policies import decoding
from kl_comedy.policies.decoding import (
    add_tokens,
    draw_completions,
    equal_rows_once,
    fast_decoding,
    read_prompts,
)
from kl_comedy.policies.fused import can_decode_fast, fuse_model, next_logits
from kl_comedy.policies.policy import end_tokens, load_policy
from kl_comedy.policies.sampling import sampling
from kl_comedy.study import training
from kl_comedy.study.recorder import Recorder
from kl_comedy.study.recorder import train as fit
from kl_comedy.study.runs import Run
from kl_comedy.tasks.characters import TASKS
from kl_comedy.tasks.dataset import problems, reward, stream, to_dataset
from kl_comedy.theory.config import KLConfig


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
    for fast in (draw_completions, None):
        with sampling(model, tokenizer, seed, 1.0):
            found.append(model.generate(**encoded, custom_generate=fast))
    assert torch.equal(*found)


def test_a_prefix_goes_through_the_model_once(base, monkeypatch):
    """Each call gets as many prefixes as differ, and the tokens stay the same."""
    model, tokenizer = base
    asked = [problem.prompt for problem in problems("sum", "test", 4) for _ in range(25)]
    encoded, read = tokenizer(asked, return_tensors="pt"), []

    def counted(fused, cache, ids, *others):
        read.append(ids.shape)
        return next_logits(fused, cache, ids, *others)

    found = []
    monkeypatch.setattr(decoding, "next_logits", counted)
    for fast in (draw_completions, None):
        with sampling(model, tokenizer, 0, 1.0):
            found.append(model.generate(**encoded, custom_generate=fast))
    assert torch.equal(*found)
    start = encoded.input_ids.shape[1]
    ended = (found[0] == tokenizer.eos_token_id).cumsum(1) > 0
    assert read[0] == (4, start) and len(read) == found[0].shape[1] - start
    for at, shape in enumerate(read[1:], start + 1):
        assert shape == (len(found[0][~ended[:, at - 1], :at].unique(dim=0)), 1)


@pytest.mark.parametrize(
    "settings",
    [
        dict(temperature=0.5),
        dict(top_k=2),
        dict(top_p=0.5),
        dict(max_new_tokens=1),
        dict(min_new_tokens=39),
        dict(eos_token_id=[1, 5]),
    ],
)
def test_settings_act_as_in_transformers(base, settings):
    model, tokenizer = base
    encoded, found = prompts(tokenizer, ("sum", "sort"), 8), []
    config = GenerationConfig(
        **dict(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=40,
            eos_token_id=end_tokens(model, tokenizer),
            pad_token_id=tokenizer.pad_token_id,
        )
        | settings
    )
    for fast in (draw_completions, None):
        torch.manual_seed(0)
        found.append(model.generate(**encoded, generation_config=config, custom_generate=fast))
    assert torch.equal(*found)


def test_generate_is_put_back_whatever_happens(base):
    model, _ = base
    with pytest.raises(RuntimeError), fast_decoding(model):
        assert "generate" in model.__dict__
        raise RuntimeError
    assert "generate" not in model.__dict__


def test_nested_use_leaves_the_outer_one_and_what_was_there(base):
    model, _ = load_policy()
    model.generate = own = lambda **_: "own"
    with fast_decoding(model):
        outer = model.generate
        with fast_decoding(model):
            pass
        assert model.generate is outer is not own
    assert model.generate is own


@pytest.mark.parametrize(
    ("name", "value"), [("do_sample", False), ("num_beams", 2), ("return_dict_in_generate", True)]
)
def test_what_is_not_drawn_here_is_refused(base, name, value):
    """Greedy decoding and beams would silently be samples."""
    model, tokenizer = base
    encoded = prompts(tokenizer, ("sum",), 2)
    config = GenerationConfig(
        **dict(do_sample=True, max_new_tokens=3, eos_token_id=1, pad_token_id=0) | {name: value}
    )
    with pytest.raises(ValueError, match=f"{name}={value}: only"):
        model.generate(**encoded, generation_config=config, custom_generate=draw_completions)


def test_the_room_for_tokens_not_yet_drawn_is_not_copied(base):
    """Few responses are as long as allowed. Copying all the room made long limits slow."""
    gathered = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.index.Tensor:
                gathered.append(found.numel())
            return found

    model, tokenizer = base
    encoded = prompts(tokenizer, ("sum",), 2)
    with torch.no_grad():
        fused = fuse_model(model, 5000)
        _, prefixes = read_prompts(fused, encoded.input_ids, encoded.attention_mask)
        with Watch():
            rows, tokens = torch.tensor([0, 0, 1]), torch.tensor([2, 3, 4])
            _, longer = add_tokens(fused, prefixes, rows, tokens)
    assert 0 < max(gathered) < longer.cache.numel() / 100


def test_a_model_with_an_adapter_is_left_to_transformers():
    """Its own weights are not all of its weights: draws would be the base policy's."""
    model, tokenizer = load_policy()
    assert can_decode_fast(model)
    inject_adapter_in_model(
        LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False), model
    )
    assert not can_decode_fast(model)
    encoded, found = prompts(tokenizer, ("sum",), 8), []
    for path in ({}, {"custom_generate": None}):
        with sampling(model, tokenizer, 0, 1.0):
            found.append(model.generate(**encoded, **path))
    assert torch.equal(*found)


def scored(model, ids, attention, **others):
    "Logits of a batch and the gradients of a sum that weighs every one of them differently."
    model.zero_grad()
    logits = model(input_ids=ids, attention_mask=attention, **others).logits
    weights = torch.randn(logits.shape, generator=torch.manual_seed(0))
    (logits * weights).sum().backward()
    return logits.detach(), [weight.grad.clone() for weight in model.parameters()]


def test_equal_rows_go_through_the_model_once_and_get_what_they_would(base, monkeypatch):
    model, tokenizer = base
    encoded = prompts(tokenizer, ("sum", "sort", "add"), 3)
    again = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 3, 3, 0])
    ids, attention = encoded.input_ids[again], encoded.attention_mask[again]
    assert not attention.all()
    plain, seen, forward = scored(model, ids, attention), [], model.forward

    def counted(**inputs):
        seen.append(len(inputs["input_ids"]))
        return forward(**inputs)

    monkeypatch.setitem(model.__dict__, "forward", counted)
    with equal_rows_once(model):
        once = scored(model, ids, attention)
        model(input_ids=ids[:9], attention_mask=attention[:9])  # all of them differ
    assert seen == [9, 9] and model.forward is counted
    read = attention.bool()
    assert torch.allclose(once[0][read], plain[0][read], atol=1e-5)
    for ours, theirs in zip(once[1], plain[1], strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max())


def test_rows_that_differ_in_one_input_alone_are_not_equal(base):
    model, tokenizer = base
    ids = prompts(tokenizer, ("sum",), 1).input_ids.repeat(3, 1)
    attention, positions = torch.ones_like(ids), torch.arange(ids.shape[1]).repeat(3, 1)
    attention[1, :2] = 0
    positions[2, -1] += 5
    inputs = dict(input_ids=ids, attention_mask=attention, position_ids=positions)
    with torch.no_grad():
        plain = model(**inputs).logits[:, -1]
        with equal_rows_once(model):
            once = model(**inputs).logits[:, -1]
    assert torch.allclose(once, plain, atol=1e-5)
    assert len(plain.round(decimals=3).unique(dim=0)) == 3


def test_dropout_is_drawn_for_every_row():
    model, _ = load_policy()
    model.config.attention_dropout = 0.5
    forward = model.forward
    with equal_rows_once(model):
        assert model.forward == forward


def test_training_draws_with_it_and_learns_the_same(base, tmp_path, monkeypatch):
    """Two runs: as shipped, and with nothing but transformers. The same samples and losses."""
    calls, read = [], {"fast": [], "slow": []}

    def counted(*args, **kwargs):
        calls.append(1)
        return draw_completions(*args, **kwargs)

    @contextmanager
    def slow(model):
        yield

    monkeypatch.setattr(decoding, "draw_completions", counted)

    def no_exam(model, n_samples=None):
        return {"pass_sum": 0.0, "kl": 0.0}

    no_exam.trained = "sum"
    logged, drawn = [], []
    for name in ("fast", "slow"):
        if name == "slow":
            monkeypatch.setattr(training, "fast_decoding", slow)
            monkeypatch.setattr(training, "equal_rows_once", slow)
        model, tokenizer = load_policy()

        def count(_, __, found, name=name):
            if torch.is_grad_enabled():
                read[name].append(len(found[0]))

        model.model.register_forward_hook(count)
        run = Run(tmp_path / name, {})
        trainer = training.build_trainer(
            KLConfig("k1", "reward", 0.1),
            model,
            tokenizer,
            to_dataset(stream("sum", "train", 6, 0)),
            reward,
            tmp_path / name / "checkpoint",
            training.TrainSettings(
                seed=0,
                learning_rate=4.5e-4,
                warmup_steps=1,
                prompts_per_step=2,
                group_size=5,
                max_length=40,
                save_steps=3,
            ),
        )
        recorder = Recorder(run, no_exam, 1)
        trainer.add_callback(recorder)
        fit(trainer, recorder)
        names = ["reward", "train_k1", "grad_norm", "length"]
        logged.append(run.metrics().set_index("step").loc[1:, names])
        drawn.append(len(calls))
    assert drawn == [3, 3]
    assert read["slow"] == [10] * 3 and len(read["fast"]) == 3 and sum(read["fast"]) < 30
    assert np.allclose(*logged, rtol=1e-3, atol=1e-5)
    assert (logged[0].length == logged[1].length).all() and len(logged[0]) == 3
    assert (logged[0].grad_norm > 0).all() and (logged[0].reward > 0).any()


def test_mixed_precision_is_left_to_transformers(tmp_path):
    """The policy that is scored in bfloat16 is the one that must be drawn from."""
    for bf16 in (False, True):
        model, tokenizer = load_policy()
        trainer = training.build_trainer(
            KLConfig("k1", "reward", 0.1),
            model,
            tokenizer,
            to_dataset(stream("sum", "train", 2, 0)),
            reward,
            tmp_path / str(bf16),
            training.TrainSettings(
                seed=0,
                learning_rate=1e-4,
                warmup_steps=1,
                prompts_per_step=2,
                group_size=2,
                max_length=8,
                save_steps=1,
                bf16=bf16,
            ),
        )
        trainer.train()
        assert can_decode_fast(trainer.model) == can_decode_fast(trainer.ref_model) == (not bf16)
