"""Datasets under FastReID's names with list files, and a generated one.

``SOP`` and ``InShop`` of fastamp read the same list files if their own files are missing.
"""

from pathlib import Path
from typing import ClassVar

from fastamp.data.datasets.base import DATASET_REGISTRY, ImageItem
from fastamp.data.datasets.demo import Demo
from fastamp.data.datasets.products import CUB200, ProductDataset


@DATASET_REGISTRY.register()
class CUB(CUB200):
    """``CUB200`` under FastReID's name."""

    dataset_name = "cub"


@DATASET_REGISTRY.register()
class Cars196(ProductDataset):
    """Cars-196 dataset (Krause et al. 2013, "3D object representations for fine-grained categorization", ICCV
    Workshops) with FastReID's lists: classes 1 to 98 for training, 99 to 196 for testing."""

    dataset_name = "cars"
    folder = "Cars_196"
    needed = ("train.txt", "test.txt")
    tree = "{train,test}.txt, with lines path,label\n{path}"
    protocols: ClassVar[tuple[str, ...]] = ("recall_at_k", "recall_at_k_first_hit")

    def read(self, split: str) -> list[ImageItem]:
        """Return the images in the list of a split."""
        return self.read_list(self.lists[split])


@DATASET_REGISTRY.register()
class DemoRetri(ProductDataset):
    """Images of the dataset ``Demo`` without cameras and distractors: each test image is a query against all others.

    Args:
        root: data root, in which ``Demo`` is generated if it is missing. Default "datasets".
    """

    dataset_name = "demoretri"
    protocols: ClassVar[tuple[str, ...]] = ("recall_at_k", "recall_at_k_first_hit")

    def __init__(self, root: str | Path = "datasets") -> None:
        self._demo = Demo(root)
        super().__init__(root)

    def read(self, split: str) -> list[ImageItem]:
        """Return the images of a split of ``Demo``; ``"test"`` has query and gallery."""
        if split == "train":
            return [item._replace(pid=self._demo.identity(item.pid)) for item in self._demo.train]
        return [item for item in (*self._demo.query, *self._demo.gallery) if item.pid > 0]
