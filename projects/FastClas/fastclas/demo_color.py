"""Demo of classification: the color of the upper garment of the generated pedestrians."""

import csv
from collections.abc import Sequence
from pathlib import Path

from fastamp.data.datasets.base import DATASET_REGISTRY
from fastamp.data.datasets.demo import Demo
from fastamp.demo.generate import ATTRIBUTES
from fastclas.class_folder import ClassDataset


@DATASET_REGISTRY.register()
class DemoColor(ClassDataset):
    """Images of the dataset ``Demo`` of pedestrians, whose class is the color of the upper garment.

    The people of the test images are others than those of the training images.

    Args:
        root (str or Path): data root, in which ``Demo`` is generated if it is missing. Default "datasets".
        classes: see ``ClassDataset``.
    """

    dataset_name = "democolor"

    def __init__(self, root: str | Path = "datasets", classes: Sequence[str] = ()) -> None:
        self.dataset_dir = Path(root) / Demo(root).folder
        super().__init__(classes)

    def read(self, split: str) -> list[tuple[str, str]]:
        """Return the images of pedestrians of a split; ``"val"`` has those of query and gallery."""
        with (self.dataset_dir / ATTRIBUTES).open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        return [
            (str(self.dataset_dir / row["path"]), row["upper_color"])
            for row in rows
            if row["upper_color"] and (row["split"] == "train") is (split == "train")
        ]
