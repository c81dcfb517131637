"""The audit against what is known: every configuration, and mistakes made on purpose."""

import itertools
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from kl_comedy.auditing.audit import audit
from kl_comedy.auditing.expectation import expect
from kl_comedy.auditing.report import from_dict, to_dict
from kl_comedy.auditing.toy import Toy
from kl_comedy.lab.gradients import expected_gradient, named_objective
from kl_comedy.theory.config import CHOICES, KLConfig
from kl_comedy.theory.estimators import exact_kl
from kl_comedy.theory.surrogate import kl_surrogate

SEQ, TOK, FWD = "sequence reverse KL", "token reverse KL", "token forward KL"
EACH = ", averaged over each response's tokens"


def every():
    for values in itertools.product(*CHOICES.values()):
        try:
            kl = KLConfig(**dict(zip(CHOICES, values, strict=True)), beta=1)
        except ValueError:
            continue
        if kl.active:
            yield kl


def ours(kl):
    def surrogate(b):
        exact = b.logp.new_zeros(b.mask.shape, dtype=torch.float64)
        exact[b.mask] = exact_kl(b.logits[b.mask], b.ref_logits[b.mask]).double()
        return kl_surrogate(b.logp, b.ref_logp, b.mask, kl, b.behaviour_logp, exact)

    return surrogate


@pytest.mark.parametrize("kl", every(), ids=str)
def test_every_configuration_has_the_objective_of_the_lab(kl):
    """On-policy the name and the expectation off-policy, both by another way than the audit's."""
    report, toy, stale = audit(ours(kl)), Toy(), Toy(0.1)
    expected = named_objective(expected_gradient(toy.policy, toy.ref, kl), toy.policy, toy.ref)
    found = report.on_policy
    assert found.objective.split(" + ")[0].split(" - ")[0] in (*expected.split(" - "), expected)
    if expected != "none of these":
        assert found.objective == expected
        assert found.scale == pytest.approx(0 if expected == "zero" else 1, abs=1e-6)
    assert (found.unit, found.aggregation) == ("sequence", "mean over sequences")
    goal = expected_gradient(toy.policy, toy.ref, KLConfig())
    gradient = expected_gradient(stale.policy, stale.ref, kl, behaviour=stale.behaviour)
    if gradient.norm() < 1e-12 * goal.norm():
        assert report.off_policy.objective == "zero"
    else:
        cosine = torch.cosine_similarity(gradient.flatten(), goal.flatten(), dim=0).item()
        assert report.off_policy.cosine == pytest.approx(cosine, abs=1e-9)
    said = "not the sequence-level", "it goes against the sequence-level"  # of the objective
    probes = [f for f in report.findings if not f.startswith(said)]
    assert not probes, "our own surrogate has none of the faults"


# Mistakes made on purpose. `k` of a token, zero where masked; what is right is said first.


def gap(b):
    return (b.ref_logp - b.logp).masked_fill(~b.mask, 0)


def logp(b):
    return b.logp.masked_fill(~b.mask, 0)


def k3(b):
    return gap(b).expm1() - gap(b)


def in_reward(b):
    return (-gap(b).detach().sum(1) * logp(b).sum(1)).mean()


def in_loss(b):
    return k3(b).sum(1).mean()


def baseline(b):
    total = -gap(b).detach().sum(1).view(-1, 2)
    return ((total - total.flip(1)).flatten() * logp(b).sum(1)).mean()


def advantages(b, total, after):
    """A reward less its penalty among two, normalised before or after the penalty enters."""
    rewards = (b.reward - (0 if after else 1) * total).view(-1, 2)
    rewards = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    return rewards.flatten() - (total if after else 0)


def normalised(after):
    def penalty_alone(b):
        total = -gap(b).detach().sum(1)
        with_, without = (advantages(b, x, after) for x in (total, 0 * total))
        return -((with_ - without) * logp(b).sum(1)).mean()

    return penalty_alone


def ratio(b):
    return (logp(b) - b.behaviour_logp.masked_fill(~b.mask, 0)).exp()


def ppo(b):
    """K1 in the reward of each token's sequence under the clip of PPO."""
    total = gap(b).detach().sum(1, keepdim=True)
    return -(ratio(b) * total).minimum(ratio(b).clamp(0.8, 1.2) * total).sum(1).mean()


