"""FastReID's name of the ResNet for distillation."""

from torch import nn

from fastamp.config import CfgNode
from fastamp.modeling import BACKBONE_REGISTRY
from fastamp.modeling.backbones.build_utils import warn_ignored_options
from fastamp.modeling.backbones.resnet import build_resnet_backbone


@BACKBONE_REGISTRY.register()
def build_resnet_backbone_distill(cfg: CfgNode) -> nn.Module:
    """Build ``build_resnet_backbone`` without non-local blocks: the same function and the same parameter names.

    In FastReID, it is a copy of the ResNet whose stages end before the last ReLU. Here, ``tap_stages`` reads these
    feature maps from any ResNet.

    Raises:
        ConfigError, WeightsError: see ``build_resnet_backbone``.
    """
    warn_ignored_options(cfg, "WITH_NL")
    return build_resnet_backbone(cfg.with_values({"MODEL.BACKBONE.WITH_NL": False}))
