"""Generated photographs of animals."""

from pathlib import Path

from fastamp.data.datasets.base import DATASET_REGISTRY
from fastamp.data.datasets.custom import CsvDataset
from fastamp.demo.animals import ANIMALS_TABLE, ANIMALS_VERSION, animals_are_complete, generate_animals
from fastamp.demo.generate import ensure_dataset

_SPLIT = "split.csv"
_IDENTITY = ("pid", "side")


@DATASET_REGISTRY.register()
class DemoAnimals(CsvDataset):
    """Generated photographs of three species, split by encounter as an open set, written when the class is first used.

    The columns are ``species``, ``side``, ``date``, ``encounter`` and ``validation``. Each flank of an animal is an
    identity. A fifth of the images are of identities that are not in the database, and a quarter of the others is for
    validation; see ``fastamp split --by encounter --identity pid,side --unknown 0.2 --validation 0.25``.

    Args:
        root: data root; the images are in ``root/fastamp-demo-animals-v<version>``. Default "datasets".

    Raises:
        DataError: if the folder is not writable, or contains other files.
    """

    def __init__(self, root: str | Path = "datasets") -> None:
        folder = Path(root) / f"fastamp-demo-animals-v{ANIMALS_VERSION}"
        ensure_dataset(folder, "demo dataset of animals", _is_complete, _generate)
        super().__init__(folder / _SPLIT, identity=_IDENTITY, name="demoanimals")

    @classmethod
    def from_config(cls, cfg: object, root: str | Path, **unused: object) -> "DemoAnimals":
        """Build the dataset in the data root."""
        return cls(root)


def _is_complete(folder: Path) -> bool:
    return animals_are_complete(folder) and (folder / _SPLIT).exists()


def _generate(folder: Path) -> None:
    from fastamp.data.split_table import SplitOptions, split_table  # imports the datasets

    generate_animals(folder)
    if not (folder / _SPLIT).exists():
        options = SplitOptions("encounter", identity=_IDENTITY, train=0.5, unknown=0.2, validation=0.25)
        split_table(folder / ANIMALS_TABLE, folder / _SPLIT, options)
