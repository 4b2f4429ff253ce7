"""Decode image files to uint8 tensors: grayscale, RGB or RGBA."""

import errno
import io
import logging
import math
import os
import re
import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Lock
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError
from torch import Tensor

from fastamp.data.boxes import Box, clip_box
from fastamp.data.file_parts import file_of, read_bytes
from fastamp.data.frame_cache import FrameCache
from fastamp.data.image_decoder import image_decoder
from fastamp.data.jpeg_warnings import named_warnings
from fastamp.utils.errors import DataError, system_cause

logger = logging.getLogger(__name__)


# PIL's fixed-point luma (ITU-R BT.601). All sums are exact in float32, so every machine rounds them equally.
_LUMA_WEIGHTS = (19595 / 2**16, 38470 / 2**16, 7471 / 2**16)
JPEG_START = b"\xff\xd8"
_START_OF_FRAME = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE = {0xC2, 0xC6, 0xCA, 0xCE}
_START_OF_IMAGE, _END_OF_IMAGE, _START_OF_SCAN, _TEMPORARY = 0xD8, 0xD9, 0xDA, 0x01
# The code of a marker, after any number of fill bytes; neither a byte of compressed data nor a restart.
_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
# Decoded frames whose boxes are read: ten frames of 1920x1080.
_FRAMES = FrameCache(64 * 2**20)
_PIL_LOCK, _WARNINGS_LOCK = Lock(), Lock()
# A small file can declare an image that exceeds the memory.
MAX_PIXELS = 100_000_000
"""Default of INPUT.MAX_PIXELS: maximum width x height of an image."""
LARGEST_PIXELS = 178_956_970
"""Maximum number of pixels that PIL decodes."""
BIT_DEPTH = 16
"""Default of INPUT.BIT_DEPTH."""
_warned_of_bits = Event()
# Each scan of a progressive JPEG file takes time for all pixels, also if it has few bytes. Usual files have 10.
MAX_SCANS = 100
"""Maximum number of scans of a JPEG file."""
_MAX_SCANNED_PIXELS = 2_000_000_000  # 20 scans of MAX_PIXELS
# PIL takes a step in Python for each of them.
_MAX_SEGMENTS, _MAX_FILL_BYTES = 10_000, 2**16
# Larger JPEG files (16.8 million pixels) are decoded at reduced scale if that is sufficient.
_MAX_FULL_SIZE_PIXELS = 2**24
_TURNED = (5, 6, 7, 8)  # EXIF orientations that exchange height and width
_METADATA, _EXIF = 0xE1, b"Exif\0\0"
# An orientation in XMP, or a tag of EXIF with a type other than SHORT, in both byte orders.
_OTHER_ORIENTATION = re.compile(rb"Orientation|\x01\x12\0[^\x03]|\x12\x01[^\x03]\0", re.DOTALL)
# Pixel formats only: PIL runs external programs for others, such as Ghostscript for PostScript.
_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_FORMATS = ("AVIF", "BMP", "DIB", "GIF", "JPEG", "JPEG2000", "MPO", "PCX", "PNG", "PPM", "TGA", "TIFF", "WEBP")


class DecodingOptions(TypedDict):
    """Options of ``read_image`` and ``decode_image`` that a config sets."""

    max_pixels: int
    bit_depth: int
    decoder: str
    reduced: bool


