"""Image transforms on uint8 tensors."""

from fastamp.data.transforms.base import TRANSFORM_REGISTRY, Augmentation, BatchTransform
from fastamp.data.transforms.build import Transforms, build_transforms
from fastamp.data.transforms.geometry import Resize

__all__ = ["TRANSFORM_REGISTRY", "Augmentation", "BatchTransform", "Resize", "Transforms", "build_transforms"]
