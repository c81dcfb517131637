"""What the audit says of whole trainers, against what the trainers say and the lab computes."""

import pytest
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from kl_comedy.auditing.audit import PROBES
from kl_comedy.auditing.trainer import audit_trainer as audit_whole
from kl_comedy.theory.config import KLConfig
from kl_comedy.trainers.objective import objective
from kl_comedy.trainers.rloo_grpo import KLGRPOTrainer, KLRLOOTrainer

pytestmark = pytest.mark.filterwarnings("ignore")
EACH = ", averaged over each response's tokens"
OURS = [
    KLConfig("k1", "reward", 0.5), KLConfig("k3", "reward", 0.5), KLConfig("k3", "loss", 0.5),
    KLConfig("k1", "loss", 0.5), KLConfig("k2", "loss", 0.5),
    KLConfig("exact", "both", 0.5, "to_go"), KLConfig("k3", "both", 0.5, "token", "token"),
]  # fmt: skip


def audit_trainer(trainer, config, **settings):
    """Without the probes, which take most of the time and are tested on functions."""
    return audit_whole(trainer, config, skip=tuple(PROBES), **settings)


@pytest.mark.parametrize("kind", ["rloo", "grpo"])
@pytest.mark.parametrize("kl", OURS, ids=str)
def test_a_trainer_of_ours_optimises_what_it_says(kl, kind):
    trainer, config, settings = {
        "rloo": (KLRLOOTrainer, RLOOConfig, {}),
        "grpo": (KLGRPOTrainer, GRPOConfig, {"loss_type": "luspo", "scale_rewards": "none"}),
    }[kind]
    found = audit_trainer(trainer, config, kl=kl, **settings).on_policy
    assert found.objective == objective(kl)
    in_return = kl.placement != "loss" and kl.credit != "token"
    if found.objective != "zero":
        half = kind == "grpo" and in_return  # GRPO's mean holds the response itself
        assert found.scale == pytest.approx(0.5 if half else 1, abs=1e-4)
    assert found.unit == ("group" if in_return else "sequence")


@pytest.mark.parametrize(("loss_type", "ending", "aggregation"), [
    ("dapo", "", "mean over the tokens of the batch"), ("grpo", EACH, "mean over sequences"),
    ("bnpo", "", "mean over the tokens of the batch"), ("dr_grpo", "", "mean over sequences"),
    ("luspo", "", "mean over sequences")])  # fmt: skip
def test_the_loss_type_of_grpo_decides_what_divides(loss_type, ending, aggregation):
    report = audit_trainer(GRPOTrainer, GRPOConfig, loss_type=loss_type)
    found = report.on_policy
    assert (found.objective, found.aggregation) == ("token reverse KL" + ending, aggregation)
    assert report.off_policy.objective == "token reverse KL at the sampler's states" + ending


def test_what_is_divided_by_its_own_deviation_is_no_divergence():
    report = audit_trainer(RLOOTrainer, RLOOConfig, normalize_advantages=True)
    assert report.on_policy.unit == "batch"
    scaled = audit_trainer(
        KLGRPOTrainer,
        GRPOConfig,
        kl=KLConfig("k1", "reward", 0.5),
        loss_type="luspo",
        scale_rewards="group",
    ).on_policy
    assert (scaled.objective, scaled.unit) == ("none of these", "group")
