"""Read the .mat files of CUHK03: images and splits."""

import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fastamp.utils.errors import ConfigError, DataError
from fastamp.utils.plural import plural
from fastamp.utils.progress import track

logger = logging.getLogger(__name__)

_IMAGES_PER_VIEW = 5
Split = dict[str, list[tuple[str, int, int]]]


def write_images(mat_file: Path, kind: str, folder: Path) -> None:
    """Extract the images in ``cuhk-03.mat`` to files ``{campair}_{pid}_{view}_{img}.png``; all numbers start at 1.

    Args:
        mat_file: HDF5 file. The entry ``detected`` or ``labeled`` contains five camera pairs. Each pair is a (people,
            10) cell array: columns 0 to 4 are from one camera, columns 5 to 9 from the other camera. A cell is a (H, W,
            3) uint8 image or empty.
        kind: entry to extract: ``detected`` or ``labeled``.
        folder: folder to write to.

    Raises:
        ConfigError: if h5py is not installed.
        DataError: if the file is corrupt.
        OSError: if an image cannot be written.
    """
    with _open_mat(mat_file) as mat:
        with _data_errors(mat_file):
            # HDF5 stores MATLAB's arrays transposed.
            pairs = [mat[reference][()].T for reference in mat[kind][()].ravel()]
        persons = [
            (pair, person, cells)
            for pair, people in enumerate(pairs, start=1)
            for person, cells in enumerate(people, start=1)
        ]
        for done, (pair, person, cells) in enumerate(track(persons, len(persons), f"CUHK03 {kind}"), start=1):
            for number, reference in enumerate(cells):
                with _data_errors(mat_file):
                    pixels = mat[reference][()].T if reference else np.empty(0)
                    image = Image.fromarray(np.ascontiguousarray(pixels)) if pixels.ndim == 3 else None
                if image is not None:
                    view = 1 + number // _IMAGES_PER_VIEW
                    image.save(folder / f"{pair}_{person:03d}_{view}_{number + 1:02d}.png")
            if done in (len(persons) // 2, len(persons)):
                logger.info("CUHK03 %s: extracted the images of %d of %d people", kind, done, len(persons))


def classic_splits(mat_file: Path, names: Sequence[str]) -> list[Split]:
    """Read the 20 random splits in ``cuhk-03.mat``.

    The file lists the test identities of each split; all other identities are used for training.

    Args:
        mat_file: HDF5 file. ``testsets`` contains, for each split, an array of the (camera pair, person) of the test
            identities; both are numbered from 1.
        names: file names of all images.

    Returns:
        For each split, the (name, identity, camera) of each image. Identities are numbered from 1, cameras from 0. The
        query and gallery images are the same.

    Raises:
        ConfigError: if h5py is not installed.
        DataError: if the file is corrupt.
    """
    with _open_mat(mat_file) as mat, _data_errors(mat_file):
        test_sets = [{tuple(map(int, row)) for row in mat[key][()].T} for key in mat["testsets"][()].ravel()]
    images: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name in names:
        pair, person, *_ = _parse_name(name)
        images[pair, person].append(name)
    splits = []
    for test_people in test_sets:
        train = _number_people([images[image] for image in sorted(images) if image not in test_people])
        test = _number_people([images[image] for image in sorted(images) if image in test_people])
        splits.append({"train": train, "query": test, "gallery": test})
    return splits


def new_split(config_file: Path, names: Sequence[str]) -> Split:
    """Read the split in ``cuhk03_new_protocol_config_{detected,labeled}.mat``.

    Args:
        config_file: MATLAB 5 file. ``filelist`` contains the file names, ``labels`` the identities. ``train_idx``,
            ``query_idx`` and ``gallery_idx`` contain indices into ``filelist``, starting at 1.
        names: file names of all extracted images.

    Returns:
        (name, identity, camera) of each image. Cameras are numbered from 0.

    Raises:
        DataError: if the file is corrupt, or lists an image that does not exist.
    """
    from scipy.io import loadmat

    with _data_errors(config_file):
        config = loadmat(config_file, squeeze_me=True)
        files, labels = (np.atleast_1d(config[key]) for key in ("filelist", "labels"))
        chosen = {
            split: np.atleast_1d(config[f"{split}_idx"]).astype(int) - 1 for split in ("train", "query", "gallery")
        }
        split = {
            split: [(str(files[i]), int(labels[i]), _parse_name(str(files[i]))[2] - 1) for i in indices]
            for split, indices in chosen.items()
        }
    missing = {name for items in split.values() for name, _, _ in items} - set(names)
    if missing:
        raise DataError(
            f"CUHK03: {config_file.absolute()} lists {plural(len(missing), 'image that is', 'images that are')} not in "
            f"cuhk-03.mat, e.g. {min(missing)}\n  fix: download both files again"
        )
    return split


def _number_people(people: Sequence[Sequence[str]]) -> list[tuple[str, int, int]]:
    """Number the people from 1 and return the (name, identity, camera) of each image."""
    return [(name, pid, _parse_name(name)[2] - 1) for pid, names in enumerate(people, start=1) for name in names]


def _parse_name(name: str) -> tuple[int, ...]:
    """Parse a file name to ``(camera pair, person, view, image number)``."""
    match = re.fullmatch(r"(\d+)_(\d+)_(\d+)_(\d+)\.png", name)
    if match is None:
        raise DataError(
            f"CUHK03: expected file names such as 1_001_1_01.png, got {name}.\n"
            "  fix: restore the original files of the dataset"
        )
    return tuple(map(int, match.groups()))


@contextmanager
def _open_mat(mat_file: Path) -> Iterator[Any]:
    """Return a context manager that opens a MATLAB 7.3 file, which is in HDF5 format."""
    try:
        import h5py
    except ImportError as error:
        raise ConfigError(
            f"CUHK03: reading {mat_file.absolute()} requires h5py, which is not installed\n  fix: pip install h5py"
        ) from error
    with _data_errors(mat_file):
        file = h5py.File(mat_file)
    with file:
        yield file


@contextmanager
def _data_errors(file: Path) -> Iterator[None]:
    """Convert errors raised while reading ``file`` to DataError."""
    try:
        yield
    except Exception as error:  # readers of .mat files raise many exception types
        raise DataError(
            f"CUHK03: cannot read {file.absolute()} (corrupt, or not the expected file): {error}\n"
            "  fix: download the file again"
        ) from error
