"""The policy: transformers' own results, samples from the whole distribution, honest figures."""

import json
import math
import random
import re
import shutil
import socket
import tomllib
from pathlib import Path
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from kl_comedy.policies.evaluation import evaluate, pass_rates
from kl_comedy.policies.policy import (
    BASE_POLICIES,
    BASE_POLICY,
    MAX_NEW_TOKENS,
    load_policy,
    new_policy,
    save_policy,
    tokenizer,
)
from kl_comedy.policies.sampling import (
    complete,
    completion_logits,
    decode,
    sample_completions,
    sampling,
)
from kl_comedy.tasks.characters import TASKS, demonstration
from kl_comedy.tasks.dataset import is_correct, problems
from kl_comedy.tasks.problem import Problem

NAMES = list(TASKS)
ROOT = Path(__file__).parents[1]
SHIPPED = [path.name for path in BASE_POLICIES]


@pytest.fixture(scope="module")
def base():
    return load_policy()


@pytest.fixture
def folder(tmp_path):
    save_policy(new_policy(0), tokenizer(), tmp_path / "policy", "# Card\n")
    return tmp_path / "policy"


def mixed(n=2):
    return [problem for name in NAMES for problem in problems(name, "test", n)]


# Loading


@pytest.mark.parametrize("path", BASE_POLICIES, ids=SHIPPED)
def test_the_shipped_policies_are_small_standard_and_complete(path):
    files = {file.name: file.stat().st_size for file in path.iterdir()}
    assert set(files) == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) < 2e6
    assert json.loads((path / "config.json").read_text())["model_type"] == "qwen2"


def test_the_shipped_policies_are_two_of_different_seeds():
    assert BASE_POLICIES[0] == BASE_POLICY
    first, second = (load_policy(path)[0].lm_head.weight for path in BASE_POLICIES)
    assert first.shape == second.shape and (first - second).abs().max() > 0.1
    for seed, path in enumerate(BASE_POLICIES):
        assert f"random weights (seed {seed})" in (path / "README.md").read_text()


def test_a_wheel_carries_both_policies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    carried = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    for path in BASE_POLICIES:
        inside = path.relative_to(ROOT).as_posix()
        assert carried[inside] == f"kl_comedy/{inside}"


def test_loading_needs_no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    model, tok = load_policy()
    assert model.num_parameters() == 162_816 and len(tok) == 32
    assert model.dtype == torch.float32 and not model.training
    assert (tok.padding_side, tok.pad_token_id, tok.eos_token_id) == ("left", 0, 1)


def test_logits_are_those_of_transformers(base):
    theirs = AutoModelForCausalLM.from_pretrained(BASE_POLICY)
    ids = base[1]("M4,7,9,3,5:4+7=11,", return_tensors="pt")["input_ids"]
    assert torch.equal(base[0](ids).logits, theirs(ids).logits)


def test_a_path_may_be_text_or_a_path_or_start_at_home(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    for path in (folder, str(folder), "~/policy"):
        assert torch.equal(load_policy(path)[0].lm_head.weight, new_policy(0).lm_head.weight)


@pytest.mark.parametrize("load", [AutoTokenizer, PreTrainedTokenizerFast])
def test_every_demonstration_survives_the_saved_tokenizer(load):
    tok, rng = load.from_pretrained(BASE_POLICY), random.Random(0)
    for name in NAMES:
        for problem in problems(name, "train", 100):
            text = problem.prompt + demonstration(problem, rng)
            ids = tok(text)["input_ids"]
            assert len(ids) == len(text)
            assert tok.decode([*ids, tok.eos_token_id], skip_special_tokens=True) == text


def test_saving_replaces_a_policy_and_leaves_nothing_beside_it(folder):
    save_policy(new_policy(1), tokenizer(), folder, "# Another\n")
    assert [path.name for path in folder.parent.iterdir()] == ["policy"]
    assert (folder / "README.md").read_text() == "# Another\n"
    assert torch.equal(load_policy(folder)[0].lm_head.weight, new_policy(1).lm_head.weight)


def break_weights(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def break_shape(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(63)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def pickle_weights(folder):
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def drop_config(folder):
    (folder / "config.json").unlink()


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def add_symbol(folder):
    text = (folder / "tokenizer.json").read_text().replace('"M": 12', '"M": 12, "Q": 32')
    (folder / "tokenizer.json").write_text(text)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (shutil.rmtree, FileNotFoundError, "no policy at"),
        (empty, ValueError, "cannot be loaded: .*config.json"),
        (drop_config, ValueError, "cannot be loaded: .*config.json"),
        (pickle_weights, FileNotFoundError, "no policy at"),
        (break_weights, ValueError, "lacks weights: model.layers.1.mlp.up_proj.weight"),
        (break_shape, ValueError, "lacks weights: .*model.norm.weight.*63"),
        (add_symbol, ValueError, "has 33 symbols, the model 32"),
    ],
    ids=lambda case: getattr(case, "__name__", None),
)
def test_a_damaged_policy_is_refused_by_name(folder, damage, error, message):
    damage(folder)
    with pytest.raises(error, match=message) as refusal:
        load_policy(folder)
    assert "policy" in str(refusal.value)


def test_an_unknown_id_is_refused_by_name(monkeypatch):
    with pytest.raises(FileNotFoundError, match="no policy at 'nobody/nothing'.*hub"):
        load_policy("nobody/nothing")


def test_new_policies_follow_their_seed_and_nothing_else():
    torch.manual_seed(1)
    first = new_policy(3).state_dict()
    torch.manual_seed(2)
    second = new_policy(3).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], new_policy(4).lm_head.weight)


# Sampling


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
    assert len(drawn) == 16 and all(len(texts) == 3 for texts in drawn)
    assert (
        drawn
        == sample_completions(*base, mixed(), 3, seed=5)
        != sample_completions(*base, mixed(), 3, seed=6)
    )
    right = fmean(
        is_correct(p, text) for p, texts in zip(mixed(), drawn, strict=True) for text in texts
    )
    assert evaluate(*base, mixed(), 3, seed=5)["pass_at_1"] == pytest.approx(right)


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


# Evaluating


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


@pytest.mark.parametrize("temperature", [0, -1.0, math.inf, math.nan])
def test_bad_temperatures_are_refused(base, temperature):
    with pytest.raises(ValueError, match="temperature must be above 0 and finite"):
        sample_completions(*base, problems("sum", "test", 1), 1, seed=0, temperature=temperature)


# The model card


def card_rows(path):
    card = (path / "README.md").read_text()
    rows = re.findall(r"^\| \w \| (\w+) \| ([\d.]+) \| ([\d.]+) \|", card, re.MULTILINE)
    return {name: (float(rate), float(error)) for name, rate, error in rows}


@pytest.mark.parametrize("path", BASE_POLICIES, ids=SHIPPED)
@pytest.mark.parametrize("name", NAMES)
def test_the_card_says_what_the_policy_does(path, name):
    rate, error = card_rows(path)[name]
    result = evaluate(*load_policy(path), problems(name, "test", 60, seed=7), 4, seed=7)
    spread = math.hypot(error, result["pass_at_1_se"])
    assert abs(result["pass_at_1"] - rate) < 4 * spread and error < 0.03
    # Learned, noise and all, with room to gain. Countdown is hardly learned, and the card says so.
    least = 0.01 if name == "countdown" else 0.1
    assert least < rate < TASKS[name].demonstrated + 0.1
