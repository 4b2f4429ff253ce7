"""FastReID's re-ranking of distance matrices, which is not supported."""

import numpy as np

from fastamp.utils.errors import ConfigError


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
