"""RepVGG (Ding et al. 2021, arXiv:2101.03697): three branches per block in training, one convolution for inference."""

import functools
import logging
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import pad

from fastamp.config import CfgNode, Key
from fastamp.contracts import Backbone, State
from fastamp.layers import build_norm
from fastamp.modeling.backbones.build import BACKBONE_REGISTRY, variants
from fastamp.modeling.backbones.build_utils import choose_depth, with_pretrained_weights
from fastamp.utils.errors import ConfigError, WeightsError

logger = logging.getLogger(__name__)

KEYS = (
    Key(
        "MODEL.BACKBONE.DEPLOY",
        False,
        "RepVGG: use one convolution per block, for inference; `fastamp import` converts trained weights.",
    ),
)

# Names of the fused convolution in FastReID and in timm.
_DEPLOY_NAMES = {
    "fused_weight": "rbr_reparam.weight",
    "fused_bias": "rbr_reparam.bias",
    "reparam_conv.weight": "rbr_reparam.weight",
    "reparam_conv.bias": "rbr_reparam.bias",
}
_TIMM_BRANCHES = {"conv_kxk": "rbr_dense", "conv_1x1": "rbr_1x1", "identity": "rbr_identity"}
_NORM_TENSORS = ("weight", "bias", "running_mean", "running_var")
_BATCH_NORM_EPS = 1e-5  # PyTorch's default, used by all known RepVGG implementations


class _PointwiseConv2d(nn.Conv2d):
    """1x1 convolution with a workaround for an out-of-bounds write by oneDNN during training on a CPU.

    oneDNN writes out of bounds when it computes the weight gradient of a strided 1x1 convolution whose input is
    channels-last and has fewer channels than oneDNN's block size, which is at most 16
    (https://github.com/uxlfoundation/oneDNN/issues/6035, PyTorch 2.15). Therefore, inputs with fewer than 16 channels
    are subsampled and convolved with stride 1, which is equivalent.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, in_channels, H, W) to (B, out_channels, ceil(H/stride), ceil(W/stride))."""
        if self.training and x.device.type == "cpu" and self.stride[0] > 1 and self.in_channels < 16:
            rows, columns = self.stride
            return F.conv2d(x[:, :, ::rows, ::columns], self.weight, self.bias, groups=self.groups)
        return super().forward(x)


