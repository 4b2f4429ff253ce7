"""Registry and builder of meta-architectures."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fastamp.config import CfgNode
from fastamp.fastreid.modeling.meta_arch.baseline import Baseline, LossArguments
from fastamp.fastreid.modeling.meta_arch.distiller import Distiller
from fastamp.fastreid.modeling.meta_arch.mgn import MGN
from fastamp.fastreid.modeling.meta_arch.moco import MoCo
from fastamp.modeling.meta_arch import build
from fastamp.modeling.meta_arch.build import META_ARCH_REGISTRY

__all__ = ["META_ARCH_REGISTRY", "build_model"]

_CLASSES = {kind.__name__: kind for kind in (Baseline, Distiller, MGN, MoCo)}


def build_model(cfg: CfgNode) -> nn.Module:
    """Build the configured model; see ``fastamp.modeling.build_model`` and ``adapt``."""
    return adapt(build.build_model(cfg), cfg)


def adapt(model: nn.Module, cfg: CfgNode) -> nn.Module:
    """Give a model of fastamp the methods of its class in this package, and another model images in float32.

    FastReID's loaders return float32 images, which a model may normalize in place; those of fastamp return uint8.

    Args:
        model: the configured model, which is modified.
        cfg: its config.

    Returns:
        The model.
    """
    kind = _CLASSES.get(type(model).__name__)
    if kind is not None and type(model) in kind.__mro__:
        model.__class__ = kind
        vars(model)["loss_kwargs"] = LossArguments(cfg.MODEL.LOSSES.NAME, model._modules["losses"])
    elif type(model).__module__.partition(".")[0] != "fastamp":
        model.register_forward_pre_hook(_with_float_images)
    return model


def _with_float_images(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    batch, *others = inputs
    if isinstance(batch, Mapping) and isinstance(batch.get("images"), torch.Tensor):
        batch = {**batch, "images": batch["images"].float()}
    return batch, *others
