"""What the trainers say, refuse, warn of and log; each guard with its fault planted."""

import doctest
import warnings

import micro
import pytest
import torch
from datasets import Dataset
from micro import BETA, DRAWN, STOCK
from trl import GRPOConfig, RLOOConfig

from kl_comedy.theory.config import KLConfig
from kl_comedy.trainers import monitor, rloo_grpo
from kl_comedy.trainers.capture import plain_pass
from kl_comedy.trainers.monitor import K1_BATCHES, K1_BOUND, LogProbNotFinite
from kl_comedy.trainers.objective import objective
from kl_comedy.trainers.rloo_grpo import KLRLOOTrainer
from kl_comedy.trainers.settings import dropout_of

pytestmark = pytest.mark.usefixtures("exact")

# Words


@pytest.mark.parametrize(
    ("kl", "name"),
    [
        (KLConfig("k1", "reward"), "sequence reverse KL"),
        (KLConfig("k3", "both"), "sequence reverse KL"),
        (KLConfig("k1", "loss"), "zero"),
        (KLConfig("k3", "loss"), "token forward KL"),
        (KLConfig("k2", "loss"), "token reverse KL"),
        (STOCK["corrected"], "token reverse KL"),
        (KLConfig("k3", "reward"), "sequence reverse KL - token forward KL"),
    ],
    ids=str,
)
def test_the_objective_has_a_name(kl, name):
    assert objective(kl) == name


def test_the_objective_is_printed_at_the_start(tmp_path, capsys):
    built = micro.trainer("rloo", KLConfig("k1", "reward", 0.05), tmp_path)
    assert built.objective() == (
        "sequence reverse KL: K1 in reward, beta 0.05, before the leave-one-out baseline, "
        "summed over the tokens of a response"
    )


@pytest.mark.parametrize(
    ("kl", "words"),
    [
        (KLConfig("k1", "loss"), "expected gradient is zero"),
        (KLConfig("k3", "reward"), "may collapse"),
        (KLConfig("k2", "reward"), "none of the four divergences"),
    ],
    ids=str,
)
def test_a_penalty_that_is_none_is_warned_of(kl, words, tmp_path):
    with pytest.warns(UserWarning, match=words):
        micro.trainer("rloo", kl, tmp_path)


# Guards, each with the fault planted


