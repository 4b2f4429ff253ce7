"""Verification: the share of genuine pairs accepted at a given share of false accepts, in bounded memory."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fastamp.evaluation.matches import Identities, Matches

logger = logging.getLogger(__name__)

# Bins of equal width from 0 to the largest distance possible. Cosine distances are then told apart to 2e-6.
_BINS = 2**20
# Entries of a block whose bins are held at once.
_CHUNK = 2**22


@dataclass(frozen=True)
class RocCurve:
    """Accept rates over all thresholds.

    Attributes:
        thresholds: (T,) float64, ascending; a pair is accepted when its distance lies below.
        tar: (T,) float64 in 0..1, true accept rate: the share of the genuine pairs accepted.
        far: (T,) float64 in 0..1, false accept rate: the share of the impostor pairs accepted.
        num_genuine: pairs of one identity, junk left out.
        num_impostor: pairs of two identities.
    """

    thresholds: np.ndarray
    tar: np.ndarray
    far: np.ndarray
    num_genuine: int
    num_impostor: int

    def tar_at(self, far: float) -> float:
        """Return the largest true accept rate, in 0..1, at which the false accept rate is not above ``far``."""
        allowed = self.far <= far
        return float(self.tar[allowed].max()) if allowed.any() else 0.0


class RocCounter:
    """Takes blocks of distances one by one, and counts genuine and impostor pairs by distance.

    A threshold lies on the edge of one of 2^20 bins, so that a false accept rate is never above what was asked for, and
    a true accept rate lacks at most the pairs that share a bin with the threshold.

    Args:
        ids: of Q queries and G gallery images.
        limit: the largest distance possible.
        cross_camera: see ``Matches``; junk is no pair.

    Attributes:
        counts: (2, 2^20) int64, genuine and impostor pairs by distance; those of several counters may be added.
    """

    def __init__(self, ids: Identities, *, limit: float, cross_camera: bool = True) -> None:
        self.matches = Matches(ids, cross_camera=cross_camera)
        self._scale = _BINS / max(limit, np.finfo(np.float32).tiny)
        self.counts = torch.zeros(2, _BINS, dtype=torch.int64)

    def add(self, start: int, block: torch.Tensor) -> None:
        """Count the pairs of the queries from ``start`` on in a (B, G) block of distances, which stays as it is."""
        pairs = self.matches.of(start, start + len(block))
        entries = ((pairs.rows, pairs.columns), (pairs.junk_rows, pairs.junk_columns))
        own, junk = (
            self._histogram(block[tuple(torch.from_numpy(side).to(block.device) for side in each)]) for each in entries
        )
        genuine, impostor = self.counts
        genuine += own
        for chunk in block.view(-1).split(_CHUNK):
            impostor += self._histogram(chunk)
        impostor -= own + junk

    def _histogram(self, distances: torch.Tensor) -> torch.Tensor:
        bins = (distances * self._scale).clamp(0, _BINS - 1).long()
        return torch.bincount(bins, minlength=_BINS).cpu()

    def result(self) -> RocCurve | None:
        """Return the curve of the pairs counted; None without genuine or without impostor pairs."""
        genuine, impostor = self.counts.numpy()
        if not genuine.any() or not impostor.any():
            return None
        used = np.flatnonzero(genuine + impostor)  # a bin without pairs moves neither rate
        tar, far = (counts[used].cumsum() / counts.sum() for counts in (genuine, impostor))
        zero = np.zeros(1)
        return RocCurve(
            thresholds=np.concatenate((zero, (used + 1) / self._scale)),
            tar=np.concatenate((zero, tar)),
            far=np.concatenate((zero, far)),
            num_genuine=int(genuine.sum()),
            num_impostor=int(impostor.sum()),
        )


def write_roc(curve: RocCurve, rates: Sequence[float], folder: Path) -> list[Path]:
    """Write the curve to ``roc.npz`` and, where matplotlib is installed, to ``roc.png``; return the paths.

    Args:
        curve: to be written.
        rates: false accept rates that are marked in the picture.
        folder: created when missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "roc.npz"]
    np.savez_compressed(
        paths[0],
        thresholds=curve.thresholds,
        tar=curve.tar,
        far=curve.far,
        num_genuine=curve.num_genuine,
        num_impostor=curve.num_impostor,
    )
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning('no picture of the curve: it needs matplotlib (pip install "fastamp[vis]")')
        return paths
    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    axes.step(curve.far, 100 * curve.tar, where="post")
    for rate in rates:
        axes.plot(rate, 100 * curve.tar_at(rate), "o", label=f"{100 * curve.tar_at(rate):.2f} % at {rate:g}")
    axes.set(xscale="log", xlim=(1 / curve.num_impostor, 1), ylim=(0, 100))
    axes.set(xlabel="false accept rate", ylabel="true accept rate in percent")
    axes.set_title(f"{curve.num_genuine:,} genuine and {curve.num_impostor:,} impostor pairs")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    paths.append(folder / "roc.png")
    figure.savefig(paths[1], dpi=120)
    return paths