def read_image(
    path: str,
    channels: int = 3,
    *,
    box: tuple[int, int, int, int] | None = None,
    max_pixels: int = MAX_PIXELS,
    least_size: tuple[int, int] | None = None,
    bit_depth: int | None = BIT_DEPTH,
    decoder: str = "auto",
    reduced: bool = False,
) -> Tensor:
    """Read an image, a file or bytes of a file, and apply its EXIF orientation.

    The image is converted to the given number of channels. If ``channels`` is 4, alpha is 255 for files without an
    alpha channel. If ``channels`` is 1 or 3, an alpha channel is dropped without blending. Integers of more than 8 bits
    are reduced to their upper 8 bits, see ``bit_depth``. For an animation, the first frame is read.

    ``decoder`` decodes JPEG files, and PIL decodes all other formats and the JPEG files that ``decoder`` rejects.
    Grayscale is computed from the decoded RGB, as PIL does. The last decoded images whose boxes were read are kept, up
    to 64 MiB in a process, so that a frame is decoded once for boxes that are read one after the other.

    Args:
        path: image file, or ``FILE#START+COUNT`` for bytes of a file, see ``file_parts``.
        channels: 1 for grayscale, 3 for RGB, 4 for RGBA. Default 3.
        box: (left, top, right, bottom) of the region to return, in pixels of the upright image; right and bottom are
            exclusive, and parts outside the image are cut off. Default: the whole image.
        max_pixels: maximum width x height to decode, at most ``LARGEST_PIXELS``. Default 100,000,000.
        least_size: required height and width of the upright image, in pixels. A JPEG file of more than 2**24 pixels is
            decoded by PIL at 1/2, 1/4 or 1/8 of its size, by libjpeg's scaled DCT, if it still has at least this size.
            Ignored if ``box`` is given. Default: decode at full size.
        bit_depth: number of bits that the values of gray images of more than 8 bits use, in 8..32: values in
            0..2**bit_depth - 1 become 0..255. Default 16. None: the range of the image's own values, for pictures to
            look at.
        decoder: see ``image_decoder``. Default ``"auto"``.
        reduced: use ``least_size`` for JPEG files of any number of pixels, at scales that divide height and width.
            Default False.

    Returns:
        (channels, H, W) uint8.

    Raises:
        DataError: if the file is missing, cannot be read, is corrupt or too large, a value is outside the range of
            ``bit_depth``, or ``box`` is outside the image. The message names the file and the cause.
        OSError: if too many files are open.
    """
    options: dict[str, Any] = {"max_pixels": max_pixels, "bit_depth": bit_depth, "decoder": decoder}
    if box is None:
        return decode_image(_content(path), channels, name=path, least_size=least_size, reduced=reduced, **options)
    frame = _FRAMES.get(
        (path, _state(path), channels, *options.values()),
        lambda: decode_image(_content(path), channels, name=path, **options),
    )
    left, top, right, bottom = box_inside(box, path, width=frame.shape[2], height=frame.shape[1])
    return frame[:, top:bottom, left:right].clone()


def _state(path: str) -> tuple[int, ...]:
    """Return numbers that change if a file is written again; () if it cannot be read."""
    try:
        state = os.stat(file_of(path))
    except (OSError, ValueError):
        return ()  # the error is raised by ``_content``
    return state.st_ino, state.st_size, state.st_mtime_ns


def box_inside(box: Sequence[float], path: str, *, width: int, height: int) -> Box:
    """Return the part of ``box`` inside the image at ``path``; see ``clip_box``.

    Raises:
        DataError: if ``box`` is outside the image.
    """
    clipped = clip_box(box, width, height)
    if clipped is None:
        raise DataError(f"box {' '.join(map(str, box))} is outside the image {path} of {width} x {height} pixels")
    return clipped


def _content(path: str) -> bytearray:
    try:
        return read_bytes(path)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise  # not caused by the image, which must not be skipped
        raise DataError(f"cannot read the image {path}: {system_cause(error)}") from error
    except ValueError as error:  # invalid file name
        raise DataError(f"cannot read the image {path!r}: {error}") from error


