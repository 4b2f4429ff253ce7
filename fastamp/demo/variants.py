"""Generate the datasets DemoInfrared, DemoClothes, DemoVideo and DemoAerial: pedestrians with columns.

Each is a folder with ``images/*.jpg``, the table ``attributes.csv`` of splits and columns, and a manifest that is
written last.
"""

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from fastamp.demo.camera import make_camera
from fastamp.demo.generate import ATTRIBUTES, has_all_images, write_dataset
from fastamp.demo.picture import OCCLUDERS, Shot, draw_picture
from fastamp.demo.pose import Gait, Pose, draw_gait, walking_pose
from fastamp.demo.wardrobe import Appearance, change_clothes, draw_appearance, draw_body, draw_people, in_infrared

# Part of the default folder names: increment it with every change of the images of any variant.
VARIANTS_VERSION = "2"
INFRARED_CAMERAS = (2, 5)
_VISIBLE_CAMERAS = (0, 1, 3, 4)
_AERIAL_CAMERAS = (3, 4, 5)
_OUTFITS = 3
_SHARED_OUTFITS = 0.4


@dataclass(frozen=True)
class _Image:
    """Image to draw: its row of the table without the path, appearance, and options."""

    pid: int
    camera: int
    split: str
    person: Appearance
    columns: dict[str, str | int] = field(default_factory=dict)
    shot: Shot = field(default_factory=Shot)
    sequence: int = 1


