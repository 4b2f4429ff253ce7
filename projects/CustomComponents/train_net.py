#!/usr/bin/env python
"""Train with a custom backbone, loss, config key and hook."""

import argparse
import sys

from torch import Tensor, nn

from fastamp.amp import force_fp32
from fastamp.config import CfgNode, get_cfg
from fastamp.engine import DefaultTrainer, HookBase, default_argument_parser, default_setup, launch, run_command_line
from fastamp.modeling import BACKBONE_REGISTRY, LOSS_REGISTRY


@BACKBONE_REGISTRY.register()
def build_patch_backbone(cfg: CfgNode):  # MODEL.BACKBONE.NAME: (B, 3, H, W) -> (B, FEAT_DIM, H / 16, W / 16)
    width = cfg.MODEL.BACKBONE.FEAT_DIM
    return nn.Sequential(nn.Conv2d(3, width, 16, 16), nn.BatchNorm2d(width), nn.GELU(), nn.Conv2d(width, width, 1))


@LOSS_REGISTRY.register()
class FeatureNorm(nn.Module):  # MODEL.LOSSES.NAME: penalizes the distance of features from the unit sphere
    loss_name = "loss_norm"

    def __init__(self, *, scale: float):
        super().__init__()
        self.scale = scale

    @classmethod
    def from_config(cls, cfg: CfgNode):
        return cls(scale=cfg.MODEL.LOSSES.FEATURE_NORM.SCALE)

    @force_fp32
    def forward(self, outputs: dict[str, Tensor], targets: Tensor):
        return self.scale * (outputs["features"].norm(dim=1) - 1).square().mean()


class PrintSteps(HookBase):
    def after_epoch(self):
        print(f"epoch {self.trainer.epoch + 1}: {self.trainer.steps_taken} optimizer steps taken")


def main(args: argparse.Namespace):
    cfg = get_cfg()
    cfg.define("MODEL.LOSSES.FEATURE_NORM.SCALE", 0.01, "Feature norm loss: loss weight.")
    if args.config_file:
        cfg.merge_from_file(args.config_file)
    cfg.merge_from_list(args.opts)
    default_setup(cfg, args)
    if args.eval_only:
        return DefaultTrainer.test_weights(cfg)
    trainer = DefaultTrainer(cfg)
    trainer.register_hooks([PrintSteps()])
    trainer.resume_or_load(resume=args.resume)
    return trainer.train()


if __name__ == "__main__":
    args = default_argument_parser().parse_args()
    processes = (args.num_gpus, args.num_machines, args.machine_rank, args.dist_url)
    sys.exit(run_command_line(lambda: launch(main, *processes, args=(args,))))
