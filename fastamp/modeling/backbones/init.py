"""Weight initialization of convolutions."""

import math

from torch import nn


def init_convolutions(model: nn.Module) -> None:
    """Draw the convolution weights of ``model`` from N(0, 2 / fan_out).

    The fan-out ignores groups. Biases are not changed.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels
            nn.init.normal_(module.weight, 0, math.sqrt(2.0 / fan_out))
