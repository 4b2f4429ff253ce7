"""Image transforms on uint8 tensors."""

from fastamp.data.transforms.base import TRANSFORM_REGISTRY, Augmentation, BatchTransform, on_device
from fastamp.data.transforms.build import Transforms, build_transforms
from fastamp.data.transforms.color import ColorJitter, GaussianBlur, RandomGrayscale
from fastamp.data.transforms.erasing import LocalGrayscale, RandomErasing, RandomPatch
from fastamp.data.transforms.geometry import PadAndRandomCrop, RandomHorizontalFlip, RandomResizedCrop, Resize
from fastamp.data.transforms.torchvision_ops import (
    AugMix,
    AutoAugment,
    RandAugment,
    RandomAffine,
    TorchvisionTransform,
)

__all__ = [
    "TRANSFORM_REGISTRY",
    "AugMix",
    "Augmentation",
    "AutoAugment",
    "BatchTransform",
    "ColorJitter",
    "GaussianBlur",
    "LocalGrayscale",
    "PadAndRandomCrop",
    "RandAugment",
    "RandomAffine",
    "RandomErasing",
    "RandomGrayscale",
    "RandomHorizontalFlip",
    "RandomPatch",
    "RandomResizedCrop",
    "Resize",
    "TorchvisionTransform",
    "Transforms",
    "build_transforms",
    "on_device",
]