class RepVGGBlock(nn.Module):
    """RepVGG block: ReLU of the sum of a 3x3 branch, a 1x1 branch and an identity branch, each with normalization.

    The identity branch exists only if input and output have the same shape.

    Args:
        in_channels: number of input channels.
        channels: number of output channels.
        stride: stride of the convolutions.
        groups: number of groups of the convolutions.
        norm: name of the normalization layer.
        deploy: replace the branches with one 3x3 convolution with bias, for inference.
    """

    def __init__(
        self, in_channels: int, channels: int, *, stride: int = 1, groups: int = 1, norm: str, deploy: bool
    ) -> None:
        super().__init__()
        self.in_channels, self.channels, self.stride, self.groups = in_channels, channels, stride, groups
        self.deploy = deploy
        self.with_identity = channels == in_channels and stride == 1
        self.relu = nn.ReLU(inplace=True)
        if deploy:
            self.rbr_reparam = self._convolution(3, bias=True)
            return
        self.rbr_identity = build_norm(norm, in_channels) if self.with_identity else None
        self.rbr_dense, self.rbr_1x1 = nn.Sequential(), nn.Sequential()
        for branch, kernel_size in ((self.rbr_dense, 3), (self.rbr_1x1, 1)):
            branch.add_module("conv", self._convolution(kernel_size, bias=False))
            branch.add_module("bn", build_norm(norm, channels))

    def _convolution(self, kernel_size: int, *, bias: bool) -> nn.Conv2d:
        kind = nn.Conv2d if kernel_size > 1 else _PointwiseConv2d
        return kind(
            self.in_channels,
            self.channels,
            kernel_size,
            self.stride,
            padding=kernel_size // 2,
            groups=self.groups,
            bias=bias,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, in_channels, H, W) to (B, channels, ~H/stride, ~W/stride)."""
        if self.deploy:
            return self.relu(self.rbr_reparam(x))
        out = self.rbr_dense(x) + self.rbr_1x1(x)
        return self.relu(out if self.rbr_identity is None else out + self.rbr_identity(x))

    def switch_to_deploy(self) -> None:
        """Fuse the branches of the block into one convolution, in place.

        The outputs in evaluation mode change only by rounding errors.

        Raises:
            ConfigError: if the normalization is not batch norm.
        """
        if self.deploy:
            return
        _check_norm(self.rbr_dense.bn)
        weight = self.rbr_dense.conv.weight
        convolution = self._convolution(3, bias=True).to(weight.device, weight.dtype)
        convolution.load_state_dict(self._fuse(self.state_dict(), eps=self.rbr_dense.bn.eps))
        del self.rbr_identity, self.rbr_dense, self.rbr_1x1
        self.rbr_reparam, self.deploy = convolution, True

    def convert_state_dict(self, state: State, notes: list[str]) -> State:
        """Convert ``state``, the tensors of this block, to the block's form: training or deploy form.

        The tensors of a fused convolution are renamed. If the block is in deploy form, branches in ``state`` are fused.

        Raises:
            WeightsError: if ``state`` is in deploy form, but this block is not.
        """
        state = {_DEPLOY_NAMES.get(key, key): value for key, value in state.items()}
        if not self.deploy:
            if "rbr_reparam.weight" in state:
                raise WeightsError(
                    "the weights are in RepVGG's deploy form, with one convolution per block; the training "
                    "branches cannot be restored from them.\n"
                    "  fix: set MODEL.BACKBONE.DEPLOY to True for inference, or load the weights in training form"
                )
            return state
        norms = ["rbr_dense.bn", "rbr_1x1.bn"] + ["rbr_identity"] * self.with_identity
        branches = {f"{norm}.{name}" for norm in norms for name in _NORM_TENSORS}
        branches |= {"rbr_dense.conv.weight", "rbr_1x1.conv.weight"}
        if not branches <= state.keys():
            return state
        counters = {f"{norm}.num_batches_tracked" for norm in norms}
        rest = {key: value for key, value in state.items() if key not in branches | counters}
        fused = self._fuse(state, eps=_BATCH_NORM_EPS)
        return rest | {f"rbr_reparam.{key}": value for key, value in fused.items()}

    def _fuse(self, state: State, *, eps: float) -> State:
        """Compute weight and bias of the convolution equivalent to the branches in evaluation mode (section 3.3).

        Args:
            state: tensors of the block in training form.
            eps: epsilon of the batch norms.
        """
        dense = state["rbr_dense.conv.weight"]
        kernels = {"rbr_dense.bn": dense.double(), "rbr_1x1.bn": pad(state["rbr_1x1.conv.weight"].double(), (1,) * 4)}
        if self.with_identity:
            identity = torch.zeros_like(kernels["rbr_dense.bn"])
            channel = torch.arange(len(identity), device=identity.device)
            # In a grouped convolution the second index counts channels within the group.
            identity[channel, channel % identity.shape[1], 1, 1] = 1
            kernels["rbr_identity"] = identity
        weights, biases = [], []
        for norm, kernel in kernels.items():
            scale, shift, mean, variance = (state[f"{norm}.{name}"].double() for name in _NORM_TENSORS)
            factor = scale / (variance + eps).sqrt()
            weights.append(kernel * factor[:, None, None, None])
            biases += [shift, -mean * factor]
        weight, bias = (functools.reduce(torch.add, terms) for terms in (weights, biases))
        return {"weight": weight.to(dense.dtype), "bias": bias.to(dense.dtype)}


def _check_norm(norm: nn.Module) -> None:
    if "running_var" not in dict(norm.named_buffers()):
        raise ConfigError(
            f"RepVGG's deploy form requires batch norm, but MODEL.BACKBONE.NORM selects {type(norm).__name__}.\n"
            "  fix: set MODEL.BACKBONE.NORM to BN, or MODEL.BACKBONE.DEPLOY to False"
        )


@dataclass(frozen=True)
class Depth:
    """Configuration of a RepVGG variant.

    Attributes:
        blocks: number of blocks in each of the four stages after the stem.
        widths: multipliers of the 64, 128, 256 and 512 channels of the stages.
        groups: number of groups of the convolutions in every second block. Default 1.
    """

    blocks: tuple[int, int, int, int]
    widths: tuple[float, float, float, float]
    groups: int = 1


_A, _B = (2, 4, 14, 1), (4, 6, 16, 1)
DEPTHS = {
    "A0": Depth(_A, (0.75, 0.75, 0.75, 2.5)),
    "A1": Depth(_A, (1, 1, 1, 2.5)),
    "A2": Depth(_A, (1.5, 1.5, 1.5, 2.75)),
    "B0": Depth(_B, (1, 1, 1, 2.5)),
    "B1": Depth(_B, (2, 2, 2, 4)),
    "B1g2": Depth(_B, (2, 2, 2, 4), 2),
    "B1g4": Depth(_B, (2, 2, 2, 4), 4),
    "B2": Depth(_B, (2.5, 2.5, 2.5, 5)),
    "B2g2": Depth(_B, (2.5, 2.5, 2.5, 5), 2),
    "B2g4": Depth(_B, (2.5, 2.5, 2.5, 5), 4),
    "B3": Depth(_B, (3, 3, 3, 5)),
    "B3g2": Depth(_B, (3, 3, 3, 5), 2),
    "B3g4": Depth(_B, (3, 3, 3, 5), 4),
}


class RepVGG(nn.Module, Backbone):
    """RepVGG without global pooling and classifier.

    Args:
        depth: widths, numbers of blocks and groups.
        in_channels: number of image channels.
        last_stride: stride of the last stage.
        norm: name of the normalization layer.
        deploy: use one convolution per block, for inference. ``convert_state_dict`` then fuses the branches in weights
            that are in training form.
    """

    def __init__(
        self, depth: Depth, *, in_channels: int = 3, last_stride: int = 1, norm: str = "BN", deploy: bool = False
    ) -> None:
        super().__init__()
        channels, number = min(64, int(64 * depth.widths[0])), 0
        self.stage0 = RepVGGBlock(in_channels, channels, stride=2, norm=norm, deploy=deploy)
        strides = (2, 2, 2, last_stride)
        stages = zip(depth.blocks, depth.widths, strides, strict=True)
        for stage, (count, factor, stride) in enumerate(stages, start=1):
            width, layers = int(64 * 2 ** (stage - 1) * factor), []
            for index in range(count):
                number += 1  # index of the block; the stem has 0
                block = RepVGGBlock(
                    channels,
                    width,
                    stride=stride if index == 0 else 1,
                    groups=depth.groups if number % 2 == 0 else 1,
                    norm=norm,
                    deploy=deploy,
                )
                layers.append(block)
                channels = width
            self.add_module(f"stage{stage}", nn.Sequential(*layers))
        self.feature_dim = channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute feature maps (B, feature_dim, h, w) from normalized images (B, in_channels, H, W).

        h and w are about H/16 and W/16 if ``last_stride`` is 1, and H/32 and W/32 if it is 2.
        """
        return self.stage4(self.stage3(self.stage2(self.stage1(self.stage0(x)))))

    def switch_to_deploy(self) -> None:
        """Fuse the branches of each block into one convolution, in place.

        The outputs in evaluation mode change only by rounding errors.

        Raises:
            ConfigError: if the normalization is not batch norm.
        """
        for block in self.modules():
            if isinstance(block, RepVGGBlock):
                block.switch_to_deploy()

    def convert_state_dict(self, state: State, notes: list[str]) -> State:
        """Convert timm's parameter names to the parameter names of the authors and FastReID."""
        if not any(key.startswith("stem.") for key in state):
            return state
        return {_convert_timm_name(key): value for key, value in state.items()}


