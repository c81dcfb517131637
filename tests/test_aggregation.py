"""The table of loss types against TRL's own loss: what divides it, whole and split."""

import micro
import pytest
import torch
from micro import DRAWN, PROMPTS, STOCK
from test_trainer import plain_pass
from trl import GRPOTrainer, RLOOTrainer

from kl_comedy.theory.estimators import k3
from kl_comedy.trainers.aggregation import LOSS_TYPES, StepShare
from kl_comedy.trainers.objective import stock_trainer
from kl_comedy.trainers.settings import loss_type_warnings

pytestmark = pytest.mark.usefixtures("exact")
OF_GRPO = [name for name in LOSS_TYPES if name != "rloo"]
PARTS = [1, 3]


def build(name, folder, loss_type, parts, theirs):
    """A trainer, TRL's or ours, of nine responses that go through its loss in `parts`."""
    kind = "rloo" if loss_type == "rloo" else "grpo"
    stock = {"rloo": RLOOTrainer, "grpo": GRPOTrainer}[kind]
    _, _, settings = stock_trainer(STOCK[name])
    settings = settings if theirs else {}
    if kind == "grpo":
        settings = settings | {"loss_type": loss_type}
    built = micro.trainer(
        kind, STOCK[name], folder, trainer_class=stock if theirs else None, num_generations=3,
        per_device_train_batch_size=9 // parts, gradient_accumulation_steps=parts, **settings,
    )  # fmt: skip
    if theirs:  # TRL's own head computes in float32
        built._get_per_token_logps_and_entropies = plain_pass.__get__(built)
    return built


def split(built):
    """The parts of a batch of three groups, each as the loss sees it."""
    batch = micro.answer(built, DRAWN, [p for p in PROMPTS for _ in range(3)])
    rows = built.args.per_device_train_batch_size
    for start in range(0, len(DRAWN), rows):
        yield {name: x[start : start + rows] if getattr(x, "ndim", 0) else x
               for name, x in batch.items()}  # fmt: skip


def step_gradient(built, loss_type):
    """The gradient of an optimisation step, all parts of the batch added up."""
    total = sum(micro.loss_gradient(built, part) for part in split(built))
    if loss_type == "rloo":  # RLOO's loss is divided by the Trainer
        total = total / built.args.gradient_accumulation_steps
    return total


def close(found, expected):
    return (found - expected).norm() < 1e-12 * expected.norm()


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_step_has_the_gradient_of_trl(loss_type, parts, tmp_path):
    name = "k1_reward" if loss_type == "rloo" else "k3_loss"
    theirs, ours = (
        step_gradient(build(name, tmp_path / str(stock), loss_type, parts, stock), loss_type)
        for stock in (True, False)
    )
    if loss_type == "rloo":  # whose rewards TRL keeps in float32
        assert (ours - theirs).norm() < 1e-6 * theirs.norm()
    else:
        assert close(ours, theirs)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("loss_type", OF_GRPO)
def test_trl_aggregates_its_penalty_as_the_table_says(loss_type, parts, tmp_path, monkeypatch):
    """Where all rewards are equal, the loss of TRL is its penalty alone."""
    monkeypatch.setattr(micro, "reward", lambda completion_ids, **_: [1.0] * len(completion_ids))
    built = build("k3_loss", tmp_path, loss_type, parts, True)
    lengths = torch.tensor([len(response) for response in DRAWN])
    share = StepShare(parts, lengths.sum().item(), micro.LENGTH)
    for part in split(built):
        ids = torch.cat([part["prompt_ids"], part["completion_ids"]], 1)
        seen = torch.cat([part["prompt_mask"], part["completion_mask"]], 1)
        mask = part["completion_mask"].bool()
        logp, ref_logp = (
            plain_pass(built, model, ids, seen, mask.shape[1])[0]
            for model in (built.model, built.ref_model)
        )
        terms = k3(logp, ref_logp).masked_fill(~mask, 0)
        expected = micro.BETA * LOSS_TYPES[loss_type].aggregate(terms, mask, share)
        assert built.compute_loss(built.model, part).item() == pytest.approx(
            expected.item(), rel=1e-12
        )


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_what_the_table_says_of_splitting_is_so_in_trl(loss_type, tmp_path):
    """This is what tells bnpo from dapo."""
    whole, split = (
        step_gradient(
            build("k3_loss" if loss_type != "rloo" else "k1_reward", tmp_path / str(parts),
                  loss_type, parts, True), loss_type)
        for parts in PARTS
    )  # fmt: skip
    same = (whole - split).norm() < 1e-6 * whole.norm()
    assert same == (not LOSS_TYPES[loss_type].depends_on_split)
    if not same:
        assert (whole - split).norm() > 1e-2 * whole.norm()


@pytest.mark.parametrize("loss_type", OF_GRPO)
def test_the_words_are_those_of_what_is_done(loss_type, tmp_path):
    """They name a divisor exactly as the properties have it, and a warning follows."""
    kind = LOSS_TYPES[loss_type]
    assert ("each response" in kind.words) == kind.averages_responses
    assert ("each micro-batch" in kind.words) == kind.depends_on_split
    for parts in PARTS:
        built = build("k3_loss", tmp_path / str(parts), loss_type, parts, False)
        assert built.objective().endswith(kind.words)
        said = " ".join(loss_type_warnings(built.args))
        assert ("another objective" in said) == kind.averages_responses
        assert ("how a batch is split" in said) == (kind.depends_on_split and parts > 1)


def test_an_unknown_type_of_loss_is_refused_when_the_trainer_is_built(tmp_path):
    with pytest.raises(ValueError, match="args.loss_type='ppo': unknown to this trainer"):
        build("k3_loss", tmp_path, "ppo", 1, False)
