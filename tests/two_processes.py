"""Run by test_setups under torchrun: the gradient of a group whose members are on two processes."""

import os
import sys
from pathlib import Path

import micro
import torch
from torch import distributed

from kl_comedy.theory.config import KLConfig

DRAWN = [(1, 2, 0), (0,), (2, 0), (2, 1, 1), (1, 1, 0), (1, 0)]
CASES = {
    "rloo": KLConfig("k1", "reward", 0.5),
    "grpo": KLConfig("exact", "both", 0.5, credit="to_go"),
}


def gradient(kind, folder, rank, processes):
    own = len(DRAWN) // processes
    built = micro.trainer(
        kind, CASES[kind], folder / kind, num_generations=len(DRAWN),
        per_device_train_batch_size=own, use_cpu=True,
    )  # fmt: skip
    batch = micro.answer(built, DRAWN[rank * own : (rank + 1) * own])
    return micro.loss_gradient(built, batch)


def main(folder):
    rank = int(os.environ["RANK"])
    for kind in CASES:  # before there are process groups, in which only the first one may write
        micro.model(0).save_pretrained(folder / str(rank) / kind / "reference")
    for kind in CASES:
        found = gradient(kind, folder / str(rank), rank, 2)
        distributed.all_reduce(found)
        if rank == 0:
            torch.save(found / 2, folder / f"{kind}.pt")


if __name__ == "__main__":
    import pytest

    micro.whole_precision(pytest.MonkeyPatch())
    main(Path(sys.argv[1]))
