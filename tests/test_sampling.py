"""Completions are drawn from the whole distribution of the policy, whatever is padded."""

import math
from statistics import fmean

import pytest
import torch

from kl_comedy.policies.evaluation import evaluate
from kl_comedy.policies.policy import MAX_NEW_TOKENS, load_policy
from kl_comedy.policies.sampling import (
    complete,
    completion_logits,
    decode,
    sample_completions,
    sampling,
)
from kl_comedy.tasks.characters import TASKS
from kl_comedy.tasks.dataset import is_correct, problems

NAMES = list(TASKS)


@pytest.fixture(scope="module")
def base():
    return load_policy()


def mixed(n=2):
    return [problem for name in NAMES for problem in problems(name, "test", n)]


def test_padding_does_not_change_the_logits_of_a_completion(base):
    model, tok = base
    asked = [problem.prompt for problem in mixed()]
    with sampling(model, tok, 0, 1.0):
        ids, attention, completion = next(complete(model, tok, asked))
        together = completion_logits(model, ids, attention, completion)
        together = together.split(completion.sum(1).tolist())
    for row, prompt in enumerate(asked):
        alone = ids[row][attention[row]][None]
        assert tok.decode(alone[0]).startswith(prompt)
        with torch.no_grad():
            logits = model(alone).logits[0]
        drawn = len(together[row])
        torch.testing.assert_close(together[row], logits[-drawn - 1 : -1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 5, 256])
def test_equal_prompts_and_answers_keep_their_places(base, size):
    """Equal neighbours are encoded once, and equal rows decoded once."""
    model, tok = base
    one, other, third = (mixed()[i].prompt for i in (0, 3, 8))
    asked, drawn, found = [one, one, other, one, third, third, *[one] * 10], [], []
    with sampling(model, tok, 0, 1.0):
        for ids, attention, completion in complete(model, tok, asked, size):
            drawn += [
                (ids[i][attention[i] & ~completion[i]], ids[i][completion[i]])
                for i in range(len(ids))
            ]
            found += decode(tok, ids, completion)
    assert [tok.decode(prompt) for prompt, _ in drawn] == asked
    assert found == [tok.decode(text, skip_special_tokens=True) for _, text in drawn]
    assert len(set(found[6:])) < 10 and len(set(found)) > 3 and tok.eos_token not in "".join(found)


def test_what_stands_in_the_padding_changes_nothing(base):
    model, tok = base
    with sampling(model, tok, 0, 1.0):
        ids, attention, completion = next(complete(model, tok, [p.prompt for p in mixed()]))
        before = completion_logits(model, ids, attention, completion)
        after = completion_logits(model, ids.masked_fill(~attention, 17), attention, completion)
    assert not attention.all()
    torch.testing.assert_close(before, after, atol=1e-6, rtol=1e-6)


def test_a_completion_ends_with_its_first_end_of_sequence(base):
    model, tok = base
    with sampling(model, tok, 0, 1.0):
        ids, attention, completion = next(complete(model, tok, [p.prompt for p in mixed(8)]))
    for row, read, drawn in zip(ids, attention, completion, strict=True):
        tokens = row[drawn].tolist()
        assert tok.eos_token_id not in tokens[:-1] and tok.pad_token_id not in tokens
        assert tokens[-1] == tok.eos_token_id or len(tokens) == MAX_NEW_TOKENS
        assert read[drawn].all() and row[read & ~drawn][-1] == tok(":")["input_ids"][0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_from_the_whole_distribution(base, temperature):
    model, tok = base
    with torch.no_grad():
        logits = model(**tok("S52803917:", return_tensors="pt")).logits[0, -1]
    expected = torch.softmax(logits / temperature, -1)
    with sampling(model, tok, 0, temperature):
        model.generation_config.max_new_tokens = 1
        ids = torch.cat([ids[:, -1] for ids, *_ in complete(model, tok, ["S52803917:"] * 4096)])
    observed = torch.bincount(ids, minlength=32)
    rare = expected * 4096 < 5
    counts = torch.cat([observed[~rare], observed[rare].sum()[None]]).double()
    means = torch.cat([expected[~rare], expected[rare].sum()[None]]).double() * 4096
    chi = ((counts - means) ** 2 / means.clamp(min=1e-9)).sum().item()
    freedom = len(counts) - 1
    assert chi < freedom + 5 * math.sqrt(2 * freedom)


def test_defaults_of_the_checkpoint_that_cut_the_distribution_have_no_effect(base):
    model, tok = load_policy()
    for name, value in {
        "top_k": 1,
        "top_p": 0.1,
        "repetition_penalty": 5.0,
        "min_p": 0.9,
        "suppress_tokens": [3, 4],
        "max_new_tokens": 2,
        "do_sample": False,
    }.items():
        setattr(model.generation_config, name, value)
    assert sample_completions(model, tok, mixed(), 2, seed=0) == sample_completions(
        *base, mixed(), 2, seed=0
    )
    assert model.generation_config.top_k == 1


def test_samples_follow_the_seed_and_come_problem_by_problem(base):
    drawn = sample_completions(*base, mixed(), 3, seed=5)
    assert len(drawn) == 2 * len(NAMES) and all(len(texts) == 3 for texts in drawn)
    assert (
        drawn
        == sample_completions(*base, mixed(), 3, seed=5)
        != sample_completions(*base, mixed(), 3, seed=6)
    )
    right = fmean(
        is_correct(p, text) for p, texts in zip(mixed(), drawn, strict=True) for text in texts
    )
    assert evaluate(*base, mixed(), 3, seed=5)["pass_at_1"] == pytest.approx(right)


@pytest.mark.parametrize("temperature", [0, -1.0, math.inf, math.nan])
def test_bad_temperatures_are_refused(base, temperature):
    with pytest.raises(ValueError, match="temperature must be above 0 and finite"):
        sample_completions(*base, problems("sum", "test", 1), 1, seed=0, temperature=temperature)
