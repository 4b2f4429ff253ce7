"""Decode image files to uint8 RGB tensors."""

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
        encoded = torch.from_numpy(np.fromfile(path, dtype=np.uint8))
    except OSError as error:
        raise DataError(f"cannot read the image {path}: {error.strerror or error}") from error
    if not len(encoded):
        raise DataError(f"cannot read the image {path}: the file is empty")
    if torchvision_decode is None:
        return _read_with_pil(path)
    try:
        image = torchvision_decode(encoded, mode=ImageReadMode.RGB, apply_exif_orientation=True)
    except RuntimeError:
        return _read_with_pil(path)
    if image.dim() == 4:
        image = image[0]
    if image.dtype == torch.uint16:
        # Shifts are not implemented for uint16.
        image = image.to(torch.int32) >> 8
    return image.to(torch.uint8)


def _read_with_pil(path: str) -> Tensor:
    try:
        with Image.open(path) as image:
            pixels = np.asarray(_to_rgb(ImageOps.exif_transpose(image)))
    # On damaged files PIL's plugins raise nearly anything (OSError, SyntaxError, struct.error, ...).
    except Exception as error:
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"cannot read the image {path}: {cause}") from error
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        # PIL would clip 16-bit grey at 255.
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8))
    return image.convert("RGB")