@pytest.mark.parametrize(
    ("kind", "setting", "words"),
    [
        ("rloo", {"beta": 0.3}, "args.beta=0.3"),
        ("grpo", {"use_bias_correction_kl": False}, "args.use_bias_correction_kl=False"),
        ("grpo", {"multi_objective_aggregation": "normalize_then_sum"}, "normalize_then_sum"),
    ],
)
def test_a_setting_that_cannot_act_is_refused(kind, setting, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        micro.trainer(kind, KLConfig("k1", "reward", 0.1), tmp_path, **setting)


def test_a_cut_sampler_is_warned_of(tmp_path):
    with pytest.warns(UserWarning, match="args.top_k=5.*not samples of the policy"):
        micro.trainer("rloo", KLConfig(), tmp_path, top_k=5)


@pytest.mark.parametrize(
    ("kind", "kl", "settings", "words"),
    [
        ("grpo", KLConfig(), {"scale_rewards": "group"}, "beta cancels"),
        ("rloo", KLConfig(), {"normalize_advantages": True}, "beta cancels"),
        ("rloo", KLConfig(), {"mask_truncated_completions": True}, "not samples"),
        ("grpo", KLConfig("k3", "loss"), {"scale_rewards": "group"}, None),
        ("rloo", KLConfig(), {}, None),
    ],
    ids=str,
)
def test_what_changes_the_objective_is_warned_of(kind, kl, settings, words, tmp_path):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        built = micro.trainer(kind, kl, tmp_path, **settings)
    said = " ".join(str(w.message) for w in seen if w.category is UserWarning)
    assert (words in said) if words else not said
    assert ("another objective" in built.objective()) == ("beta cancels" in said)


def test_a_config_is_needed(tmp_path):
    with pytest.raises(ValueError, match="kl='k1': a KLConfig is needed; without a KL, KLConfig"):
        micro.trainer("rloo", "k1", tmp_path)


@pytest.mark.parametrize("kind", ["rloo", "grpo"])
def test_a_policy_that_is_not_its_reference_at_the_start_is_refused(kind, tmp_path):
    built = micro.trainer(kind, KLConfig(), tmp_path)
    built.kl_parts.monitor.check_start = True
    batch = micro.answer(built, DRAWN[:2])
    with pytest.raises(ValueError, match="before the first step policy and reference differ"):
        built.compute_loss(built.model, batch)


def test_a_batch_without_tokens_does_not_spend_the_guard(tmp_path):
    built = micro.trainer("rloo", KLConfig(), tmp_path)
    built.kl_parts.monitor.check_start = True
    empty = micro.answer(built, DRAWN[:2])
    empty["completion_mask"] = torch.zeros_like(empty["completion_mask"])
    built.compute_loss(built.model, empty)
    with pytest.raises(ValueError, match="before the first step"):
        built.compute_loss(built.model, micro.answer(built, DRAWN[:2]))


def test_one_that_is_passes(tmp_path):
    built = micro.trainer("rloo", KLConfig(), tmp_path, policy_seed=0)
    built.kl_parts.monitor.check_start = True
    built.compute_loss(built.model, micro.answer(built, DRAWN[:2]))
    assert not built.kl_parts.monitor.check_start


@pytest.mark.parametrize("estimator", ["k1", "exact"])
def test_active_dropout_is_seen(estimator, tmp_path):
    built = micro.trainer("rloo", KLConfig(estimator, "loss"), tmp_path, policy_seed=0)
    built.kl_parts.monitor.check_start = True
    for layer in built.model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with pytest.raises(ValueError, match="dropout is active"):
        built.compute_loss(built.model, micro.answer(built, [(1, 2, 1), (2, 2, 1)]))


def test_dropout_is_found_in_modules_and_in_attention(tmp_path):
    """TRL's own switch turns off the first and not the second."""
    model = micro.trainer("rloo", KLConfig(), tmp_path).model
    assert dropout_of(model) is None
    model.model.layers[0].self_attn.attention_dropout = 0.05
    assert dropout_of(model) == "load the model with attention_dropout=0.0"
    model.extra = torch.nn.Dropout(0.1)
    model.model.layers[0].self_attn.attention_dropout = 0.0
    assert dropout_of(model) == "set disable_dropout=True"


@pytest.mark.parametrize(
    ("kl", "warned"),
    [
        (KLConfig(), True),
        (KLConfig(importance="sequence"), False),
        (KLConfig(placement="none"), False),
    ],
)
def test_several_steps_on_a_batch_are_warned_of_where_nothing_corrects_them(kl, warned, tmp_path):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        micro.trainer("rloo", kl, tmp_path, num_iterations=2)
    assert any("several steps are made on a batch" in str(w.message) for w in seen) == warned


@pytest.mark.parametrize(
    ("loss_type", "warned"),
    [("grpo", True), ("sapo", True), ("luspo", False), ("dr_grpo", False), ("dapo", False)],
)
def test_a_mean_over_the_tokens_of_a_response_is_warned_of(loss_type, warned, tmp_path):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        micro.trainer("grpo", KLConfig(), tmp_path, loss_type=loss_type)
    assert any("loss_type" in str(w.message) for w in seen) == warned


def test_what_changes_the_meaning_of_the_kl_is_printed(tmp_path):
    built = micro.trainer("rloo", KLConfig(), tmp_path, temperature=0.7, sync_ref_model=True)
    assert "of the policies at temperature 0.7" in built.objective()
    assert "to a reference that follows the policy (sync_ref_model)" in built.objective()


def test_the_other_trainers_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match="args: a RLOOConfig is needed, got a GRPOConfig"):
        KLRLOOTrainer("unused", args=GRPOConfig(str(tmp_path), bf16=False), kl=KLConfig())
    with pytest.raises(ValueError, match="kl=None: a KLConfig is needed"):
        KLRLOOTrainer("unused", args=RLOOConfig(str(tmp_path), bf16=False))


