"""Methods of FastReID's ``ImageDataset``."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any


class FastReIDDataset:
    """Base class of ``ImageDataset`` with the methods of FastReID's class.

    The constructor of each subclass also accepts FastReID's argument ``combineall``; see ``combine_all``.
    """

    _junk_pids: Sequence[int] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls) and not _accepts_combineall(cls.__init__):
            cls.__init__ = _with_combineall(cls.__init__)

    def show_train(self) -> None:
        """Log the numbers of training images, identities and cameras."""
        _log_splits(self, "train")

    def show_test(self) -> None:
        """Log the numbers of query and gallery images, identities and cameras."""
        _log_splits(self, "query", "gallery")

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

        The added identities get the prefix ``<dataset_name>_test_``; cameras keep their numbers.
        """
        prefix = f"{self.dataset_name or 'Unknown'}_test_"
        extra = [
            item._replace(pid=f"{prefix}{item.pid}")
            for item in (*self.query, *self.gallery)
            if item.pid not in self._junk_pids
        ]
        self._items["train"] = [*self.train, *extra]


def _accepts_combineall(init: Callable[..., None]) -> bool:
    parameters = inspect.signature(init).parameters
    return "combineall" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _with_combineall(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def construct(self: Any, *args: Any, combineall: bool = False, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if combineall:
            self.combine_all()

    return construct


def _log_splits(dataset: Any, *splits: str) -> None:
    from fastamp.data.datasets.base import log_splits  # it imports this module

    log_splits(dataset, {split: getattr(dataset, split) for split in splits})
