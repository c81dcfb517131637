"""Training the base policy: the same to the bit, whether or not it was killed on the way."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kl_comedy.policies import sft
from kl_comedy.policies.policy import new_policy, tokenizer
from kl_comedy.tasks.characters import SPLITS, TASKS, split_size
from kl_comedy.tasks.dataset import problems

NOTEBOOK = Path(__file__).parents[1] / "nbs/experiments/23_base_policy.ipynb"
TOK = tokenizer()


def train(model, first, last, seed=0, optimizer=None):
    optimizer = optimizer or sft.sft_optimizer(model)
    for step in range(first, last):
        batch = sft.sft_batch(TOK, seed, step, 8)
        sft.sft_step(model, optimizer, batch, sft.learning_rate(step, 10, 4e-3))
    return optimizer


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_five_steps_are_the_same_every_time_and_follow_the_seed():
    first, second, other = new_policy(0), new_policy(0), new_policy(0)
    train(first, 0, 5)
    torch.manual_seed(99)
    torch.rand(7)
    train(second, 0, 5)
    train(other, 0, 5, seed=1)
    assert same(first, second) and not same(first, other) and not same(first, new_policy(0))


@pytest.mark.parametrize("cut", [1, 2, 4])
def test_a_checkpoint_goes_on_to_the_same_weights(cut, tmp_path):
    whole, half, resumed = new_policy(0), new_policy(0), new_policy(5)
    train(whole, 0, 5)
    path = tmp_path / "new/state.safetensors"
    sft.save_state(path, half, train(half, 0, cut), cut, {"seed": 0})
    optimizer = sft.sft_optimizer(resumed)
    assert sft.load_state(path, resumed, optimizer, {"seed": 0}) == cut
    assert same(half, resumed)
    train(resumed, cut, 5, optimizer=optimizer)
    assert same(whole, resumed)
    assert [file.name for file in path.parent.iterdir()] == ["state.safetensors"]


def test_a_checkpoint_of_another_recipe_is_refused_and_changes_nothing(tmp_path):
    model, other = new_policy(0), new_policy(1)
    path = tmp_path / "state.safetensors"
    sft.save_state(path, model, train(model, 0, 1), 1, {"seed": 0, "steps": 10})
    with pytest.raises(ValueError, match="under the recipe .*10.*not .*20"):
        sft.load_state(path, other, sft.sft_optimizer(other), {"seed": 0, "steps": 20})
    assert same(other, new_policy(1))


def test_no_checkpoint_is_a_start_from_zero(tmp_path):
    model = new_policy(0)
    assert sft.load_state(tmp_path / "none", model, sft.sft_optimizer(model), {}) == 0
    assert same(model, new_policy(0))


def test_a_step_that_is_not_finite_is_refused_and_updates_nothing():
    model = new_policy(0)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    with pytest.raises(FloatingPointError, match="loss nan"):
        train(model, 0, 1)
    for name, weight in model.named_parameters():
        assert torch.equal(weight.nan_to_num(7), before[name].nan_to_num(7))


def test_batches_hold_whole_demonstrations_of_training_problems_in_the_stated_mixture():
    test = {
        p.prompt
        for name in ("sum", "backward", "wrap", "add", "subtract", "countdown")
        for p in problems(name, "test", split_size(TASKS[name], SPLITS[1]))
    }
    letters = Counter()
    for step in range(12):
        ids, attention, completion = sft.sft_batch(TOK, 1, step, 96)
        assert ids.shape == attention.shape == completion.shape and len(ids) == 96
        assert not (completion & ~attention).any()
        for row, read, answer in zip(ids, attention, completion, strict=True):
            prompt, text = TOK.decode(row[read & ~answer]), TOK.decode(row[answer])
            assert prompt.endswith(":") and text.endswith(".<eos>") and prompt not in test
            letters[prompt[0]] += 1
    for name, share in sft.MIXTURE.items():
        n = 12 * 96
        assert abs(letters[TASKS[name].letter] - n * share) < 4 * (n * share * (1 - share)) ** 0.5


def test_the_loss_is_that_of_transformers():
    model = new_policy(0)
    ids, attention, completion = batch = sft.sft_batch(TOK, 0, 0, 16)
    labels = ids.masked_fill(~completion, -100)
    theirs = model(input_ids=ids, attention_mask=attention.long(), labels=labels).loss.item()
    ours = sft.sft_step(model, sft.sft_optimizer(model), batch, 1e-3)["loss"]
    assert ours == pytest.approx(theirs, rel=1e-5)


# The notebook, killed


def script(folder, **parameters):
    """The code of the notebook as one process, with other parameters."""
    parts = []
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            parts.append("".join(cell["source"]))
            if "parameters" in cell["metadata"].get("tags", []):
                parts += [f"{name} = {value!r}" for name, value in parameters.items()]
    path = folder / "notebook.py"
    path.write_text("\n".join(parts))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    return subprocess.Popen(
        [sys.executable, path],
        env=environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def lines(run_dir):
    path = run_dir / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def test_a_killed_run_ends_like_one_that_was_not(tmp_path):
    tiny = {"steps": 30, "batch_size": 4, "eval_problems": 2, "eval_samples": 1}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    undisturbed = script(tmp_path, run_dir=str(whole), **tiny)
    assert undisturbed.wait(300) == 0
    victim = script(tmp_path, run_dir=str(killed), **tiny)
    deadline = time.monotonic() + 300
    while lines(killed) < 5 and victim.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    os.killpg(victim.pid, signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL and 5 <= lines(killed) < 30
    assert not (killed / "status.json").exists() and not (killed / "policy").exists()
    assert script(tmp_path, run_dir=str(killed), **tiny).wait(300) == 0
    for name in ("metrics.jsonl", "evaluation.csv", "policy/README.md"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
    a, b = (load_file(run / "policy/model.safetensors") for run in (whole, killed))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
