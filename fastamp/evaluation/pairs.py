"""Score distributions of genuine and impostor pairs, used as a reference when two images are compared."""

import itertools
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastamp.evaluation.identities import SAME_CAMERA, Identities, Junk, Matches
from fastamp.layers.distance import pairwise_distance
from fastamp.utils.missing import MISSING

_QUANTILES = 1001
# Sampling this many takes less than a second for a test set of any size.
_QUERIES, _GALLERY, _MATCHES = 500, 10_000, 20

Features = Any  # a tensor, or an object whose rows can be indexed as NumPy arrays


@dataclass(frozen=True)
class PairScores:
    """Quantiles of the scores of sampled pairs: cosine similarities or Euclidean distances.

    Attributes:
        metric: ``"cosine"`` or ``"euclidean"``.
        genuine: (1001,) float32, quantiles 0, 0.001, ..., 1 of the scores of same-identity pairs, ascending.
        impostor: (1001,) float32, the same quantiles for pairs of different identities.
        num_genuine, num_impostor: number of sampled pairs.
    """

    metric: str
    genuine: Tensor
    impostor: Tensor
    num_genuine: int
    num_impostor: int

    def percentile_of(self, score: float) -> tuple[float, float]:
        """Compute ``(genuine, impostor)``: fractions in 0..1 of pairs that are less similar than ``score``."""
        shares = np.linspace(0, 1, _QUANTILES)
        below = [float(np.interp(score, scores.numpy(), shares)) for scores in (self.genuine, self.impostor)]
        genuine, impostor = below if self.metric == "cosine" else [1 - share for share in below]
        return genuine, impostor

    def state_dict(self) -> dict[str, Any]:
        """Return a dict of plain values and tensors from which ``PairScores(**state)`` restores the scores."""
        return asdict(self)

    @staticmethod
    def form() -> dict[str, Any]:
        """Return an example state dict with the expected structure, for ``structure_mismatch``."""
        quantiles = torch.zeros(_QUANTILES)
        return PairScores("cosine", quantiles, quantiles, 0, 0).state_dict()


@torch.no_grad()
def sample_pairs(
    query_features: Features,
    gallery_features: Features,
    identities: Identities,
    *,
    metric: str,
    junk: Junk | None = SAME_CAMERA,
    same_images: bool = False,
    seed: int = 0,
) -> PairScores | None:
    """Compute the scores of randomly sampled pairs of a query and a gallery image.

    Up to 500 queries with a match and up to 10,000 gallery images are sampled. Each sampled query is paired with up to
    20 of its matches (genuine pairs), and with each sampled gallery image of another identity (impostor pairs).

    Args:
        query_features: (Q, D) float; only the sampled rows are read.
        gallery_features: (G, D) float; only the sampled rows are read.
        identities: identities and cameras of the Q query and G gallery images.
        metric: ``"cosine"`` or ``"euclidean"``.
        junk: pairs to exclude, see ``Matches``; None for no junk. Default: the junk of Market-1501.
        same_images: True if queries and gallery are the same images; pairs of an image with itself are then excluded.
            Default: False.
        seed: seed of the sample. Default: 0.

    Returns:
        The scores; None if there are no genuine or no impostor pairs.
    """
    random = np.random.default_rng(seed)
    order = random.permutation(len(identities.query_pids))
    shuffled = identities.select(order, slice(None))
    matches = Matches(shuffled, junk=junk, unmatched_pid=MISSING)
    columns: list[Any] = []
    queries: list[Any] = []
    for first, last in matches.spans(0, len(order)):
        pairs = matches.pairs(first, last)
        rows, match_columns = first + pairs.rows, pairs.columns
        if same_images:
            other = match_columns != order[rows]
            rows, match_columns = rows[other], match_columns[other]
        sampled = np.unique(rows, return_index=True, return_counts=True)
        for row, start, count in itertools.islice(zip(*sampled, strict=True), _QUERIES - len(queries)):
            columns.append(random.permutation(match_columns[start : start + count])[:_MATCHES])
            queries.append(order[row])
        if len(queries) == _QUERIES:
            break
    negatives = np.delete(np.arange(len(identities.gallery_pids)), matches.unmatched)
    negatives = np.sort(random.permutation(negatives)[:_GALLERY])
    if not queries or not len(negatives):
        return None
    sampled_queries = _take_rows(query_features, np.array(queries))
    sampled_identities = identities.select(np.array(queries), negatives)
    is_impostor = sampled_identities.query_pids[:, None] != sampled_identities.gallery_pids
    excluded = Matches(sampled_identities, junk=junk)
    for first, last in excluded.spans(0, len(queries)):
        pairs = excluded.pairs(first, last)
        is_impostor[first + pairs.junk_rows, pairs.junk_columns] = False
    impostor = _scores(
        pairwise_distance(sampled_queries, _take_rows(gallery_features, negatives), metric)[is_impostor], metric
    )
    if not len(impostor):
        return None
    match_features = _take_rows(gallery_features, np.concatenate(columns)).split([len(column) for column in columns])
    distances = [
        pairwise_distance(sampled_queries[row : row + 1], features, metric)[0]
        for row, features in enumerate(match_features)
    ]
    genuine = _scores(torch.cat(distances), metric)
    return PairScores(metric, _quantiles(genuine), _quantiles(impostor), len(genuine), len(impostor))


def _take_rows(features: Features, rows: np.ndarray) -> Tensor:
    """Copy the selected rows to the CPU as float32."""
    if isinstance(features, Tensor):
        return features[torch.from_numpy(rows).to(features.device)].float().cpu()
    return torch.from_numpy(np.array(features[rows], dtype=np.float32))


def _scores(distances: Tensor, metric: str) -> Tensor:
    return 1 - distances if metric == "cosine" else distances


def _quantiles(scores: Tensor) -> Tensor:
    # np.sort is ten times as fast as torch.sort, which also sorts indices.
    positions = np.linspace(0, len(scores) - 1, _QUANTILES).round().astype(np.int64)
    return torch.from_numpy(np.sort(scores.numpy())[positions])
