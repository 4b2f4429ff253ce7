"""Train variants of a config, to compare one process with several processes: same_result.py FOLDER

Run it under torchrun, or call ``main`` in a single process. Training is in float64 with batch norm and dropout in
evaluation mode, so that rounding and batch statistics do not hide differences. The parameters after each step are saved
to FOLDER/<variant>/steps.pth, and the gradients of each loss to FOLDER/gradients.pth.
"""

import sys
from pathlib import Path

import moco_ranks
import plain_train_net
import tiny
import torch
from ranks import Fault, RecordSteps
from torch import nn

from fastamp.config import get_cfg, read_config
from fastamp.engine import DefaultTrainer, HookBase, default_setup, launch
from fastamp.modeling import build_losses, build_model
from fastamp.modeling.losses.build import LOSS_REGISTRY
from fastamp.modeling.losses.compute import compute_losses
from fastamp.utils import comm
from fastamp.utils.errors import UserError

PAIRS = ("TripletLoss", "CircleLoss", "Cosface", "SupConLoss", "pml/MultiSimilarityLoss")
SGD = ("SOLVER.OPT", "SGD", "SOLVER.AMP", "off", "SOLVER.BASE_LR", "0.002", "MODEL.LOSSES.CE.EPSILON", "0.1")
GATHERED = (*SGD, "MODEL.LOSSES.NAME", str(("CrossEntropyLoss", "CenterLoss", *PAIRS)), "MODEL.LOSSES.GATHER", "True")
IN_FLOAT64 = {
    "gathered": GATHERED,  # 24 steps, two evaluations
    # Soft mining, a loss with parameters, accumulation, and layers that are frozen at the start.
    "soft": (
        *GATHERED,
        *("MODEL.LOSSES.NAME", "('CrossEntropyLoss', 'TripletLoss', 'pml/ProxyAnchorLoss')"),
        *("MODEL.LOSSES.TRI.HARD_MINING", "False", "MODEL.LOSSES.TRI.MARGIN", "0.0"),
        *("SOLVER.ACCUM_STEPS", "2", "SOLVER.IMS_PER_BATCH", "8", "SOLVER.MAX_EPOCH", "1"),
        *("MODEL.FREEZE_LAYERS", "backbone.0", "SOLVER.FREEZE_ITERS", "2"),
    ),
}
"""Variants in which one process and two processes take the same steps."""
ONE_EPOCH = ("SOLVER.MAX_EPOCH", "1")
AMONG_TWO = {
    "local": ("", (*GATHERED, "MODEL.LOSSES.GATHER", "False", *ONE_EPOCH)),
    "skipped": ("infinite loss on rank 1", (*tiny.PLAIN, "SOLVER.AMP", "off", *ONE_EPOCH)),
    "preflight": ("", ("SOLVER.AMP", "bf16", "MODEL.LOSSES.GATHER", "True", *ONE_EPOCH)),
    "no preflight": (
        "",
        ("SOLVER.AMP", "bf16", "MODEL.LOSSES.GATHER", "True", "SOLVER.AMP.PREFLIGHT", "off", *ONE_EPOCH),
    ),
    "unreached": ("", ("MODEL.LOSSES.NAME", "TripletLoss", *ONE_EPOCH)),
    "broken": ("infinite images on rank 1 from the first on", ("SOLVER.AMP", "bf16", *ONE_EPOCH)),
}
"""Variants for several processes only, with the fault to inject."""
OPEN_LOOP = ("MODEL.META_ARCHITECTURE", "MoCo", "MODEL.QUEUE_SIZE", "40", *ONE_EPOCH)
MOCO = (*tiny.PLAIN, "MODEL.QUEUE_SIZE", "20", "MODEL.MOCO.MOMENTUM", "0.5")

IMAGES, CLASSES, WIDTH = 8, 4, tiny.WIDTH
LOSSES = {
    **{name: ("MODEL.LOSSES.NAME", name) for name in LOSS_REGISTRY if name != "ClothesAdversarialLoss"},
    **{name: ("MODEL.LOSSES.NAME", name) for name in ("pml/MultiSimilarityLoss", "pml/ProxyAnchorLoss")},
    "soft triplet": ("MODEL.LOSSES.NAME", "TripletLoss", "MODEL.LOSSES.TRI.HARD_MINING", "False"),
    "soft margin": ("MODEL.LOSSES.NAME", "TripletLoss", "MODEL.LOSSES.TRI.MARGIN", "0.0"),
    "normalized": ("MODEL.LOSSES.NAME", "TripletLoss", "MODEL.LOSSES.TRI.NORM_FEAT", "True"),
    "adaptive smoothing": ("MODEL.LOSSES.NAME", "CrossEntropyLoss", "MODEL.LOSSES.CE.EPSILON", "-1.0"),
}
"""All losses and their variants."""


class StillTrainer(DefaultTrainer):
    """Trainer in float64, with batch norm and dropout in evaluation mode."""

    @classmethod
    def build_model(cls, cfg):
        return super().build_model(cfg).double()

    def build_hooks(self):
        return [Still(), *super().build_hooks()]


