"""Modified ResNet of CLIP (Radford et al. 2021, arXiv:2103.00020) as a backbone."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from fastamp.config import CfgNode
from fastamp.contracts import Backbone, State
from fastamp.layers import build_norm, dot_product_attention
from fastamp.modeling.backbones.build import BACKBONE_REGISTRY, variants
from fastamp.modeling.backbones.build_utils import (
    LayerGroups,
    choose_depth,
    with_pretrained_weights,
)
from fastamp.modeling.backbones.clip import PATCH, image_tower, resize_clip_positions
from fastamp.modeling.backbones.init import init_convolutions
from fastamp.modeling.backbones.position_grid import DEFAULT_STRIDE, PositionGrid
from fastamp.modeling.backbones.transformer import size_of_training_images
from fastamp.modeling.backbones.vit import resize_positions


@dataclass(frozen=True)
class ClipResNetDepth:
    """Configuration of CLIP's ResNet.

    Attributes:
        width: channels of the stem; the last stage has 32 times as many.
        blocks: number of blocks of the four stages.
        embedding: width of the attention pooling's output.
    """

    width: int
    blocks: tuple[int, int, int, int]
    embedding: int


DEPTHS = {
    "50x": ClipResNetDepth(width=64, blocks=(3, 4, 6, 3), embedding=1024),
    # No published weights: for demos and tests.
    "tiny": ClipResNetDepth(width=16, blocks=(1, 1, 1, 1), embedding=64),
}
_CHANNELS_PER_HEAD = 64


class ClipBottleneck(nn.Module):
    """Bottleneck whose down-sampling is an average pooling after the second convolution and before the shortcut's.

    Args:
        in_channels: input channels.
        channels: channels of the 3x3 convolution; the output has four times as many.
        stride: 1 or 2.
        norm: name in ``NORM_REGISTRY``.
    """

    def __init__(self, in_channels: int, channels: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = build_norm(norm, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = build_norm(norm, channels)
        self.avgpool = nn.AvgPool2d(stride) if stride > 1 else nn.Identity()
        self.conv3 = nn.Conv2d(channels, 4 * channels, 1, bias=False)
        self.bn3 = build_norm(norm, 4 * channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Sequential | None = None
        if stride > 1 or in_channels != 4 * channels:
            convolution = nn.Conv2d(in_channels, 4 * channels, 1, bias=False)
            self.downsample = nn.Sequential(convolution, build_norm(norm, 4 * channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.avgpool(self.relu(self.bn2(self.conv2(out))))
        out = self.bn3(self.conv3(out))
        return self.relu(out + (x if self.downsample is None else self.downsample(self.avgpool(x))))


class AttentionPool(nn.Module):
    """Attention pooling: the mean of the map attends to itself and to all positions.

    Args:
        grid: height and width of the map for which the position embedding is created; it is resized for other maps.
        channels: channels of the map.
        embedding: width of the output.
    """

    def __init__(self, grid: tuple[int, int], channels: int, embedding: int) -> None:
        super().__init__()
        self.grid, self.heads = grid, channels // _CHANNELS_PER_HEAD
        self.positional_embedding = nn.Parameter(torch.randn(1 + math.prod(grid), channels) * channels**-0.5)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(channels, channels) for _ in range(3))
        self.c_proj = nn.Linear(channels, embedding)
        for layer in (self.q_proj, self.k_proj, self.v_proj, self.c_proj):
            nn.init.normal_(layer.weight, std=channels**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, channels, h, w) to (B, embedding)."""
        positions, grid = self.positional_embedding[None], (x.shape[2], x.shape[3])
        if grid != self.grid:
            positions = resize_positions(positions, self.grid, grid)
        tokens = x.flatten(2).transpose(1, 2)
        tokens = torch.cat((tokens.mean(dim=1, keepdim=True), tokens), dim=1) + positions
        queries, keys, values = (
            projection(inputs).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for projection, inputs in ((self.q_proj, tokens[:, :1]), (self.k_proj, tokens), (self.v_proj, tokens))
        )
        mixed = dot_product_attention(queries, keys, values)
        return self.c_proj(mixed.transpose(1, 2).flatten(1))