def decode_image(
    content: bytes | bytearray,
    channels: int = 3,
    *,
    name: str = "",
    max_pixels: int = MAX_PIXELS,
    least_size: tuple[int, int] | None = None,
    bit_depth: int | None = BIT_DEPTH,
    decoder: str = "auto",
    reduced: bool = False,
) -> Tensor:
    """Decode the content of an image file, as ``read_image`` does.

    Args:
        content: content of the file.
        channels, max_pixels, least_size, bit_depth, decoder, reduced: see ``read_image``.
        name: name of the image for messages. Default "".

    Returns:
        (channels, H, W) uint8.

    Raises:
        DataError: if the content is corrupt or too large.
    """
    path = name or "(bytes)"
    content = content if isinstance(content, bytearray) else bytearray(content)
    if not content:
        raise DataError(f"cannot read the image {path}: the file is empty")
    width, height, is_unambiguous = 0, 0, False
    if content[:2] == JPEG_START:
        header = check_jpeg(content, path)
        width, height, is_unambiguous = header.width, header.height, header.has_unambiguous_orientation()
        check_pixels(path, width, height, max_pixels)
    reduced = (reduced and _largest_scale(width, height) > 1) or width * height > _MAX_FULL_SIZE_PIXELS
    if not reduced or not _is_twice(width, height, least_size):
        least_size = None
    # torchvision 0.29 aborts the process on corrupt PNG files, ignores the orientation of WebP files, decodes all
    # frames of an animation, and has no scaled decoding; no decoder can be limited if the declared size was not found.
    decode = image_decoder(decoder).decode
    if decode is None or not (is_unambiguous and width * height) or channels == 4 or least_size is not None:
        mode = "RGBA" if channels == 4 else "RGB"
        image = _decode_with_pil(content, path, mode, max_pixels, least_size, bit_depth)
    else:
        try:
            with named_warnings(path):
                image = decode(torch.frombuffer(content, dtype=torch.uint8))
        except RuntimeError:
            image = _decode_with_pil(content, path, "RGB", max_pixels)
    return _luma(image) if channels == 1 else image


def _is_twice(width: int, height: int, size: tuple[int, int] | None) -> bool:
    """Return True if an image, upright or turned by 90 degrees, has at least twice the height and width ``size``."""
    return size is not None and any(2 * a <= height and 2 * b <= width for a, b in (size, size[::-1]))


def _largest_scale(width: int, height: int) -> int:
    """Return the largest n of 1/n at which an image may be decoded.

    If n does not divide the sides, libjpeg pads them, so that resizing moves all pixels: with one pixel more than a
    multiple of 8, cosines of features fell from 0.993 to 0.88 (32x16). The padding of very large images is negligible.
    """
    return 8 if width * height > _MAX_FULL_SIZE_PIXELS else math.gcd(width, height, 8)


def check_pixels(path: str, width: int, height: int, max_pixels: int) -> None:
    """Check that an image is not too large, before it is decoded.

    Args:
        path: image file, for the message.
        width, height: size of the image in pixels.
        max_pixels: maximum width x height.

    Raises:
        DataError: if the image has more than ``max_pixels`` pixels.
    """
    if width * height > max_pixels:
        raise_limit = f"set INPUT.MAX_PIXELS to {width * height}, or " if width * height <= LARGEST_PIXELS else ""
        raise DataError(
            f"the image {path} has {width} x {height} pixels, more than INPUT.MAX_PIXELS {max_pixels}\n"
            f"  fix: {raise_limit}use a smaller copy of the image"
        )


def check_mode(image: Image.Image) -> None:
    """Raise ValueError if a PIL image has float pixels, whose range of values is unknown."""
    if image.mode.startswith("F"):
        raise ValueError(f"unsupported PIL mode {image.mode}: the value range of float pixels is unknown")


class JpegHeader(NamedTuple):
    """Size and number of scans of a JPEG file, 0 if they were not found, and its EXIF and XMP segments."""

    width: int
    height: int
    scans: int
    metadata: list[bytes | bytearray]

    def has_unambiguous_orientation(self) -> bool:
        """Return True if all decoders find the same orientation: none, or that of EXIF, the first metadata segment."""
        exif, others = self.metadata[:1], self.metadata[1:]
        return (
            all(part.startswith(_EXIF) for part in exif)
            and not any(part.startswith(_EXIF) for part in others)
            and not any(_OTHER_ORIENTATION.search(part) for part in self.metadata)
        )


