"""FastReID's ranking of a gallery by distances, which does not need the other ranks."""

from typing import Any

import numpy as np
import torch

from fastamp.evaluation.identities import Identities
from fastamp.evaluation.ranking_rule import rank_distances
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError


@comm.as_single_process()
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
