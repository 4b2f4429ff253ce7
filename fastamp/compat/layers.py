"""FastReID's helpers for normalization layers and weight initialization."""

from typing import Any

from torch import nn

from fastamp.layers.norm import build_norm


def get_norm(norm: Any, out_channels: int, **kwargs: Any) -> nn.Module | None:
    """Build a normalization layer.

    Args:
        norm (str | Callable): name as in ``MODEL.BACKBONE.NORM``, or a function of the number of channels. ``""``
            returns None.
        out_channels (int): number of channels.
        kwargs: ``bias_freeze`` and ``weight_freeze`` (bool) disable the gradient of the bias or weight;
            ``bias_init`` and ``weight_init`` (float) are the initial values. Default: False, False, 0 and 1.
    """
    if not norm:
        return None
    layer = build_norm(norm, out_channels) if isinstance(norm, str) else norm(out_channels)
    for name in ("weight", "bias"):
        parameter = getattr(layer, name, None)
        if parameter is None:
            continue
        if f"{name}_init" in kwargs:
            nn.init.constant_(parameter, kwargs[f"{name}_init"])
        if kwargs.get(f"{name}_freeze"):
            parameter.requires_grad_(False)
    return layer


def weights_init_kaiming(m: nn.Module) -> None:
    """Initialize a layer as FastReID does; for ``module.apply``.

    Linear layers: N(0, 0.01), bias 0. Convolutions: He normal by fan-out (He et al. 2015, arXiv:1502.01852), bias 0.
    Batch norm: weight 1, bias 0.
    """
    if isinstance(m, nn.modules.batchnorm._BatchNorm):
        if m.affine:
            nn.init.ones_(m.weight)
            nn.init.zeros_(m.bias)
    elif isinstance(m, (nn.Linear, nn.modules.conv._ConvNd)):
        if isinstance(m, nn.Linear):
            nn.init.normal_(m.weight, std=0.01)
        else:
            nn.init.kaiming_normal_(m.weight, mode="fan_out")
        if m.bias is not None:
            nn.init.zeros_(m.bias)


def weights_init_classifier(m: nn.Module) -> None:
    """Initialize a linear layer with N(0, 0.001) and bias 0; for ``module.apply``."""
    if isinstance(m, nn.Linear):
        nn.init.normal_(m.weight, std=0.001)
        if m.bias is not None:
            nn.init.zeros_(m.bias)
