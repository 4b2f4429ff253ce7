"""Generated pedestrians with their attributes."""

from pathlib import Path

from fastamp.data.datasets import DATASET_REGISTRY, Demo
from fastamp.data.datasets.custom import CsvDataset


@DATASET_REGISTRY.register()
class DemoAttributes(CsvDataset):
    """The dataset ``Demo`` with the columns of its table of attributes, e.g. ``upper_color`` and ``bag``.

    Args:
        root: data root. Default "datasets".

    Raises:
        DataError: if the folder of ``Demo`` cannot be written.
    """

    def __init__(self, root: str | Path = "datasets") -> None:
        Demo(root)
        super().__init__(Path(root) / Demo.folder / "attributes.csv", name="demoattributes")

    @classmethod
    def from_config(cls, cfg: object, root: str | Path, **unused: object) -> "DemoAttributes":
        """Build the dataset in the data root."""
        return cls(root)
