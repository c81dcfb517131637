"""The trainers in the setups that users have: adapters, several processes, accumulated batches."""

import os
import re
import subprocess
import sys
from pathlib import Path

import micro
import pytest
import torch
import two_processes
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from trl import RLOOConfig

from kl_comedy.policies.policy import BASE_POLICY
from kl_comedy.theory.config import KLConfig
from kl_comedy.trainers.rloo_grpo import KLRLOOTrainer

pytestmark = pytest.mark.usefixtures("exact")

LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 4}
DRAWN = [(1, 2, 0), (0,), (2, 0), (2, 1, 1)]


def adapted(folder, model, peft_config=None, kl=None):
    args = RLOOConfig(
        str(folder / "out"), max_completion_length=3, num_generations=2, bf16=False,
        per_device_train_batch_size=4, report_to="none", max_steps=1, disable_tqdm=True,
        logging_steps=1,
    )  # fmt: skip
    built = KLRLOOTrainer(
        model, micro.reward, args, Dataset.from_dict({"prompt": [micro.PROMPT] * 8}),
        processing_class=micro.tokenizer(), peft_config=peft_config,
        kl=kl or KLConfig("k1", "reward", 0.5),
    )  # fmt: skip
    built.current_gradient_accumulation_steps = 1
    built.model.train()
    return built


def saved(folder):
    model = micro.model(0, torch.float32)
    model.save_pretrained(folder / "reference")
    return type(model).from_pretrained(folder / "reference")


def stir(model):
    """Move every adapter that is trained."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn_like(parameter)


def test_a_new_adapter_has_the_base_model_as_its_reference(tmp_path):
    built = adapted(tmp_path, saved(tmp_path), LoraConfig(**LORA))
    batch = micro.answer(built, DRAWN)
    built.compute_loss(built.model, batch)  # the guard of the first step is on
    assert built._metrics["train"]["kl/k3"][-1] == pytest.approx(0, abs=1e-6)
    stir(built.model)
    moved = micro.answer(built, DRAWN)
    same = batch["ref_per_token_logps"], moved["ref_per_token_logps"]
    assert torch.allclose(*same), "the reference must not move with the adapter"
    built.compute_loss(built.model, moved).backward()
    assert built._metrics["train"]["kl/k3"][-1] > 1e-3
    moving = {n for n, p in built.model.named_parameters() if p.grad is not None}
    assert moving and all("lora" in name for name in moving)


def test_an_adapter_that_is_trained_further_starts_from_itself(tmp_path):
    """Its base model would be the wrong reference."""
    model = get_peft_model(saved(tmp_path), LoraConfig(**LORA))
    stir(model)
    built = adapted(tmp_path, model)
    batch = micro.answer(built, DRAWN)
    built.compute_loss(built.model, batch)
    assert built._metrics["train"]["kl/k3"][-1] == pytest.approx(0, abs=1e-6)


def test_an_adapter_held_against_the_wrong_base_is_seen(tmp_path):
    model = get_peft_model(saved(tmp_path), LoraConfig(**LORA))
    stir(model)
    built = adapted(tmp_path, model)
    del built.model.peft_config["ref"]  # what an older TRL would do
    with pytest.raises(ValueError, match="an adapter's base"):
        built.compute_loss(built.model, micro.answer(built, DRAWN))


@pytest.fixture(scope="module")
def in_two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    here = Path(__file__).parent
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
               "--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
               str(here / "two_processes.py"), str(folder)]  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{here}:{here.parent}"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("kind", two_processes.CASES)
def test_two_processes_have_the_gradient_of_one(kind, in_two_processes, tmp_path):
    """The group of six is split between them, and so are its baseline and its length."""
    found = torch.load(in_two_processes / f"{kind}.pt", weights_only=True)
    expected = two_processes.gradient(kind, tmp_path, 0, 1)
    assert (found - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("kl", [
    KLConfig("k1", "reward", 0.5), KLConfig("k3", "both", 0.5, credit="to_go"),
    KLConfig("exact", "both", 0.5), KLConfig("k2", "loss", 0.5)], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", ["rloo", "grpo"])
def test_accumulated_the_gradient_is_that_of_the_whole_batch(kind, kl, tmp_path):
    """Four rows at once, or one at a time: the group's members are then in different batches."""
    settings = {"num_generations": 4}
    whole = micro.trainer(kind, kl, tmp_path / "a", per_device_train_batch_size=4, **settings)
    expected = micro.loss_gradient(whole, micro.answer(whole, DRAWN))
    parts = micro.trainer(
        kind, kl, tmp_path / "b", per_device_train_batch_size=1, gradient_accumulation_steps=4,
        **settings,
    )  # fmt: skip
    batch, found = micro.answer(parts, DRAWN), 0.0
    for i in range(4):
        row = {name: x[i : i + 1] if getattr(x, "ndim", 0) else x for name, x in batch.items()}
        scale = 4 if kind == "rloo" else 1  # RLOO's loss is divided by the trainer
        found = found + micro.loss_gradient(parts, row) / scale
    assert (found - expected).norm() < 1e-12 * expected.norm()


def test_the_example_of_the_readme_trains(tmp_path, capsys):
    """As it stands there, on the shipped policy and for one step."""
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    code = next(b for b in re.findall("```python\n(.*?)```", readme, re.S) if "KLRLOOTrainer" in b)
    for old, new in (
        ("Qwen/Qwen2.5-0.5B-Instruct", str(BASE_POLICY)),
        ('"out"', f'"{tmp_path}", max_steps=1, bf16=False, report_to="none"'),
        ("What do you want?", "M4,7,9,3,5:"),
        ("max_completion_length=256", "max_completion_length=32"),
    ):
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    exec(code, {})
    assert (
        "sequence reverse KL: exact KL in both, to-go credit, beta 0.05" in capsys.readouterr().out
    )
