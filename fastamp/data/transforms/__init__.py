"""Image pipelines on uint8 tensors."""

from fastamp.data.transforms.base import Augmentation, BatchTransform
from fastamp.data.transforms.build import Transforms, build_transforms
from fastamp.data.transforms.colour import ColorJitter
from fastamp.data.transforms.erasing import RandomErasing
from fastamp.data.transforms.geometry import PadAndRandomCrop, RandomHorizontalFlip, Resize
from fastamp.data.transforms.torchvision_ops import AutoAugment, RandomAffine, TorchvisionTransform

__all__ = [
    "Augmentation",
    "AutoAugment",
    "BatchTransform",
    "ColorJitter",
    "PadAndRandomCrop",
    "RandomAffine",
    "RandomErasing",
    "RandomHorizontalFlip",
    "Resize",
    "TorchvisionTransform",
    "Transforms",
    "build_transforms",
]