class Still(HookBase):
    """Hook that sets batch norm and dropout to evaluation mode before training."""

    def before_train(self) -> None:
        still(self.trainer.model)


def still(model: nn.Module) -> None:
    """Set batch norm and dropout to evaluation mode."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.Dropout):
            module.eval()


def train(kind: type[DefaultTrainer], folder: Path, options: tuple[str, ...], fault: str = "") -> None:
    """Train, and write the message of a ``UserError`` to ``error<RANK>.txt``."""
    cfg = tiny.tiny_config(folder, *options)
    default_setup(cfg)
    trainer = kind(cfg)
    trainer.register_hooks([RecordSteps(folder)])
    if fault:
        trainer.trainer.register_hooks([Fault(fault)])
    try:
        trainer.train()
    except UserError as error:
        (folder / f"error{comm.get_rank()}.txt").write_text(str(error))


def loss_gradients(name: str, *, gather: bool) -> dict[str, torch.Tensor]:
    """Compute the gradients of a loss for this process's part of a batch, averaged over the processes."""
    generator = torch.Generator().manual_seed(0)
    cfg = read_config("", [
        "MODEL.HEADS.NUM_CLASSES", str(CLASSES), "MODEL.BACKBONE.FEAT_DIM", str(WIDTH), *LOSSES[name],
    ])  # fmt: skip
    torch.manual_seed(0)
    losses = build_losses(cfg).double()
    features = torch.randn(IMAGES, WIDTH, generator=generator, dtype=torch.float64)
    logits = torch.randn(IMAGES, CLASSES, generator=generator, dtype=torch.float64)
    targets = torch.tensor([0, 1, 0, 2, 1, 3, 2, 0])
    # Logits so large that the cross entropy is exactly 0, for three of four images in one half of the batch.
    logits[:3] = 1e3 * torch.eye(CLASSES, dtype=torch.float64)[targets[:3]]
    share = slice(*comm.shard_range(IMAGES))
    outputs = {"features": features[share], "cls_outputs": logits[share], "pred_class_logits": logits[share]}
    outputs = {key: value.requires_grad_() for key, value in outputs.items()}
    # As for a head with several weighted outputs.
    several = [(0.75, outputs), (0.25, outputs)]
    sum(compute_losses(losses, several, targets[share], gather=gather).values()).backward()
    found = {
        key: comm.gather_rows(value.grad) / comm.get_world_size()
        for key, value in outputs.items()
        if value.grad is not None
    }
    weights = {key: p.grad for key, p in losses.named_parameters()}
    return found | {key: comm.all_reduce_sum(grad) / comm.get_world_size() for key, grad in weights.items()}


def mgn_gradients() -> dict[str, torch.Tensor]:
    """Compute the gradients of the parameters of a small MGN, averaged over the processes."""
    losses = str(("CrossEntropyLoss", *PAIRS))
    cfg = get_cfg()
    options = ["MODEL.META_ARCHITECTURE", "MGN", "MODEL.DEVICE", "cpu", "MODEL.BACKBONE.PRETRAIN", "False"]
    options += ["MODEL.BACKBONE.DEPTH", "18x", "MODEL.BACKBONE.FEAT_DIM", "512", "MODEL.HEADS.EMBEDDING_DIM", "8"]
    options += ["MODEL.HEADS.NUM_CLASSES", str(CLASSES), "MODEL.LOSSES.NAME", losses, "MODEL.LOSSES.GATHER", "True"]
    cfg.merge_from_list(options)
    torch.manual_seed(0)
    model = build_model(cfg).double().train()
    still(model)
    share = slice(*comm.shard_range(IMAGES))
    images = torch.randint(256, (IMAGES, 3, 96, 32), generator=torch.Generator().manual_seed(0))
    targets = torch.arange(IMAGES) % CLASSES
    sum(model({"images": images[share], "targets": targets[share]}).values()).backward()
    return {name: comm.all_reduce_sum(p.grad) / comm.get_world_size() for name, p in model.named_parameters()}


def main(folder: str) -> None:
    for name, options in IN_FLOAT64.items():
        train(StillTrainer, Path(folder) / name, options)
    if comm.get_world_size() > 1:
        for name, (fault, options) in AMONG_TWO.items():
            kind = StillTrainer if name == "local" else DefaultTrainer
            train(kind, Path(folder) / name, options, fault)
        train(DefaultTrainer, Path(folder) / "hooks", OPEN_LOOP)
        cfg = tiny.tiny_config(Path(folder) / "open_loop", *OPEN_LOOP)
        default_setup(cfg)
        plain_train_net.train(cfg, resume=False)
    (Path(folder) / "moco").mkdir(parents=True, exist_ok=True)
    moco_ranks.main(f"{folder}/moco", MOCO)
    gradients = {
        which: {name: loss_gradients(name, gather=gather) for name in LOSSES}
        for which, gather in (("gathered", True), ("local", False))
    }
    gradients["MGN"] = mgn_gradients()
    if comm.is_main_process():
        torch.save(gradients, Path(folder) / "gradients.pth")


if __name__ == "__main__":
    launch(main, args=(sys.argv[1],))