def whitened_ppo(b):
    """The same where the return of each token is whitened over the batch, as with a critic."""

    def loss(beta):
        last = torch.arange(b.mask.shape[1]) == b.mask.sum(1, keepdim=True) - 1
        kl = (b.behaviour_logp - b.ref_logp).masked_fill(~b.mask, 0)
        returns = (last * b.reward[:, None] - beta * kl).flip(1).cumsum(1).flip(1)
        deviation, mean = torch.std_mean(returns[b.mask])
        advantages = (returns - mean) / (deviation + 1e-8)
        clipped = (ratio(b) * advantages).minimum(ratio(b).clamp(0.8, 1.2) * advantages)
        return -(clipped * b.mask).sum() / b.mask.sum()

    return loss(1.0) - loss(0.0)


RIGHT = {"in reward": (in_reward, SEQ), "in loss": (in_loss, FWD), "baseline": (baseline, SEQ)}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_found_right(name):
    surrogate, objective = RIGHT[name]
    report = audit(surrogate)
    assert (report.on_policy.objective, report.on_policy.scale) == (objective, pytest.approx(1))
    assert report.on_policy.unit == ("group" if name == "baseline" else "sequence")
    told = "not the sequence", "100 nats", "bfloat16 near the reference"  # true of K3 and exp
    unlike = [f for f in report.findings if not any(words in f for words in told)]
    assert not unlike
    assert from_dict(to_dict(report)) == report


