"""Multiple Granularity Network (MGN): a global branch, and two branches that also pool horizontal parts."""

import copy
import logging
from typing import Any

import torch
from torch import nn

from fastamp.config import CfgNode, Key
from fastamp.contracts import State
from fastamp.layers import build_norm
from fastamp.modeling.backbones import ResNet, build_backbone
from fastamp.modeling.heads import build_heads
from fastamp.modeling.losses import build_losses
from fastamp.modeling.losses.build import check_shareable
from fastamp.modeling.meta_arch.build import META_ARCH_REGISTRY
from fastamp.modeling.meta_arch.image_model import normalization
from fastamp.modeling.meta_arch.multi_branch import MultiBranchModel
from fastamp.utils.errors import ConfigError

logger = logging.getLogger(__name__)

KEYS = (
    Key(
        "MODEL.BACKBONE.EXTRA_BN",
        False,
        "MGN: batch norm after each of the three branches, before the heads (LUPerson, Fu et al. 2021, "
        "arXiv:2012.03753).",
    ),
)

# In the order of their features in the output.
HEADS = ("b1", "b2", "b3", "b21", "b22", "b31", "b32", "b33")
BRANCHES = ("b1", "b2", "b3")
# Pair losses use the concatenated features of the parts of a branch.
_PAIR_LOSS_PARTS = {"b1": ("b1",), "b2": ("b2",), "b3": ("b3",), "b22": ("b21", "b22"), "b33": ("b31", "b32", "b33")}


@META_ARCH_REGISTRY.register()
class MGN(MultiBranchModel):
    """Multiple Granularity Network (Wang et al. 2018, arXiv:1804.01438).

    A ResNet up to the first block of its third stage is followed by three branches, which are copies of the remaining
    blocks. The last stage of branches 2 and 3 has stride 1. Each branch has a head for the whole feature map. In
    addition, branch 2 has two heads, for the upper and lower halves of its feature map, and branch 3 has three heads,
    one for each third. As in FastReID, each head has a separate reduction and classifier. A classification loss is
    averaged over the eight heads. A loss over pairs is averaged over five features: the feature of each of the three
    whole feature maps, the concatenated features of the halves, and the concatenated features of the thirds.

    Args:
        backbone: a ResNet; its layers are moved into this module, and its weights initialize all three branches.
        heads: name in ``HEADS`` -> head.
        losses: loss name -> module with ``forward(outputs, targets) -> scalar``.
        gather: gather the features of all ranks for losses that compare images (``over_pairs``). Default False.
        branch_norm: normalization layer after each branch, a name in ``NORM_REGISTRY``. Default "": none.
        pixels: ``pixel_mean`` and ``pixel_std``; see ``ImageModel``.
    """

    trunks = ("backbone", "b1", "b2", "b3")
    one_graph = True
    head_names = HEADS
    pair_features = _PAIR_LOSS_PARTS

    def __init__(
        self,
        *,
        backbone: ResNet,
        heads: dict[str, nn.Module],
        losses: nn.ModuleDict,
        gather: bool = False,
        branch_norm: str = "",
        **pixels: Any,
    ) -> None:
        if backbone.mixstyle is not None:
            logger.warning(
                "MODEL.BACKBONE.MIXSTYLE is ignored: MGN does not support it.\n"
                "  fix: set MODEL.BACKBONE.MIXSTYLE to False"
            )
        trunk = nn.Sequential(
            backbone.conv1,
            backbone.bn1,
            backbone.relu,
            backbone.maxpool,
            backbone.layer1,
            backbone.layer2,
            backbone.get_submodule("layer3.0"),
        )
        super().__init__(backbone=trunk, losses=losses, gather=gather, **pixels)
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
        self.has_branch_norms = bool(branch_norm)
        if branch_norm:
            for branch in BRANCHES:
                self.add_module(f"heads_extra_bn_{branch}", build_norm(branch_norm, backbone.feature_dim))

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        """Build the parts configured in ``MODEL``, and return the constructor arguments.

        Raises:
            ConfigError: if the backbone is not a ResNet, ``POOL_LAYER`` is Flatten, or a loss has learnable parameters;
                see also ``normalization``, ``build_backbone``, ``build_heads`` and ``build_losses``.
        """
        if cfg.MODEL.HEADS.POOL_LAYER == "Flatten":
            raise ConfigError(
                "MODEL.META_ARCHITECTURE=MGN does not support MODEL.HEADS.POOL_LAYER=Flatten, because MGN pools inputs "
                "of three sizes: whole feature maps, halves and thirds.\n"
                "  fix: choose another pooling layer, e.g. MODEL.HEADS.POOL_LAYER=GlobalAvgPool"
            )
        backbone = build_backbone(cfg)
        if not isinstance(backbone, ResNet):
            raise ConfigError(
                "MODEL.META_ARCHITECTURE=MGN requires a ResNet, but MODEL.BACKBONE.NAME is "
                f"{cfg.MODEL.BACKBONE.NAME}.\n"
                "  fix: set MODEL.BACKBONE.NAME to build_resnet_backbone"
            )
        if cfg.MODEL.BACKBONE.WITH_NL:
            logger.warning("MODEL.BACKBONE.WITH_NL is ignored: MGN has no non-local blocks.\n  fix: set it to False")
        losses = build_losses(cfg)
        check_shareable(losses, "MGN's eight heads")
        return {
            "backbone": backbone,
            "heads": {name: build_heads(cfg) for name in HEADS},
            "losses": losses,
            "gather": cfg.MODEL.LOSSES.GATHER,
            "branch_norm": cfg.MODEL.BACKBONE.NORM if cfg.MODEL.BACKBONE.EXTRA_BN else "",
            **normalization(cfg),
        }

    def head_inputs(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Compute the feature map of each head: head name -> (B, D, h, w)."""
        trunk = self.feature_maps(batch)
        maps = {branch: self.get_submodule(branch)(trunk) for branch in BRANCHES}
        if self.has_branch_norms:
            maps = {branch: self.get_submodule(f"heads_extra_bn_{branch}")(value) for branch, value in maps.items()}
        return maps | self._split_height("b2", maps["b2"], 2) | self._split_height("b3", maps["b3"], 3)

    @staticmethod
    def _split_height(branch: str, maps: torch.Tensor, count: int) -> dict[str, torch.Tensor]:
        """Split (B, D, h, w) into ``count`` horizontal parts, named from the top ``b21``, ``b22``, ..."""
        parts = maps.chunk(count, dim=2)
        if len(parts) < count:
            raise ConfigError(
                f"MGN splits feature maps into {count} horizontal parts, but the feature map has height "
                f"{maps.shape[2]}.\n  fix: increase the height in INPUT.SIZE_TRAIN and INPUT.SIZE_TEST"
            )
        return {f"{branch}{number}": part for number, part in enumerate(parts, start=1)}


def backbone_state(state: State) -> State:
    """Extract the weights of a ResNet from the state dict of an MGN: the shared layers and the first branch."""
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
    """Copy a stage of a ResNet and set the stride of its convolutions to 1."""
    stage = copy.deepcopy(stage)
    for module in stage.modules():
        if isinstance(module, nn.Conv2d):
            module.stride = (1, 1)
    return stage
