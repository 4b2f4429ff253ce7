"""Hymenoptera dataset of PyTorch's tutorial on transfer learning: ants and bees."""

from fastamp.data.datasets.base import DATASET_REGISTRY
from fastclas.class_folder import ClassFolder


@DATASET_REGISTRY.register()
class Hymenoptera(ClassFolder):
    """Ants and bees in ``hymenoptera_data/{train,val}/{ants,bees}/*.jpg``; see ``ClassFolder``."""

    dataset_name = "hyt"
    folder = "hymenoptera_data"
