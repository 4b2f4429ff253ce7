"""Verification: ROC curve, and true accept rate at given false accept rates, in bounded memory."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from fastamp.evaluation.identities import SAME_CAMERA, Identities, Junk, Matches
from fastamp.layers.distance import DistanceBlocks
from fastamp.utils import comm
from fastamp.utils.errors import writing

logger = logging.getLogger(__name__)

# Number of bins of equal width; the resolution of cosine distances in 0..2 is 2e-6.
_BINS = 2**20
# Number of distances that are binned at once.
_CHUNK = 2**20
# Below this limit, distances times bins per unit of distance overflow in float32.
_MIN_LIMIT = 1e-30
# Queries sampled to estimate the range of an unbounded metric.
_NUM_SAMPLED = 64


def distance_limit(blocks: DistanceBlocks) -> float:
    """Return a limit that few distances exceed: the metric's maximum, or 4 times the median over sampled queries."""
    if blocks.limit is not None:
        return blocks.limit
    count, sampled = blocks.shape[0], min(_NUM_SAMPLED, blocks.shape[0])
    return 4 * torch.cat([blocks.row(number * count // sampled) for number in range(sampled)]).median().item()


def sum_over_ranks(counts: torch.Tensor) -> torch.Tensor:
    """Sum counts over all ranks and return the result on the CPU."""
    return comm.all_reduce_sum(counts.to(comm.transport_device())).cpu() if comm.is_distributed() else counts


@dataclass(frozen=True)
class RocCurve:
    """True and false accept rates at each threshold.

    Attributes:
        thresholds: (T,) float64, ascending thresholds of cosine, squared Euclidean or re-ranked distances; a pair is
            accepted if its distance is below the threshold. The last threshold may be infinite.
        tar: (T,) float64 in 0..1, true accept rate: fraction of genuine pairs that are accepted.
        far: (T,) float64 in 0..1, false accept rate: fraction of impostor pairs that are accepted.
        num_genuine: number of pairs of the same identity, excluding junk.
        num_impostor: number of pairs of different identities.
    """

    thresholds: np.ndarray
    tar: np.ndarray
    far: np.ndarray
    num_genuine: int
    num_impostor: int

    def tar_at(self, far: float) -> float:
        """Return the largest true accept rate in 0..1 at a false accept rate of at most ``far``."""
        allowed = self.far <= far
        return float(self.tar[allowed].max()) if allowed.any() else 0.0


class RocCounter:
    """Histogram of the distances of genuine and impostor pairs, filled from blocks of distances.

    Thresholds are the edges of 2^20 bins. The false accept rate therefore never exceeds the requested rate, and the
    true accept rate is underestimated by at most the fraction of genuine pairs in one bin.

    Args:
        identities: identities and cameras of Q queries and G gallery images.
        limit: lower edge of the last bin, which contains all larger distances.
        junk: junk rule, see ``Matches``; junk pairs are neither genuine nor impostor. Default:
            ``SAME_CAMERA``, the rule of Market-1501.

    Attributes:
        counts: (2, 2^20) int64, number of genuine and impostor pairs per bin.
    """

    def __init__(self, identities: Identities, *, limit: float, junk: Junk | None = SAME_CAMERA) -> None:
        self.matches = Matches(identities, junk=junk)
        self._scale = _BINS / max(limit, _MIN_LIMIT)
        self.counts = torch.zeros(2, _BINS, dtype=torch.int64)

    def add(self, start: int, distances: torch.Tensor) -> None:
        """Count the pairs of queries ``start:start + B``, given (B, G) distances, which are not modified."""
        genuine, impostor = self.counts
        for first, last in self.matches.spans(start, start + len(distances)):
            part, pairs = distances[first - start : last - start], self.matches.pairs(first, last)
            genuine_counts = self._histogram(part[pairs.rows, pairs.columns])
            genuine += genuine_counts
            for chunk in part.reshape(-1).split(_CHUNK):
                impostor += self._histogram(chunk)
            impostor -= genuine_counts + self._histogram(part[pairs.junk_rows, pairs.junk_columns])

    def _histogram(self, distances: torch.Tensor) -> torch.Tensor:
        bins = (distances * self._scale).clamp(0, _BINS - 1).long()
        return torch.bincount(bins, minlength=_BINS).cpu()

    def result(self) -> RocCurve | None:
        """Compute the curve over the pairs of all ranks; None if there are no genuine or no impostor pairs."""
        genuine, impostor = sum_over_ranks(self.counts).numpy()
        if not genuine.any() or not impostor.any():
            return None
        used = np.flatnonzero(genuine + impostor)  # empty bins change neither rate
        tar, far = (counts[used].cumsum() / counts.sum() for counts in (genuine, impostor))
        thresholds = np.where(used < _BINS - 1, (used + 1) / self._scale, np.inf)
        thresholds, tar, far = (np.append(0.0, column) for column in (thresholds, tar, far))
        return RocCurve(thresholds, tar, far, int(genuine.sum()), int(impostor.sum()))


def write_roc(curve: RocCurve, rates: Sequence[float], folder: Path) -> list[Path]:
    """Write the curve to ``roc.npz`` and, if matplotlib is installed, a plot to ``roc.png``.

    Args:
        curve: ROC curve.
        rates: false accept rates to mark in the plot.
        folder: output folder, created if missing.

    Returns:
        The paths of the written files.

    Raises:
        ConfigError: if a file cannot be written.
    """
    paths = [folder / "roc.npz"]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(paths[0], **asdict(curve))
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning(
            'the ROC plot is not drawn, because matplotlib is not installed.\n  fix: pip install "fastamp[vis]"'
        )
        return paths
    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    axes.step(curve.far, 100 * curve.tar, where="post")
    for rate in rates:
        axes.plot(rate, 100 * curve.tar_at(rate), "o", label=f"{100 * curve.tar_at(rate):.2f} % at {rate:.10g}")
    axes.set(xscale="log", xlim=(min(0.1, 1 / curve.num_impostor), 1), ylim=(0, 100))
    axes.set(xlabel="false accept rate", ylabel="true accept rate (%)")
    axes.set_title(f"{curve.num_genuine:,} genuine and {curve.num_impostor:,} impostor pairs")
    axes.grid(alpha=0.3)
    if rates:
        axes.legend(loc="lower right")
    paths.append(folder / "roc.png")
    with writing(paths[1]):
        figure.savefig(paths[1], dpi=120)
    return paths
