"""Compute the clothes-based adversarial loss in two processes: clothes_ranks.py FOLDER. Saves FOLDER/RANK.pth."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forked import run_forked

from fastamp.modeling.losses.clothes import ClothesAdversarialLoss
from fastamp.utils import comm

OWNERS = np.repeat(np.arange(3), 2)
MEMORIES = ("none", "mean", "last")


def three_passes(memory: str) -> dict[str, Any]:
    """Return the losses, the gradients of the features, and the buffers after three passes over this rank's images."""
    generator = torch.Generator().manual_seed(0)
    loss = ClothesAdversarialLoss(num_clothes=6, feature_dim=4, memory=memory, lr=0.1)
    loss.set_training_columns(OWNERS, {"clothes": np.arange(6)})
    if memory == "none":
        loss.weight.copy_(torch.randn(6, 4, generator=generator))
    share, losses, gradients = slice(*comm.shard_range(8)), [], []
    for _ in range(3):
        features = torch.randn(8, 4, generator=generator)[share].requires_grad_()
        clothes = torch.randint(6, (8,), generator=generator)[share]
        value = loss({"features": features, "clothes": clothes}, torch.tensor(OWNERS)[clothes])
        value.backward()
        losses.append(value.item())
        gradients.append(features.grad)
    return {"losses": losses, "gradients": gradients, "buffers": dict(loss.named_buffers())}


def main(folder: Path) -> None:
    torch.save({memory: three_passes(memory) for memory in MEMORIES}, folder / f"{comm.get_rank()}.pth")


if __name__ == "__main__":
    run_forked(main, 2, Path(sys.argv[1]), Path(sys.argv[1]))
