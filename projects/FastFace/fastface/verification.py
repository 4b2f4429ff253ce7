"""Verification of face pairs by ten folds, as in the evaluation of LFW, CFP-FP and AgeDB."""

import numpy as np

THRESHOLDS = np.arange(0, 4, 0.01)
"""Thresholds of the squared Euclidean distance of normalized features."""


def verify_pairs(embeddings: np.ndarray, same: np.ndarray, *, folds: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Verify pairs of faces: a pair is accepted if its distance is below a threshold chosen on the other folds.

    Huang et al. 2007, "Labeled Faces in the Wild"; the thresholds and the contiguous folds are those of insightface. Of
    thresholds with the same accuracy, the lowest is chosen.

    Args:
        embeddings: (2 N, D) float; pair i is rows 2 i and 2 i + 1.
        same: (N,) bool, True for pairs of one identity.
        folds: number of folds F, at most N. Default 10.

    Returns:
        ``(accuracies, thresholds)``: (F,) accuracy of each fold in 0..1, and its threshold, chosen on the other folds.

    Raises:
        ValueError: if the numbers of rows and pairs differ, or there are fewer pairs than folds.
    """
    if len(embeddings) != 2 * len(same) or len(same) < folds:
        raise ValueError(f"expected 2 rows for each of at least {folds} pairs, got {len(embeddings)} and {len(same)}")
    unit = embeddings / np.maximum(np.linalg.norm(embeddings, axis=1, keepdims=True), 1e-12)
    distances = np.square(unit[0::2] - unit[1::2]).sum(axis=1)
    correct = (distances[:, None] < THRESHOLDS) == np.asarray(same, dtype=bool)[:, None]  # (N, T)
    accuracies, chosen = [], []
    for fold in np.array_split(np.arange(len(same)), folds):
        others = np.ones(len(same), dtype=bool)
        others[fold] = False
        best = int(correct[others].mean(axis=0).argmax())  # the first of equal ones
        accuracies.append(correct[fold, best].mean())
        chosen.append(THRESHOLDS[best])
    return np.array(accuracies), np.array(chosen)
