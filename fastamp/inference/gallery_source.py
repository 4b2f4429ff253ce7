"""Add images and extractions to a mutable gallery, in batches that are each on the disk before the next one."""

import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from fastamp.data.decode import read_image
from fastamp.data.file_parts import file_of
from fastamp.inference.feature_model import FeatureModel
from fastamp.retrieval.features_file import read_features
from fastamp.retrieval.gallery_store import Item
from fastamp.retrieval.mutable_gallery import MutableGallery
from fastamp.utils.errors import DataError
from fastamp.utils.progress import track

_EXTRACTED_BATCH, _IMAGE_BATCH = 4096, 256
PICTURE_SIDE = 192
"""Largest width and height of a stored picture, in pixels."""
_PICTURE_QUALITY = 80
_Loaded = tuple[list[Item], Tensor, list[str]]
"""Items, their features (N, D), and the errors of images that cannot be read."""


@dataclass(frozen=True)
class Adding:
    """Values of all items that are added, and how they are added.

    Attributes:
        camera, identity: camera and identity. Default: "", unknown, or those of an extraction.
        time: seconds since 1970-01-01 UTC. Default: None, unknown.
        replace: if True, replace items that exist. Default: False, skip them.
        pictures: if True, store a small picture of each image. Default: True.
        skip_corrupt: if True, skip images that cannot be read instead of raising an error. Default: False.
    """

    camera: str = ""
    identity: str = ""
    time: float | None = None
    replace: bool = False
    pictures: bool = True
    skip_corrupt: bool = False


def make_picture(pixels: Tensor) -> bytes:
    """Encode an image (C, H, W) uint8 as a small JPEG file without metadata, at most 192 pixels wide and high."""
    array = pixels[:3].permute(1, 2, 0).numpy()
    image = PIL.Image.fromarray(array[..., 0] if array.shape[2] == 1 else array)
    image.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
    file = io.BytesIO()
    image.convert("RGB").save(file, "JPEG", quality=_PICTURE_QUALITY)
    return file.getvalue()


def add_images(
    gallery: str | PathLike[str], paths: Sequence[str], model: FeatureModel, adding: Adding | None = None
) -> tuple[int, int, list[str]]:
    """Add images to a gallery, which is created if it does not exist; their ids are those of ``id_of_path``.

    Args:
        gallery: folder of the gallery.
        paths: image files.
        model: model of the gallery.
        adding: values and options. Default: None, all defaults.

    Returns:
        Numbers of added or replaced, and of existing images; the error message of each image that cannot be read.

    Raises:
        DataError: if an image cannot be read, or the gallery has another model. Images before the unreadable one, and
            the others of its batch, are stored.
        WriteError: if the gallery cannot be written.
    """
    given = adding or Adding()

    def item(path: str) -> Item:
        picture = None
        if given.pictures:
            limit = model.transforms.max_pixels
            picture = make_picture(
                read_image(path, max_pixels=limit, least_size=(PICTURE_SIDE, PICTURE_SIDE), bit_depth=None)
            )
        return Item(id_of_path(gallery, path), Path(path).name, given.identity, given.camera, given.time, picture)

    def load(rows: list[int]) -> _Loaded:
        readable, features, faults = model.readable_features([paths[row] for row in rows])
        return [item(path) for path in readable], features, faults

    with MutableGallery(gallery, model.model_id) as opened:
        return _add(opened, [id_of_path(gallery, path) for path in paths], load, given, size=_IMAGE_BATCH)


def id_of_path(gallery: str | PathLike[str], path: str) -> str:
    """Return the id of an image in a gallery, which does not depend on the current folder.

    It is the path relative to the folder that contains the gallery, if the image is in that folder; otherwise the
    absolute path.
    """
    folder, path = os.path.dirname(os.path.abspath(gallery)), os.path.abspath(path)
    return os.path.relpath(path, folder) if os.path.commonpath((folder, path)) == folder else path


def add_extraction(
    gallery: str | PathLike[str], extraction: str | PathLike[str], adding: Adding | None = None
) -> tuple[int, int]:
    """Add the features of an extraction to a gallery, see ``add_images``, and return their numbers without the faults.

    The ids are those of ``id_of_path``; paths whose file does not exist are used as they are.
    Boxes are part of the ids: ``PATH#LEFT,TOP,RIGHT,BOTTOM``. Identities and cameras are those of the extraction,
    unless ``adding`` names others.
    """
    content, given = read_features(extraction), adding or Adding()
    images = content.images
    ids = [id_of_path(gallery, path) if os.path.exists(file_of(path)) else path for path in images.paths.tolist()]
    if images.boxes is not None:
        ids = [f"{path}#{','.join(map(str, box))}" for path, box in zip(ids, images.boxes.tolist(), strict=True)]

    def item(row: int) -> Item:
        identity, camera = (_known(values[row]) for values in (images.pids, images.camera_names))
        name = Path(str(images.paths[row])).name
        return Item(ids[row], name, given.identity or identity, given.camera or camera, given.time)

    def load(rows: list[int]) -> _Loaded:
        return [item(row) for row in rows], torch.from_numpy(np.array(content.matrix[rows])), []

    with MutableGallery(gallery, content.model) as opened:
        return _add(opened, ids, load, given, size=_EXTRACTED_BATCH)[:2]


def _known(value: object) -> str:
    return "" if str(value) == "-1" else str(value)


def _add(
    gallery: MutableGallery, ids: list[str], load: Callable[[list[int]], _Loaded], adding: Adding, *, size: int
) -> tuple[int, int, list[str]]:
    """Add items in batches of ``size``; an id that is repeated counts once. Build the candidate index if needed."""
    added, faults = 0, list[str]()
    first_rows = list({item_id: row for row, item_id in reversed(list(enumerate(ids)))}.values())[::-1]
    starts = range(0, len(first_rows), size)
    for start in track(starts, len(starts), f"adding {len(first_rows)} items"):
        block = first_rows[start : start + size]
        gallery.refresh()
        block = [row for row in block if adding.replace or ids[row] not in gallery]
        if not block:
            continue
        items, values, block_faults = load(block)
        faults += block_faults
        if items:  # other processes may have added some in the meantime
            added += len(gallery.add(items, values, existing="replace" if adding.replace else "skip"))
        if faults and not adding.skip_corrupt:
            more = f" ({len(faults) - 1} more in this batch)" if len(faults) > 1 else ""
            raise DataError(
                f"{faults[0]}{more}. The images before it, and the others of its batch, are in the gallery.\n"
                "  fix: repair or delete the file, or skip unreadable images with --skip-corrupt"
            )
    if gallery.wants_candidates:
        gallery.build_candidates()
    return added, len(first_rows) - added - len(faults), faults
