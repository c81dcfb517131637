"""A transformer so small that the expectation over all its responses is a sum of a few terms.

Three tokens (the end, a, b) and responses of at most three: fifteen responses. The trainer's own
gradient is computed for every group of two of them and added up with its probability.
"""

import itertools
from collections import defaultdict

import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from trl import GRPOConfig, RLOOConfig

from kl_comedy.auditing.trainer import micro_model as model  # noqa: F401
from kl_comedy.auditing.trainer import micro_tokenizer as tokenizer
from kl_comedy.auditing.trainer import micro_trainer, respond
from kl_comedy.lab.policies import PrefixTreePolicy
from kl_comedy.theory.config import KLConfig
from kl_comedy.trainers.rloo_grpo import KLGRPOTrainer, KLRLOOTrainer

END, V, LENGTH, PROMPT = 0, 3, 3, "ab"
RESPONSES = [r for n in range(1, LENGTH + 1) for r in itertools.product(range(V), repeat=n)
             if END not in r[:-1] and (r[-1] == END or n == LENGTH)]  # fmt: skip
PREFIXES = [p for n in range(LENGTH) for p in itertools.product(range(V), repeat=n)]

BETA = 0.5
PROMPTS = ["ab", "b", "aab"]
DRAWN = [(1, 2, 0), (0,), (2, 0), (2, 1, 1), (1, 1, 0), (1, 0), (0,), (2, 2, 2), (1, 2, 1)]
STOCK = {
    "none": KLConfig(placement="none", beta=0),
    "k1_reward": KLConfig("k1", "reward", BETA),
    "k3_loss": KLConfig("k3", "loss", BETA),
    "corrected": KLConfig("k3", "both", BETA, credit="token", importance="token"),
}


def whole_precision(monkeypatch):
    """Qwen2 normalises in float32 whatever its dtype; here it does so in its own."""

    def forward(self, x):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)

    monkeypatch.setattr(Qwen2RMSNorm, "forward", forward)


def reward(completion_ids, **_):
    """Deterministic, different for most responses, 0 to 1; exact in float32, as TRL keeps it."""
    return [sum((2 + t) * token for t, token in enumerate(ids)) % 8 / 8 for ids in completion_ids]


def trainer(kind, kl, folder, policy_seed=1, dtype=torch.float64, trainer_class=None, **settings):
    """A trainer of the policy `policy_seed` against the reference of seed 0, in `folder`."""
    config, ours = {"rloo": (RLOOConfig, KLRLOOTrainer), "grpo": (GRPOConfig, KLGRPOTrainer)}[kind]
    if kind == "grpo":
        settings = {"loss_type": "luspo", "scale_rewards": "none"} | settings
    settings = {"num_generations": 2, "per_device_train_batch_size": 2,
                "max_completion_length": LENGTH, "logging_steps": 1} | settings  # fmt: skip
    return micro_trainer(
        trainer_class or ours, config, reward, folder, policy_seed, dtype,
        None if trainer_class else kl, **settings,
    )  # fmt: skip


def answer(built, responses, prompts=None):
    """The batch that the trainer makes of these responses, through TRL's own scoring."""
    return respond(built, responses, prompts or [PROMPT] * len(responses))


def take_gradient(module):
    grads = [
        (torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in module.parameters()
    ]
    module.zero_grad()
    return torch.cat(grads)


def loss_gradient(built, batch):
    built.compute_loss(built.model, batch).backward()
    return take_gradient(built.model)


def table(policy):
    """Logits of every prefix, (13, 3); zeros after the end, where nothing is drawn."""
    start = tokenizer()(PROMPT).input_ids
    rows = [torch.zeros(V, dtype=policy.dtype) if END in prefix
            else policy(torch.tensor([start + list(prefix)])).logits[0, -1]
            for prefix in PREFIXES]  # fmt: skip
    return torch.stack(rows)


def tree(policy):
    return PrefixTreePolicy(table(policy).detach(), LENGTH)


def probabilities(policy):
    """Of every response, differentiable in the weights."""
    logp = table(policy).log_softmax(-1)
    at = {prefix: i for i, prefix in enumerate(PREFIXES)}
    return torch.stack([sum(logp[at[r[:t]], r[t]] for t in range(len(r))) for r in RESPONSES]).exp()


def chain(policy, gradient):
    """A gradient in the logits of every prefix as one in the weights."""
    (table(policy) * gradient.detach()).sum().backward()
    return take_gradient(policy)


def reward_gradient(policy):
    values = torch.tensor(reward([list(r) for r in RESPONSES]), dtype=torch.float64)
    (probabilities(policy) @ values).backward()
    return take_gradient(policy)


def expectation(built, weights, update=None):
    """The trainer's gradient, over all groups of two, each with its probability.

    `update`: called between sampling and the loss, to move the policy away from the one that
    drew the responses.
    """
    total, batches = 0.0, defaultdict(float)
    for i, j in itertools.product(range(len(RESPONSES)), repeat=2):
        batches[min(i, j), max(i, j)] += (weights[i] * weights[j]).item()
    made = {pair: answer(built, [RESPONSES[k] for k in pair]) for pair in batches}
    if update:
        update()
    for pair, weight in batches.items():
        total = total + weight * loss_gradient(built, made[pair])
    return total
