"""FastReID's functions for images and datasets."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import torch
from torch.utils.data import Dataset, default_collate

from fastamp.data.boxes import clip_box
from fastamp.data.datasets.base import data_root
from fastamp.data.datasets.items import ImageItem
from fastamp.data.decode import open_with_pil
from fastamp.utils.errors import DataError
from fastamp.utils.files import expand


def __getattr__(name: str) -> Any:
    if name == "_root":  # the environment may change after the import
        return str(data_root())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


fast_batch_collator = default_collate


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
        image = image.convert("RGB" if format == "BGR" else format)
    return PIL.Image.fromarray(np.asarray(image)[:, :, ::-1]) if format == "BGR" else image


class ToTensor:
    """Convert an image to a float32 tensor (C, H, W) in 0..255."""

    def __call__(self, pic: PIL.Image.Image | np.ndarray | torch.Tensor) -> torch.Tensor:
        """Convert ``pic``: a PIL image, an array (H, W) or (H, W, C), or a tensor (C, H, W)."""
        if isinstance(pic, torch.Tensor):
            return pic.float()
        array = np.array(pic)
        if array.ndim == 2:
            array = array[:, :, None]
        return torch.from_numpy(np.ascontiguousarray(array.transpose(2, 0, 1))).float()

    def __repr__(self) -> str:
        return "ToTensor()"


class CommDataset(Dataset):
    """Map-style dataset of images with identities and cameras.

    Args:
        img_items: ``(path, pid, camid)`` of each image, or ``ImageItem``.
        transform: function of a PIL image, e.g. the result of ``build_transforms``. Default None: the item contains the
            PIL image.
        relabel: map identities and cameras to 0..N-1 in sorted order. Default True.

    Attributes:
        pid_dict, cam_dict: identity or camera -> number; only with ``relabel``.
        num_classes, num_cameras: numbers of identities and cameras.
    """

    def __init__(self, img_items: Sequence[tuple], transform: Any = None, relabel: bool = True) -> None:
        self.img_items, self.transform, self.relabel = img_items, transform, relabel
        self.pids, self.cams = (_sorted({item[column] for item in img_items}) for column in (1, 2))
        if relabel:
            self.pid_dict = {pid: number for number, pid in enumerate(self.pids)}
            self.cam_dict = {camera: number for number, camera in enumerate(self.cams)}

    def __len__(self) -> int:
        return len(self.img_items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Load an image: ``images``, ``targets`` and ``camids`` (int), and ``img_paths`` (str)."""
        item = ImageItem(*self.img_items[index])
        path, pid, camid = item[:3]
        image = read_image(path)
        if item.box is not None:
            box = clip_box(item.box, *image.size)
            if box is None:
                raise DataError(
                    f"box {item.box} is outside the image {path} of {image.size[0]} x {image.size[1]} pixels.\n"
                    "  fix: correct the box, (x0, y0, x1, y1) in pixels, or remove the item"
                )
            image = image.crop(box)
        if self.transform is not None:
            image = self.transform(image)
        if self.relabel:
            pid, camid = self.pid_dict[pid], self.cam_dict[camid]
        return {"images": image, "targets": pid, "camids": camid, "img_paths": path}

    @property
    def num_classes(self) -> int:
        """Number of identities."""
        return len(self.pids)

    @property
    def num_cameras(self) -> int:
        """Number of cameras."""
        return len(self.cams)


def _sorted(values: set) -> list:
    return sorted(values, key=lambda value: (isinstance(value, str), value))
