"""Look up and build the backbone that a config names."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from fastamp.checkpoint.load_state import State
from fastamp.config import fixed_input_size, size_key
from fastamp.modeling.backbones.timm_model import build_timm_backbone
from fastamp.utils.errors import ConfigError
from fastamp.utils.registry import Registry

BACKBONE_REGISTRY = Registry("MODEL.BACKBONE.NAME")

_TIMM = "timm/"

Backbone = TypeVar("Backbone")


@dataclass(frozen=True)
class Variants:
    """The models of a backbone, among which the one that a weights file is of is searched; see ``infer_config``.

    Attributes:
        depths: values of ``MODEL.BACKBONE.DEPTH``.
        options: switches in ``MODEL.BACKBONE`` that change the names of tensors, e.g. ``WITH_IBN``.
        keys_of: the backbone's tensors in the file, under the file's names -> further config keys that they tell.
            Default: none.
    """

    depths: tuple[str, ...]
    options: tuple[str, ...] = ()
    keys_of: Callable[[State], dict[str, str]] = lambda state: {}


def variants(depths: Iterable[str], **fields: Any) -> Callable[[Backbone], Backbone]:
    """Return a decorator that gives a backbone its ``variants``, so that its weights files are recognized.

    Parameter names of other programs are translated by the backbone's ``convert_state_dict`` method; see
    ``fastamp.checkpoint.load_state.convert_state_dict``.

    Args:
        depths, others: see ``Variants``.
    """

    def add(backbone: Backbone) -> Backbone:
        backbone.variants = Variants(tuple(depths), **fields)
        return backbone

    return add


def build_backbone(cfg: Any) -> nn.Module:
    """Return the backbone ``MODEL.BACKBONE.NAME``; its ``feature_dim`` is the C of its (B, C, h, w) output.

    Raises:
        ConfigError: unknown name or depth, or ``MODEL.BACKBONE.FEAT_DIM`` is not the backbone's width.
    """
    name = cfg.MODEL.BACKBONE.NAME
    if name.startswith(_TIMM):
        return build_timm_backbone(cfg, name.removeprefix(_TIMM))
    backbone = BACKBONE_REGISTRY.build(name, cfg)
    width = getattr(backbone, "feature_dim", cfg.MODEL.BACKBONE.FEAT_DIM)
    # Of a flattened map it may be a multiple, which `with_feature_dim` checks.
    if cfg.MODEL.BACKBONE.FEAT_DIM % width if _flattens(cfg) else width != cfg.MODEL.BACKBONE.FEAT_DIM:
        raise ConfigError(
            f"MODEL.BACKBONE.FEAT_DIM is {cfg.MODEL.BACKBONE.FEAT_DIM}, but {cfg.MODEL.BACKBONE.NAME} with DEPTH "
            f"{cfg.MODEL.BACKBONE.DEPTH!r} is {width} wide.\n  fix: MODEL.BACKBONE.FEAT_DIM {width}"
        )
    return backbone


def with_feature_dim(cfg: Any, backbone: nn.Module) -> Any:
    """Return ``cfg`` with the width of what the head pools as ``FEAT_DIM``.

    That is the backbone's width, which for timm's models is read from the model. With ``POOL_LAYER Flatten`` it is the
    width of the flattened map, channels x height x width, found by a pass over one image; ``FEAT_DIM`` may be either,
    and is the latter in FastReID.

    Raises:
        ConfigError: with ``Flatten``: ``FEAT_DIM`` is neither, or training and test images have maps of different
            sizes.
    """
    timm = cfg.MODEL.BACKBONE.NAME.startswith(_TIMM)
    if not timm and not _flattens(cfg):
        return cfg
    width = backbone.feature_dim if timm else cfg.MODEL.BACKBONE.FEAT_DIM
    if _flattens(cfg):
        width = _flattened_width(cfg, backbone)
    return cfg.with_values({"MODEL.BACKBONE.FEAT_DIM": width})


def _flattens(cfg: Any) -> bool:
    return cfg.MODEL.HEADS.POOL_LAYER == "Flatten"


def _flattened_width(cfg: Any, backbone: nn.Module) -> int:
    """Return C x h x w of the backbone's map; see ``with_feature_dim``."""
    needed_by = "MODEL.HEADS.POOL_LAYER Flatten"
    sizes = [fixed_input_size(cfg, is_train=is_train, needed_by=needed_by) for is_train in (True, False)]
    train, test = (_map_shape(cfg, backbone, size) for size in sizes)
    if train != test:
        keys = (size_key(cfg, is_train=is_train) for is_train in (True, False))
        found = (
            f"{key} {size} makes {' x '.join(map(str, shape))}"
            for key, size, shape in zip(keys, sizes, (train, test), strict=True)
        )
        raise ConfigError(
            f"{needed_by} needs maps of one size, but {' and '.join(found)} (channels, height, width).\n"
            "  fix: the same size for both, or another POOL_LAYER"
        )
    width = train.numel()
    if cfg.MODEL.BACKBONE.FEAT_DIM not in (train[0], width) and not cfg.MODEL.BACKBONE.NAME.startswith(_TIMM):
        raise ConfigError(
            f"MODEL.BACKBONE.FEAT_DIM is {cfg.MODEL.BACKBONE.FEAT_DIM}, but the map is {' x '.join(map(str, train))} "
            f"(channels, height, width).\n  fix: MODEL.BACKBONE.FEAT_DIM {train[0]}, or {width} as in FastReID"
        )
    return width


def _map_shape(cfg: Any, backbone: nn.Module, size: tuple[int, int]) -> torch.Size:
    """Return the shape of the backbone's map of an image of this height and width."""
    training = backbone.training
    device = next((parameter.device for parameter in backbone.parameters()), None)
    images = torch.zeros(1, cfg.INPUT.CHANNELS, *size, device=device)
    camera_view_ids = {}
    if getattr(backbone, "takes_cameras", False):
        camera_view_ids = dict.fromkeys(("camids", "viewids"), torch.zeros(1, dtype=torch.int64, device=device))
    try:
        with torch.no_grad():
            return backbone.eval()(images, **camera_view_ids).shape[1:]
    finally:
        backbone.train(training)