@pytest.mark.parametrize(("which", "name"), [("model", "logp"), ("ref_model", "ref_logp")])
def test_log_probs_that_are_not_finite_are_refused(which, name, tmp_path):
    built = micro.trainer("rloo", KLConfig(), tmp_path)
    with torch.no_grad():
        getattr(built, which).lm_head.weight.fill_(torch.nan)
    with pytest.raises(LogProbNotFinite, match=f"{name} is nan at sequence 0, token 0"):
        built.compute_loss(built.model, micro.answer(built, DRAWN[:2]))


def test_samples_of_another_policy_are_reported(tmp_path):
    """Always the response that the reference likes most against the policy."""
    built = micro.trainer("rloo", KLConfig(), tmp_path)
    logp, ref_logp = (micro.table(m).log_softmax(-1) for m in (built.model, built.ref_model))
    at = micro.PREFIXES.index
    worst = min(micro.RESPONSES, key=lambda r: sum(
        (logp - ref_logp)[at(r[:t]), r[t]].item() for t in range(len(r))))  # fmt: skip
    batch = micro.answer(built, [worst, worst])
    with pytest.warns(UserWarning, match="Likely they are not: top_k"):
        for _ in range(K1_BATCHES):
            built.compute_loss(built.model, batch)
    assert -sum(built.kl_parts.monitor.recent_k1) > K1_BOUND


@pytest.mark.parametrize("rare", [False, True])
def test_samples_of_the_policy_are_not(rare, tmp_path):
    """Nor if a token is so rare that hardly any window has it: K1 is then skewed."""
    built = micro.trainer("rloo", KLConfig(), tmp_path)
    if rare:
        with torch.no_grad():  # one token much rarer than in the reference
            built.model.lm_head.weight[1] = 3 * built.ref_model.lm_head.weight[1]
    p = micro.probabilities(built.model).detach()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for _ in range(3 * K1_BATCHES):
            drawn = [micro.RESPONSES[i] for i in torch.multinomial(p, 8, replacement=True)]
            built.compute_loss(built.model, micro.answer(built, drawn))


def test_minibatches_are_samples_of_an_earlier_policy_and_not_reported(tmp_path):
    built = micro.trainer("rloo", KLConfig(), tmp_path, num_iterations=2)
    built.kl_parts.monitor.recent_k1.append(-1e6)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        built.compute_loss(built.model, micro.answer(built, DRAWN[:2]))


def test_a_token_beyond_the_reach_of_exp_is_named(tmp_path):
    built = micro.trainer("rloo", KLConfig("k3", "loss"), tmp_path, dtype=torch.float32)
    with torch.no_grad():
        built.model.lm_head.weight[2] -= 200 * built.model.lm_head.weight[2].sign()
        built.model.model.norm.weight.fill_(5)
    batch = micro.answer(built, [(2, 2, 2), (1, 2, 2)])
    with pytest.warns(UserWarning, match="sequence [01], token [012], id [12]"):
        built.compute_loss(built.model, batch).backward()
    assert all(p.grad.isfinite().all() for p in built.model.parameters())
    assert built._metrics["train"]["kl/extreme_tokens"][0] > 0


# What it costs, and what is logged


@pytest.mark.parametrize("kl", [STOCK["none"], KLConfig("k3", "loss", 0)], ids=str)
def test_no_kl_costs_no_reference(kl, tmp_path):
    built = micro.trainer("rloo", kl, tmp_path)
    assert built.ref_model is None
    assert "ref_per_token_logps" not in micro.answer(built, DRAWN[:2])


