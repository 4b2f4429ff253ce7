"""Thumbnails of dataset images, for contact sheets and reports."""

import base64
import io
from collections.abc import Sequence

from PIL import Image, ImageOps

from fastamp.data.datasets.base import ImageItem
from fastamp.data.decode import LARGEST_PIXELS, read_image
from fastamp.utils.errors import DataError

SIZE = (72, 144)
_QUALITY = 78


def thumbnail(item: ImageItem, size: tuple[int, int] = SIZE) -> Image.Image | None:
    """Read an image as RGB, resized to fit within ``size`` (width, height); None if it cannot be read."""
    try:
        least_size = (2 * max(size),) * 2
        pixels = read_image(item.path, box=item.box, max_pixels=LARGEST_PIXELS, least_size=least_size, bit_depth=None)
    except DataError:
        return None
    return ImageOps.contain(Image.fromarray(pixels.permute(1, 2, 0).numpy()), size)


def grid(rows: Sequence[Sequence[Image.Image]], size: tuple[int, int] = SIZE) -> Image.Image:
    """Draw rows of pictures, at most ``size`` (width, height) large, as cells of a white RGB image."""
    width, height = size
    sheet = Image.new("RGB", (max(map(len, rows)) * width, len(rows) * height), "white")
    for row, pictures in enumerate(rows):
        for column, picture in enumerate(pictures):
            sheet.paste(picture, (column * width, row * height))
    return sheet


def data_address(picture: Image.Image) -> str:
    """Encode an image as a ``data:`` URL of a JPEG."""
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=_QUALITY, optimize=True)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