PLANTED = {  # the loss, its objective, and words that some finding must hold
    "wrong sign": (lambda b: -in_reward(b), SEQ, "sign is wrong"),
    "wrong sign in the loss": (lambda b: -in_loss(b), FWD, "sign is wrong"),
    "policy and reference swapped in the reward": (
        lambda b: (gap(b).detach().sum(1) * logp(b).sum(1)).mean(), SEQ, "sign is wrong"),
    "policy and reference swapped in the loss": (
        lambda b: ((-gap(b)).expm1() + gap(b)).sum(1).mean(), "none of these", "not the seq"),
    "detach forgotten": (
        lambda b: (-gap(b).sum(1) * logp(b).sum(1)).mean(), f"{SEQ} + negative entropy", "not"),
    "detached too much": (lambda b: k3(b).detach().sum(), "no gradient", "not the seq"),
    "reference read as zeros": (
        lambda b: (logp(b).detach().sum(1) * logp(b).sum(1)).mean(), "negative entropy", "not"),
    "padding counted": (
        lambda b: ((b.ref_logp - b.logp).expm1() - (b.ref_logp - b.logp)).sum(1).mean(),
        FWD, "padding counts: with ordinary"),
    "padding counted in the reward": (
        lambda b: ((b.logp - b.ref_logp).detach().sum(1) * logp(b).sum(1)).mean(),
        None, "padding counts: with ordinary"),
    "masked by a product": (
        lambda b: (((b.ref_logp - b.logp).expm1() - (b.ref_logp - b.logp)) * b.mask).sum(1).mean(),
        FWD, "padding counts: with nan"),
    "mean over the padded length": (
        lambda b: k3(b).mean(), FWD, "changes with the padding"),
    "summed over the batch": (
        lambda b: k3(b).sum(), FWD, "changes with the sequences"),
    "averaged over each response": (
        lambda b: (k3(b).sum(1) / b.mask.sum(1).clamp(min=1)).mean(), FWD + EACH, "not the seq"),
    "mask one token late": (
        lambda b: (k3(b)[:, :-1] * b.mask[:, 1:]).sum(1).mean(),
        "none of these", "the last token"),
    "mask one token early": (
        lambda b: (k3(b)[:, 1:] * b.mask[:, :-1]).sum(1).mean(),
        "none of these", "the first token"),
    "reference one token late": (
        lambda b: ((logp(b)[:, 1:] - b.ref_logp[:, :-1]).detach().masked_fill(~b.mask[:, 1:], 0)
                   .sum(1) * logp(b).sum(1)).mean(), "none of these", "does not vanish when"),
    "KL added twice": (lambda b: 2 * in_loss(b), FWD, "2 times beta"),
    "K1 in the reward and K3 in the loss": (
        lambda b: in_reward(b) + in_loss(b), f"{SEQ} + {FWD}", "not the seq"),
    "K3 in the reward": (
        lambda b: (k3(b).detach().sum(1) * logp(b).sum(1)).mean(), f"{SEQ} - {FWD}", "not"),
    "K1 in the loss": (lambda b: -gap(b).sum(1).mean(), "zero", "but zero"),
    "K1 in the loss, averaged over each response": (
        lambda b: (-gap(b).sum(1) / b.mask.sum(1).clamp(min=1)).mean(), "inverse length", "not"),
    "ratio not detached": (lambda b: (ratio(b) * k3(b)).sum(1).mean(), TOK, "not the seq"),
    "ratio detached": (lambda b: (ratio(b).detach() * k3(b)).sum(1).mean(), FWD, "not the seq"),
    "a clamp after exp": (
        lambda b: k3(b).clamp(-10, 10).sum(1).mean(), None,
        "a clamp: beyond log(ref/policy) = 2.61"),
    "a clamp in the reward": (
        lambda b: (-gap(b).clamp(-10, 10).detach().sum(1) * logp(b).sum(1)).mean(), SEQ,
        "a clamp: beyond log(ref/policy) = -10"),
    "a clamp of the log-ratio at 40": (
        lambda b: (gap(b).clamp(-40, 40).expm1() - gap(b).clamp(-40, 40)).sum(1).mean(), FWD,
        "a clamp: beyond log(ref/policy) = 40"),
    "a clamp of the value at 1.1e26": (
        lambda b: k3(b).clamp(max=1.1e26).sum(1).mean(), FWD,
        "a clamp: beyond log(ref/policy) = 60"),
    "a clamp in the reward at 80": (
        lambda b: (-gap(b).clamp(-80, 80).detach().sum(1) * logp(b).sum(1)).mean(), SEQ,
        "a clamp: beyond log(ref/policy) = -80"),
    "a clamp in the loss, beyond which K1 has no gradient": (
        lambda b: -gap(b).clamp(-10, 10).sum(1).mean(), "zero",
        "a clamp: beyond log(ref/policy) = 10"),
    "a clamp of the reference's log-prob": (
        lambda b: in_reward(replace(b, ref_logp=b.ref_logp.clamp(min=-20))), SEQ,
        "a clamp: beyond ref_logp = -20"),
    "the clip of PPO where the advantage is positive": (
        ppo, SEQ, "a clamp: beyond log(older/policy) = -0.18"),
    "the clip of PPO where it is negative": (
        ppo, SEQ, "a clamp: beyond log(older/policy) = 0.22"),
    "a clamp of log-probs taken from logits": (
        lambda b: (b.ref_logp - b.logits.log_softmax(-1).gather(-1, b.tokens[..., None])[..., 0])
        .masked_fill(~b.mask, 0).clamp(-50, 50).expm1().sum(1).mean(), None,
        "a clamp: beyond log(ref/policy) = 50"),
    "a clip of the ratio": (
        lambda b: (ratio(b).clamp(0.2, 5).detach() * k3(b)).sum(1).mean(), FWD,
        "a clamp: beyond log(older/policy) = 1.61"),
    "exp overflows": (in_loss, FWD, "100 nats in float32: the gradient is -inf"),
    "exp in half precision": (
        lambda b: (gap(b).exp() - 1 - gap(b)).square().sum(1).mean(), None, "bfloat16"),
    "a small difference of large numbers": (
        lambda b: ((gap(b).exp() - 1 - gap(b)).detach().sum(1) * logp(b).sum(1)).mean(),
        f"{SEQ} - {FWD}", "float32 near the reference: the gradient is wrong by 1"),
    "half precision near the reference": (
        lambda b: (gap(b).exp() - 1 - gap(b)).sum(1).mean(), FWD, "bfloat16 near the reference"),
    "rounded to half precision inside": (
        lambda b: in_loss(replace(b, logp=b.logp.bfloat16(), ref_logp=b.ref_logp.bfloat16())),
        "none of these", "float64: the gradient moves in steps"),
    "one of the tensors in float16": (
        lambda b: in_loss(replace(b, ref_logp=b.logp + (b.ref_logp - b.logp).half())), None,
        "float64: the gradient moves in steps"),
    "tokens taken for the first so many": (
        lambda b: in_loss(replace(b, mask=torch.arange(b.mask.shape[1])
                                  < b.mask.sum(1, keepdim=True))), FWD,
        "a token masked in the middle counts, as of a tool"),
    "a constant subtracted from each token": (
        lambda b: (((-gap(b) - 0.7).detach() * b.mask).sum(1) * logp(b).sum(1)).mean(),
        f"{SEQ} - 0.7 length", "not the seq"),
    "the reward's sum stops before the end": (
        lambda b: ((-gap(b).detach()[:, :-1] * b.mask[:, 1:]).sum(1) * logp(b).sum(1)).mean(),
        "none of these", "the last token"),
    "a root, which has no slope at zero": (
        lambda b: k3(b).sum(1).sqrt().mean(), "none of these", "when the policy is its reference"),
    "only the own token credited": (
        lambda b: (-gap(b).detach() * logp(b)).sum(1).mean(), TOK, "not the seq"),
    "before the advantages are normalised": (normalised(False), "none of these", "not the seq"),
    "divided by its own deviation over the batch": (
        lambda b: in_reward(b) / (-gap(b).detach().sum(1)).std(), None, "all sequences of a batch"),
    "a group's mean with the response itself": (
        lambda b: baseline(b) / 2, SEQ, "0.5 times beta: (n - 1)/n"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_named(name):
    surrogate, objective, words = PLANTED[name]
    report = audit(surrogate)
    assert any(words in finding for finding in report.findings), report.findings
    if objective is not None:
        assert report.on_policy.objective == objective


def entropy(b):
    return (b.logp.exp() * b.logp).masked_fill(~b.mask, 0).sum(1).mean()


NO_CLAMP = {  # losses that have none, and read no older policy; and half of one
    "entropy": entropy,
    "a divergence of torch": lambda b: torch.nn.functional.kl_div(
        logp(b), b.ref_logp.masked_fill(~b.mask, 0), log_target=True, reduction="sum"
    ),
    "absolute": lambda b: gap(b).abs().sum(1).mean(),
    "absolute in the reward": lambda b: (gap(b).abs().detach().sum(1) * logp(b).sum(1)).mean(),
    "of the batch": lambda b: in_reward(b) / (-gap(b).detach().sum(1)).std(),
    "before the advantages are normalised": normalised(False),
    "both": lambda b: in_loss(b) + (k3(b).detach().sum(1) * logp(b).sum(1)).mean(),
    "saturates": lambda b: gap(b).sigmoid().sum(1).mean(),
}


@pytest.mark.parametrize("name", NO_CLAMP)
def test_where_there_is_no_clamp_none_is_found(name):
    assert not any(audit(NO_CLAMP[name]).clamps.values())


def test_a_clamp_is_said_of_what_it_clamps_and_nothing_else():
    clamped = lambda b: (gap(b).clamp(-0.2, 5).square()).sum(1).mean()  # noqa: E731
    found = audit(clamped).clamps
    assert sorted(found["log(ref/policy)"]) == pytest.approx([-0.2, 5], rel=0.02)
    assert not any(ends for what, ends in found.items() if what != "log(ref/policy)")
    squared = audit(lambda b: (gap(b).square() / 2).clamp(max=10).sum(1).mean()).clamps
    assert sorted(squared.pop("log(ref/policy)")) == pytest.approx([-(20**0.5), 20**0.5], rel=0.02)
    assert not any(squared.values())
    older = lambda b: ppo(replace(b, ref_logp=b.ref_logp + (b.logp - b.behaviour_logp)))  # noqa: E731
    assert sorted(audit(older).clamps["log(older/policy)"]) == pytest.approx(
        [-0.1823, 0.2231], rel=0.03
    )
    for loss in (ppo, whitened_ppo):
        sides = audit(loss).clamps
        assert sorted(sides.pop("log(older/policy)")) == pytest.approx([-0.1823, 0.2231], rel=0.01)
        assert not any(sides.values())


def test_what_computes_in_single_precision_does_not_move_in_steps():
    def single(b):
        return in_loss(replace(b, logp=b.logp.float(), ref_logp=b.ref_logp.float()))

    report = audit(single)
    assert report.on_policy.objective == FWD and "float64" not in report.precision

    def divided(b):  # constant but for rounding
        return normalised(False)(
            replace(b, logp=b.logp.float(), ref_logp=b.ref_logp.float(), reward=b.reward.float())
        )

    for loss in (ppo, normalised(False), divided, lambda b: gap(b).abs().sum(1).mean()):
        assert "float64" not in audit(loss).precision


def test_a_factor_is_a_group_mean_only_where_there_are_groups():
    (factor,) = [f for f in audit(lambda b: in_loss(b) / 2).findings if "times beta" in f]
    assert factor == "0.5 times beta"


@pytest.mark.parametrize("reduction", ["vocabulary", "elements"])
def test_a_mean_over_the_vocabulary_is_named(reduction):
    def mean(b):
        logp, ref = b.logits.log_softmax(-1), b.ref_logits.log_softmax(-1)
        each = (logp.exp() * (logp - ref)).masked_fill(~b.mask[..., None], 0)
        return each.mean() if reduction == "elements" else each.mean(-1).sum(1).mean()

    (factor,) = [f for f in audit(mean).findings if "times beta" in f]
    assert factor == "0.333 times beta: 1/V, a mean over the vocabulary, which has 3 tokens here"
    assert [f for f in audit(lambda b: in_loss(b) / 3).findings if "times beta" in f] == [
        "0.333 times beta"
    ]


def test_the_bias_has_one_definition():
    """|g / factor - g*| / |g*|: the factor of one objective is taken out, and no other."""
    toy = Toy()
    goal = expected_gradient(toy.policy, toy.ref, KLConfig()).flatten()

    def distance(gradient):
        return ((gradient - goal).norm() / goal.norm()).item()

    def absolute(b):
        return gap(b).abs().sum(1).mean()

    def total(b):
        return 0.3 * in_reward(b) + 0.6 * in_loss(b)

    for loss in (absolute, total, normalised(False)):
        assert audit(loss).on_policy.bias == pytest.approx(distance(expect(loss, toy).mean))
        half = audit(lambda b: 0.5 * loss(b), beta=0.5)  # noqa: B023
        assert half.on_policy.bias == pytest.approx(distance(expect(loss, toy).mean))
    once, twice = (audit(lambda b: times * in_loss(b)) for times in (1, 2))  # noqa: B023
    assert once.on_policy.bias == pytest.approx(twice.on_policy.bias)
    assert once.off_policy.bias == pytest.approx(twice.off_policy.bias)


def test_a_sum_is_said_with_its_factor_outside():
    report = audit(lambda b: 2 * in_reward(b) + 0.5 * in_loss(b))
    assert report.verdict.startswith(f"2 x ({SEQ} + 0.25 {FWD}) (")
    against = audit(lambda b: in_loss(b) - 0.1 * in_reward(b))  # near the forward KL, not away
    assert against.verdict.startswith(f"minus 0.1 x ({SEQ} - 10 {FWD}) (")
    assert against.on_policy.cosine > 0.5 and "sign" not in " ".join(against.findings)
    longer = audit(lambda b: in_reward(b) / 9 - in_loss(b))
    assert any(f.startswith("it goes against the sequence-level") for f in longer.findings)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda b: -(logp(b).sum(1) * b.mask.sum(1)).mean(), "this lengthens responses"),
        (lambda b: -(logp(b).detach().sum(1) * logp(b).sum(1)).mean(), "this lowers the entropy"),
    ],
)
def test_minus_what_is_no_divergence_means_the_opposite(loss, words):
    report = audit(loss)
    assert words in report.verdict and "away from the reference" not in str(report)


