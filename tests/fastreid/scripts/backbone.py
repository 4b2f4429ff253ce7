"""Custom backbone and head: registered functions and classes built from the config."""

import torch
from fastreid.config import configurable, get_cfg
from fastreid.engine import DefaultTrainer, default_argument_parser, default_setup, launch
from fastreid.layers import any_softmax, get_norm
from fastreid.layers.weight_init import weights_init_kaiming
from fastreid.modeling.backbones import BACKBONE_REGISTRY
from fastreid.modeling.heads.build import REID_HEADS_REGISTRY
from fastreid.modeling.meta_arch import META_ARCH_REGISTRY, Baseline
from torch import nn


class Patches(nn.Module):
    def __init__(self, width, norm):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 8, 8)
        self.bn = get_norm(norm, width)
        self.relu = nn.ReLU()
        self.apply(weights_init_kaiming)

    def forward(self, x):
        return self.relu(self.bn(self.conv(x)))


@BACKBONE_REGISTRY.register()
def build_patches_backbone(cfg):
    return Patches(cfg.MODEL.BACKBONE.FEAT_DIM, cfg.MODEL.BACKBONE.NORM)


@REID_HEADS_REGISTRY.register()
class SimpleHead(nn.Module):
    @configurable
    def __init__(self, *, feat_dim, num_classes, cls_type, scale, margin):
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.weight = nn.Parameter(torch.randn(num_classes, feat_dim) * 0.01)
        self.cls_layer = getattr(any_softmax, cls_type)(num_classes, scale, margin)

    @classmethod
    def from_config(cls, cfg):
        return {
            "feat_dim": cfg.MODEL.BACKBONE.FEAT_DIM,
            "num_classes": cfg.MODEL.HEADS.NUM_CLASSES,
            "cls_type": cfg.MODEL.HEADS.CLS_LAYER,
            "scale": cfg.MODEL.HEADS.SCALE,
            "margin": cfg.MODEL.HEADS.MARGIN,
        }

    def forward(self, features, targets=None):
        feat = self.pool(features).flatten(1).float()
        if not self.training:
            return feat
        logits = torch.nn.functional.linear(feat, self.weight)
        return {
            "cls_outputs": self.cls_layer(logits.clone(), targets),
            "pred_class_logits": logits.mul(self.cls_layer.s),
            "features": feat,
        }


@META_ARCH_REGISTRY.register()
class ScaledBaseline(Baseline):
    def preprocess_image(self, batched_inputs):
        images = super().preprocess_image(batched_inputs)
        return images * 0.5

    def losses(self, outputs, gt_labels):
        losses = super().losses(outputs, gt_labels)
        losses["loss_size"] = 1e-3 * outputs["features"].float().square().mean()
        return losses


def main(args):
    cfg = get_cfg()
    cfg.merge_from_file(args.config_file)
    cfg.merge_from_list(args.opts)
    cfg.MODEL.BACKBONE.NAME = "build_patches_backbone"
    cfg.MODEL.BACKBONE.FEAT_DIM = 24
    cfg.MODEL.HEADS.NAME = "SimpleHead"
    cfg.MODEL.META_ARCHITECTURE = "ScaledBaseline"
    cfg.freeze()
    default_setup(cfg, args)
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=args.resume)
    return trainer.train()


if __name__ == "__main__":
    args = default_argument_parser().parse_args()
    launch(main, args.num_gpus, args.num_machines, args.machine_rank, args.dist_url, args=(args,))
