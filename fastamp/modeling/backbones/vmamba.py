"""VMamba (Liu et al. 2024, "VMamba: Visual State Space Model", arXiv:2401.10166) with the authors' parameter names.

Written from the formulas of the paper and of Mamba (Gu and Dao 2023, arXiv:2312.00752). Layout of the blocks and names
of the parameters are those of the weights that the authors publish (github.com/MzeroMiko/VMamba, MIT license), so that
these load completely: blocks without gate, states of size 1, and no position embedding.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from fastamp.amp import force_fp32
from fastamp.checkpoint.state_dict_conversion import rename_modules
from fastamp.config import CfgNode, Key
from fastamp.contracts import State
from fastamp.layers import DropPath, selective_scan
from fastamp.layers.scan_kernel import ScanKernel
from fastamp.modeling.backbones.build import BACKBONE_REGISTRY, variants
from fastamp.modeling.backbones.build_utils import (
    LayerGroups,
    choose_depth,
    layers_in_order,
    warn_ignored_options,
    with_pretrained_weights,
)
from fastamp.modeling.backbones.transformer import run_block

KEYS = (
    Key(
        "MODEL.BACKBONE.SCAN",
        "torch",
        "VMamba: implementation of the selective scan. mamba_ssm is the CUDA kernel of that package, which is compared "
        "with torch before it is used.",
        choices=("torch", "mamba_ssm"),
    ),
)

DIRECTIONS = 4  # row by row, column by column, and both reversed
_STATE = 1  # size of the state of each channel
_MLP_RATIO = 4
_STEPS = (1e-3, 0.1)  # range of the initial time steps delta
_SMALLEST_STEP = 1e-4


@dataclass(frozen=True)
class Depth:
    """Configuration of a VMamba.

    Attributes:
        width: channels of the first stage; doubled in each later stage.
        blocks: number of blocks in each of the four stages.
        ratio: channels of the scan, relative to those of the stage.
    """

    width: int
    blocks: tuple[int, int, int, int]
    ratio: int


# sNlM in the names of the authors: ratio N, M blocks in the third stage. tiny, small and base are those of the paper;
# nano, for the demo, has no published weights.
DEPTHS = {
    "nano": Depth(32, (1, 1, 2, 1), 1),
    "tiny": Depth(96, (2, 2, 8, 2), 1),
    "tiny_s2l5": Depth(96, (2, 2, 5, 2), 2),
    "small": Depth(96, (2, 2, 15, 2), 2),
    "small_s1l20": Depth(96, (2, 2, 20, 2), 1),
    "base": Depth(128, (2, 2, 15, 2), 2),
    "base_s1l20": Depth(128, (2, 2, 20, 2), 1),
}


class Linear2d(nn.Linear):
    """Linear layer over the channels of a map (B, in, H, W)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # On a CPU, training steps are 10 % faster than with 1 x 1 convolutions.
        return F.linear(x.permute(0, 2, 3, 1), self.weight, self.bias).permute(0, 3, 1, 2)


