"""Verification: the share of genuine pairs accepted at a given share of false accepts, in bounded memory."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from fastamp.evaluation.protocol import SAME_CAMERA, Identities, Junk, Matches, Pairs, junk_from_cross_camera
from fastamp.layers.distance import DistanceBlocks
from fastamp.utils import comm
from fastamp.utils.errors import writing
from fastamp.utils.moved import moved_names, renamed_arguments

logger = logging.getLogger(__name__)

# Bins of equal width; cosine distances, from 0 to 2, are told apart to 2e-6.
_BINS = 2**20
# Entries of a block whose bins are held at once.
_CHUNK = 2**20
# Below it a distance times the bins in its inverse would overflow in float32.
_MIN_LIMIT = 1e-30
# Queries whose distances say where those of a metric without a bound lie.
_NUM_SAMPLED = 64

__getattr__ = moved_names(
    __name__,
    {
        "accept_rate_name": "fastamp.evaluation.protocol.accept_rate_name",
        "limit_of": "fastamp.evaluation.roc.distance_limit",
    },
)


@renamed_arguments(distances="blocks")
def distance_limit(blocks: DistanceBlocks) -> float:
    """Return a distance that few pairs lie above: the largest possible, or four times the median of some queries'."""
    if blocks.limit is not None:
        return blocks.limit
    count, width = blocks.shape
    sample = torch.empty(min(_NUM_SAMPLED, count), width, dtype=blocks.dtype, device=blocks.device)
    for number, row in enumerate(sample):
        query = number * count // len(sample)
        blocks.rows(query, query + 1, row[None])
    return 4 * sample.median().item()


def sum_over_ranks(counts: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks, on the CPU."""
    return comm.all_reduce_sum(counts.to(comm.transport_device())).cpu() if comm.is_distributed() else counts


@dataclass(frozen=True)
class RocCurve:
    """Accept rates over all thresholds.

    Attributes:
        thresholds: (T,) float64, ascending, of cosine, squared Euclidean or re-ranked distances; a pair is accepted
            when its distance lies below. The last may be infinite.
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
        identities: of Q queries and G gallery images.
        limit: where the last bin begins; distances above are not told apart.
        junk: see ``Matches``; it is neither a genuine nor an impostor pair.

    Attributes:
        counts: (2, 2^20) int64, genuine and impostor pairs by distance.
    """

    @renamed_arguments(ids="identities", cross_camera=("junk", junk_from_cross_camera))
    def __init__(self, identities: Identities, *, limit: float, junk: Junk | None = SAME_CAMERA) -> None:
        self.matches = Matches(identities, junk=junk)
        self._scale = _BINS / max(limit, _MIN_LIMIT)
        self.counts = torch.zeros(2, _BINS, dtype=torch.int64)

    @renamed_arguments(block="distances")
    def add(self, start: int, distances: torch.Tensor) -> None:
        """Count the pairs of the queries from ``start`` on by their (B, G) distances, which stay as they are."""
        for first, last in self.matches.spans(start, start + len(distances)):
            self._count(distances[first - start : last - start], self.matches.pairs(first, last))

    def _count(self, distances: torch.Tensor, pairs: Pairs) -> None:
        entries = ((pairs.rows, pairs.columns), (pairs.junk_rows, pairs.junk_columns))
        genuine_counts, junk_counts = (
            self._histogram(distances[tuple(torch.from_numpy(side).to(distances.device) for side in each)])
            for each in entries
        )
        genuine, impostor = self.counts
        genuine += genuine_counts
        for chunk in distances.reshape(-1).split(_CHUNK):
            impostor += self._histogram(chunk)
        impostor -= genuine_counts + junk_counts

    def _histogram(self, distances: torch.Tensor) -> torch.Tensor:
        bins = (distances * self._scale).clamp(0, _BINS - 1).long()
        return torch.bincount(bins, minlength=_BINS).cpu()

    def result(self) -> RocCurve | None:
        """Return the curve of the pairs that all ranks have counted; None without genuine or without impostor pairs."""
        genuine, impostor = sum_over_ranks(self.counts).numpy()
        if not genuine.any() or not impostor.any():
            return None
        used = np.flatnonzero(genuine + impostor)  # a bin without pairs moves neither rate
        tar, far = (counts[used].cumsum() / counts.sum() for counts in (genuine, impostor))
        zero = np.zeros(1)
        return RocCurve(
            thresholds=np.concatenate((zero, np.where(used < _BINS - 1, (used + 1) / self._scale, np.inf))),
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

    Raises:
        ConfigError: they cannot be written.
    """
    paths = [folder / "roc.npz"]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(paths[0], **asdict(curve))
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning('no picture of the curve: it needs matplotlib (pip install "fastamp[vis]")')
        return paths
    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    axes.step(curve.far, 100 * curve.tar, where="post")
    for rate in rates:
        axes.plot(rate, 100 * curve.tar_at(rate), "o", label=f"{100 * curve.tar_at(rate):.2f} % at {rate:.10g}")
    axes.set(xscale="log", xlim=(min(0.1, 1 / curve.num_impostor), 1), ylim=(0, 100))
    axes.set(xlabel="false accept rate", ylabel="true accept rate in percent")
    axes.set_title(f"{curve.num_genuine:,} genuine and {curve.num_impostor:,} impostor pairs")
    axes.grid(alpha=0.3)
    if rates:
        axes.legend(loc="lower right")
    paths.append(folder / "roc.png")
    with writing(paths[1]):
        figure.savefig(paths[1], dpi=120)
    return paths
