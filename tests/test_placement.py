"""Configurations of the penalty, and the surrogate that gives their gradients."""

import dataclasses
import hashlib
import itertools
import json
import math
from pathlib import Path

import pandas as pd
import pytest
import torch

from kl_comedy.lab.gradients import divergence, exact_gradient, expected_gradient
from kl_comedy.lab.policies import PrefixTreePolicy, enumerate_sequences
from kl_comedy.theory.config import CHOICES, KLConfig
from kl_comedy.theory.estimators import ESTIMATORS, exact_kl
from kl_comedy.theory.surrogate import (
    credited,
    exact_estimates,
    importance_weight,
    kl_surrogate,
    kl_terms,
    token_estimates,
)


def allowed(*values):
    "The configuration of these values, or None if it is refused."
    try:
        return KLConfig(**dict(zip(CHOICES, values, strict=True)))
    except ValueError:
        return None


ALL = [c for c in itertools.starmap(allowed, itertools.product(*CHOICES.values())) if c]
PENALTIES = [c for c in ALL if c.placement != "none"]
SAMPLED = [c for c in PENALTIES if c.estimator != "exact"]
KNOWN = ("k1", "k2", "k3", "exact")  # whose gradients and names are written down below
FORWARD = [dataclasses.replace(c, direction="forward") for c in PENALTIES]
CLIPPED = [dataclasses.replace(c, clip=0.4) for c in PENALTIES + FORWARD if c.estimator == "k3"]
EXTENDED = FORWARD + CLIPPED
RUNS = Path(__file__).resolve().parent.parent / "data" / "runs"


def batch(b=5, t=7, dtype=torch.float64, seed=0):
    "logp, ref_logp, behaviour_logp and token_kl of a batch, and a ragged mask."
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, b, t, generator=generator, dtype=torch.float64)
    logp, ref_logp, behaviour_logp = (-x[:3].abs()).to(dtype)
    lengths = torch.randint(0, t + 1, (b, 1), generator=generator)
    lengths[0] = t
    tensors = {
        "logp": logp.requires_grad_(),
        "ref_logp": ref_logp,
        "behaviour_logp": behaviour_logp,
        "token_kl": x[3].abs().to(dtype).requires_grad_(),
    }
    return tensors | {"mask": torch.arange(t) < lengths}


def grad_logp(value, tensors):
    return torch.autograd.grad(value, tensors["logp"], materialize_grads=True)[0]


# ---- KLConfig


@pytest.mark.parametrize(
    "field, value",
    [
        ("estimator", "k4"),
        ("estimator", "K1"),
        ("estimator", None),
        ("estimator", 1),
        ("placement", "penalty"),
        ("placement", True),
        ("placement", ["reward"]),
        ("credit", "future"),
        ("credit", ""),
        ("importance", "seq"),
        ("importance", 1.0),
    ],
)
def test_a_choice_that_is_not_allowed_is_named(field, value):
    with pytest.raises(ValueError) as caught:
        KLConfig(**{field: value})
    words = str(caught.value)
    assert words.startswith(f"{field}={value!r}: allowed are ")
    assert all(choice in words for choice in CHOICES[field])


@pytest.mark.parametrize(
    "beta", [-0.1, -1e-300, math.nan, math.inf, -math.inf, "0.1", None, True, [0.1], 10**400, 1j]
)
def test_a_beta_that_is_not_allowed_is_named(beta):
    with pytest.raises(ValueError) as caught:
        KLConfig(beta=beta)
    assert str(caught.value) == f"beta={beta!r}: a finite number of at least 0 is allowed"


@pytest.mark.parametrize("placement", ["none", "loss"])
@pytest.mark.parametrize("credit", ["to_go", "token"])
@pytest.mark.parametrize("estimator", CHOICES["estimator"])
def test_a_credit_that_cannot_act_is_refused(placement, credit, estimator):
    with pytest.raises(ValueError) as caught:
        KLConfig(estimator, placement, credit=credit)
    for part in (f"credit={credit!r}", f"placement={placement!r}", "'sequence'"):
        assert part in str(caught.value)


@pytest.mark.parametrize("importance", ["token", "sequence"])
def test_a_weight_of_no_term_is_refused(importance):
    with pytest.raises(ValueError) as caught:
        KLConfig(placement="none", importance=importance)
    for part in (f"importance={importance!r}", "placement='none'", "no term to weigh"):
        assert part in str(caught.value)


