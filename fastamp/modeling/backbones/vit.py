"""Vision Transformer (Dosovitskiy et al. 2021, arXiv:2010.11929) with timm's parameter names."""

import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from fastamp.checkpoint.pretrained import Download
from fastamp.config import CfgNode, Key
from fastamp.contracts import State
from fastamp.layers import IBN, DropPath, build_norm, dot_product_attention
from fastamp.modeling.backbones.build import BACKBONE_REGISTRY, variants
from fastamp.modeling.backbones.build_utils import (
    LayerGroups,
    choose_depth,
    layers_in_order,
    with_pretrained_weights,
)
from fastamp.modeling.backbones.position_grid import COMMON_STRIDES, REID_SIZES
from fastamp.modeling.backbones.transformer import (
    TokenBackbone,
    patch_grid,
    run_block,
    transformer_options,
)
from fastamp.utils.errors import ConfigError

KEYS = (
    Key(
        "MODEL.BACKBONE.STRIDE_SIZE",
        (16, 16),
        "ViT: vertical and horizontal stride of the patches, in pixels; strides below the patch size, 16, make the "
        "patches overlap. For timm models with another patch size, (16, 16) means no overlap.",
        low=1,
        length=2,
    ),
    Key(
        "MODEL.BACKBONE.PART_TOKENS",
        0,
        "ViT: number of learned part tokens next to the class token (PASS, Zhu et al. 2022: 3), for PartTokenHead.",
        low=0,
    ),
    Key(
        "MODEL.BACKBONE.STEM_CONV",
        False,
        "ViT: embed patches by a convolutional stem with instance norms (ICS, Luo et al. 2021, arXiv:2111.12084).",
    ),
)

PATCH = 16
_EPS = 1e-6  # of all layer norms, as in timm and TransReID


@dataclass(frozen=True)
class Depth:
    """Configuration of a Vision Transformer.

    Attributes:
        pretrained: ImageNet weights.
        width: width of the tokens. Default 768.
        blocks: number of blocks. Default 12.
        heads: number of attention heads. Default 12.
        mlp_ratio: hidden width of the MLPs, relative to ``width``. Default 4.
        qkv_bias: use a bias for queries, keys and values. Default True.
        scale: factor on the dot products of queries and keys. Default None: (width / heads) ** -0.5.
    """

    pretrained: Download
    width: int = 768
    blocks: int = 12
    heads: int = 12
    mlp_ratio: float = 4.0
    qkv_bias: bool = True
    scale: float | None = None


_TIMM = "https://github.com/rwightman/pytorch-image-models/releases/download/"
_DEIT = "https://dl.fbaipublicfiles.com/deit/"
DEPTHS = {
    # timm's first "small" ViT: width 768 like "base", and a scale from the width instead of the head width.
    "small": Depth(
        Download(_TIMM + "v0.1-weights/vit_small_p16_224-15ec54c9.pth"),
        blocks=8,
        heads=8,
        mlp_ratio=3.0,
        qkv_bias=False,
        scale=768**-0.5,
    ),
    "base": Depth(Download(_TIMM + "v0.1-vitjx/jx_vit_base_p16_224-80ecf9dd.pth")),
    # Touvron et al. 2021, arXiv:2012.12877; the distillation token is not used.
    "deit_small": Depth(Download(_DEIT + "deit_small_distilled_patch16_224-649709d9.pth"), width=384, heads=6),
    "deit_base": Depth(Download(_DEIT + "deit_base_distilled_patch16_224-df68dfff.pth")),
}


class PatchEmbedding(nn.Module):
    """Embedding of 16 x 16 patches. Patches overlap if the stride is less than 16 (TransReID, arXiv:2102.04378).

    Args:
        in_channels: number of image channels.
        width: width of the tokens.
        stride: vertical and horizontal stride of the patches.
    """

    def __init__(self, in_channels: int, width: int, stride: tuple[int, int]) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, width, PATCH, stride)
        nn.init.normal_(self.proj.weight, 0, math.sqrt(2.0 / (PATCH * PATCH * width)))

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int]]:
        """Compute the tokens (B, h * w, width), row by row, and the grid size (h, w)."""
        patches = self.proj(images)
        return patches.flatten(2).transpose(1, 2), (patches.shape[2], patches.shape[3])


