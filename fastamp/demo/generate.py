"""Generate the demo dataset: pedestrians in the layout of Market-1501, written on first use.

The dataset is built in a hidden folder next to its final path and renamed after its manifest is written, so that an
existing folder is complete even if processes are killed or run concurrently.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastamp.demo.attributes import ImageAttributes, describe_person, describe_picture, write_csv
from fastamp.demo.camera import make_camera
from fastamp.demo.picture import compose, draw_picture
from fastamp.demo.wardrobe import Appearance, draw_appearance, draw_lookalike, draw_people
from fastamp.utils import comm
from fastamp.utils.atomic_dir import remove_abandoned, temporary_folder, temporary_path
from fastamp.utils.errors import DataError, system_cause

logger = logging.getLogger(__name__)

# Part of the default folder name: increment it with every change of the images.
DEMO_VERSION = "1"
MANIFEST = "demo.json"
ATTRIBUTES = "attributes.csv"
SPLITS = ("bounding_box_train", "query", "bounding_box_test")

_QUERIES_PER_IDENTITY = 2
_LOOKALIKES = 2
_LOOKALIKE_FRACTION = 0.34
# First entry of each random stream's key after the seed; 0 and 1 are used by the cameras.
_TRAIN, _TEST, _DISTRACTOR, _JUNK = 10, 11, 12, 13


@dataclass(frozen=True)
class _Shot:
    """Image to draw: path, person, and key of the random stream."""

    path: str
    pid: int
    key: tuple[int, ...]
    person: Appearance | None
    camera: int
    sequence: int
    kind: str = "identity"
    bad_box: bool = False


def generate_demo(
    folder: str | Path,
    *,
    train_identities: int = 180,
    test_identities: int = 50,
    images_per_identity: int = 10,
    distractors: int = 160,
    cameras: int = 6,
    image_size: tuple[int, int] = (128, 64),
    seed: int = 0,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the demo dataset to ``folder`` unless it exists.

    The same arguments give identical files for one version of NumPy and Pillow, independent of ``workers``. An
    interrupted run leaves no dataset. If two processes write the same folder concurrently, the result of one is kept.

    Args:
        folder: folder of the dataset; parents are created.
        train_identities: people in ``bounding_box_train``, at least 1; a third of them have lookalikes. Default 180.
        test_identities: people in ``query`` and ``bounding_box_test``, at least 1, disjoint from training. Default 50.
        images_per_identity: images of each person, at least 4; two images of a test person are queries. Default 10.
        distractors: gallery images of other people or without a person (pid 0). In addition, one tenth as many badly
            cropped images (pid -1) are written, which are dropped at loading. Default 160.
        cameras: number of cameras, at least 2; each person appears in at most ``images_per_identity // 2`` of them.
            Default 6.
        image_size: height and width in pixels, at least (32, 16). Default (128, 64).
        seed: random seed, at least 0. Default 0.
        workers: number of threads. Default: the number of processors, at most 4.
        progress: called as ``progress(images_written, total_images)`` in the calling thread.

    Raises:
        ValueError: if an argument is out of range.
        DataError: if ``folder`` contains other files, or a demo dataset with different arguments.
    """
    _check_minimum(
        train_identities=(train_identities, 1),
        test_identities=(test_identities, 1),
        images_per_identity=(images_per_identity, 4),
        distractors=(distractors, 0),
        cameras=(cameras, 2),
        image_height=(image_size[0], 32),
        image_width=(image_size[1], 16),
        seed=(seed, 0),
        workers=(1 if workers is None else workers, 1),
    )
    settings = {
        "version": DEMO_VERSION,
        "seed": seed,
        "image_size": list(image_size),
        "train_identities": train_identities,
        "test_identities": test_identities,
        "images_per_identity": images_per_identity,
        "distractors": distractors,
        "cameras": cameras,
    }

    def write(build: Path) -> dict:
        for split in SPLITS:
            (build / split).mkdir()
        shots = _plan(settings)
        _draw_all(shots, build, seed, image_size, workers, progress)
        write_csv(_attributes(shots, settings), build / ATTRIBUTES)
        return {"images": {split: sum(shot.path.startswith(split) for shot in shots) for split in SPLITS}}

    write_dataset(folder, settings, is_complete, write)


