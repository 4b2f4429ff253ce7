"""Train with compiled models under DDP in two processes: compiled_ranks.py FOLDER

Training is in float64, so that rounding does not hide differences. Rank R saves FOLDER/<variant>_R.pth.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import tiny
import torch
from forked import run_forked
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from fastamp.config import CfgNode
from fastamp.engine import DefaultTrainer, HookBase, default_setup
from fastamp.engine.hooks import compilation
from fastamp.layers import DropPath
from fastamp.modeling import BACKBONE_REGISTRY
from fastamp.utils import comm

# 12 batches; batch norm, dropout, drop path, accumulation, a weight average.
OPTIONS = (
    *("MODEL.BACKBONE.NAME", "build_residual_backbone", "MODEL.BACKBONE.DROP_PATH_RATIO", "0.3"),
    *("SOLVER.AMP", "off", "SOLVER.MAX_EPOCH", "2"),
    *("SOLVER.OPT", "SGD", "SOLVER.BASE_LR", "0.01", "SOLVER.WARMUP_ITERS", "0"),
    *("SOLVER.IMS_PER_BATCH", "16", "SOLVER.ACCUM_STEPS", "2", "SOLVER.EMA.ENABLED", "True"),
    *("SOLVER.CHECKPOINT_PERIOD", "5", "TEST.EVAL_PERIOD", "5"),
)
MODEL = ("MODEL.COMPILE_REGION", "model")
GATHERED = ("MODEL.LOSSES.GATHER", "True")
NOTHING_DROPPED = ("MODEL.BACKBONE.DROP_PATH_RATIO", "0.0")  # inductor's random numbers differ from those of PyTorch
# Variant -> (options, the eager variant that takes the same steps).
COMPILED = {
    "backbone": (("MODEL.COMPILE", "aot_eager"), "eager"),
    "model": (("MODEL.COMPILE", "aot_eager", *MODEL), "eager"),
    "gathered": (("MODEL.COMPILE", "aot_eager", *MODEL, *GATHERED), "eager, gathered"),
    "inductor": (("MODEL.COMPILE", "inductor", *MODEL, *NOTHING_DROPPED), "eager, nothing dropped"),
}
EAGER = {"eager": (), "eager, gathered": GATHERED, "eager, nothing dropped": NOTHING_DROPPED}


class Residual(nn.Module):
    """Convolution that is dropped at random, with a residual connection."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(tiny.WIDTH, tiny.WIDTH, 3, padding=1)
        self.drop_path = DropPath(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop_path(self.conv(x))


@BACKBONE_REGISTRY.register()
def build_residual_backbone(cfg: CfgNode) -> nn.Module:
    """Build the tiny backbone with a residual layer; without dropout if ``DROP_PATH_RATIO`` is 0."""
    net, p = tiny.build_tiny_backbone(cfg), cfg.MODEL.BACKBONE.DROP_PATH_RATIO
    net[3].p = p
    net.append(Residual(p))
    return net


class CountingDDP(DistributedDataParallel):
    """DDP with small buckets, which counts its all-reduces."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, bucket_cap_mb=0.01, **options)
        self.reduced = 0
        self.register_comm_hook(None, self._count)

    def _count(self, state: None, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self.reduced += 1
        return allreduce_hook(None, bucket)


class Float64Trainer(DefaultTrainer):
    """Trainer in float64."""

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        return super().build_model(cfg).double()


class Record(HookBase):
    """Record the tensors of the model, and the number of all-reduces so far, after each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []
        self.reduced: list[int] = []
        self.buckets = 0

    def after_step(self) -> None:
        parallel = self.trainer.parallel_model()
        self.steps.append({name: tensor.clone() for name, tensor in self.trainer.model.state_dict().items()})
        self.reduced.append(parallel.reduced)
        self.buckets = len(parallel.reducer._get_zeros_like_grad_buckets())


def train(folder: Path, name: str, options: tuple[str, ...]) -> None:
    """Train a variant and save the records of this rank."""
    torch.compiler.reset()  # else it may use the graphs of the variant before it
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    cfg = tiny.tiny_config(folder / name, *OPTIONS, *options)
    default_setup(cfg)
    trainer, record = Float64Trainer(cfg), Record()
    trainer.trainer.register_hooks([record])
    trainer.train()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    found = {"steps": record.steps, "reduced": record.reduced, "buckets": record.buckets, "graphs": graphs}
    torch.save(found, folder / f"{name}_{comm.get_rank()}.pth")


def main(folder: Path) -> None:
    compilation.COMPARED = 0  # all steps except for the first are compiled
    comm.DistributedDataParallel = CountingDDP
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 4000  # so that the compiler splits graphs, as for large models
    for name, options in EAGER.items():
        train(folder, name, options)
    for name, (options, _) in COMPILED.items():
        if name != "inductor" or shutil.which(os.environ.get("CXX", "g++")):
            train(folder, name, options)


if __name__ == "__main__":
    run_forked(main, 2, Path(sys.argv[1]), Path(sys.argv[1]))