@pytest.mark.parametrize("kind", ["rloo", "grpo"])
def test_on_policy_the_batch_takes_one_pass_of_the_policy(kind, tmp_path):
    """The loss's own: TRL's RLOO has another for the old log-probs. And one of the reference."""
    built, calls = micro.trainer(kind, KLConfig(), tmp_path), []
    built.model.register_forward_hook(lambda *_: calls.append("policy"))
    built.ref_model.register_forward_hook(lambda *_: calls.append("reference"))
    built.compute_loss(built.model, micro.answer(built, DRAWN[:2]))
    assert sorted(calls) == ["policy", "reference"]


def test_after_an_error_passes_are_those_of_trl_again(tmp_path):
    built = micro.trainer("rloo", KLConfig(), tmp_path)
    batch = micro.answer(built, DRAWN[:2])
    assert built.kl_parts.passes.through is plain_pass
    del batch["advantages"]
    with pytest.raises(KeyError, match="advantages"):
        built.compute_loss(built.model, batch)
    assert built.kl_parts.passes.through is plain_pass


@pytest.mark.parametrize("kind", ["rloo", "grpo"])
def test_two_names_of_a_trainer_are_ours(kind, tmp_path):
    """What TRL sets and what we add cannot meet: `kl` and `kl_parts`."""
    ours = micro.trainer(kind, KLConfig(), tmp_path / "a")
    stock = type(ours).__mro__[2]
    theirs = micro.trainer(kind, None, tmp_path / "b", trainer_class=stock)
    assert vars(ours).keys() - vars(theirs).keys() == {"kl", "kl_parts"}


@pytest.mark.parametrize("kind", ["rloo", "grpo"])
def test_every_measure_is_logged(kind, tmp_path):
    built = micro.trainer(kind, KLConfig("k3", "loss", BETA), tmp_path)
    batch = micro.answer(built, [(1, 2, 0), (1, 0)])
    built.compute_loss(built.model, batch)
    logged = {name: values[-1] for name, values in built._metrics["train"].items()}
    models = built.model, built.ref_model
    logp, ref_logp = (micro.table(m).log_softmax(-1).detach() for m in models)
    after = micro.PREFIXES.index
    steps = [(0, 1), (after((1,)), 2), (after((1, 2)), 0), (0, 1), (after((1,)), 0)]
    at, to = zip(*steps, strict=True)
    d = (ref_logp - logp)[at, to]
    p, q = logp[list(at)].exp(), ref_logp[list(at)].exp()
    expected = {
        "kl/k1": -d.sum() / 2,
        "kl/k2": (d**2 / 2).sum() / 2,
        "kl/k3": (d.exp() - 1 - d).sum() / 2,
        "kl/exact": (p * (p / q).log()).sum() / 2,
        "kl/forward": (q * (q / p).log()).sum() / 2,
        "kl": (-d).mean() if kind == "rloo" else (d.exp() - 1 - d).mean(),
        "kl/extreme_tokens": 0,
    }
    for name, value in expected.items():
        assert logged[name] == pytest.approx(float(value), rel=1e-9), name
    assert 0 < logged["kl/gradient_share"] < 1


@pytest.mark.parametrize("estimator", ["k3", "exact"])
def test_the_share_of_the_penalty_grows_with_beta(estimator, tmp_path):
    shares = []
    for beta in (0.01, 1.0):
        built = micro.trainer("rloo", KLConfig(estimator, "loss", beta), tmp_path / str(beta))
        built.compute_loss(built.model, micro.answer(built, [(1, 0), (0,)]))
        shares += built._metrics["train"]["kl/gradient_share"]
    assert 0 < shares[0] < shares[1] < 1