def test_everything_else_is_allowed():
    "Estimators x (no penalty + loss x 3 weights + 2 placements x 3 credits x 3 weights)."
    assert len(ALL) == len(CHOICES["estimator"]) * (1 + 3 + 2 * 3 * 3)
    assert len([c for c in ALL if c.estimator in KNOWN]) == 4 * (1 + 3 + 2 * 3 * 3)


def test_names_labels_and_dicts_are_unique_and_come_back():
    betas = [0, 1e-8, 0.05, 0.050000001, 0.1, 1 / 3, 0.333333, 1, 1e6, 1234567, 1e300]
    every = PENALTIES + EXTENDED
    every += [dataclasses.replace(c, clip=clip) for c in CLIPPED for clip in (10, 1 / 3)]
    configs = [dataclasses.replace(c, beta=b) for c in every for b in betas]
    assert len({str(c) for c in configs}) == len(set(configs)) == len(every) * len(betas)
    assert len({c.label for c in every}) == len(every)
    for c in configs:
        assert KLConfig(**c.to_dict()) == c
        assert KLConfig(**json.loads(json.dumps(c.to_dict()))) == c
        assert hash(KLConfig(**c.to_dict())) == hash(c)
        assert c.label == dataclasses.replace(c, beta=0.7).label
        assert str(c).replace("-", "").replace("_", "").replace(".", "").replace("+", "").isalnum()


def test_no_penalty_has_one_name():
    for c in set(ALL) - set(PENALTIES):
        assert (str(c), c.label, c.active) == ("none", "no KL", False)


@pytest.mark.parametrize(
    "config, name, label",
    [
        (KLConfig(), "k1-reward-b0.05", "K1 in reward"),
        (KLConfig("k3", "loss", 1), "k3-loss-b1", "K3 in loss"),
        (KLConfig("k2", "both", 0.1), "k2-both-b0.1", "K2 in both"),
        (KLConfig("exact", "loss"), "exact-loss-b0.05", "exact KL in loss"),
        (KLConfig(credit="to_go"), "k1-reward-to_go-b0.05", "K1 in reward, to-go credit"),
        (
            KLConfig("k3", "loss", importance="sequence"),
            "k3-loss-wsequence-b0.05",
            "K3 in loss, sequence ratio",
        ),
        (
            KLConfig("k3", "both", 0.1, "token", "token"),
            "k3-both-token-wtoken-b0.1",
            "K3 in both, token credit, token ratio",
        ),
    ],
)
def test_the_agreed_names(config, name, label):
    assert (str(config), config.label) == (name, label)


@pytest.mark.parametrize(
    "config, name, label",
    [
        (KLConfig("k3", "loss", clip=10), "k3-loss-clip10-b0.05", "K3 in loss, clipped at 10"),
        (
            KLConfig("k1", "both", 0.1, "to_go", "token", direction="forward"),
            "k1-both-to_go-wtoken-forward-b0.1",
            "forward K1 in both, to-go credit, token ratio",
        ),
        (
            KLConfig("exact", "loss", direction="forward"),
            "exact-loss-forward-b0.05",
            "forward exact KL in loss",
        ),
        (
            KLConfig("k3", direction="forward", clip=0.25),
            "k3-reward-forward-clip0.25-b0.05",
            "forward K3 in reward, clipped at 0.25",
        ),
    ],
)
def test_a_field_is_named_only_when_it_is_set(config, name, label):
    assert (str(config), config.label) == (name, label)
    plain = dataclasses.replace(config, clip=None, direction="reverse")
    assert "clip" not in str(plain) + plain.label and "forward" not in str(plain) + plain.label


def test_the_names_of_what_was_recorded_have_not_changed():
    "Byte for byte those of the 88 configurations that there were before any field was added."
    lines = [f"{c}\t{c.label}" for c in ALL if c.estimator in KNOWN]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    assert digest == "91067197c420a37f67403846c6010412e78a81b128e629fc7485c22b787a2ced"


@pytest.mark.parametrize("study", ["on_policy", "variants"])
def test_recorded_runs_have_the_label_of_their_configuration(study):
    names = ["estimator", "placement", "credit", "importance", "beta"]
    runs = pd.read_csv(RUNS / study / "runs.csv")
    assert len(runs) > 20
    for run in runs.to_dict("records"):
        assert KLConfig(**{name: run[name] for name in names}).label == run["label"]