def _convert_timm_name(key: str) -> str:
    """Convert a timm name, e.g. ``stages.0.0.conv_1x1.bn.bias`` to ``stage1.0.rbr_1x1.bn.bias``."""
    first, *rest = key.split(".")
    if first == "stem":
        first = "stage0"
    elif first == "stages":
        first, *rest = f"stage{int(rest[0]) + 1}", *rest[1:]
    return ".".join((first, *(_TIMM_BRANCHES.get(part, part) for part in rest)))


@BACKBONE_REGISTRY.register()
@variants(DEPTHS, options=("DEPLOY",))
def build_repvgg_backbone(cfg: CfgNode) -> RepVGG:
    """Build the RepVGG configured in ``MODEL.BACKBONE``; load pretrained weights if ``PRETRAIN`` is True.

    Raises:
        ConfigError: if ``DEPTH`` is unknown, if ``DEPLOY`` is True and ``NORM`` is not batch norm, or if ``PRETRAIN``
            is True and ``PRETRAIN_PATH`` is empty.
        WeightsError: if the pretrained weights cannot be read or do not match the model.
    """
    backbone = cfg.MODEL.BACKBONE
    depth = choose_depth(cfg, DEPTHS)
    if backbone.DEPLOY:
        _check_norm(build_norm(backbone.NORM, 64))
        logger.warning(
            "MODEL.BACKBONE.DEPLOY is True, but the deploy form only supports inference.\n"
            "  fix: set MODEL.BACKBONE.DEPLOY to False for training"
        )
    model = RepVGG(
        depth,
        in_channels=cfg.INPUT.CHANNELS,
        last_stride=backbone.LAST_STRIDE,
        norm=backbone.NORM,
        deploy=backbone.DEPLOY,
    )
    # There is no download URL for the authors' weights.
    return with_pretrained_weights(model, cfg, None)
