"""Conversion of input images: paths, contents of files, PIL images, arrays, tensors, and boxes in a frame."""

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from fastamp.data.boxes import are_normalized, clip_box, normalized_error, warn_of_small_boxes
from fastamp.data.decode import decode_image, image_from_pil, read_image, with_channels
from fastamp.data.transforms import Transforms
from fastamp.utils.errors import DataError, check_choice

Image = str | os.PathLike[str] | bytes | bytearray | memoryview | IO[bytes] | PIL.Image.Image | np.ndarray | Tensor
Images = Image | Sequence[Image]
Boxes = Sequence[Sequence[float]] | np.ndarray | Tensor
COLORS = ("rgb", "bgr")


def decode(image: Image, color: str, transforms: Transforms, least_size: tuple[int, int] | None = None) -> Tensor:
    """Decode an image to (C, H, W) uint8.

    Args:
        image: see ``Predictor.features``.
        color: channel order of arrays and tensors, one of ``COLORS``.
        transforms: number of channels C and limits of the images of a model.
        least_size: see ``read_image``. Default: None.

    Raises:
        DataError: if the image cannot be read, or has a wrong shape or dtype.
    """
    channels = transforms.channels
    if isinstance(image, (str, os.PathLike)):
        if os.path.isdir(image):
            raise DataError(
                f"expected an image, got the folder {os.fspath(image)}.\n"
                "  fix: pass the files, e.g. sorted(pathlib.Path(folder).glob('*.jpg'))"
            )
        return read_image(os.fspath(image), channels, least_size=least_size, **transforms.decoding)
    if isinstance(image, (bytes, bytearray, memoryview)):
        return decode_image(bytes(image), channels, least_size=least_size, **transforms.decoding)
    if isinstance(image, PIL.Image.Image):
        return image_from_pil(image, channels, bit_depth=transforms.bit_depth)
    return with_channels(_as_tensor(image, color), channels)


def has_pixels(image: Image) -> bool:
    """Return False for a PIL image, an array or a tensor of size 0, such as a box outside its frame.

    Raises:
        DataError: if an array or a tensor of size 0 has a wrong shape or dtype.
    """
    if isinstance(image, (np.ndarray, Tensor)) and 0 in image.shape:
        _check_layout(image)
        return False
    return not isinstance(image, PIL.Image.Image) or 0 not in image.size


def list_or_crop(images: Images, boxes: Any, color: str, transforms: Transforms) -> tuple[list[Any], str]:
    """Return a list of the images, or of boxes in the only image, see ``crop_boxes``; and their channel order.

    Args:
        images: see ``as_list``; with ``boxes``, one image, the frame.
        boxes: see ``as_boxes``; None for full images.
        color: channel order of arrays and tensors.
        transforms: see ``decode``, for frames that are neither.

    Raises:
        ConfigError: if the channel order is unknown.
        DataError: if there is not exactly one frame, or the boxes are normalized; see also ``as_list``, ``as_boxes``
            and ``crop_boxes``.
    """
    check_choice("color", color, COLORS)
    frames = as_list(images)
    if boxes is None:
        return frames, color
    corners = as_boxes(boxes)
    if len(frames) != 1:
        raise DataError(
            f"boxes require exactly one image, the frame; got {len(frames)} images.\n"
            "  fix: extract the features of one frame per call"
        )
    if are_normalized(corners):
        raise normalized_error("boxes")
    warn_of_small_boxes(corners, "boxes")
    frame = frames[0]
    if not isinstance(frame, (np.ndarray, Tensor)):
        frame, color = decode(frame, color, transforms), "rgb"
    return list(crop_boxes(frame, corners)), color


def crop_boxes(frame: np.ndarray | Tensor, corners: np.ndarray) -> list[np.ndarray | Tensor]:
    """Crop boxes from a frame; a box outside the frame results in an image without pixels.

    The crops have the type of the frame, so that callers can convert only the crops instead of the entire frame.

    Args:
        frame: uint8 array (H, W[, C]) or tensor (C, H, W).
        corners: (N, 4) left, top, right and bottom in pixels.

    Returns:
        List of N crops, which are views of the frame.

    Raises:
        DataError: if the frame has a wrong shape or dtype.
    """
    _check_layout(frame)
    if isinstance(frame, Tensor):
        frame = frame.movedim(0, -1)
    height, width = frame.shape[:2]
    # Faster than in NumPy for the few boxes of a frame.
    clipped = [clip_box(box, width, height) or (0, 0, 0, 0) for box in corners.tolist()]
    crops = [frame[top:bottom, left:right] for left, top, right, bottom in clipped]
    return [crop.movedim(-1, 0) if isinstance(crop, Tensor) else crop for crop in crops]


