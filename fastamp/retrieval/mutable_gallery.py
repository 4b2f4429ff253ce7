"""Gallery in a folder, whose items can be added, updated and removed while it is searched."""

import logging
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from os import PathLike
from pathlib import Path

import numpy as np
from torch import Tensor

from fastamp.retrieval.candidates import Candidates
from fastamp.retrieval.columns import ImageColumns
from fastamp.retrieval.gallery import Conditions, Gallery
from fastamp.retrieval.gallery_store import DATABASE_FILE, GalleryStore, Item
from fastamp.retrieval.index_file import write_index
from fastamp.retrieval.indices import FLAT_UP_TO, WANTED_RECALL, sample_rows
from fastamp.retrieval.model_id import ModelId
from fastamp.retrieval.vectors import Vectors, as_features, normalized
from fastamp.utils.errors import ConfigError, DataError, check_choice, writing

logger = logging.getLogger(__name__)

_CANDIDATES_FILE = "candidates.index"
_BLOCK = 8192
# The candidate index is built again when it contains this many times as many features as it has lists for, or as the
# gallery.
_GROWTH = 2


class MutableGallery(Gallery, AbstractContextManager["MutableGallery"]):
    """Gallery in a folder, whose items can be added, updated and removed by id; see ``Gallery`` for its search.

    A method that changes the gallery returns after the change is on the disk, see ``GalleryStore``: if the process is
    killed, no change that was acknowledged is lost, and no batch is stored in part. Features and metadata are kept in
    memory; changes by other processes are read before each search. All methods may be called by several threads.

    The search compares with all features, or, after ``build_candidates``, with the features that an approximate index
    proposes. In results, ``paths`` are the names of the items, or their ids without a name; the further columns are
    ``id`` and ``time``.

    Args:
        path: folder of the gallery.
        model: model of the gallery, which is created if it does not exist. Default: None, the gallery exists, and may
            have any model.

    Attributes:
        model: model of the features.
        items: items by row, without pictures.

    Raises:
        DataError: if there is no gallery, it has another model, it is damaged, or a feature in it is not finite.
        ConfigError: if the gallery would be created, but the path exists.
        WriteError: if it cannot be written.
    """

    def __init__(self, path: str | PathLike[str], model: ModelId | None = None) -> None:
        self.path = Path(path).expanduser()
        if model is not None and not (self.path / DATABASE_FILE).exists():
            if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
                raise ConfigError(f"{self.path} exists and is not a gallery.\n  fix: choose another folder")
            with writing(self.path):
                self.path.mkdir(exist_ok=True)
        self._store = GalleryStore(self.path, model)
        self.model, self.fingerprint = self._store.model, self._store.token
        if model is not None:
            self.check_model(model)
        self._lock, self._readers = threading.RLock(), 0
        self._tried = 0  # number of items when no candidate index had a sufficient recall
        self.items: list[Item] = []
        self._buffer = np.empty((0, self.model.width), np.float32)
        self._row_of_id, self._row_of_number = dict[str, int](), dict[int, int]()
        self._version, self._last = -1, -math.inf  # largest number that was read
        self.index: Candidates | None = None
        if (file := self.path / _CANDIDATES_FILE).exists():
            self.index = Candidates.read(file, self, self._row_of_number)
        self.refresh()

    def __len__(self) -> int:
        return len(self.items)

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the database; the gallery cannot be used afterwards."""
        self._store.close()

    def __contains__(self, item_id: str) -> bool:
        return item_id in self._row_of_id

    def item(self, item_id: str) -> Item:
        """Return the item with an id.

        Raises:
            DataError: if there is none.
        """
        with self.reading():
            self._check_present([item_id])
            return self.items[self._row_of_id[item_id]]

    def picture(self, item_id: str) -> bytes | None:
        """Return the picture of an item, a JPEG file; None if it has none."""
        with self._lock:
            return self._store.picture(item_id)

    def add(self, items: Sequence[Item], features: Tensor | np.ndarray, *, existing: str = "raise") -> list[int]:
        """Add items.

        Args:
            items: N new items.
            features: (N, D) float, not normalized.
            existing: items whose id is in the gallery: ``raise`` (default) an error, ``skip`` or ``replace`` them.

        Returns:
            Positions in ``items`` of those that were added or replaced.

        Raises:
            DataError: if an id is not unique, or the features have a wrong shape or are not finite. No item is added.
            ConfigError: if ``existing`` is unknown.
            WriteError: if the items cannot be written.
        """
        check_choice("existing", existing, ("raise", "skip", "replace"))
        values = as_features(features, self.model.width, len(items))
        with self._lock:
            with self._store.transaction():
                self.refresh()
                self._check_unique([item.id for item in items])
                new = [row for row, item in enumerate(items) if existing == "replace" or item.id not in self]
                if len(new) < len(items) and existing == "raise":
                    known = [item.id for item in items if item.id in self]
                    raise DataError(
                        f"{len(known)} of {len(items)} items are in the gallery already: {', '.join(known[:5])}\n"
                        "  fix: choose other ids, or replace the items"
                    )
                self._store.write([items[row] for row in new], values[new])
            self._read()
            return new

    def update(self, items: Sequence[Item], features: Tensor | np.ndarray | None = None) -> None:
        """Replace items with the same ids.

        Args:
            items: N items with all their values; a picture is kept if the new item has none.
            features: (N, D) new features. Default: None, the features are kept.

        Raises:
            DataError: if an id is missing or not unique, or the features are invalid. No item is changed.
            WriteError: if the items cannot be written.
        """
        values = None if features is None else as_features(features, self.model.width, len(items))
        with self._lock:
            with self._store.transaction():
                self.refresh()
                self._check_present([item.id for item in items])
                self._store.write(items, values)
            self._read()

    def remove(self, ids: Sequence[str]) -> None:
        """Remove items.

        Raises:
            DataError: if an id is missing or given twice. No item is removed.
            WriteError: if the change cannot be written.
        """
        with self._lock:
            with self._store.transaction():
                self.refresh()
                self._check_present(ids)
                self._store.delete(ids)
            self._delete([self._row_of_id[item_id] for item_id in ids])

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Return a context in which the gallery does not change, with the changes of other processes."""
        with self._lock:
            if not self._readers:  # not again in a nested context
                self.refresh()
            self._readers += 1
            try:
                yield
            finally:
                self._readers -= 1

    @property
    def vectors(self) -> Vectors:
        """Features of all items."""
        return Vectors(self._matrix, self.model.metric, self.path, is_normalized=True)

    def columns_of(self, rows: np.ndarray | slice) -> ImageColumns:
        """Return the columns of items; see ``Gallery``."""
        rows = np.arange(len(self))[rows]
        values = [self.items[row].texts() for row in rows.reshape(-1).tolist()]
        names = "id", "name", "identity", "camera", "time"
        texts = {name: np.array([row[name] for row in values], dtype=str).reshape(rows.shape) for name in names}
        return ImageColumns(
            paths=np.where(texts["name"] == "", texts["id"], texts["name"]),
            pids=np.where(texts["identity"] == "", "-1", texts["identity"]),
            camids=np.full(rows.shape, -1),
            cameras=texts["camera"],
            further={"id": texts["id"], "time": texts["time"]},
        )

    def rows_where(self, conditions: Conditions) -> np.ndarray:
        """Return the rows of the items that meet all conditions; see ``Gallery``."""
        with self.reading():
            return np.flatnonzero([conditions.accept(item.camera, item.identity, item.time) for item in self.items])

    @property
    def wants_candidates(self) -> bool:
        """True if the gallery is so large that ``build_candidates`` is useful, or has changed much since then."""
        if len(self) <= FLAT_UP_TO or self.index is None:
            return len(self) > max(FLAT_UP_TO, _GROWTH * self._tried)
        return len(self.index.numbers) > _GROWTH * min(len(self), int(self.index.faiss.nlist) ** 2)

    def build_candidates(self) -> float | None:
        """Build the approximate index of a large gallery (IVF-PQ), measure its recall, and store it.

        Searches and changes in other threads continue. The recall is the fraction of the 10 nearest items of 200 items
        of the gallery that a search finds; the number of probed lists is the smallest tried one with a recall of 0.98.

        Returns:
            The recall. None if no number of lists reaches it, or there are at most 50,000 items: the search is exact.
        """
        with self.reading():
            if len(self) <= FLAT_UP_TO:
                self.index = None
                return None
            count, sample = len(self), self._matrix[sample_rows(len(self))]
        built = Candidates.train(sample, count, self.model, self._row_of_number)
        for start in range(0, count, _BLOCK):
            with self._lock:
                rows = slice(start, start + _BLOCK)
                items, features = self.items[rows], self._matrix[rows].copy()
            built.add(items, features)
        with self._lock:
            built.add(self.items, self._matrix)  # those that were added or moved meanwhile
            recall = built.measure(self.vectors)
            if recall < WANTED_RECALL:
                logger.warning(
                    "the search of %s remains exact: the approximate index has a recall of %.3f, below %.2f",
                    self.path,
                    recall,
                    WANTED_RECALL,
                )
                self.index, self._tried = None, len(self)
                return None
            write_index(self.path / _CANDIDATES_FILE, built, self)
            self.index = built
            logger.info("%s: %d items, recall %.3f with %s lists", self.path, len(self), recall, built.effort)
            return recall

    def refresh(self) -> None:
        """Read the changes of other processes."""
        with self._lock:
            version = self._store.version
            if version != self._version:
                present = self._store.numbers()
                self._delete([row for row, item in enumerate(self.items) if item.number not in present])
                self._read()
                self._version = version  # not if reading failed, so that it is tried again

    @property
    def _matrix(self) -> np.ndarray:
        """Features (N, D) of all items, see ``normalized``: the first rows of the buffer."""
        return self._buffer[: len(self)]

    def _read(self) -> None:
        """Read the items with new numbers; they replace those with the same ids."""
        for items, features in self._store.read(self._last):
            unit, count = normalized(features, self.model.metric), len(self) + len(items)
            if count > len(self._buffer):  # first, because there may be too little memory
                grown = np.empty((max(count, 2 * len(self)), self.model.width), np.float32)  # unused rows take none
                grown[: len(self)] = self._matrix
                self._buffer = grown
            self._delete([self._row_of_id[item.id] for item in items if item.id in self])
            for row, item in enumerate(items, len(self)):
                self._row_of_id[item.id] = self._row_of_number[item.number] = row
            self.items += items
            self._matrix[-len(items) :] = unit
            if self.index is not None:
                self.index.add(items, unit)
            self._last = items[-1].number

    def _delete(self, rows: Sequence[int]) -> None:
        """Delete rows: the last rows move to their places."""
        for row in sorted(rows, reverse=True):
            deleted, moved = self.items[row], self.items.pop()
            del self._row_of_id[deleted.id], self._row_of_number[deleted.number]
            if moved is not deleted:
                self._buffer[row] = self._buffer[len(self)]
                self.items[row] = moved
                self._row_of_id[moved.id] = self._row_of_number[moved.number] = row

    def _check_unique(self, ids: Sequence[str]) -> None:
        if len(set(ids)) < len(ids):
            twice = next(item_id for item_id in ids if ids.count(item_id) > 1)
            raise DataError(f"the id {twice!r} is given twice.\n  fix: give each item once")

    def _check_present(self, ids: Sequence[str]) -> None:
        self._check_unique(ids)
        missing = [item_id for item_id in ids if item_id not in self._row_of_id]
        if missing:
            raise MissingItemError(
                f"{len(missing)} of {len(ids)} items are not in the gallery: {', '.join(missing[:5])}\n"
                "  fix: correct the ids"
            )


class MissingItemError(DataError):
    """An item is not in the gallery."""
