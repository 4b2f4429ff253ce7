"""timm models as backbones: the last feature map, the map of patch tokens, the class token or pooled tokens."""

import logging
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fastamp.checkpoint.pretrained import load_pretrained_backbone
from fastamp.config import CfgNode, Key, fixed_input_size, input_size, size_key
from fastamp.contracts import State
from fastamp.modeling.backbones.build_utils import LayerGroups, layers_in_order, warn_ignored_options
from fastamp.modeling.backbones.position_grid import DEFAULT_STRIDE, factors_like
from fastamp.modeling.backbones.timm_vit import (
    MODEL_PREFIX,
    TimmVisionTransformer,
    convert_by_timm,
    is_plain_vit,
    nearest_grid,
    patch_size_of,
)
from fastamp.modeling.backbones.transformer import (
    SideInformation,
    patch_grid,
    size_of_training_images,
)
from fastamp.utils.errors import ConfigError, WeightsError, did_you_mean, optional_package
from fastamp.utils.files import expand

logger = logging.getLogger(__name__)

KEYS = (
    Key(
        "MODEL.BACKBONE.FEATURE",
        "auto",
        "Transformers of timm: class: class token; patches: map of patch tokens, for GeM and other pooling layers; "
        "pooled: timm's pooling of the tokens; auto: attention pooling if the model has it, otherwise the class token "
        "if it has one, otherwise the map.",
        choices=("auto", "class", "patches", "pooled"),
    ),
)

# Exceptions of timm models on unsupported arguments and on unsupported image sizes.
_TIMM_ERRORS = (AssertionError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError)
# Sources of a model's config and weights: a repository of the Hugging Face Hub, a local copy of one.
_HUB, _FOLDER = "hf-hub:", "local-dir:"
# Arguments of timm's transformers and the config keys of their values.
_RATES = {
    "drop_path_rate": "MODEL.BACKBONE.DROP_PATH_RATIO",
    "proj_drop_rate": "MODEL.BACKBONE.DROP_RATIO",
    "attn_drop_rate": "MODEL.BACKBONE.ATT_DROP_RATE",
}
_MAX_DISTORTION = 1.25  # of the aspect ratio of a grid of patches, relative to the image