class LayerNorm2d(nn.LayerNorm):
    """Layer norm over the channels at each position of a map (B, C, H, W)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._normalize(x, self.weight, self.bias)

    def _normalize(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, weight, bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ScanNorm(LayerNorm2d):
    """Layer norm of the merged scans, in float32 also if its weights are not: sums of scans exceed 65504."""

    @force_fp32
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._normalize(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class CrossScan(nn.Module):
    """Selective scans in four directions of a map, and the sum of their outputs at each position, in float32.

    The module has no parameters: as arguments of a float32 region, they are cast with the other tensors, also in a
    model whose weights are float16. The region does not depend on the mode of the model or on gradients: scans that are
    float32 only in training return NaN in evaluation.

    Attributes:
        kernel: implementation of the scans. Default None: ``selective_scan``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernel: Callable[..., torch.Tensor] | None = None

    @force_fp32
    def forward(
        self,
        x: torch.Tensor,
        delta: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        *,
        log_a: torch.Tensor,
        d: torch.Tensor,
        delta_bias: torch.Tensor,
        size: tuple[int, int],
    ) -> torch.Tensor:
        """Compute the sum of the scans, (B, D, H, W) float32.

        Args:
            x: (B, 4, D, L) inputs, in the order of each direction; L is H W.
            delta: (B, 4, D, L) time steps before bias and softplus.
            b, c: (B, 4, N, L) input and output matrices.
            log_a: (4 D, N) logarithms of the decay rates.
            d: (4 D,) weights of the inputs in the outputs.
            delta_bias: (4, D) bias of the time steps.
            size: height H and width W of the map.
        """
        x, delta = x.flatten(1, 2), delta.flatten(1, 2)
        scan = self.kernel or selective_scan
        y = scan(x, delta, -torch.exp(log_a), b, c, d, delta_bias.flatten())
        return sum_of_directions(y.unflatten(1, (DIRECTIONS, -1)), size)

    def multiply_adds(self, x: torch.Tensor, delta: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> int:
        """Count the multiply-adds as the authors do: 9 N + 1 for each direction, channel and position."""
        return (9 * b.shape[2] + 1) * x.numel()


def in_directions(x: torch.Tensor) -> torch.Tensor:
    """Flatten the maps (B, 4, C, H, W) of the four directions into the sequences (B, 4, C, H W)."""
    sequences = []
    for number, maps in enumerate(x.permute(0, 3, 4, 1, 2).unbind(3)):  # channels last, as the scan reads them
        sequence = (maps.transpose(1, 2) if number % 2 else maps).flatten(1, 2)
        sequences.append(sequence.flip(1) if number >= 2 else sequence)
    return torch.stack(sequences, 2).permute(0, 2, 3, 1)


def sum_of_directions(y: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Sum the sequences (B, 4, C, H W) of the four directions at each position of the map (B, C, H, W).

    Args:
        y: the sequences.
        size: height H and width W of the map.
    """
    y = y.permute(0, 3, 1, 2)
    y = y[:, :, :2] + y[:, :, 2:].flip(1)
    maps = y[:, :, 0].unflatten(1, size) + y[:, :, 1].unflatten(1, size[::-1]).transpose(1, 2)
    return maps.permute(0, 3, 1, 2)


class SelectiveScan2d(nn.Module):
    """2D selective scan (section 4.2 of the paper), without gate.

    Attributes:
        without_weight_decay: parameters of the recurrence, as in Gu and Dao's program.

    Args:
        channels: number of input and output channels.
        width: number of channels of the scan.
    """

    without_weight_decay = ("A_logs", "Ds", "dt_projs_bias")

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.rank = math.ceil(channels / 16)
        self.in_proj = Linear2d(channels, width, bias=False)
        self.conv2d = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        self.x_proj_weight = nn.Parameter(torch.empty(DIRECTIONS, self.rank + 2 * _STATE, width))
        self.dt_projs_weight = nn.Parameter(torch.empty(DIRECTIONS, width, self.rank))
        self.dt_projs_bias = nn.Parameter(torch.empty(DIRECTIONS, width))
        self.A_logs = nn.Parameter(torch.empty(DIRECTIONS * width, _STATE))
        self.Ds = nn.Parameter(torch.ones(DIRECTIONS * width))
        self.scan = CrossScan()
        self.out_norm = ScanNorm(width)
        self.out_proj = Linear2d(width, channels, bias=False)
        self._init_recurrence()

    @torch.no_grad()
    def _init_recurrence(self) -> None:
        """Initialize as Mamba: decay rates 1..N, and time steps whose logarithms are uniform in ``_STEPS``."""
        width = self.x_proj_weight.shape[2]
        nn.init.uniform_(self.x_proj_weight, -(width**-0.5), width**-0.5)
        nn.init.uniform_(self.dt_projs_weight, -(self.rank**-0.5), self.rank**-0.5)
        steps = torch.empty_like(self.dt_projs_bias).uniform_(*map(math.log, _STEPS)).exp().clamp(min=_SMALLEST_STEP)
        self.dt_projs_bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # inverse of softplus
        self.A_logs.copy_(torch.arange(1, _STATE + 1).log().expand_as(self.A_logs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, channels, H, W) to a map of the same shape."""
        x = F.silu(self.conv2d(self.in_proj(x)))
        # The projections are the same at each position: computed on the map, and then ordered, they are one product.
        projected = F.linear(x.permute(0, 2, 3, 1), self.x_proj_weight.flatten(0, 1))
        projected = in_directions(projected.unflatten(3, (DIRECTIONS, -1)).permute(0, 3, 4, 1, 2))
        delta, b, c = projected.split((self.rank, _STATE, _STATE), dim=2)
        delta = self.dt_projs_weight @ delta
        y = self.scan(
            in_directions(x[:, None].expand(-1, DIRECTIONS, -1, -1, -1)),
            delta,
            b,
            c,
            log_a=self.A_logs,
            d=self.Ds,
            delta_bias=self.dt_projs_bias,
            size=(x.shape[2], x.shape[3]),
        )
        return self.out_proj(self.out_norm(y).to(x.dtype))


class Block(nn.Module):
    """VSS block: 2D selective scan and MLP, each with a preceding layer norm and a residual connection.

    Args:
        channels: number of channels.
        ratio: channels of the scan, relative to ``channels``.
        drop_path: stochastic depth probability, per image and branch (Huang et al. 2016, arXiv:1603.09382).
    """

    def __init__(self, channels: int, *, ratio: int, drop_path: float) -> None:
        super().__init__()
        hidden = _MLP_RATIO * channels
        self.norm = LayerNorm2d(channels)
        self.op = SelectiveScan2d(channels, ratio * channels)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.norm2 = LayerNorm2d(channels)
        self.mlp = _named(fc1=Linear2d(channels, hidden), act=nn.GELU(), fc2=Linear2d(hidden, channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, channels, H, W) to a map of the same shape."""
        x = x + self.drop_path(self.op(self.norm(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class VMamba(nn.Module):
    """VMamba without classifier, for images of any size.

    Args:
        depth: width, number of blocks, and width of the scans.
        in_channels: number of image channels. Default 3.
        last_stride: stride between the third and the fourth stage, 1 or 2; the weights are the same. Default 1.
        drop_path: stochastic depth probability of the last block; it grows linearly from 0 in the first block.
            Default 0.1.
        checkpointing: recompute the activations of each block in the backward pass. Default False.
    """

    def __init__(
        self,
        depth: Depth,
        *,
        in_channels: int = 3,
        last_stride: int = 1,
        drop_path: float = 0.1,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        widths = [depth.width * 2**stage for stage in range(4)]
        self.feature_dim, self.checkpointing = widths[-1], checkpointing
        # Numbered as in the authors' program, in which modules without parameters stand between these.
        half = depth.width // 2
        self.patch_embed = _named(
            **{"0": nn.Conv2d(in_channels, half, 3, 2, 1), "2": LayerNorm2d(half), "4": nn.GELU()},
            **{"5": nn.Conv2d(half, depth.width, 3, 2, 1), "7": LayerNorm2d(depth.width)},
        )
        rates = [drop_path * number / max(sum(depth.blocks) - 1, 1) for number in range(sum(depth.blocks))]
        self.layers = nn.ModuleList()
        for stage, (channels, count) in enumerate(zip(widths, depth.blocks, strict=True)):
            first = sum(depth.blocks[:stage])
            blocks = [Block(channels, ratio=depth.ratio, drop_path=rate) for rate in rates[first : first + count]]
            downsample: nn.Module = nn.Identity()
            if stage < 3:
                stride = last_stride if stage == 2 else 2
                convolution = nn.Conv2d(channels, 2 * channels, 3, stride, 1)
                downsample = _named(**{"1": convolution, "3": LayerNorm2d(2 * channels)})
            self.layers.append(_named(blocks=nn.Sequential(*blocks), downsample=downsample))
        self.classifier = _named(norm=LayerNorm2d(widths[-1]))
        for module in self.modules():
            if isinstance(module, nn.Linear):  # convolutions keep PyTorch's initialization
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map normalized images (B, in_channels, H, W) to the last norm's output (B, feature_dim, ~H/32, ~W/32).

        Sizes are rounded up at each stride. With ``last_stride`` 1, the map is (~H/16, ~W/16).
        """
        x = self.patch_embed(x)
        for layer in self.layers:
            for block in layer.blocks:
                x = run_block(block, x, checkpointing=self.checkpointing)
            x = layer.downsample(x)
        return self.classifier(x)

    def layer_groups(self) -> LayerGroups:
        """List the blocks of all stages, each downsampling with the block before it, and the final norm."""
        return layers_in_order(self, "layers")

    def convert_state_dict(self, state: State, notes: list[str]) -> State:
        """Convert the names of older files of the authors, and of their backbones for detection and segmentation.

        Weights of linear layers that are stored as 1 x 1 convolutions are reshaped. The norms of the first three stages
        in a detector or segmenter do not influence the features; they are dropped.
        """
        names = {"patch_embed.proj": "patch_embed.0", "patch_embed.norm": "patch_embed.2", "head": "classifier.head"}
        names |= {"norm": "classifier.norm", "outnorm3": "classifier.norm"}
        converted = {}
        for name, value in rename_modules(state, names).items():
            if name.startswith(("outnorm0.", "outnorm1.", "outnorm2.")):
                continue
            name = name.replace(".ln_1.", ".norm.").replace(".self_attention.", ".op.")
            if value.dim() == 4 and value.shape[2:] == (1, 1):
                value = value.flatten(1)
            converted[name] = value
        if "pos_embed" in converted:
            notes.append("the file has a position embedding, which the published models do not have; it is not used")
        return converted


def _named(**modules: nn.Module) -> nn.Sequential:
    """Compose modules by the names of their parameters."""
    return nn.Sequential(OrderedDict(modules))


@BACKBONE_REGISTRY.register()
@variants(DEPTHS)
def build_vmamba_backbone(cfg: CfgNode) -> VMamba:
    """Build the VMamba configured in ``MODEL.BACKBONE``; load ``PRETRAIN_PATH`` if ``PRETRAIN`` is True.

    Raises:
        ConfigError: if ``DEPTH`` is unknown, ``PRETRAIN`` is True without ``PRETRAIN_PATH``, or mamba_ssm is missing.
        WeightsError: if the pretrained weights cannot be read, or do not match the model.
    """
    backbone = cfg.MODEL.BACKBONE
    depth = choose_depth(cfg, DEPTHS)
    warn_ignored_options(cfg, "DROP_RATIO", "ATT_DROP_RATE", disabled=0)
    model = VMamba(
        depth,
        in_channels=cfg.INPUT.CHANNELS,
        last_stride=backbone.LAST_STRIDE,
        drop_path=backbone.DROP_PATH_RATIO,
        checkpointing=backbone.CHECKPOINTING,
    )
    if backbone.SCAN == "mamba_ssm":
        kernel = ScanKernel()
        for module in model.modules():
            if isinstance(module, CrossScan):
                module.kernel = kernel
    return with_pretrained_weights(model, cfg, None)
