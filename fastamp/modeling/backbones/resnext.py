"""ResNeXt 32x4d (Xie et al. 2017, arXiv:1611.05431), a ResNet with grouped convolutions in the bottlenecks."""

from fastamp.checkpoint.pretrained import Download, TorchvisionWeights
from fastamp.config import CfgNode
from fastamp.modeling.backbones.build import BACKBONE_REGISTRY, variants
from fastamp.modeling.backbones.build_utils import choose_depth, with_pretrained_weights
from fastamp.modeling.backbones.resnet import Bottleneck, Depth, ResNet

DEPTHS = {
    "50x": Depth(Bottleneck, (3, 4, 6, 3), (0, 2, 3, 0)),
    "101x": Depth(Bottleneck, (3, 4, 23, 3), (0, 2, 3, 0)),
}

# (depth, with IBN) -> ImageNet weights
PRETRAINED = {
    ("50x", False): TorchvisionWeights("resnext50_32x4d"),
    # The file has no instance norm in the last stage; those layers keep their initial values, as in FastReID.
    ("101x", True): Download(
        "https://github.com/XingangPan/IBN-Net/releases/download/v1.0/resnext101_ibn_a-6ace051d.pth"
    ),
}


@BACKBONE_REGISTRY.register()
@variants(DEPTHS, options=("WITH_IBN", "WITH_NL"))
def build_resnext_backbone(cfg: CfgNode) -> ResNet:
    """Build the ResNeXt configured in ``MODEL.BACKBONE``; load pretrained weights if ``PRETRAIN`` is True.

    As in FastReID, ``WITH_IBN`` applies to all four stages, and the max pooling of the stem is always padded.

    Raises:
        ConfigError: if ``DEPTH`` is unknown, or if no pretrained weights are published for this variant.
        WeightsError: if the pretrained weights cannot be downloaded or read, or do not match the model.
    """
    backbone = cfg.MODEL.BACKBONE
    depth = choose_depth(cfg, DEPTHS, supported=("WITH_IBN", "WITH_NL"))
    model = ResNet(
        block=depth.block,
        blocks=depth.blocks,
        in_channels=cfg.INPUT.CHANNELS,
        non_local=depth.non_local if backbone.WITH_NL else (0, 0, 0, 0),
        last_stride=backbone.LAST_STRIDE,
        norm=backbone.NORM,
        ibn_stages=4 if backbone.WITH_IBN else 0,
        stem_pool="padded",
        groups=32,
        base_width=4,
    )
    # ImageNet weights do not contain the non-local blocks, which are initialized to the identity.
    return with_pretrained_weights(model, cfg, PRETRAINED.get((backbone.DEPTH, backbone.WITH_IBN)), without=("NL_*",))
