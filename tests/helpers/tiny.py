"""Backbone with two convolutions, and the smallest demo set, for tests of training and evaluation."""

from pathlib import Path

import torch
from torch import nn

from fastamp.config import CfgNode, get_cfg
from fastamp.demo import DEMO_VERSION, generate_demo
from fastamp.engine import DefaultTrainer, HookBase
from fastamp.modeling import BACKBONE_REGISTRY

WIDTH = 16


@BACKBONE_REGISTRY.register()
def build_tiny_backbone(cfg: CfgNode) -> nn.Module:
    """Build a backbone (B, C, H, W) -> (B, 16, H/8, W/8)."""
    net = nn.Sequential(
        nn.Conv2d(cfg.INPUT.CHANNELS, WIDTH, 5, stride=4, padding=2, bias=False),
        nn.BatchNorm2d(WIDTH),
        nn.ReLU(),
        nn.Dropout(0.1),  # draws from the global generator, whose state a resume must restore
        nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(WIDTH),
        nn.ReLU(),
    )
    net.feature_dim = WIDTH
    return net


@BACKBONE_REGISTRY.register()
def build_plain_backbone(cfg: CfgNode) -> nn.Module:
    """Build the tiny backbone without normalization and dropout, so that features are independent of other images."""
    return nn.Sequential(
        nn.Conv2d(cfg.INPUT.CHANNELS, WIDTH, 5, stride=4, padding=2),
        nn.ReLU(),
        nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1),
        nn.ReLU(),
    )


PLAIN = (
    "MODEL.BACKBONE.NAME", "build_plain_backbone", "MODEL.HEADS.WITH_BNNECK", "False",
    "MODEL.LOSSES.NAME", "CrossEntropyLoss", "SOLVER.OPT", "SGD", "SOLVER.WARMUP_ITERS", "0",
)  # fmt: skip
"""Options with which the gradient of a batch is the mean of the gradients of its images."""


def make_demo(root: Path) -> Path:
    """Generate a demo set with 16 training and 4 test identities in the data root ``root``."""
    folder = root / f"fastamp-demo-v{DEMO_VERSION}"
    generate_demo(
        folder,
        train_identities=16,
        test_identities=4,
        images_per_identity=6,
        distractors=6,
        cameras=3,
        image_size=(64, 32),
        workers=1,
    )
    return folder


def tiny_options(output_dir: Path, *opts: str) -> list[str]:
    """List KEY VALUE pairs for training the tiny backbone on the demo set in seconds, followed by ``opts``."""
    return [
            "MODEL.DEVICE", "cpu",
            "MODEL.BACKBONE.NAME", "build_tiny_backbone",
            "MODEL.BACKBONE.FEAT_DIM", str(WIDTH),
            "MODEL.HEADS.WITH_BNNECK", "True",
            "MODEL.LOSSES.NAME", "('CrossEntropyLoss', 'TripletLoss')",
            "MODEL.LOSSES.TRI.HARD_MINING", "True",
            "INPUT.SIZE_TRAIN", "(64, 32)",
            "INPUT.SIZE_TEST", "(64, 32)",
            "INPUT.FLIP.ENABLED", "True",
            "INPUT.PADDING.ENABLED", "True",
            "INPUT.PADDING.SIZE", "4",
            "INPUT.REA.ENABLED", "True",
            "DATASETS.NAMES", "Demo",
            "DATASETS.TESTS", "Demo",
            "DATALOADER.SAMPLER_TRAIN", "NaiveIdentitySampler",
            "DATALOADER.NUM_WORKERS", "0",
            "SOLVER.IMS_PER_BATCH", "16",
            "SOLVER.MAX_EPOCH", "4",
            "SOLVER.STEPS", "(2,)",
            "SOLVER.WARMUP_ITERS", "3",
            "SOLVER.BASE_LR", "1e-3",
            "SOLVER.CHECKPOINT_PERIOD", "1",
            "TEST.EVAL_PERIOD", "2",
            "LOG_PERIOD", "2",
            "OUTPUT_DIR", str(output_dir),
            *opts,
        ]  # fmt: skip


def tiny_config(output_dir: Path, *opts: str) -> CfgNode:
    """Build the config of ``tiny_options``."""
    cfg = get_cfg()
    cfg.merge_from_list(tiny_options(output_dir, *opts))
    return cfg


def train(output_dir: Path, *opts: str) -> None:
    """Train the tiny config for one epoch."""
    DefaultTrainer(tiny_config(output_dir, "SOLVER.MAX_EPOCH", "1", *opts)).train()


def weights(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of the model from a checkpoint."""
    return torch.load(path, weights_only=True)["model"]


def trainer_of(output_dir: Path, *opts: str) -> DefaultTrainer:
    """Build the trainer of the tiny config, which continues if the folder exists."""
    torch.manual_seed(0)
    trainer = DefaultTrainer(tiny_config(output_dir, *opts))
    trainer.resume_or_load(resume=output_dir.exists())
    return trainer


class Stopped(Exception):
    """Raised to simulate a killed process: no checkpoint is saved after it."""


class StopAt(HookBase):
    """Raise ``Stopped`` before an iteration."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def before_step(self) -> None:
        if self.trainer.iter == self.iteration:
            raise Stopped
