"""Train the two-stem ResNet in two processes, of which the second one has visible images only; save the gradients."""

import sys
from pathlib import Path

import every_backbone
import torch
from forked import run_forked

from fastamp.modeling import build_model
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError

MODALITIES = ([0, 1, 0, 1], [0, 0, 0, 0])


def config(norm: str):
    """Build the config with this normalization."""
    return every_backbone.config("two_stem_resnet 18x", "MODEL.BACKBONE.NORM", norm)


def main(folder: Path) -> None:
    """Save the gradients of two steps on this rank, and check that synchronized normalization is refused."""
    rank = comm.get_rank()
    torch.manual_seed(0)
    model = build_model(config("BN")).train()
    parallel = comm.data_parallel(model)
    torch.manual_seed(1 + rank)
    for _ in range(2):
        model.zero_grad()
        batch = {
            "images": torch.randint(256, (4, 3, *every_backbone.SIZE)),
            "targets": torch.arange(4) // 2,
            "modality": torch.tensor(MODALITIES[rank]),
        }
        sum(parallel(batch).values()).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    torch.save(gradients, folder / f"{rank}.pth")
    try:
        build_model(config("SyncBN"))
    except ConfigError as error:
        (folder / f"{rank}.txt").write_text(str(error))


if __name__ == "__main__":
    run_forked(main, 2, Path(sys.argv[1]), Path(sys.argv[1]))
