"""Build the image pipelines that INPUT describes."""

import logging
from typing import Any, NamedTuple

from fastamp.config import per_channel
from fastamp.data.transforms.base import Augmentation, BatchTransform
from fastamp.data.transforms.colour import ColorJitter, GaussianBlur, RandomGrayscale
from fastamp.data.transforms.erasing import LocalGrayscale, RandomErasing, RandomPatch
from fastamp.data.transforms.geometry import (
    PADDING_MODES,
    PadAndRandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
)
from fastamp.data.transforms.torchvision_ops import AugMix, AutoAugment, RandAugment, RandomAffine
from fastamp.utils.errors import ConfigError, did_you_mean

logger = logging.getLogger(__name__)


class Transforms(NamedTuple):
    """What happens to an image: read with ``channels``, ``resize`` on each one by itself, ``augment`` on batches."""

    channels: int
    resize: Resize
    augment: Augmentation


def build_transforms(cfg: Any, is_train: bool = True) -> Transforms:
    """Build the training or the test pipeline, in FastReID's order but for AutoAugment, which comes before its resize.

    Training: resize, AutoAugment, RandAugment, resized crop, pad and crop, flip, colour jitter, grey-scale, blur,
    AugMix, affine, random erasing, local grey-scale, random patch. Test: resize.

    Raises:
        ConfigError: a padding that the mode cannot make, or an augmentation that cannot work on INPUT.CHANNELS.
    """
    settings = cfg.INPUT
    size = tuple(settings.SIZE_TRAIN if is_train else settings.SIZE_TEST)
    augmentations = _train_augmentations(settings, size) if is_train else []
    augment = Augmentation(transforms=augmentations, seed=cfg.SEED)
    return Transforms(channels=settings.CHANNELS, resize=Resize(size=size), augment=augment)


def _train_augmentations(settings: Any, size: tuple[int, int]) -> list[BatchTransform]:
    augmentations: list[BatchTransform] = []
    for name in ("AUTOAUG", "RANDAUG", "AUGMIX"):
        if settings[name].ENABLED and settings.CHANNELS == 4:
            raise ConfigError(
                f"INPUT.{name}.ENABLED is on, but works on grey and RGB images, and INPUT.CHANNELS is 4.\n"
                f"  fix: INPUT.{name}.ENABLED False"
            )
        if settings[name].ENABLED and settings[name].PROB == 0:
            logger.warning("INPUT.%s is enabled and has no effect: INPUT.%s.PROB is 0", name, name)
    if settings.AUTOAUG.ENABLED:
        augmentations.append(AutoAugment(prob=settings.AUTOAUG.PROB))
    if settings.RANDAUG.ENABLED:
        strength = {"num_ops": settings.RANDAUG.NUM_OPS, "magnitude": settings.RANDAUG.MAGNITUDE}
        augmentations.append(RandAugment(prob=settings.RANDAUG.PROB, **strength))
    if settings.CROP.ENABLED:
        augmentations.append(_build_resized_crop(settings.CROP))
        size = augmentations[-1].output_size(size)
    if settings.PADDING.ENABLED:
        augmentations.append(_build_pad_and_crop(settings.PADDING, size))
    if settings.FLIP.ENABLED:
        augmentations.append(RandomHorizontalFlip(prob=settings.FLIP.PROB))
    if settings.CJ.ENABLED:
        strengths = {name: settings.CJ[name.upper()] for name in ("brightness", "contrast", "saturation", "hue")}
        augmentations.append(ColorJitter(prob=settings.CJ.PROB, **strengths))
    if settings.GREY.ENABLED:
        augmentations.append(RandomGrayscale(prob=settings.GREY.PROB))
    if settings.BLUR.ENABLED:
        augmentations.append(_build_blur(settings.BLUR, size))
    if settings.AUGMIX.ENABLED:
        augmentations.append(AugMix(prob=settings.AUGMIX.PROB))
    if settings.AFFINE.ENABLED:
        augmentations.append(RandomAffine())
    if settings.REA.ENABLED:
        value = per_channel("INPUT.REA.VALUE", settings.REA.VALUE, channels=settings.CHANNELS)
        augmentations.append(RandomErasing(prob=settings.REA.PROB, value=value))
    if settings.LOCAL_GREY.ENABLED:
        augmentations.append(LocalGrayscale(prob=settings.LOCAL_GREY.PROB))
    if settings.RPT.ENABLED:
        augmentations.append(RandomPatch(prob=settings.RPT.PROB))
    return augmentations


def _build_resized_crop(settings: Any) -> RandomResizedCrop:
    for name in ("SCALE", "RATIO"):
        low, high = settings[name]
        if low > high:
            raise ConfigError(f"INPUT.CROP.{name} is {settings[name]}; the smallest comes first")
    return RandomResizedCrop(size=settings.SIZE, scale=settings.SCALE, ratio=settings.RATIO)


def _build_blur(settings: Any, size: tuple[int, int]) -> GaussianBlur:
    if settings.KERNEL_SIZE % 2 == 0 or min(size) <= settings.KERNEL_SIZE // 2:
        raise ConfigError(
            f"INPUT.BLUR.KERNEL_SIZE is {settings.KERNEL_SIZE}; expected an odd number, at most "
            f"{2 * min(size) - 1} for images of {list(size)}"
        )
    if settings.SIGMA[0] > settings.SIGMA[1]:
        raise ConfigError(f"INPUT.BLUR.SIGMA is {settings.SIGMA}; the smallest comes first")
    return GaussianBlur(prob=settings.PROB, kernel_size=settings.KERNEL_SIZE, sigma=settings.SIGMA)


def _build_pad_and_crop(settings: Any, size: tuple[int, int]) -> PadAndRandomCrop:
    padding, mode = settings.SIZE, settings.MODE
    if mode not in PADDING_MODES:
        raise ConfigError(
            f"INPUT.PADDING.MODE is {mode!r}; choices: {', '.join(PADDING_MODES)}.{did_you_mean(mode, PADDING_MODES)}"
        )
    # A mirror image can be no larger than the image; a reflection leaves out the edge itself.
    largest = {"reflect": min(size) - 1, "symmetric": min(size)}.get(mode)
    if largest is not None and padding > largest:
        raise ConfigError(
            f"INPUT.PADDING.SIZE is {padding}; expected 0..{largest} for mode {mode!r} and images of {list(size)}"
        )
    return PadAndRandomCrop(padding=padding, mode=mode)
