"""Decode image files to uint8 tensors: grey, RGB or RGBA."""

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from fastamp.utils.errors import DataError

try:
    from torchvision.io import ImageReadMode
    from torchvision.io import decode_image as torchvision_decode
except ImportError:
    # torchvision 0.29 announces that a later version will have no decoders.
    torchvision_decode = None

# PIL's fixed-point luma (ITU-R BT.601): all sums are exact in float32, so that any machine rounds them alike.
_LUMA_SHARES = (19595 / 2**16, 38470 / 2**16, 7471 / 2**16)


def read_image(path: str, channels: int = 3, *, box: tuple[int, int, int, int] | None = None) -> Tensor:
    """Read an image, upright as its EXIF orientation says.

    Grey files become RGB and RGB files grey as asked. A fourth channel is kept or dropped, never blended, and is 255
    where a file has none. Of 16-bit channels the upper 8 bits are kept, of animations the first picture.

    torchvision decodes, and PIL what torchvision cannot. Grey is made of the decoded RGB, as PIL does it: torchvision's
    own would, in a PNG file that states its gamma, be that of linear light.

    Args:
        path: the file.
        channels: 1 for grey, 3 for RGB, 4 for RGBA.
        box: left, top, right and bottom of the part that is taken, in pixels of the upright image, the last two not
            included; None is all of it.

    Returns:
        (channels, H, W) uint8.

    Raises:
        DataError: the file is missing, cannot be read, is damaged, or has no such part; names the file and the cause.
    """
    image = _read_whole(path, channels)
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


def _read_whole(path: str, channels: int) -> Tensor:
    try:
        with open(path, "rb", buffering=0) as file:
            content = bytearray(file.read())
    except OSError as error:
        raise DataError(f"cannot read the image {path}: {error.strerror or error}") from error
    if not content:
        raise DataError(f"cannot read the image {path}: the file is empty")
    if channels == 4:
        # torchvision (0.29) scrambles palette files in this mode, and makes others transparent that are not.
        return _read_with_pil(path, "RGBA")
    image = _read_rgb(path, content)
    return _luma(image) if channels == 1 else image


def _read_rgb(path: str, content: bytearray) -> Tensor:
    """Return (3, H, W) uint8 of a file's content."""
    # torchvision (0.29) does not turn WebP files upright.
    if torchvision_decode is None or content[8:12] == b"WEBP":
        return _read_with_pil(path, "RGB")
    encoded = torch.frombuffer(content, dtype=torch.uint8)
    try:
        image = torchvision_decode(encoded, mode=ImageReadMode.RGB, apply_exif_orientation=True)
    except RuntimeError:
        return _read_with_pil(path, "RGB")
    if image.dim() == 4:
        image = image[0]
    if image.dtype == torch.uint16:
        # Shifts are not implemented for uint16.
        image = image.to(torch.int32) >> 8
    return image.to(torch.uint8)


def _luma(image: Tensor) -> Tensor:
    """Return (1, H, W) uint8 of (3, H, W) uint8 RGB."""
    red, green, blue = (share * channel for share, channel in zip(_LUMA_SHARES, image.float(), strict=True))
    return (red + green + blue + 0.5).to(torch.uint8)[None]


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
    colours = image[:3] if len(image) > 1 else image.expand(3, -1, -1)
    if channels == 1:
        return _luma(colours)
    return colours if channels == 3 else torch.cat((colours, torch.full_like(colours[:1], 255)))


def _read_with_pil(path: str, mode: str) -> Tensor:
    try:
        with Image.open(path) as image:
            if image.mode == "F":
                raise DataError(
                    f"cannot read the image {path}: its pixels are fractions, of a range that it does not say"
                )
            pixels = np.asarray(_convert(ImageOps.exif_transpose(image), mode))
    except DataError:
        raise
    # On damaged files PIL's plugins raise nearly anything (OSError, SyntaxError, struct.error, ...).
    except Exception as error:
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"cannot read the image {path}: {cause}") from error
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


def _convert(image: Image.Image, mode: str) -> Image.Image:
    if image.mode.startswith("I"):
        # PIL would clip 16-bit grey at 255.
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8))
    return image.convert(mode)
