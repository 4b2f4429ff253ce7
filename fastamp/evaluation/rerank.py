"""Re-ranking with k-reciprocal neighbors (Zhong et al. 2017, arXiv:1701.08398), sparse and in blocks.

Each image is encoded as a vector of weights of its k-reciprocal neighbors among all query and gallery images, and
the Jaccard distance between these vectors is computed. No dense N x N matrix is allocated: the vectors have tens of
nonzero entries and are rows of sparse matrices.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from fastamp.config import CfgNode
from fastamp.evaluation.neighbors import search_neighbors
from fastamp.layers.distance import DistanceBlocks, FeatureDistances, check_metric, pair_distances
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError, check_choice

if TYPE_CHECKING:
    from scipy.sparse import csc_matrix, csr_matrix

VARIANTS = ("zhong", "torchreid", "fastreid")
# Number of entries of the Jaccard sums computed at once.
_CHUNK = 2**21


@dataclass(frozen=True, kw_only=True)
class ReRanking:
    """Settings of k-reciprocal re-ranking.

    Attributes:
        k1: number of nearest neighbors among which k-reciprocal neighbors are searched. Default: 20.
        k2: number of neighbors whose weights are averaged (local query expansion). Default: 6; 1 disables averaging.
        lambda_value: weight of the original distance in the final distance, in 0..1; lambda in the paper. Default: 0.3.
        variant: implementation. ``"zhong"`` (default): as in the authors' code, squared Euclidean distances divided by
            the maximum of each row, and k1 + 1 neighbors including the image itself. ``"torchreid"``: as ``"zhong"``,
            but the scaled distances are squared again, as in torchreid and older FastReID code. ``"fastreid"``: as in
            current FastReID code, unscaled distances and k1 neighbors.

    Raises:
        ConfigError: if a value is unknown or out of range.
    """

    k1: int = 20
    k2: int = 6
    lambda_value: float = 0.3
    variant: str = "zhong"

    @property
    def num_neighbors(self) -> int:
        """Number of nearest neighbors for the reciprocity test, including the image itself."""
        return self.k1 if self.variant == "fastreid" else self.k1 + 1

    def __post_init__(self) -> None:
        check_choice("TEST.RERANK.VARIANT", self.variant, VARIANTS)
        if min(self.k1, self.k2) < 1 or not 0 <= self.lambda_value <= 1:
            raise ConfigError(
                "TEST.RERANK: K1 and K2 must be at least 1, and LAMBDA must be in 0..1; got "
                f"K1 {self.k1}, K2 {self.k2}, LAMBDA {self.lambda_value}.\n"
                "  fix: correct them; TEST.RERANK.ENABLED False disables re-ranking"
            )

    @classmethod
    def from_config(cls, cfg: CfgNode) -> "ReRanking":
        """Build the settings from ``cfg.TEST.RERANK``."""
        keys = cfg.TEST.RERANK
        return cls(k1=keys.K1, k2=keys.K2, lambda_value=keys.LAMBDA, variant=keys.VARIANT)

    def __str__(self) -> str:
        return f"re-ranking ({self.variant}, k1 {self.k1}, k2 {self.k2}, lambda {self.lambda_value:g})"


class ReRankedDistances(DistanceBlocks):
    """Re-ranked distances of queries to the gallery.

    Args:
        query_features: (Q, D) float, any precision; converted to float32.
        gallery_features: (G, D) float, on the same device.
        metric: ``"cosine"`` normalizes the features first, ``"euclidean"`` does not.
        options: settings of re-ranking.
        backend: backend of ``nearest_neighbors``. Default: ``"auto"``.
        memory_budget_mb: memory for distances in MiB. If the distances of all queries fit, they are computed once, for
            the neighbor search and for the result. Default: 256.

    Raises:
        ConfigError: if the metric or backend is unknown.
    """

    def __init__(
        self,
        query_features: torch.Tensor,
        gallery_features: torch.Tensor,
        *,
        metric: str,
        options: ReRanking,
        backend: str = "auto",
        memory_budget_mb: float = 256,
    ) -> None:
        self.options, self.memory_budget_mb = options, memory_budget_mb
        self.shape = (len(query_features), len(gallery_features))
        self.dtype, self.device = torch.float32, gallery_features.device
        features = torch.cat((query_features.detach().float(), gallery_features.detach().float()))
        if check_metric(metric) == "cosine":
            F.normalize(features, dim=1, out=features)
        # Centering keeps the distances and makes rounding errors relative to the spread instead of the offset.
        features -= features.mean(0)
        search: dict[str, Any] = {"metric": "euclidean", "memory_budget_mb": memory_budget_mb}
        self._original = FeatureDistances(*features.split(self.shape), **search)
        # FastReID adds the distance of the metric: 1 - cosine is half the squared distance of unit vectors.
        self._scale = 0.5 if options.variant == "fastreid" and metric == "cosine" else 1.0
        self._kept = self._keep_distances() if backend != "faiss" else None
        if self._kept is None:
            distances = FeatureDistances(features, features, **search)
        else:
            distances = _JointDistances(features, self._kept, **search)
        neighbors = search_neighbors(distances, max(options.num_neighbors, options.k2), backend=backend)
        weights = reciprocal_weights(features, neighbors.indices, neighbors.farthest, options)
        self._farthest = torch.from_numpy(neighbors.farthest[: len(query_features)]).to(self.device)
        self._query_weights = weights[: len(query_features)]
        self._gallery_weights = weights[len(query_features) :].tocsc()
        self.limit = None if options.variant == "fastreid" else 1.0

    def rows(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Compute the re-ranked distances of queries ``start:stop``, see ``DistanceBlocks``."""
        lambda_value = self.options.lambda_value
        if self._kept is None:
            self._original.rows(start, stop, out)
        else:
            out.copy_(self._kept[start:stop])
        if self.options.variant != "fastreid":
            out /= self._farthest[start:stop, None].clamp_min(torch.finfo(torch.float32).tiny)
        if self.options.variant == "torchreid":
            out.square_()
        overlap = torch.zeros_like(out)
        add_overlaps(self._query_weights[start:stop], self._gallery_weights, overlap)
        jaccard = overlap.div_(2 - overlap).neg_().add_(1)
        out.mul_(lambda_value * self._scale).add_(jaccard, alpha=1 - lambda_value)

    def _keep_distances(self) -> torch.Tensor | None:
        """Compute the original distances in the blocks of ``blocks``; None if they exceed the memory budget.

        In a distributed run, each rank needs the distances of all queries for the search, but computes only its part.
        """
        num_queries, num_gallery = self.shape
        if comm.get_world_size() > 1 or num_queries * num_gallery * self.dtype.itemsize > self.memory_budget_mb * 2**20:
            return None
        kept = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for start, block in zip(range(0, num_queries, self.block_rows), kept.split(self.block_rows), strict=True):
            self._original.rows(start, start + len(block), block)
        return kept

    @property
    def block_rows(self) -> int:
        """Number of queries per block; each block requires two additional buffers of the same size."""
        return max(1, super().block_rows // 3)


class _JointDistances(FeatureDistances):
    """Squared Euclidean distances between all images: Q queries, then G gallery images.

    Only the distances within both sets are computed.

    Args:
        features: (Q + G, D) float32.
        query_to_gallery: (Q, G) float32, squared distances of the queries to the gallery images.
        **options: see ``FeatureDistances``.
    """

    def __init__(self, features: torch.Tensor, query_to_gallery: torch.Tensor, **options: Any) -> None:
        super().__init__(features, features, **options)
        self._query_to_gallery = query_to_gallery
        self._within = [FeatureDistances(side, side, **options) for side in features.split(query_to_gallery.shape)]

    def rows(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Write the distances of images ``start`` to ``stop`` (exclusive) into ``out``; see ``DistanceBlocks``."""
        num_queries, (queries, gallery) = len(self._query_to_gallery), self._within
        middle = min(max(start, num_queries), stop)
        upper, lower = out.split((middle - start, stop - middle))
        if len(upper):
            queries.rows(start, middle, upper[:, :num_queries])
            upper[:, num_queries:] = self._query_to_gallery[start:middle]
        if len(lower):
            first, last = middle - num_queries, stop - num_queries
            lower[:, :num_queries] = self._query_to_gallery[:, first:last].T
            gallery.rows(first, last, lower[:, num_queries:])


def reciprocal_weights(
    features: torch.Tensor, neighbors: np.ndarray, farthest: np.ndarray, options: ReRanking
) -> "csr_matrix":
    """Compute the (N, N) sparse float32 weights of each image's k-reciprocal neighbors; rows sum to 1.

    Args:
        features: (N, D) float32.
        neighbors: (N, k) int64, nearest first, including the image itself.
        farthest: (N,) float32, largest squared distance from each image; not used by the variant ``"fastreid"``.
        options: settings of re-ranking.
    """
    from scipy.sparse import csr_matrix

    reciprocal = _reciprocal(neighbors[:, : options.num_neighbors])
    near = _reciprocal(neighbors[:, : round(options.k1 / 2) + 1])
    # Add the k1 / 2 reciprocal neighbors of a neighbor if more than 2/3 of them are already in the set.
    common = (reciprocal @ near.T).multiply(reciprocal).tocsr()
    sizes = np.diff(near.indptr)
    common.data = (common.data > 2 / 3 * sizes[common.indices]).astype(np.float32)
    members = (reciprocal + common @ near).tocsr()
    members.eliminate_zeros()
    members.sort_indices()

    rows = np.repeat(np.arange(members.shape[0]), np.diff(members.indptr))
    pairs = (torch.from_numpy(indices.astype(np.int64)).to(features.device) for indices in (rows, members.indices))
    distances = pair_distances(features, features, *pairs).cpu().numpy()
    if options.variant != "fastreid":
        distances /= np.maximum(farthest, np.finfo(np.float32).tiny)[rows]
    if options.variant == "torchreid":
        np.square(distances, out=distances)
    # The distance of an image to itself is 0, so no row underflows completely.
    weights = np.exp(-distances)
    weights /= np.bincount(rows, weights=weights, minlength=members.shape[0])[rows]
    weights = csr_matrix((weights.astype(np.float32), members.indices, members.indptr), shape=members.shape)
    if options.k2 == 1:
        return weights
    mean = neighbors[:, : options.k2]
    return (_adjacency(mean, 1 / mean.shape[1]) @ weights).tocsr()


def _adjacency(neighbors: np.ndarray, value: float = 1.0) -> "csr_matrix":
    """Build an (N, N) sparse matrix whose rows contain ``value`` at the neighbors of each image."""
    from scipy.sparse import csr_matrix

    count, k = neighbors.shape
    data = np.full(count * k, value, dtype=np.float32)
    return csr_matrix((data, neighbors.reshape(-1), np.arange(0, count * k + 1, k)), shape=(count, count))


def _reciprocal(neighbors: np.ndarray) -> "csr_matrix":
    """Build an (N, N) sparse matrix that is 1 for pairs of images that are neighbors of each other."""
    forward = _adjacency(neighbors)
    mutual = forward.multiply(forward.T).tocsr()
    mutual.sort_indices()
    return mutual


def add_overlaps(query_weights: "csr_matrix", gallery_weights: "csc_matrix", overlap: torch.Tensor) -> None:
    """Add the sum of min(query weight, gallery weight) over all images to ``overlap``.

    Args:
        query_weights: (B, N) sparse, CSR.
        gallery_weights: (G, N) sparse, CSC.
        overlap: (B, G) float32 zeros, contiguous; modified in place.
    """
    num_gallery = overlap.shape[1]
    rows = np.repeat(np.arange(query_weights.shape[0]), np.diff(query_weights.indptr))
    begins = gallery_weights.indptr[query_weights.indices]
    counts = gallery_weights.indptr[query_weights.indices + 1] - begins
    totals = np.cumsum(counts)
    first = 0
    while first < len(rows):
        # At least one query weight, and as many as fit into a chunk of pairs.
        done = totals[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(totals, done + _CHUNK, side="right")))
        part = slice(first, last)
        number = counts[part]
        entries = np.arange(number.sum()) + np.repeat(begins[part] - (np.cumsum(number) - number), number)
        minimum = np.minimum(np.repeat(query_weights.data[part], number), gallery_weights.data[entries])
        targets = np.repeat(rows[part] * num_gallery, number) + gallery_weights.indices[entries]
        targets, minimum = (torch.from_numpy(array).to(overlap.device) for array in (targets, minimum))
        overlap.view(-1).index_add_(0, targets, minimum)
        first = last
