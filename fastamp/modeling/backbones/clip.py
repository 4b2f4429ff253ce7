"""Vision Transformer of CLIP (Radford et al. 2021, arXiv:2103.00020) as a backbone, and its residual blocks."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from fastamp.config import CfgNode, Key
from fastamp.contracts import State
from fastamp.layers import DropPath, dot_product_attention
from fastamp.modeling.backbones.build import BACKBONE_REGISTRY, variants
from fastamp.modeling.backbones.build_utils import (
    LayerGroups,
    choose_depth,
    with_pretrained_weights,
)
from fastamp.modeling.backbones.position_grid import PositionGrid
from fastamp.modeling.backbones.transformer import (
    TokenBackbone,
    run_block,
    transformer_options,
)
from fastamp.modeling.backbones.vit import infer_embedding_keys, resize_positions
from fastamp.utils.errors import ConfigError

KEYS = (
    Key(
        "MODEL.BACKBONE.PROJECTION",
        False,
        "CLIP: append the feature in the space of images and texts: the projection of the class token (ViT), or the "
        "attention pooling (ResNet). The output is then one vector per image: FEAT_DIM is the sum of both widths.",
    ),
    Key(
        "MODEL.BACKBONE.QUICK_GELU",
        True,
        "CLIP's ViT: activation x * sigmoid(1.702 x), as in OpenAI's weights; False for GELU, as in open_clip's models "
        "without quickgelu in their name.",
    ),
)

PATCH = 16
# Names of the image tower in Hugging Face's transformers, without its prefix, and in CLIP.
_TRANSFORMERS_NAMES = {
    "embeddings.class_embedding": "class_embedding",
    "embeddings.patch_embedding.": "conv1.",
    "embeddings.position_embedding.weight": "positional_embedding",
    "pre_layrnorm.": "ln_pre.",  # spelled so
    "post_layernorm.": "ln_post.",
    "encoder.layers.": "transformer.resblocks.",
    ".self_attn.out_proj.": ".attn.out_proj.",
    ".layer_norm1.": ".ln_1.",
    ".layer_norm2.": ".ln_2.",
    ".mlp.fc1.": ".mlp.c_fc.",
    ".mlp.fc2.": ".mlp.c_proj.",
}


@dataclass(frozen=True)
class ClipDepth:
    """Configuration of an image tower.

    Attributes:
        width: width of the tokens.
        blocks: number of blocks.
        heads: number of attention heads.
        embedding: width of the projection.
    """

    width: int
    blocks: int
    heads: int
    embedding: int


DEPTHS = {
    "base": ClipDepth(width=768, blocks=12, heads=12, embedding=512),
    # No published weights: for demos and tests.
    "tiny": ClipDepth(width=128, blocks=4, heads=2, embedding=64),
}


class QuickGELU(nn.Module):
    """Approximation x * sigmoid(1.702 x) of the GELU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x)


