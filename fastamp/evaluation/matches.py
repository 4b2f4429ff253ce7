"""Which gallery images are a query's matches, and which are junk that no ranking counts."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from fastamp.utils.errors import DataError

# The identity that the first Market-1501 evaluation code leaves out of the gallery.
JUNK_PID = -1
# Pairs that are held at once, in some 60 bytes each.
_MOST_PAIRS = 2**19


@dataclass(frozen=True)
class Identities:
    """Who is on the query and gallery images, and which camera took them: (Q,), (G,), (Q,), (G,) int64."""

    query_pids: torch.Tensor
    gallery_pids: torch.Tensor
    query_camids: torch.Tensor
    gallery_camids: torch.Tensor

    def all_images(self) -> "Identities":
        """Return the queries and the gallery together as both sides."""
        pids = torch.cat((self.query_pids, self.gallery_pids))
        camids = torch.cat((self.query_camids, self.gallery_camids))
        return Identities(pids, pids, camids, camids)


@dataclass(frozen=True)
class Pairs:
    """Matches and junk of B queries in a row, as the entries of their (B, G) block: int64, sorted by row."""

    rows: np.ndarray
    columns: np.ndarray
    junk_rows: np.ndarray
    junk_columns: np.ndarray


class GalleryGroups:
    """The gallery images of each identity.

    Attributes:
        order: (G,) int64, the gallery images sorted by identity, those of one in the gallery's order.
        pids: (P,) int64, the gallery's identities, ascending.
        starts: (P,) int64, where an identity's images begin in ``order``.
        counts: (P,) int64, how many it has.
    """

    def __init__(self, gallery_pids: np.ndarray) -> None:
        self.order = np.argsort(gallery_pids, kind="stable")
        self.pids, self.starts, self.counts = np.unique(gallery_pids[self.order], return_index=True, return_counts=True)

    def of(self, pids: np.ndarray) -> np.ndarray:
        """Return the group of each of (B,) identities, -1 where the gallery has none."""
        place = np.searchsorted(self.pids, pids).clip(max=len(self.pids) - 1)
        return np.where(self.pids[place] == pids, place, -1)


class Matches:
    """Finds the matches and the junk of queries.

    A gallery image of the query's identity is a match, unless it is junk: under ``cross_camera``, when it is also from
    the query's own camera (Zheng et al. 2015, "Scalable person re-identification: a benchmark").

    Args:
        ids: of Q queries and G gallery images.
        cross_camera: whether images of the query's own camera are junk.
        unmatched_pid: an identity that matches nothing; None is none.
    """

    def __init__(self, ids: Identities, *, cross_camera: bool, unmatched_pid: int | None = None) -> None:
        self.query_pids, self.gallery_pids = ids.query_pids.cpu().numpy(), ids.gallery_pids.cpu().numpy()
        self.query_camids, self.gallery_camids = ids.query_camids.cpu().numpy(), ids.gallery_camids.cpu().numpy()
        self.cross_camera, self.unmatched_pid = cross_camera, unmatched_pid
        self.groups = GalleryGroups(self.gallery_pids)

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of the queries from ``start`` to ``stop`` whose pairs take little memory, one query at least."""
        group = self.groups.of(self.query_pids[start:stop])
        pairs = np.cumsum(np.where(group >= 0, self.groups.counts[group], 0))
        first = 0
        while first < len(group):
            done = pairs[first - 1] if first else 0
            last = max(first + 1, int(np.searchsorted(pairs, done + _MOST_PAIRS, side="right")))
            yield start + first, start + last
            first = last

    def of(self, start: int, stop: int) -> Pairs:
        """Return the pairs of the queries from ``start`` up to, not including, ``stop``."""
        pids = self.query_pids[start:stop]
        group = np.where(pids == self.unmatched_pid, -1, self.groups.of(pids))
        counts = np.where(group >= 0, self.groups.counts[group], 0)
        rows = np.repeat(np.arange(len(group)), counts)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        columns = self.groups.order[self.groups.starts[group[rows]] + within]
        junk = np.zeros(len(rows), dtype=bool)
        if self.cross_camera:
            junk = self.query_camids[start:stop][rows] == self.gallery_camids[columns]
        return Pairs(rows[~junk], columns[~junk], rows[junk], columns[junk])


def check_sets(
    query_features: torch.Tensor,
    gallery_features: torch.Tensor,
    ids: Identities,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Check that two sets of features can be ranked.

    Args:
        query_features: (Q, D) float.
        gallery_features: (G, D) float.
        ids: of the Q and G images.
        dtype: the widest that they are computed in; that of float32 and narrower features is float32 anyway.

    Raises:
        DataError: a set is empty, shapes do not fit, or features are not finite or too large for their squares.
    """
    for name, features, pids, camids in (
        ("query", query_features, ids.query_pids, ids.query_camids),
        ("gallery", gallery_features, ids.gallery_pids, ids.gallery_camids),
    ):
        if len(features) == 0:
            raise DataError(f"the {name} set is empty: there is nothing to rank")
        if features.dim() != 2 or not len(features) == len(pids) == len(camids):
            raise DataError(
                f"{name}: features {tuple(features.shape)}, {len(pids)} identities and {len(camids)} cameras "
                "do not fit; expected (N, D) features and N of each"
            )
        _check_finite(name, features, dtype)
    if query_features.shape[1] != gallery_features.shape[1]:
        raise DataError(
            f"query features are {query_features.shape[1]} wide, gallery features {gallery_features.shape[1]}: "
            "they are of two models"
        )


def _check_finite(name: str, features: torch.Tensor, dtype: torch.dtype) -> None:
    if features.numel() == 0:
        raise DataError(f"the {name} features are 0 wide")
    low, high = (bound.item() for bound in torch.aminmax(features))
    largest = max(abs(low), abs(high))
    if not math.isfinite(largest):
        bad = (~torch.isfinite(features).all(1)).nonzero().flatten().tolist()
        raise DataError(
            f"{len(bad)} of {len(features)} {name} features are NaN or infinite (the first: number "
            f"{', '.join(map(str, bad[:5]))} of the {name} set, from 0): they cannot be ranked.\n"
            "  cause: the model's training diverged, its weights or norm buffers are damaged, or float16 overflows\n"
            "  fix: a lower SOLVER.BASE_LR or an earlier checkpoint; under float16, SOLVER.AMP.EVAL_DTYPE float32"
        )
    dtype = torch.float32 if features.dtype != torch.float64 else dtype
    limit = math.sqrt(torch.finfo(dtype).max / features.shape[1]) / 2
    if largest > limit:
        raise DataError(
            f"{name} features reach {largest:.3g}: the squares of {features.shape[1]} values above {limit:.3g} "
            f"overflow in {str(dtype).removeprefix('torch.')}, and with them the distances"
        )
