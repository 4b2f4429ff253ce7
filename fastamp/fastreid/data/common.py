"""FastReID's map-style dataset of images."""

from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset

from fastamp.data.datasets.base import number_cameras
from fastamp.data.datasets.items import ImageItem
from fastamp.data.decode import box_inside
from fastamp.fastreid.data.data_utils import read_image


class CommDataset(Dataset):
    """Map-style dataset of images with identities and cameras.

    Args:
        img_items: ``(path, pid, camid)`` of each image, or ``ImageItem``.
        transform: function of a PIL image, e.g. the result of ``build_transforms``. Default None: the item contains the
            PIL image.
        relabel: map identities and cameras to 0..N-1 in sorted order. Default True.

    Attributes:
        pid_dict, cam_dict: identity or camera -> number.
        num_classes, num_cameras: numbers of identities and cameras.
    """

    def __init__(self, img_items: Sequence[tuple], transform: Any = None, relabel: bool = True) -> None:
        self.img_items, self.transform, self.relabel = img_items, transform, relabel
        self.pid_dict, self.cam_dict = (number_cameras(item[column] for item in img_items) for column in (1, 2))
        self.pids, self.cams = [*self.pid_dict], [*self.cam_dict]

    def __len__(self) -> int:
        return len(self.img_items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Load an image: ``images``, ``targets`` and ``camids`` (int), and ``img_paths`` (str)."""
        item = ImageItem(*self.img_items[index])
        path, pid, camid = item[:3]
        image = read_image(path)
        if item.box is not None:
            image = image.crop(box_inside(item.box, path, width=image.width, height=image.height))
        if self.transform is not None:
            image = self.transform(image)
        if self.relabel:
            pid, camid = self.pid_dict[pid], self.cam_dict[camid]
        return {"images": image, "targets": pid, "camids": camid, "img_paths": path}

    @property
    def items(self) -> list[ImageItem]:
        """The images as in datasets of fastamp; those without identity and camera are omitted."""
        return [ImageItem(*item[:3]) for item in self.img_items if len(item) >= 3]

    @property
    def num_classes(self) -> int:
        """Number of identities."""
        return len(self.pids)

    @property
    def num_cameras(self) -> int:
        """Number of cameras."""
        return len(self.cams)
