"""Decode image files to uint8 tensors: grey, RGB or RGBA."""

import errno
import os
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from fastamp.utils.errors import DataError
from fastamp.utils.files import check_not_device

try:
    from torchvision.io import ImageReadMode
    from torchvision.io import decode_image as torchvision_decode
except ImportError:
    # torchvision 0.29 announces that a later version will have no decoders.
    torchvision_decode = None

# PIL's fixed-point luma (ITU-R BT.601): all sums are exact in float32, so that any machine rounds them alike.
_LUMA_WEIGHTS = (19595 / 2**16, 38470 / 2**16, 7471 / 2**16)
_JPEG = b"\xff\xd8"
_START_OF_FRAME = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_MARKERS_WITHOUT_LENGTH = {0x00, 0x01, *range(0xD0, 0xD9)}  # markers that no length follows
_PIL_LOCK, _WARNINGS_LOCK = Lock(), Lock()
# A file of a few bytes may declare an image that fills the memory.
MAX_PIXELS = 100_000_000
"""Default of INPUT.MAX_PIXELS: width x height of the largest image that is decoded."""
LARGEST_PIXELS = 178_956_970
"""The most that PIL decodes."""
# JPEG files of more pixels, about 16.8 million, are decoded at a fraction of their size where much less is needed.
_MAX_FULL_SIZE_PIXELS = 2**24
# Of PIL's formats those of pixels: others run programs of theirs, such as Ghostscript for PostScript.
_FORMATS = ("AVIF", "BMP", "DIB", "GIF", "JPEG", "JPEG2000", "MPO", "PCX", "PNG", "PPM", "TGA", "TIFF", "WEBP")


def read_image(
    path: str,
    channels: int = 3,
    *,
    box: tuple[int, int, int, int] | None = None,
    max_pixels: int = MAX_PIXELS,
    least_side: int | None = None,
) -> Tensor:
    """Read an image, upright as its EXIF orientation says.

    Grey files become RGB and RGB files grey as asked. A fourth channel is kept or dropped, never blended, and is 255
    where a file has none. Of 16-bit channels the upper 8 bits are kept, of animations the first picture.

    torchvision decodes JPEG files, and PIL all others, and what torchvision cannot. Grey is made of the decoded RGB, as
    PIL does it.

    Args:
        path: the file.
        channels: 1 for grey, 3 for RGB, 4 for RGBA.
        box: left, top, right and bottom of the part that is taken, in pixels of the upright image, the last two not
            included; None is all of it.
        max_pixels: width x height of the largest image that is decoded, up to ``LARGEST_PIXELS``.
        least_side: height and width that are enough. A JPEG file of more than 2**24 pixels is then decoded at 1/2, 1/4
            or 1/8 of its size, by libjpeg's scaled DCT, as long as both sides keep this many pixels. None, or a
            ``box``, decodes at full size.

    Returns:
        (channels, H, W) uint8.

    Raises:
        DataError: the file is missing, cannot be read, is damaged, too large, or has no such part; names the file and
            the cause.
        OSError: too many files are open.
    """
    image = _read_full_image(path, channels, max_pixels, least_side if box is None else None)
    if box is None:
        return image
    left, top, right, bottom = box
    height, width = image.shape[1:]
    if right > width or bottom > height:
        raise DataError(
            f"the part {left} {top} {right} {bottom} of the image {path} is not all in it: it has {width} x {height} "
            "pixels"
        )
    return image[:, top:bottom, left:right]


def _read_full_image(path: str, channels: int, max_pixels: int, least_side: int | None) -> Tensor:
    try:
        check_not_device(path)
        with open(path, "rb", buffering=0) as file:
            content = bytearray(file.read())
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise  # no fault of the image, which must not be skipped
        raise DataError(f"cannot read the image {path}: {error.strerror or error}") from error
    except ValueError as error:  # a name that no file can have
        raise DataError(f"cannot read the image {path!r}: {error}") from error
    if not content:
        raise DataError(f"cannot read the image {path}: the file is empty")
    is_jpeg = content[:2] == _JPEG
    width, height = _declared_size(content) if is_jpeg else (0, 0)
    check_pixels(path, width, height, max_pixels)
    if width * height <= _MAX_FULL_SIZE_PIXELS or least_side is None or min(width, height) < 2 * least_side:
        least_side = None
    # torchvision (0.29) ends the process at damaged PNG files, does not turn WebP files upright, and decodes all
    # pictures of an animation; it has no scaled decoding, and no limit where the size was not found.
    if torchvision_decode is None or not width * height or channels == 4 or least_side is not None:
        image = _read_with_pil(path, "RGBA" if channels == 4 else "RGB", max_pixels, least_side)
    else:
        try:
            encoded = torch.frombuffer(content, dtype=torch.uint8)
            image = torchvision_decode(encoded, mode=ImageReadMode.RGB, apply_exif_orientation=True)
        except RuntimeError:
            image = _read_with_pil(path, "RGB", max_pixels)
    return _luma(image) if channels == 1 else image


