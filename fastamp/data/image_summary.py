"""Size, digest and fingerprint of images, with the cause if one cannot be read."""

import hashlib
import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from PIL import Image, ImageOps

from fastamp.data.boxes import clip_box
from fastamp.data.datasets.base import ImageItem
from fastamp.data.decode import (
    BIT_DEPTH,
    JPEG_START,
    MAX_PIXELS,
    cause_of,
    check_mode,
    check_pixels,
    decode_image,
    expand_palette,
    open_with_pil,
    reduce_bits,
)
from fastamp.data.file_parts import read_bytes
from fastamp.data.near_duplicates import Fingerprint
from fastamp.utils.env import available_cores
from fastamp.utils.errors import DataError
from fastamp.utils.progress import track


@dataclass(frozen=True)
class ImageSummary:
    """Size, digest and fingerprint of an image, or the reason why it cannot be read."""

    fault: str = ""
    size: tuple[int, int] = (0, 0)
    digest: bytes = b""
    fingerprint: Fingerprint | None = None


def read_fingerprints(items: Sequence[ImageItem]) -> list[Fingerprint]:
    """Read images and compute their fingerprints.

    Raises:
        DataError: if an image cannot be read.
    """
    with ThreadPoolExecutor(available_cores()) as pool:
        images = pool.map(partial(inspect_image, bit_depth=None), items)
        fingerprints = list(track(images, len(items), "reading images"))
    for item, digests in zip(items, fingerprints, strict=True):
        if digests.fingerprint is None:
            raise DataError(f"{item.path}: {digests.fault}.\n  fix: restore the file, or remove it from the table")
    return [digests.fingerprint for digests in fingerprints if digests.fingerprint is not None]


def inspect_image(item: ImageItem, *, max_pixels: int = MAX_PIXELS, bit_depth: int | None = BIT_DEPTH) -> ImageSummary:
    """Read an image; see ``read_image`` for the arguments."""
    try:
        content = read_bytes(item.path)
        if content[:2] == JPEG_START:  # decoded as in training, which prints warnings of damage
            pixels = decode_image(content, name=item.path, max_pixels=max_pixels)
            upright = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        else:
            with open_with_pil(io.BytesIO(content)) as image:
                check_pixels(item.path, *image.size, max_pixels)  # type: ignore[call-arg]
                check_mode(image)
                image.load()  # decode all of it: unlike other decoders, PIL raises on truncated files
                upright = expand_palette(ImageOps.exif_transpose(image))
        if upright.mode.startswith("I"):  # more than 8 bits
            reduce_bits(np.asarray(upright), item.path, bit_depth)
            upright = Image.fromarray(reduce_bits(np.asarray(upright), item.path, None))
    except Exception as error:  # PIL's plugins raise many exception types on corrupt files
        cause = error.__cause__ if isinstance(error, DataError) else error
        return ImageSummary(fault=cause_of(cause if isinstance(cause, Exception) else error))
    if item.box is not None:
        box = clip_box(item.box, *upright.size)
        if box is None:
            return ImageSummary(
                fault=f"box {item.box} is outside the image of {upright.width} x {upright.height} pixels"
            )
        upright = upright.crop(box)
    digest = hashlib.blake2b(content + str(item.box).encode(), digest_size=16).digest()
    return ImageSummary(size=upright.size, digest=digest, fingerprint=Fingerprint.of(upright))
