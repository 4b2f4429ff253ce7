"""Generated photographs of animals."""

import logging
from pathlib import Path

from fastamp.data.datasets.base import DATASET_REGISTRY
from fastamp.data.datasets.custom import CsvDataset
from fastamp.demo.animals import ANIMALS_TABLE, ANIMALS_VERSION, animals_are_complete, generate_animals
from fastamp.utils import comm
from fastamp.utils.errors import DataError

logger = logging.getLogger(__name__)

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
        from fastamp.data.split_table import SplitOptions, split_table  # imports the datasets

        folder = Path(root) / f"fastamp-demo-animals-v{ANIMALS_VERSION}"
        with comm.main_process_first():
            try:
                if not animals_are_complete(folder):
                    logger.info("generating the demo dataset of animals in %s", folder.absolute())
                    generate_animals(folder)
                if not (folder / _SPLIT).exists():
                    options = SplitOptions("encounter", identity=_IDENTITY, train=0.5, unknown=0.2, validation=0.25)
                    split_table(folder / ANIMALS_TABLE, folder / _SPLIT, options)
            except OSError as error:
                raise DataError(
                    f"cannot write the demo dataset to {folder.absolute()}: {error.strerror or error}\n"
                    "  fix: set FASTAMP_DATASETS to a writable folder"
                ) from error
        super().__init__(folder / _SPLIT, identity=_IDENTITY, name="demoanimals")

    @classmethod
    def from_config(cls, cfg: object, root: str | Path, **unused: object) -> "DemoAnimals":
        """Build the dataset in the data root."""
        return cls(root)