def is_complete(folder: str | Path) -> bool:
    """Return True if ``folder`` contains a manifest of this version and as many images as the manifest states."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    if manifest is None or manifest.get("version") != DEMO_VERSION:
        return False
    counts = manifest.get("images")
    return isinstance(counts, dict) and all(
        sum(1 for _ in (folder / split).glob("*.jpg")) == counts.get(split) for split in SPLITS
    )


def image_attributes(folder: str | Path) -> list[ImageAttributes]:
    """Compute the attributes of all images of a demo dataset, as in ``attributes.csv``, without drawing them.

    Raises:
        DataError: if ``folder`` is not a complete demo dataset of this version.
    """
    if not is_complete(folder):
        raise DataError(f"{folder} is not a demo dataset of version {DEMO_VERSION}.\n  fix: call generate_demo(folder)")
    settings = read_manifest(Path(folder)) or {}
    return _attributes(_plan(settings), settings)


def _attributes(shots: list[_Shot], settings: dict) -> list[ImageAttributes]:
    seed, image_size = settings["seed"], tuple(settings["image_size"])
    splits = dict(zip(SPLITS, ("train", "query", "gallery"), strict=True))
    rows = []
    for shot in shots:
        rng = np.random.default_rng([seed, *shot.key])
        picture = compose(rng, shot.person, shot.camera, seed=seed, image_size=image_size, bad_box=shot.bad_box)
        box = "empty" if shot.person is None else "partial" if shot.bad_box else "full"
        rows.append(
            ImageAttributes(
                path=shot.path,
                pid=shot.pid,
                camid=shot.camera,
                split=splits[shot.path.split("/")[0]],
                person=shot.kind,
                box=box,
                **(describe_person(shot.person) if shot.person else {}),
                **describe_picture(picture, shot.camera, shot.sequence, seed),
            )
        )
    return rows


# -- content ---------------------------------------------------------------------------------------------------


def _plan(settings: dict) -> list[_Shot]:
    """List every image of the dataset, sorted by name within each split."""
    seed, cameras = settings["seed"], settings["cameras"]
    per_identity = settings["images_per_identity"]
    shots = []
    train_people = _people(seed, _TRAIN, settings["train_identities"])
    test_people = _people(seed, _TEST, settings["test_identities"])
    for index, person in enumerate(train_people):
        shots += _identity_shots(seed, _TRAIN, index, index + 1, person, per_identity, cameras)
    for index, person in enumerate(test_people):
        pid = len(train_people) + index + 1
        shots += _identity_shots(seed, _TEST, index, pid, person, per_identity, cameras)

    for index in range(settings["distractors"]):
        rng = np.random.default_rng([seed, _DISTRACTOR, index])
        chance, kind = rng.random(), "none"
        stranger: Appearance | None = None
        if chance < 0.1:
            kind, stranger = "lookalike", draw_lookalike(rng, test_people[rng.integers(len(test_people))])
        elif chance < 0.85:
            kind, stranger = "stranger", draw_appearance(rng)
        shots.append(_distractor_shot(rng, (_DISTRACTOR, index), 0, kind, stranger, cameras))
    for index in range(settings["distractors"] // 10):
        rng = np.random.default_rng([seed, _JUNK, index])
        person = test_people[rng.integers(len(test_people))]
        shots.append(_distractor_shot(rng, (_JUNK, index), -1, "identity", person, cameras))
    return shots


def _people(seed: int, split: int, count: int) -> list[Appearance]:
    """Draw the people of one split at random; lookalikes are adjacent."""
    return draw_people(np.random.default_rng([seed, split]), count, _LOOKALIKES, _LOOKALIKE_FRACTION)


def _identity_shots(
    seed: int, split: int, index: int, pid: int, person: Appearance, count: int, cameras: int
) -> list[_Shot]:
    """Plan the images of one person: at least two per camera, so that a query always has a match.

    The first two images, from two cameras, are the queries of a test person; each camera's next image is in the
    gallery.
    """
    rng = np.random.default_rng([seed, split, index])
    passed = rng.permutation(cameras)[: min(cameras, count // 2)]
    shots = []
    for image in range(count):
        camera, sequence = int(passed[image % len(passed)]), image // len(passed) % 3 + 1
        frame = int(rng.integers(1, 4000)) * 25 + 1
        folder = "bounding_box_train"
        if split == _TEST:
            folder = "query" if image < _QUERIES_PER_IDENTITY else "bounding_box_test"
        name = f"{pid:04d}_c{camera + 1}s{sequence}_{frame:06d}_{image + 1:02d}.jpg"
        shots.append(_Shot(f"{folder}/{name}", pid, (split, index, image), person, camera, sequence))
    return shots


def _distractor_shot(
    rng: np.random.Generator, key: tuple[int, int], pid: int, kind: str, person: Appearance | None, cameras: int
) -> _Shot:
    """Plan a gallery image without a match; the frame number makes the file name unique."""
    camera, sequence = int(rng.integers(cameras)), int(rng.integers(1, 4))
    name = f"{'0000' if pid == 0 else pid}_c{camera + 1}s{sequence}_{key[1] * 25 + 1:06d}_00.jpg"
    return _Shot(f"bounding_box_test/{name}", pid, (*key, 0), person, camera, sequence, kind, bad_box=pid == -1)


def _draw_all(
    shots: list[_Shot],
    build: Path,
    seed: int,
    image_size: tuple[int, int],
    workers: int | None,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Draw and save all images.

    Threads are used instead of processes: NumPy and Pillow release the GIL for a third of the work, and starting
    processes would take as long as the time saved.
    """

    def draw(shot: _Shot) -> None:
        rng = np.random.default_rng([seed, *shot.key])
        picture = draw_picture(
            rng, shot.person, shot.camera, shot.sequence, seed=seed, image_size=image_size, bad_box=shot.bad_box
        )
        low, high = make_camera(shot.camera, seed).jpeg
        picture.save(build / shot.path, quality=int(rng.integers(low, high)))

    pool = ThreadPoolExecutor(workers or min(4, os.cpu_count() or 1))
    try:
        for done, _ in enumerate(pool.map(draw, shots), start=1):
            if progress is not None:
                progress(done, len(shots))
    finally:
        pool.shutdown(cancel_futures=True)


