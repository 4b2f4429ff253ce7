"""Identities and columns of query and gallery images, and the matches and junk of each query.

A gallery image of the query's identity is a match, unless the rule's ``Junk`` excludes it. ``Matches`` applies the rule
to ranking, verification, sampled pairs and reports.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

CAMERA = "camera"
"""Name of the camera as a column, e.g. for ``TEST.GROUP_BY``."""

IMAGE = "<image>"
"""Column that ``Identities.all_images`` adds: the number of the image."""

Rows = torch.Tensor | np.ndarray | slice
Values = torch.Tensor | np.ndarray

# Maximum number of pairs in memory, about 60 bytes each.
_MAX_PAIRS = 2**19


@dataclass(frozen=True)
class Identities:
    """Identities, cameras and further columns of Q query and G gallery images.

    Attributes:
        query_pids, query_camids: (Q,) int64.
        gallery_pids, gallery_camids: (G,) int64.
        columns: column name -> (query values (Q,), gallery values (G,)), of any dtype. Default: no columns.
        column_names: column name -> text of each number in a text column; empty for a column of integers in which -1
            is a missing value. Default: no texts.
    """

    query_pids: torch.Tensor
    gallery_pids: torch.Tensor
    query_camids: torch.Tensor
    gallery_camids: torch.Tensor
    columns: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    column_names: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def split(
        cls,
        num_query: int,
        pids: Values,
        camids: Values,
        columns: Mapping[str, Values],
        column_names: Mapping[str, Sequence[str]],
    ) -> "Identities":
        """Split the labels of a test set that lists ``num_query`` query images first.

        Args:
            num_query: number of query images, Q.
            pids, camids: (Q + G,) int64.
            columns: column name -> (Q + G,) values.
            column_names: see ``Identities``.
        """
        tensors = [torch.as_tensor(values) for values in (pids, camids, *columns.values())]
        both_pids, both_camids, *others = ((tensor[:num_query], tensor[num_query:]) for tensor in tensors)
        return cls(*both_pids, *both_camids, dict(zip(columns, others, strict=True)), column_names)

    def all_images(self) -> "Identities":
        """Return the identities and columns of a test in which all images are both queries and gallery.

        The column ``IMAGE`` numbers the images, so that a rule can exclude the query itself.
        """
        pids = torch.cat((self.query_pids, self.gallery_pids))
        camids = torch.cat((self.query_camids, self.gallery_camids))
        columns = {name: (torch.cat(both),) * 2 for name, both in self.columns.items()}
        columns[IMAGE] = (torch.arange(len(pids), device=pids.device),) * 2
        return Identities(pids, pids, camids, camids, columns, self.column_names)

    def select(self, queries: Rows, gallery: Rows) -> "Identities":
        """Return the identities and columns of some query and gallery images.

        Args:
            queries, gallery: indices, a mask or a slice.

        Returns:
            The selected rows, on the CPU.
        """
        return Identities(
            self.query_pids.cpu()[queries],
            self.gallery_pids.cpu()[gallery],
            self.query_camids.cpu()[queries],
            self.gallery_camids.cpu()[gallery],
            {name: (query.cpu()[queries], other.cpu()[gallery]) for name, (query, other) in self.columns.items()},
            self.column_names,
        )

    def query_texts(self, column: str) -> np.ndarray:
        """Return the values of a column, or of ``"camera"``, as text for each query: (Q,) str; "missing" if unknown."""
        values = (self.query_camids if column == CAMERA else self.columns[column][0]).cpu()
        names = self.column_names.get(column)
        distinct, numbers = values.unique(return_inverse=True)
        texts = np.array([_value_text(value, names) for value in distinct.tolist()], dtype=str)
        return np.asarray(texts[numbers.numpy()])


def _value_text(value: float, names: Sequence[str] | None) -> str:
    """Return the text of a column's value: its name in a text column; "missing" for NaN, and for -1 if there are names.

    Args:
        value: the value.
        names: see ``Identities.column_names``; None for a column that is not in it.
    """
    if value != value or (names is not None and value < 0) or (names and value >= len(names)):
        return "missing"
    return names[int(value)] if names else f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Pairs:
    """Matches and junk of B consecutive queries, as int64 indices into their (B, G) distances, sorted by row."""

    rows: np.ndarray
    columns: np.ndarray
    junk_rows: np.ndarray
    junk_columns: np.ndarray


class GalleryGroups:
    """Gallery images grouped by identity.

    Attributes:
        order: (G,) int64, gallery indices in a stable sort by identity.
        pids: (P,) int64, identities in the gallery, ascending.
        starts: (P,) int64, offset of each identity in ``order``.
        counts: (P,) int64, number of images of each identity.
    """

    def __init__(self, gallery_pids: np.ndarray) -> None:
        self.order = np.argsort(gallery_pids, kind="stable")
        self.pids, self.starts, self.counts = np.unique(gallery_pids[self.order], return_index=True, return_counts=True)

    def find(self, pids: np.ndarray) -> np.ndarray:
        """Return the indices in ``self.pids`` of B identities, (B,) int64; -1 for identities not in the gallery."""
        positions = np.searchsorted(self.pids, pids)
        padded = np.append(self.pids, pids.min(initial=0) - 1)  # not among ``pids``
        return np.where(padded[positions] == pids, positions, -1)


@dataclass(frozen=True)
class Junk:
    """Rule that defines the junk of a query: gallery images that count neither as matches nor as negatives.

    Attributes:
        test: function (``Matches``, query indices, gallery indices) -> bool array, True for junk. The index arrays are
            int64 and broadcast against each other.
        same_identity_only: if True (default), only images of the query's identity are tested and can be junk.
        uses_cameras: False if the test needs no camera labels. Default: True.
    """

    test: Callable[["Matches", np.ndarray, np.ndarray], np.ndarray]
    same_identity_only: bool = True
    uses_cameras: bool = True


class Matches:
    """Matches and junk of each query.

    A gallery image of the query's identity is a match unless it is junk.

    Args:
        identities: identities and cameras of Q queries and G gallery images.
        junk: junk rule; None for no junk.
        unmatched_pid: identity whose images never match, e.g. ``MISSING``. Default: None.
        excluded: gallery indices of further images that no query ranks. Default: none.

    Attributes:
        query_pids, query_camids: (Q,) int64.
        gallery_pids, gallery_camids: (G,) int64.
        query_columns: column name -> (Q,) values; see ``Identities.columns``.
        gallery_columns: column name -> (G,) values.
        unmatched: (U,) int64, gallery indices of the excluded images and of those with ``unmatched_pid``.
    """

    def __init__(
        self,
        identities: Identities,
        *,
        junk: Junk | None,
        unmatched_pid: int | None = None,
        excluded: np.ndarray | None = None,
    ) -> None:
        self.query_pids, self.gallery_pids = identities.query_pids.cpu().numpy(), identities.gallery_pids.cpu().numpy()
        self.query_camids = identities.query_camids.cpu().numpy()
        self.gallery_camids = identities.gallery_camids.cpu().numpy()
        self.query_columns = {name: both[0].cpu().numpy() for name, both in identities.columns.items()}
        self.gallery_columns = {name: both[1].cpu().numpy() for name, both in identities.columns.items()}
        self.junk, self.unmatched_pid = junk, unmatched_pid
        self.groups = GalleryGroups(self.gallery_pids)
        self.unmatched = np.flatnonzero(self.gallery_pids == unmatched_pid)
        if excluded is not None:
            self.unmatched = np.union1d(self.unmatched, excluded)

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Split the queries ``start:stop`` into non-empty ranges, each with a bounded number of pairs."""
        group = self.groups.find(self.query_pids[start:stop])
        pairs = np.append(self.groups.counts, 0)[group]  # none for the group -1
        if self._tests_all_images:
            pairs = np.full_like(pairs, len(self.gallery_pids))
        pairs = np.cumsum(pairs)
        first = 0
        while first < len(group):
            done = pairs[first - 1] if first else 0
            last = max(first + 1, int(np.searchsorted(pairs, done + _MAX_PAIRS, side="right")))
            yield start + first, start + last
            first = last

    def pairs(self, start: int, stop: int) -> Pairs:
        """Return the matches and junk of the queries ``start:stop``."""
        pids = self.query_pids[start:stop]
        group = np.where(pids == self.unmatched_pid, -1, self.groups.find(pids))
        counts = np.append(self.groups.counts, 0)[group]  # none for the group -1
        rows = np.repeat(np.arange(len(group)), counts)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        columns = self.groups.order[self.groups.starts[group[rows]] + within]
        if self.junk is None:
            return Pairs(rows, columns, rows[:0], columns[:0])
        junk = self.junk.test(self, start + rows, columns)
        junk_rows, junk_columns = rows[junk], columns[junk]
        if self._tests_all_images:
            shape = len(group), len(self.gallery_pids)
            queries, gallery = np.arange(start, start + shape[0])[:, None], np.arange(shape[1])
            junk_rows, junk_columns = np.broadcast_to(self.junk.test(self, queries, gallery), shape).nonzero()
        return Pairs(rows[~junk], columns[~junk], junk_rows, junk_columns)

    @property
    def _tests_all_images(self) -> bool:
        return self.junk is not None and not self.junk.same_identity_only


def same_camera(matches: Matches, queries: np.ndarray, gallery: np.ndarray) -> np.ndarray:
    """Return True for each pair of a query and a gallery image from the same camera; see ``Junk.test``."""
    return np.asarray(matches.query_camids[queries] == matches.gallery_camids[gallery])


SAME_CAMERA = Junk(same_camera)
"""Images of the query's identity and camera (Zheng et al. 2015, "Scalable person re-identification: a benchmark")."""


def same_image(matches: Matches, queries: np.ndarray, gallery: np.ndarray) -> np.ndarray:
    """Return True for each pair of an image with itself; see ``Junk.test``."""
    return np.asarray(matches.query_columns[IMAGE][queries] == matches.gallery_columns[IMAGE][gallery])


SAME_IMAGE = Junk(same_image, uses_cameras=False)
"""The query itself, under rules in which each image is a query against all others."""
