"""LightMBN: a global, a part and a channel branch on the first layers of an OSNet."""

import copy
import logging
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from fastamp.amp import force_fp32
from fastamp.config import CfgNode
from fastamp.contracts import State
from fastamp.layers import build_norm
from fastamp.modeling.backbones import OSNet, build_backbone
from fastamp.modeling.backbones.osnet import OSBlock
from fastamp.modeling.heads import build_heads
from fastamp.modeling.losses import build_losses
from fastamp.modeling.losses.build import check_shareable
from fastamp.modeling.meta_arch.build import META_ARCH_REGISTRY
from fastamp.modeling.meta_arch.image_model import normalization
from fastamp.modeling.meta_arch.multi_branch import MultiBranchModel
from fastamp.utils.errors import ConfigError

logger = logging.getLogger(__name__)

# In the order of their features in the output. "average" and "drop" belong to the global branch; "whole" is the max
# pooling of the part branch, "upper" and "lower" are its stripes; "first" and "second" are the halves of the channels.
# Exported models need names that are not keywords of Python.
HEADS = ("average", "drop", "whole", "upper", "lower", "first", "second")
_REDUCED = HEADS[:5]
_BRANCHES = ("global_branch", "partial_branch", "channel_branch")
_DROP_RATIO = 0.33
# Heads by the names of the authors' modules.
_PUBLISHED_HEADS = {
    "reduction_0": "average",
    "reduction_1": "whole",
    "reduction_2": "upper",
    "reduction_3": "lower",
    "reduction_4": "drop",
    "reduction_ch_0": "first",
    "reduction_ch_1": "second",
}


class _Reduction(nn.Conv2d):
    """Convolution before a neck, which an fp16 export keeps in float32 like the head that contains the neck."""

    force_fp32 = True


class _Shared(nn.Sequential):
    """Layers before two necks, in float32 like ``_Reduction``."""

    force_fp32 = True


