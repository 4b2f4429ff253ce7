"""timm models as backbones: the output is the last feature map, the class token or the mean of the patch tokens."""

import logging
import sys
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fastamp.checkpoint.pretrained import load_pretrained_backbone
from fastamp.config import fixed_input_size, input_size, size_key
from fastamp.modeling.backbones.build_utils import warn_ignored_options
from fastamp.utils.errors import ConfigError, WeightsError, did_you_mean
from fastamp.utils.moved import renamed_attribute

logger = logging.getLogger(__name__)

_PREFIX = "model."
# Exceptions of timm models on unsupported arguments and on unsupported image sizes.
_TIMM_ERRORS = (AssertionError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError)


class TimmBackbone(nn.Module):
    """timm model without pooling and classifier, with output (B, feature_dim, h, w).

    Args:
        model (nn.Module): timm model created with ``num_classes=0`` and, if the model supports it, ``global_pool=""``.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # Some models, e.g. MobileNetV3, have a wider layer after the last feature map.
        self.feature_dim = getattr(model, "head_hidden_size", None) or model.num_features
        self.channels_last = getattr(model, "output_fmt", "NCHW") == "NHWC"
        self.has_class_token = getattr(model, "cls_token", None) is not None
        self.prefix_tokens = getattr(model, "num_prefix_tokens", 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map normalized images (B, in_channels, H, W) to features (B, feature_dim, h, w).

        h and w are 1 if the timm model returns tokens or a vector.
        """
        x = self.model(x)
        if x.dim() == 4:
            return x.permute(0, 3, 1, 2) if self.channels_last else x
        if x.dim() == 3:
            x = x[:, 0] if self.has_class_token else x[:, self.prefix_tokens :].mean(dim=1)
        return x[:, :, None, None]

    def convert_state_dict(self, state: dict[str, torch.Tensor], notes: list[str]) -> dict[str, torch.Tensor]:
        """Convert any state dict that timm supports, and resize position embeddings to the image size of this model."""
        if any(key.startswith(_PREFIX) for key in state):
            return state
        # timm has one function per model family that resizes position embeddings and converts the authors' names.
        convert = getattr(sys.modules[type(self.model).__module__], "checkpoint_filter_fn", None)
        if convert is not None:
            state = convert(dict(state), self.model)
        return {_PREFIX + key: value for key, value in state.items()}

    adopt_state = renamed_attribute("adopt_state", "convert_state_dict")


def build_timm_backbone(cfg: Any, name: str) -> TimmBackbone:
    """Build the timm model ``name``; load pretrained weights if ``MODEL.BACKBONE.PRETRAIN`` is True.

    Models with a fixed image size are built for the size of the training images. Other sizes are supported if timm can
    resize the position embeddings or windows. If ``LAST_STRIDE`` is 1, models that support ``output_stride`` have an
    output stride of 16, and timm dilates the later convolutions. All other settings are timm's defaults.

    Args:
        cfg (CfgNode): the config; the number of image channels is ``INPUT.CHANNELS``.
        name (str): name of the model in timm, optionally with a tag of pretrained weights (``name.tag``).

    Raises:
        ConfigError: if timm is not installed, if the model or tag is unknown, or if the model does not support the size
            or number of channels of the images.
        WeightsError: if the pretrained weights cannot be downloaded or read, or do not match the model.
    """
    backbone = cfg.MODEL.BACKBONE
    timm = _import_timm(name)
    _check_name(timm, name)
    warn_ignored_options(cfg, "WITH_IBN", "WITH_SE", "WITH_NL")
    if backbone.NORM != "BN":
        logger.warning("MODEL.BACKBONE.NORM is ignored: the normalization layers of %s are defined by timm", name)
    size = fixed_input_size(cfg, is_train=True, needed_by=f"MODEL.BACKBONE.NAME={backbone.NAME}")
    key = size_key(cfg, is_train=True)
    model, arguments = _create(timm, name, cfg.INPUT.CHANNELS, key, size, backbone.LAST_STRIDE)
    if backbone.PRETRAIN and not backbone.PRETRAIN_PATH:
        model = _create_pretrained(timm, name, arguments)
    wrapped = TimmBackbone(model)
    _check_size(wrapped, name, key, (1, cfg.INPUT.CHANNELS, *size))
    test_size = input_size(cfg, is_train=False)
    if test_size is not None:
        _check_size(wrapped, name, size_key(cfg, is_train=False), (1, cfg.INPUT.CHANNELS, *test_size))
    if backbone.PRETRAIN and backbone.PRETRAIN_PATH:
        load_pretrained_backbone(wrapped, path=backbone.PRETRAIN_PATH, online=None)
    return wrapped