# -- files -------------------------------------------------------------------------------------------------


def _check_minimum(**named: tuple[int, int]) -> None:
    """Raise ValueError for the first argument below its minimum."""
    for name, (value, least) in named.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def read_manifest(folder: Path) -> dict | None:
    """Read the manifest of a demo dataset; None if it cannot be read."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) else None


def check_folder(folder: Path, settings: dict) -> None:
    """Raise DataError if writing to ``folder`` would overwrite anything but a corrupt or outdated demo dataset."""
    if not folder.exists():
        return
    if not folder.is_dir() or (not (folder / MANIFEST).is_file() and any(folder.iterdir())):
        raise DataError(
            f"{folder} exists and is not a demo dataset ({MANIFEST} not found).\n  fix: choose another folder"
        )
    manifest = read_manifest(folder) or {}
    different = [name for name, value in settings.items() if name != "version" and manifest.get(name, value) != value]
    if different:
        differences = ", ".join(f"{name} {manifest[name]} (requested: {settings[name]})" for name in different)
        raise DataError(
            f"{folder} contains a demo dataset with different settings: {differences}.\n"
            "  fix: delete this folder, or choose another folder"
        )


def has_all_images(folder: str | Path, subfolder: str, count: str, **entries: str) -> bool:
    """Return True if the manifest has ``entries``, and its entry ``count`` is the number of images in ``subfolder``."""
    manifest = read_manifest(Path(folder)) or {}
    images = sum(1 for _ in (Path(folder) / subfolder).glob("*.jpg"))
    return manifest.items() >= {**entries, count: images}.items()


def ensure_dataset(
    folder: Path, title: str, is_complete: Callable[[Path], bool], generate: Callable[[Path], None]
) -> None:
    """Generate a dataset unless it is complete, in the main process first.

    Args:
        folder: folder of the dataset.
        title: description of the dataset, for messages.
        is_complete: function (folder) -> True if the dataset exists.
        generate: function that writes the dataset to a folder.

    Raises:
        DataError: if the folder is not writable; see also ``write_dataset``.
    """
    with comm.main_process_first():
        remove_abandoned(folder)
        if not is_complete(folder):
            logger.info("writing the %s to %s", title, folder.absolute())
            try:
                generate(folder)
            except OSError as error:
                raise DataError(
                    f"cannot write the {title} to {folder.absolute()}: {system_cause(error)}\n"
                    "  fix: set FASTAMP_DATASETS to a writable folder"
                ) from error


def write_dataset(
    folder: str | Path, settings: dict, is_complete: Callable[[Path], bool], write: Callable[[Path], dict]
) -> None:
    """Write a generated dataset to ``folder`` at once, unless it is complete there.

    Args:
        folder: folder of the dataset; parents are created.
        settings: entries of the manifest that determine the content.
        is_complete: function (folder) -> True if the dataset exists.
        write: function that writes the files to an empty folder, and returns the other entries of the manifest.

    Raises:
        DataError: if ``folder`` contains other files, or a demo dataset with different settings.
        OSError: if the files cannot be written.
    """
    folder = Path(folder).absolute()
    check_folder(folder, settings)
    if is_complete(folder):
        return
    with temporary_folder(folder) as build:
        manifest = json.dumps({**settings, **write(build)}, indent=2)
        (build / MANIFEST).write_text(manifest + "\n", encoding="utf-8")
        move_into_place(build, folder, is_complete)


def move_into_place(build: Path, folder: Path, is_complete: Callable[[Path], bool]) -> None:
    """Rename ``build`` to ``folder`` unless another process has created a complete dataset there.

    Raises:
        OSError: if renaming fails and there is no complete dataset.
    """
    if (folder / MANIFEST).exists() and not is_complete(folder):
        damaged = temporary_path(folder)
        folder.rename(damaged)
        shutil.rmtree(damaged, ignore_errors=True)
    try:
        build.rename(folder)
    except OSError:
        if not is_complete(folder):
            raise
