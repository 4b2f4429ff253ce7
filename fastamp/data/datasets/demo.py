"""Generated demo dataset."""

import logging
from pathlib import Path

from fastamp.data.datasets.base import DATASET_REGISTRY
from fastamp.data.datasets.filename_dataset import MarketStyleDataset
from fastamp.demo import DEMO_VERSION, generate_demo, is_complete
from fastamp.demo.generate import ensure_dataset
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
        ensure_dataset(Path(root) / self.folder, "demo dataset", is_complete, self._generate)
        super().__init__(root)

    @staticmethod
    def _generate(folder: Path) -> None:
        bar: ProgressBar | None = None

        def show(done: int, total: int) -> None:
            nonlocal bar
            bar = bar or ProgressBar(total, "demo images")
            bar.update(done)
            if done == total // 2 or done == total:
                logger.info("demo dataset: wrote %d of %d images", done, total)

        try:
            generate_demo(folder, progress=show)
        finally:
            if bar is not None:
                bar.close()
