"""From image items to batches of tensors."""

import logging
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fastamp.data.cache import ImageCache
from fastamp.data.datasets.items import Column, ImageItem, PackedItems
from fastamp.data.samplers import SampleKey
from fastamp.data.transforms import Transforms
from fastamp.utils.errors import DataError
from fastamp.utils.moved import renamed_attribute

logger = logging.getLogger(__name__)


class ReidDataset(Dataset):
    """Images with their identity and camera, fetched by the batch.

    Args:
        items: the images; held in arrays.
        transforms: what happens to them.
        augment: do so here; else batches have what is to be done in ``augmentation``, for ``Transforms.augment``.
        skip_corrupt: put another image of the same identity in the place of one that cannot be read.
        relabel: number the identities from 0 in sorted order, as a classifier needs it, and the cameras too unless all
            are integers, which mean the same cameras in the test images; else both stay as they are, and must be
            integers.

    Attributes:
        items: the images, a ``PackedItems``.
        labels, camids: (N,) int64, one for each item.
        num_classes: number of different identities.
        cache: a cache with the resized images of all items, or None.

    Raises:
        DataError: not relabelled, and an identity or camera is no integer.
    """

    store = renamed_attribute("store", "cache")

    def __init__(
        self,
        items: Sequence[ImageItem],
        transforms: Transforms,
        *,
        relabel: bool,
        augment: bool = True,
        skip_corrupt: bool = False,
    ) -> None:
        self.items = PackedItems.of(items)
        self.transforms = transforms
        self.augment = augment
        self.skip_corrupt = skip_corrupt
        self.relabel = relabel
        self.cache: ImageCache | None = None
        self._warned: set[str] = set()
        pids, camids = self.items.pids, self.items.camids
        self.num_classes = len(pids.unique()[0])
        if relabel:
            self.labels = _sorted_ranks(pids)
            self.camids = camids.codes if camids.is_integer else _sorted_ranks(camids)
            return
        if not (pids.is_integer and camids.is_integer):
            wrong = next(
                item for item in self.items if not (isinstance(item.pid, Integral) and isinstance(item.camid, Integral))
            )
            raise DataError(
                f"query and gallery need integers for identity and camera, but {wrong.path} has identity "
                f"{wrong.pid!r} and camera {wrong.camid!r}"
            )
        self.labels, self.camids = pids.codes, camids.codes

    def use_cache(self, cache: ImageCache) -> None:
        """Read the resized images from ``cache`` from now on."""
        self.cache = cache

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return what a batch holds for one image, augmented as at the start of epoch 0."""
        return {name: values[0] for name, values in self.__getitems__([(0, index, index)]).items()}

    def __getitems__(self, keys: Sequence[SampleKey]) -> dict[str, Any]:
        """Return the batch of these (epoch, position, index) keys.

        Returns:
            ``images``: (B, C, H, W) uint8; ``targets``, ``camids``, ``viewids``, ``indices`` (in this data set): (B,)
            int64; ``img_paths``: list of str; ``augmentation``, where that is left to do: parameters for
            ``Transforms.augment``.

        Raises:
            DataError: an image cannot be read, or the images have different sizes.
        """
        epochs, positions, indices = zip(*keys, strict=True)
        rows = np.array(indices)
        size = self.transforms.resize.output_size
        if self.cache is not None:
            images = self.cache.images.index_select(0, torch.tensor(indices))  # 20 times as fast as indexing
        elif size is not None:
            images = torch.empty(len(rows), self.transforms.channels, *size, dtype=torch.uint8)
            for image, index in zip(images, indices, strict=True):
                image.copy_(self.read(index))
        else:
            images = self.transforms.stack([self._read_augmented(key) for key in keys])
        augment = self.transforms.augment
        parameters = augment.draw(epochs, positions, tuple(images.shape[-2:]))
        batch = {
            "images": augment.apply(images, parameters) if self.augment else images,
            "targets": torch.from_numpy(self.labels[rows]),
            "camids": torch.from_numpy(self.camids[rows]),
            "viewids": torch.from_numpy(self.items.viewids[rows]),
            "indices": torch.tensor(indices),
            "img_paths": [self.items.path(index) for index in indices],
        }
        if not self.augment:
            batch["augmentation"] = parameters
        return batch

    def read(self, index: int) -> Tensor:
        """Return (C, H, W) uint8, the resized image of an item.

        Raises:
            DataError: it cannot be read, and neither, where ``skip_corrupt`` asks for it, can another of its identity.
        """
        try:
            return self._read(index)
        except DataError as error:
            if not self.skip_corrupt:
                if not self.relabel or "fix:" in str(error):
                    raise
                raise DataError(
                    f"{error}\n  fix: restore the file or remove it from the data set; or DATALOADER.ON_CORRUPT skip"
                ) from error
            self._warn_once(str(error))
        same = np.flatnonzero(self.labels == self.labels[index])
        for number in np.roll(same, -np.searchsorted(same, index)).tolist()[1:]:
            try:
                return self._read(number)
            except DataError as error:
                self._warn_once(str(error))
        raise DataError(
            f"DATALOADER.ON_CORRUPT is skip, but no image of the identity of {self.items[index].path} can be read"
        )

    def _read_augmented(self, key: SampleKey) -> Tensor:
        """Return (C, H, W) uint8, the resized image of a key after ``augment_each``."""
        epoch, position, index = key
        augment, image = self.transforms.augment_each, self.read(index)[None]
        return augment.apply(image, augment.draw([epoch], [position], tuple(image.shape[-2:])))[0]

    def _read(self, index: int) -> Tensor:
        item = self.items[index]
        return self.transforms.read(item.path, box=item.box)

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(
                "DATALOADER.ON_CORRUPT is skip: %s; another image of its identity takes its place (%d such images so "
                "far in this process)",
                message,
                len(self._warned),
            )


def _sorted_ranks(names: Column) -> np.ndarray:
    """Return (N,) int64, each name's place among the different names: numbers first, then strings, sorted as text."""
    values, inverse = names.unique()
    order = sorted(range(len(values)), key=lambda number: (isinstance(values[number], str), values[number]))
    ranks = np.empty(len(values), dtype=np.int64)
    ranks[order] = np.arange(len(values))
    return ranks[inverse]
