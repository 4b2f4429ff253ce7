"""Stages of a residual network: feature maps before the last ReLU, and the last normalization."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count

import torch
from torch import nn

from fastamp.utils.errors import ConfigError


def last_blocks(backbone: nn.Module) -> list[nn.Module]:
    """Return the last residual block of each stage ``layer1``, ``layer2``, ...

    Raises:
        ConfigError: if the backbone has no such stages, or their blocks do not end with a normalization that has a
            weight and a bias, an addition and a ReLU.
    """
    blocks = []
    for number in count(1):
        stage = _children(backbone).get(f"layer{number}")
        if stage is None:
            break
        blocks.append(stage[-1])
    if not blocks or not all(isinstance(_children(block).get("relu"), nn.ReLU) and _norm(block) for block in blocks):
        raise ConfigError(
            f"{type(backbone).__name__} has no stages of residual blocks that end with a ReLU, which overhaul "
            "distillation requires.\n  fix: set MODEL.BACKBONE.NAME to build_resnet_backbone_distill"
        )
    return blocks


def last_norms(backbone: nn.Module) -> list[nn.Module]:
    """Return the last normalization of each stage, whose ``weight`` has one value per channel of the stage."""
    return [_norm(block) for block in last_blocks(backbone)]


def _norm(block: nn.Module) -> nn.Module | None:
    """Return the last normalization of a basic block or of a bottleneck; None if it has no weight and bias."""
    norm = _children(block).get("bn3", _children(block).get("bn2"))
    return norm if norm is not None and norm.state_dict().keys() >= {"weight", "bias"} else None


def _children(module: nn.Module) -> dict[str, nn.Module]:
    return dict(module.named_children())


@contextmanager
def tap_stages(*backbones: nn.Module) -> Iterator[list[list[torch.Tensor]]]:
    """Read the feature maps of each stage before its last ReLU, in a ``with`` block.

    Args:
        backbones: residual networks, see ``last_blocks``. After a forward pass within the block, the yielded list has
            one list of maps, (B, C, h, w) from the first stage to the last, for each of them.
    """
    blocks = [last_blocks(backbone) for backbone in backbones]
    maps = [[torch.empty(0)] * len(stage) for stage in blocks]
    with ExitStack() as stack:
        for ends, stage_maps in zip(blocks, maps, strict=True):
            for stage, block in enumerate(ends):
                stack.callback(block.relu.register_forward_pre_hook(_recorder(stage_maps, stage)).remove)
        yield maps


def _recorder(stage_maps: list[torch.Tensor], stage: int):
    """Return a hook that keeps the input of a ReLU; the last call in a block is that after the addition."""

    def keep(module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        (stage_maps[stage],) = args
        return (args[0].clone(),)  # the ReLU works in place

    return keep
