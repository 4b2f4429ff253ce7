"""Images in the forms that callers have: paths, PIL images, arrays and tensors, and boxes of a frame."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from fastamp.data.decode import image_from_pil, read_image, with_channels
from fastamp.utils.errors import DataError

Image = str | os.PathLike[str] | PIL.Image.Image | np.ndarray | Tensor
COLORS = ("rgb", "bgr")


def decode(image: Image, color: str, channels: int, *, max_pixels: int, least_side: int | None = None) -> Tensor:
    """Return an image as (C, H, W) uint8.

    Args:
        image: see ``Predictor.features``.
        color: channel order of arrays and tensors, one of ``COLORS``.
        channels: C, 1, 3 or 4.
        max_pixels, least_side: of files, see ``read_image``.

    Raises:
        DataError: the image cannot be read, or has a wrong shape or dtype.
    """
    if isinstance(image, (str, os.PathLike)):
        return read_image(os.fspath(image), channels, max_pixels=max_pixels, least_side=least_side)
    if isinstance(image, PIL.Image.Image):
        return image_from_pil(image, channels)
    return with_channels(_as_tensor(image, color), channels)


def crop_boxes(frame: np.ndarray | Tensor, corners: np.ndarray) -> list[np.ndarray] | list[Tensor]:
    """Return the boxes of a frame, without pixels where a box has no part in it.

    Arrays and tensors stay as they are, so that not the whole frame is converted, but each box.

    Args:
        frame: uint8 array (H, W[, C]) or tensor (C, H, W).
        corners: (N, 4) left, top, right and bottom in pixels.

    Raises:
        DataError: the frame has a wrong shape or dtype.
    """
    _check_layout(frame)
    if isinstance(frame, Tensor):
        frame = frame.movedim(0, -1)
    height, width = frame.shape[:2]
    corners = np.clip(np.rint(corners), 0, (width, height, width, height))
    corners = np.where(np.isnan(corners).any(axis=1, keepdims=True), 0, corners).astype(np.int64)
    crops = [frame[top:bottom, left:right] for left, top, right, bottom in corners.tolist()]
    return [crop.movedim(-1, 0) if isinstance(crop, Tensor) else crop for crop in crops]


def as_list(images: Image | Sequence[Image]) -> list[Image]:
    """Return one or several images as a list."""
    texts = isinstance(images, np.ndarray) and images.dtype.kind == "U"
    if isinstance(images, (np.ndarray, Tensor)) and not texts:
        images = images if images.ndim == 4 else [images]
    elif isinstance(images, (str, os.PathLike)) or not isinstance(images, Iterable):
        images = [images]
    images = list(images)
    if not images:
        raise DataError("there are no images to compute features of")
    return images


def as_one(image: Image) -> list[Image]:
    """Return an image as a list of one."""
    images = as_list(image)
    if len(images) != 1:
        raise DataError(f"a comparison is of two images; one of the two given is {len(images)} images")
    return images


def as_boxes(boxes: Any) -> np.ndarray:
    """Return (N, 4) float64 of boxes in any form."""
    try:
        corners = np.asarray(boxes.cpu() if isinstance(boxes, Tensor) else boxes, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"boxes are not (N, 4) numbers: {error}") from error
    if corners.size == 0:
        return corners.reshape(0, 4)
    if corners.ndim != 2 or corners.shape[1] != 4:
        raise DataError(f"boxes of shape {corners.shape}; expected (N, 4): left, top, right, bottom")
    return corners


def _check_layout(image: Any) -> None:
    """Check that an image is a uint8 array (H, W[, C]) or tensor (C, H, W), gray, RGB or RGBA.

    Raises:
        DataError: it is not.
    """
    if not isinstance(image, (np.ndarray, Tensor)):
        hint = "; numpy.asarray(image) makes an array of it" if hasattr(image, "__array_interface__") else ""
        raise DataError(f"an image is a path, a PIL image, an array or a tensor, not {type(image).__name__}{hint}")
    dtype, shape = str(image.dtype).removeprefix("torch."), tuple(image.shape)
    channels = shape[0 if isinstance(image, Tensor) else -1] if len(shape) == 3 else 0
    gray = len(shape) == 2 and not isinstance(image, Tensor)
    if dtype != "uint8" or not (gray or channels in (1, 3, 4)):
        layout = "(C, H, W)" if isinstance(image, Tensor) else "(H, W) or (H, W, C)"
        raise DataError(f"an image of shape {shape} and dtype {dtype}; expected uint8 {layout} with 1, 3 or 4 channels")


def _as_tensor(image: np.ndarray | Tensor, color: str) -> Tensor:
    """Return (C, H, W) uint8, gray, RGB or RGBA, of an array (H, W[, C]) or a tensor (C, H, W)."""
    _check_layout(image)
    if isinstance(image, Tensor):
        tensor = image.cpu()
    else:
        # A read-only array, as numpy.asarray(picture) returns, is copied: PyTorch warns of sharing its memory.
        tensor = torch.from_numpy(np.require(image, requirements=("C", "W")))
        tensor = tensor[None] if tensor.ndim == 2 else tensor.movedim(-1, 0)
    if color == "bgr" and len(tensor) > 1:
        tensor = torch.cat((tensor[:3].flip(0), tensor[3:]))
    return tensor
