"""Visible-infrared datasets: SYSU-MM01, RegDB and LLCM.

The column ``modality`` is ``visible`` or ``infrared``; the latter also for RegDB's thermal images.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from fastamp.config import CfgNode, Key
from fastamp.data.datasets.base import DATASET_REGISTRY, ImageDataset, ImageItem
from fastamp.data.datasets.file_utils import (
    check_first_image,
    check_tree,
    is_image,
    list_entries,
    read_lines,
    read_pairs,
)
from fastamp.utils.errors import DataError

KEYS = (
    Key(
        "DATASETS.REGDB.TRIAL",
        1,
        "RegDB: number of the random split, 1 to 10; results are reported as the mean over all, each with its model.",
        low=1,
        high=10,
    ),
)

VISIBLE, INFRARED = "visible", "infrared"


@DATASET_REGISTRY.register()
class SYSUMM01(ImageDataset):
    """SYSU-MM01 dataset (Wu et al. 2017, "RGB-infrared cross-modality person re-identification", ICCV).

    Cameras 1, 2, 4 and 5 are visible, 3 and 6 infrared. The training images are those of the identities in
    ``train_id.txt`` and ``val_id.txt``. Queries are all infrared images of the identities in ``test_id.txt``, the
    gallery all their visible images: the protocols ``sysu_*`` draw the gallery of each trial. ``SYSU_mm`` has only
    visible training images, as in FastReID.

    Args:
        root: data root, which contains the folder ``SYSU-MM01``. Default "datasets".

    Raises:
        DataError: if a camera folder or list is missing (raised at construction); if a list is invalid, or lists an
            identity without images (raised at first use).
    """

    dataset_name = "sysumm01"
    folder = "SYSU-MM01"
    protocols = ("sysu_all_single", "sysu_all_multi", "sysu_indoor_single", "sysu_indoor_multi")
    published_counts: ClassVar[Mapping[str, tuple[int, int]]] = {
        "train": (0, 395),
        "query": (0, 96),
        "gallery": (0, 96),
    }
    cameras: ClassVar[Mapping[int, str]] = {
        1: VISIBLE,
        2: VISIBLE,
        3: INFRARED,
        4: VISIBLE,
        5: VISIBLE,
        6: INFRARED,
    }

    def __init__(self, root: str | Path = "datasets") -> None:
        self.dataset_dir = Path(root) / self.folder
        lists = [f"exp/{name}_id.txt" for name in ("train", "val", "test")]
        needed = [self.dataset_dir / name for name in (*(f"cam{camera}" for camera in self.cameras), *lists)]
        tree = f"{self.folder}/cam{{1,2,3,4,5,6}}/{{pid}}/*.jpg\n{self.folder}/exp/{{train,val,test}}_id.txt"
        check_tree("SYSUMM01", root, needed, tree, self.folder)
        super().__init__(
            lambda: self._add_name_prefix(self._read(lists[:2], [*self.cameras.values()])),
            lambda: self._read(lists[2:], [INFRARED]),
            lambda: self._read(lists[2:], [VISIBLE]),
        )

    def camera(self, camid: int | str) -> str:
        """Return the number of the camera in its folder."""
        return str(camid + 1) if isinstance(camid, int) else super().camera(camid)

    def _read(self, lists: Sequence[str], modalities: Sequence[str]) -> list[ImageItem]:
        """Return the images of the identities in ``lists`` from the cameras of some modalities."""
        folders = {camera: self.dataset_dir / f"cam{camera}" for camera in self.cameras}
        pids: set[int] = set()
        for name in lists:
            pids |= _read_identities("SYSUMM01", self.dataset_dir / name, list(folders.values()))
        chosen = {camera: folder for camera, folder in folders.items() if self.cameras[camera] in modalities}
        return [
            ImageItem(str(file), pid, camera - 1, columns={"modality": self.cameras[camera]})
            for file, pid, camera in _list_images("SYSUMM01", chosen, pids)
        ]


@DATASET_REGISTRY.register()
class RegDB(ImageDataset):
    """RegDB dataset (Nguyen et al. 2017, "Person recognition system based on a combination of body images from visible
    light and thermal cameras", Sensors), with visible queries and a thermal gallery.

    One visible and one thermal camera. 412 identities with ten images from each; half of them are for training. The
    lines of the lists are ``path label``; the identity is the folder in the path, e.g. 285 in
    ``Visible/285/male_back_v_05528_285.bmp``.

    Args:
        root: data root, which contains the folder ``RegDB``. Default "datasets".
        trial: number of the random split, 1 to 10. Default 1.

    Raises:
        DataError: if a list or folder is missing (raised at construction); if a line is invalid, labels and folders
            contradict each other, or the first image of a list is missing (raised at first use).
    """

    dataset_name = "regdb"
    folder = "RegDB"
    protocols = ("regdb", "no_camera")
    split_key = "DATASETS.REGDB.TRIAL"
    published_counts: ClassVar[Mapping[str, tuple[int, int]]] = {
        "train": (4120, 206),
        "query": (2060, 206),
        "gallery": (2060, 206),
    }
    query_list, gallery_list = VISIBLE, "thermal"

    def __init__(self, root: str | Path = "datasets", *, trial: int = 1) -> None:
        self.dataset_dir = Path(root) / self.folder
        self.split_note = f"random split {trial} of 10 (DATASETS.REGDB.TRIAL); report the mean over all splits"
        train = [f"train_{modality}_{trial}.txt" for modality in (VISIBLE, "thermal")]
        query, gallery = (f"test_{list_name}_{trial}.txt" for list_name in (self.query_list, self.gallery_list))
        needed = ["Visible", "Thermal", *(f"idx/{name}" for name in (*train, query, gallery))]
        tree = (
            f"{self.folder}/{{Visible,Thermal}}/{{pid}}/*.bmp\n"
            f"{self.folder}/idx/{{train,test}}_{{visible,thermal}}_{{1,...,10}}.txt"
        )
        check_tree(type(self).__name__, root, [self.dataset_dir / path for path in needed], tree, self.folder)
        super().__init__(
            lambda: self._add_name_prefix(item for name in train for item in self._read(name)),
            lambda: self._read(query),
            lambda: self._read(gallery),
        )

    @classmethod
    def from_config(cls, cfg: CfgNode, root: str) -> "RegDB":
        """Build the dataset from the config section ``DATASETS.REGDB``."""
        return cls(root=root, trial=cfg.DATASETS.REGDB.TRIAL)

    def camera(self, camid: int | str) -> str:
        """Return ``visible`` or ``thermal``."""
        return (VISIBLE, "thermal")[camid] if isinstance(camid, int) else super().camera(camid)

    def _read(self, name: str) -> list[ImageItem]:
        """Return the images that ``idx/<name>`` lists."""
        camid = int("thermal" in name)
        items = _read_list(type(self).__name__, self.dataset_dir / "idx" / name, self.dataset_dir)
        columns = {"modality": (VISIBLE, INFRARED)[camid]}
        return [ImageItem(path, pid, camid, columns=columns) for path, pid in items]


@DATASET_REGISTRY.register()
class RegDBThermalToVisible(RegDB):
    """RegDB dataset with thermal queries and a visible gallery."""

    dataset_name, identities_of = "regdbthermaltovisible", "regdb"
    query_list, gallery_list = "thermal", VISIBLE


@DATASET_REGISTRY.register()
class LLCM(ImageDataset):
    """LLCM dataset (Zhang and Wang 2023, "Diverse embedding expansion network and low-light cross-modality benchmark
    for visible-infrared person re-identification", CVPR), with infrared queries and a visible gallery.

    9 cameras, each with both modalities. 713 training and 351 test identities. The lines of the training lists are
    ``path label``; the identity is the folder in the path, and the camera is in the file name, e.g. 1 in
    ``vis/0001/0001_c01_s185535_f7010_vis.jpg``. The gallery contains all visible images: the protocol ``llcm`` draws
    the gallery of each trial.

    Args:
        root: data root, which contains the folder ``LLCM``. Default "datasets".

    Raises:
        DataError: if a folder or list is missing (raised at construction); if a list is invalid, lists an identity
            without images, or its first image is missing (raised at first use).
    """

    dataset_name = "llcm"
    folder = "LLCM"
    protocols = ("llcm", "llcm_sampled_queries")
    published_counts: ClassVar[Mapping[str, tuple[int, int]]] = {
        "train": (0, 713),
        "query": (0, 351),
        "gallery": (0, 351),
    }
    query_modality, gallery_modality = INFRARED, VISIBLE

    def __init__(self, root: str | Path = "datasets") -> None:
        self.dataset_dir = Path(root) / self.folder
        lists = ("train_vis.txt", "train_nir.txt", "test_id.txt")
        needed = ["test_vis", "test_nir", *(f"idx/{name}" for name in lists)]
        tree = (
            f"{self.folder}/{{vis,nir}}/{{pid}}/*.jpg\n{self.folder}/{{test_vis,test_nir}}/cam{{1,...,9}}/{{pid}}/*.jpg\n"
            f"{self.folder}/idx/{{train_vis,train_nir,test_id}}.txt"
        )
        check_tree(type(self).__name__, root, [self.dataset_dir / path for path in needed], tree, self.folder)
        super().__init__(
            lambda: self._add_name_prefix([*self._read_training(VISIBLE), *self._read_training(INFRARED)]),
            lambda: self._read_test(self.query_modality),
            lambda: self._read_test(self.gallery_modality),
        )

    def camera(self, camid: int | str) -> str:
        """Return the number of the camera in its folder."""
        return str(camid + 1) if isinstance(camid, int) else super().camera(camid)

    def _read_training(self, modality: str) -> list[ImageItem]:
        file = self.dataset_dir / "idx" / ("train_vis.txt" if modality == VISIBLE else "train_nir.txt")
        items = []
        for path, pid in _read_list(type(self).__name__, file, self.dataset_dir):
            camera = [*Path(path).name.split("_"), "", ""][1].removeprefix("c")
            if not camera.isdecimal() or int(camera) < 1:
                raise DataError(
                    f"{type(self).__name__}: expected image names such as 0001_c01_s185535_f7010_vis.jpg (camera 1) in "
                    f"{file.absolute()}, got {Path(path).name}.\n  fix: restore this file of the dataset"
                )
            items.append(ImageItem(path, pid, int(camera) - 1, columns={"modality": modality}))
        return items

    def _read_test(self, modality: str) -> list[ImageItem]:
        folders = {
            modality: {camera: self.dataset_dir / folder / f"cam{camera}" for camera in range(1, 10)}
            for modality, folder in ((VISIBLE, "test_vis"), (INFRARED, "test_nir"))
        }
        name, every = type(self).__name__, [*folders[VISIBLE].values(), *folders[INFRARED].values()]
        pids = _read_identities(name, self.dataset_dir / "idx" / "test_id.txt", every)
        return [
            ImageItem(str(file), pid, camera - 1, columns={"modality": modality})
            for file, pid, camera in _list_images(name, folders[modality], pids)
        ]


@DATASET_REGISTRY.register()
class LLCMVisibleToInfrared(LLCM):
    """LLCM dataset with visible queries and an infrared gallery.

    The results of DEEN for this direction are those of the protocol ``llcm_sampled_queries`` on ``LLCM``: random
    infrared queries in the whole visible gallery.
    """

    dataset_name, identities_of = "llcmvisibletoinfrared", "llcm"
    query_modality, gallery_modality = VISIBLE, INFRARED


def _read_identities(name: str, file: Path, folders: Sequence[Path]) -> set[int]:
    """Read a list of identities, separated by commas, each of which must have a folder in one of ``folders``."""
    entries = [entry.strip() for line in read_lines(name, file) for entry in line.split(",") if entry.strip()]
    wrong = next((entry for entry in entries if not entry.isdecimal()), None)
    if wrong is not None:
        raise DataError(
            f"{name}: expected numbers of identities, separated by commas, in {file.absolute()}, got {wrong!r}.\n"
            "  fix: restore this file of the dataset"
        )
    pids = {int(entry) for entry in entries}
    missing = [pid for pid in sorted(pids) if not any((folder / f"{pid:04d}").is_dir() for folder in folders)]
    if missing:
        raise DataError(
            f"{name}: no images of {len(missing)} of {len(pids)} identities that {file.absolute()} lists, e.g. no "
            f"folder {missing[0]:04d} in {folders[0].absolute()} or the other camera folders.\n"
            "  fix: restore the images of the dataset"
        )
    return pids


def _list_images(name: str, folders: Mapping[int, Path], pids: set[int]) -> list[tuple[Path, int, int]]:
    """Return ``(file, identity, camera)`` of the images in ``<folder of the camera>/<4-digit identity>``.

    The images are sorted by identity, camera and file name.

    Raises:
        DataError: if there are none.
    """
    images = [
        (file, pid, camera)
        for pid in sorted(pids)
        for camera, folder in folders.items()
        if (folder / f"{pid:04d}").is_dir()
        for file in list_entries(name, folder / f"{pid:04d}")
        if is_image(file, ".jpg")
    ]
    if not images:
        shown = ", ".join(str(folder.absolute()) for folder in folders.values())
        raise DataError(
            f"{name}: no *.jpg file of the listed identities in {shown}.\n  fix: restore the images of the dataset"
        )
    return images


def _read_list(name: str, file: Path, folder: Path) -> list[tuple[str, int]]:
    """Read lines ``path label`` and return ``(path, identity)``; the identity is the folder of the image.

    Labels number the identities of a list from 0, so that those of the training and test lists are not different.

    Raises:
        DataError: if a line is invalid, the labels contradict the folders, or the first image does not exist.
    """
    entries = []
    label_of: dict[int, int] = {}
    for path, label in read_pairs(name, file):
        pid = Path(path).parent.name
        if not pid.isdecimal():
            raise DataError(
                f"{name}: expected paths such as Visible/285/male_back_v_05528_285.bmp, with the identity as the "
                f"folder, in {file.absolute()}, got {path!r}.\n  fix: restore this file of the dataset"
            )
        if label_of.setdefault(int(pid), label) != label:
            raise DataError(
                f"{name}: {file.absolute()} has several labels for the identity {pid}: {label_of[int(pid)]} and "
                f"{label}.\n  fix: restore this file of the dataset"
            )
        entries.append((str(folder / path), int(pid)))
    check_first_image(name, file, [ImageItem(path, pid, 0) for path, pid in entries[:1]])
    return entries