def test_a_divergence_from_the_older_policy_has_a_gradient_where_there_is_one():
    def to_older(b):
        gap = (b.behaviour_logp - b.logp).masked_fill(~b.mask, 0)
        return (gap.expm1() - gap).sum(1).mean()

    report = audit(to_older)
    assert "nothing depends on the policy" not in report.verdict
    assert report.off_policy.bias > 0 and report.findings == [
        "not the sequence-level reverse KL but no gradient"
    ]
    assert audit(lambda b: in_loss(b).detach()).findings == report.findings


def test_off_policy_the_factor_is_the_one_found_on_policy():
    """By the definition: |g - g*| / |g*|, of K1 in the reward without a weight."""
    stale = Toy(0.1)
    gradient = expected_gradient(stale.policy, stale.ref, KLConfig(), behaviour=stale.behaviour)
    goal = expected_gradient(stale.policy, stale.ref, KLConfig())
    expected = ((gradient - goal).norm() / goal.norm()).item()
    assert audit(in_reward).off_policy.bias == pytest.approx(expected, abs=1e-9)
    assert audit(lambda b: 3 * in_reward(b)).off_policy.bias == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("size", [3, 8])
def test_noise_does_not_invent_a_sum(size):
    """Divided by its group's deviation the penalty has no objective, however it was drawn."""

    def divided(b):
        total = -gap(b).detach().sum(1).view(-1, size)
        scaled = (total - total.mean(1, keepdim=True)) / (total.std(1, keepdim=True) + 1e-4)
        return (scaled.flatten() * logp(b).sum(1)).mean()

    assert audit(divided, group_size=size).on_policy.objective == "none of these"


