"""Decode image files to uint8 RGB tensors."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.io import ImageReadMode
from torchvision.io import decode_image as torchvision_decode

from fastamp.utils.errors import DataError


def read_image(path: str) -> Tensor:
    """Read an image, upright as its EXIF orientation says; grey becomes RGB, transparency is dropped.

    torchvision decodes; PIL only what torchvision cannot. Of 16-bit channels the upper 8 bits are kept, of animations
    the first picture.

    Returns:
        (3, H, W) uint8.

    Raises:
        DataError: the file is missing, cannot be read, or is damaged; names the file and the cause.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read the image {path}: {error.strerror or error}") from error
    if not data:
        raise DataError(f"cannot read the image {path}: the file is empty")
    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    try:
        image = torchvision_decode(encoded, mode=ImageReadMode.RGB, apply_exif_orientation=True)
    except RuntimeError as error:
        return _read_with_pil(path, torchvision_error=error)
    if image.dim() == 4:
        image = image[0]
    if image.dtype == torch.uint16:
        # Shifts are not implemented for uint16.
        image = image.to(torch.int32) >> 8
    return image.to(torch.uint8)


def _read_with_pil(path: str, torchvision_error: RuntimeError) -> Tensor:
    try:
        with Image.open(path) as image:
            pixels = np.asarray(_to_rgb(ImageOps.exif_transpose(image)))
    # On damaged files PIL's plugins raise nearly anything (OSError, SyntaxError, struct.error, ...).
    except Exception as error:
        causes = f"{_first_line(error)} (torchvision: {_first_line(torchvision_error)})"
        raise DataError(f"cannot read the image {path}: {causes}") from error
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        # PIL would clip 16-bit grey at 255.
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8))
    return image.convert("RGB")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