def jpeg_header(content: bytes | bytearray, path: str) -> JpegHeader:
    """Find the size of a JPEG file, and count its scans up to ``MAX_SCANS`` + 1.

    Bytes between marker segments are skipped, as in libjpeg.

    Args:
        content: content of the file.
        path: image file, for the message.

    Raises:
        DataError: if the file has an unusual number of segments, or of bytes between them.
    """
    width = height = scans = segments = fill = components = 0
    progressive, offset = False, 2
    metadata: list[bytes | bytearray] = []
    while (segment := _MARKER.search(content, offset)) and segment.end() + 2 <= len(content):
        marker, start = content[segment.end() - 1], segment.end()
        if not scans:  # compressed data follow a scan
            fill += segment.start() - offset
        segments += 1
        if segments > _MAX_SEGMENTS or fill > _MAX_FILL_BYTES:
            raise DataError(
                f"the image {path} has more than {_MAX_SEGMENTS:,} segments, or {_MAX_FILL_BYTES:,} bytes between "
                "them\n  fix: save it again with another program"
            )
        if marker == _END_OF_IMAGE or scans > MAX_SCANS:
            break
        if marker in _START_OF_FRAME and not width * height and start + 8 <= len(content):
            height, width, components = struct.unpack_from(">HHB", content, start + 3)
            progressive = marker in _PROGRESSIVE
        if marker == _START_OF_SCAN:
            scans += 1
            if not progressive and content[start + 2 : start + 3] == bytes([components]):
                break  # decoders stop after a scan with all components
        has_length = marker not in (_TEMPORARY, _START_OF_IMAGE)
        offset = start + (max(2, int.from_bytes(content[start : start + 2], "big")) if has_length else 0)
        if marker == _METADATA:
            metadata.append(content[start + 2 : offset])
    return JpegHeader(width, height, scans, metadata)


def check_jpeg(content: bytes | bytearray, path: str) -> JpegHeader:
    """Check that decoding a JPEG file takes no unusual time for its size, and return its header.

    Raises:
        DataError: if not, see ``MAX_SCANS`` and ``jpeg_header``.
    """
    header = jpeg_header(content, path)
    width, height, scans, _ = header
    if scans > MAX_SCANS or (scans > 1 and scans * width * height > _MAX_SCANNED_PIXELS):
        raise DataError(
            f"the image {path} has {width} x {height} pixels and at least {scans} scans; at most {MAX_SCANS} scans and "
            f"{_MAX_SCANNED_PIXELS:,} pixels in all scans are decoded\n"
            "  fix: save it as a JPEG file that is not progressive"
        )
    return header


def _luma(image: Tensor) -> Tensor:
    """Convert (3, H, W) uint8 RGB to (1, H, W) uint8 luma."""
    total = torch.full(image.shape[1:], 0.5, device=image.device)
    for weight, channel in zip(_LUMA_WEIGHTS, image, strict=True):
        total += weight * channel
    return total.to(torch.uint8)[None]


