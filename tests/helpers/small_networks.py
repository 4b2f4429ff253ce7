"""Backbones with random weights of realistic scale, and reference implementations of their layers."""

import math

import torch
import torch.nn.functional as F

from fastamp.config import read_config
from fastamp.modeling import build_backbone


def config(name, depth, width, *opts):
    return read_config("", [
        "MODEL.BACKBONE.NAME", name, "MODEL.BACKBONE.DEPTH", depth, "MODEL.BACKBONE.FEAT_DIM", str(width),
        "MODEL.DEVICE", "cpu", *opts,
    ])  # fmt: skip


def build(*args):
    """Build a backbone in evaluation mode and float64, with random weights for which no layer is trivial."""
    backbone = build_backbone(config(*args)).eval().double()
    for name, value in backbone.state_dict().items():
        if value.dim() > 1:
            value.normal_(0, math.sqrt(2 / value[0].numel()))
        elif name.endswith(("running_var", "weight")):
            value.uniform_(0.5, 1.5)
        elif value.is_floating_point():
            value.normal_(0, 0.1)
    return backbone


def count_parameters(name, depth, width, *opts):
    with torch.device("meta"):
        return sum(p.numel() for p in build_backbone(config(name, depth, width, *opts)).parameters())


class Layers:
    """Layers as plain functions, called with the names of the layers in a state dict."""

    def __init__(self, state):
        self.state = state

    def conv(self, x, name, stride=1):
        """Convolution with padding of half the kernel; grouped if its weight has fewer input channels than ``x``."""
        weight = self.state[f"{name}.weight"]
        groups = x.shape[1] // weight.shape[1]
        return F.conv2d(x, weight, self.state.get(f"{name}.bias"), stride, weight.shape[2] // 2, groups=groups)

    def bn(self, x, name):
        """Batch norm; instance norm if there are no running statistics."""
        if f"{name}.running_mean" in self.state:
            mean, var = (self.state[f"{name}.running_{key}"][:, None, None] for key in ("mean", "var"))
        else:
            mean, var = x.mean((2, 3), keepdim=True), x.var((2, 3), keepdim=True, unbiased=False)
        weight, bias = (self.state[f"{name}.{key}"][:, None, None] for key in ("weight", "bias"))
        return (x - mean) / (var + 1e-5).sqrt() * weight + bias

    def has(self, name):
        return f"{name}.weight" in self.state
