"""ReID dataset that loads batches of images with labels, cameras and views."""

import logging
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fastamp.data.cache import ImageCache
from fastamp.data.columns import CAMERA, encode_columns, rankable_columns
from fastamp.data.datasets.base import ImageDataset
from fastamp.data.datasets.items import Column, ImageItem, PackedItems
from fastamp.data.missing_images import find_origin
from fastamp.data.samplers import SampleKey
from fastamp.data.transforms import Transforms
from fastamp.utils.errors import DataError

logger = logging.getLogger(__name__)


class ReidDataset(Dataset):
    """Dataset that loads images with their identities, cameras and views, one batch at a time.

    Args:
        items: images to load.
        transforms: functions that read, resize and augment the images.
        relabel: if True, map identities to 0..num_classes-1 in sorted order. Cameras are mapped in the same way if at
            least one camera is not an integer; otherwise they keep their values and match the cameras of the test
            images. If False, identities and cameras must be integers and keep their values.
        augment: if True, apply the augmentation. If False, the batch contains the parameters of the augmentation under
            the key ``augmentation``, for ``Transforms.augment``. Default True.
        skip_corrupt: replace an unreadable image with another image of the same identity. Default False.
        sources: datasets of the images, for names of identities and cameras and for messages.
        categories: ``DATASETS.CATEGORIES``; see ``encode_columns``. Default: none.

    Attributes:
        items: the images.
        labels, camids: (N,) int64 identity and camera of each image.
        num_classes: number of identities.
        columns: further columns of the images, by name.
        cache: resized images of all items.

    Raises:
        DataError: if ``relabel`` is False and an identity or a camera is not an integer.
    """

    def __init__(
        self,
        items: Sequence[ImageItem],
        transforms: Transforms,
        *,
        relabel: bool,
        augment: bool = True,
        skip_corrupt: bool = False,
        sources: Sequence[ImageDataset] = (),
        categories: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        self.sources = sources
        self.items = PackedItems.of(items)
        self.transforms = transforms
        self.augment = augment
        self.skip_corrupt = skip_corrupt
        self.relabel = relabel
        self.cache: ImageCache | None = None
        self._warned: set[str] = set()
        pids, camids = self.items.pids, self.items.camids
        self.num_classes = len(pids.unique()[0])
        title = ", ".join(source.title for source in sources)
        self.columns = encode_columns(self.items.columns, categories, title=title or "the dataset", training=relabel)
        if relabel:
            self.labels = _sorted_ranks(pids)
            self.camids = camids.codes if camids.is_integer else _sorted_ranks(camids)
            return
        if not (pids.is_integer and camids.is_integer):
            wrong = next(
                item for item in self.items if not (isinstance(item.pid, Integral) and isinstance(item.camid, Integral))
            )
            raise DataError(
                f"identities and camera IDs of query and gallery images must be integers; got identity "
                f"{wrong.pid!r} and camera ID {wrong.camid!r} for {wrong.path}.\n"
                "  fix: assign integers in the Python class that reads this dataset"
            )
        self.labels, self.camids = pids.codes, camids.codes

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker does not need the datasets, which hold a copy of all items.
        return self.__dict__ | {"sources": ()}

    def use_cache(self, cache: ImageCache) -> None:
        """Read resized images from ``cache`` instead of decoding image files."""
        self.cache = cache

    def rankable_columns(self) -> dict[str, np.ndarray]:
        """Return the columns with one number for each image, which protocols and ``TEST.GROUP_BY`` can use."""
        return rankable_columns(self.columns)

    def column_names(self) -> dict[str, Sequence[str]]:
        """Return the text of each number in the text columns and, if there is only one dataset, in ``camera``.

        The texts of a column of integers with missing values are empty; see ``Identities.column_names``.
        """
        columns = self.columns.items()
        names: dict[str, Sequence[str]] = {name: column.names for name, column in columns if column.names is not None}
        low, high = int(self.camids.min()), int(self.camids.max())
        if len(self.sources) == 1 and low >= 0 and high < len(self):
            cameras = [self.sources[0].camera(camera) or str(camera) for camera in range(high + 1)]
            names[CAMERA] = cameras
        return names

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Load one image with its labels. The augmentation uses the random numbers of epoch 0, position ``index``."""
        return {name: values[0] for name, values in self.__getitems__([(0, index, index)]).items()}

    def __getitems__(self, keys: Sequence[SampleKey]) -> dict[str, Any]:
        """Load a batch.

        Args:
            keys: (epoch, position, index) for each of B images. The index selects the image; epoch and position select
                the random numbers of the augmentation.

        Returns:
            ``images``: (B, C, H, W) uint8; ``targets`` (identities), ``camids``, ``viewids`` and ``indices`` (in this
            dataset): (B,) int64; ``img_paths``: list of str; and each of ``columns`` under its name. If ``augment`` is
            False, also ``augmentation``: the parameters for ``Transforms.augment``.

        Raises:
            DataError: if an image cannot be read, or the images have different sizes.
        """
        epochs, positions, indices = zip(*keys, strict=True)
        rows = np.array(indices)
        size = self.transforms.resize.output_size
        if self.cache is not None:
            images = self.cache.images.index_select(0, torch.tensor(indices))  # 20 times faster than indexing
        elif size is not None:
            images = torch.empty(len(rows), self.transforms.channels, *size, dtype=torch.uint8)
            pixels = images.numpy()
            for place in self._reading_order(rows):
                # NumPy copies decoders' (H, W, C) pixels to (C, H, W) in half of PyTorch's time.
                pixels[place] = self.read(indices[place]).numpy()
        else:
            read = {place: self._read_augmented(keys[place]) for place in self._reading_order(rows)}
            images = self.transforms.stack([read[place] for place in range(len(rows))])
        augment = self.transforms.augment
        parameters = augment.draw(epochs, positions, (images.shape[-2], images.shape[-1]))
        batch: dict[str, Any] = {
            "images": augment.apply(images, parameters) if self.augment else images,
            "targets": torch.from_numpy(self.labels[rows]),
            "camids": torch.from_numpy(self.camids[rows]),
            "viewids": torch.from_numpy(self.items.viewids[rows]),
            "indices": torch.tensor(indices),
            "img_paths": self.items.paths(rows),
            **{name: column.take(rows) for name, column in self.columns.items()},
        }
        if not self.augment:
            batch["augmentation"] = parameters
        return batch

    def _reading_order(self, rows: np.ndarray) -> Sequence[int]:
        """Return the positions in a batch, those of the boxes of a frame together, so that it is decoded once."""
        return range(len(rows)) if self.items.boxes is None else self.items.take(rows).rows_by_file().tolist()

    def read(self, index: int) -> Tensor:
        """Read and resize an image.

        Args:
            index: index of the image.

        Returns:
            (C, H, W) uint8.

        Raises:
            DataError: if the image cannot be read and, with ``skip_corrupt``, no other image of its identity can be
                read either.
        """
        try:
            return self._read(index)
        except DataError as error:
            if not self.skip_corrupt:
                message, fix, given = str(error).partition("\n  fix:")
                origin = find_origin(self.sources, self.items.path(index), self.items.box(index))
                if origin:
                    message += f"\n  listed in {origin}"
                if not fix:
                    fix, given = "\n  fix:", " restore the file, or remove it from the dataset"
                    if self.relabel:  # a test set never skips images
                        given = " restore the file, remove it from the dataset, or set DATALOADER.ON_CORRUPT to skip"
                raise DataError(f"{message}{fix}{given}") from error
            self._warn_once(str(error))
        same = np.flatnonzero(self.labels == self.labels[index])
        for number in np.roll(same, -np.searchsorted(same, index)).tolist()[1:]:
            try:
                return self._read(number)
            except DataError as error:
                self._warn_once(str(error))
        raise DataError(
            f"cannot read {self.items[index].path} or any other image of the same identity "
            "(DATALOADER.ON_CORRUPT is skip).\n  fix: restore the files, or remove this identity from the dataset"
        )

    def _read_augmented(self, key: SampleKey) -> Tensor:
        """Read and resize the image selected by ``key``, and apply ``transforms.augment_each``."""
        epoch, position, index = key
        augment, image = self.transforms.augment_each, self.read(index)[None]
        return augment.apply(image, augment.draw([epoch], [position], (image.shape[-2], image.shape[-1])))[0]

    def _read(self, index: int) -> Tensor:
        return self.transforms.read(self.items.path(index), box=self.items.box(index))

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            found, _, fix = message.partition("\n  fix: ")
            logger.warning(
                "%s; substituting another image of the same identity (DATALOADER.ON_CORRUPT is skip; unreadable images "
                "so far in this process: %d).\n  fix: %s",
                found,
                len(self._warned),
                fix or "restore the file, or remove it from the dataset",
            )


def _sorted_ranks(names: Column) -> np.ndarray:
    """Map each name to its index in the sorted distinct names: integers first, then strings."""
    values, inverse = names.unique()
    order = sorted(range(len(values)), key=lambda number: (isinstance(values[number], str), values[number]))
    ranks = np.empty(len(values), dtype=np.int64)
    ranks[order] = np.arange(len(values))
    return ranks[inverse]
