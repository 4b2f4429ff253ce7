"""Multiple Granularity Network: a global branch, and two whose maps are also cut into horizontal parts."""

import copy
import logging
from typing import Any

import torch
from torch import nn

from fastamp.checkpoint.load_state import State
from fastamp.modeling.backbones import ResNet, build_backbone
from fastamp.modeling.heads import build_heads
from fastamp.modeling.losses import build_losses
from fastamp.modeling.losses.build import check_shareable
from fastamp.modeling.losses.compute import compute_losses, over_pairs
from fastamp.modeling.meta_arch.build import META_ARCH_REGISTRY
from fastamp.modeling.meta_arch.image_model import ImageModel, normalization
from fastamp.utils.errors import ConfigError
from fastamp.utils.moved import moved_names

__getattr__ = moved_names(__name__, {"backbone_of": "fastamp.modeling.meta_arch.mgn.backbone_state"})

logger = logging.getLogger(__name__)

# The order in which their features stand side by side.
HEADS = ("b1", "b2", "b3", "b21", "b22", "b31", "b32", "b33")
# What the losses that compare images with each other see: the parts of a branch together.
_PAIR_LOSS_PARTS = {"b1": ("b1",), "b2": ("b2",), "b3": ("b3",), "b22": ("b21", "b22"), "b33": ("b31", "b32", "b33")}


