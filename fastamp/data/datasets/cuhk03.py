"""CUHK03 dataset."""

import json
import logging
import re
from pathlib import Path

from fastamp.config import CfgNode, Key
from fastamp.data.datasets.base import DATASET_REGISTRY, ImageDataset, ImageItem
from fastamp.data.datasets.cuhk03_files import classic_splits, new_split, write_images
from fastamp.data.datasets.file_utils import check_tree
from fastamp.utils import comm
from fastamp.utils.atomic_dir import remove_abandoned, temporary_folder
from fastamp.utils.errors import ConfigError, DataError, WriteError, summarize_error, system_cause
from fastamp.utils.files import write_atomically

logger = logging.getLogger(__name__)

KEYS = (
    Key("DATASETS.CUHK03.LABELED", False, "CUHK03: use manually labeled boxes instead of detected ones."),
    Key(
        "DATASETS.CUHK03.CLASSIC",
        False,
        "CUHK03: use the classic protocol of 20 splits with 100 test identities each, instead of the new protocol of "
        "767 training and 700 test identities.",
    ),
    Key(
        "DATASETS.CUHK03.SPLIT",
        0,
        "CUHK03: index of the split: 0..19 for the classic protocol, 0 for the new protocol.",
        low=0,
        high=19,
    ),
)