@META_ARCH_REGISTRY.register()
class LightMBN(MultiBranchModel):
    """Lightweight Multi-Branch Network (Herzog et al. 2021, arXiv:2101.10774).

    An OSNet up to the first block of its second stage is followed by three branches, which are copies of the remaining
    layers. Seven features of width D are computed from the last maps of the branches:

    - global branch: after one more block, the average, and the maximum over the map without its most active rows, which
      are removed only in training (``drop_top_rows``);
    - part branch: the maximum, and the averages over the upper and the lower half;
    - channel branch: the average over the first and the second half of the channels, by a shared 1x1 convolution with
      batch norm and ReLU.

    The first five pass a 1x1 convolution each. Each feature has a batch norm neck and a classifier. A classification
    loss is the sum over the seven heads, a loss over pairs the sum over the three features of whole maps ("average",
    "drop" and "whole"), before the neck. In evaluation, the features after the neck are scaled to unit length and
    concatenated.

    Structure, drop ratio and losses are those of the authors' program (github.com/jixunbo/LightMBN, model ``LMBN_n``),
    whose files ``convert_state_dict`` reads; where the paper differs from the program is not known. Differs: with
    ``TEST.FLIP``, the features of an image and its mirror image are averaged after they are scaled to unit length; the
    authors add them before. Anchors of the multi-similarity loss with only positive or only negative mined pairs
    contribute to it; the authors skip them. The shared convolution and the block of the global branch are initialized
    as the others; the authors' program leaves PyTorch's initialization. Its current version starts from an OSNet with
    IBN (``MODEL.BACKBONE.WITH_IBN``). The published accuracy has not been reproduced here.

    Args:
        backbone: an OSNet; its layers are moved into this module, and its weights initialize all branches.
        heads: name in ``HEADS`` -> head for inputs (B, D, 1, 1).
        embedding_dim: D, the width of each feature.
        losses, gather, pixels: see ``MultiBranchModel``.
        norm: normalization layer of the shared layer and of the block of the global branch. Default ``"BN"``.
        drop_ratio: fraction of the rows that are removed, in 0..1. Default 0.33.
    """

    trunks = ("backbone", *_BRANCHES, "drop_block")
    one_graph = True
    head_names = HEADS
    pair_features: ClassVar = {name: (name,) for name in ("average", "drop", "whole")}
    mean_over_heads = False
    normalize_heads = True

    def __init__(
        self,
        *,
        backbone: OSNet,
        heads: dict[str, nn.Module],
        embedding_dim: int,
        losses: nn.ModuleDict,
        gather: bool = False,
        norm: str = "BN",
        drop_ratio: float = _DROP_RATIO,
        **pixels: Any,
    ) -> None:
        trunk = nn.Sequential(backbone.conv1, backbone.maxpool, backbone.conv2, backbone.conv3[0])
        super().__init__(backbone=trunk, losses=losses, gather=gather, **pixels)
        last = nn.Sequential(backbone.conv3[1:], backbone.conv4, backbone.conv5)
        for branch in _BRANCHES:
            self.add_module(branch, copy.deepcopy(last))
        channels = backbone.feature_dim
        self.drop_block, self.drop_ratio = OSBlock(channels, channels, norm=norm), drop_ratio
        self.reductions = nn.ModuleDict({name: _Reduction(channels, embedding_dim, 1, bias=False) for name in _REDUCED})
        convolution = nn.Conv2d(channels // 2, embedding_dim, 1, bias=False)
        self.shared = _Shared(convolution, build_norm(norm, embedding_dim), nn.ReLU())
        for module in (*self.drop_block.modules(), convolution):
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
        for name in HEADS:
            self.add_module(f"{name}_head", heads[name])

    @classmethod
    def from_config(cls, cfg: CfgNode) -> "LightMBN":
        """Build the model configured in ``MODEL`` for images with ``INPUT.CHANNELS`` channels.

        Raises:
            ConfigError: if the backbone is not an OSNet, the head is ``FCHead``, ``EMBEDDING_DIM`` is 0, or a loss has
                learnable parameters; see also ``normalization``, ``build_backbone``, ``build_heads`` and
                ``build_losses``.
        """
        width = cfg.MODEL.HEADS.EMBEDDING_DIM
        if width == 0:
            raise ConfigError(
                "MODEL.HEADS.EMBEDDING_DIM is 0, but LightMBN requires the width of its seven features.\n"
                "  fix: set MODEL.HEADS.EMBEDDING_DIM, e.g. to 512 as in the paper"
            )
        if cfg.MODEL.HEADS.NAME == "FCHead":  # whose layer before the neck would have to have this width
            raise ConfigError(
                "MODEL.META_ARCHITECTURE=LightMBN does not support MODEL.HEADS.NAME=FCHead.\n"
                "  fix: set MODEL.HEADS.NAME to EmbeddingHead"
            )
        backbone = build_backbone(cfg)
        if type(backbone) is not OSNet:
            raise ConfigError(
                f"MODEL.META_ARCHITECTURE=LightMBN requires an OSNet, but MODEL.BACKBONE.NAME is "
                f"{cfg.MODEL.BACKBONE.NAME}.\n  fix: set MODEL.BACKBONE.NAME to build_osnet_backbone"
            )
        if cfg.MODEL.HEADS.POOL_LAYER not in ("GlobalAvgPool", "FastGlobalAvgPool"):
            logger.warning(
                "MODEL.HEADS.POOL_LAYER is ignored: LightMBN has a fixed pooling for each of its features.\n"
                "  fix: remove the key"
            )
        losses = build_losses(cfg)
        check_shareable(losses, "LightMBN's seven heads")
        # Pooling and 1x1 convolution are layers of the model: the pair losses use the features after them.
        head = {"MODEL.HEADS.POOL_LAYER": "Identity", "MODEL.HEADS.EMBEDDING_DIM": 0, "MODEL.BACKBONE.FEAT_DIM": width}
        head_cfg = cfg.with_values(head)
        return cls(
            backbone=backbone,
            heads={name: build_heads(head_cfg) for name in HEADS},
            embedding_dim=width,
            losses=losses,
            gather=cfg.MODEL.LOSSES.GATHER,
            norm=cfg.MODEL.BACKBONE.NORM,
            **normalization(cfg),
        )

    def head_inputs(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Compute the input of each head, the feature before the neck: head name -> (B, D, 1, 1) float32."""
        trunk = self.feature_maps(batch)
        maps = self.drop_block(self.global_branch(trunk))
        kept = drop_top_rows(maps, self.drop_ratio) if self.training else maps
        return self._embed(maps, kept, self.partial_branch(trunk), self.channel_branch(trunk))

    @force_fp32
    def _embed(
        self, maps: torch.Tensor, kept: torch.Tensor, parts: torch.Tensor, channels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Pool the last maps of the branches and reduce the results to the width of the features."""
        upper, lower = F.adaptive_avg_pool2d(parts, (2, 1)).split(1, dim=2)
        pooled = {
            "average": F.adaptive_avg_pool2d(maps, 1),
            "drop": F.adaptive_max_pool2d(kept, 1),
            "whole": F.adaptive_max_pool2d(parts, 1),
            "upper": upper,
            "lower": lower,
        }
        halves = F.adaptive_avg_pool2d(channels, 1).chunk(2, dim=1)
        return {name: self.reductions[name](value) for name, value in pooled.items()} | {
            name: self.shared(half) for name, half in zip(("first", "second"), halves, strict=True)
        }

    def convert_state_dict(self, state: State, notes: list[str]) -> State:
        """Convert the parameter names of the authors' files."""
        return super().convert_state_dict(published_names(state), notes)


def drop_top_rows(maps: torch.Tensor, ratio: float) -> torch.Tensor:
    """Set the most active rows of each feature map to 0 (TopDropBlock, Quispe & Pedrini 2020, arXiv:2010.05435).

    The activation of a row is the largest sum of squares over the channels at one of its positions.

    Args:
        maps: (B, C, h, w) float.
        ratio: fraction of the h rows, in 0..1; the number of rows is rounded.

    Returns:
        (B, C, h, w), a copy.
    """
    height = maps.shape[2]
    activation = maps.detach().float().square().sum(1).amax(2)  # (B, h)
    rows = activation.topk(round(ratio * height), dim=1).indices
    keep = torch.ones_like(activation).scatter(1, rows, 0)
    return maps * keep[:, None, :, None].to(maps.dtype)


def published_names(state: State) -> State:
    """Convert the parameter names of the authors' files; other state dicts are returned unchanged."""
    if "reduction_0.reduction.weight" not in state:
        return state
    renamed = {}
    for name, value in state.items():
        module, _, rest = name.partition(".")
        if module in _PUBLISHED_HEADS:
            head = _PUBLISHED_HEADS[module]
            rest = rest.replace("bn.", f"{head}_head.bottleneck.0.").replace("classifier.", f"{head}_head.")
            name = rest.replace("reduction.", f"reductions.{head}.")
        else:
            name = name.replace("backone.", "backbone.", 1)  # as in older files
            name = name.replace("batch_drop_block.drop_batch_bottleneck.", "drop_block.")
        renamed[name] = value
    return renamed


def backbone_state(state: State) -> State:
    """Extract the weights of an OSNet from the state dict of a LightMBN: the shared layers and the global branch."""
    prefixes = {"backbone.0.": "conv1.", "backbone.2.": "conv2.", "backbone.3.": "conv3.0."}
    prefixes |= {"global_branch.0.": "conv3.", "global_branch.1.": "conv4.", "global_branch.2.": "conv5."}
    return {
        new + name.removeprefix(old): value
        for name, value in state.items()
        for old, new in prefixes.items()
        if name.startswith(old)
    }
