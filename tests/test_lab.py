"""The lab against independent computations, and the relations between the gradients."""

import itertools
from dataclasses import replace

import pytest
import torch

from kl_comedy.lab.gradients import (
    TARGETS,
    divergence,
    enumerated_gradients,
    exact_gradient,
    expected_gradient,
    named_objective,
)
from kl_comedy.lab.policies import (
    MarkovPolicy,
    Policy,
    PrefixTreePolicy,
    history_policy,
    recent_policy,
)
from kl_comedy.lab.sampling import sample_gradients
from kl_comedy.lab.variance import gradient_variance, sampled_statistics
from kl_comedy.theory.config import CHOICES, KLConfig


def allowed_configs():
    for values in itertools.product(*CHOICES.values()):
        try:
            yield KLConfig(**dict(zip(CHOICES, values, strict=True)), beta=1.0)
        except ValueError:
            continue


CONFIGS = list(allowed_configs())
KNOWN = ("k1", "k2", "k3", "exact")  # whose biases are written down below
ON_POLICY = [c for c in CONFIGS if c.importance == "none"]


def random_policies(kind, seed=0, scale=1.0):
    "Policy, reference and behaviour of one kind, small enough to enumerate."
    draw = torch.Generator().manual_seed(seed)

    def random(*shape):
        return scale * torch.randn(*shape, generator=draw, dtype=torch.float64)

    build = {
        "tree": lambda: PrefixTreePolicy(random(4, 3), 2),
        "markov": lambda: MarkovPolicy(random(3, 2), 1, 4),
        "history": lambda: history_policy(random(3), 4),
        "recent": lambda: recent_policy(random(4), 4),
    }[kind]
    return build(), build(), build()


@pytest.fixture(scope="module")
def tree4():
    "The policy of the paper's summary: three tokens, length 4, random logits."
    draw = torch.Generator().manual_seed(1)
    return [
        PrefixTreePolicy(torch.randn(40, 3, generator=draw, dtype=torch.float64), 4)
        for _ in range(2)
    ]


def relative_bias(config, policy, ref):
    true = exact_gradient(policy, ref)
    return ((expected_gradient(policy, ref, config) - true).norm() / true.norm()).item()


@pytest.mark.parametrize("kind", ["tree", "markov", "history", "recent"])
def test_expected_gradient_and_variance_equal_enumeration(kind):
    "Every allowed configuration, on- and off-policy, against one backward pass a sequence."
    policy, ref, mu = random_policies(kind)
    for config, behaviour in itertools.product(CONFIGS, (None, mu)):
        if config.placement == "none" and config.estimator != "k1":
            continue
        probs, grads = enumerated_gradients(policy, ref, config, behaviour)
        mean = torch.einsum("n,n...->...", probs, grads)
        assert probs.sum().item() == pytest.approx(1, abs=1e-12)
        found = expected_gradient(policy, ref, config, behaviour)
        assert (found - mean).abs().max() < 1e-12, config
        variance = ((probs @ grads.flatten(1).square()).sum() - mean.square().sum()).item()
        exact = gradient_variance(policy, ref, config, behaviour)
        assert exact == pytest.approx(variance, abs=1e-11, rel=1e-11), config


@pytest.mark.parametrize("kind", ["tree", "history"])
def test_a_bound_and_the_direction_are_those_of_the_surrogate(kind):
    "Every allowed configuration with them, against one backward pass a sequence."
    policy, ref, mu = random_policies(kind, seed=1)
    penalties = [c for c in CONFIGS if c.placement != "none"]
    forward = [replace(c, direction="forward") for c in penalties]
    clipped = [replace(c, clip=0.1) for c in penalties + forward if c.estimator == "k3"]
    for config, behaviour in itertools.product(forward + clipped, (None, mu)):
        probs, grads = enumerated_gradients(policy, ref, config, behaviour)
        mean = torch.einsum("n,n...->...", probs, grads)
        found = expected_gradient(policy, ref, config, behaviour)
        assert (found - mean).abs().max() < 1e-12, config
        variance = ((probs @ grads.flatten(1).square()).sum() - mean.square().sum()).item()
        exact = gradient_variance(policy, ref, config, behaviour)
        assert exact == pytest.approx(variance, abs=1e-11, rel=1e-11), config


