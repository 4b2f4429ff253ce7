"""CUHK03."""

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

from fastamp.config import Key
from fastamp.data.datasets.base import DATASET_REGISTRY, ImageDataset, ImageItem
from fastamp.data.datasets.cuhk03_files import classic_splits, new_split, write_images
from fastamp.data.datasets.file_utils import check_tree
from fastamp.utils import comm
from fastamp.utils.atomic_dir import remove_abandoned, temporary_path
from fastamp.utils.errors import ConfigError, DataError, WriteError
from fastamp.utils.files import write_atomically

logger = logging.getLogger(__name__)

KEYS = (
    Key("DATASETS.CUHK03.LABELED", False, "CUHK03: people cut out by hand; off takes those that a detector found."),
    Key(
        "DATASETS.CUHK03.CLASSIC",
        False,
        "CUHK03: the 20 classic splits, with 100 test identities each; off is the new protocol, 767 and 700 "
        "identities.",
    ),
    Key(
        "DATASETS.CUHK03.SPLIT", 0, "CUHK03: which of the classic splits; the new protocol has one, 0.", low=0, high=19
    ),
)


@DATASET_REGISTRY.register()
class CUHK03(ImageDataset):
    """Li et al. 2014, "DeepReID: deep filter pairing neural network for person re-identification" (CVPR).

    The authors' 20 random splits test 100 identities each, all of whose images are queries and gallery alike. The new
    protocol is that of Zhong et al. 2017, "Re-ranking person re-identification with k-reciprocal encoding" (CVPR), one
    split of 767 training and 700 test identities.

    First use takes the images out of ``cuhk-03.mat``, to ``images_detected`` or ``images_labeled``, and writes
    ``splits_{new,classic}_{detected,labeled}.json`` in FastReID's form. With these the .mat files are not needed. A
    file name is ``{campair}_{pid}_{view}_{img}.png``; view 1 is camera 0, view 2 camera 1.

    Args:
        root: data root; ``cuhk03_release/cuhk-03.mat`` and ``cuhk03_new_protocol_config_{detected,labeled}.mat`` are in
            ``root/cuhk03``.
        cuhk03_labeled: people cut out by hand, instead of those that a detector found.
        cuhk03_classic_split: the classic splits, instead of the new protocol.
        split_id: which of them; the new protocol has one, 0.

    Raises:
        ConfigError: there is no such split, or h5py is not installed.
        DataError: a file is missing or damaged, or the folder cannot be written to.
    """

    dataset_name = "cuhk03"
    folder = "cuhk03"

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
            # The folder of images is put in its place when all else is there.
            if not (self._images.is_dir() and self._splits_file.is_file()):
                self._prepare()
        splits = self._read_splits()
        if not 0 <= split_id < len(splits):
            raise ConfigError(
                f"DATASETS.CUHK03.SPLIT is {split_id}; the {self._protocol} protocol has {len(splits)} splits, "
                f"0..{len(splits) - 1}"
            )
        logger.info("CUHK03: %s images, split %d of the %s protocol", self._kind, split_id, self._protocol)
        try:
            train, query, gallery = (
                self._build_items(splits[split_id][each]) for each in ("train", "query", "gallery")
            )
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged_splits_error() from error
        super().__init__(self._add_name_prefix(train), query, gallery)

    @classmethod
    def from_config(cls, cfg: Any, root: str) -> "CUHK03":
        """Build from DATASETS.CUHK03."""
        settings = cfg.DATASETS.CUHK03
        return cls(
            root=root,
            cuhk03_labeled=settings.LABELED,
            cuhk03_classic_split=settings.CLASSIC,
            split_id=settings.SPLIT,
        )

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
            f"CUHK03: {self._splits_file.absolute()} cannot be read as splits\n"
            f"  fix: delete it and {self._images.name}, to have both written anew"
        )

    def _build_items(self, rows: list) -> list[ImageItem]:
        # FastReID's files have the whole path that the image had when they were written.
        names = [(re.split(r"[\\/]", path)[-1], pid, camid) for path, pid, camid in rows]
        return [ImageItem(str(self._images / name), int(pid), int(camid)) for name, pid, camid in names]

    def _prepare(self) -> None:
        """Write images and splits, whichever are missing.

        Raises:
            ConfigError: h5py is not installed.
            DataError: a .mat file is missing or damaged, the images are half of what they should be, or the folder
                cannot be written to.
        """
        mat, config = (
            self.dataset_dir / each for each in ("cuhk03_release/cuhk-03.mat", self._config_name(self._kind))
        )
        tree = f"{self.folder}/cuhk03_release/cuhk-03.mat\n{self.folder}/{self._config_name('{detected,labeled}')}"
        has_images = self._images.is_dir()
        needed = ([] if has_images else [mat]) + [mat if self._protocol == "classic" else config]
        check_tree("CUHK03", self._root, dict.fromkeys(needed), tree, self.folder)
        if has_images and not any(self.dataset_dir.glob(f"splits_*_{self._kind}.json")):
            raise DataError(
                f"CUHK03: {self._images.absolute()} is there, but no splits_*_{self._kind}.json beside it, so it may "
                "be half of what it should be\n  fix: delete it, to have it written anew"
            )
        remove_abandoned(self._images)
        try:
            if has_images:
                self._write_splits(self._images, mat, config)
                return
            build = temporary_path(self._images)
            try:
                build.mkdir()
                logger.info("CUHK03: taking the images out of %s, once", mat.absolute())
                write_images(mat, self._kind, build)
                self._write_splits(build, mat, config)
                self._move_into_place(build)
            finally:
                shutil.rmtree(build, ignore_errors=True)
        except (OSError, WriteError) as error:
            cause = getattr(error, "strerror", None) or error
            raise DataError(
                f"CUHK03 cannot be written to {self.dataset_dir.absolute()}: {cause}\n"
                "  fix: set FASTAMP_DATASETS to a folder that can be written to"
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
            # Another process was quicker; its images are the same.
            if not self._images.is_dir():
                raise
