"""Video datasets: each frame is an image with the column ``tracklet``; frames are in temporal order."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import numpy as np

from fastamp.config import CfgNode, Key
from fastamp.data.datasets.base import DATASET_REGISTRY, ImageDataset, ImageItem
from fastamp.data.datasets.file_utils import check_tree, list_entries, list_files, read_lines
from fastamp.utils.errors import ConfigError, DataError

KEYS = (
    Key(
        "DATASETS.MARS.QUERIES_IN_GALLERY",
        True,
        "MARS: the gallery contains all test tracklets, including the queries, as in the authors' evaluation; false "
        "removes the queries, as torchreid does.",
    ),
    Key("DATASETS.ILIDSVID.SPLIT", 0, "iLIDSVID: index of the random split, 0..9.", low=0, high=9),
    Key("DATASETS.PRID2011.SPLIT", 0, "PRID2011: index of the random split, 0..9.", low=0, high=9),
)


class Tracklet(NamedTuple):
    """Frames of one person from one camera.

    Attributes:
        pid: identity.
        camid: camera, from 0.
        name: value of the column ``tracklet``.
        frames: paths of the frames in temporal order.
        columns: further columns of the frames. Default: none.
    """

    pid: int
    camid: int
    name: str
    frames: Sequence[str]
    columns: Mapping[str, str] = MappingProxyType({})


class TrackletDataset(ImageDataset):
    """Base class of video datasets.

    Subclasses set the attributes below as class attributes, and define ``tracklets``.

    Attributes:
        folder: folder of the dataset in the data root.
        tree: expected files in ``folder``, for messages.
        needed: files and folders that must exist in ``folder``.

    Args:
        root: data root. Default "datasets".

    Raises:
        DataError: if a file or folder is missing (raised at construction), or cannot be read (raised at first use).
    """

    folder: ClassVar[str] = ""
    tree: ClassVar[str] = ""
    needed: ClassVar[Sequence[str]] = ()

    def __init__(self, root: str | Path = "datasets") -> None:
        self.dataset_dir = Path(root) / self.folder
        needed = [self.dataset_dir / path for path in self.needed]
        check_tree(type(self).__name__, root, needed, f"{self.folder}/{self.tree}", self.folder)
        super().__init__(*(partial(self._load, split) for split in ("train", "query", "gallery")))

    def tracklets(self, split: str) -> Iterable[Tracklet]:
        """Return the tracklets of a split: ``"train"``, ``"query"`` or ``"gallery"``."""
        raise NotImplementedError

    def camera(self, camid: int | str) -> str:
        """Return the camera as it is written in file or folder names, from 1."""
        return str(camid + 1) if isinstance(camid, int) else super().camera(camid)

    def _load(self, split: str) -> list[ImageItem]:
        items = []
        for pid, camid, name, frames, extra_columns in self.tracklets(split):
            columns = {"tracklet": name, **extra_columns}
            items += [ImageItem(frame, pid, camid, columns=columns) for frame in frames]
        if not items:
            raise DataError(
                f"{type(self).__name__}: no {split} tracklets in {self.dataset_dir.absolute()}.\n"
                "  fix: restore the original files of the dataset"
            )
        return self._add_name_prefix(items) if split == "train" else items

    def _damaged_error(self, file: Path, cause: object) -> DataError:
        return DataError(
            f"{type(self).__name__}: cannot read {file.absolute()} (corrupt, or not the expected file): {cause}\n"
            "  fix: restore this file of the dataset"
        )

    def _read_mat(self, file: Path, name: str) -> np.ndarray:
        """Read the integer variable ``name`` of a MATLAB file: (M, N) int64."""
        from scipy.io import loadmat

        try:
            return np.atleast_2d(loadmat(file)[name]).astype(np.int64)
        except Exception as error:  # SciPy raises many exception types
            raise self._damaged_error(file, error) from error


@DATASET_REGISTRY.register()
class MARS(TrackletDataset):
    """MARS dataset (Zheng et al. 2016, "MARS: a video benchmark for large-scale person re-identification", ECCV).

    6 cameras. 8,298 training tracklets of 625 identities; 12,180 test tracklets of 636 identities, 1,980 of which are
    queries. Test tracklets of identity -1 are junk, which is excluded; those of identity 0 are distractors in the
    gallery.

    Args:
        root: data root; ``bbox_train``, ``bbox_test`` and ``info`` are in ``root/mars``. Default "datasets".
        queries_in_gallery: if True (default), the gallery contains all test tracklets, including the queries, as in the
            authors' evaluation: a query from another camera is a match. If False, the queries are removed, as in
            torchreid, so that some queries have fewer matches or none.

    Raises:
        DataError: if a file or folder is missing (raised at construction), or cannot be read (raised at first use).
    """

    dataset_name = "mars"
    folder = "mars"
    tree = (
        "{bbox_train,bbox_test}/{pid}/*.jpg\nmars/info/{train_name,test_name}.txt\n"
        "mars/info/{tracks_train_info,tracks_test_info,query_IDX}.mat"
    )
    needed = (
        *("bbox_train", "bbox_test", "info/train_name.txt", "info/test_name.txt"),
        *("info/tracks_train_info.mat", "info/tracks_test_info.mat", "info/query_IDX.mat"),
    )

    def __init__(self, root: str | Path = "datasets", *, queries_in_gallery: bool = True) -> None:
        super().__init__(root)
        self.queries_in_gallery = queries_in_gallery

    @classmethod
    def from_config(cls, cfg: CfgNode, root: str) -> "MARS":
        """Build the dataset from the config section ``DATASETS.MARS``."""
        return cls(root=root, queries_in_gallery=cfg.DATASETS.MARS.QUERIES_IN_GALLERY)

    def tracklets(self, split: str) -> Iterator[Tracklet]:
        """Return the tracklets of a split."""
        part, info = "train" if split == "train" else "test", self.dataset_dir / "info"
        file, names = info / f"tracks_{part}_info.mat", read_lines("MARS", info / f"{part}_name.txt")
        tracks = self._read_mat(file, f"track_{part}_info")
        selected: Sequence[int] = range(len(tracks))
        if part == "test":
            queries = (self._read_mat(info / "query_IDX.mat", "query_IDX").reshape(-1) - 1).tolist()
            if not all(0 <= number < len(tracks) for number in queries):
                raise self._damaged_error(info / "query_IDX.mat", f"expected numbers in 1..{len(tracks)}")
            if split == "query":
                selected = queries
            elif not self.queries_in_gallery:
                selected = sorted(set(selected) - set(queries))
        for start, end, pid, camera in tracks[list(selected)].tolist():
            if not (1 <= start <= end <= len(names) and camera >= 1):
                raise self._damaged_error(file, f"row {start} {end} {pid} {camera} for {len(names)} images")
            if pid < 0:  # junk
                continue
            frames = sorted(names[start - 1 : end])
            # "0001C1T0002F003.jpg" is in the folder 0001; tracklets have different first frames.
            paths = [f"{self.dataset_dir}/bbox_{part}/{frame[:4]}/{frame}" for frame in frames]
            yield Tracklet(pid, camera - 1, frames[0].partition(".")[0], paths)


@DATASET_REGISTRY.register()
class DukeMTMCVideo(TrackletDataset):
    """DukeMTMC-VideoReID dataset (Wu et al. 2018, "Exploit the unknown gradually: one-shot video-based person
    re-identification by stepwise learning", CVPR), from DukeMTMC (Ristani et al. 2016, arXiv:1609.01775).

    8 cameras. 2,196 training, 702 query and 2,636 gallery tracklets; 702 training and 702 test identities, and 408
    identities that are only in the gallery.
    """

    dataset_name = "dukemtmcvideo"
    folder = "dukemtmc-vidreid"
    tree = "DukeMTMC-VideoReID/{train,query,gallery}/{pid}/{tracklet}/*.jpg"
    needed = tuple(f"DukeMTMC-VideoReID/{split}" for split in ("train", "query", "gallery"))

    def tracklets(self, split: str) -> Iterator[Tracklet]:
        """Return the tracklets of a split."""
        name = type(self).__name__
        for person in _numbered_folders(name, self.dataset_dir / "DukeMTMC-VideoReID" / split):
            for folder in (entry for entry in list_entries(name, person) if entry.is_dir()):
                files = list_files(name, folder, ".jpg")
                match = re.match(r"-?\d+_?C(\d+)_?F\d+", files[0].name)  # 0001C6F0099... or 0001_C6_F0099...
                if match is None:
                    raise DataError(
                        f"{name}: expected file names such as 0001_C6_F0099_X30823.jpg (camera 6, frame 99), got "
                        f"{files[0].absolute()}.\n  fix: restore the original files of the dataset"
                    )
                yield Tracklet(
                    int(person.name), int(match[1]) - 1, f"{person.name}_{folder.name}", list(map(str, files))
                )


class TwoCameraDataset(TrackletDataset):
    """Base class of video datasets with one tracklet of each person from each of two cameras.

    The tracklets of half of the people are for training. Those of the other half are queries, from the first camera, or
    in the gallery, from the second one.

    Attributes:
        sequences: folder of the tracklets: ``{camera}/{person}/*.png``.
        cameras: folder of each camera.

    Args:
        root: data root. Default "datasets".
        split: index of the split. Default 0.

    Raises:
        ConfigError: if the split does not exist.
        DataError: if a file or folder is missing (raised at construction), or cannot be read.
    """

    sequences: ClassVar[str] = ""
    cameras: ClassVar[tuple[str, str]] = ("", "")

    def __init__(self, root: str | Path = "datasets", *, split: int = 0) -> None:
        super().__init__(root)
        splits = self.read_splits()
        if not 0 <= split < len(splits):
            raise ConfigError(
                f"{self.split_key} must be in 0..{len(splits) - 1}, got {split}.\n  fix: set {self.split_key} to 0"
            )
        self._people = splits[split]

    @classmethod
    def from_config(cls, cfg: CfgNode, root: str) -> "TwoCameraDataset":
        """Build the dataset from the config key ``split_key``."""
        section = cls.split_key.split(".")[1]
        return cls(root=root, split=cfg.DATASETS[section].SPLIT)

    def read_splits(self) -> list[dict[str, list[str]]]:
        """Return the splits: ``"train"`` and ``"test"`` -> names of the people's folders."""
        raise NotImplementedError

    def camera(self, camid: int | str) -> str:
        """Return the name of a camera's folder."""
        return self.cameras[camid] if isinstance(camid, int) else super().camera(camid)

    def tracklets(self, split: str) -> Iterator[Tracklet]:
        """Return the tracklets of a split."""
        used = {"train": (0, 1), "query": (0,), "gallery": (1,)}[split]
        for person in self._people["train" if split == "train" else "test"]:
            number = re.fullmatch(r"person_?(\d+)", person)
            if number is None:
                raise self._damaged_error(self.dataset_dir, f"expected names such as person_0001, got {person!r}")
            for camid in used:
                folder = self.dataset_dir / self.sequences / self.cameras[camid] / person
                files = list_files(type(self).__name__, folder, ".png")
                yield Tracklet(int(number[1]), camid, f"{person}_{self.cameras[camid]}", list(map(str, files)))


@DATASET_REGISTRY.register()
class iLIDSVID(TwoCameraDataset):
    """iLIDS-VID dataset (Wang et al. 2014, "Person re-identification by video ranking", ECCV) with its ten splits.

    300 identities, one tracklet of each from two cameras; 150 are for testing. The protocol averages the results of the
    ten splits (``DATASETS.ILIDSVID.SPLIT``).
    """

    dataset_name = "ilidsvid"
    folder = "ilids-vid"
    tree = (
        "i-LIDS-VID/sequences/{cam1,cam2}/person{pid}/*.png\n"
        "ilids-vid/train-test people splits/train_test_splits_ilidsvid.mat"
    )
    sequences, cameras = "i-LIDS-VID/sequences", ("cam1", "cam2")
    needed = (
        *("i-LIDS-VID/sequences/cam1", "i-LIDS-VID/sequences/cam2"),
        "train-test people splits/train_test_splits_ilidsvid.mat",
    )
    split_key = "DATASETS.ILIDSVID.SPLIT"

    def read_splits(self) -> list[dict[str, list[str]]]:
        """Return the splits; the first half of each row lists the test people, as numbers in the sorted folders."""
        file = self.dataset_dir / self.needed[-1]
        rows = self._read_mat(file, "ls_set")
        both = [
            {entry.name for entry in list_entries("iLIDSVID", self.dataset_dir / self.sequences / camera)}
            for camera in self.cameras
        ]
        people, half = sorted(both[0] & both[1]), rows.shape[1] // 2
        if rows.min() < 1 or rows.max() > len(people):
            raise self._damaged_error(file, f"people {rows.min()} to {rows.max()}, but {len(people)} have two folders")
        return [
            {"train": [people[n - 1] for n in sorted(row[half:])], "test": [people[n - 1] for n in sorted(row[:half])]}
            for row in rows.tolist()
        ]


@DATASET_REGISTRY.register()
class PRID2011(TwoCameraDataset):
    """PRID 2011 dataset (Hirzer et al. 2011, "Person re-identification by descriptive and discriminative
    classification", SCIA), multi-shot, with the ten splits of ``splits_prid2011.json``.

    178 identities with a tracklet of more than 21 frames from both cameras; 89 are for testing. The protocol averages
    the results of the ten splits (``DATASETS.PRID2011.SPLIT``).
    """

    dataset_name = "prid2011"
    folder = "prid2011"
    tree = "prid_2011/multi_shot/{cam_a,cam_b}/person_{pid}/*.png\nprid2011/splits_prid2011.json"
    sequences, cameras = "prid_2011/multi_shot", ("cam_a", "cam_b")
    needed = ("prid_2011/multi_shot/cam_a", "prid_2011/multi_shot/cam_b", "splits_prid2011.json")
    split_key = "DATASETS.PRID2011.SPLIT"

    def read_splits(self) -> list[dict[str, list[str]]]:
        """Return the splits of the JSON file."""
        file = self.dataset_dir / self.needed[-1]
        try:
            splits = json.loads(file.read_text(encoding="utf-8"))
            return [{part: [str(person) for person in split[part]] for part in ("train", "test")} for split in splits]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._damaged_error(file, error) from error


@DATASET_REGISTRY.register()
class CCVID(TrackletDataset):
    """CCVID dataset (Gu et al. 2022, "Clothes-changing person re-identification with RGB modality only", CVPR,
    arXiv:2204.06890), with the column ``clothes``.

    948 training, 834 query and 1,074 gallery tracklets; 75 training and 151 test identities. Each line of the lists is
    ``session1/001_01 001 u0_l0_s0_c0_a0``: folder of the frames, identity and clothes. The number after the identity in
    the folder's name is the camera; as in the authors' program, 12 is added to it in ``session3``.
    """

    dataset_name = "ccvid"
    folder = "CCVID"
    tree = "{train,query,gallery}.txt\nCCVID/{session}/{pid}_{camera}/*.jpg"
    needed = ("train.txt", "query.txt", "gallery.txt")
    protocols = ("market1501", "cloth_changing", "same_clothes")
    published_counts: ClassVar[Mapping[str, tuple[int, int]]] = {
        "train": (118613, 75),
        "query": (116799, 0),
        "gallery": (112421, 0),
    }

    def tracklets(self, split: str) -> Iterator[Tracklet]:
        """Return the tracklets of a split."""
        file = self.dataset_dir / f"{split}.txt"
        for line in read_lines("CCVID", file):
            match = re.fullmatch(r"(?P<folder>(?P<session>[^/\s]+)/\d+_(?P<camera>\d+))\s+(?P<pid>\d+)\s+(\S+)", line)
            if match is None:
                raise DataError(
                    f"CCVID: expected lines such as session1/001_01 001 u0_l0_s0_c0_a0 (folder, identity, clothes) in "
                    f"{file.absolute()}, got {line!r}.\n  fix: restore this file of the dataset"
                )
            frames = list(map(str, list_files("CCVID", self.dataset_dir / match["folder"], ".jpg")))
            camid = int(match["camera"]) - 1 + (12 if match["session"] == "session3" else 0)
            yield Tracklet(int(match["pid"]), camid, match["folder"], frames, {"clothes": f"{match['pid']}_{match[5]}"})


def _numbered_folders(name: str, folder: Path) -> list[Path]:
    """Return the sorted subfolders whose name is a number."""
    return [entry for entry in list_entries(name, folder) if entry.is_dir() and re.fullmatch(r"-?\d+", entry.name)]
