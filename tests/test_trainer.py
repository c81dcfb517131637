"""The trainers' own gradient against the lab's, and against that of TRL's stock trainers."""

import itertools
from dataclasses import replace

import micro
import pytest
import torch
from micro import BETA, DRAWN, PROMPTS, STOCK
from trl import GRPOTrainer, RLOOTrainer

from kl_comedy.lab.gradients import expected_gradient
from kl_comedy.theory.config import CHOICES, KLConfig
from kl_comedy.trainers.capture import KEPT_VOCABULARY
from kl_comedy.trainers.objective import stock_trainer

pytestmark = pytest.mark.usefixtures("exact")

GROUND = (
    "TRL {what} differs from what kl_comedy.trainers was written against (1.16): read its "
    "`_generate_and_score_completions` and `_compute_loss` again"
)


def allowed(**fixed):
    """Every configuration with these fields, but for importance weights unless they are asked."""
    choices = CHOICES | {"importance": ("none",)} | {k: (v,) for k, v in fixed.items()}
    for values in itertools.product(*choices.values()):
        try:
            yield KLConfig(**dict(zip(choices, values, strict=True)), beta=BETA)
        except ValueError:
            continue


EVERY = [kl for kl in allowed() if kl.active]
WEIGHED = [  # one of each kind: what a weight multiplies does not depend on the estimator
    KLConfig(estimator, placement, BETA, credit, weight)
    for weight in ("token", "sequence")
    for estimator, placement, credit in (
        ("k1", "reward", "sequence"), ("k3", "reward", "token"), ("k3", "loss", "sequence"),
        ("k3", "both", "to_go"), ("exact", "both", "sequence"))
]  # fmt: skip


def scales(kind, kl):
    """Of the reward's gradient and of the penalty's: GRPO's mean holds the response itself."""
    own = 0.5 if kind == "grpo" else 1.0
    in_return = kl.placement in ("reward", "both") and kl.credit != "token"
    return own, own if in_return else 1.0


def distance(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


# The proof: the expectation over all groups of responses is the lab's


@pytest.mark.parametrize("kind", ["rloo", "grpo"])
@pytest.mark.parametrize("kl", EVERY, ids=str)
def test_the_expected_gradient_is_that_of_the_lab(kl, kind, tmp_path):
    built = micro.trainer(kind, kl, tmp_path)
    found = micro.expectation(built, micro.probabilities(built.model).detach())
    policy, ref = micro.tree(built.model), micro.tree(built.ref_model)
    penalty = micro.chain(built.model, expected_gradient(policy, ref, kl))
    reward, scale = scales(kind, kl)
    expected = scale * BETA * penalty - reward * micro.reward_gradient(built.model)
    assert distance(found, expected) < 1e-12, GROUND.format(what="of this version")


@pytest.mark.parametrize("kl", WEIGHED, ids=str)
def test_off_policy_the_weights_are_those_of_the_lab(kl, tmp_path):
    """Two optimisation steps a batch: the penalty at the second, less TRL's own loss there."""
    settings = {"num_iterations": 2}
    built = micro.trainer("rloo", kl, tmp_path, **settings)
    behaviour, weights = micro.tree(built.model), micro.probabilities(built.model).detach()
    moved = micro.model(2).state_dict()
    found = micro.expectation(built, weights, lambda: built.model.load_state_dict(moved))
    plain = micro.trainer("rloo", KLConfig(placement="none", beta=0), tmp_path / "b", **settings)
    plain._get_per_token_logps_and_entropies = plain_pass.__get__(plain)
    reward = micro.expectation(plain, weights, lambda: plain.model.load_state_dict(moved))
    policies = [micro.tree(m) for m in (built.model, built.ref_model)]
    penalty = expected_gradient(*policies, kl, behaviour=behaviour)
    expected = BETA * micro.chain(built.model, penalty)
    assert distance(found - reward, expected) < 1e-12
    plain = expected_gradient(*policies, replace(kl, importance="none"), behaviour=behaviour)
    assert distance(expected, BETA * micro.chain(built.model, plain)) > 1e-3, "or nothing is shown"


# With TRL's settings: TRL's gradient


def both(name, folder, kind=None, dtype=torch.float64, **settings):
    """Gradients of the stock trainer and of ours on one batch of three padded groups."""
    kl, found = STOCK[name], []
    stock, _, theirs = stock_trainer(kl)
    kind = kind or ("rloo" if stock is RLOOTrainer else "grpo")
    stock = {"rloo": RLOOTrainer, "grpo": GRPOTrainer}[kind]
    common = {"num_generations": 3, "per_device_train_batch_size": 9} | settings
    for trainer_class, extra in ((stock, theirs), (None, {})):
        extra = {k: v for k, v in extra.items() if trainer_class and k != "placement"}
        path = folder / str(trainer_class)
        built = micro.trainer(
            kind, kl, path, trainer_class=trainer_class, dtype=dtype, **common | extra
        )  # fmt: skip
        if dtype == torch.float64 and (trainer_class or not kl.active):
            # TRL's own head computes in float32
            built._get_per_token_logps_and_entropies = plain_pass.__get__(built)
        prompts = [p for p in PROMPTS for _ in range(3)]
        found.append(micro.loss_gradient(built, micro.answer(built, DRAWN, prompts)))
    return found


def plain_pass(self, model, input_ids, attention_mask, logits_to_keep, *_, **__):
    logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
    logp = logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]
    return logp[:, -logits_to_keep:], torch.zeros_like(logp[:, -logits_to_keep:]), None


