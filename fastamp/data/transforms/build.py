"""Build the image pipelines that INPUT describes."""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastamp.config import crop_size, input_size, per_channel
from fastamp.data.decode import read_image
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
from fastamp.utils.errors import ConfigError, DataError, did_you_mean

logger = logging.getLogger(__name__)


class Transforms(NamedTuple):
    """The image pipeline.

    Attributes:
        channels: that images are read with: 1, 3 or 4.
        max_pixels: width x height of the largest image that is read.
        resize: of one image.
        augment_each: applied to one image at a time, while images still have different sizes; usually empty.
        augment: applied to a batch.
        size_key: the config key that ``resize`` follows, for messages.
    """

    channels: int
    max_pixels: int
    resize: Resize
    augment_each: Augmentation
    augment: Augmentation
    size_key: str

    def read(self, path: str, *, box: tuple[int, int, int, int] | None = None) -> Tensor:
        """Return (C, H, W) uint8 of an image file, or of a ``box`` in it, resized; see ``read_image``.

        Raises:
            DataError: it cannot be read.
        """
        image = read_image(path, self.channels, box=box, max_pixels=self.max_pixels, least_side=self.resize.least_side)
        return self.resize(image)

    def stack(self, images: Sequence[Tensor]) -> Tensor:
        """Return (B, C, H, W) of B images.

        Args:
            images: (C, H, W) each, resized.

        Raises:
            DataError: they have different sizes.
        """
        sizes = list(dict.fromkeys(tuple(image.shape[-2:]) for image in images))
        if len(sizes) > 1:
            raise DataError(
                f"{self.size_key} {self.resize.size} keeps the images' aspect ratios, so that images of one batch have "
                f"different sizes: {sizes[0]} and {sizes[1]} (height, width).\n"
                f"  fix: {self.size_key} (height, width), INPUT.CROP.ENABLED True, or "
                + ("TEST.IMS_PER_BATCH 1" if self.size_key == "INPUT.SIZE_TEST" else "INPUT.PADDING.ENABLED True")
            )
        return torch.stack(list(images))


def build_transforms(cfg: Any, is_train: bool = True) -> Transforms:
    """Build the training or the test pipeline, in FastReID's order.

    Training: resize, AutoAugment, RandAugment, resized crop, pad and crop, flip, colour jitter, grey-scale, blur,
    affine, AugMix, random erasing, local grey-scale, random patch. Test: resize, center crop. Differs from FastReID:
    AutoAugment comes after the resizing.

    Raises:
        ConfigError: a padding that the mode cannot make, or an augmentation that cannot work on INPUT.CHANNELS.
    """
    settings = cfg.INPUT
    if is_train:
        resize = Resize(size=tuple(settings.SIZE_TRAIN), interpolation=settings.INTERPOLATION)
        augmentations = _train_augmentations(cfg)
    else:
        interpolation = settings.INTERPOLATION_TEST
        if interpolation == "same":
            interpolation = settings.INTERPOLATION
        resize = Resize(size=tuple(settings.SIZE_TEST), crop=crop_size(cfg), interpolation=interpolation)
        if resize.crop and any(
            0 < side < crop for side, crop in zip(_least_size(resize.size), resize.crop, strict=True)
        ):
            logger.warning(
                "INPUT.CROP.SIZE %s is larger than INPUT.SIZE_TEST %s: test images get black borders (as in FastReID)\n"
                "  fix: an INPUT.SIZE_TEST at least as large as INPUT.CROP.SIZE",
                resize.crop,
                resize.size,
            )
        augmentations = []
    size, first = resize.output_size, 0
    for number, transform in enumerate(augmentations, start=1):
        if size is not None:
            transform.check_size(size)
            size = transform.output_size(size)
        elif transform.size is not None:
            size, first = transform.size, number
    return Transforms(
        channels=settings.CHANNELS,
        max_pixels=settings.MAX_PIXELS,
        resize=resize,
        augment_each=Augmentation(transforms=augmentations[:first], seed=cfg.SEED),
        augment=Augmentation(transforms=augmentations[first:], seed=cfg.SEED),
        size_key="INPUT.SIZE_TRAIN" if is_train else "INPUT.SIZE_TEST",
    )


def _least_size(size: tuple[int, ...]) -> tuple[int, ...]:
    """Return the smallest (height, width) that images resized to ``size`` have; 0 where it is not known."""
    return size if len(size) == 2 else size * 2


def _train_augmentations(cfg: Any) -> list[BatchTransform]:
    settings = cfg.INPUT
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
        augmentations.append(_build_resized_crop(cfg))
    if settings.PADDING.ENABLED:
        augmentations.append(_build_pad_and_crop(cfg))
    if settings.FLIP.ENABLED:
        augmentations.append(RandomHorizontalFlip(prob=settings.FLIP.PROB))
    if settings.CJ.ENABLED:
        strengths = {name: settings.CJ[name.upper()] for name in ("brightness", "contrast", "saturation", "hue")}
        augmentations.append(ColorJitter(prob=settings.CJ.PROB, **strengths))
    if settings.GREY.ENABLED:
        augmentations.append(RandomGrayscale(prob=settings.GREY.PROB))
    if settings.BLUR.ENABLED:
        augmentations.append(_build_blur(settings.BLUR))
    if settings.AFFINE.ENABLED:
        augmentations.append(RandomAffine())
    if settings.AUGMIX.ENABLED:
        augmentations.append(AugMix(prob=settings.AUGMIX.PROB))
    if settings.REA.ENABLED:
        value = per_channel("INPUT.REA.VALUE", settings.REA.VALUE, channels=settings.CHANNELS)
        augmentations.append(RandomErasing(prob=settings.REA.PROB, value=value))
    if settings.LOCAL_GREY.ENABLED:
        augmentations.append(LocalGrayscale(prob=settings.LOCAL_GREY.PROB))
    if settings.RPT.ENABLED:
        augmentations.append(RandomPatch(prob=settings.RPT.PROB))
    return augmentations


def _build_resized_crop(cfg: Any) -> RandomResizedCrop:
    settings = cfg.INPUT.CROP
    for name in ("SCALE", "RATIO"):
        low, high = settings[name]
        if low > high:
            raise ConfigError(f"INPUT.CROP.{name} is {settings[name]}; the smallest comes first")
    return RandomResizedCrop(
        size=crop_size(cfg), scale=settings.SCALE, ratio=settings.RATIO, interpolation=cfg.INPUT.INTERPOLATION
    )


def _build_blur(settings: Any) -> GaussianBlur:
    if settings.KERNEL_SIZE % 2 == 0:
        raise ConfigError(f"INPUT.BLUR.KERNEL_SIZE is {settings.KERNEL_SIZE}; expected an odd number")
    if settings.SIGMA[0] > settings.SIGMA[1]:
        raise ConfigError(f"INPUT.BLUR.SIGMA is {settings.SIGMA}; the smallest comes first")
    return GaussianBlur(prob=settings.PROB, kernel_size=settings.KERNEL_SIZE, sigma=settings.SIGMA)


def _build_pad_and_crop(cfg: Any) -> PadAndRandomCrop:
    padding, mode = cfg.INPUT.PADDING.SIZE, cfg.INPUT.PADDING.MODE
    if mode not in PADDING_MODES:
        raise ConfigError(
            f"INPUT.PADDING.MODE is {mode!r}; choices: {', '.join(PADDING_MODES)}.{did_you_mean(mode, PADDING_MODES)}"
        )
    return PadAndRandomCrop(padding=padding, mode=mode, size=input_size(cfg, is_train=True))
