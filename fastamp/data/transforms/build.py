"""Build the image pipelines that INPUT describes."""

from typing import Any, NamedTuple

from fastamp.data.transforms.base import Augmentation, BatchTransform
from fastamp.data.transforms.colour import ColorJitter
from fastamp.data.transforms.erasing import RandomErasing
from fastamp.data.transforms.geometry import PADDING_MODES, PadAndRandomCrop, RandomHorizontalFlip, Resize
from fastamp.utils.errors import ConfigError, did_you_mean

_NOT_BUILT = ("AUTOAUG", "CROP", "AFFINE", "AUGMIX", "RPT")


class Transforms(NamedTuple):
    """What happens to an image: ``resize`` on each one by itself, then ``augment`` on whole batches."""

    resize: Resize
    augment: Augmentation


def build_transforms(cfg: Any, is_train: bool = True) -> Transforms:
    """Build the training or the test pipeline, in FastReID's order.

    Training: resize, pad and crop, flip, colour jitter, random erasing. Test: resize.

    Raises:
        ConfigError: a value is out of range, or an augmentation is enabled that does not exist.
    """
    settings = cfg.INPUT
    key = "INPUT.SIZE_TRAIN" if is_train else "INPUT.SIZE_TEST"
    size = tuple(settings.SIZE_TRAIN if is_train else settings.SIZE_TEST)
    if len(size) != 2 or not all(isinstance(side, int) and side >= 1 for side in size):
        raise ConfigError(f"{key} is {list(size)}; expected the height and the width in pixels, e.g. [256, 128]")
    augmentations = _train_augmentations(settings, size) if is_train else []
    return Transforms(Resize(size=size), Augmentation(transforms=augmentations, seed=cfg.SEED))


def _train_augmentations(settings: Any, size: tuple[int, int]) -> list[BatchTransform]:
    for name in _NOT_BUILT:
        if settings[name].ENABLED:
            raise ConfigError(f"INPUT.{name}.ENABLED is True, but this version has no such augmentation; set it False")
    augmentations: list[BatchTransform] = []
    if settings.PADDING.ENABLED:
        augmentations.append(_build_pad_and_crop(settings.PADDING, size))
    if settings.FLIP.ENABLED:
        augmentations.append(RandomHorizontalFlip(prob=_share("INPUT.FLIP.PROB", settings.FLIP.PROB)))
    if settings.CJ.ENABLED:
        augmentations.append(_build_color_jitter(settings.CJ))
    if settings.REA.ENABLED:
        augmentations.append(_build_random_erasing(settings.REA))
    return augmentations


def _build_pad_and_crop(settings: Any, size: tuple[int, int]) -> PadAndRandomCrop:
    padding, mode = settings.SIZE, settings.MODE
    if mode not in PADDING_MODES:
        raise ConfigError(
            f"INPUT.PADDING.MODE is {mode!r}; choices: {', '.join(PADDING_MODES)}.{did_you_mean(mode, PADDING_MODES)}"
        )
    # A mirror image can be no larger than the image; a reflection leaves out the edge itself.
    largest = {"reflect": min(size) - 1, "symmetric": min(size)}.get(mode)
    if padding < 0 or (largest is not None and padding > largest):
        limit = "at least 0" if largest is None else f"in 0..{largest} for mode {mode!r} and images of {list(size)}"
        raise ConfigError(f"INPUT.PADDING.SIZE is {padding}; expected {limit}")
    return PadAndRandomCrop(padding=padding, mode=mode)


def _build_color_jitter(settings: Any) -> ColorJitter:
    strengths = {name: getattr(settings, name.upper()) for name in ("brightness", "contrast", "saturation", "hue")}
    for name, strength in strengths.items():
        if strength < 0 or (name == "hue" and strength > 0.5):
            limit = "in 0..0.5" if name == "hue" else "at least 0"
            raise ConfigError(f"INPUT.CJ.{name.upper()} is {strength}; expected a number {limit}")
    return ColorJitter(prob=_share("INPUT.CJ.PROB", settings.PROB), **strengths)


def _build_random_erasing(settings: Any) -> RandomErasing:
    value = tuple(settings.VALUE)
    if len(value) != 3 or not all(0 <= channel <= 255 for channel in value):
        raise ConfigError(f"INPUT.REA.VALUE is {list(value)}; expected three numbers in 0..255 (red, green, blue)")
    return RandomErasing(prob=_share("INPUT.REA.PROB", settings.PROB), value=value)


def _share(key: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ConfigError(f"{key} is {value}; expected a probability in 0..1")
    return value
