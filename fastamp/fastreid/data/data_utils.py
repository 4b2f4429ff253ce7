"""FastReID's function to read an image."""

import numpy as np
import PIL.Image
import PIL.ImageOps

from fastamp.data.decode import expand_palette, open_with_pil
from fastamp.utils.files import expand


def read_image(file_name: str, format: str | None = None) -> PIL.Image.Image:
    """Read an image file as a PIL image, rotated according to its EXIF orientation.

    Args:
        file_name: image file.
        format: PIL mode, or ``"BGR"`` for an RGB image with swapped channels. Default None: the mode of the file, but
            RGB for grayscale images.

    Raises:
        OSError: if the file cannot be read or is not an image.
        DataError: if decoding it would take unusually long.
    """
    with open_with_pil(expand(file_name)) as image:
        image = PIL.ImageOps.exif_transpose(image)
        if format is None:
            return image.convert("RGB") if image.mode in ("L", "1") else image.copy()
        image = expand_palette(image).convert("RGB" if format == "BGR" else format)
    return PIL.Image.fromarray(np.asarray(image)[:, :, ::-1]) if format == "BGR" else image
