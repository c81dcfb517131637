"""The exact variance with a baseline against enumeration of groups, and what is refused."""

import itertools
from pathlib import Path

import nbformat
import pytest
import torch

from kl_comedy.lab.gradients import enumerated_gradients, expected_gradient, gradient_terms
from kl_comedy.lab.policies import (
    MarkovPolicy,
    PrefixTreePolicy,
    enumerate_sequences,
    history_policy,
)
from kl_comedy.lab.variance import gradient_variance
from kl_comedy.theory.config import KLConfig
from kl_comedy.theory.surrogate import credited

EXPERIMENT = Path(__file__).parents[1] / "nbs/experiments/24_gradients.ipynb"


def policies(kind):
    draw = torch.Generator().manual_seed(3)

    def random(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    build = {
        "tree": lambda: PrefixTreePolicy(random(3, 2), 2),
        "markov": lambda: MarkovPolicy(random(3, 2), 1, 3),
        "history": lambda: history_policy(random(3), 3),
    }[kind]
    return build(), build()


def enumerated_groups(policy, ref, config, size):
    "Expectation, and variance per sequence, of the mean over a group with leave-one-out baselines."
    states, tokens = enumerate_sequences(policy)
    theta = policy.parameters.clone().requires_grad_()
    logp = policy.logp(theta)[states, tokens]
    scores = torch.stack(
        [torch.autograd.grad(x, theta, retain_graph=True)[0].flatten() for x in logp.flatten()]
    ).view(*tokens.shape, -1)
    credit = credited(gradient_terms(policy, ref, config).kl[states, tokens], config.credit)
    probs, grads = enumerated_gradients(policy, ref, config)
    loss = grads.flatten(1) - torch.einsum("nt,ntp->np", credit, scores)
    mean, second = 0, 0
    for group in itertools.product(range(len(tokens)), repeat=size):
        total, weight = 0, probs[list(group)].prod()
        for i, member in enumerate(group):
            others = [credit[m] for j, m in enumerate(group) if j != i]
            baseline = sum(others) / (size - 1)
            total = total + (credit[member] - baseline) @ scores[member] + loss[member]
        mean = mean + weight * total / size
        second = second + weight * (total / size).square().sum()
    return mean, (second - mean.square().sum()).item() * size


@pytest.mark.parametrize("kind, size", [("tree", 2), ("tree", 4), ("markov", 2), ("history", 3)])
def test_leave_one_out_equals_enumeration_of_groups(kind, size):
    policy, ref = policies(kind)
    for estimator, placement, credit in itertools.product(
        ("k1", "k2", "k3", "exact"), ("reward", "both"), ("sequence", "to_go", "token")
    ):
        config = KLConfig(estimator, placement, 1.0, credit)
        mean, variance = enumerated_groups(policy, ref, config, size)
        unchanged = expected_gradient(policy, ref, config).flatten()
        assert (mean - unchanged).abs().max() < 1e-12, config
        found = gradient_variance(policy, ref, config, leave_one_out=size)
        assert found == pytest.approx(variance, rel=1e-10), config


def test_larger_groups_estimate_the_baseline_better():
    policy, ref = policies("history")
    values = [gradient_variance(policy, ref, KLConfig(), leave_one_out=n) for n in (2, 4, 8, 1000)]
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("size", [1, 0, -2, 2.0, True])
def test_bad_group_sizes_are_refused(size):
    policy, ref = policies("tree")
    with pytest.raises(ValueError, match="leave_one_out="):
        gradient_variance(policy, ref, KLConfig(), leave_one_out=size)


def test_a_baseline_that_is_not_implemented_or_cannot_act_is_refused():
    policy, ref = policies("tree")
    with pytest.raises(ValueError, match="on-policy"):
        gradient_variance(policy, ref, KLConfig(), behaviour=ref, leave_one_out=2)
    for config in (KLConfig("k3", "loss"), KLConfig(placement="none")):
        with pytest.raises(ValueError, match="placement="):
            gradient_variance(policy, ref, config, leave_one_out=2)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"n_trials": 1}, "n_trials=1: 0, for exact results only, or at least 2 are needed"),
        ({"ref_weights": [0.2, 0.3, 0.5]}, "the policy is its reference"),
    ],
)
def test_an_experiment_that_could_not_be_judged_is_refused_before_it_starts(
    changed, message, tmp_path
):
    "The cells of the notebook in order, with the parameters as papermill puts them in."
    names, folder = {}, tmp_path / "run"
    with pytest.raises(ValueError, match=message):
        for cell in nbformat.read(EXPERIMENT, as_version=4).cells:
            if cell.cell_type == "code":
                exec(cell.source, names)
            if "parameters" in cell.metadata.get("tags", ()):
                names |= {"run_dir": str(folder)} | changed
    assert not folder.exists()
