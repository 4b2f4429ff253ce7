"""Train with ``comm.data_parallel`` and with DDP's defaults in two processes, and save the states of both ranks."""

import sys
from pathlib import Path

import tiny
import torch
from forked import run_forked
from torch.nn.parallel import DistributedDataParallel

from fastamp.amp import LossScaler, OptimizationStep, PrecisionPolicy
from fastamp.config import read_config
from fastamp.modeling import build_model
from fastamp.utils import comm

STEPS, IMAGES = 4, 8


def train(folder: Path, kind: str) -> None:
    """Train the tiny model and save its state on this rank as ``kind_RANK.pth``."""
    torch.manual_seed(0)
    cfg = read_config("", tiny.tiny_options("unused", "MODEL.HEADS.NUM_CLASSES", "4"))
    model = build_model(cfg)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    step = OptimizationStep(model, [optimizer], scaler=LossScaler())
    parallel = comm.data_parallel(model) if kind == "ours" else DistributedDataParallel(model)
    policy = PrecisionPolicy("cpu", torch.bfloat16)
    torch.manual_seed(1 + comm.get_rank())
    for number in range(STEPS):
        step.zero_grad()
        for last in (False, True):
            images = torch.randint(256, (IMAGES, 3, 64, 32)).float()
            if number == 2 and comm.get_rank() == 1:
                images[0] = torch.inf  # this step is skipped on both ranks
            batch = {"images": images, "targets": torch.arange(IMAGES) // 2}
            if last:
                with policy.autocast():
                    losses = parallel(batch)
                step.scale(losses, 0.5).backward()
            else:
                with comm.no_sync(parallel):
                    with policy.autocast():
                        losses = parallel(batch)
                    step.scale(losses, 0.5).backward()
        assert step.finish().ok == (number != 2)
    torch.save(model.state_dict(), folder / f"{kind}_{comm.get_rank()}.pth")


def main(folder: Path) -> None:
    """Train twice on this rank."""
    for kind in ("ours", "default"):
        train(folder, kind)


if __name__ == "__main__":
    run_forked(main, 2, Path(sys.argv[1]), Path(sys.argv[1]))