def test_what_drowns_in_noise_is_not_called_zero():
    def self_normalised(b):
        weight = (logp(b) - b.behaviour_logp.masked_fill(~b.mask, 0)).sum(1).exp().detach()
        return (weight / weight.mean() * -gap(b).detach().sum(1) * logp(b).sum(1)).mean()

    assert audit(self_normalised, staleness=1.0).off_policy.objective == "too noisy to tell"
    assert audit(self_normalised).off_policy.objective == SEQ


@pytest.mark.parametrize(
    "loss",
    [
        lambda b: (k3(b) * (torch.rand_like(b.logp) < 0.5)).sum(1).mean(),
        lambda b, calls=[]: calls.append(1) or in_loss(b) * len(calls),
    ],
)  # noqa: B006
def test_chance_and_memory_are_refused(loss):
    with pytest.raises(ValueError, match="two gradients in two calls"):
        audit(loss)


def test_a_loss_may_write_into_its_batch():
    def writes(b):
        loss = in_reward(b)
        b.ref_logp.zero_()
        b.mask.fill_(False)
        return loss

    right, found = audit(in_reward), audit(writes)
    assert (right.on_policy.objective, right.far) == (found.on_policy.objective, found.far)
    for name in ("scale", "bias", "variance"):  # equal but for the order of a sum
        assert getattr(found.on_policy, name) == pytest.approx(
            getattr(right.on_policy, name), abs=1e-12
        )


