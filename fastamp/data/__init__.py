"""Datasets, samplers, transforms and data loaders."""

from fastamp.data.build import build_reid_test_loader, build_reid_train_loader
from fastamp.data.datasets import DATASET_REGISTRY, ImageDataset, ImageItem, data_root
from fastamp.data.group_sampler import GroupIdentitySampler
from fastamp.data.samplers import SAMPLER_REGISTRY
from fastamp.data.transforms import build_transforms

__all__ = [
    "DATASET_REGISTRY",
    "SAMPLER_REGISTRY",
    "GroupIdentitySampler",
    "ImageDataset",
    "ImageItem",
    "build_reid_test_loader",
    "build_reid_train_loader",
    "build_transforms",
    "data_root",
]