class PackedAttention(nn.Module):
    """Multi-head self-attention with the parameter names of ``nn.MultiheadAttention``.

    Args:
        width: width of the tokens.
        heads: number of attention heads.
        causal: let each token attend only to itself and earlier tokens. Default False.
        dropout: dropout probability of the attention weights. Default 0.
    """

    def __init__(self, width: int, heads: int, *, causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)
        nn.init.normal_(self.in_proj_weight, std=width**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, tokens, width) to the same shape."""
        batch, tokens, width = x.shape
        packed = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        queries, keys, values = packed.view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        mixed = dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=self.causal)
        return self.out_proj(mixed.transpose(1, 2).reshape(batch, tokens, width))


class ClipMlp(nn.Module):
    """Two linear layers with an activation in between.

    Args:
        width: width of the tokens.
        quick_gelu: use ``QuickGELU`` instead of the GELU.
    """

    def __init__(self, width: int, *, quick_gelu: bool) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.gelu = QuickGELU() if quick_gelu else nn.GELU()
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(self.gelu(self.c_fc(x)))


class ResidualBlock(nn.Module):
    """Block of CLIP's image and text towers: attention and MLP, each after a layer norm and with a residual connection.

    Args:
        width: width of the tokens.
        heads: number of attention heads.
        causal: see ``PackedAttention``. Default False.
        quick_gelu: see ``ClipMlp``. Default True.
        dropout: dropout probability of the attention and MLP outputs. Default 0.
        attention_dropout: dropout probability of the attention weights. Default 0.
        drop_path: stochastic depth probability, per image. Default 0.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        causal: bool = False,
        quick_gelu: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = PackedAttention(width, heads, causal=causal, dropout=attention_dropout)
        self.mlp = ClipMlp(width, quick_gelu=quick_gelu)
        self.drop = nn.Dropout(dropout)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, tokens, width) to the same shape."""
        x = x + self.drop_path(self.drop(self.attn(self.ln_1(x))))
        return x + self.drop_path(self.drop(self.mlp(self.ln_2(x))))


class ResidualBlocks(nn.Module):
    """Sequence of ``ResidualBlock``, with CLIP's parameter names.

    Args:
        blocks: the blocks.
        checkpointing: recompute the activations of each block in the backward pass. Default False.
    """

    def __init__(self, blocks: list[ResidualBlock], *, checkpointing: bool = False) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(blocks)
        self.checkpointing = checkpointing
        # As in CLIP: the outputs of residual branches are scaled by the depth.
        for block in blocks:
            width = block.ln_1.normalized_shape[0]
            nn.init.normal_(block.attn.out_proj.weight, std=width**-0.5 * (2 * len(blocks)) ** -0.5)
            nn.init.zeros_(block.attn.out_proj.bias)
            nn.init.normal_(block.mlp.c_fc.weight, std=(2 * width) ** -0.5)
            nn.init.normal_(block.mlp.c_proj.weight, std=width**-0.5 * (2 * len(blocks)) ** -0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens before and after the last block, each (B, tokens, width)."""
        before = x
        for block in self.resblocks:
            before, x = x, run_block(block, x, checkpointing=self.checkpointing)
        return before, x


