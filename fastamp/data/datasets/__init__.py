"""Data sets by name; importing this registers them."""

from fastamp.data.datasets.base import DATASET_REGISTRY, ImageDataset, ImageItem, data_root
from fastamp.data.datasets.demo import Demo
from fastamp.data.datasets.market1501 import Market1501

__all__ = ["DATASET_REGISTRY", "Demo", "ImageDataset", "ImageItem", "Market1501", "data_root"]
