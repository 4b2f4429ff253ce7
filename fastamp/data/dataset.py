"""From image items to batches of tensors."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch.utils.data import Dataset

from fastamp.data.datasets.base import ImageItem
from fastamp.data.decode import read_image
from fastamp.data.samplers import SampleKey
from fastamp.data.transforms import Transforms
from fastamp.utils.errors import DataError


class ReidDataset(Dataset):
    """Images with their identity and camera, fetched by the batch.

    Args:
        items: the images.
        transforms: what happens to them.
        relabel: number the identities, and the cameras, from 0 in sorted order, as a classifier needs it; else they
            stay as they are, and must be integers.

    Attributes:
        labels, camids: one integer for each item.
        num_classes: number of different identities.

    Raises:
        DataError: not relabelled, and an identity or camera is no integer.
    """

    def __init__(self, items: Sequence[ImageItem], transforms: Transforms, *, relabel: bool) -> None:
        self.items = list(items)
        self.transforms = transforms
        pids, camids = [item.pid for item in self.items], [item.camid for item in self.items]
        self.num_classes = len(set(pids))
        if relabel:
            self.labels, self.camids = _ranks(pids), _ranks(camids)
            return
        for item in self.items:
            if not (isinstance(item.pid, Integral) and isinstance(item.camid, Integral)):
                raise DataError(
                    f"query and gallery need integers for identity and camera, but {item.path} has identity "
                    f"{item.pid!r} and camera {item.camid!r}"
                )
        self.labels, self.camids = [int(pid) for pid in pids], [int(camid) for camid in camids]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return what a batch holds for one image, augmented as at the start of epoch 0."""
        return {name: values[0] for name, values in self.__getitems__([(0, index, index)]).items()}

    def __getitems__(self, keys: Sequence[SampleKey]) -> dict[str, Any]:
        """Return the batch of these (epoch, position, index) keys.

        Returns:
            ``images``: (B, C, H, W) uint8; ``targets``, ``camids``, ``viewids``, ``indices`` (in this data set): (B,)
            int64; ``img_paths``: list of str.

        Raises:
            DataError: an image cannot be read.
        """
        epochs, positions, indices = zip(*keys, strict=True)
        items = [self.items[index] for index in indices]
        size, channels = self.transforms.resize.size, self.transforms.channels
        images = torch.empty(len(items), channels, *size, dtype=torch.uint8)
        for image, item in zip(images, items, strict=True):
            image.copy_(self.transforms.resize(read_image(item.path, channels)))
        augment = self.transforms.augment
        return {
            "images": augment.apply(images, augment.draw(epochs, positions, size)),
            "targets": torch.tensor([self.labels[index] for index in indices]),
            "camids": torch.tensor([self.camids[index] for index in indices]),
            "viewids": torch.tensor([item.viewid for item in items]),
            "indices": torch.tensor(indices),
            "img_paths": [item.path for item in items],
        }


def _ranks(names: Sequence[int | str]) -> list[int]:
    """Return each name's place among the different names: numbers first, then strings, which sort as text."""
    order = sorted(set(names), key=lambda name: (isinstance(name, str), name))
    rank_of = {name: rank for rank, name in enumerate(order)}
    return [rank_of[name] for name in names]