def test_the_bound_acts_on_these_policies():
    policy, ref, _ = random_policies("history", seed=1)
    free = expected_gradient(policy, ref, KLConfig("k3", "loss"))
    bounded, loose = (
        expected_gradient(policy, ref, KLConfig("k3", "loss", clip=clip)) for clip in (0.1, 1e6)
    )
    assert (free - bounded).norm() > 0.1 * free.norm() and torch.equal(free, loose)


@pytest.mark.parametrize("name", ["k1 reward", "k1 both", "k3 both", "exact both"])
@pytest.mark.parametrize("credit", ["sequence", "to_go"])
def test_unbiased(tree4, name, credit):
    estimator, placement = name.split()
    assert relative_bias(KLConfig(estimator, placement, 1.0, credit), *tree4) < 1e-10


def test_k1_in_loss_has_no_gradient(tree4):
    mean = expected_gradient(*tree4, KLConfig("k1", "loss"))
    assert mean.abs().max() < 1e-14
    assert relative_bias(KLConfig("k1", "loss"), *tree4) == pytest.approx(1, abs=1e-10)


def test_every_other_on_policy_configuration_is_biased(tree4):
    unbiased = {("k1", "reward"), ("k1", "both"), ("k3", "both"), ("exact", "both")}
    for config in ON_POLICY:
        if config.placement == "none" or config.credit == "token":
            continue
        if config.estimator not in KNOWN:
            continue
        if (config.estimator, config.placement) not in unbiased | {("k1", "loss")}:
            assert relative_bias(config, *tree4) > 0.1, config