class ClipVisionTransformer(TokenBackbone):
    """CLIP's Vision Transformer with the class token as feature.

    Args:
        depth: size of the network.
        image_size: height and width of the images for which the position embedding is created. For images of other
            sizes, it is resized.
        in_channels: number of image channels. Default 3.
        stride: vertical and horizontal stride of the 16 x 16 patches. Default (16, 16).
        projection: append the projected class token to the feature. Default False.
        quick_gelu: see ``ClipMlp``. Default True.
        dropout, attention_dropout: see ``ResidualBlock``. Default 0.
        drop_path: stochastic depth probability of the last block; it grows linearly from 0. Default 0.
        cameras, views, side_weight: see ``SideInformation``; the embedding is added to the class token only, as in
            CLIP-ReID (Li et al. 2023, arXiv:2211.13977).
        checkpointing: recompute the activations of each block in the backward pass. Default False.
        weights_grid: see ``PositionGrid``. Default ().
    """

    prefix = 1

    def __init__(
        self,
        *,
        depth: ClipDepth,
        image_size: tuple[int, int],
        in_channels: int = 3,
        stride: tuple[int, int] = (PATCH, PATCH),
        projection: bool = False,
        quick_gelu: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        drop_path: float = 0.0,
        cameras: int = 0,
        views: int = 0,
        side_weight: float = 3.0,
        checkpointing: bool = False,
        weights_grid: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        width = depth.width
        self.weights_grid = weights_grid
        self.stride = stride
        self.grid = self.patch_grid(image_size)
        self.feature_dims = (width, width, depth.embedding)
        self.checkpointing = checkpointing
        self.feature_dim = width + depth.embedding if projection else width
        self.conv1 = nn.Conv2d(in_channels, width, PATCH, stride, bias=False)
        self.class_embedding = nn.Parameter(torch.randn(width) * width**-0.5)
        self.positional_embedding = nn.Parameter(torch.randn(1 + math.prod(self.grid), width) * width**-0.5)
        self.create_side_embedding(width, cameras=cameras, views=views, side_weight=side_weight)
        self.ln_pre = nn.LayerNorm(width)
        self.drop = nn.Dropout(dropout)
        self.transformer = ResidualBlocks(
            [
                ResidualBlock(
                    width,
                    depth.heads,
                    quick_gelu=quick_gelu,
                    dropout=dropout,
                    attention_dropout=attention_dropout,
                    drop_path=drop_path * number / max(depth.blocks - 1, 1),
                )
                for number in range(depth.blocks)
            ],
            checkpointing=checkpointing,
        )
        self.ln_post: nn.LayerNorm | None = nn.LayerNorm(width)
        self.register_parameter(
            "proj", nn.Parameter(torch.randn(width, depth.embedding) * width**-0.5) if projection else None
        )

    def forward(
        self, x: torch.Tensor, camids: torch.Tensor | None = None, viewids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the feature, or all tokens if the last block was removed by ``hand_over_last_block``.

        Args:
            x: (B, in_channels, H, W) float, normalized images.
            camids, viewids: (B,) int64, starting at 0; required if the model has embeddings for cameras or views,
                respectively.

        Returns:
            (B, feature_dim, 1, 1), the class token after the last norm, with ``projection`` followed by its projection.
            If the last block was removed: (B, 1 + patches, width), all tokens.

        Raises:
            ValueError: if required camera or view IDs are missing.
        """
        before, after = self.transformer(self._embed(x, camids, viewids))
        if self.ln_post is None:
            return after
        _, *features = self._features(before, after)
        return torch.cat([feature.float() for feature in features], dim=1)[..., None, None]

    def features(
        self,
        x: torch.Tensor,
        camids: torch.Tensor | None = None,
        viewids: torch.Tensor | None = None,
        *,
        side_information: bool = True,
    ) -> tuple[torch.Tensor, ...]:
        """Compute CLIP-ReID's features: the class token before the last block, after it and its norm, and projected.

        Args:
            x, camids, viewids: see ``forward``.
            side_information: add camera and view embeddings. Default True.

        Returns:
            (B, width), (B, width), and with ``projection`` (B, embedding).
        """
        return self._features(*self.transformer(self._embed(x, camids, viewids, side_information)))

    def _embed(
        self,
        x: torch.Tensor,
        camids: torch.Tensor | None,
        viewids: torch.Tensor | None,
        side_information: bool = True,
    ) -> torch.Tensor:
        """Compute the tokens (B, 1 + patches, width) before the first block."""
        patches = self.conv1(x)
        grid = (patches.shape[2], patches.shape[3])
        positions = self.positional_embedding[None]
        if grid != self.grid:
            positions = resize_positions(positions, self.grid, grid)
        learned = self.class_embedding.expand(x.shape[0], 1, -1)
        if side_information:
            learned = self.add_side_information(learned, camids, viewids)
        tokens = torch.cat((learned.to(patches.dtype), patches.flatten(2).transpose(1, 2)), dim=1)
        return self.drop(self.ln_pre(tokens + positions))

    def _features(self, before: torch.Tensor, after: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert self.ln_post is not None
        image = self.ln_post(after[:, 0])
        return (before[:, 0], image) if self.proj is None else (before[:, 0], image, image @ self.proj)

    @property
    def last_block(self) -> nn.Module | None:
        """The last block; None after ``hand_over_last_block``."""
        return None if self.ln_post is None else self.transformer.resblocks[-1]

    def layer_groups(self) -> LayerGroups:
        """List the modules of each block, in order, and the final norm and projection."""
        groups: LayerGroups = [[block] for block in self.transformer.resblocks]
        groups.append([] if self.ln_post is None else [self.ln_post])
        if isinstance(self.proj, nn.Parameter):
            groups[-1].append(self.proj)
        return groups

    def hand_over_last_block(self) -> nn.Sequential:
        """Remove and return the last block and the norm; ``forward`` then returns all tokens.

        Raises:
            ConfigError: if the model has a projection.
        """
        if self.proj is not None:
            raise ConfigError(
                "MODEL.BACKBONE.PROJECTION is not supported with MODEL.HEADS.NAME=JPMHead.\n"
                "  fix: set MODEL.BACKBONE.PROJECTION to False"
            )
        last = nn.Sequential(self.transformer.resblocks[-1], self.ln_post)
        del self.transformer.resblocks[-1]
        self.ln_post = None
        return last

    def convert_state_dict(self, state: State, notes: list[str]) -> State:
        """Convert the names of a file of CLIP, open_clip, CLIP-ReID or transformers; resize the position embedding."""
        state = image_tower(state)
        embedding = state.pop("cv_embed", None)
        if embedding is not None:
            state["sie_embed"] = embedding.view(len(embedding), 1, -1)
        self.note_unused_side_embedding(state, notes)
        return resize_clip_positions(state, "positional_embedding", self, notes)


def image_tower(state: State) -> State:
    """Select the image tower of a file, and name the other tensors ``other.<name>``; CLIP-ReID's ``cv_embed`` stays.

    Args:
        state: file of CLIP or open_clip (``visual.``), of CLIP-ReID (``image_encoder.``), of Hugging Face's
            transformers, or an image tower without a prefix.
    """
    state = _from_transformers(state)
    prefix = next(
        (start for start in ("visual.", "image_encoder.") if any(key.startswith(start) for key in state)),
        "",
    )
    if not prefix:
        return dict(state)
    return {
        key.removeprefix(prefix) if key.startswith(prefix) or key == "cv_embed" else f"other.{key}": value
        for key, value in state.items()
    }


def _from_transformers(state: State) -> State:
    """Convert a file of transformers' CLIP, with or without the text tower, to CLIP's names; others are unchanged."""
    prefixes = ("vision_model.", "")  # without it: CLIPVisionModel of transformers 5
    prefix = next((name for name in prefixes if f"{name}embeddings.class_embedding" in state), None)
    if prefix is None:
        return state
    converted: State = {}
    for key, value in state.items():
        if key == "visual_projection.weight":
            converted["visual.proj"] = value.t()
        elif not key.startswith(prefix):
            converted[key] = value
        elif ".self_attn.q_proj." in key:
            parts = [state.get(key.replace("q_proj", name)) for name in ("q_proj", "k_proj", "v_proj")]
            if all(part is not None for part in parts):
                block, _, kind = key.removeprefix(f"{prefix}encoder.layers.").partition(".self_attn.q_proj.")
                converted[f"visual.transformer.resblocks.{block}.attn.in_proj_{kind}"] = torch.cat(parts)
        elif not any(part in key for part in (".self_attn.k_proj.", ".self_attn.v_proj.", ".position_ids")):
            name = key.removeprefix(prefix)
            for theirs, own in _TRANSFORMERS_NAMES.items():
                name = name.replace(theirs, own)
            converted[f"visual.{name}"] = value
    return converted


def resize_clip_positions(state: State, key: str, model: PositionGrid, notes: list[str]) -> State:
    """Resize the position embedding ``key``, (1 + patches, width), to the grid of a model, and add a remark."""
    positions = state.get(key)
    if positions is None or positions.dim() != 2 or len(positions) < 3:
        return state
    grid = model.grid_in_file(len(positions) - 1, notes, "bilinear")
    if grid == model.grid:
        return state
    return state | {key: resize_positions(positions[None].float(), grid, model.grid)[0]}


def _keys_of(trunk: State) -> dict[str, str]:
    """Infer the image size, the stride and the number of cameras from the tensors of a weights file."""
    trunk = image_tower(trunk)
    names = {"positional_embedding": "pos_embed", "cv_embed": "sie_embed", "sie_embed": "sie_embed"}
    embeddings = {names[key]: value for key, value in trunk.items() if key in names}
    if "pos_embed" in embeddings:
        embeddings["pos_embed"] = embeddings["pos_embed"][None]
    return infer_embedding_keys(embeddings)


@BACKBONE_REGISTRY.register()
@variants(DEPTHS, options=("PROJECTION",), keys_of=_keys_of)
def build_clip_vit_backbone(cfg: CfgNode) -> ClipVisionTransformer:
    """Build CLIP's ViT configured in ``MODEL.BACKBONE``; load ``PRETRAIN_PATH`` if ``PRETRAIN`` is True.

    The file is a state dict of CLIP, open_clip, CLIP-ReID or Hugging Face's transformers, .pth or .safetensors.

    Raises:
        ConfigError: if ``DEPTH`` is unknown, images are smaller than a patch or have no fixed size, or ``PRETRAIN`` is
            True without ``PRETRAIN_PATH``.
        WeightsError: if the weights cannot be read, or do not match the model.
    """
    backbone = cfg.MODEL.BACKBONE
    depth = choose_depth(cfg, DEPTHS)
    model = ClipVisionTransformer(
        depth=depth,
        projection=backbone.PROJECTION,
        quick_gelu=backbone.QUICK_GELU,
        **transformer_options(cfg),
    )
    return with_pretrained_weights(model, cfg, None, without=("sie_embed",))