@META_ARCH_REGISTRY.register()
class MGN(ImageModel):
    """A ResNet up to the first block of its third stage, then three copies of the rest (Wang et al. 2018,
    arXiv:1804.01438).

    Branches 2 and 3 do not stride in the last stage, and have a head for the whole map and one for each of two or
    three parts of its height. As FastReID's: each head has its own reduction and classifier; each of the eight
    classification losses weighs 1/8, each of the five pair losses 1/5.

    Args:
        backbone: a ResNet, taken apart; its weights start all three branches.
        heads: head of each name in ``HEADS``.
        losses: loss name -> module of ``(outputs, targets) -> ()``.
        gather: let the losses that compare images with each other (``over_pairs``) see those of all ranks.
        pixel_mean, pixel_std: see ``ImageModel``.
    """

    trunks = ("backbone", "b1", "b2", "b3")

    def __init__(
        self,
        *,
        backbone: ResNet,
        heads: dict[str, nn.Module],
        losses: nn.ModuleDict,
        gather: bool = False,
        **pixels: Any,
    ) -> None:
        trunk = nn.Sequential(
            backbone.conv1,
            backbone.bn1,
            backbone.relu,
            backbone.maxpool,
            backbone.layer1,
            backbone.layer2,
            backbone.layer3[0],
        )
        super().__init__(backbone=trunk, **pixels)
        stage3, stage4 = nn.Sequential(*list(backbone.layer3)[1:]), backbone.layer4
        for branch, last in (
            ("b1", stage4),
            ("b2", _copy_without_stride(stage4)),
            ("b3", _copy_without_stride(stage4)),
        ):
            self.add_module(branch, nn.Sequential(copy.deepcopy(stage3), copy.deepcopy(last)))
            for name in HEADS:
                if name.startswith(branch):
                    self.add_module(f"{name}_head", heads[name])
        self.losses = losses
        self.gather = gather

    @classmethod
    def from_config(cls, cfg: Any) -> "MGN":
        """Return the model of ``MODEL``, for images of ``INPUT.CHANNELS``.

        Raises:
            ConfigError: the backbone is no ResNet, POOL_LAYER is Flatten, or a loss has weights of its own; see also
                ``normalization``, and what backbone, heads and losses raise.
        """
        if cfg.MODEL.HEADS.POOL_LAYER == "Flatten":
            raise ConfigError(
                "MODEL.HEADS.POOL_LAYER Flatten needs maps of one size, and MGN's eight heads pool parts of several.\n"
                "  fix: another POOL_LAYER"
            )
        backbone = build_backbone(cfg)
        if not isinstance(backbone, ResNet):
            raise ConfigError(
                f"MODEL.META_ARCHITECTURE MGN takes a ResNet apart, and MODEL.BACKBONE.NAME "
                f"{cfg.MODEL.BACKBONE.NAME} is none.\n  fix: MODEL.BACKBONE.NAME build_resnet_backbone"
            )
        if cfg.MODEL.BACKBONE.WITH_NL:
            logger.warning("MODEL.BACKBONE.WITH_NL does nothing: MGN has no non-local blocks")
        losses = build_losses(cfg)
        check_shareable(losses, "MGN's eight heads")
        return cls(
            backbone=backbone,
            heads={name: build_heads(cfg) for name in HEADS},
            losses=losses,
            gather=cfg.MODEL.LOSSES.GATHER,
            **normalization(cfg),
        )

    def forward(self, batch: dict[str, Any] | torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """Compute features, or losses.

        Args:
            batch: ``{"images": (B, C, H, W) in 0..255}``, in training mode also ``"targets": (B,) int64``. In
                evaluation mode also the images alone.

        Returns:
            In evaluation mode (B, 8 D) float32 features, in the order of ``HEADS``; in training mode loss name with
            the head's -> () float32.
        """
        batch = self.as_batch(batch)
        maps = self._head_maps(batch)
        if not self.training:
            return torch.cat([self.get_submodule(f"{name}_head")(maps[name]) for name in HEADS], dim=1)
        targets = self.targets(batch)
        outputs = {name: self.get_submodule(f"{name}_head")(maps[name], targets) for name in HEADS}
        pair_losses = {name: loss for name, loss in self.losses.items() if over_pairs(loss)}
        image_losses = {name: loss for name, loss in self.losses.items() if name not in pair_losses}
        losses = {}
        for head in HEADS:
            values = compute_losses(image_losses, outputs[head], targets, gather=self.gather)
            losses |= {f"{name}_{head}": value / len(HEADS) for name, value in values.items()}
        for head, parts in _PAIR_LOSS_PARTS.items():
            concatenated = outputs[head] | {"features": torch.cat([outputs[part]["features"] for part in parts], dim=1)}
            values = compute_losses(pair_losses, concatenated, targets, gather=self.gather)
            losses |= {f"{name}_{head}": value / len(_PAIR_LOSS_PARTS) for name, value in values.items()}
        return losses

    def class_logits(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return (B, K) float32 class logits, the mean of the eight heads', in the mode that the model is in."""
        maps = self._head_maps(batch)
        return torch.stack([self.get_submodule(f"{name}_head").logits(maps[name]) for name in HEADS]).mean(0)

    def _head_maps(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return the feature map of each head."""
        trunk = self.feature_maps(batch)
        maps = {branch: self.get_submodule(branch)(trunk) for branch in ("b1", "b2", "b3")}
        return maps | self._split_height("b2", maps["b2"], 2) | self._split_height("b3", maps["b3"], 3)

    @staticmethod
    def _split_height(branch: str, maps: torch.Tensor, count: int) -> dict[str, torch.Tensor]:
        """Return (B, D, h, w) cut into ``count`` parts of its height, from the top: ``b21``, ``b22``, ..."""
        parts = maps.chunk(count, dim=2)
        if len(parts) < count:
            raise ConfigError(
                f"MGN cuts a feature map into {count} parts, and one {maps.shape[2]} high cannot be: "
                "INPUT.SIZE_TRAIN and INPUT.SIZE_TEST are too low for it"
            )
        return {f"{branch}{number}": part for number, part in enumerate(parts, start=1)}


def backbone_state(state: State) -> State:
    """Return the ResNet that the trunk and the first branch of an MGN's ``state`` are, under a ResNet's names."""
    stages = {"backbone.0.": "conv1.", "backbone.1.": "bn1.", "backbone.4.": "layer1.", "backbone.5.": "layer2."}
    stages |= {"backbone.6.": "layer3.0.", "b1.1.": "layer4."}
    renamed = {}
    for name, value in state.items():
        for old, new in stages.items():
            if name.startswith(old):
                renamed[new + name.removeprefix(old)] = value
        if name.startswith("b1.0."):
            block, _, rest = name.removeprefix("b1.0.").partition(".")
            renamed[f"layer3.{int(block) + 1}.{rest}"] = value
    return renamed


def _copy_without_stride(stage: nn.Sequential) -> nn.Sequential:
    """Return a copy of a ResNet's stage whose convolutions keep the map's size."""
    stage = copy.deepcopy(stage)
    for module in stage.modules():
        if isinstance(module, nn.Conv2d):
            module.stride = (1, 1)
    return stage
