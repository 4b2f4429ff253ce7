"""Build the image transforms from INPUT."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastamp.config import crop_size
from fastamp.config.defaults import current_path
from fastamp.data.decode import read_image
from fastamp.data.transforms.base import TRANSFORM_REGISTRY, Augmentation, BatchTransform
from fastamp.data.transforms.geometry import Resize
from fastamp.utils.errors import ConfigError, DataError, check_choice

logger = logging.getLogger(__name__)

ORDER = (
    "AUTOAUG",  # AutoAugment
    "RANDAUG",  # RandAugment
    "CROP",  # RandomResizedCrop
    "PADDING",  # PadAndRandomCrop
    "FLIP",  # RandomHorizontalFlip
    "CJ",  # ColorJitter
    "GRAYSCALE",  # RandomGrayscale
    "BLUR",  # GaussianBlur
    "AFFINE",  # RandomAffine
    "AUGMIX",  # AugMix
    "REA",  # RandomErasing
    "LOCAL_GRAYSCALE",  # LocalGrayscale
    "RPT",  # RandomPatch
)
"""Sections of INPUT in the order of their transforms."""


class Transforms(NamedTuple):
    """Image reading, resizing and augmentation.

    Attributes:
        channels (int): channels of the images: 1, 3 or 4.
        max_pixels (int): maximum width x height of an image.
        resize (Resize): resizing of one image.
        augment_each (Augmentation): transforms applied to single images while they still have different sizes; usually
            empty.
        augment (Augmentation): transforms applied to a batch.
        size_key (str): config key of the size, for messages.
    """

    channels: int
    max_pixels: int
    resize: Resize
    augment_each: Augmentation
    augment: Augmentation
    size_key: str

    def read(self, path: str, *, box: tuple[int, int, int, int] | None = None) -> Tensor:
        """Read and resize an image file, or a ``box`` in it; see ``read_image``.

        Returns:
            Tensor: (C, H, W) uint8.

        Raises:
            DataError: if it cannot be read.
        """
        image = read_image(path, self.channels, box=box, max_pixels=self.max_pixels, least_side=self.resize.least_side)
        return self.resize(image)

    def stack(self, images: Sequence[Tensor]) -> Tensor:
        """Stack resized images to a batch.

        Args:
            images (Sequence[Tensor]): B images, (C, H, W) each.

        Returns:
            Tensor: (B, C, H, W).

        Raises:
            DataError: if they have different sizes.
        """
        sizes = list(dict.fromkeys(tuple(image.shape[-2:]) for image in images))
        if len(sizes) > 1:
            raise DataError(
                f"{self.size_key} {self.resize.size} keeps the aspect ratio, but images of one batch have different "
                f"sizes: {sizes[0]} and {sizes[1]} (height, width).\n"
                f"  fix: {self.size_key} (height, width), INPUT.CROP.ENABLED True, or "
                + ("TEST.IMS_PER_BATCH 1" if self.size_key == "INPUT.SIZE_TEST" else "INPUT.PADDING.ENABLED True")
            )
        return torch.stack(list(images))


def build_transforms(cfg: Any, is_train: bool = True) -> Transforms:
    """Build the training or test transforms.

    Training: resize, then the enabled transforms in ``ORDER``. The order is FastReID's, except that AutoAugment follows
    the resizing. Test: resize and center crop.

    Args:
        cfg (CfgNode): config; reads INPUT and SEED.
        is_train (bool): training or test. Default True.

    Raises:
        ConfigError: if a transform's settings are inconsistent, or do not match INPUT.CHANNELS or the image size.
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
                "INPUT.CROP.SIZE %s is larger than INPUT.SIZE_TEST %s: test images are padded (black), as in FastReID\n"
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
    """Return the minimum (height, width) of images resized to ``size``; 0 if unknown."""
    return size if len(size) == 2 else size * 2


def _train_augmentations(cfg: Any) -> list[BatchTransform]:
    """Build the enabled transforms, in order.

    Raises:
        ConfigError: if a registered transform has no key ``ENABLED`` in its section.
    """
    transforms = []
    for name in transform_order():
        section = cfg.INPUT.get(name)
        if not isinstance(section, Mapping) or "ENABLED" not in section:
            raise ConfigError(
                f"missing config key of the transform {name!r} ({TRANSFORM_REGISTRY.get(name).__name__}): "
                f"INPUT.{name}.ENABLED.\n  fix: add to the KEYS of the file that registers the transform: "
                f'Key("INPUT.{name}.ENABLED", False, "...")'
            )
        if section["ENABLED"]:
            transforms.append(TRANSFORM_REGISTRY.build(name, cfg))
    return transforms


def transform_order() -> list[str]:
    """Return ``ORDER`` with the transforms of projects inserted: each before the section it names, or last.

    Raises:
        ConfigError: if a transform's ``before`` is not in ``ORDER``.
    """
    order = [*ORDER]
    for name in TRANSFORM_REGISTRY:
        transform = TRANSFORM_REGISTRY.get(name)
        if name in ORDER:
            continue
        before = current_path(f"INPUT.{transform.before}").removeprefix("INPUT.")
        if before:
            check_choice(f"{transform.__name__}.before", before, ORDER)
        order.insert(order.index(before) if before else len(order), name)
    return order
