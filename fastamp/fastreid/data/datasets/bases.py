"""FastReID's base class of datasets."""

import functools
from collections.abc import Sequence
from typing import Any

from fastamp.data.datasets import base
from fastamp.data.datasets.base import Items, log_splits
from fastamp.data.datasets.items import ImageItem


def _assignable(name: str) -> property:
    """Return the property of a split, to which a dataset or a script may assign items."""

    def assign(dataset: Any, items: Sequence[tuple]) -> None:
        vars(dataset).setdefault("_items", {})[name] = [ImageItem(*item) for item in items]

    return getattr(base.ImageDataset, name).setter(assign)


class DatasetMethods(base.ImageDataset):
    """FastReID's methods of datasets.

    Args:
        arguments, options: arguments of the constructor of the next base class.
        combineall: add query and gallery images to the training images; see ``combine_all``. Default False. The config
            key DATASETS.COMBINEALL is preferred.
    """

    _junk_pids: Sequence[int] = ()
    train, query, gallery = map(_assignable, ("train", "query", "gallery"))

    def __init__(self, *arguments: Any, combineall: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if combineall:
            self.combine_all()

    def show_train(self) -> None:
        """Log the numbers of training images, identities and cameras."""
        log_splits(self, {"train": self.train})

    def show_test(self) -> None:
        """Log the numbers of query and gallery images, identities and cameras."""
        log_splits(self, {"query": self.query, "gallery": self.gallery})

    def parse_data(self, data: Sequence[tuple]) -> tuple[int, int]:
        """Return ``(number of identities, number of cameras)`` of a list of ``(path, pid, camid)``."""
        return len({item[1] for item in data}), len({item[2] for item in data})

    def get_num_pids(self, data: Sequence[tuple]) -> int:
        """Count the identities in a list of ``(path, pid, camid)``."""
        return self.parse_data(data)[0]

    def get_num_cams(self, data: Sequence[tuple]) -> int:
        """Count the cameras in a list of ``(path, pid, camid)``."""
        return self.parse_data(data)[1]

    def combine_all(self) -> None:
        """Add query and gallery images to the training images, except the identities in ``_junk_pids``.

        Without ``_junk_pids``, the distractors of a dataset of fastamp are excluded.
        The added identities get the prefix ``<dataset_name>_test_``; cameras keep their numbers.
        """
        junk = self._junk_pids or ((0, -1) if self.has_distractors else ())
        prefix = f"{self.dataset_name or 'Unknown'}_test_"
        extra = [
            item._replace(pid=f"{prefix}{item.pid}") for item in (*self.query, *self.gallery) if item.pid not in junk
        ]
        self._items["train"] = [*self.train, *extra]


class ImageDataset(DatasetMethods):
    """Dataset with the constructor and the methods of FastReID's ``ImageDataset``.

    Args:
        train, query, gallery: list of ``(path, pid, camid)``, or a function that returns it.
        transform, verbose: unused.
        mode: split of ``data`` and ``len()``: ``"train"`` (default), ``"query"`` or ``"gallery"``.
        combineall: see ``DatasetMethods``. Default False.
        kwargs: ignored, as in FastReID.

    Raises:
        ValueError: if ``mode`` is unknown.
    """

    related_identities = False  # each split may number its identities from 0
    requires_gallery = False  # evaluators of projects may compare the queries with each other

    def __init__(
        self,
        train: Items,
        query: Items,
        gallery: Items,
        transform: Any = None,
        mode: str = "train",
        combineall: bool = False,
        verbose: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(train, query, gallery, combineall=combineall)
        if mode not in ("train", "query", "gallery"):
            raise ValueError(f"mode: expected train, query or gallery, got {mode!r}")
        self.transform, self.mode, self.combineall, self.verbose = transform, mode, combineall, verbose

    @property
    def has_distractors(self) -> bool:  # type: ignore[override]
        """True if ``_junk_pids`` names identities that are not used for training."""
        return bool(self._junk_pids)

    @property
    def data(self) -> Sequence[ImageItem]:
        """Images of the split ``mode``."""
        return getattr(self, self.mode)

    def test_items(self) -> tuple[Sequence[ImageItem], Sequence[ImageItem]]:
        """Return the query and the gallery images; identities or cameras that are strings are numbered from 1."""
        items = [*self.query, *self.gallery]
        for field in ("pid", "camid"):
            values = {getattr(item, field) for item in items}
            if any(isinstance(value, str) for value in values):
                numbers = {value: number for number, value in enumerate(sorted(values, key=str), 1)}
                items = [item._replace(**{field: numbers[getattr(item, field)]}) for item in items]
        return items[: len(self.query)], items[len(self.query) :]

    def __len__(self) -> int:
        return len(self.data)

    def show_summary(self) -> None:
        """Do nothing; for subclasses."""


Dataset = ImageDataset


@functools.cache
def with_methods(component: Any) -> Any:
    """Return a subclass of a registered dataset class with ``DatasetMethods``; other components unchanged."""
    if not isinstance(component, type) or not issubclass(component, base.ImageDataset):
        return component
    if issubclass(component, DatasetMethods):
        return component
    return type(component.__name__, (DatasetMethods, component), {"__module__": component.__module__})
