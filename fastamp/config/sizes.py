"""Input size of the model, from the INPUT keys."""

from fastamp.config.config import CfgNode
from fastamp.utils.errors import ConfigError


def crop_size(cfg: CfgNode) -> tuple[int, int] | None:
    """Return (height, width) of INPUT.CROP in pixels; None if it is disabled."""
    if not cfg.INPUT.CROP.ENABLED:
        return None
    size = tuple(cfg.INPUT.CROP.SIZE)
    return size * 2 if len(size) == 1 else size


def input_size(cfg: CfgNode, *, is_train: bool) -> tuple[int, int] | None:
    """Return (height, width) of the model's input in pixels; None if it depends on the image.

    The size is INPUT.CROP.SIZE if INPUT.CROP is enabled, else SIZE_TRAIN or SIZE_TEST. If SIZE_TRAIN is ``(side,)`` and
    INPUT.PADDING is enabled, training images are cropped to squares of that side, as in FastReID.

    Args:
        cfg: config; INPUT is read.
        is_train: True for training images, False for test images.
    """
    crop = crop_size(cfg)
    if crop is not None:
        return crop
    size = tuple(cfg.INPUT.SIZE_TRAIN if is_train else cfg.INPUT.SIZE_TEST)
    if len(size) == 2:
        return size
    return size * 2 if is_train and cfg.INPUT.PADDING.ENABLED and size != (0,) else None


def size_key(cfg: CfgNode, *, is_train: bool) -> str:
    """Return the config key that determines ``input_size``."""
    if cfg.INPUT.CROP.ENABLED:
        return "INPUT.CROP.SIZE"
    return "INPUT.SIZE_TRAIN" if is_train else "INPUT.SIZE_TEST"


def fixed_input_size(cfg: CfgNode, *, is_train: bool, needed_by: str) -> tuple[int, int]:
    """Return ``input_size``, or raise an error if it depends on the image.

    Args:
        cfg, is_train: see ``input_size``.
        needed_by: name of the component that requires a fixed size, for the message.

    Raises:
        ConfigError: if the size depends on the image.
    """
    size = input_size(cfg, is_train=is_train)
    if size is None:
        key = size_key(cfg, is_train=is_train)
        raise ConfigError(
            f"{needed_by} requires a fixed image size, but {key} {tuple(cfg.INPUT[key.removeprefix('INPUT.')])} keeps "
            f"aspect ratios.\n  fix: set {key} to (height, width), or INPUT.CROP.ENABLED to True"
        )
    return size