def as_list(images: Images) -> list[Image]:
    """Convert one image, a batch or a sequence of images to a list; raise DataError if it is empty.

    Open files are read here, because threads decode the images.
    """
    given: Any = images
    texts = isinstance(given, np.ndarray) and given.dtype.kind == "U"
    if isinstance(given, (np.ndarray, Tensor)):
        is_one = given.ndim != 4 and not texts
    else:
        is_one = isinstance(given, (str, os.PathLike, bytes, bytearray, memoryview, Mapping)) or hasattr(given, "read")
    if is_one or not isinstance(given, Iterable):
        given = [given]
    content: list[Image] = [_content_of(image) if hasattr(image, "read") else image for image in given]
    if not content:
        raise DataError(
            f"expected at least one image, got an empty {type(given).__name__}.\n  fix: pass at least one image"
        )
    return content


def _content_of(file: Any) -> bytes:
    """Return the content of an open file from its start, as PIL; raise DataError if it is open as text."""
    if hasattr(file, "seekable") and file.seekable():
        file.seek(0)
    content = file.read()
    if not isinstance(content, bytes):
        name = file.name if isinstance(file, io.TextIOWrapper) else type(file).__name__
        raise DataError(f"{name} is open as text.\n  fix: open it as bytes, with the mode 'rb'")
    return content


def as_boxes(boxes: Any) -> np.ndarray:
    """Convert boxes to (N, 4) float64."""
    try:
        if isinstance(boxes, (list, tuple)):
            boxes = [box.detach().cpu().tolist() if isinstance(box, Tensor) else box for box in boxes]
        corners = np.asarray(boxes.detach().cpu() if isinstance(boxes, Tensor) else boxes, dtype=np.float64)
        if corners.size == 0:
            return corners.reshape(0, 4)
        if corners.ndim != 2 or corners.shape[1] != 4:
            raise ValueError(f"got shape {corners.shape}")
    except (TypeError, ValueError) as error:
        raise DataError(
            f"boxes must be an (N, 4) array of numbers: {error}.\n"
            "  fix: pass left, top, right and bottom in pixels for each box"
        ) from error
    return corners


def _check_layout(image: Any) -> None:
    """Raise DataError unless an image is a gray, RGB or RGBA uint8 array (H, W[, C]) or tensor (C, H, W)."""
    if isinstance(image, Tensor):
        layout, convert, dimensions, axis = "(C, H, W)", "to(torch.uint8)", {3}, 0
    elif isinstance(image, np.ndarray):
        layout, convert, dimensions, axis = "(H, W) or (H, W, C)", "astype('uint8')", {2, 3}, 2
    else:
        fix = "pass a file name, or a uint8 array (H, W, 3)"
        if hasattr(image, "__array_interface__"):
            fix = "convert it with numpy.asarray(image)"
        raise DataError(
            f"an image must be a path, PIL image, array or tensor; got {type(image).__name__}.\n  fix: {fix}"
        )
    shape, dtype = tuple(image.shape), str(image.dtype).removeprefix("torch.")
    if dtype != "uint8" or len(shape) not in dimensions or not set(shape[axis : axis + 1]) <= {1, 3, 4}:
        scale = f"; for values in 0..1: (255 * image).round().{convert}" if "float" in dtype else ""
        raise DataError(
            f"an image must be uint8 {layout} with 1, 3 or 4 channels; got {dtype} {shape}.\n"
            f"  fix: convert the image to integers in 0..255, dtype uint8, and shape {layout}{scale}"
        )


def _as_tensor(image: Any, color: str) -> Tensor:
    """Convert a gray, RGB or RGBA array (H, W[, C]) or tensor (C, H, W) to a (C, H, W) uint8 tensor."""
    _check_layout(image)
    if isinstance(image, Tensor):
        tensor = image.cpu()
    else:
        # Copy read-only arrays, e.g. from numpy.asarray(pil_image): PyTorch warns if it shares their memory.
        array = np.ascontiguousarray(image)
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        tensor = tensor[None] if tensor.ndim == 2 else tensor.movedim(-1, 0)
    if color == "bgr" and len(tensor) > 1:
        tensor = torch.cat((tensor[:3].flip(0), tensor[3:]))
    return tensor
