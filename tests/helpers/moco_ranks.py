"""Train MoCo for four steps in one or several processes: moco_ranks.py FOLDER PROCESSES KEY VALUE ..

The global batches do not depend on the number of processes; the last image of the third batch overflows. Each process
writes the tensors of the model before training and after each step to FOLDER/rank<RANK>.pth.
"""

import sys
from pathlib import Path

import tiny
import torch

from fastamp.amp import PrecisionPolicy
from fastamp.engine import HookBase, SimpleTrainer, launch
from fastamp.modeling import build_model
from fastamp.solver import build_optimizer
from fastamp.utils import comm

BATCH = 8


class Record(HookBase):
    """Hook that records the tensors of the model after each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def after_step(self) -> None:
        self.steps.append({name: value.cpu().clone() for name, value in self.trainer.model.state_dict().items()})


def batches() -> list[dict[str, torch.Tensor]]:
    """Create this process's part of each of the four batches."""
    generator, share = torch.Generator().manual_seed(0), slice(*comm.shard_range(BATCH))
    whole = [torch.randint(256, (BATCH, 3, 32, 16), generator=generator).float() for _ in range(4)]
    whole[2][-1] = float("inf")
    targets = torch.arange(BATCH) // 2
    return [{"images": images[share], "targets": (targets + step)[share] % 4} for step, images in enumerate(whole)]


def main(folder: str, opts: list[str]) -> None:
    torch.manual_seed(0)
    cfg = tiny.tiny_config(Path(folder), "MODEL.META_ARCHITECTURE", "MoCo", "MODEL.HEADS.NUM_CLASSES", "4", *opts)
    model, record = build_model(cfg), Record()
    trainer = SimpleTrainer(
        model, batches(), [build_optimizer(cfg, model)], policy=PrecisionPolicy("cpu", torch.float32, "test")
    )
    trainer.register_hooks([record])
    record.after_step()
    trainer.train(0, 1, 4)
    assert trainer.step.skipped_total == 1
    torch.save(record.steps, Path(folder) / f"rank{comm.get_rank()}.pth")


if __name__ == "__main__":
    launch(main, int(sys.argv[2]), args=(sys.argv[1], sys.argv[3:]))
