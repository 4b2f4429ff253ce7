"""FastReID's evaluation functions, computed by ``fastamp.evaluation``."""

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tabulate import tabulate
from torch import nn

from fastamp.amp import to_float32
from fastamp.evaluation.evaluator import DatasetEvaluator
from fastamp.evaluation.metrics import rank_distances
from fastamp.evaluation.neighbors import nearest_neighbors
from fastamp.evaluation.protocol import Identities
from fastamp.evaluation.query_expansion import QueryExpansion, expand
from fastamp.evaluation.rerank import ReRankedDistances, ReRanking, add_overlaps, reciprocal_weights
from fastamp.layers.distance import pairwise_distance, squared_euclidean_distance
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError, check_choice

logger = logging.getLogger(__name__)


def evaluate_rank(
    distmat: np.ndarray,
    q_pids: np.ndarray,
    g_pids: np.ndarray,
    q_camids: np.ndarray,
    g_camids: np.ndarray,
    max_rank: int = 50,
    use_metric_cuhk03: bool = False,
    use_cython: bool = True,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rank a gallery by precomputed distances under the Market-1501 protocol (Zheng et al. 2015).

    Args:
        distmat: (Q, G) distances.
        q_pids, g_pids: (Q,) and (G,) integer identities.
        q_camids, g_camids: (Q,) and (G,) integer cameras.
        max_rank: length of the CMC curve; at most G. Default 50.
        use_metric_cuhk03: not supported: the single-gallery-shot protocol is ``TEST.PROTOCOL`` cuhk03. Default False.
        use_cython: ignored.

    Returns:
        ``(cmc, all_AP, all_INP)``: CMC at ranks 1 to ``max_rank``, float32 in 0..1; average precision and inverse
        negative penalty of each query that has a match, float64 in 0..1, in query order.

    Raises:
        ConfigError: if ``use_metric_cuhk03`` is True.
        DataError: if the shapes do not match, or a distance is NaN.
        AssertionError: if no query has a match.
    """
    if use_metric_cuhk03:
        return eval_cuhk03(distmat, q_pids, g_pids, q_camids, g_camids, max_rank)
    sides = (torch.as_tensor(np.asarray(side, dtype=np.int64)) for side in (q_pids, g_pids, q_camids, g_camids))
    result = rank_distances(torch.as_tensor(np.asarray(distmat)), Identities(*sides))
    assert result.num_valid > 0, "all query identities are missing from the gallery"
    valid, ranks = result.valid, min(max_rank, distmat.shape[1])
    cmc = np.array([result.cmc(rank) for rank in range(1, ranks + 1)], dtype=np.float32)
    return cmc, result.ap[valid].numpy(), result.inp[valid].numpy()


def eval_market1501(
    distmat: np.ndarray,
    q_pids: np.ndarray,
    g_pids: np.ndarray,
    q_camids: np.ndarray,
    g_camids: np.ndarray,
    max_rank: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rank a gallery under the Market-1501 protocol; see ``evaluate_rank``."""
    return evaluate_rank(distmat, q_pids, g_pids, q_camids, g_camids, max_rank)


def eval_cuhk03(*args: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Raise an error: the single-gallery-shot protocol needs seeded random galleries.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        "evaluate_rank does not support the single-gallery-shot protocol of CUHK03.\n"
        "  fix: set TEST.PROTOCOL to cuhk03, and evaluate with ReidEvaluator"
    )


def aqe(
    query_feat: torch.Tensor, gallery_feat: torch.Tensor, qe_times: int = 1, qe_k: int = 10, alpha: float = 3.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expand query (Q, D) and gallery (G, D) features by alpha-QE; see ``fastamp.evaluation.query_expansion``."""
    return expand(query_feat, gallery_feat, QueryExpansion(k=qe_k, alpha=alpha, times=qe_times))


@torch.no_grad()
def build_dist(feat_1: torch.Tensor, feat_2: torch.Tensor, metric: str = "euclidean", **kwargs: Any) -> np.ndarray:
    """Compute the distances between two sets of features.

    Args:
        feat_1: (M, D) features.
        feat_2: (N, D) features.
        metric: ``"euclidean"`` (squared, as in FastReID), ``"cosine"`` or ``"jaccard"``. Default ``"euclidean"``.
        kwargs: ``k1`` and ``k2`` (int) of the Jaccard distance. Default 20 and 6.

    Returns:
        (M, N) float32.
    """
    check_choice("metric", metric, ("euclidean", "cosine", "jaccard"))
    if metric == "euclidean":
        return squared_euclidean_distance(feat_1, feat_2).cpu().numpy()
    if metric == "cosine":
        return pairwise_distance(feat_1, feat_2, "cosine").cpu().numpy()
    return re_ranking_distances(feat_1, feat_2, k1=kwargs.get("k1", 20), k2=kwargs.get("k2", 6), lambda_value=0.0)


def re_ranking_distances(
    feat_1: torch.Tensor, feat_2: torch.Tensor, *, k1: int, k2: int, lambda_value: float
) -> np.ndarray:
    """Compute the re-ranked distances (M, N) of FastReID's variant; see ``fastamp.evaluation.rerank.ReRanking``."""
    options = ReRanking(k1=k1, k2=k2, lambda_value=lambda_value, variant="fastreid")
    distances = ReRankedDistances(feat_1, feat_2, metric="euclidean", options=options)
    return np.concatenate([block.cpu().numpy().copy() for _, block in distances.blocks()])


def compute_euclidean_distance(features: torch.Tensor, others: torch.Tensor) -> np.ndarray:
    """Compute squared Euclidean distances; see ``build_dist``."""
    return build_dist(features, others, "euclidean")


def compute_cosine_distance(features: torch.Tensor, others: torch.Tensor) -> np.ndarray:
    """Compute 1 - cosine similarity; see ``build_dist``."""
    return build_dist(features, others, "cosine")


@torch.no_grad()
def compute_jaccard_distance(
    features: torch.Tensor, k1: int = 20, k2: int = 6, search_option: int = 0, fp16: bool = False
) -> np.ndarray:
    """Compute the Jaccard distances (N, N) of features (N, D), e.g. for clustering.

    ``search_option`` and ``fp16`` are ignored: the neighbors are exact and distances are float32. For many images, use
    ``fastamp.evaluation.clustering.jaccard_distances``, which stores the small distances only.
    """
    features = features.detach().float()
    features = features - features.mean(0)  # rounding errors become relative to the spread instead of the offset
    neighbors = nearest_neighbors(features, features, max(k1, k2))
    options = ReRanking(k1=k1, k2=k2, variant="fastreid")
    weights = reciprocal_weights(features, neighbors.indices, neighbors.farthest, options)
    overlap = torch.zeros(weights.shape)
    add_overlaps(weights, weights.tocsc(), overlap)
    return (1 - overlap / (2 - overlap)).clamp_min(0).numpy()


def re_ranking(
    q_g_dist: np.ndarray,
    q_q_dist: np.ndarray,
    g_g_dist: np.ndarray,
    k1: int = 20,
    k2: int = 6,
    lambda_value: float = 0.3,
) -> np.ndarray:
    """Raise an error: re-ranking takes features, so that no distance matrix of the whole test set is stored.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        "re_ranking does not support distance matrices.\n"
        "  fix: set TEST.RERANK.ENABLED True, or pass the features to fastamp.evaluation.rerank.ReRankedDistances"
    )


@contextmanager
def inference_context(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode in a ``with`` block, and restore its mode afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def flatten_results_dict(results: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested metrics: ``{"a": {"b": 1}}`` becomes ``{"a/b": 1}``."""
    flat: dict[str, Any] = {}
    for name, value in results.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}/{inner}": metric for inner, metric in flatten_results_dict(value).items()}
        else:
            flat[name] = value
    return flat


def print_csv_format(results: MutableMapping[str, Any]) -> None:
    """Log a table of metrics, one row per dataset.

    Args:
        results: dataset name -> metrics; or the metrics of one dataset, with its name as ``dataset``, which is removed
            as in FastReID.
    """
    if not all(isinstance(metrics, Mapping) for metrics in results.values()):
        results = {results.pop("dataset", ""): results}
    columns = {
        name: None for metrics in results.values() for name, value in metrics.items() if isinstance(value, int | float)
    }
    rows = [[dataset, *(metrics.get(name, "") for name in columns)] for dataset, metrics in results.items()]
    table = tabulate(rows, headers=["dataset", *columns], tablefmt="github", floatfmt=".2f")
    logger.info("evaluation results:\n%s", table)


class ClasEvaluator(DatasetEvaluator):
    """Top-1 accuracy of a classifier.

    Args:
        cfg: unused; for compatibility with FastReID.
        output_dir: unused.
    """

    def __init__(self, cfg: Any, output_dir: str | None = None) -> None:
        self.reset()

    def metric_names(self) -> list[str]:
        """List the names of the metrics."""
        return ["Acc@1", "metric"]

    def reset(self) -> None:
        """Discard all accumulated batches."""
        self._correct: list[torch.Tensor] = []

    def process(self, inputs: dict[str, Any], outputs: torch.Tensor) -> None:
        """Accumulate one batch of logits, (B, K), and of ``targets``, (B,) int64."""
        self._correct.append(to_float32(outputs).argmax(1).cpu() == inputs["targets"].cpu())

    def evaluate(self) -> dict[str, Any] | None:
        """Compute the accuracy in percent over all ranks; return None on ranks other than 0."""
        correct = sum(int(batch.sum()) for batch in self._correct)
        total = sum(map(len, self._correct))
        correct, total = comm.sum_over_ranks([correct, total])
        if not comm.is_main_process():
            return None
        accuracy = 100.0 * correct / max(1, total)
        return OrderedDict({"Acc@1": accuracy, "metric": accuracy})