@pytest.mark.parametrize("name", STOCK)
def test_with_the_settings_of_trl_the_gradient_is_that_of_trl(name, tmp_path):
    theirs, ours = both(name, tmp_path)
    assert distance(ours, theirs) < 1e-12, GROUND.format(what="in float64")


@pytest.mark.parametrize("name", STOCK)
def test_and_so_it_is_through_the_head_that_trl_has(name, tmp_path):
    theirs, ours = both(name, tmp_path, dtype=torch.float32)
    assert distance(ours, theirs) < 1e-5, GROUND.format(what="in float32")


@pytest.mark.parametrize(
    "loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"]
)
@pytest.mark.parametrize("name", ["k3_loss", "corrected"])
def test_the_penalty_is_aggregated_as_trl_aggregates(name, loss_type, tmp_path):
    theirs, ours = both(name, tmp_path, loss_type=loss_type, scale_rewards="group")
    assert distance(ours, theirs) < 1e-12, GROUND.format(what=f"with loss_type={loss_type!r}")


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        ("k1_reward", "rloo", {"normalize_advantages": True}),
        ("k1_reward", "rloo", {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3}),
        ("k3_loss", "grpo", {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3}),
    ],
)
def test_normalised_and_accumulated_it_is_still_that_of_trl(name, kind, settings, tmp_path):
    theirs, ours = both(name, tmp_path, kind, **settings)
    assert distance(ours, theirs) < 1e-6  # TRL keeps rewards and their deviation in float32


def penalised(kl, ref, policy):
    """The reward of the micro model less its penalty, as a user would write it by hand."""

    unpenalised = micro.reward

    def reward(completion_ids, **_):
        plain = unpenalised(completion_ids)
        logp, ref_logp = (table.log_softmax(-1) for table in (policy, ref))
        at = {prefix: i for i, prefix in enumerate(micro.PREFIXES)}
        out = []
        for value, ids in zip(plain, completion_ids, strict=True):
            steps = [(at[tuple(ids[:t])], ids[t]) for t in range(len(ids))]
            total = sum((logp[s] - ref_logp[s]).item() for s in steps)
            out.append(value - kl.beta * total)
        return out

    return reward


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_in_grpo_a_penalty_in_the_reward_is_a_penalised_reward(scale, tmp_path, monkeypatch):
    kl = STOCK["k1_reward"]
    drawn, prompts = DRAWN[:3] * 3, ["ab"] * 9
    settings = {"num_generations": 3, "per_device_train_batch_size": 9, "scale_rewards": scale}
    ours = micro.trainer("grpo", kl, tmp_path / "a", **settings)
    found = micro.loss_gradient(ours, micro.answer(ours, drawn, prompts))
    tables = [micro.table(m).detach() for m in (ours.ref_model, ours.model)]
    monkeypatch.setattr(micro, "reward", penalised(kl, *tables))
    none = STOCK["none"]
    hand = micro.trainer("grpo", none, tmp_path / "b", trainer_class=GRPOTrainer, **settings)
    hand._get_per_token_logps_and_entropies = plain_pass.__get__(hand)
    expected = micro.loss_gradient(hand, micro.answer(hand, drawn, prompts))
    assert distance(found, expected) < 1e-6


# Vocabularies that are not kept whole, rewards that are missing


@pytest.mark.parametrize(("kind", "settings"), [
    ("rloo", {}), ("rloo", {"normalize_advantages": True}),
    ("grpo", {"loss_type": "dapo", "scale_rewards": "group"}),
    ("rloo", {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3})])  # fmt: skip
@pytest.mark.parametrize("kl", [
    KLConfig("k1", "reward", BETA), KLConfig("k3", "both", BETA, "to_go"),
    KLConfig("exact", "loss", BETA), KLConfig("exact", "both", BETA, "to_go"),
    KLConfig("exact", "reward", BETA)], ids=str)  # fmt: skip
def test_a_large_vocabulary_has_the_same_gradient(kl, kind, settings, tmp_path, monkeypatch):
    found = []
    for small in (KEPT_VOCABULARY, 1):
        monkeypatch.setattr("kl_comedy.trainers.capture.KEPT_VOCABULARY", small)
        common = {"num_generations": 3, "per_device_train_batch_size": 9} | settings
        built = micro.trainer(kind, kl, tmp_path / str(small), dtype=torch.float32, **common)
        batch = micro.answer(built, DRAWN, [p for p in PROMPTS for _ in range(3)])
        assert ("kl_ref_logits" in batch) == (small > 1)
        found.append(micro.loss_gradient(built, batch))
    assert distance(*found) < 1e-5 and found[1].norm() > 0.1


@pytest.mark.parametrize("missing", [[1], [1, 4, 5], [0, 1]], ids=str)
@pytest.mark.parametrize("settings", [{}, {"normalize_advantages": True}], ids=str)
def test_responses_without_a_reward_are_left_out_as_trl_leaves_them(
    missing, settings, tmp_path, monkeypatch
):
    whole = micro.reward
    monkeypatch.setattr(micro, "reward", lambda completion_ids, **_: [
        None if i in missing else value for i, value in enumerate(whole(completion_ids))
    ])  # fmt: skip
    theirs, ours = both("k1_reward", tmp_path, **settings)
    assert distance(ours, theirs) < 1e-6
