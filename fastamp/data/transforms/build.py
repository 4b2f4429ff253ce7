"""Build the image transforms from INPUT."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastamp.config import CfgNode, crop_size
from fastamp.data.decode import DecodingOptions, image_from_pil, read_image
from fastamp.data.image_decoder import image_decoder
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
"""Config sections in INPUT, in the order in which their transforms are applied."""

_NO_AUGMENTATION = Augmentation(transforms=(), seed=0)


class Transforms(NamedTuple):
    """Steps from an image file to an augmented batch: reading, resizing, stacking and random transforms.

    Attributes:
        channels: number of channels of the images: 1, 3 or 4.
        max_pixels: maximum width x height of an image file; larger images are rejected.
        bit_depth: see ``read_image``.
        resize: resizes one image.
        size_key: config key that sets the image size, named in error messages.
        augment_each: transforms applied to each image before batching: if resized images have different sizes, all
            transforms up to the first that returns images of a fixed size. Default: none.
        augment: all other transforms, applied to each batch. Default: none.
        decoder: see ``image_decoder``. Default ``"auto"``.
        reduced: see ``read_image``. Default False.
    """

    channels: int
    max_pixels: int
    bit_depth: int
    resize: Resize
    size_key: str
    augment_each: Augmentation = _NO_AUGMENTATION
    augment: Augmentation = _NO_AUGMENTATION
    decoder: str = "auto"
    reduced: bool = False

    @property
    def decoding(self) -> DecodingOptions:
        """Keyword arguments for ``read_image`` and ``decode_image``."""
        return {
            "max_pixels": self.max_pixels,
            "bit_depth": self.bit_depth,
            "decoder": self.decoder,
            "reduced": self.reduced,
        }

    @property
    def least_size(self) -> tuple[int, int] | None:
        """Argument ``least_size`` of ``read_image`` and ``decode_image`` for images that are resized as a whole."""
        return self.resize.least_size(reduced=self.reduced)

    def read(self, path: str, *, box: tuple[int, int, int, int] | None = None) -> Tensor:
        """Read an image, or only the region ``box``, and resize it; see ``read_image``.

        Returns:
            (C, H, W) uint8.

        Raises:
            DataError: if the image cannot be read.
        """
        return self.resize(self.read_original(path, box=box))

    def read_original(self, path: str, *, box: tuple[int, int, int, int] | None = None) -> Tensor:
        """Read an image as ``read`` does, but do not resize it."""
        return read_image(path, self.channels, box=box, least_size=self.least_size, **self.decoding)

    def __call__(self, image: Any) -> Tensor:
        """Resize and augment one decoded image, with random numbers from PyTorch's global generator.

        The loaders do not call this method: they augment whole batches with random numbers that depend only on the
        seed, the epoch and the position.

        Args:
            image: PIL image, array (H, W, C) or tensor (C, H, W), uint8.

        Returns:
            (C, H, W) float32 in 0..255.
        """
        if isinstance(image, np.ndarray):
            image = torch.from_numpy(image).permute(2, 0, 1)
        elif not isinstance(image, Tensor):
            image = image_from_pil(image, self.channels, bit_depth=self.bit_depth)
        batch = self.resize(image)[None]
        epoch, position = torch.randint(2**31, (2,)).tolist()
        for augment in (self.augment_each, self.augment):
            batch = augment.apply(batch, augment.draw([epoch], [position], (batch.shape[-2], batch.shape[-1])))
        return batch[0].float()

    def stack(self, images: Sequence[Tensor]) -> Tensor:
        """Stack resized images into a batch.

        Args:
            images: B images, each (C, H, W) uint8.

        Returns:
            (B, C, H, W) uint8.

        Raises:
            DataError: if the images have different sizes.
        """
        sizes = list(dict.fromkeys(tuple(image.shape[-2:]) for image in images))
        if len(sizes) > 1:
            raise DataError(
                f"images in a batch have different sizes: {sizes[0]} and {sizes[1]} (height, width), because "
                f"{self.size_key} {self.resize.size} keeps the aspect ratio.\n"
                f"  fix: set {self.size_key} to (height, width), INPUT.CROP.ENABLED to True, or "
                + ("TEST.IMS_PER_BATCH to 1" if self.size_key == "INPUT.SIZE_TEST" else "INPUT.PADDING.ENABLED to True")
            )
        return torch.stack(list(images))


def build_transforms(cfg: CfgNode, is_train: bool = True) -> Transforms:
    """Build the training or test transforms.

    For training, images are resized, and the enabled transforms are applied in the order of ``ORDER``. This is
    FastReID's order, except that AutoAugment follows resizing. For testing, images are resized and center-cropped.

    Args:
        cfg: config, of which the section INPUT and the key SEED are used.
        is_train: if True, build the training transforms, otherwise the test transforms. Default True.

    Raises:
        ConfigError: if the settings of a transform are inconsistent or conflict with INPUT.CHANNELS or the image size,
            or INPUT.DECODER is not installed.
    """
    settings = cfg.INPUT
    augment: dict[str, Augmentation] = {}
    if is_train:
        resize = Resize(size=tuple(settings.SIZE_TRAIN), interpolation=settings.INTERPOLATION)
        transforms, size, first = _train_augmentations(cfg), resize.output_size, 0
        for number, transform in enumerate(transforms, start=1):
            if size is not None:
                transform.check_size(size)
                size = transform.output_size(size)
            elif transform.size is not None:
                size, first = transform.size, number
        parts = {"augment_each": transforms[:first], "augment": transforms[first:]}
        augment = {name: Augmentation(transforms=part, seed=cfg.SEED) for name, part in parts.items()}
    else:
        interpolation = settings.INTERPOLATION_TEST
        if interpolation == "same":
            interpolation = settings.INTERPOLATION
        resize = Resize(size=tuple(settings.SIZE_TEST), crop=crop_size(cfg), interpolation=interpolation)
        if resize.crop and any(
            0 < side < crop for side, crop in zip(_least_size(resize.size), resize.crop, strict=True)
        ):
            logger.warning(
                "INPUT.CROP.SIZE %s is larger than INPUT.SIZE_TEST %s: test images are padded with black\n"
                "  fix: set INPUT.SIZE_TEST to at least INPUT.CROP.SIZE",
                resize.crop,
                resize.size,
            )
    return Transforms(
        channels=settings.CHANNELS,
        max_pixels=settings.MAX_PIXELS,
        bit_depth=settings.BIT_DEPTH,
        resize=resize,
        size_key="INPUT.SIZE_TRAIN" if is_train else "INPUT.SIZE_TEST",
        **augment,
        decoder=image_decoder(settings.DECODER).name,
        reduced=settings.DECODE_REDUCED,
    )


def _least_size(size: tuple[int, ...]) -> tuple[int, ...]:
    """Return the minimum (height, width) of images after resizing to ``size``; (0, 0) if they are not resized."""
    return size if len(size) == 2 else size * 2


def _train_augmentations(cfg: CfgNode) -> list[BatchTransform]:
    """Build the enabled transforms in their order of application.

    Raises:
        ConfigError: if the section of a registered transform has no key ``ENABLED``.
    """
    transforms = []
    for name in transform_order():
        section = cfg.INPUT.get(name)
        if not isinstance(section, Mapping) or "ENABLED" not in section:
            raise ConfigError(
                f"missing config key INPUT.{name}.ENABLED of the transform {name!r} "
                f"({TRANSFORM_REGISTRY.get(name).__name__}).\n  fix: add this key to KEYS in the file that registers "
                f'the transform: Key("INPUT.{name}.ENABLED", False, "...")'
            )
        if section["ENABLED"]:
            transforms.append(TRANSFORM_REGISTRY.build(name, cfg))
    return transforms


def transform_order() -> list[str]:
    """Return the names in ``ORDER`` and the names of custom transforms, in the order in which transforms are applied.

    A custom transform is applied before the transform named in its attribute ``before``, or last if that is empty.

    Raises:
        ConfigError: if the attribute ``before`` of a custom transform is not in ``ORDER``.
    """
    order = [*ORDER]
    for name in TRANSFORM_REGISTRY:
        transform = TRANSFORM_REGISTRY.get(name)
        if name in ORDER:
            continue
        before = transform.before
        if before:
            check_choice(f"{transform.__name__}.before", before, ORDER)
        order.insert(order.index(before) if before else len(order), name)
    return order
