"""Generated demo dataset."""

import logging
from pathlib import Path

from fastamp.data.datasets.base import DATASET_REGISTRY
from fastamp.data.datasets.filename_dataset import MarketStyleDataset
from fastamp.demo import DEMO_VERSION, generate_demo, is_complete
from fastamp.utils import comm
from fastamp.utils.atomic_dir import remove_abandoned
from fastamp.utils.errors import DataError
from fastamp.utils.progress import ProgressBar

logger = logging.getLogger(__name__)


@DATASET_REGISTRY.register()
class Demo(MarketStyleDataset):
    """Small dataset of generated pedestrian images in the layout of Market-1501, written when the class is first used.

    Args:
        root: data root; the images are in ``root/fastamp-demo-v<version>``. Default "datasets".

    Raises:
        DataError: if the folder is not writable, or contains other files.
    """

    dataset_name = "demo"
    folder = f"fastamp-demo-v{DEMO_VERSION}"

    def __init__(self, root: str | Path = "datasets") -> None:
        folder = Path(root) / self.folder
        with comm.main_process_first():
            remove_abandoned(folder)
            if not is_complete(folder):
                self._generate(folder)
        super().__init__(root)

    @staticmethod
    def _generate(folder: Path) -> None:
        logger.info("generating the demo dataset in %s", folder.absolute())
        bar: ProgressBar | None = None

        def show(done: int, total: int) -> None:
            nonlocal bar
            bar = bar or ProgressBar(total, "demo images")
            bar.update(done)
            if done == total // 2 or done == total:
                logger.info("demo dataset: wrote %d of %d images", done, total)

        try:
            generate_demo(folder, progress=show)
        except OSError as error:
            raise DataError(
                f"cannot write the demo dataset to {folder.absolute()}: {error.strerror or error}\n"
                f"  fix: set FASTAMP_DATASETS to a writable folder"
            ) from error
        finally:
            if bar is not None:
                bar.close()
