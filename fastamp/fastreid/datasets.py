"""FastReID's base class of datasets."""

from collections.abc import Sequence
from typing import Any

from fastamp.data.datasets import base
from fastamp.data.datasets.base import Items
from fastamp.data.datasets.items import ImageItem


class ImageDataset(base.ImageDataset):
    """Dataset with the constructor and the methods of FastReID's ``ImageDataset``.

    Args:
        train, query, gallery: list of ``(path, pid, camid)``, or a function that returns it.
        transform, verbose: unused.
        mode: split of ``data`` and ``len()``: ``"train"`` (default), ``"query"`` or ``"gallery"``.
        combineall: add query and gallery images to the training images. Default False. The config key
            DATASETS.COMBINEALL is preferred.
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
        super().__init__(train, query, gallery)
        if mode not in ("train", "query", "gallery"):
            raise ValueError(f"mode: expected train, query or gallery, got {mode!r}")
        self.transform, self.mode, self.combineall, self.verbose = transform, mode, combineall, verbose
        if combineall:
            self.combine_all()

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