@pytest.mark.parametrize("clip", [0, -1, math.nan, math.inf, "10", True, [10], 10**400, 1e39, 1j])
def test_a_clip_that_is_not_allowed_is_named(clip):
    with pytest.raises(ValueError) as caught:
        KLConfig("k3", clip=clip)
    assert str(caught.value) == (
        f"clip={clip!r}: None or a positive finite number of nats, at most 3e+38, is allowed"
    )


@pytest.mark.parametrize("estimator", [name for name in CHOICES["estimator"] if name != "k3"])
def test_only_k3_is_clipped(estimator):
    with pytest.raises(ValueError) as caught:
        KLConfig(estimator, clip=10)
    for part in ("clip=10", f"estimator={estimator!r}", "leave it at None"):
        assert part in str(caught.value)


@pytest.mark.parametrize("direction", ["back", "", None, 1, ["forward"]])
def test_a_direction_that_is_not_allowed_is_named(direction):
    with pytest.raises(ValueError) as caught:
        KLConfig(direction=direction)
    assert str(caught.value) == f"direction={direction!r}: allowed are reverse, forward"


@pytest.mark.parametrize(
    "setting, words", [({"clip": 10}, "bound"), ({"direction": "forward"}, "turn round")]
)
def test_without_a_penalty_there_is_nothing_to_set(setting, words):
    with pytest.raises(ValueError) as caught:
        KLConfig("k3", "none", **setting)
    assert f"placement='none' has no estimate to {words}" in str(caught.value)


def test_it_is_frozen_and_active_only_with_a_penalty():
    config = KLConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.beta = 1.0
    assert config.active and not KLConfig(beta=0).active
    assert type(KLConfig(beta=1).beta) is float
    assert str(KLConfig(beta=-0.0)) == str(KLConfig(beta=0))


# ---- parts


def test_credited_by_hand():
    x = torch.tensor([[1.0, 2, 4], [0, -1, 3]])
    assert credited(x, "token").tolist() == x.tolist()
    assert credited(x, "to_go").tolist() == [[7, 6, 4], [2, 2, 3]]
    assert credited(x, "sequence").tolist() == [[7, 7, 7], [2, 2, 2]]


def test_importance_weight_by_hand():
    logp = torch.tensor([[-1.0, -2, 0]], requires_grad=True)
    behaviour_logp = torch.tensor([[-2.0, -1.5, 0]], requires_grad=True)
    for importance, exponent in (("token", [1, -0.5, 0]), ("sequence", [0.5] * 3)):
        w = importance_weight(logp, behaviour_logp, importance)
        torch.testing.assert_close(w, torch.tensor([exponent]).exp())
        assert not w.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_importance_weight_is_finite(dtype):
    size = torch.tensor([0, 1, 50, 100, 1e3, 1e30, torch.finfo(dtype).max], dtype=dtype)
    logp, behaviour_logp = torch.meshgrid(
        torch.cat([size, -size]), torch.cat([size, -size]), indexing="ij"
    )
    for importance in ("token", "sequence"):
        assert importance_weight(logp, behaviour_logp, importance).isfinite().all()


def test_another_credit_or_weight_is_refused():
    with pytest.raises(ValueError, match="credit='togo'"):
        credited(torch.zeros(1, 2), "togo")
    for importance in ("seq", "none"):
        with pytest.raises(ValueError, match=f"importance='{importance}'"):
            importance_weight(torch.zeros(1, 2), torch.zeros(1, 2), importance)


