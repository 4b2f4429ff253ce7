"""Demo of classification: the scenes of the generated pedestrians."""

import csv
from collections.abc import Sequence
from pathlib import Path

from fastamp.data.datasets.base import DATASET_REGISTRY
from fastamp.data.datasets.demo import Demo
from fastamp.demo.generate import ATTRIBUTES
from fastclas.class_folder import ClassDataset


@DATASET_REGISTRY.register()
class DemoScene(ClassDataset):
    """Images of the dataset ``Demo`` of pedestrians, whose class is the scene, e.g. a park: one for each camera.

    The people of the test images are others than those of the training images; the scenes are the same.

    Args:
        root: data root, in which ``Demo`` is generated if it is missing. Default "datasets".
        classes: see ``ClassDataset``.
    """

    dataset_name = "demoscene"

    def __init__(self, root: str | Path = "datasets", classes: Sequence[str] = ()) -> None:
        self.dataset_dir = Path(root) / Demo(root).folder
        super().__init__(classes)

    def read(self, split: str) -> list[tuple[str, str]]:
        """Return the images of a split without distractors; ``"val"`` has those of query and gallery."""
        with (self.dataset_dir / ATTRIBUTES).open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        return [
            (str(self.dataset_dir / row["path"]), row["scene"])
            for row in rows
            if row["person"] == "identity" and (row["split"] == "train") is (split == "train")
        ]
