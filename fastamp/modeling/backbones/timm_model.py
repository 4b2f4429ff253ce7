"""Any model of timm's as a backbone, with its last map, its class token or the mean of its tokens as the feature."""

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
# What timm's models raise at an argument that they do not know, and at images that do not fit.
_TIMM_ERRORS = (AssertionError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError)


class TimmBackbone(nn.Module):
    """A model of timm's without its pooling and classifier, whose output is always (B, feature_dim, h, w).

    Args:
        model: made with ``num_classes=0``, and with ``global_pool=""`` if it can be.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # Some models, e.g. MobileNetV3, widen the last map once more.
        self.feature_dim = getattr(model, "head_hidden_size", None) or model.num_features
        self.channels_last = getattr(model, "output_fmt", "NCHW") == "NHWC"
        self.has_class_token = getattr(model, "cls_token", None) is not None
        self.prefix_tokens = getattr(model, "num_prefix_tokens", 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, in_channels, H, W) float, normalized, to (B, feature_dim, h, w); tokens and vectors to h = w = 1."""
        x = self.model(x)
        if x.dim() == 4:
            return x.permute(0, 3, 1, 2) if self.channels_last else x
        if x.dim() == 3:
            x = x[:, 0] if self.has_class_token else x[:, self.prefix_tokens :].mean(dim=1)
        return x[:, :, None, None]

    def convert_state_dict(self, state: dict[str, torch.Tensor], notes: list[str]) -> dict[str, torch.Tensor]:
        """Return a state dict of timm's, or one that timm can convert, under these names and with this image size."""
        if any(key.startswith(_PREFIX) for key in state):
            return state
        # Each family has a function of its own that resizes position embeddings and translates its authors' names.
        convert = getattr(sys.modules[type(self.model).__module__], "checkpoint_filter_fn", None)
        if convert is not None:
            state = convert(dict(state), self.model)
        return {_PREFIX + key: value for key, value in state.items()}

    adopt_state = renamed_attribute("adopt_state", "convert_state_dict")


def build_timm_backbone(cfg: Any, name: str) -> TimmBackbone:
    """Return timm's model ``name``, also with a tag, for ``INPUT.CHANNELS``; with pretrained weights if ``PRETRAIN``.

    Models that work at one image size get that of the training images, and may see others where timm can resize their
    position embeddings or windows. With LAST_STRIDE 1, the map is that of stride 16 in models which can have it;
    timm dilates the convolutions after it for that. Everything else about the model is as timm has it.

    Raises:
        ConfigError: timm is not installed, has no such model or tag, or that cannot be a backbone for these images.
        WeightsError: the pretrained weights cannot be had or do not fit.
    """
    backbone = cfg.MODEL.BACKBONE
    timm = _import_timm(name)
    _check_name(timm, name)
    warn_ignored_options(cfg, "WITH_IBN", "WITH_SE", "WITH_NL")
    if backbone.NORM != "BN":
        logger.warning("MODEL.BACKBONE.NORM does nothing: %s has the normalization that timm gave it", name)
    size = fixed_input_size(cfg, is_train=True, needed_by=f"MODEL.BACKBONE.NAME {backbone.NAME}")
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
            f'MODEL.BACKBONE.NAME timm/{name}: timm is not installed.\n  fix: pip install "fastamp[timm]"'
        ) from error
    return timm


def _check_name(timm: ModuleType, name: str) -> None:
    known = timm.list_pretrained() if "." in name else timm.list_models()
    # Old names of models are not in that list.
    if name not in known and ("." in name or not timm.is_model(name)):
        raise ConfigError(
            f"MODEL.BACKBONE.NAME: timm {timm.__version__} has no model {name!r}.{did_you_mean(name, known)}"
        )


def _create(
    timm: ModuleType, name: str, channels: int, size_key: str, size: tuple[int, int], last_stride: int
) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model and the arguments that it took: the first that it does, since timm tells in no other way."""
    options: list[dict[str, Any]] = [{"output_stride": 16}] if last_stride == 1 else []
    image = {"img_size": size}
    options += [image | {"dynamic_img_size": True}, image | {"strict_img_size": False}, image, {}]
    # Few models insist on a pooling of their own, among them the distilled DeiT.
    for pooling in ({"global_pool": ""}, {}):
        for option in options:
            arguments = {"num_classes": 0, "in_chans": channels} | pooling | option
            try:
                model = timm.create_model(name, pretrained=False, **arguments)
            except _TIMM_ERRORS as error:
                failure = error
                continue
            if last_stride == 1 and "output_stride" not in option:
                logger.info("MODEL.BACKBONE.LAST_STRIDE 1 does nothing: timm's %s has one stride", name)
            return model, arguments
    raise ConfigError(
        f"MODEL.BACKBONE.NAME: timm's {name} cannot be a backbone for {size_key} {size} and INPUT.CHANNELS "
        f"{channels} ({str(failure) or type(failure).__name__})"
    ) from failure


def _create_pretrained(timm: ModuleType, name: str, arguments: dict[str, Any]) -> nn.Module:
    try:
        return timm.create_model(name, pretrained=True, **arguments)
    except Exception as error:  # each of the places that timm downloads from raises errors of its own
        raise WeightsError(
            f"MODEL.BACKBONE.PRETRAIN is on, but timm's weights of {name} could not be had ({error}).\n"
            "  fix: download their pytorch_model.bin elsewhere and name it in MODEL.BACKBONE.PRETRAIN_PATH, "
            "or start from random weights with MODEL.BACKBONE.PRETRAIN False"
        ) from error


def _check_size(backbone: TimmBackbone, name: str, key: str, shape: tuple[int, int, int, int]) -> None:
    """Raise ConfigError where images of this shape do not pass through, which timm may find out only then."""
    training = backbone.training
    try:
        with torch.no_grad():
            backbone.eval()(torch.zeros(shape))
    except _TIMM_ERRORS as error:
        raise ConfigError(
            f"{key} is {shape[2:]}, but timm's {name} cannot take such images ({str(error) or type(error).__name__})"
        ) from error
    finally:
        backbone.train(training)