class TimmBackbone(SideInformation):
    """timm model without pooling and classifier, with output (B, feature_dim, h, w).

    Args:
        model: timm model created with ``num_classes=0`` and, if the model supports it, ``global_pool=""``.
        feature: ``"class"``, ``"patches"``, ``"pooled"`` or ``"auto"`` (default); see ``TimmVisionTransformer``. Models
            without tokens return the feature map for ``"class"``.
        cameras, views, side_weight: see ``SideInformation``; supported for Swin. Default: no embedding.
        checkpointing: recompute the activations of each block in the backward pass. Default False.
        map_width: channels of the map that ``model.forward_features`` returns, for models whose ``forward`` pools it
            even with ``global_pool=""``; their head is removed. Default 0: the output of ``forward``.

    Raises:
        ConfigError: if the model does not support embeddings or checkpointing.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        map_width: int = 0,
        feature: str = "auto",
        cameras: int = 0,
        views: int = 0,
        side_weight: float = 3.0,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.model: Any = model  # of timm, whose modules have no types
        self.feature = feature
        # Some models, e.g. MobileNetV3, have a wider layer after the last feature map.
        self.feature_dim = int(map_width or getattr(model, "head_hidden_size", None) or self.model.num_features)
        self.before_head = map_width > 0
        if self.before_head:
            for name in {"head", "classifier", "fc"} & dict(model.named_children()).keys():
                setattr(model, name, nn.Identity())  # DistributedDataParallel does not support unused parameters
        self.channels_last = _is_channels_last(model)
        self.has_class_token = "cls_token" in dict(model.named_parameters(recurse=False))
        self.prefix_tokens = getattr(model, "num_prefix_tokens", int(self.has_class_token))
        if cameras or views:
            self._require_swin()
            width = model.patch_embed.proj.out_channels
            self.create_side_embedding(width, cameras=cameras, views=views, side_weight=side_weight)
        self.checkpointing = checkpointing
        if checkpointing:
            self._enable_checkpointing()

    def _require_swin(self) -> None:
        """Raise ConfigError unless the model consists of a patch embedding, layers and a norm, like Swin."""
        from timm.models.swin_transformer import SwinTransformer
        from timm.models.swin_transformer_v2 import SwinTransformerV2

        if not isinstance(self.model, SwinTransformer | SwinTransformerV2):
            raise ConfigError(
                "MODEL.BACKBONE.SIE_CAMERAS and SIE_VIEWS require a plain Vision Transformer or a Swin; timm's "
                f"{type(self.model).__name__} does not support them.\n"
                "  fix: set MODEL.BACKBONE.SIE_CAMERAS and SIE_VIEWS to 0, or choose another MODEL.BACKBONE.NAME"
            )

    def layer_groups(self) -> LayerGroups:
        """List the modules of each block, in order, and those after the last one; empty if timm's model has no blocks.

        The blocks are counted over the stages of models such as Swin and ConvNeXt.
        """
        children = dict(self.model.named_children())
        container = next((name for name in ("blocks", "layers", "stages") if name in children), "")
        return layers_in_order(self.model, container) if container else []

    def _enable_checkpointing(self) -> None:
        try:
            self.model.set_grad_checkpointing(True)
        except (AssertionError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"MODEL.BACKBONE.CHECKPOINTING is True, but timm's {type(self.model).__name__} does not support it.\n"
                "  fix: set MODEL.BACKBONE.CHECKPOINTING to False"
            ) from error

    def forward(
        self, x: torch.Tensor, camids: torch.Tensor | None = None, viewids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Map normalized images (B, in_channels, H, W) to features (B, feature_dim, h, w).

        h and w are 1 for a class token and for models without a grid of the image's aspect ratio.

        Args:
            x: images.
            camids, viewids: see ``SideInformation.add_side_information``.
        """
        size = (int(x.shape[2]), int(x.shape[3]))  # tensors while torch.jit.trace runs
        if self.takes_cameras:
            tokens = self.add_side_information(self.model.patch_embed(x), camids, viewids)
            x = self.model.norm(self.model.layers(tokens))
        else:
            x = self.model.forward_features(x) if self.before_head else self.model(x)
        if not isinstance(x, torch.Tensor):
            raise ConfigError(
                f"MODEL.BACKBONE.NAME: timm's {type(self.model).__name__} returns a {type(x).__name__} of several "
                "maps, not a single one.\n  fix: choose another MODEL.BACKBONE.NAME"
            )
        if x.dim() == 4:
            return x.permute(0, 3, 1, 2) if self.channels_last else x
        if x.dim() == 3:
            return self._select(x, size)
        self._require_map()
        return x[:, :, None, None]

    def _select(self, tokens: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """Convert tokens (B, N, D) of images of ``size`` to a class token or a map."""
        if self.has_class_token and self.feature in ("auto", "class"):
            return tokens[:, 0, :, None, None]
        patches = tokens[:, self.prefix_tokens :]
        grid = _grid_like(patches.shape[1], size)
        if grid is None:
            self._require_map()
        if grid is None or self.feature == "pooled":
            return patches.mean(dim=1)[:, :, None, None]
        return patches.transpose(1, 2).unflatten(2, grid)

    def _require_map(self) -> None:
        """Raise ConfigError for ``feature`` ``"patches"`` of a model that returns one vector per image."""
        if self.feature == "patches":
            raise ConfigError(
                f"MODEL.BACKBONE.FEATURE is patches, but timm's {type(self.model).__name__} returns one vector per "
                "image, or tokens without a grid.\n  fix: set MODEL.BACKBONE.FEATURE to auto, or choose another "
                "MODEL.BACKBONE.NAME"
            )

    def convert_state_dict(self, state: State, notes: list[str]) -> State:
        """Convert any state dict that timm supports, and resize position embeddings to the image size of this model."""
        self.note_unused_side_embedding(state, notes)
        if any(key.startswith(MODEL_PREFIX) for key in state):
            return state
        return {MODEL_PREFIX + key: value for key, value in convert_by_timm(dict(state), self.model).items()}


def _is_channels_last(model: nn.Module) -> bool:
    return getattr(model, "output_fmt", "NCHW") == "NHWC"  # timm's models have no common base class


def build_timm_backbone(cfg: CfgNode, name: str) -> TimmBackbone | TimmVisionTransformer:
    """Build the timm model ``name``; load pretrained weights if ``MODEL.BACKBONE.PRETRAIN`` is True.

    Plain Vision Transformers (DINOv2, DINOv3, EVA-02, SigLIP, ...) are built for the grid of patches of the training
    images, see ``TimmVisionTransformer``. Other models with a fixed image size are built for the size of the training
    images; other sizes are supported if timm can resize the position embeddings or windows. If ``LAST_STRIDE`` is 1,
    models that support ``output_stride`` have an output stride of 16, and timm dilates the later convolutions. All
    settings without a config key are timm's defaults.

    Args:
        cfg: the config; the number of image channels is ``INPUT.CHANNELS``.
        name: name of the model in timm, optionally with a tag of pretrained weights (``name.tag``);
            ``hf-hub:ORGANIZATION/NAME`` for a model on the Hugging Face Hub; or ``local-dir:FOLDER`` for a local copy.

    Raises:
        ConfigError: if timm is not installed, if the model or tag is unknown, or if the model does not support the size
            or number of channels of the images, or an option.
        WeightsError: if the pretrained weights cannot be downloaded or read, or do not match the model.
    """
    backbone = cfg.MODEL.BACKBONE
    with optional_package(f"MODEL.BACKBONE.NAME=timm/{name} requires timm", "timm"):
        import timm
    warn_ignored_options(cfg, "WITH_IBN", "WITH_SE", "WITH_NL", "STEM_CONV")
    warn_ignored_options(cfg, "PART_TOKENS", disabled=0)
    if backbone.NORM != "BN":
        logger.warning(
            "MODEL.BACKBONE.NORM is ignored: the normalization layers of %s are defined by timm.\n"
            "  fix: set MODEL.BACKBONE.NORM to BN",
            name,
        )
    size = fixed_input_size(cfg, is_train=True, needed_by=f"MODEL.BACKBONE.NAME={backbone.NAME}")
    probe = _probe(timm, name)
    options = {
        "feature": backbone.FEATURE,
        "cameras": backbone.SIE_CAMERAS,
        "views": backbone.SIE_VIEWS,
        "side_weight": backbone.SIE_COE,
        "checkpointing": backbone.CHECKPOINTING,
    }
    wrap: Callable[[nn.Module], TimmBackbone | TimmVisionTransformer]
    if is_plain_vit(probe):
        stride, image_size = _patch_stride_and_size(cfg, name, probe, size)
        model, arguments = _create_vit(timm, cfg, name, probe, image_size)

        def wrap(model: nn.Module) -> TimmVisionTransformer:
            return TimmVisionTransformer(model, stride=stride, weights_grid=tuple(backbone.WEIGHTS_GRID), **options)

    else:
        _require_default_stride(cfg, name, probe)
        model, arguments = _create(timm, cfg, name, probe, size)
        map_width = _map_width_before_head(model, cfg.INPUT.CHANNELS, size)

        def wrap(model: nn.Module) -> TimmBackbone:
            return TimmBackbone(model, map_width=map_width, **options)

    path = backbone.PRETRAIN_PATH or _weights_in_folder(name)
    if backbone.PRETRAIN and not path:
        model = _create_pretrained(timm, name, arguments)
    if backbone.PRETRAIN:
        _log_pixel_statistics(cfg, name, model)
    wrapped = wrap(model)
    _check_size(wrapped, name, size_key(cfg, is_train=True), (1, cfg.INPUT.CHANNELS, *size))
    test_size = input_size(cfg, is_train=False)
    if test_size is not None and test_size != size:
        _check_size(wrapped, name, size_key(cfg, is_train=False), (1, cfg.INPUT.CHANNELS, *test_size))
    if backbone.PRETRAIN and path:
        load_pretrained_backbone(wrapped, path=path, online=None, without=("sie_embed",))
    return wrapped


def _probe(timm: ModuleType, name: str) -> nn.Module:
    """Create the model without memory for its parameters, to find its class and the size of its patches.

    Raises:
        ConfigError: if the model is unknown, or its config on the Hub or in a folder cannot be read.
    """
    if not name.startswith((_HUB, _FOLDER)):
        _check_name(timm, name)
    for device in ("meta", "cpu"):  # a few models do not support the meta device
        try:
            with torch.device(device):
                return timm.create_model(name, pretrained=False, num_classes=0)
        except _TIMM_ERRORS as error:
            failure: Exception = error
        except Exception as error:  # the exception type depends on the source
            failure = error
            break
    reason = str(failure).strip().splitlines() or [type(failure).__name__]
    if name.startswith(_FOLDER):
        fix = f"{name.removeprefix(_FOLDER)} must contain the config.json of a timm model"
    else:
        fix = (
            "check the name; without access to the Hub, download the repository (config.json and model.safetensors) on "
            f"another machine and set MODEL.BACKBONE.NAME to timm/{_FOLDER}FOLDER"
        )
    raise ConfigError(
        f"MODEL.BACKBONE.NAME=timm/{name}: the model's config cannot be read ({reason[0]}).\n  fix: {fix}"
    ) from failure


def _check_name(timm: ModuleType, name: str) -> None:
    known = timm.list_pretrained() if "." in name else timm.list_models()
    # The list does not contain deprecated model names.
    if name not in known and ("." in name or not timm.is_model(name)):
        raise ConfigError(
            f"MODEL.BACKBONE.NAME: unknown model {name!r} in timm {timm.__version__}.{did_you_mean(name, known)}\n"
            "  fix: set MODEL.BACKBONE.NAME to timm/MODEL, where MODEL is a model listed by timm.list_models(), or to "
            f"timm/{_HUB}ORGANIZATION/NAME for a model on the Hugging Face Hub"
        )


def _weights_in_folder(name: str) -> str:
    """Return the path of the weights file in the folder of a ``local-dir:`` name; empty if there is none."""
    if not name.startswith(_FOLDER):
        return ""
    folder = expand(name.removeprefix(_FOLDER))
    for file in ("model.safetensors", "pytorch_model.bin", "open_clip_model.safetensors"):
        if (folder / file).is_file():
            return str(folder / file)
    return ""


def _patch_stride_and_size(
    cfg: CfgNode, name: str, probe: nn.Module, size: tuple[int, int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the stride of the patches, and the image size that has the same grid without overlap; log the grid.

    Raises:
        ConfigError: if the images are smaller than a patch, or the stride is larger than a patch.
    """
    patch, stride = patch_size_of(probe), tuple(cfg.MODEL.BACKBONE.STRIDE_SIZE)
    if stride == DEFAULT_STRIDE:
        stride = patch
    if any(step > length for step, length in zip(stride, patch, strict=True)):
        raise ConfigError(
            f"MODEL.BACKBONE.STRIDE_SIZE is {stride}, but the patches of timm's {name} have {patch[0]} x {patch[1]} "
            f"pixels: pixels between them would not be used.\n  fix: set MODEL.BACKBONE.STRIDE_SIZE to at most {patch}"
        )
    size_of_training_images(cfg, patch)
    if stride == patch:
        grid = nearest_grid(size, patch)
    else:
        grid = patch_grid(size, patch, stride)
    image_size = (grid[0] * patch[0], grid[1] * patch[1])
    resized = stride == patch and image_size != size
    logger.info(
        "timm's %s: grid of %d x %d patches of %d x %d pixels%s",
        name,
        *grid,
        *patch,
        f"; images of {size[0]} x {size[1]} are resized to {image_size[0]} x {image_size[1]}, the nearest multiple"
        if resized
        else f", stride {stride[0]} x {stride[1]}",
    )
    return stride, image_size


def _require_default_stride(cfg: CfgNode, name: str, probe: nn.Module) -> None:
    """Raise ConfigError if ``STRIDE_SIZE`` is set for a model that is not a plain ViT, which ignores it."""
    if tuple(cfg.MODEL.BACKBONE.STRIDE_SIZE) != DEFAULT_STRIDE:
        raise ConfigError(
            f"MODEL.BACKBONE.STRIDE_SIZE is {tuple(cfg.MODEL.BACKBONE.STRIDE_SIZE)}, but overlapping patches require a "
            f"plain Vision Transformer; timm's {name} is a {type(probe).__name__}.\n"
            f"  fix: set MODEL.BACKBONE.STRIDE_SIZE to {DEFAULT_STRIDE}, or choose another MODEL.BACKBONE.NAME"
        )


def _transformer_rates(cfg: CfgNode) -> dict[str, float]:
    """Return timm's arguments of transformers for stochastic depth and dropout with positive values."""
    arguments = {argument: cfg.MODEL.BACKBONE[key.rpartition(".")[2]] for argument, key in _RATES.items()}
    return {argument: value for argument, value in arguments.items() if value > 0}


def _create_vit(
    timm: ModuleType, cfg: CfgNode, name: str, probe: nn.Module, image_size: tuple[int, int]
) -> tuple[nn.Module, dict[str, Any]]:
    """Create a plain ViT, and return ``(model, arguments)``."""
    backbone = cfg.MODEL.BACKBONE
    if backbone.LAST_STRIDE == 1:
        logger.info("MODEL.BACKBONE.LAST_STRIDE=1 is ignored: timm's %s does not support output_stride", name)
    arguments = {
        "num_classes": 0,
        "in_chans": cfg.INPUT.CHANNELS,
        "img_size": image_size,
        "dynamic_img_size": True,
        "pos_drop_rate": backbone.DROP_RATIO,
    } | _transformer_rates(cfg)
    try:
        return timm.create_model(name, pretrained=False, **arguments), arguments
    except _TIMM_ERRORS as error:
        raise _unsupported_size(cfg, name, probe, error) from error


def _create(
    timm: ModuleType, cfg: CfgNode, name: str, probe: nn.Module, size: tuple[int, int]
) -> tuple[nn.Module, dict[str, Any]]:
    """Create the model with the first set of arguments that it supports, and return ``(model, arguments)``.

    timm does not provide a way to query the supported arguments.
    """
    is_transformer = any(hasattr(module, "num_heads") for module in probe.modules())
    extra = _transformer_rates(cfg) if is_transformer else {}  # stochastic depth and dropout
    last_stride = cfg.MODEL.BACKBONE.LAST_STRIDE
    options: list[dict[str, Any]] = [{"output_stride": 16}] if last_stride == 1 else []
    image = {"img_size": size}
    options += [image | {"dynamic_img_size": True}, image | {"strict_img_size": False}, image, {}]
    # A few models, e.g. the distilled DeiT, do not support global_pool="".
    pooling: tuple[dict[str, Any], ...] = ({"global_pool": ""}, {})
    depth_only = {key: value for key, value in extra.items() if key == "drop_path_rate"}
    for given in (extra, depth_only, {}):
        for option in (pool | option for pool in pooling for option in options):
            arguments = {"num_classes": 0, "in_chans": cfg.INPUT.CHANNELS} | given | option
            try:
                model = timm.create_model(name, pretrained=False, **arguments)
            except _TIMM_ERRORS as error:
                failure = error
                continue
            if last_stride == 1 and "output_stride" not in option:
                logger.info("MODEL.BACKBONE.LAST_STRIDE=1 is ignored: timm's %s does not support output_stride", name)
            for argument in extra.keys() - given.keys():
                key = _RATES[argument]
                logger.warning(
                    "%s is ignored: timm's %s does not support %s.\n  fix: set %s to 0", key, name, argument, key
                )
            return model, arguments
    raise _unsupported_size(cfg, name, probe, failure) from failure


def _unsupported_size(cfg: CfgNode, name: str, probe: nn.Module, error: Exception) -> ConfigError:
    key = size_key(cfg, is_train=True)
    size = input_size(cfg, is_train=True)
    return ConfigError(
        f"MODEL.BACKBONE.NAME: timm's {name} does not support {key}={size} with INPUT.CHANNELS={cfg.INPUT.CHANNELS} "
        f"({str(error) or type(error).__name__}).\n  fix: {_change_size(key, probe)}, or choose another "
        "MODEL.BACKBONE.NAME"
    )


def _change_size(key: str, model: Any) -> str:
    """Describe how to change the size of the images to that in timm's config of the model."""
    size = (model.pretrained_cfg or {}).get("input_size")
    return f"change {key}, e.g. to {tuple(size[1:])}, its training size" if size else f"change {key}"


def _map_width_before_head(model: nn.Module, channels: int, size: tuple[int, int]) -> int:
    """Return the channels of the map before the head of a model whose ``forward`` pools it; 0 for other models."""
    training = model.training
    try:
        with torch.no_grad():
            output = model.eval()(torch.zeros(1, channels, *size))
            if not isinstance(output, torch.Tensor) or output.dim() != 2:
                return 0
            features = model.forward_features(torch.zeros(1, channels, *size))
    except (*_TIMM_ERRORS, AttributeError):  # `_check_size` raises the error
        return 0
    finally:
        model.train(training)
    is_map = isinstance(features, torch.Tensor) and features.dim() == 4
    if not is_map:
        return 0
    return features.shape[3 if _is_channels_last(model) else 1]


def _grid_like(patches: int, size: tuple[int, int]) -> tuple[int, int] | None:
    """Find the grid of ``patches`` with the aspect ratio nearest to images of ``size``; None if it differs too much."""
    if patches == 0:
        return None
    ratio = size[0] / size[1]
    grid = factors_like(patches, ratio)
    distortion = abs(math.log(grid[0] / grid[1] / ratio))
    return grid if distortion < math.log(_MAX_DISTORTION) else None


def _log_pixel_statistics(cfg: CfgNode, name: str, model: Any) -> None:
    """Log the mean and standard deviation with which the weights were trained, if the config has others."""
    pretrained = model.pretrained_cfg or {}
    for key, values in (("PIXEL_MEAN", pretrained.get("mean")), ("PIXEL_STD", pretrained.get("std"))):
        if values is None or len(values) != len(cfg.MODEL[key]):
            continue
        trained = [round(255 * value, 3) for value in values]
        if any(abs(one - other) > 1 for one, other in zip(trained, cfg.MODEL[key], strict=True)):
            logger.info(
                "MODEL.%s is %s, but timm's weights of %s were trained with %s", key, [*cfg.MODEL[key]], name, trained
            )


def _create_pretrained(timm: ModuleType, name: str, arguments: dict[str, Any]) -> nn.Module:
    try:
        return timm.create_model(name, pretrained=True, **arguments)
    except Exception as error:  # the exception type depends on the download source
        raise WeightsError(
            f"cannot download timm's pretrained weights for {name}: {error}.\n"
            "  fix: download model.safetensors on another machine and set MODEL.BACKBONE.PRETRAIN_PATH to it, "
            "or set MODEL.BACKBONE.PRETRAIN to False to start from random weights"
        ) from error


def _check_size(
    backbone: TimmBackbone | TimmVisionTransformer, name: str, key: str, shape: tuple[int, int, int, int]
) -> None:
    """Raise ConfigError if a forward pass over images of ``shape`` fails; some timm models check the size only then."""
    training = backbone.training
    ids = dict.fromkeys(("camids", "viewids"), torch.zeros(1, dtype=torch.int64))
    try:
        with torch.no_grad():
            backbone.eval()(torch.zeros(shape), **ids)
    except _TIMM_ERRORS as error:
        raise ConfigError(
            f"{key} is {shape[2:]}, which timm's {name} does not support ({str(error) or type(error).__name__}).\n"
            f"  fix: {_change_size(key, backbone.model)}, or choose another MODEL.BACKBONE.NAME"
        ) from error
    finally:
        backbone.train(training)