IDENTITIES = {
    "K3 in loss is the token forward KL": (KLConfig("k3", "loss"), ["token_forward_kl"]),
    "K2 in loss is the token reverse KL": (KLConfig("k2", "loss"), ["token_reverse_kl"]),
    "K3 in reward is the difference": (
        KLConfig("k3", "reward"),
        ["sequence_reverse_kl", "token_forward_kl"],
    ),
    "exact KL in reward is the difference": (
        KLConfig("exact", "reward"),
        ["sequence_reverse_kl", "token_reverse_kl"],
    ),
    "exact KL in loss is the token reverse KL": (KLConfig("exact", "loss"), ["token_reverse_kl"]),
    "K1 in reward, token credit": (KLConfig("k1", "reward", credit="token"), ["token_reverse_kl"]),
    "a differentiable token ratio on K3": (
        KLConfig("k3", "both", credit="token", importance="token"),
        ["token_reverse_kl"],
    ),
    "forward K3 in both, token credit": (
        KLConfig("k3", "both", credit="token", direction="forward"),
        ["token_forward_kl"],
    ),
    "forward exact KL in loss": (
        KLConfig("exact", "loss", direction="forward"),
        ["token_forward_kl"],
    ),
    "a differentiable token ratio on K1": (
        KLConfig("k1", "both", credit="token", importance="token"),
        ["token_reverse_kl"],
    ),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_identities(tree4, name):
    config, targets = IDENTITIES[name]
    first, *rest = (exact_gradient(*tree4, target) for target in targets)
    want = first - rest[0] if rest else first
    found = expected_gradient(*tree4, config)
    assert ((found - want).norm() / exact_gradient(*tree4).norm()).item() < 1e-10
    words = " - ".join(t.replace("_", " ").replace(" kl", " KL") for t in targets)
    assert named_objective(found, *tree4) == words


def test_credit_does_not_change_the_expectation_on_policy(tree4):
    for estimator, placement in itertools.product(CHOICES["estimator"], ("reward", "both")):
        one, other = (
            expected_gradient(*tree4, KLConfig(estimator, placement, 1.0, credit))
            for credit in ("sequence", "to_go")
        )
        assert (one - other).abs().max() < 1e-12


def test_off_policy(tree4):
    "No plain configuration is unbiased; the sequence weight is; the token weight freezes states."
    policy, ref = tree4
    draw = torch.Generator().manual_seed(7)
    mu = PrefixTreePolicy(torch.randn(40, 3, generator=draw, dtype=torch.float64), 4)
    true = exact_gradient(policy, ref)
    for estimator, placement in itertools.product(("k1", "k3"), ("reward", "loss")):
        found = expected_gradient(policy, ref, KLConfig(estimator, placement), mu)
        assert (found - true).norm() > 0.1 * true.norm()
    weighted = KLConfig("k1", "reward", importance="sequence")
    assert (expected_gradient(policy, ref, weighted, mu) - true).norm() < 1e-10 * true.norm()
    token = expected_gradient(policy, ref, KLConfig("k3", "both", 1.0, "token", "token"), mu)
    theta = policy.parameters.clone().requires_grad_()
    logp, p_mu, at = policy.logp(theta), mu.logp().exp(), torch.ones(1, dtype=torch.float64)
    kl, total = (logp.exp() * (logp - ref.logp())).sum(-1), 0
    for layer, child in zip(policy.layers, [*policy.children, None], strict=True):
        total = total + (at * kl[layer]).sum()
        if child is not None:
            flow = (at[:, None] * p_mu[layer]).flatten()
            at = flow.new_zeros(child.max() + 1).index_add(0, child.flatten(), flow)
    (want,) = torch.autograd.grad(total, theta)
    assert (token - want).norm() < 1e-10 * want.norm()


def test_descent_on_the_true_gradient_removes_the_kl(tree4):
    policy, ref = tree4
    start, logits = divergence(policy, ref).item(), policy.parameters.clone()
    for _ in range(400):
        logits -= 1.0 * exact_gradient(PrefixTreePolicy(logits, 4), ref)
    assert divergence(PrefixTreePolicy(logits, 4), ref).item() < 0.05 * start


@pytest.mark.parametrize("kind", ["tree", "markov", "history", "recent"])
def test_sampled_gradients_agree_with_the_exact_ones(kind):
    "Mean within 5 standard errors and variance within 15% for a sample of configurations."
    policy, ref, mu = random_policies(kind, scale=0.5)
    for config, behaviour in itertools.product(CONFIGS[1::5], (None, mu)):
        if config.placement == "none":
            continue
        grads = sample_gradients(policy, ref, config, 100, 400, 3, behaviour).flatten(1)
        mean = expected_gradient(policy, ref, config, behaviour).flatten()
        z = (grads.mean(0) - mean) / (grads.std(0) / 20).clamp(min=1e-12)
        assert z.abs().max() < 5, (config, behaviour is None)
        exact = gradient_variance(policy, ref, config, behaviour)
        if exact > 1e-12 and config.importance != "sequence":
            assert grads.var(0).sum().item() * 100 == pytest.approx(exact, rel=0.3), config


def test_sampling_is_reproducible_and_does_not_touch_the_global_generator():
    policy, ref, _ = random_policies("history")
    torch.manual_seed(0)
    before = torch.get_rng_state()
    args = policy, ref, KLConfig(), 300, 150
    one = sample_gradients(*args, seed=5)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(one, sample_gradients(*args, seed=5))
    finally:
        torch.set_num_threads(threads)
    assert not torch.equal(one, sample_gradients(*args, seed=6))
    assert torch.equal(before, torch.get_rng_state())


def test_long_horizons_are_exact_too():
    "T = 1000: K1 in the reward is unbiased to rounding, and the divergence is finite."
    draw = torch.Generator().manual_seed(0)
    policy, ref = (
        MarkovPolicy(torch.randn(5, 4, generator=draw, dtype=torch.float64), 1, 1000)
        for _ in range(2)
    )
    assert relative_bias(KLConfig(), policy, ref) < 1e-10
    assert 0 < divergence(policy, ref) < 1e4


def test_equal_policies_have_no_gradient():
    policy, _, _ = random_policies("markov")
    for target in TARGETS:
        assert exact_gradient(policy, policy, target).abs().max() < 1e-12
    assert named_objective(expected_gradient(policy, policy, KLConfig()), policy, policy) == "zero"


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: PrefixTreePolicy(torch.zeros(4, 3), 0), "horizon=0"),
        (lambda: PrefixTreePolicy(torch.zeros(4, 3), 2.0), "horizon=2.0"),
        (lambda: PrefixTreePolicy(torch.zeros(4, 3), True), "horizon=True"),
        (lambda: PrefixTreePolicy(torch.zeros(5, 3), 2), "has 4 prefixes"),
        (lambda: PrefixTreePolicy(torch.zeros(12), 2), "logits"),
        (lambda: PrefixTreePolicy(torch.full((4, 3), float("nan")), 2), "non-finite"),
        (lambda: PrefixTreePolicy(torch.full((4, 3), float("inf")), 2), "non-finite"),
        (lambda: PrefixTreePolicy(torch.zeros(0, 3), 1), "logits"),
        (lambda: PrefixTreePolicy(torch.zeros(4, 3), 20_000), "has more prefixes"),
        (lambda: MarkovPolicy(torch.zeros(4, 2), 1, 3), "has 3 prefixes"),
        (lambda: MarkovPolicy(torch.zeros(4, 2), 10_000, 3), "has more prefixes"),
        (lambda: history_policy([0.0] * 3, -1), "horizon=-1"),
        (lambda: history_policy([0.0] * 3, "3"), "horizon='3'"),
        (lambda: MarkovPolicy(torch.zeros(3, 2), -1, 3), "order=-1"),
        (lambda: history_policy([0.0, 0.0], 3), "parameters have shape"),
        (lambda: recent_policy([0.0] * 4, 0), "horizon=0"),
        (lambda: Policy([1.0], torch.zeros(2, 2), 2), "parameters have shape"),
    ],
)
def test_bad_policies_are_refused(make, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        make()


def test_bad_requests_are_refused():
    policy, ref, _ = random_policies("tree")
    other = random_policies("markov")[1]
    with pytest.raises(ValueError, match="target='kl'"):
        exact_gradient(policy, ref, "kl")
    for call in (
        lambda: exact_gradient(policy, other),
        lambda: expected_gradient(policy, other, KLConfig()),
        lambda: sample_gradients(policy, other, KLConfig(), 2, 2, 0),
    ):
        with pytest.raises(ValueError, match="ref has other states"):
            call()
    with pytest.raises(ValueError, match="behaviour has other states"):
        expected_gradient(policy, ref, KLConfig(), other)
    for n_sequences, n_trials in ((0, 1), (1, 0), (1.5, 1), (True, 1)):
        with pytest.raises(ValueError, match="n_sequences=|n_trials="):
            sample_gradients(policy, ref, KLConfig(), n_sequences, n_trials, 0)
    for seed in (None, True, -1, 1.5):
        with pytest.raises(ValueError, match="seed="):
            sample_gradients(policy, ref, KLConfig(), 2, 2, seed)
    never = PrefixTreePolicy(
        policy.parameters.index_put(
            (torch.tensor(0), torch.tensor(1)), torch.tensor(-800.0, dtype=torch.float64)
        ),
        policy.horizon,
    )
    expected_gradient(policy, ref, KLConfig(), never)
    with pytest.raises(ValueError, match="behaviour gives token 1 in state 0 probability 0"):
        expected_gradient(policy, ref, KLConfig(importance="token"), never)


def test_a_policy_owns_its_parameters():
    logits = torch.zeros(4, 3, dtype=torch.float64)
    policy = PrefixTreePolicy(logits, 2)
    logits += torch.arange(3)
    assert (policy.parameters == 0).all()


def test_statistics_of_a_known_distribution():
    "Gaussian gradients with a known mean error and spread."
    draw = torch.Generator().manual_seed(0)
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)  # norm 5
    noise = torch.randn(20_000, 2, generator=draw, dtype=torch.float64)
    found = sampled_statistics(exact + torch.tensor([0.5, 0.0]) + 0.1 * noise, exact)
    assert found["bias"] == pytest.approx(0.1, rel=0.02)
    assert found["bias_low"] < 0.1 < found["bias_high"]
    assert found["std"] == pytest.approx(0.1 * 2**0.5 / 5, rel=0.02)
    assert found["cosine"] == pytest.approx(0.997, abs=0.002)
    assert found["std_se"] == pytest.approx(0.1 * 2**0.5 / 5 / (4 * 19_999) ** 0.5, rel=0.02)
    assert sampled_statistics(exact + 0.1 * noise, exact)["bias_low"] == 0
    assert sampled_statistics(exact.expand(3, 2), exact)["std_se"] == 0


@pytest.mark.parametrize("trials", [0, 1])
def test_statistics_need_two_trials_and_a_gradient(trials):
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    with pytest.raises(ValueError, match=f"gradients hold {trials} trials"):
        sampled_statistics(exact.expand(trials, 2), exact)
    with pytest.raises(ValueError, match="exact is zero"):
        sampled_statistics(exact.expand(3, 2), 0 * exact)