def generate_variant(
    variant: str,
    folder: str | Path,
    *,
    train_identities: int = 100,
    test_identities: int = 40,
    image_size: tuple[int, int] = (128, 64),
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a variant of the demo dataset to ``folder`` unless it is complete.

    The same arguments give identical files for one version of NumPy and Pillow. An interrupted run leaves no dataset.

    Args:
        variant: ``"infrared"``, ``"clothes"``, ``"video"`` or ``"aerial"``.
        folder: folder of the dataset; parents are created.
        train_identities, test_identities: people of the training and of the test images, at least 1. Default 100 and
            40.
        image_size: height and width in pixels, at least (32, 16). Default (128, 64).
        seed: random seed, at least 0. Default 0.
        progress: called as ``progress(images_written, total_images)``.

    Raises:
        ValueError: if an argument is out of range.
        DataError: if ``folder`` contains other files, or a demo dataset with different arguments.
    """
    if variant not in _PLANS:
        raise ValueError(f"unknown variant {variant!r}; choices: {', '.join(_PLANS)}")
    if min(train_identities, test_identities) < 1 or image_size[0] < 32 or image_size[1] < 16 or seed < 0:
        raise ValueError("at least 1 identity per split, images of 32 x 16 pixels and a seed of 0 are required")
    settings = {
        "variant": variant,
        "version": VARIANTS_VERSION,
        "seed": seed,
        "image_size": list(image_size),
        "train_identities": train_identities,
        "test_identities": test_identities,
    }

    def write(build: Path) -> dict:
        (build / "images").mkdir()
        images = list(_PLANS[variant](seed, train_identities, test_identities))
        rows = []
        for number, image in enumerate(images):
            path = f"images/{image.pid:04d}_c{image.camera + 1}_{number:05d}.jpg"
            rng = np.random.default_rng([seed, 20, number])
            picture = draw_picture(
                rng, image.person, image.camera, image.sequence, seed=seed, image_size=image_size, shot=image.shot
            )
            low, high = make_camera(image.camera, seed).jpeg
            picture.save(build / path, quality=int(rng.integers(low, high)))
            rows.append({"path": path, "pid": image.pid, "camid": image.camera, "split": image.split, **image.columns})
            if progress is not None:
                progress(number + 1, len(images))
        with (build / ATTRIBUTES).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        return {"images": len(rows)}

    write_dataset(folder, settings, is_complete_variant, write)


def is_complete_variant(folder: str | Path) -> bool:
    """Return True if ``folder`` has as many images of this version as its manifest states."""
    return has_all_images(folder, "images", "images", version=VARIANTS_VERSION)


def _infrared(seed: int, train: int, test: int) -> Iterator[_Image]:
    """Plan two images in each visible camera and three in each infrared camera; queries are infrared."""
    for pid, split, person in _people(seed, train, test):
        gray = in_infrared(np.random.default_rng([seed, 30, pid]), person)
        for camera in (*_VISIBLE_CAMERAS, *INFRARED_CAMERAS):
            infrared = camera in INFRARED_CAMERAS
            part = split or ("query" if infrared else "gallery")
            columns: dict[str, str | int] = {"modality": "infrared" if infrared else "visible"}
            for number in range(3 if infrared else 2):
                seen, shot = (gray, Shot(infrared=True)) if infrared else (person, Shot())
                yield _Image(pid, camera, part, seen, columns, shot, number + 1)


def _clothes(seed: int, train: int, test: int) -> Iterator[_Image]:
    """Plan three outfits of each person in four images each; some outfits are shared by several people.

    Test queries wear the last outfit, which is not in the gallery, or the first.
    """
    rng = np.random.default_rng([seed, 31])
    shared = [draw_appearance(rng) for _ in range(max(2, (train + test) // 5))]
    for pid in range(1, train + test + 1):
        body, gait = draw_body(rng), draw_gait(rng)
        for outfit in range(_OUTFITS):
            common = rng.random() < _SHARED_OUTFITS
            person = change_clothes(body, shared[rng.integers(len(shared))] if common else draw_appearance(rng))
            cameras = rng.permutation(6)
            for number in range(4):
                split = "train"
                if pid > train:
                    query = outfit == _OUTFITS - 1 or (outfit == 0 and number == 0)
                    split = "query" if query else "gallery"
                if split == "query" and number > 1:
                    continue
                camera = int(cameras[number])
                columns: dict[str, str | int] = {"clothes": f"{pid}_{outfit}"}
                shot = Shot(pose=_walk(rng, gait, camera))
                yield _Image(pid, camera, split, person, columns, shot, outfit + 1)


def _video(seed: int, train: int, test: int) -> Iterator[_Image]:
    """Plan one tracklet of eight frames in each of three cameras; the first of a test person is a query."""
    for pid, split, person in _people(seed, train, test):
        rng = np.random.default_rng([seed, 32, pid])
        gait = draw_gait(rng)
        for number, camera in enumerate(rng.permutation(6)[:3].tolist()):
            part = split or ("query" if number == 0 else "gallery")
            columns: dict[str, str | int] = {"tracklet": f"{pid:04d}_c{camera + 1}"}
            first = _walk(rng, gait, camera)
            phase, pace = rng.uniform(0, 2 * math.pi), rng.uniform(0.5, 0.9)
            drift, offset = rng.uniform(-0.02, 0.02, 2), rng.uniform(-0.06, 0.06, 2)
            hidden = range(0)
            if rng.random() < 0.4:
                start = int(rng.integers(7))
                hidden = range(start, start + int(rng.integers(1, 4)))
            for frame in range(8):
                pose = walking_pose(gait, phase + pace * frame, first.yaw, first.pitch, first.light)
                across, down = (offset + drift * frame + rng.normal(0, 0.01, 2)).tolist()
                occluder = str(rng.choice(OCCLUDERS)) if frame in hidden else "none"
                shot = Shot(pose=pose, shift=(across, down / 2), background=pid * 10 + camera, occluder=occluder)
                yield _Image(pid, camera, part, person, columns, shot, number + 1)


def _aerial(seed: int, train: int, test: int) -> Iterator[_Image]:
    """Plan six images from a drone at three altitudes and six from cameras on the ground; queries are aerial."""
    for pid, split, person in _people(seed, train, test):
        rng = np.random.default_rng([seed, 33, pid])
        gait = draw_gait(rng)
        for number in range(6):
            altitude = number % 3
            camera = _AERIAL_CAMERAS[altitude]
            pitch = rng.uniform(0.75, 0.95) + 0.1 * altitude
            pose = replace(_walk(rng, gait, camera), pitch=pitch, yaw=rng.uniform(-math.pi, math.pi))
            columns: dict[str, str | int] = {"platform": "aerial", "altitude": altitude}
            part = split or "query"
            if split or number < 3:
                yield _Image(pid, camera, part, person, columns, Shot(pose=pose, aerial=True), number // 3 + 1)
            columns = {"platform": "ground", "altitude": ""}
            ground = number % 3
            shot = Shot(pose=_walk(rng, gait, ground))
            yield _Image(pid, ground, split or "gallery", person, columns, shot, number // 3 + 1)


def _people(seed: int, train: int, test: int) -> Iterator[tuple[int, str, Appearance]]:
    """Yield ``(pid, "train" or "", person)`` of the training people and then of the test people, with lookalikes."""
    for number, (count, first) in enumerate(((train, 1), (test, train + 1))):
        people: Sequence[Appearance] = draw_people(np.random.default_rng([seed, 21, number]), count, 2, 0.3)
        yield from ((first + index, "" if number else "train", person) for index, person in enumerate(people))


def _walk(rng: np.random.Generator, gait: Gait, camera: int) -> Pose:
    """Return a random pose of a walking person in a typical direction of the camera."""
    seen_by = make_camera(camera, 0)
    yaw = rng.choice(seen_by.yaws) + rng.normal(0, 0.3)
    return walking_pose(gait, rng.uniform(0, 2 * math.pi), yaw, seen_by.pitch, rng.uniform(-0.8, 0.8))


_PLANS = {"infrared": _infrared, "clothes": _clothes, "video": _video, "aerial": _aerial}
VARIANTS = tuple(_PLANS)
