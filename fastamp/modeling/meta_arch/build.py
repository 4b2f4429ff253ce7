"""Build the model that a config names, ready on its device."""

import logging
from typing import Any

import torch
from torch import nn

from fastamp.amp import PrecisionPolicy, apply_force_fp32, resolve_device
from fastamp.modeling.out_of_memory import explain_out_of_memory
from fastamp.utils.compiled import compile_parts
from fastamp.utils.registry import Registry

logger = logging.getLogger(__name__)

META_ARCH_REGISTRY = Registry("MODEL.META_ARCHITECTURE")


def build_model(cfg: Any) -> nn.Module:
    """Return the model of ``MODEL`` on ``MODEL.DEVICE``, with its ``SOLVER.AMP.FORCE_FP32`` regions.

    Called with ``{"images": (B, C, H, W) in 0..255}`` it returns (B, D) float32 features in evaluation mode and,
    with ``"targets": (B,)`` added, a dict of losses in training mode.

    Raises:
        ConfigError: an unknown component or a value that does not fit, the device is not there, or the model does not
            fit into memory.
        WeightsError: pretrained weights cannot be had or do not fit.
    """
    device = resolve_device(cfg.MODEL.DEVICE)
    name = cfg.MODEL.META_ARCHITECTURE
    if (cfg.KD.MODEL_CONFIG or cfg.KD.EMA.ENABLED) and name in ("Baseline", "MGN", "MoCo"):
        logger.warning("KD.* does nothing: MODEL.META_ARCHITECTURE is %s, and it is Distiller that has teachers", name)
    memory_format = torch.channels_last if _channels_last(cfg, device) else torch.contiguous_format
    with explain_out_of_memory(cfg):
        model = META_ARCH_REGISTRY.build(name, cfg)
        apply_force_fp32(model, cfg.SOLVER.AMP.FORCE_FP32)
        model = model.to(device=device, memory_format=memory_format)
    if cfg.MODEL.COMPILE != "off":
        compile_parts(model, cfg.MODEL.COMPILE)
    return model


def _channels_last(cfg: Any, device: torch.device) -> bool:
    """Whether ``MODEL.CHANNELS_LAST`` asks for channels_last.

    Auto turns it on where it is faster: on a CPU (ResNet-50's float32 step by 14 %, its bfloat16 step by 10 %, and
    ResNet-18's at 128x64 too), and for the tensor cores of CUDA, which want it in low precision.
    """
    if cfg.MODEL.CHANNELS_LAST != "auto":
        return cfg.MODEL.CHANNELS_LAST == "on"
    return device.type == "cpu" or (device.type == "cuda" and PrecisionPolicy.from_config(cfg, device).enabled)