def with_channels(image: Tensor, channels: int) -> Tensor:
    """Convert an image to 1, 3 or 4 channels, with the same pixel values as ``read_image``.

    Args:
        image: (C, H, W) uint8: grayscale, RGB or RGBA.
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
    """Open an image with PIL, restricted to pixel formats whose decoders run no external program.

    ``source`` is a path as in ``read_image``, or an open file. PIL's warning about large images is suppressed, because
    ``check_pixels`` limits the number of pixels.

    Raises:
        DataError: see ``check_jpeg``.
    """
    name = os.fspath(source) if isinstance(source, str | os.PathLike) else "(bytes)"
    if isinstance(source, str | os.PathLike):
        source = io.BytesIO(read_bytes(source))
    start = source.tell()
    if source.read(len(JPEG_START)) == JPEG_START:
        check_jpeg(JPEG_START + source.read(), name)
    source.seek(start)
    Image.init()  # registers the formats
    # Warning filters are global: two threads must not replace and restore them concurrently.
    with _WARNINGS_LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            return Image.open(source, formats=[name for name in _FORMATS if name in Image.OPEN])
        except UnidentifiedImageError as error:
            raise (_HeicError() if _is_heic(source) else error) from error


class _HeicError(UnidentifiedImageError):
    def __init__(self) -> None:
        super().__init__("it is a HEIC image, as of an iPhone, which is not supported; convert it to JPEG")


def _is_heic(source: Any) -> bool:
    """Return True if the header of a file is that of HEIF with the video codec HEVC or of unknown kind."""
    source.seek(0)
    header = source.read(12)
    return header[4:8] == b"ftyp" and header[8:12] in _HEIC_BRANDS


def image_from_pil(image: Image.Image, channels: int = 3, *, bit_depth: int | None = BIT_DEPTH) -> Tensor:
    """Convert a PIL image to a tensor that equals the result of ``read_image`` on the image file.

    Pixel values from a JPEG file may differ if ``read_image`` is called with ``least_size``, because a PIL image is
    always decoded at full size.

    Args:
        image: image in any mode except F (32-bit floats). Its EXIF orientation is applied.
        channels: 1 for grayscale, 3 for RGB, 4 for RGBA. Default 3.
        bit_depth: see ``read_image``.

    Returns:
        (channels, H, W) uint8.

    Raises:
        DataError: if the mode is F, a value is outside the range of ``bit_depth``, or the image file cannot be decoded.
    """
    name = (image.filename if isinstance(image, ImageFile.ImageFile) else "") or "(a PIL image)"
    # PIL decodes the file and its EXIF data at first use, which is not thread-safe.
    with _PIL_LOCK, _pil_errors(os.fsdecode(name)):
        pixels = _pil_pixels(image, "RGBA" if channels == 4 else "RGB", os.fsdecode(name), bit_depth)
    return _luma(pixels) if channels == 1 else pixels


def _decode_with_pil(
    content: bytearray,
    path: str,
    mode: str,
    max_pixels: int,
    least_size: tuple[int, int] | None = None,
    bit_depth: int | None = BIT_DEPTH,
) -> Tensor:
    with _pil_errors(path), open_with_pil(io.BytesIO(content)) as image:
        check_pixels(path, *image.size, max_pixels)  # type: ignore[call-arg]
        if least_size is not None:
            sides = least_size if _orientation(image) in _TURNED else least_size[::-1]
            scale = _largest_scale(*image.size)
            width, height = (max(side // scale, least) for side, least in zip(image.size, sides, strict=True))
            image.draft(None, (width, height))
        return _pil_pixels(image, mode, path, bit_depth)


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation; 1 is upright."""
    return image.getexif().get(ExifTags.Base.Orientation, 1)


@contextmanager
def _pil_errors(path: str) -> Iterator[None]:
    """Convert errors that PIL raises for the image ``path`` to DataError."""
    try:
        yield
    except DataError:
        raise
    except Image.DecompressionBombError as error:
        raise DataError(
            f"the image {path} has more than {LARGEST_PIXELS} pixels\n  fix: use a smaller copy of the image"
        ) from error
    # PIL's plugins raise many exception types on corrupt files (OSError, SyntaxError, struct.error, ...).
    except Exception as error:
        raise DataError(f"cannot read the image {path}: {cause_of(error)}") from error


def cause_of(error: Exception) -> str:
    """Return the cause of an error that occurred while an image was read, in one line without the path."""
    if isinstance(error, UnidentifiedImageError) and not isinstance(error, _HeicError):
        return "cannot identify the image format"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def format_fault(path: str) -> str:
    """Return the cause if the first bytes of a file identify none of the supported image formats; otherwise ""."""
    with open(path, "rb") as file:
        if file.read(len(JPEG_START)) == JPEG_START:
            return ""  # much faster than PIL
    try:
        open_with_pil(path).close()
    except UnidentifiedImageError as error:
        return cause_of(error)
    except Exception:  # PIL's plugins raise many exception types; reading the image raises them again
        pass
    return ""