@pytest.mark.parametrize("importance", ["token", "sequence"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_weighted_penalty_is_finite(estimator, importance):
    logp = torch.tensor([[-50.0] + [-0.1] * 600], requires_grad=True)
    config = KLConfig(estimator, "both", importance=importance)
    value = kl_surrogate(
        logp,
        torch.zeros(1, 601),
        torch.ones(1, 601, dtype=torch.bool),
        config,
        logp.detach() - torch.tensor([[50.0] + [0.1] * 600]),
    )
    value.backward()
    assert value.isfinite() and logp.grad.isfinite().all()


@pytest.mark.parametrize("config", SAMPLED[:1] + FORWARD[:1] + CLIPPED[:1], ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_the_estimates_of_sampled_tokens(config, shape):
    generator = torch.Generator().manual_seed(0)
    logp, ref_logp = -torch.randn(2, *shape, generator=generator, dtype=torch.float64).abs()
    d, found = ref_logp - logp, token_estimates(config, logp, ref_logp)
    want = {
        "k1-reward-b0.05": -d,
        "k1-reward-forward-b0.05": d.exp() * d,
        "k3-reward-clip0.4-b0.05": (d.exp() - 1 - d).clamp(max=0.4),
    }[str(config)]
    torch.testing.assert_close(found, want)


def test_the_exact_estimates_of_each_direction():
    generator = torch.Generator().manual_seed(0)
    logits, ref_logits = torch.randn(2, 4, 5, generator=generator, dtype=torch.float64)
    for direction, pair in (("reverse", (logits, ref_logits)), ("forward", (ref_logits, logits))):
        config = KLConfig("exact", direction=direction)
        assert torch.equal(exact_estimates(config, logits, ref_logits), exact_kl(*pair))


def test_sampled_and_exact_estimates_are_not_taken_for_each_other():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="estimator='exact' has no estimate of a sampled token"):
        token_estimates(KLConfig("exact"), x, x)
    with pytest.raises(ValueError, match="estimator='k1' is sampled"):
        exact_estimates(KLConfig("k1"), x, x)


# ---- kl_surrogate


@pytest.mark.parametrize("config", PENALTIES + EXTENDED, ids=str)
def test_masked_positions_contribute_nothing(config):
    clean = batch()
    mask = clean["mask"]
    value = kl_surrogate(config=config, **clean)
    grad = grad_logp(value, clean)
    assert value.isfinite() and (grad[~mask] == 0).all()
    for padding in (math.nan, math.inf, -math.inf, 1e30, -1e30):
        dirty = {
            name: x.detach().masked_fill(~mask, padding).requires_grad_()
            for name, x in clean.items()
            if name != "mask"
        } | {"mask": mask}
        again = kl_surrogate(config=config, **dirty)
        assert torch.equal(again, value) and torch.equal(grad_logp(again, dirty), grad)


@pytest.mark.parametrize("config", PENALTIES + EXTENDED, ids=str)
def test_masking_equals_leaving_out(config):
    "The mean over sequences of what each gives alone, without its padding."
    x = batch()
    total = kl_surrogate(config=config, **x)
    alone = []
    for i, length in enumerate(x["mask"].sum(1).tolist()):
        part = {name: t[i : i + 1, :length] for name, t in x.items()}
        alone.append(kl_surrogate(config=config, **part))
    torch.testing.assert_close(total, torch.stack(alone).mean(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        grad_logp(total, x), grad_logp(torch.stack(alone).mean(), x), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("config", PENALTIES + EXTENDED, ids=str)
def test_an_all_masked_batch_is_zero(config):
    x = batch()
    x["mask"] = torch.zeros_like(x["mask"])
    value = kl_surrogate(config=config, **x)
    assert value == 0 and grad_logp(value, x).abs().max() == 0


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_value_in_the_loss_is_the_mean_of_sequence_sums(estimator):
    x = batch()
    k = ESTIMATORS[estimator](x["logp"], x["ref_logp"])
    want = (k * x["mask"]).sum(1).mean()
    torch.testing.assert_close(kl_surrogate(config=KLConfig(estimator, "loss"), **x), want)


@pytest.mark.parametrize(
    "config", SAMPLED + [c for c in EXTENDED if c.estimator != "exact"], ids=str
)
def test_the_gradient_by_hand(config):
    "Weight times (credited estimate + slope of the estimate in the loss), over the batch size."
    x = batch()
    grad = grad_logp(kl_surrogate(config=config, **x), x)
    logp, ref_logp, mu = (x[n].detach() for n in ("logp", "ref_logp", "behaviour_logp"))
    want = torch.zeros_like(logp)
    for i, t in x["mask"].nonzero().tolist():
        inside = x["mask"][i]
        leaf = logp[i].clone().requires_grad_()
        k = ESTIMATORS[config.estimator](leaf, ref_logp[i])
        if config.direction == "forward":
            ratio = (ref_logp[i] - leaf).exp()
            k = ratio * ESTIMATORS[config.estimator](ref_logp[i], leaf)
        if config.clip is not None:
            k = torch.where(k > config.clip, config.clip, k)
        if config.placement in ("reward", "both"):
            who = {
                "sequence": inside,
                "token": torch.arange(7) == t,
                "to_go": inside & (torch.arange(7) >= t),
            }[config.credit]
            want[i, t] += k[who].sum().item()
        if config.placement in ("loss", "both"):
            want[i, t] += torch.autograd.grad(k.sum(), leaf)[0][t]
        gap = logp[i] - mu[i]
        want[i, t] *= {"none": 1, "token": gap[t].exp(), "sequence": gap[inside].sum().exp()}[
            config.importance
        ]
    torch.testing.assert_close(grad, want / len(logp), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("config", PENALTIES + EXTENDED, ids=str)
def test_only_the_policy_gets_a_gradient(config):
    x = batch()
    for name in ("ref_logp", "behaviour_logp"):
        x[name].requires_grad_()
    kl_surrogate(config=config, **x).backward()
    assert x["ref_logp"].grad is None and x["behaviour_logp"].grad is None
    reaches_kl = config.estimator == "exact" and config.placement != "reward"
    assert (x["token_kl"].grad is not None) == reaches_kl
    if (config.estimator, config.placement) != ("exact", "loss"):
        assert x["logp"].grad.abs().max() > 0


@pytest.mark.parametrize("config", [c for c in PENALTIES if c.importance != "none"], ids=str)
def test_weights_of_the_policy_itself_change_nothing(config):
    x = batch()
    x["behaviour_logp"] = x["logp"].detach().clone()
    plain = dataclasses.replace(config, importance="none")
    grads = [grad_logp(kl_surrogate(config=c, **x), x) for c in (config, plain)]
    torch.testing.assert_close(*grads, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("importance", CHOICES["importance"])
def test_k2_in_the_loss_is_k1_with_token_credit(importance):
    "Per sample, not on average: one sequence at a time."
    for seed in range(5):
        x = batch(b=1, seed=seed)
        grads = [
            grad_logp(kl_surrogate(config=c, **x), x)
            for c in (
                KLConfig("k2", "loss", importance=importance),
                KLConfig("k1", "reward", credit="token", importance=importance),
            )
        ]
        torch.testing.assert_close(*grads, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_differentiable_ratio_is_both_with_token_credit_and_weight(estimator):
    x = batch()
    ratio = (x["logp"] - x["behaviour_logp"]).exp()
    k = ESTIMATORS[estimator](x["logp"], x["ref_logp"])
    want = grad_logp((ratio * k * x["mask"]).sum(1).mean(), x)
    config = KLConfig(estimator, "both", credit="token", importance="token")
    torch.testing.assert_close(
        grad_logp(kl_surrogate(config=config, **x), x), want, rtol=1e-11, atol=1e-12
    )


def test_the_ratio_turns_k3_into_k1_with_token_credit():
    x = batch()
    grads = [
        grad_logp(kl_surrogate(config=c, **x), x)
        for c in (
            KLConfig("k3", "both", credit="token", importance="token"),
            KLConfig("k1", "reward", credit="token", importance="token"),
        )
    ]
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("config", PENALTIES + EXTENDED, ids=str)
def test_half_precision_is_summed_in_float32(config):
    for dtype, rough in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)):
        x = batch(dtype=dtype)
        exactly = {
            name: t if name == "mask" else t.detach().double().requires_grad_()
            for name, t in x.items()
        }
        value, truth = (kl_surrogate(config=config, **t) for t in (x, exactly))
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), truth, rtol=1e-5, atol=1e-5)
        grad, want = grad_logp(value, x), grad_logp(truth, exactly)
        assert grad.dtype == dtype
        torch.testing.assert_close(grad.double(), want, rtol=rough, atol=rough)


@pytest.mark.parametrize(
    "config", [c for c in PENALTIES + EXTENDED if c.importance != "sequence"], ids=str
)
def test_gradients_are_finite_at_extreme_log_ratios(config):
    logp = torch.tensor([[-1e4, -200.0, -100, -30, -1e-30, -0.0]], requires_grad=True)
    ref_logp = logp.detach().flip(1)
    x = {
        "logp": logp,
        "ref_logp": ref_logp,
        "behaviour_logp": logp.detach() - 1e-3,
        "token_kl": torch.ones(1, 6, requires_grad=True),
        "mask": torch.ones(1, 6).bool(),
    }
    value = kl_surrogate(config=config, **x)
    assert value.isfinite() and grad_logp(value, x).isfinite().all()


# ---- against the exact gradients


def tree(seed, v=3, horizon=4):
    rows = sum(v**t for t in range(horizon))
    generator = torch.Generator().manual_seed(seed)
    return PrefixTreePolicy(torch.randn(rows, v, generator=generator, dtype=torch.float64), horizon)


def surrogate_gradient(policy, ref, config, behaviour=None):
    "Expected gradient of `kl_surrogate`: one call, every sequence weighed with its probability."
    states, tokens = enumerate_sequences(policy)
    theta = policy.parameters.clone().requires_grad_()
    sampled = (behaviour or policy).logp()[states, tokens]
    logp = policy.logp(theta)[states, tokens]
    pair = policy.logp(theta), ref.logp()
    kl = exact_kl(*(pair if config.direction == "reverse" else pair[::-1]))[states]
    leaves = [x.detach().requires_grad_() for x in (logp, kl)]
    value = kl_surrogate(
        leaves[0],
        ref.logp()[states, tokens],
        torch.ones_like(states).bool(),
        config,
        sampled,
        leaves[1],
    )
    outer = torch.autograd.grad(value * len(states), leaves, materialize_grads=True)
    p = sampled.sum(1, keepdim=True).exp()
    return torch.autograd.grad([logp, kl], theta, [p * g for g in outer])[0]


@pytest.mark.parametrize("config", PENALTIES + EXTENDED, ids=str)
@pytest.mark.parametrize("off_policy", [False, True])
def test_the_expected_gradient_is_that_of_the_lab(config, off_policy):
    policy, ref, mu = (tree(s) for s in range(3))
    behaviour = mu if off_policy else None
    torch.testing.assert_close(
        surrogate_gradient(policy, ref, config, behaviour),
        expected_gradient(policy, ref, config, behaviour),
        rtol=1e-10,
        atol=1e-11,
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_relative_biases_of_the_paper(seed):
    policy, ref = tree(10 + seed), tree(20 + seed)
    true = exact_gradient(policy, ref)

    def bias(*choice, **more):
        g = surrogate_gradient(policy, ref, KLConfig(*choice, **more))
        return ((g - true).norm() / true.norm()).item()

    for unbiased in (("k1", "reward"), ("k1", "both"), ("k3", "both"), ("exact", "both")):
        for credit in ("sequence", "to_go"):
            assert bias(*unbiased, credit=credit) < 1e-10
    assert abs(bias("k1", "loss") - 1) < 1e-10
    for biased in (
        ("k2", "reward"),
        ("k2", "loss"),
        ("k2", "both"),
        ("k3", "reward"),
        ("k3", "loss"),
        ("exact", "reward"),
        ("exact", "loss"),
    ):
        assert bias(*biased) > 0.1
    for estimator, place in itertools.product(KNOWN, ("reward", "both")):
        assert bias(estimator, place, credit="token") > 0.1


@pytest.mark.parametrize(
    "choice, target",
    [
        (("k1", "reward"), "sequence_reverse_kl"),
        (("k3", "both"), "sequence_reverse_kl"),
        (("exact", "both"), "sequence_reverse_kl"),
        (("k2", "loss"), "token_reverse_kl"),
        (("exact", "loss"), "token_reverse_kl"),
        (("k3", "loss"), "token_forward_kl"),
        (("k1", "reward", 0.05, "token"), "token_reverse_kl"),
        (("k3", "both", 0.05, "token"), "token_reverse_kl"),
        (("k1", "both", 0.05, "token", "none", None, "forward"), "token_forward_kl"),
        (("k3", "both", 0.05, "token", "none", None, "forward"), "token_forward_kl"),
        (("exact", "loss", 0.05, "sequence", "none", None, "forward"), "token_forward_kl"),
    ],
    ids=str,
)
def test_which_objective_a_configuration_follows(choice, target):
    policy, ref = tree(3), tree(4)
    torch.testing.assert_close(
        surrogate_gradient(policy, ref, KLConfig(*choice)),
        exact_gradient(policy, ref, target),
        rtol=1e-10,
        atol=1e-12,
    )


def test_the_forward_estimates_in_both_places_are_one_gradient():
    "That of the expected sum of forward KLs at the states that the policy visits."
    policy, ref = tree(3), tree(4)
    theta = policy.parameters.clone().requires_grad_()
    states, tokens = enumerate_sequences(policy)
    log_p = policy.logp(theta)[states, tokens].sum(1)
    kl = exact_kl(ref.logp(), policy.logp(theta))[states].sum(1)
    (want,) = torch.autograd.grad((log_p.exp() * kl).sum(), theta)
    for estimator, credit in itertools.product(("k1", "k3", "exact"), ("sequence", "to_go")):
        config = KLConfig(estimator, "both", credit=credit, direction="forward")
        found = surrogate_gradient(policy, ref, config)
        torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-12)


def test_forward_k3_in_both_places_is_reverse_k3_in_the_loss_sample_by_sample():
    x = batch()
    forward = KLConfig("k3", "both", credit="token", direction="forward")
    grads = [grad_logp(kl_surrogate(config=c, **x), x) for c in (forward, KLConfig("k3", "loss"))]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-13)


def test_a_clipped_token_is_silent_in_the_loss_and_has_the_bound_in_the_reward():
    logp = torch.tensor([[-4.0, -1.0]], requires_grad=True)
    ref_logp, mask = torch.tensor([[-1.0, -1.5]]), torch.ones(1, 2).bool()
    grads = {
        (place, clip): torch.autograd.grad(
            kl_surrogate(logp, ref_logp, mask, KLConfig("k3", place, credit=credit, clip=clip)),
            logp,
        )[0][0].tolist()
        for place, credit in (("loss", "sequence"), ("reward", "token"))
        for clip in (None, 10, 1000)
    }
    assert grads["loss", 10][0] == 0 and grads["loss", 10][1] == grads["loss", None][1]
    assert grads["reward", 10][0] == 10 and grads["reward", 10][1] == grads["reward", None][1]
    for place in ("loss", "reward"):
        assert grads[place, 1000] == grads[place, None]


@pytest.mark.parametrize(
    "choice",
    [
        ("k1", "reward"),
        ("k3", "both"),
        ("exact", "both"),
        ("k2", "loss"),
        ("k3", "loss"),
        ("exact", "loss"),
    ],
    ids=str,
)
def test_more_beta_less_kl(choice):
    "The sign: training on a reward with a larger beta ends nearer to the reference."
    ref = tree(5, v=3, horizon=2)
    states, tokens = enumerate_sequences(ref)
    reward, ends = (tokens.sum(1) == 4).double(), []
    for beta in (0, 0.1, 0.3, 1):
        policy = tree(5, v=3, horizon=2)
        for _ in range(60):
            theta = policy.parameters.clone().requires_grad_()
            p = policy.logp(theta)[states, tokens].sum(1).exp()
            (ascent,) = torch.autograd.grad((p * reward).sum(), theta)
            penalty = surrogate_gradient(policy, ref, KLConfig(*choice))
            policy.parameters = policy.parameters + ascent - beta * penalty
        ends.append(divergence(policy, ref).item())
    assert all(less < 0.98 * more for more, less in itertools.pairwise(ends)), ends
    assert ends[-1] < 0.3 * ends[0], ends


def test_no_penalty_reads_nothing_and_costs_nothing():
    logp = torch.randn(3, 4, requires_grad=True)
    value = kl_surrogate(logp, None, None, KLConfig(placement="none"))
    assert value == 0
    value.backward()
    assert logp.grad.abs().max() == 0


# ---- bad input


def test_a_config_is_needed():
    with pytest.raises(ValueError, match="config='k1': a KLConfig is needed"):
        kl_surrogate(config="k1", **batch())


def test_an_exact_kl_without_a_graph_is_refused_in_the_loss():
    x = batch() | {"token_kl": batch()["token_kl"].detach()}
    kl_surrogate(config=KLConfig("exact"), **x)
    with pytest.raises(ValueError, match="token_kl has no graph"):
        kl_surrogate(config=KLConfig("exact", "loss"), **x)


def test_a_baseline_is_masked_and_needs_a_credit():
    x = batch()
    baseline = torch.zeros_like(x["ref_logp"]).masked_fill(~x["mask"], math.nan)
    x = {name: x[name] for name in ("logp", "ref_logp", "mask")}
    got = kl_terms(config=KLConfig(), baseline=baseline, **x)
    torch.testing.assert_close(got, kl_terms(config=KLConfig(), **x))
    with pytest.raises(ValueError, match="baseline is given: placement='loss'"):
        kl_terms(config=KLConfig("k3", "loss"), baseline=baseline, **x)


@pytest.mark.parametrize(
    "config, missing",
    [
        (KLConfig(), "ref_logp"),
        (KLConfig("k3", "loss"), "ref_logp"),
        (KLConfig("exact"), "token_kl"),
        (KLConfig(importance="token"), "behaviour_logp"),
        (KLConfig("k3", "loss", importance="sequence"), "behaviour_logp"),
    ],
    ids=str,
)
def test_a_missing_tensor_is_named(config, missing):
    x = batch() | {missing: None}
    with pytest.raises(ValueError) as caught:
        kl_surrogate(config=config, **x)
    assert str(caught.value) == f"{missing} is None: config {config} needs it"


def test_what_a_configuration_does_not_use_may_be_missing():
    x = batch()
    for config, unused in (
        (KLConfig(), ("behaviour_logp", "token_kl")),
        (KLConfig("exact", "both"), ("behaviour_logp", "ref_logp")),
    ):
        want = kl_surrogate(config=config, **x)
        assert torch.equal(kl_surrogate(config=config, **x | dict.fromkeys(unused)), want)


@pytest.mark.parametrize(
    "mask, words",
    [
        (None, "mask is NoneType"),
        ([[True]], "mask is list"),
        (torch.ones(5, 7), "mask is ((5, 7), torch.float32)"),
        (torch.ones(5, 7).long(), "mask is ((5, 7), torch.int64)"),
        (torch.ones(5, 6).bool(), "mask is ((5, 6), torch.bool)"),
        (torch.ones(7).bool(), "mask is ((7,), torch.bool)"),
        (torch.ones(1, 5, 7).bool(), "mask is ((1, 5, 7), torch.bool)"),
    ],
)
@pytest.mark.parametrize(
    "config", [KLConfig(), KLConfig("k3", "loss"), KLConfig("exact", "both")], ids=str
)
def test_a_wrong_mask_is_named(config, mask, words):
    with pytest.raises(ValueError) as caught:
        kl_surrogate(config=config, **batch() | {"mask": mask})
    assert str(caught.value) == f"{words}: a bool tensor of the shape of logp, (5, 7), is needed"


@pytest.mark.parametrize("shape", [(), (7,), (1, 5, 7), (0, 7)])
def test_a_wrong_batch_is_named(shape):
    x = torch.zeros(shape)
    with pytest.raises(ValueError, match=r"logp has shape .*: \(B, T\) with B >= 1 is needed"):
        kl_surrogate(x, x, torch.ones(shape).bool(), KLConfig())


FULL = KLConfig("exact", "both", importance="token")


@pytest.mark.parametrize(
    "name, config",
    [("ref_logp", KLConfig()), ("behaviour_logp", FULL), ("token_kl", FULL)],
    ids=str,
)
@pytest.mark.parametrize(
    "wrong",
    [torch.zeros(5, 6), torch.zeros(7), torch.zeros(5, 1), torch.zeros(5, 7).long()],
    ids=["short", "row", "column", "int"],
)
def test_a_wrong_shape_or_dtype_is_named(name, config, wrong):
    with pytest.raises(ValueError) as caught:
        kl_surrogate(config=config, **batch() | {name: wrong})
    assert str(caught.value) == (
        f"{name} has shape {tuple(wrong.shape)} and dtype {wrong.dtype}: the floating shape "
        "(B, T) of logp, (5, 7), is needed"
    )


@pytest.mark.parametrize(
    "name, config",
    [("logp", KLConfig()), ("ref_logp", KLConfig()), ("behaviour_logp", FULL), ("token_kl", FULL)],
    ids=str,
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_named_with_its_place(name, config, bad):
    x = batch()
    x["mask"] = torch.ones_like(x["mask"])
    x["mask"][2, 3] = False
    broken = x[name].detach().clone()
    broken[2, 3:5] = bad  # the first of the two is masked
    broken[4, 6] = bad
    with pytest.raises(ValueError) as caught:
        kl_surrogate(config=config, **x | {name: broken})
    assert str(caught.value) == (
        f"{name} is {bad} at sequence 2, token 4 (2 such tokens): finite numbers are needed "
        "wherever mask is True"
    )
