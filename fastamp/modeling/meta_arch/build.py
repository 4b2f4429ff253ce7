"""Registry of meta-architectures and builder of models."""

import logging
from typing import Any

import torch
from torch import nn

from fastamp.amp import PrecisionPolicy, apply_force_fp32, requested_device, resolve_device
from fastamp.config import CfgNode, check_is_config
from fastamp.contracts import Model, ModelBuilder
from fastamp.modeling.heads.embedding_head import EmbeddingHead
from fastamp.modeling.meta_arch.image_model import ImageModel
from fastamp.modeling.out_of_memory import explain_out_of_memory
from fastamp.utils.compiled import compile_parts, repeated_blocks
from fastamp.utils.errors import ConfigError
from fastamp.utils.plural import plural
from fastamp.utils.registry import Registry, adopt
from fastamp.zoo import with_local_files

logger = logging.getLogger(__name__)

META_ARCH_REGISTRY = Registry("MODEL.META_ARCHITECTURE", contract=ModelBuilder)


def adapt_to_training_set(cfg: CfgNode, dataset: Any) -> tuple[CfgNode, int]:
    """Adapt a config to the training set, before the model is built.

    The datasets adapt it first, see ``ImageDataset.adapt_config``, then the meta-architecture: one whose classes are
    not identities, or whose config depends on columns, overrides ``ModelBuilder.adapt_to_training_set``.

    Args:
        cfg: config.
        dataset: training set, with ``num_classes`` and ``columns``.

    Returns:
        The config, and the number of classes of the model.
    """
    for source in dataset.sources:
        cfg = source.adapt_config(cfg, dataset)
    adapted: tuple[CfgNode, int] = META_ARCH_REGISTRY.get(cfg.MODEL.META_ARCHITECTURE).adapt_to_training_set(
        cfg, dataset
    )
    return adapted


def build_model(cfg: CfgNode) -> nn.Module:
    """Build the model configured in ``MODEL`` on ``MODEL.DEVICE``, and apply ``SOLVER.AMP.FORCE_FP32``.

    Returns:
        A module that, in evaluation mode, maps ``{"images": (B, C, H, W) in 0..255}`` to features (B, D), float32. In
        training mode, the dict must also contain ``"targets": (B,)``, and the result is a dict of losses.

    Raises:
        ConfigError: if a component is unknown, a value is invalid, the device is unavailable, or the model does not fit
            into memory.
        WeightsError: if the pretrained weights cannot be downloaded or read, or do not match the model.
    """
    check_is_config(cfg)
    cfg = with_local_files(cfg)
    device = resolve_device(requested_device(cfg))
    name = cfg.MODEL.META_ARCHITECTURE
    if (cfg.KD.MODEL_CONFIG or cfg.KD.EMA.ENABLED) and name in ("Baseline", "LightMBN", "MGN", "MoCo"):
        logger.warning(
            "KD.* is ignored: MODEL.META_ARCHITECTURE is %s; only Distiller uses teachers.\n"
            "  fix: set MODEL.META_ARCHITECTURE to Distiller, or remove the keys of KD",
            name,
        )
    memory_format = torch.channels_last if _channels_last(cfg, device) else torch.contiguous_format
    with explain_out_of_memory(cfg):
        model = adopt(META_ARCH_REGISTRY.build(name, cfg), Model)
        apply_force_fp32(model, cfg.SOLVER.AMP.FORCE_FP32)
        model = model.to(device=device, memory_format=memory_format)
    if cfg.MODEL.HEADS.TEMPORAL_POOL != "none" and not model.pools_tracklets:
        raise ConfigError(
            f"MODEL.HEADS.TEMPORAL_POOL={cfg.MODEL.HEADS.TEMPORAL_POOL} is not supported by "
            f"MODEL.META_ARCHITECTURE={name} with MODEL.HEADS.NAME={cfg.MODEL.HEADS.NAME}.\n"
            "  fix: use Baseline with EmbeddingHead or FCHead, or set MODEL.HEADS.TEMPORAL_POOL to none"
        )
    if cfg.MODEL.HEADS.PFC.ENABLED and cfg.MODEL.HEADS.NUM_CLASSES:
        _check_partial_fc(cfg, model)
    if cfg.MODEL.HEADS.NUM_CLASSES and isinstance(model, ImageModel):
        model.set_label_range(cfg.MODEL.HEADS.NUM_CLASSES, cfg.DATASETS.NAMES)
    if cfg.MODEL.COMPILE != "off":
        _compile(cfg, model)
    return model


def _compile(cfg: CfgNode, model: nn.Module) -> None:
    """Compile ``MODEL.COMPILE_REGION`` of a model.

    Raises:
        ConfigError: if the model has no such region; see also ``compile_parts``.
    """
    region, trunks = cfg.MODEL.COMPILE_REGION, model.trunks
    whole = ("",) if model.one_graph and trunks else ()
    names = {"backbone": trunks, "model": whole, "blocks": repeated_blocks(model, trunks)}
    if not names[region]:
        missing = {
            "backbone": 'attribute trunks, such as trunks = ("backbone",), that lists the submodules to compile',
            "model": "forward pass that is one graph (attribute one_graph)",
            "blocks": "repeated blocks",
        }
        others = [f"MODEL.COMPILE_REGION to {other}" for other, found in names.items() if found]
        raise ConfigError(
            f"MODEL.COMPILE is {cfg.MODEL.COMPILE} and MODEL.COMPILE_REGION is {region}, but "
            f"{type(model).__name__} has no {missing[region]}.\n"
            f"  fix: set {' or '.join([*others, 'MODEL.COMPILE to off'])}"
        )
    prepare = model.prepare if isinstance(model, ImageModel) else None
    compile_parts(model, names[region], cfg.MODEL.COMPILE, mode=cfg.MODEL.COMPILE_MODE, prepare=prepare)


def _check_partial_fc(cfg: CfgNode, model: nn.Module) -> None:
    """Raise ConfigError unless the model has exactly one classifier with Partial FC, and does not need all logits."""
    count = sum(isinstance(module, EmbeddingHead) and module.partial_fc is not None for module in model.modules())
    if count != 1 or not model.supports_partial_fc:
        raise ConfigError(
            f"MODEL.HEADS.PFC.ENABLED is not supported by MODEL.META_ARCHITECTURE={cfg.MODEL.META_ARCHITECTURE} with "
            f"MODEL.HEADS.NAME={cfg.MODEL.HEADS.NAME}: expected one classifier, and losses that do not use the logits "
            f"of all classes; found {plural(count, 'classifier')} with Partial FC.\n"
            "  fix: use Baseline with EmbeddingHead or FCHead, or set MODEL.HEADS.PFC.ENABLED False"
        )


def _channels_last(cfg: CfgNode, device: torch.device) -> bool:
    """Return True if ``MODEL.CHANNELS_LAST`` selects the channels_last memory format.

    ``auto`` selects channels_last if it is faster: on a CPU (measured: ResNet-50 steps are 14 % faster in float32 and
    10 % in bfloat16; ResNet-18 at 128x64 is faster too), and on CUDA in low precision, because of the tensor cores.
    """
    if cfg.MODEL.CHANNELS_LAST != "auto":
        return cfg.MODEL.CHANNELS_LAST == "on"
    return device.type == "cpu" or (device.type == "cuda" and PrecisionPolicy.from_config(cfg, device).enabled)
