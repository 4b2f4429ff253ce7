"""torchvision's Swin Transformer (Liu et al. 2021, arXiv:2103.14030) as a backbone."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torchvision.models.swin_transformer import ShiftedWindowAttention, SwinTransformer, SwinTransformerBlock

from fastamp.checkpoint.pretrained import TorchvisionWeights
from fastamp.checkpoint.state_dict_conversion import rename_modules
from fastamp.config import CfgNode
from fastamp.modeling.backbones.build import BACKBONE_REGISTRY, variants
from fastamp.modeling.backbones.build_utils import (
    LayerGroups,
    choose_depth,
    with_pretrained_weights,
)
from fastamp.modeling.backbones.transformer import run_block

PATCH = 4
WINDOW = 7


@dataclass(frozen=True)
class Depth:
    """Configuration of a Swin Transformer.

    Attributes:
        width: channels of the first stage; doubled in each later stage.
        blocks: number of blocks in each of the four stages.
        heads: number of attention heads in each stage.
        weights: name of the model in torchvision.
    """

    width: int
    blocks: tuple[int, int, int, int]
    heads: tuple[int, int, int, int]
    weights: str


DEPTHS = {
    "tiny": Depth(96, (2, 2, 6, 2), (3, 6, 12, 24), "swin_t"),
    "small": Depth(96, (2, 2, 18, 2), (3, 6, 12, 24), "swin_s"),
    "base": Depth(128, (2, 2, 18, 2), (4, 8, 16, 32), "swin_b"),
}


class Swin(SwinTransformer):
    """Swin Transformer without classifier, with torchvision's parameter names, for images of any size.

    Feature maps are padded to multiples of the window size. The relative position index is computed from the window
    size and is not part of the state dict. The output stride is always 32, because each layer that halves the
    resolution also doubles the number of channels.

    Args:
        depth: width and numbers of blocks and heads.
        in_channels: number of image channels.
        drop_path: stochastic depth probability of the last block; it grows linearly from 0 in the first block.
        dropout: dropout probability of the attention and MLP outputs.
        attention_dropout: dropout probability of the attention weights.
        attention: class of the attention. Default: torchvision's.
        checkpointing: recompute the activations of each block in the backward pass. Default False.
    """

    def __init__(
        self,
        depth: Depth,
        *,
        in_channels: int = 3,
        drop_path: float = 0.1,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        attention: type[ShiftedWindowAttention] = ShiftedWindowAttention,
        checkpointing: bool = False,
    ) -> None:
        super().__init__(
            patch_size=[PATCH, PATCH],
            embed_dim=depth.width,
            depths=[*depth.blocks],
            num_heads=[*depth.heads],
            window_size=[WINDOW, WINDOW],
            dropout=dropout,
            attention_dropout=attention_dropout,
            stochastic_depth_prob=drop_path,
            block=partial(SwinTransformerBlock, attn_layer=attention),
        )
        del self.avgpool, self.flatten, self.head
        if in_channels != 3:
            self.features[0][0] = nn.Conv2d(in_channels, depth.width, PATCH, stride=PATCH)
        for module in self.modules():
            if isinstance(module, ShiftedWindowAttention):
                index = module.relative_position_index
                del module.relative_position_index
                module.register_buffer("relative_position_index", index, persistent=False)
        self.feature_dim = self.norm.normalized_shape[0]
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map normalized images (B, in_channels, H, W) to the last norm's output (B, feature_dim, ~H/32, ~W/32)."""
        for index in range(len(self.features)):
            x = self.run_layer(index, x)
        return self.permute(self.norm(x))

    def run_layer(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Apply ``features[index]``: the patch embedding, the blocks of a stage (odd indices), or a patch merging."""
        if index % 2 == 0:
            return self.features[index](x)
        for block in self.features[index]:
            x = run_block(block, x, checkpointing=self.checkpointing)
        return x

    def layer_groups(self) -> LayerGroups:
        """List the blocks of all stages, each patch merging with the block before it, and the final norm."""
        groups: LayerGroups = []
        for index in range(1, len(self.features)):
            if index % 2:
                groups.extend([block] for block in self.features[index])
            else:
                groups[-1].append(self.features[index])
        return [*groups, [self.norm]]

    def equal_on_all_ranks(self) -> tuple[str, ...]:
        """Return the names of the buffers that are equal on all ranks: constants."""
        return tuple(name for name, _ in self.named_buffers() if name.endswith("relative_position_index"))

    def convert_state_dict(self, state: dict[str, torch.Tensor], notes: list[str]) -> dict[str, torch.Tensor]:
        """Convert the authors' or timm's parameter names to torchvision's, and remove derived buffers."""
        names = {"patch_embed.proj": "features.0.0", "patch_embed.norm": "features.0.2"}
        parts = {part: part for part in ("norm1", "norm2", "attn", "attn.qkv", "attn.proj")}
        parts |= {"mlp.fc1": "mlp.0", "mlp.fc2": "mlp.3"}
        # Patch merging belongs to the end of a stage in the authors' files, to the start of the next stage in timm's.
        first = 0 if any(key.startswith("layers.0.downsample.") for key in state) else 1
        for stage in range(4):
            for block in range(len(self.features[2 * stage + 1])):
                source, target = f"layers.{stage}.blocks.{block}", f"features.{2 * stage + 1}.{block}"
                names |= {f"{source}.{part}": f"{target}.{parts[part]}" for part in parts}
            if stage < 3:
                source, target = f"layers.{stage + first}.downsample", f"features.{2 * stage + 2}"
                names |= {f"{source}.{part}": f"{target}.{part}" for part in ("norm", "reduction")}
        derived = ("relative_position_index", "attn_mask")
        return {key: value for key, value in rename_modules(state, names).items() if not key.endswith(derived)}


@BACKBONE_REGISTRY.register()
@variants(DEPTHS)
def build_swin_backbone(cfg: CfgNode) -> Swin:
    """Build the Swin configured in ``MODEL.BACKBONE``; load pretrained weights if ``PRETRAIN`` is True.

    Raises:
        ConfigError: if ``DEPTH`` is unknown.
        WeightsError: if the pretrained weights cannot be downloaded or read, or do not match the model.
    """
    backbone = cfg.MODEL.BACKBONE
    depth = choose_depth(cfg, DEPTHS)
    model = Swin(
        depth,
        in_channels=cfg.INPUT.CHANNELS,
        drop_path=backbone.DROP_PATH_RATIO,
        dropout=backbone.DROP_RATIO,
        attention_dropout=backbone.ATT_DROP_RATE,
        checkpointing=backbone.CHECKPOINTING,
    )
    return with_pretrained_weights(model, cfg, TorchvisionWeights(depth.weights))
