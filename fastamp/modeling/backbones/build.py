"""Registry and builder of backbones."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from fastamp.config import CfgNode, fixed_input_size, size_key
from fastamp.contracts import Backbone, State
from fastamp.layers.mixstyle import MixStyle
from fastamp.modeling.backbones.build_utils import warn_ignored_options
from fastamp.modeling.backbones.lora import with_adapters
from fastamp.modeling.backbones.timm_model import build_timm_backbone
from fastamp.utils.errors import ConfigError
from fastamp.utils.registry import Registry, adopt

_MODULES = (
    *("clip", "clip_resnet", "efficientnet", "mobilenet", "osnet", "osnet_ain", "regnet", "repvgg", "resnest"),
    *("resnet", "resnext", "shufflenet", "shufflenet_v1", "solider", "swin", "torchreid_mobilenet"),
    *("two_stem_resnet", "vit", "vmamba"),
)

_TIMM = "timm/"

Builder = TypeVar("Builder", bound=Callable[..., nn.Module])


@dataclass(frozen=True)
class Variants:
    """Variants of a backbone: the config values that ``infer_config`` tries when it identifies a weights file.

    Attributes:
        depths: supported values of ``MODEL.BACKBONE.DEPTH``.
        options: boolean keys below ``MODEL.BACKBONE`` that change the parameter names, e.g. ``WITH_IBN``.
        keys_of: function that infers additional config keys from the backbone's tensors, a dict with the parameter
            names of the weights file. Default: infers no keys.
    """

    depths: tuple[str, ...]
    options: tuple[str, ...] = ()
    keys_of: Callable[[State], dict[str, str]] = lambda state: {}


class BackboneBuilder(Protocol):
    """Registered function or class that builds a backbone.

    Attributes:
        variants: variants by which weights files are recognized. Default None: they are not.
    """

    variants: Variants | None = None

    def __call__(self, cfg: CfgNode) -> nn.Module:
        """Build the backbone."""


BACKBONE_REGISTRY = Registry(
    "MODEL.BACKBONE.NAME",
    modules=[f"fastamp.modeling.backbones.{name}" for name in _MODULES],
    contract=BackboneBuilder,
)


def variants(depths: Iterable[str], **fields: Any) -> Callable[[Builder], Builder]:
    """Decorate a backbone builder with its variants, so that ``infer_config`` can identify the weights files.

    The backbone's method ``convert_state_dict`` converts parameter names from other libraries; see
    ``fastamp.checkpoint.load_state.convert_state_dict``.

    Args:
        depths: supported values of ``MODEL.BACKBONE.DEPTH``.
        fields: ``options`` and ``keys_of`` of ``Variants``, as keyword arguments.

    Returns:
        Decorator that sets the attribute ``variants`` of the builder.
    """

    def add(backbone: Any) -> Any:  # a function, whose attributes have no types
        backbone.variants = Variants(tuple(depths), **fields)
        return backbone

    return add


def build_backbone(cfg: CfgNode) -> nn.Module:
    """Build the backbone ``MODEL.BACKBONE.NAME``, with the adapters of ``MODEL.LORA``.

    Returns:
        A module that maps (B, in_channels, H, W) images to (B, C, h, w) feature maps. Its attribute ``feature_dim`` is
        C.

    Raises:
        ConfigError: if the name or depth is unknown, or if ``MODEL.BACKBONE.FEAT_DIM`` differs from the number of
            output channels of the backbone; see also ``with_adapters``.
    """
    name = cfg.MODEL.BACKBONE.NAME
    if name.startswith(_TIMM):
        warn_ignored_options(cfg, "MIXSTYLE")
        return with_adapters(cfg, build_timm_backbone(cfg, name.removeprefix(_TIMM)))
    backbone = adopt(BACKBONE_REGISTRY.build(name, cfg), Backbone)
    if not backbone.takes_cameras:
        warn_ignored_options(cfg, "SIE_CAMERAS", "SIE_VIEWS", disabled=0)
    if not any(isinstance(module, MixStyle) for module in backbone.modules()):
        warn_ignored_options(cfg, "MIXSTYLE")
    if backbone.checkpointing is None:
        warn_ignored_options(cfg, "CHECKPOINTING")
    width = backbone.feature_dim or cfg.MODEL.BACKBONE.FEAT_DIM
    # With POOL_LAYER Flatten it may also be channels x height x width, which `with_feature_dim` checks.
    if cfg.MODEL.BACKBONE.FEAT_DIM % width if _flattens(cfg) else width != cfg.MODEL.BACKBONE.FEAT_DIM:
        raise ConfigError(
            f"MODEL.BACKBONE.FEAT_DIM is {cfg.MODEL.BACKBONE.FEAT_DIM}, but {cfg.MODEL.BACKBONE.NAME} with DEPTH "
            f"{cfg.MODEL.BACKBONE.DEPTH!r} outputs {width} channels.\n  fix: set MODEL.BACKBONE.FEAT_DIM to {width}"
        )
    return with_adapters(cfg, backbone)


def with_feature_dim(cfg: CfgNode, backbone: nn.Module) -> Any:
    """Set ``MODEL.BACKBONE.FEAT_DIM`` to the input width of the head.

    The input width is the number of output channels of the backbone; for timm backbones it is read from the model. With
    ``POOL_LAYER Flatten`` it is the size of the flattened feature map, channels x height x width, computed by a forward
    pass over one image. ``FEAT_DIM`` in ``cfg`` may be the number of channels or the flattened size; FastReID's configs
    contain the flattened size. It must be the flattened size if images are not resized (``INPUT.SIZE_TRAIN [0]``).

    Returns:
        A copy of ``cfg``, or ``cfg`` itself if ``FEAT_DIM`` does not change.

    Raises:
        ConfigError: if ``POOL_LAYER`` is Flatten, and ``FEAT_DIM`` differs from both values or the feature maps of
            training and test images differ in size.
    """
    timm = cfg.MODEL.BACKBONE.NAME.startswith(_TIMM)
    if not timm and not _flattens(cfg):
        return cfg
    width = backbone.feature_dim if timm else cfg.MODEL.BACKBONE.FEAT_DIM
    if _flattens(cfg):
        width = _flattened_width(cfg, backbone)
    return cfg.with_values({"MODEL.BACKBONE.FEAT_DIM": width})


def _flattens(cfg: CfgNode) -> bool:
    return cfg.MODEL.HEADS.POOL_LAYER == "Flatten"


def _flattened_width(cfg: CfgNode, backbone: nn.Module) -> int:
    """Compute the length C * h * w of the flattened feature map; see ``with_feature_dim``."""
    if tuple(cfg.INPUT.SIZE_TRAIN) == tuple(cfg.INPUT.SIZE_TEST) == (0,) and not cfg.INPUT.CROP.ENABLED:
        return cfg.MODEL.BACKBONE.FEAT_DIM  # images are not resized: the head checks the size of each batch
    needed_by = "MODEL.HEADS.POOL_LAYER=Flatten"
    sizes = [fixed_input_size(cfg, is_train=is_train, needed_by=needed_by) for is_train in (True, False)]
    train, test = (_map_shape(cfg, backbone, size) for size in sizes)
    if train != test:
        keys = (size_key(cfg, is_train=is_train) for is_train in (True, False))
        size_text = (
            f"{key} {size} gives {' x '.join(map(str, shape))}"
            for key, size, shape in zip(keys, sizes, (train, test), strict=True)
        )
        raise ConfigError(
            f"{needed_by} requires feature maps of a fixed size, but {' and '.join(size_text)} "
            "(channels x height x width).\n"
            "  fix: set both keys to the same size, or choose another MODEL.HEADS.POOL_LAYER"
        )
    width = train.numel()
    if cfg.MODEL.BACKBONE.FEAT_DIM not in (train[0], width) and not cfg.MODEL.BACKBONE.NAME.startswith(_TIMM):
        raise ConfigError(
            f"MODEL.BACKBONE.FEAT_DIM is {cfg.MODEL.BACKBONE.FEAT_DIM}, but the feature map is "
            f"{' x '.join(map(str, train))} (channels x height x width).\n"
            f"  fix: set MODEL.BACKBONE.FEAT_DIM to {train[0]}, the number of channels, or to the product {width}, as "
            "in FastReID"
        )
    return width


def _map_shape(cfg: CfgNode, backbone: nn.Module, size: tuple[int, int]) -> torch.Size:
    """Return the shape (C, h, w) of the backbone's feature map for an image of size (height, width)."""
    training = backbone.training
    device = next((parameter.device for parameter in backbone.parameters()), None)
    images = torch.zeros(1, cfg.INPUT.CHANNELS, *size, device=device)
    camera_view_ids = {}
    if backbone.takes_cameras:
        camera_view_ids = dict.fromkeys(("camids", "viewids"), torch.zeros(1, dtype=torch.int64, device=device))
    try:
        with torch.no_grad():
            return backbone.eval()(images, **camera_view_ids).shape[1:]
    finally:
        backbone.train(training)