def _import_timm(name: str) -> ModuleType:
    try:
        import timm
    except ImportError as error:
        raise ConfigError(
            f"MODEL.BACKBONE.NAME=timm/{name} requires timm, which is not installed.\n"
            '  fix: pip install "fastamp[timm]"'
        ) from error
    return timm


def _check_name(timm: ModuleType, name: str) -> None:
    known = timm.list_pretrained() if "." in name else timm.list_models()
    # The list does not contain deprecated model names.
    if name not in known and ("." in name or not timm.is_model(name)):
        raise ConfigError(
            f"MODEL.BACKBONE.NAME: unknown model {name!r} in timm {timm.__version__}.{did_you_mean(name, known)}\n"
            "  fix: set MODEL.BACKBONE.NAME to timm/MODEL, where MODEL is a model listed by timm.list_models()"
        )


def _create(
    timm: ModuleType, name: str, channels: int, size_key: str, size: tuple[int, int], last_stride: int
) -> tuple[nn.Module, dict[str, Any]]:
    """Create the model with the first set of arguments that it supports, and return ``(model, arguments)``.

    timm does not provide a way to query the supported arguments.
    """
    options: list[dict[str, Any]] = [{"output_stride": 16}] if last_stride == 1 else []
    image = {"img_size": size}
    options += [image | {"dynamic_img_size": True}, image | {"strict_img_size": False}, image, {}]
    # A few models, e.g. the distilled DeiT, do not support global_pool="".
    for pooling in ({"global_pool": ""}, {}):
        for option in options:
            arguments = {"num_classes": 0, "in_chans": channels} | pooling | option
            try:
                model = timm.create_model(name, pretrained=False, **arguments)
            except _TIMM_ERRORS as error:
                failure = error
                continue
            if last_stride == 1 and "output_stride" not in option:
                logger.info("MODEL.BACKBONE.LAST_STRIDE=1 is ignored: timm's %s does not support output_stride", name)
            return model, arguments
    raise ConfigError(
        f"MODEL.BACKBONE.NAME: timm's {name} does not support {size_key}={size} with INPUT.CHANNELS={channels} "
        f"({str(failure) or type(failure).__name__}).\n  fix: change {size_key}, or choose another MODEL.BACKBONE.NAME"
    ) from failure


def _create_pretrained(timm: ModuleType, name: str, arguments: dict[str, Any]) -> nn.Module:
    try:
        return timm.create_model(name, pretrained=True, **arguments)
    except Exception as error:  # the exception type depends on the download source
        raise WeightsError(
            f"cannot download timm's pretrained weights for {name}: {error}.\n"
            "  fix: download pytorch_model.bin on another machine and set MODEL.BACKBONE.PRETRAIN_PATH to it, "
            "or set MODEL.BACKBONE.PRETRAIN to False to start from random weights"
        ) from error


def _check_size(backbone: TimmBackbone, name: str, key: str, shape: tuple[int, int, int, int]) -> None:
    """Raise ConfigError if a forward pass over images of ``shape`` fails; some timm models check the size only then."""
    training = backbone.training
    try:
        with torch.no_grad():
            backbone.eval()(torch.zeros(shape))
    except _TIMM_ERRORS as error:
        raise ConfigError(
            f"{key} is {shape[2:]}, which timm's {name} does not support ({str(error) or type(error).__name__}).\n"
            f"  fix: change {key}, or choose another MODEL.BACKBONE.NAME"
        ) from error
    finally:
        backbone.train(training)