class ClipResNet(PositionGrid, nn.Module, Backbone):
    """CLIP's ResNet: a stem of three convolutions, average pooling instead of strides, and an attention pooling.

    Args:
        depth: size of the network.
        image_size: height and width of the images for which the position embedding of the attention pooling is created.
        in_channels: number of image channels. Default 3.
        last_stride: stride of the last stage; CLIP's is 2 and CLIP-ReID's 1. Default 1.
        norm: name in ``NORM_REGISTRY``. Default ``"BN"``.
        projection: compute the mean of the map and the attention pooling, instead of the map. Default False.
        weights_grid: see ``PositionGrid``. Default ().
    """

    def __init__(
        self,
        *,
        depth: ClipResNetDepth,
        image_size: tuple[int, int],
        in_channels: int = 3,
        last_stride: int = 1,
        norm: str = "BN",
        projection: bool = False,
        weights_grid: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.weights_grid = weights_grid
        width = depth.width
        self.feature_dims = (16 * width, 32 * width, depth.embedding)
        self.feature_dim = 32 * width + depth.embedding if projection else 32 * width
        self.conv1 = nn.Conv2d(in_channels, width // 2, 3, stride=2, padding=1, bias=False)
        self.bn1 = build_norm(norm, width // 2)
        self.conv2 = nn.Conv2d(width // 2, width // 2, 3, padding=1, bias=False)
        self.bn2 = build_norm(norm, width // 2)
        self.conv3 = nn.Conv2d(width // 2, width, 3, padding=1, bias=False)
        self.bn3 = build_norm(norm, width)
        self.relu = nn.ReLU(inplace=True)
        self.avgpool = nn.AvgPool2d(2)
        channels = width
        for number, (blocks, stride) in enumerate(zip(depth.blocks, (1, 2, 2, last_stride), strict=True)):
            inner = width * 2**number
            stage = [ClipBottleneck(channels, inner, stride, norm)]
            stage += [ClipBottleneck(4 * inner, inner, 1, norm) for _ in range(blocks - 1)]
            self.add_module(f"layer{number + 1}", nn.Sequential(*stage))
            channels = 4 * inner
        init_convolutions(self)
        self.grid = self.grid_for(image_size, DEFAULT_STRIDE, last_stride)
        self.attnpool = AttentionPool(self.grid, channels, depth.embedding) if projection else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the feature map, or with ``projection`` its mean and its attention pooling.

        Args:
            x: (B, in_channels, H, W) float, normalized images.

        Returns:
            (B, feature_dim, H/16, W/16) with ``last_stride`` 1; with ``projection`` (B, feature_dim, 1, 1).
        """
        if self.attnpool is None:
            return self._maps(x)[1]
        _, *features = self.features(x)
        return torch.cat([feature.float() for feature in features], dim=1)[..., None, None]

    def features(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute CLIP-ReID's features: the means of the third and the last stage, and the attention pooling.

        Args:
            x: see ``forward``.

        Returns:
            (B, 16 width), (B, 32 width), and with ``projection`` (B, embedding).
        """
        third, last = self._maps(x)
        means = (third.mean(dim=(2, 3)), last.mean(dim=(2, 3)))
        return means if self.attnpool is None else (*means, self.attnpool(last))

    def _maps(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the maps of the last two stages."""
        for convolution, norm in ((self.conv1, self.bn1), (self.conv2, self.bn2), (self.conv3, self.bn3)):
            x = self.relu(norm(convolution(x)))
        third = self.layer3(self.layer2(self.layer1(self.avgpool(x))))
        return third, self.layer4(third)

    def layer_groups(self) -> LayerGroups:
        """List the four stages, which count as blocks, and the attention pooling."""
        groups: LayerGroups = [[self.get_submodule(f"layer{number}")] for number in range(1, 5)]
        return [*groups, [] if self.attnpool is None else [self.attnpool]]

    def grid_for(self, size: tuple[int, int], stride: tuple[int, int], last_stride: int) -> tuple[int, int]:
        """Compute the size of the last map for training images of ``size``; ``stride`` has no effect."""
        return size[0] // 16 // last_stride, size[1] // 16 // last_stride

    def common_strides(self) -> tuple[tuple[tuple[int, int], int], ...]:
        """List the last strides of CLIP-ReID and CLIP."""
        return (DEFAULT_STRIDE, 1), (DEFAULT_STRIDE, 2)

    def convert_state_dict(self, state: State, notes: list[str]) -> State:
        """Convert the names of a file of CLIP, open_clip or CLIP-ReID; resize the position embedding to this grid."""
        state = image_tower(state)
        if state.pop("cv_embed", None) is not None:
            notes.append("camera and view embeddings have no effect on CLIP's ResNet; they were dropped")
        if self.attnpool is None:
            return state
        return resize_clip_positions(state, "attnpool.positional_embedding", self, notes)


@BACKBONE_REGISTRY.register()
@variants(DEPTHS, options=("PROJECTION",))
def build_clip_resnet_backbone(cfg: CfgNode) -> ClipResNet:
    """Build CLIP's ResNet configured in ``MODEL.BACKBONE``; load ``PRETRAIN_PATH`` if ``PRETRAIN`` is True.

    The file is a state dict of CLIP, open_clip or CLIP-ReID, .pth or .safetensors.

    Raises:
        ConfigError: if ``DEPTH`` is unknown, images are smaller than 16 x 16 or have no fixed size, or ``PRETRAIN`` is
            True without ``PRETRAIN_PATH``.
        WeightsError: if the weights cannot be read, or do not match the model.
    """
    backbone = cfg.MODEL.BACKBONE
    depth = choose_depth(cfg, DEPTHS)
    model = ClipResNet(
        depth=depth,
        image_size=size_of_training_images(cfg, (PATCH, PATCH)),
        in_channels=cfg.INPUT.CHANNELS,
        last_stride=backbone.LAST_STRIDE,
        norm=backbone.NORM,
        projection=backbone.PROJECTION,
        weights_grid=tuple(backbone.WEIGHTS_GRID),
    )
    return with_pretrained_weights(model, cfg, None)
