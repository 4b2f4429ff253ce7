"""SOLIDER's Swin Transformer with a semantic weight (Chen et al. 2023, arXiv:2303.17602) as a backbone."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models.swin_transformer import ShiftedWindowAttention

from fastamp.amp import force_fp32
from fastamp.checkpoint.state_dict_conversion import rename_modules
from fastamp.config import CfgNode, Key
from fastamp.contracts import State
from fastamp.layers import dot_product_attention
from fastamp.modeling.backbones.build import BACKBONE_REGISTRY, variants
from fastamp.modeling.backbones.build_utils import choose_depth, with_pretrained_weights
from fastamp.modeling.backbones.swin import DEPTHS, Depth, Swin

KEYS = (
    Key(
        "MODEL.BACKBONE.SEMANTIC_WEIGHT",
        0.2,
        "SOLIDER's Swin: semantic weight, in 0..1; 0 emphasizes appearance and 1 semantics. A negative weight removes "
        "the layers that use it.",
        high=1,
    ),
)


class PaddedWindowAttention(ShiftedWindowAttention):
    """Window attention that pads the map, then shifts the windows, for maps of any size.

    torchvision's attention does not shift windows along an axis that one window covers; this one does. Its parameters
    are the same.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, H, W, C) to (B, H, W, C).

        Padded positions are zeros that other positions of their window attend to, as in the original program.
        """
        batch, height, width, channels = x.shape
        rows, columns = self.window_size
        x = F.pad(x, (0, 0, 0, -width % columns, 0, -height % rows))
        down, across = x.shape[1] // rows, x.shape[2] // columns
        shifts = tuple(self.shift_size)
        mask = self.get_relative_position_bias()
        if any(shifts):
            x = torch.roll(x, (-shifts[0], -shifts[1]), dims=(1, 2))
            mask = mask + self._region_mask(down, across, x.device)[:, None]
        # Windows are treated like heads, so that the mask has a batch dimension of 1.
        heads, tokens = self.num_heads, rows * columns
        x = x.view(batch, down, rows, across, columns, channels).transpose(2, 3).reshape(batch, -1, tokens, channels)
        windows = down * across
        q, k, v = self.qkv(x).view(batch, windows, tokens, 3, heads, -1).permute(3, 0, 1, 4, 2, 5).flatten(2, 3)
        mask = mask.expand(windows, -1, -1, -1).reshape(1, windows * heads, tokens, tokens)
        dropout = self.attention_dropout if self.training else 0.0
        x = dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype), dropout_p=dropout)
        x = x.view(batch, windows, heads, tokens, -1).transpose(2, 3).reshape(batch, windows, tokens, channels)
        x = F.dropout(self.proj(x), self.dropout, self.training)
        x = x.view(batch, down, across, rows, columns, channels).transpose(2, 3)
        x = x.reshape(batch, down * rows, across * columns, channels)
        if any(shifts):
            x = torch.roll(x, shifts, dims=(1, 2))
        return x[:, :height, :width]

    def _region_mask(self, down: int, across: int, device: torch.device) -> torch.Tensor:
        """Compute the mask of the scores: (windows, N, N), -100 for pairs of positions of different regions, else 0.

        Args:
            down, across: number of windows along the height and the width.
        """
        regions = []
        for count, size, shift in zip((down, across), self.window_size, self.shift_size, strict=True):
            index = torch.arange(count * size, device=device)
            last = (index >= (count - 1) * size).long() + (index >= count * size - shift).long()
            regions.append(last.view(count, size))
        region = 3 * regions[0][:, None, :, None] + regions[1][None, :, None, :]
        region = region.flatten(2).flatten(0, 1)
        return (region[:, :, None] != region[:, None]) * -100.0


class SemanticModulation(nn.Module):
    """Scale and shift channels by frozen linear functions of the semantic weight (Chen et al. 2023, section 3.3).

    Args:
        channels: number of channels.
        weight: semantic weight, in 0..1.
    """

    def __init__(self, channels: int, weight: float) -> None:
        super().__init__()
        self.scale, self.shift = nn.Linear(2, channels), nn.Linear(2, channels)
        self.requires_grad_(False)
        self.register_buffer("semantics", torch.tensor([weight, 1 - weight]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, H, W, channels) to (B, H, W, channels)."""
        scale, shift = self._scale_and_shift()
        return x * scale.to(x.dtype) + shift.to(x.dtype)

    @force_fp32
    def _scale_and_shift(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the factor and the offset of each channel, (channels,) float32."""
        return F.softplus(self.scale(self.semantics)), self.shift(self.semantics)


class SoliderSwin(Swin):
    """Swin Transformer whose maps are modulated by a semantic weight after each patch merging.

    Args:
        depth: width and numbers of blocks and heads.
        semantic_weight: semantic weight, in 0..1; negative for a model without modulation. Default 0.2.
        arguments: see ``Swin``.
    """

    def __init__(self, depth: Depth, *, semantic_weight: float = 0.2, **arguments: Any) -> None:
        super().__init__(depth, **arguments, attention=PaddedWindowAttention)
        self.semantic = nn.ModuleList()
        if semantic_weight >= 0:
            mergings = (self.features[index] for index in (2, 4, 6))
            self.semantic.extend(SemanticModulation(2 * merging.dim, semantic_weight) for merging in mergings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map normalized images (B, in_channels, H, W) to the last norm's output (B, feature_dim, ~H/32, ~W/32)."""
        for index in range(len(self.features)):
            x = self.run_layer(index, x)
            if self.semantic and index in (2, 4, 6):
                x = self.semantic[index // 2 - 1](x)
        return self.permute(self.norm(x))

    def equal_on_all_ranks(self) -> tuple[str, ...]:
        """Return the names of the buffers that are equal on all ranks: constants."""
        semantics = (f"semantic.{index}.semantics" for index in range(len(self.semantic)))
        return (*super().equal_on_all_ranks(), *semantics)

    def convert_state_dict(self, state: State, notes: list[str]) -> State:
        """Convert SOLIDER's parameter names, which are mmsegmentation's, and its order of merged patches.

        The norms of the first three stages and the fourth modulation do not influence the features; they are dropped.
        """
        if not any(key.startswith("stages.") for key in state):
            return super().convert_state_dict(state, notes)
        names = {"patch_embed.projection": "features.0.0", "patch_embed.norm": "features.0.2", "norm3": "norm"}
        parts = {"norm1": "norm1", "norm2": "norm2", "ffn.layers.0.0": "mlp.0", "ffn.layers.1": "mlp.3"}
        parts |= {"attn.w_msa": "attn", "attn.w_msa.qkv": "attn.qkv", "attn.w_msa.proj": "attn.proj"}
        for stage in range(4):
            for block in range(len(self.features[2 * stage + 1])):
                source, target = f"stages.{stage}.blocks.{block}", f"features.{2 * stage + 1}.{block}"
                names |= {f"{source}.{part}": f"{target}.{parts[part]}" for part in parts}
            if stage < 3:
                target = f"features.{2 * stage + 2}"
                names |= {f"stages.{stage}.downsample.{part}": f"{target}.{part}" for part in ("norm", "reduction")}
                names |= {f"semantic_embed_w.{stage}": f"semantic.{stage}.scale"}
                names |= {f"semantic_embed_b.{stage}": f"semantic.{stage}.shift"}
        without_effect = ("norm0.", "norm1.", "norm2.", "semantic_embed_w.3.", "semantic_embed_b.3.")
        kept = {
            key: value
            for key, value in state.items()
            if not key.startswith(without_effect) and not key.endswith("relative_position_index")
        }
        if len(self.semantic) == 0:
            kept = {key: value for key, value in kept.items() if not key.startswith("semantic_embed_")}
        converted = {key: _by_position(value) if ".downsample." in key else value for key, value in kept.items()}
        return _with_window(rename_modules(converted, names), self)


def _by_position(value: torch.Tensor) -> torch.Tensor:
    """Reorder the last dimension of a patch merging: from channels, then positions, to positions, then channels.

    The four positions are (row, column) = (0, 0), (0, 1), (1, 0), (1, 1) in SOLIDER; torchvision swaps the second and
    the third.
    """
    return value.unflatten(-1, (-1, 4)).transpose(-1, -2)[..., [0, 2, 1, 3], :].flatten(-2)


def _with_window(state: State, model: nn.Module) -> State:
    """Resize tables of relative positions, (2 R - 1)(2 C - 1) x heads, of other windows by bicubic interpolation."""
    model_state = model.state_dict()
    resized = {}
    for key, table in state.items():
        if key.endswith("relative_position_bias_table") and key in model_state and len(table) != len(model_state[key]):
            old, new = math.isqrt(len(table)), math.isqrt(len(model_state[key]))
            if old * old != len(table):  # not a square window: loading reports the shape mismatch
                return state
            image = table.T.view(1, -1, old, old)
            image = F.interpolate(image, size=(new, new), mode="bicubic")
            table = image.flatten(2)[0].T
        resized[key] = table
    return resized


def _keys_of(trunk: State) -> dict[str, str]:
    """Infer whether a weights file contains layers for the semantic weight; the weight itself is not stored.

    Without these layers, only SOLIDER's names distinguish it from Swin, whose windows differ.
    """
    has_layers = any(key.startswith(("semantic_embed_", "semantic.")) for key in trunk)
    is_solider = any(key.startswith("stages.") for key in trunk)
    return {"MODEL.BACKBONE.SEMANTIC_WEIGHT": "-1"} if is_solider and not has_layers else {}


@BACKBONE_REGISTRY.register()
@variants(DEPTHS, keys_of=_keys_of)
def build_solider_backbone(cfg: CfgNode) -> SoliderSwin:
    """Build SOLIDER's Swin configured in ``MODEL.BACKBONE``; load ``PRETRAIN_PATH`` if ``PRETRAIN`` is True.

    Raises:
        ConfigError: if ``DEPTH`` is unknown, or ``PRETRAIN`` is True without ``PRETRAIN_PATH``.
        WeightsError: if the pretrained weights cannot be read, or do not match the model.
    """
    backbone = cfg.MODEL.BACKBONE
    depth = choose_depth(cfg, DEPTHS)
    model = SoliderSwin(
        depth,
        semantic_weight=backbone.SEMANTIC_WEIGHT,
        in_channels=cfg.INPUT.CHANNELS,
        drop_path=backbone.DROP_PATH_RATIO,
        dropout=backbone.DROP_RATIO,
        attention_dropout=backbone.ATT_DROP_RATE,
        checkpointing=backbone.CHECKPOINTING,
    )
    return with_pretrained_weights(model, cfg, None)