@DATASET_REGISTRY.register()
class CUHK03(ImageDataset):
    """CUHK03 dataset (Li et al. 2014, "DeepReID: deep filter pairing neural network for person re-identification",
    CVPR).

    The classic protocol has 20 random splits with 100 test identities each; all test images are used as queries and as
    gallery. The new protocol (Zhong et al. 2017, "Re-ranking person re-identification with k-reciprocal encoding",
    CVPR) has one split with 767 training and 700 test identities.

    On first use, the images are extracted from ``cuhk-03.mat`` to ``images_detected`` or ``images_labeled``, and the
    splits are written to ``splits_{new,classic}_{detected,labeled}.json`` in FastReID's format. The .mat files are not
    needed after that. File names are ``{campair}_{pid}_{view}_{img}.png``; views 1 and 2 are cameras 0 and 1.

    Args:
        root: data root; ``cuhk03_release/cuhk-03.mat`` and ``cuhk03_new_protocol_config_{detected,labeled}.mat`` are in
            ``root/cuhk03``. Default "datasets".
        cuhk03_labeled: use manually labeled boxes instead of detected ones. Default False.
        cuhk03_classic_split: use the classic protocol instead of the new one. Default False.
        split_id: index of the split: 0..19 for the classic protocol, 0 for the new protocol. Default 0.

    Raises:
        ConfigError: if the split does not exist, or h5py is not installed.
        DataError: if a file is missing or corrupt, or the folder is not writable.
    """

    dataset_name = "cuhk03"
    folder = "cuhk03"
    related_identities = False
    split_key = "DATASETS.CUHK03.SPLIT"

    def __init__(
        self,
        root: str | Path = "datasets",
        *,
        cuhk03_labeled: bool = False,
        cuhk03_classic_split: bool = False,
        split_id: int = 0,
    ) -> None:
        self._root, self.dataset_dir = Path(root), Path(root) / self.folder
        self._kind = "labeled" if cuhk03_labeled else "detected"
        self._protocol = "classic" if cuhk03_classic_split else "new"
        self._images = self.dataset_dir / f"images_{self._kind}"
        self._splits_file = self.dataset_dir / f"splits_{self._protocol}_{self._kind}.json"
        with comm.main_process_first():
            # The image folder is renamed last, so that its existence means that everything is complete.
            if not (self._images.is_dir() and self._splits_file.is_file()):
                self._prepare()
        splits = self._read_splits()
        if not 0 <= split_id < len(splits):
            raise ConfigError(
                f"DATASETS.CUHK03.SPLIT must be in 0..{len(splits) - 1} for the {self._protocol} protocol, "
                f"got {split_id}.\n"
                "  fix: set DATASETS.CUHK03.SPLIT to 0"
                + ("" if self._protocol == "classic" else ", or DATASETS.CUHK03.CLASSIC to True")
            )
        logger.info("CUHK03: %s images, split %d of the %s protocol", self._kind, split_id, self._protocol)
        try:
            train, query, gallery = (
                self._build_items(splits[split_id][split]) for split in ("train", "query", "gallery")
            )
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged_splits_error() from error
        super().__init__(self._add_name_prefix(train), query, gallery)

    @classmethod
    def from_config(cls, cfg: CfgNode, root: str) -> "CUHK03":
        """Build the dataset from the config section ``DATASETS.CUHK03``."""
        settings = cfg.DATASETS.CUHK03
        return cls(
            root=root,
            cuhk03_labeled=settings.LABELED,
            cuhk03_classic_split=settings.CLASSIC,
            split_id=settings.SPLIT,
        )

    @classmethod
    def random_split_key(cls, cfg: CfgNode) -> str:
        """Return the key of the 20 splits of the classic protocol; the new protocol has one split."""
        return cls.split_key if cfg.DATASETS.CUHK03.CLASSIC else ""

    def _read_splits(self) -> list[dict[str, list]]:
        try:
            splits = json.loads(self._splits_file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self._damaged_splits_error() from error
        if not isinstance(splits, list) or not splits:
            raise self._damaged_splits_error()
        return splits

    def _damaged_splits_error(self) -> DataError:
        return DataError(
            f"CUHK03: cannot read the splits in {self._splits_file.absolute()}\n"
            f"  fix: delete the file and the folder {self._images.name}; both will be created again"
        )

    def _build_items(self, rows: list) -> list[ImageItem]:
        # FastReID's files contain absolute paths of the machine that wrote them.
        names = [(re.split(r"[\\/]", path)[-1], pid, camid) for path, pid, camid in rows]
        return [ImageItem(str(self._images / name), int(pid), int(camid)) for name, pid, camid in names]

    def _prepare(self) -> None:
        """Write the images and the splits if they are missing.

        Raises:
            ConfigError: if h5py is not installed.
            DataError: if a .mat file is missing or corrupt, the image folder may be incomplete, or the folder is not
                writable.
        """
        mat, config = (
            self.dataset_dir / name for name in ("cuhk03_release/cuhk-03.mat", self._config_name(self._kind))
        )
        tree = f"{self.folder}/cuhk03_release/cuhk-03.mat\n{self.folder}/{self._config_name('{detected,labeled}')}"
        has_images = self._images.is_dir()
        needed = ([] if has_images else [mat]) + [mat if self._protocol == "classic" else config]
        check_tree("CUHK03", self._root, dict.fromkeys(needed), tree, self.folder)
        if has_images and not any(self.dataset_dir.glob(f"splits_*_{self._kind}.json")):
            raise DataError(
                f"CUHK03: {self._images.absolute()} may be incomplete: splits_*_{self._kind}.json not found\n"
                "  fix: delete the folder, which will be created again"
            )
        remove_abandoned(self._images)
        try:
            if has_images:
                self._write_splits(self._images, mat, config)
                return
            with temporary_folder(self._images) as build:
                logger.info("CUHK03: extracting the images from %s", mat.absolute())
                write_images(mat, self._kind, build)
                self._write_splits(build, mat, config)
                self._move_into_place(build)
        except (OSError, WriteError) as error:
            cause = system_cause(error, summarize_error(error))
            raise DataError(
                f"CUHK03: cannot write to {self.dataset_dir.absolute()}: {cause}\n"
                "  fix: set FASTAMP_DATASETS to a writable folder"
            ) from error

    @staticmethod
    def _config_name(kind: str) -> str:
        return f"cuhk03_new_protocol_config_{kind}.mat"

    def _write_splits(self, images: Path, mat: Path, config: Path) -> None:
        names = sorted(file.name for file in images.glob("*.png"))
        splits = classic_splits(mat, names) if self._protocol == "classic" else [new_split(config, names)]
        write_atomically(self._splits_file, lambda file: file.write(json.dumps(splits).encode()))

    def _move_into_place(self, build: Path) -> None:
        try:
            build.rename(self._images)
        except OSError:
            # Another process has written the same images.
            if not self._images.is_dir():
                raise
