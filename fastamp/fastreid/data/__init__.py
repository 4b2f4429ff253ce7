"""FastReID's datasets and loaders."""

from fastamp.fastreid.data import transforms
from fastamp.fastreid.data.build import build_reid_test_loader, build_reid_train_loader
from fastamp.fastreid.data.common import CommDataset
from fastamp.fastreid.data.datasets.registered import DATASET_REGISTRY

__all__ = ["DATASET_REGISTRY", "CommDataset", "build_reid_test_loader", "build_reid_train_loader", "transforms"]