def check_pixels(path: str, width: int, height: int, max_pixels: int) -> None:
    """Check that an image is not too large to be decoded.

    Raises:
        DataError: it has more than ``max_pixels`` pixels.
    """
    if width * height > max_pixels:
        raise_limit = f"INPUT.MAX_PIXELS {width * height}, or " if width * height <= LARGEST_PIXELS else ""
        raise DataError(
            f"the image {path} has {width} x {height} pixels, more than INPUT.MAX_PIXELS {max_pixels}\n"
            f"  fix: {raise_limit}a smaller copy of the image"
        )


def _declared_size(content: bytearray) -> tuple[int, int]:
    """Return the width and height that a JPEG file declares, zeros where that is not found.

    Looks for markers as libjpeg does, which skips bytes that are not part of a segment.
    """
    offset = content.find(b"\xff", 2)
    while 0 < offset <= len(content) - 9:
        marker, length = content[offset + 1], int.from_bytes(content[offset + 2 : offset + 4], "big")
        if marker in _START_OF_FRAME:
            height, width = struct.unpack_from(">HH", content, offset + 5)
            return width, height
        if marker == 0xFF:
            offset += 1
        else:
            offset = content.find(b"\xff", offset + 2 + (0 if marker in _MARKERS_WITHOUT_LENGTH else length))
    return 0, 0


def _luma(image: Tensor) -> Tensor:
    """Return (1, H, W) uint8 of (3, H, W) uint8 RGB."""
    total = torch.full(image.shape[1:], 0.5, device=image.device)
    for weight, channel in zip(_LUMA_WEIGHTS, image, strict=True):
        total += weight * channel
    return total.to(torch.uint8)[None]


def with_channels(image: Tensor, channels: int) -> Tensor:
    """Return an image with as many channels as asked for, as ``read_image`` makes them of files.

    Args:
        image: (C, H, W) uint8, grey, RGB or RGBA.
        channels: 1, 3 or 4.

    Returns:
        (channels, H, W) uint8.
    """
    if len(image) == channels:
        return image
    colors = image[:3] if len(image) > 1 else image.expand(3, -1, -1)
    if channels == 1:
        return _luma(colors)
    return colors if channels == 3 else torch.cat((colors, torch.full_like(colors[:1], 255)))


def open_with_pil(source: str | os.PathLike[str] | Any) -> Image.Image:
    """Return PIL's image of a file, given by name or open, if it is one of pixels, which runs no program.

    PIL's warning of large images is suppressed: ``check_pixels`` limits them.
    """
    Image.init()  # knows formats only afterwards
    # The filters are the process's: two threads must not replace and restore them at once.
    with _WARNINGS_LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        return Image.open(source, formats=[name for name in _FORMATS if name in Image.OPEN])


def image_from_pil(image: Image.Image, channels: int = 3) -> Tensor:
    """Convert a PIL image to a tensor, with the pixels that ``read_image`` returns for its file.

    Values may differ by up to 3 for a CMYK JPEG file, which torchvision decodes in ``read_image``, and more for a JPEG
    file that ``read_image`` decodes at a fraction of its size: a PIL image is decoded at full size.

    Args:
        image: of any mode except F (32-bit floats); turned upright by its EXIF orientation.
        channels: 1 for gray, 3 for RGB, 4 for RGBA.

    Returns:
        (channels, H, W) uint8.

    Raises:
        DataError: the mode is F, or the image was opened from a file that cannot be decoded.
    """
    name = getattr(image, "filename", "") or "(a PIL image)"
    # PIL decodes an opened file, and reads its EXIF data, at the first use: not safe in two threads at once.
    with _PIL_LOCK, _pil_errors(os.fsdecode(name)):
        pixels = _pil_pixels(image, "RGBA" if channels == 4 else "RGB")
    return _luma(pixels) if channels == 1 else pixels


def _read_with_pil(path: str, mode: str, max_pixels: int, least_side: int | None = None) -> Tensor:
    with _pil_errors(path), open_with_pil(path) as image:
        check_pixels(path, *image.size, max_pixels)
        if least_side is not None:
            image.draft(None, (least_side, least_side))
        return _pil_pixels(image, mode)


@contextmanager
def _pil_errors(path: str) -> Iterator[None]:
    """Raise DataError where PIL cannot decode the image ``path``."""
    try:
        yield
    except DataError:
        raise
    except Image.DecompressionBombError as error:
        raise DataError(
            f"the image {path} has more than {LARGEST_PIXELS} pixels\n  fix: a smaller copy of the image"
        ) from error
    # On damaged files PIL's plugins raise nearly anything (OSError, SyntaxError, struct.error, ...).
    except Exception as error:
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"cannot read the image {path}: {cause}") from error


def _pil_pixels(image: Image.Image, mode: str) -> Tensor:
    """Return the (C, H, W) uint8 pixels of an upright image in ``mode``.

    Raises:
        ValueError: the image has mode F.
    """
    if image.mode == "F":
        raise ValueError("its pixels are floats (mode F) of unknown range")
    pixels = np.asarray(_convert(ImageOps.exif_transpose(image), mode))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


def _convert(image: Image.Image, mode: str) -> Image.Image:
    if image.mode.startswith("I"):
        # PIL would clip 16-bit grey at 255.
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8))
    return image.convert(mode)
