"""Evaluations: pass rates, KL and entropy against plain formulas."""

import math
import random
from statistics import fmean

import pytest
import torch

from kl_comedy.policies.evaluation import evaluate, pass_rates
from kl_comedy.policies.policy import MAX_NEW_TOKENS, load_policy, new_policy, tokenizer
from kl_comedy.policies.sampling import complete, sample_completions, sampling
from kl_comedy.tasks.characters import TASKS
from kl_comedy.tasks.dataset import is_correct, problems
from kl_comedy.tasks.problem import Problem

NAMES = list(TASKS)


@pytest.fixture(scope="module")
def base():
    return load_policy()


def mixed(n=2):
    return [problem for name in NAMES for problem in problems(name, "test", n)]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("breaks", [True, False])
def test_evaluation_leaves_no_trace(base, training, breaks, monkeypatch):
    model, tok = base
    model.train(training)
    kept = model.generation_config
    before = torch.get_rng_state(), random.getstate()
    if breaks:
        with pytest.raises(ValueError, match="reads as"):
            evaluate(model, tok, [*mixed(), Problem("sum", "M4?:", "4")], 1, seed=0)
    else:
        evaluate(model, tok, mixed(), 1, seed=0, ref_model=model)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert model.training is training and model.generation_config is kept
    assert all(weight.grad is None for weight in model.parameters())
    model.eval()


def test_figures_do_not_depend_on_the_global_random_state(base):
    torch.manual_seed(1)
    first = evaluate(*base, mixed(), 2, seed=0)
    torch.manual_seed(2)
    assert evaluate(*base, mixed(), 2, seed=0) == first


def test_kl_and_entropy_are_those_of_plain_formulas_on_every_completion_alone(base):
    model, tok = base
    ref = new_policy(1)
    asked = mixed(3)
    result = evaluate(model, tok, asked, 2, seed=1, ref_model=ref)
    kl, log_ratio, entropy, tokens = 0, 0, 0, 0
    for problem, texts in zip(asked, sample_completions(model, tok, asked, 2, seed=1), strict=True):
        for text in texts:
            ids = tok(problem.prompt + text, return_tensors="pt")["input_ids"]
            end = torch.tensor([[tok.eos_token_id]][: len(text) < MAX_NEW_TOKENS])
            ids = torch.cat([ids, end.view(1, -1).long()], 1)
            first = len(problem.prompt)
            with torch.no_grad():
                logp, ref_logp = (
                    m(ids).logits[0, first - 1 : -1].double().log_softmax(-1) for m in (model, ref)
                )
            drawn = ids[0, first:, None]
            kl += (logp.exp() * (logp - ref_logp)).sum().item()
            log_ratio += (logp - ref_logp).gather(1, drawn).sum().item()
            entropy -= (logp.exp() * logp).sum().item()
            tokens += len(drawn)
    n = 2 * len(asked)
    assert result["kl"] == pytest.approx(kl / n, rel=1e-4)
    assert result["kl_k1"] == pytest.approx(log_ratio / n, rel=1e-4)
    assert result["entropy"] == pytest.approx(entropy / tokens, rel=1e-4)
    assert result["length"] == pytest.approx(tokens / n)


def test_no_kl_without_a_reference_and_zero_to_itself(base):
    assert "kl" not in evaluate(*base, mixed(1), 1, seed=0)
    result = evaluate(*base, mixed(1), 1, seed=0, ref_model=base[0])
    assert (result["kl"], result["kl_k1"]) == (0, 0)


def test_pass_rates_and_their_standard_error(base):
    result = evaluate(*base, problems("sort", "test", 20), 4, seed=0)
    rates = torch.tensor(result["pass_rates"], dtype=torch.float64)
    assert len(rates) == result["n_problems"] == 20 and result["n_samples"] == 4
    assert set(rates.tolist()) <= {0, 0.25, 0.5, 0.75, 1}
    assert result["pass_at_1"] == pytest.approx(rates.mean().item())
    assert result["pass_at_1_se"] == pytest.approx(rates.std().item() / math.sqrt(20))
    assert math.isnan(evaluate(*base, problems("sort", "test", 1), 2, seed=0)["pass_at_1_se"])


def test_pass_rates_alone_are_those_of_an_evaluation(base):
    asked = mixed()
    rates = pass_rates(*base, asked, 3, seed=2)
    assert rates == evaluate(*base, asked, 3, seed=2)["pass_rates"] and len(set(rates)) > 2
    assert rates == [
        fmean(is_correct(problem, text) for text in texts)
        for problem, texts in zip(asked, sample_completions(*base, asked, 3, seed=2), strict=True)
    ]


def test_completions_that_were_cut_off_are_counted_and_wrong():
    untrained, asked = (new_policy(0), tokenizer()), problems("sum", "test", 50)
    result = evaluate(*untrained, asked, 2, seed=0)
    with sampling(*untrained, 0, 1.0):
        ids, _, completion = next(complete(*untrained, [p.prompt for p in asked for _ in "12"]))
    ends = [(row[drawn] == 1).any() for row, drawn in zip(ids, completion, strict=True)]
    assert 0 < result["truncated"] == 1 - fmean(map(float, ends))
    assert result["pass_at_1"] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"problems": []}, "problems is empty"),
        ({"n_samples": 0}, "n_samples must be 1 or more, got 0"),
        ({"n_samples": 1.5}, "n_samples must be 1 or more, got 1.5"),
        ({"problems": [Problem("sum", "What is 4 + 7?", "11")]}, "'What is 4 \\+ 7\\?' reads as"),
        ({"problems": [Problem("sum", "M4,７:", "11")]}, "reads as"),
    ],
)
@pytest.mark.parametrize("function", [sample_completions, evaluate])
def test_bad_requests_are_refused(base, function, change, message):
    request = {"problems": problems("sum", "test", 1), "n_samples": 1, "seed": 0} | change
    with pytest.raises(ValueError, match=message):
        function(*base, **request)
