"""Rows that hold several sequences have the penalty, baseline and monitor of the padded batch."""

import pytest
import torch

from kl_comedy.theory.config import KLConfig
from kl_comedy.trainers.aggregation import LOSS_TYPES, StepShare
from kl_comedy.trainers.baseline import return_scale
from kl_comedy.trainers.monitor import Monitor, measure_batch, quick_numbers
from kl_comedy.trainers.penalty import group_baseline, penalty_terms, whole_distribution_kl
from kl_comedy.trainers.scored import ScoredBatch, from_packed

V = 5
# Two rows of twelve tokens and six responses in groups of three. A prompt stands before each
# response, the fourth one goes on in the second row, the fifth has a tool's output in its middle.
SEQUENCE = torch.tensor(
    [[-1, 0, 0, 0, -1, 1, -1, -1, 2, 2, -1, 3], [3, 3, -1, 4, 4, -1, 4, -1, 5, 5, 5, -1]]
)
GROUP = torch.tensor([0, 0, 0, 1, 1, 1])
LENGTHS = [3, 1, 2, 3, 3, 3]
SCORED = torch.tensor([True, True, True, True, False, True])
CONFIGS = [
    KLConfig("k1", "reward"),
    KLConfig("k3", "loss"),
    KLConfig("k2", "both", credit="to_go"),
    KLConfig("k3", "both", credit="token", importance="token"),
    KLConfig("k1", "reward", importance="sequence"),
    KLConfig("exact", "both", credit="to_go"),
    KLConfig("exact", "loss"),
]


def rows(name):
    """Packed logits, (2, 12, V), of a policy that is named by a number."""
    generator = torch.Generator().manual_seed(name)
    return torch.randn(*SEQUENCE.shape, V, generator=generator, dtype=torch.float64)


TOKENS = torch.randint(V, SEQUENCE.shape, generator=torch.Generator().manual_seed(9))


def log_probs(logits, tokens):
    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def by_hand(values):
    """Packed values as (6, 3, ...), put there one by one; padded with what must not matter."""
    padded = values.new_full((len(LENGTHS), max(LENGTHS), *values.shape[2:]), 3)
    for i in range(len(LENGTHS)):
        found = [tuple(at) for at in (SEQUENCE == i).nonzero().tolist()]
        for t, (row, column) in enumerate(found):
            padded[i, t] = values[row, column]
    return padded


def batch_of(logits, ref_logits, old_logits, tokens, mask):
    return ScoredBatch(
        log_probs(logits, tokens), log_probs(ref_logits, tokens), mask,
        old_logp=log_probs(old_logits, tokens), logits=logits, ref_logits=ref_logits,
        group=GROUP, scored=SCORED, token_ids=tokens,
        scale=return_scale(GROUP, SCORED, True, torch.float64)[:, None],
    )  # fmt: skip


@pytest.fixture
def pair():
    """The packed logits and their batch; the padded logits and theirs."""
    packed_logits = rows(0).requires_grad_()
    others = rows(1), rows(2)
    packed = batch_of(packed_logits, *others, TOKENS, SEQUENCE >= 0)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    padded_logits = by_hand(rows(0)).requires_grad_()
    padded = batch_of(padded_logits, *(by_hand(x) for x in others), by_hand(TOKENS), mask)
    return packed_logits, from_packed(packed, SEQUENCE), padded_logits, padded


def loss_of(batch):
    """A policy-gradient loss, so that the penalty has something to have a share of."""
    advantages = torch.tensor([1.0, -1, 0.5, 2, 0, -2], dtype=torch.float64)
    return -(batch.logp.where(batch.mask, 0) * advantages[:, None]).sum(-1).mean()


@pytest.mark.parametrize("loss_type", ["rloo", "grpo", "dapo", "bnpo"])
@pytest.mark.parametrize("kl", CONFIGS, ids=str)
def test_the_gradient_of_the_penalty_is_that_of_the_padded_batch(kl, loss_type, pair):
    packed_logits, packed, padded_logits, padded = pair
    gradients = []
    for logits, batch in ((packed_logits, packed), (padded_logits, padded)):
        share = StepShare(2, tokens=sum(LENGTHS), max_length=3)
        terms = penalty_terms(batch, kl)
        LOSS_TYPES[loss_type].aggregate(terms, batch.mask, share).backward()
        gradients.append(logits.grad)
    rowwise, padded_gradient = gradients
    assert rowwise[SEQUENCE < 0].abs().sum() == 0
    expected = padded_gradient[padded.mask]
    assert (by_hand(rowwise)[padded.mask] - expected).norm() < 1e-12 * expected.norm()
    assert expected.norm() > 1e-2


@pytest.mark.parametrize("kl", [kl for kl in CONFIGS if kl.in_return], ids=str)
def test_the_baseline_is_that_of_the_padded_batch(kl, pair):
    _, packed, _, padded = pair
    found, expected = (
        group_baseline(batch, kl, whole_distribution_kl(batch, kl)) for batch in (packed, padded)
    )
    assert (found - expected).abs().max() < 1e-12
    assert (expected != 0).any(1).all(), "each has another to be compared with"


@pytest.mark.parametrize("kl", CONFIGS, ids=str)
def test_the_monitor_measures_the_same(kl, pair):
    packed_logits, packed, padded_logits, padded = pair
    numbers = []
    for logits, batch in ((packed_logits, packed), (padded_logits, padded)):
        penalty = penalty_terms(batch, kl).sum(-1).mean()
        at = logits if kl.estimator == "exact" else None
        numbers.append(measure_batch(Monitor(kl), batch, loss_of(batch), penalty, at))
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-12)
    assert 0 < numbers[0]["kl/gradient_share"] < 1 and numbers[0]["kl/exact"] > 0


def test_the_monitor_checks_the_same(pair):
    _, packed, _, padded = pair
    assert quick_numbers(packed) == pytest.approx(quick_numbers(padded), rel=1e-12)
    for batch in (packed, padded):
        with pytest.raises(ValueError, match="before the first step policy and reference differ"):
            Monitor(KLConfig()).check(batch, first_step=True)
        batch.ref_logp = batch.ref_logp.clone()
        batch.ref_logp[2, 1] = torch.nan
        with pytest.raises(ValueError, match="ref_logp is nan at sequence 2, token 1"):
            Monitor(KLConfig()).check(batch)


def test_responses_without_a_token_keep_their_place():
    """A row may hold responses of which nothing counts: the groups stay as they are."""
    sequence = torch.tensor([[0, 0, 2]])
    values = torch.zeros(1, 3)
    packed = ScoredBatch(values, values, sequence >= 0, group=torch.tensor([0, 0, 0, 1]))
    batch = from_packed(packed, sequence)
    assert batch.mask.sum(1).tolist() == [2, 0, 1, 0]
