"""Train a small ResNet with normalization across ranks that share a device: device_ranks.py FOLDER DEVICE NORM

Trains without a process group, in a group of one process (NCCL on CUDA), and in two processes that share the device
(gloo), in float64 with the same global batches. The model's tensors after each step are saved to
FOLDER/<processes>.pth.
"""

import itertools
import sys
from pathlib import Path

import torch
from forked import run_forked
from moco_ranks import Record

from fastamp.amp import PrecisionPolicy
from fastamp.config import get_cfg
from fastamp.engine import SimpleTrainer
from fastamp.modeling import build_model
from fastamp.solver import build_optimizer
from fastamp.utils import comm

STEPS, IMAGES, CLASSES = 20, 8, 4


def batches(device: str):
    """Yield this process's part of each batch."""
    generator, share = torch.Generator().manual_seed(0), slice(*comm.shard_range(IMAGES))
    targets = torch.arange(IMAGES) % CLASSES
    for _ in itertools.count():
        images = torch.randint(256, (IMAGES, 3, 64, 32), generator=generator)
        yield {"images": images[share].to(device), "targets": targets[share].to(device)}


def main(folder: str, device: str, norm: str, processes: int) -> None:
    if processes == 1:
        comm.is_distributed = lambda: True  # so that collectives are called
    cfg = get_cfg()
    options = ["MODEL.DEVICE", device, "MODEL.BACKBONE.PRETRAIN", "False", "MODEL.BACKBONE.DEPTH", "18x"]
    options += ["MODEL.BACKBONE.FEAT_DIM", "512", "MODEL.BACKBONE.NORM", norm, "MODEL.HEADS.NORM", norm]
    options += ["MODEL.HEADS.WITH_BNNECK", "True", "MODEL.HEADS.NUM_CLASSES", str(CLASSES)]
    options += ["MODEL.LOSSES.NAME", "('CrossEntropyLoss', 'TripletLoss', 'CircleLoss')"]
    options += ["MODEL.LOSSES.GATHER", "True", "SOLVER.OPT", "SGD", "SOLVER.BASE_LR", "0.001"]
    cfg.merge_from_list(options)
    torch.manual_seed(0)
    model = build_model(cfg).double()
    policy = PrecisionPolicy(device, torch.float32, "test")
    trainer, record = SimpleTrainer(model, batches(device), [build_optimizer(cfg, model)], policy=policy), Record()
    trainer.register_hooks([record])
    trainer.train(0, 1, STEPS)
    if comm.is_main_process():
        torch.save(record.steps, Path(folder) / f"{processes}.pth")


if __name__ == "__main__":
    folder, device, norm = sys.argv[1:]
    for processes in (1, 2):
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" and processes == 1 else "gloo"
        run_forked(main, processes, Path(folder), folder, device, norm, processes, backend=backend)
    main(folder, device, norm, 0)