def test_an_error_says_what_the_loss_was_given():
    with pytest.raises(RuntimeError) as caught:
        audit(lambda b: (gap(b).sum(1).view(-1, 5).mean(1)).mean())
    assert "groups of group_size=2" in caught.value.__notes__[0]
    with pytest.raises(AttributeError) as caught:
        audit(lambda b: b.old_logp.sum())
    assert "behaviour_logp" in caught.value.__notes__[0]


def test_beta_applied_twice():
    report = audit(lambda b: 0.1 * (0.1 * in_reward(b)), beta=0.1)
    assert "0.1 times beta" in report.findings
    assert audit(lambda b: 0.1 * in_reward(b), beta=0.1).findings == []


def test_kl_after_the_advantages_are_normalised():
    """Its expectation is right; that it met neither baseline nor group contradicts the intent."""
    found = audit(normalised(True)).on_policy
    assert (found.objective, found.unit) == (SEQ, "sequence")
    assert audit(baseline).on_policy.unit == "group"


def test_drawn_groups_have_an_interval_and_the_same_name():
    def leave_one_out(b):
        total = -gap(b).detach().sum(1).view(-1, 4)
        others = (total.sum(1, keepdim=True) - total) / 3
        return ((total - others).flatten() * logp(b).sum(1)).mean()

    found = audit(leave_one_out, group_size=4).on_policy
    assert (found.objective, found.unit) == (SEQ, "group")
    assert found.bias_low == 0 < found.noise < 0.1 and found.bias_high > found.bias


@pytest.mark.parametrize(("arguments", "words"), [
    ({"beta": 0}, "beta=0"), ({"beta": float("inf")}, "beta=inf"), ({"beta": "1"}, "beta='1'"),
    ({"group_size": 1.5}, "group_size=1.5"), ({"group_size": True}, "group_size=True"),
    ({"staleness": 0}, "staleness=0"), ({"staleness": 5}, "staleness=5")])  # fmt: skip
def test_arguments_out_of_range_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        audit(in_reward, **arguments)


def test_the_audit_runs_where_only_torch_and_numpy_are():
    """So that it can run in the environment of another library."""
    blocked = ("trl", "transformers", "datasets", "accelerate", "seaborn", "pandas", "matplotlib")
    code = f"""
import sys
sys.modules.update(dict.fromkeys({blocked}))  # importing any of them now raises
from kl_comedy.auditing.audit import audit
from kl_comedy.auditing.report import to_dict
import json
json.dumps(to_dict(audit(lambda b: (b.logp * b.mask).sum())))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