def run(folder, **settings):
    """The trainer of a user who gives a folder of a model and TRL's settings, and the settings."""
    micro.model(0, torch.float32).save_pretrained(folder / "model")
    micro.tokenizer().save_pretrained(folder / "model")
    prompts = Dataset.from_dict({"prompt": ["ab", "b"] * 8})
    args = RLOOConfig(
        str(folder / "out"), max_completion_length=3, num_generations=4,
        per_device_train_batch_size=8, bf16=False, report_to="none", learning_rate=1e-2,
        dataloader_pin_memory=False, **settings,
    )  # fmt: skip
    built = KLRLOOTrainer(
        model=str(folder / "model"), reward_funcs=micro.reward, args=args, train_dataset=prompts,
        eval_dataset=prompts, kl=KLConfig("k1", "reward"),
    )  # fmt: skip
    return built, args


def test_a_user_of_trl_changes_one_argument(tmp_path):
    """Any TRL trainer argument still works, and the trained policy moves."""
    built, args = run(tmp_path, max_steps=2, logging_steps=1)
    built.train()
    assert built.state.log_history[0]["kl/k1"] == pytest.approx(0, abs=1e-6)
    assert built.state.log_history[1]["kl/exact"] > 0
    assert args.beta == RLOOConfig(bf16=False).beta, "the user's settings stay as they were"


@pytest.fixture
def calls(monkeypatch):
    """How often each of these was called: what is checked, what is only logged."""
    counts = dict.fromkeys(["quick_numbers", "token_measures", "gradient_share"], 0)

    def counted(name):
        own = getattr(monitor, name)

        def call(*args):
            counts[name] += 1
            return own(*args)

        monkeypatch.setattr(monitor, name, call)

    for name in counts:
        counted(name)
    return counts


@pytest.mark.parametrize(
    ("settings", "logged"),
    [
        ({"logging_steps": 1}, 4),
        ({"logging_steps": 2}, 2),
        ({"logging_steps": 3, "logging_first_step": True}, 2),
        ({"logging_steps": 0.5}, 2),
        ({"logging_strategy": "no"}, 0),
        ({"logging_strategy": "epoch"}, 4),
    ],
    ids=str,
)
def test_what_is_only_logged_is_computed_only_where_it_is_logged(settings, logged, tmp_path, calls):
    built, _ = run(tmp_path, max_steps=4, **settings)
    built.train()
    assert calls == {"quick_numbers": 4, "token_measures": logged, "gradient_share": logged}
    lines = [line for line in built.state.log_history if "kl/k1" in line]
    assert len(lines) == (1 if settings.get("logging_strategy") == "epoch" else logged)


def test_at_every_evaluation_the_kl_is_measured(tmp_path, calls):
    built, _ = run(tmp_path, max_steps=1, logging_strategy="no")
    metrics = built.evaluate()
    assert calls["token_measures"] == calls["quick_numbers"] > 0 == calls["gradient_share"]
    lines = [line for line in built.state.log_history if "eval_kl/k1" in line]
    assert len(lines) == 1 and "eval_loss" in metrics


def test_what_is_logged_does_not_touch_what_is_trained(tmp_path):
    weights = []
    for steps in (1, 3):
        torch.manual_seed(0)
        built, _ = run(tmp_path / str(steps), max_steps=3, logging_steps=steps)
        built.train()
        weights.append(torch.cat([p.detach().flatten() for p in built.model.parameters()]))
    assert torch.equal(*weights)


def test_the_examples_in_the_docstrings_run():
    assert doctest.testmod(rloo_grpo).attempted >= 8
    assert doctest.testmod(rloo_grpo).failed == 0


def test_a_bound_is_part_of_the_objective_s_name():
    bounded = KLConfig("k3", "loss", clip=10)
    assert objective(bounded) == "token forward KL, where K3 is below its bound"
    assert objective(KLConfig("k3", "loss")) == "token forward KL"
