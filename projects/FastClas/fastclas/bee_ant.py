"""Hymenoptera dataset of PyTorch's tutorial on transfer learning: ants and bees."""

from typing import Any

from fastamp.config import CfgNode
from fastamp.data.datasets.base import DATASET_REGISTRY
from fastclas.class_folder import ClassFolder


@DATASET_REGISTRY.register()
class Hymenoptera(ClassFolder):
    """Ants and bees in ``hymenoptera_data/{train,val}/{ants,bees}/*.jpg``; see ``ClassFolder``."""

    dataset_name = "hyt"
    folder = "hymenoptera_data"

    @classmethod
    def options(cls, cfg: CfgNode) -> dict[str, Any]:
        """Return no further arguments: the folder is that of the data root."""
        return {}