def _pil_pixels(image: Image.Image, mode: str, path: str, bit_depth: int | None) -> Tensor:
    """Convert a PIL image to (C, H, W) uint8 pixels in ``mode``, and apply its EXIF orientation.

    Raises:
        ValueError: if the image has float pixels.
        DataError: if a value is outside the range of ``bit_depth``.
    """
    check_mode(image)
    # PIL reads the upper 8 bits of colors of 16 bits.
    tiles = image.tile if isinstance(image, ImageFile.ImageFile) else ()
    is_reduced = not image.mode.startswith("I") and any(";16" in str(tile[3]) for tile in tiles)
    if is_reduced and bit_depth not in (None, 16):
        raise DataError(
            f"the image {path} has colors of 16 bits, of which the upper 8 are read; INPUT.BIT_DEPTH is {bit_depth}\n"
            "  fix: save the image with 8 bits, or as grayscale, or set INPUT.BIT_DEPTH to 16"
        )
    image.load()
    if _orientation(image) != 1:  # exif_transpose would copy the image
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # PIL would clip 16-bit values at 255
        image = Image.fromarray(reduce_bits(np.asarray(image), path, bit_depth))
    elif is_reduced and bit_depth is not None:
        _warn_if_dark(256 * max(band[1] for band in image.getextrema()[:3]), path, bit_depth, "save it with 8 bits")  # type: ignore[index]
    image = expand_palette(image)
    pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


def expand_palette(image: Image.Image) -> Image.Image:
    """Convert an image whose palette has an alpha value per color to RGBA, because PIL warns if it ignores them."""
    several = image.mode == "P" and isinstance(image.info.get("transparency"), bytes)
    return image.convert("RGBA") if several else image


def reduce_bits(values: np.ndarray, path: str, bit_depth: int | None = BIT_DEPTH) -> np.ndarray:
    """Reduce integers to 8 bits; a warning names the first file whose values are all in a small part of the range.

    Args:
        values: integers of any type.
        path: image file, for messages.
        bit_depth: see ``read_image``.

    Returns:
        Uint8, of the same shape.

    Raises:
        DataError: if a value is not in 0..2**bit_depth - 1.
    """
    values = values.astype(np.int64)
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    if bit_depth is None:
        low = int(values.min()) if values.size else 0
        return np.rint(255 * ((values - low) / max(high - low, 1))).astype(np.uint8)
    if low < 0 or high >= 2**bit_depth:
        fix = f"set INPUT.BIT_DEPTH to {high.bit_length()}" if low >= 0 and high < 2**32 else "save it with 8 bits"
        raise DataError(
            f"the image {path} has values from {low} to {high}, outside 0..{2**bit_depth - 1} of INPUT.BIT_DEPTH "
            f"{bit_depth}\n  fix: {fix}"
        )
    bits = max(high.bit_length(), 8)
    _warn_if_dark(high, path, bit_depth, f"set INPUT.BIT_DEPTH to {bits} if {bits} bits are those of the camera")
    return (values >> (bit_depth - 8)).astype(np.uint8)


def _warn_if_dark(high: int, path: str, bit_depth: int, fix: str) -> None:
    """Log a warning, once in a process, if the largest value needs at least two bits less than ``bit_depth``."""
    if 0 < high < 2 ** (bit_depth - 2) and bit_depth > 8 and not _warned_of_bits.is_set():
        _warned_of_bits.set()
        logger.warning(
            "the image %s has values up to %d, a small part of the %d bits of INPUT.BIT_DEPTH, so it is dark; other "
            "images of this kind are not reported\n  fix: %s",
            *(path, high, bit_depth, fix),
        )