class ConvPatchEmbedding(nn.Module):
    """Embedding of 16 x 16 patches by a convolutional stem with instance and batch norms (ICS).

    Luo et al. 2021, "Self-supervised pre-training for transformer-based person re-identification", arXiv:2111.12084.

    Args:
        in_channels: number of image channels.
        width: width of the tokens.
        norm: batch norm of the stem, a name in ``NORM_REGISTRY``. Default ``"BN"``.
    """

    _CHANNELS = 64

    def __init__(self, in_channels: int, width: int, norm: str = "BN") -> None:
        super().__init__()
        channels = self._CHANNELS
        self.conv = nn.Sequential(
            nn.Conv2d(in_channels, channels, 7, stride=2, padding=3, bias=False),
            IBN(norm, channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            IBN(norm, channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            build_norm(norm, channels),
            nn.ReLU(inplace=True),
        )
        self.proj = nn.Conv2d(channels, width, PATCH // 2, PATCH // 2)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int]]:
        """Compute the tokens (B, h * w, width), row by row, and the grid size (h, w)."""
        patches = self.proj(self.conv(images))
        return patches.flatten(2).transpose(1, 2), (patches.shape[2], patches.shape[3])


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(
        self, width: int, *, heads: int, qkv_bias: bool, scale: float | None, dropout: float, attention_dropout: float
    ) -> None:
        super().__init__()
        self.heads, self.scale, self.attention_dropout = heads, scale, attention_dropout
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.proj = nn.Linear(width, width)
        self.proj_drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads)
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, heads, tokens, width / heads)
        dropout = self.attention_dropout if self.training else 0.0
        mixed = dot_product_attention(queries, keys, values, dropout_p=dropout, scale=self.scale)
        return self.proj_drop(self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width)))


class Mlp(nn.Module):
    """Two linear layers with a GELU in between."""

    def __init__(self, width: int, hidden: int, *, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class Block(nn.Module):
    """Transformer block: attention and MLP, each with a preceding layer norm and a residual connection.

    Args:
        depth: size of the network: embedding width, number of blocks and number of heads.
        dropout: dropout probability of the attention and MLP outputs.
        attention_dropout: dropout probability of the attention weights.
        drop_path: stochastic depth probability, per image (Huang et al. 2016, arXiv:1603.09382).
    """

    def __init__(self, depth: Depth, *, dropout: float, attention_dropout: float, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(depth.width, eps=_EPS)
        self.attn = Attention(
            depth.width,
            heads=depth.heads,
            qkv_bias=depth.qkv_bias,
            scale=depth.scale,
            dropout=dropout,
            attention_dropout=attention_dropout,
        )
        self.norm2 = nn.LayerNorm(depth.width, eps=_EPS)
        self.mlp = Mlp(depth.width, int(depth.width * depth.mlp_ratio), dropout=dropout)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map a (B, tokens, width) tensor to a tensor of the same shape."""
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class VisionTransformer(TokenBackbone):
    """Vision Transformer with the class token as feature.

    Args:
        depth: size of the network: embedding width, number of blocks and number of heads.
        image_size: height and width of the images for which the position embedding is created. For images of other
            sizes, the position embedding is resized.
        in_channels: number of image channels.
        stride: vertical and horizontal stride of the patches.
        dropout: dropout probability of the tokens, and of the attention and MLP outputs.
        attention_dropout: dropout probability of the attention weights.
        drop_path: stochastic depth probability of the last block; it grows linearly from 0 in the first block.
        cameras, views: number of cameras and of views with a learned embedding, which is added to all tokens of an
            image (TransReID's side information embedding, arXiv:2102.04378). If both are positive, each camera-view
            pair has an embedding. 0 disables the embedding.
        side_weight: weight of the camera and view embedding.
        part_tokens: number of learned tokens after the class token, as in PASS (Zhu et al. 2022, arXiv:2203.03931).
            Default 0.
        stem_norm: batch norm of a convolutional stem, see ``ConvPatchEmbedding``. Default "": no stem.
        checkpointing: recompute the activations of each block in the backward pass.
        weights_grid: see ``PositionGrid``. Default ().
    """

    def __init__(
        self,
        *,
        depth: Depth,
        image_size: tuple[int, int],
        in_channels: int = 3,
        stride: tuple[int, int] = (PATCH, PATCH),
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        drop_path: float = 0.0,
        cameras: int = 0,
        views: int = 0,
        side_weight: float = 3.0,
        part_tokens: int = 0,
        stem_norm: str = "",
        checkpointing: bool = False,
        weights_grid: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.weights_grid = weights_grid
        self.feature_dim = depth.width
        self.stride = stride
        self.grid = self.patch_grid(image_size)
        self.checkpointing = checkpointing
        self.cls_token = nn.Parameter(torch.zeros(1, 1, depth.width))
        self.prefix = 1 + part_tokens
        self.pos_embed = nn.Parameter(torch.zeros(1, self.prefix + math.prod(self.grid), depth.width))
        if part_tokens:
            self.part_token = nn.Parameter(torch.zeros(1, part_tokens, depth.width))
        self.create_side_embedding(depth.width, cameras=cameras, views=views, side_weight=side_weight)
        self.patch_embed: nn.Module = PatchEmbedding(in_channels, depth.width, stride)
        if stem_norm:
            self.patch_embed = ConvPatchEmbedding(in_channels, depth.width, stem_norm)
        self.pos_drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(
                depth,
                dropout=dropout,
                attention_dropout=attention_dropout,
                drop_path=drop_path * number / max(depth.blocks - 1, 1),
            )
            for number in range(depth.blocks)
        )
        self.norm: nn.LayerNorm | None = nn.LayerNorm(depth.width, eps=_EPS)
        self._init_weights()

    def _init_weights(self) -> None:
        names = ("cls_token", "part_token", "pos_embed")
        for name, parameter in self.named_parameters(recurse=False):
            if name in names:
                nn.init.trunc_normal_(parameter, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(
        self, x: torch.Tensor, camids: torch.Tensor | None = None, viewids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the class token, or all tokens if the last block was removed by ``hand_over_last_block``.

        Args:
            x: (B, in_channels, H, W) float, normalized images.
            camids, viewids: (B,) int64, starting at 0; required if the model has embeddings for cameras or views,
                respectively.

        Returns:
            (B, feature_dim, 1, 1), the class token after the last norm; with part tokens (B, feature_dim, 1 + parts,
            1). If the last block was removed: (B, 1 + patches, feature_dim), all tokens, without the last norm.

        Raises:
            ValueError: if required camera or view IDs are missing.
        """
        patches, grid = self.patch_embed(x)
        learned = (self.cls_token, self.part_token) if self.prefix > 1 else (self.cls_token,)
        expanded = (token.expand(x.shape[0], -1, -1) for token in learned)
        tokens = torch.cat((*expanded, patches), dim=1) + self._positions(grid)
        tokens = self.pos_drop(self.add_side_information(tokens, camids, viewids))
        for block in self.blocks:
            tokens = run_block(block, tokens, checkpointing=self.checkpointing)
        if self.norm is None:
            return tokens
        return self.norm(tokens)[:, : self.prefix].transpose(1, 2)[..., None]

    def _positions(self, grid: tuple[int, int]) -> torch.Tensor:
        """Return the position embedding (1, prefix + patches, width) for a ``grid`` of patches."""
        if grid == self.grid:
            return self.pos_embed
        return resize_positions(self.pos_embed, self.grid, grid, prefix=self.prefix)

    @property
    def last_block(self) -> nn.Module | None:
        """The last block; None after ``hand_over_last_block``."""
        return None if self.norm is None else self.blocks[-1]

    def layer_groups(self) -> LayerGroups:
        """List the modules of each block, in order, and the final norm, for layer-wise learning-rate decay."""
        return layers_in_order(self, "blocks")

    def hand_over_last_block(self) -> nn.Sequential:
        """Remove and return the last block and the norm; ``forward`` then returns all tokens.

        Raises:
            ConfigError: if the model has part tokens.
        """
        if self.prefix > 1:
            raise ConfigError(
                "MODEL.BACKBONE.PART_TOKENS is not supported with MODEL.HEADS.NAME=JPMHead.\n"
                "  fix: set MODEL.HEADS.NAME to PartTokenHead, or MODEL.BACKBONE.PART_TOKENS to 0"
            )
        last = nn.Sequential(self.blocks[-1], self.norm)
        del self.blocks[-1]
        self.norm = None
        return last

    def convert_state_dict(self, state: dict[str, torch.Tensor], notes: list[str]) -> dict[str, torch.Tensor]:
        """Convert a timm, DeiT, FastReID, TransReID or PASS state dict; resize the position embedding to this grid."""
        state = _join_part_tokens(state)
        weight = state.get("patch_embed.proj.weight")
        # timm's oldest files have a linear layer over the pixels of a patch.
        if weight is not None and weight.dim() == 2 and weight.shape[1] % PATCH**2 == 0:
            state["patch_embed.proj.weight"] = weight.reshape(len(weight), -1, PATCH, PATCH)
        positions = state.get("pos_embed")
        # Embeddings of other shapes are kept, so that loading reports the shape mismatch.
        prefix = 1 + (state["part_token"].shape[1] if "part_token" in state else 0)
        if (
            prefix == self.prefix
            and positions is not None
            and positions.dim() == 3
            and positions.shape[0] == 1
            and positions.shape[1] > prefix + 1
        ):
            if state.pop("dist_token", None) is not None:  # DeiT's second token, after the class token
                positions = torch.cat((positions[:, :1], positions[:, 2:]), dim=1)
            grid = self.grid_in_file(positions.shape[1] - prefix, notes, "bilinear")
            if grid != self.grid:
                positions = resize_positions(positions, grid, self.grid, prefix=prefix)
            state["pos_embed"] = positions
        self.note_unused_side_embedding(state, notes)
        return state


def _join_part_tokens(state: State) -> State:
    """Copy a state dict, and join PASS's ``part_token1``, ..., ``cls_pos``, ``part1_pos``, ... and ``pos_embed``."""
    state = dict(state)
    if "cls_pos" not in state:
        return state
    numbers = range(1, sum(name.startswith("part_token") for name in state) + 1)
    positions = [state.pop("cls_pos"), *(state.pop(f"part{number}_pos") for number in numbers)]
    state["part_token"] = torch.cat([state.pop(f"part_token{number}") for number in numbers], dim=1)
    state["pos_embed"] = torch.cat([*positions, state["pos_embed"]], dim=1)
    return state


def resize_positions(
    positions: torch.Tensor, old: tuple[int, int], new: tuple[int, int], *, prefix: int = 1
) -> torch.Tensor:
    """Resize a position embedding to another grid by bilinear interpolation; learned tokens are not changed.

    Args:
        positions: (1, prefix + h * w, D) float, the class token and other learned tokens first.
        old: current grid (h, w).
        new: target grid (h', w').
        prefix: number of learned tokens. Default 1.

    Returns:
        (1, prefix + h' * w', D), same dtype as ``positions``.
    """
    width = positions.shape[2]
    maps = positions[:, prefix:].reshape(1, *old, width).permute(0, 3, 1, 2)
    maps = F.interpolate(maps.float(), size=new, mode="bilinear", align_corners=False).to(positions.dtype)
    return torch.cat((positions[:, :prefix], maps.flatten(2).transpose(1, 2)), dim=1)


def infer_embedding_keys(state: State) -> dict[str, str]:
    """Infer config keys from the embeddings of a ViT: number of cameras, image size and patch stride.

    Args:
        state: tensors of a ViT.

    Returns:
        Config key -> value, as text. Contains the image size and patch stride only if a common image size has the
        number of patches of the position embedding.
    """
    keys = {}
    if "sie_embed" in state:
        keys["MODEL.BACKBONE.SIE_CAMERAS"] = str(len(state["sie_embed"]))
    if "patch_embed.conv.0.weight" in state:
        keys["MODEL.BACKBONE.STEM_CONV"] = "True"
    state, prefix = _join_part_tokens(state), 1
    if "part_token" in state:
        prefix += state["part_token"].shape[1]
        keys["MODEL.BACKBONE.PART_TOKENS"] = str(prefix - 1)
    positions = state.get("pos_embed")
    if positions is None or positions.dim() != 3:
        return keys
    for (stride, _), size in itertools.product(COMMON_STRIDES, REID_SIZES):
        if math.prod(patch_grid(size, (PATCH, PATCH), stride)) == positions.shape[1] - prefix:
            keys |= {"MODEL.BACKBONE.STRIDE_SIZE": str(stride)}
            return keys | {"INPUT.SIZE_TRAIN": str(size), "INPUT.SIZE_TEST": str(size)}
    return keys


@BACKBONE_REGISTRY.register()
@variants(DEPTHS, keys_of=infer_embedding_keys)
def build_vit_backbone(cfg: CfgNode) -> VisionTransformer:
    """Build the ViT configured in ``MODEL.BACKBONE``; load pretrained weights if ``PRETRAIN`` is True.

    The position embedding is created for the size of the training images: ``INPUT.CROP.SIZE`` if
    ``INPUT.CROP.ENABLED`` is True, otherwise ``INPUT.SIZE_TRAIN``.

    Raises:
        ConfigError: if ``DEPTH`` is unknown, if the images are smaller than a patch, if the training images have no
            fixed size, or if ``STRIDE_SIZE`` is not two positive integers.
        WeightsError: if the pretrained weights cannot be downloaded or read, or do not match the model.
    """
    backbone = cfg.MODEL.BACKBONE
    depth = choose_depth(cfg, DEPTHS)
    if backbone.STEM_CONV and tuple(backbone.STRIDE_SIZE) != (PATCH, PATCH):
        raise ConfigError(
            f"MODEL.BACKBONE.STEM_CONV=True requires MODEL.BACKBONE.STRIDE_SIZE ({PATCH}, {PATCH}), but it is "
            f"{tuple(backbone.STRIDE_SIZE)}.\n  fix: set MODEL.BACKBONE.STRIDE_SIZE to ({PATCH}, {PATCH})"
        )
    model = VisionTransformer(
        depth=depth,
        part_tokens=backbone.PART_TOKENS,
        stem_norm=backbone.NORM if backbone.STEM_CONV else "",
        **transformer_options(cfg),
    )
    # ImageNet weights do not contain embeddings of cameras and parts.
    return with_pretrained_weights(model, cfg, depth.pretrained, without=("sie_embed", "part_token"))
