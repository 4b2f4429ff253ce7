"""Metrics of identification, in which each image is given a known identity or called *new*.

Definitions of wildlife-datasets (Čermák et al. 2024, arXiv:2311.09118) and of the AnimalCLEF challenges. A label is a
text or an integer. A mean over nothing is NaN.
"""

from collections.abc import Collection, Hashable, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from fastamp.utils.errors import DataError

NEW = "new"
"""Default name of an identity that is not in the database."""

Label = Hashable
# Number of the label of unknown individuals.
_NEW_NUMBER = -1


def encode_labels(
    true: Sequence[Any], predicted: Sequence[Any], new: Label | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Number the labels of N images.

    Args:
        true, predicted: N labels, all texts or all integers except for ``new``.
        new: name of unknown individuals, of any type. Default: None, there are none.

    Returns:
        ``(true, predicted)``: (N,) int64 each; equal labels have equal numbers, and ``new`` has -1.

    Raises:
        DataError: if the numbers of labels differ, or texts and integers are mixed.
    """
    if len(true) != len(predicted):
        raise DataError(
            f"expected one prediction for each image, got {len(predicted)} predictions for {len(true)} images.\n"
            "  fix: pass one prediction for each true label"
        )
    _check_kinds(true, predicted, new=new)
    numbers: dict[Any, int] = {} if new is None else {new: _NEW_NUMBER}
    for label in (*true, *predicted):
        numbers.setdefault(label, len(numbers))
    codes, guesses = (np.array([numbers[label] for label in labels], dtype=np.int64) for labels in (true, predicted))
    return codes, guesses


def accuracy(true: Sequence[Any], predicted: Sequence[Any], new: Label | None = None) -> float:
    """Compute the fraction of the images that are predicted right, in 0..1."""
    codes, guesses = encode_labels(true, predicted, new)
    return _mean(codes == guesses)


def accuracy_known(true: Sequence[Any], predicted: Sequence[Any], new: Label = NEW) -> float:
    """Compute the accuracy on the images whose true label is not ``new``; NaN if there are none."""
    codes, guesses = encode_labels(true, predicted, new)
    return _mean((codes == guesses)[codes != _NEW_NUMBER])


def accuracy_unknown(true: Sequence[Any], predicted: Sequence[Any], new: Label = NEW) -> float:
    """Compute the accuracy on the images whose true label is ``new``; NaN if there are none."""
    codes, guesses = encode_labels(true, predicted, new)
    return _mean((codes == guesses)[codes == _NEW_NUMBER])


def normalized_accuracy(
    true: Sequence[Any], predicted: Sequence[Any], new: Label = NEW, *, known_weight: float = 0.5
) -> float:
    """Compute ``known_weight`` * accuracy of known images + (1 - ``known_weight``) * accuracy of unknown images.

    Both accuracies are means over images, not over identities. NaN if there are no known or no unknown images.
    """
    known, unknown = accuracy_known(true, predicted, new), accuracy_unknown(true, predicted, new)
    return known_weight * known + (1 - known_weight) * unknown


def balanced_accuracy(true: Sequence[Any], predicted: Sequence[Any], new: Label | None = None) -> float:
    """Compute the mean over the classes of ``true`` of the fraction of their images that are predicted right."""
    codes, guesses = encode_labels(true, predicted, new)
    return _mean_per_class(codes, codes == guesses)


def class_average_accuracy(true: Sequence[Any], predicted: Sequence[Any], new: Label | None = None) -> float:
    """Compute the mean of (TP + TN) / N over the classes of ``true`` and ``predicted``; nearly 1 for many classes."""
    counts = _ClassCounts(*encode_labels(true, predicted, new)[:2])
    wrong = counts.true + counts.predicted - 2 * counts.right
    return _mean(1 - wrong / max(1, len(true)))


def precision(
    true: Sequence[Any], predicted: Sequence[Any], new: Label | None = None, *, ignore_empty: bool = False
) -> float:
    """Compute the macro-averaged precision over the classes of ``true`` and ``predicted``, 0 for undefined ones.

    Args:
        true, predicted, new: see ``encode_labels``.
        ignore_empty: if True, average over the classes of ``true`` only. Default: False.
    """
    counts = _ClassCounts(*encode_labels(true, predicted, new)[:2])
    return counts.macro(counts.right, counts.predicted, ignore_empty)


def recall(
    true: Sequence[Any], predicted: Sequence[Any], new: Label | None = None, *, ignore_empty: bool = False
) -> float:
    """Compute the macro-averaged recall; see ``precision``. With ``ignore_empty``, it is ``balanced_accuracy``."""
    counts = _ClassCounts(*encode_labels(true, predicted, new)[:2])
    return counts.macro(counts.right, counts.true, ignore_empty)


def f1(true: Sequence[Any], predicted: Sequence[Any], new: Label | None = None, *, ignore_empty: bool = False) -> float:
    """Compute the macro-averaged F1 score; see ``precision``."""
    counts = _ClassCounts(*encode_labels(true, predicted, new)[:2])
    return counts.macro(2 * counts.right, counts.true + counts.predicted, ignore_empty)


def baks(true: Sequence[Any], predicted: Sequence[Any], unknown: Collection[Any], new: Label = NEW) -> float:
    """Compute BAKS, the balanced accuracy on known samples: a known identity that is called *new* is wrong.

    Args:
        true: N labels; unknown individuals have their real names.
        predicted: N labels.
        unknown: names of the individuals that are not in the database, of the type of the labels.
        new: prediction for unknown individuals. Default: ``"new"``.

    Returns:
        Mean over the known identities of the fraction of their images that are predicted right; NaN without any.

    Raises:
        DataError: see ``encode_labels``; also if ``unknown`` is of another type than the labels.
    """
    codes, guesses = encode_labels(true, predicted, new)
    known = ~_is_member(true, unknown, new)
    return _mean_per_class(codes[known], (codes == guesses)[known])


def baus(true: Sequence[Any], predicted: Sequence[Any], unknown: Collection[Any], new: Label = NEW) -> float:
    """Compute BAUS, the balanced accuracy on unknown samples; for the arguments, see ``baks``.

    Returns:
        Mean over the unknown identities of the fraction of their images that are predicted ``new``; NaN without any.
    """
    codes, guesses = encode_labels(true, predicted, new)
    chosen = _is_member(true, unknown, new)
    return _mean_per_class(codes[chosen], (guesses == _NEW_NUMBER)[chosen])


def geometric_mean(known: float, unknown: float) -> float:
    """Compute the geometric mean of BAKS and BAUS, the score of AnimalCLEF 2025; NaN if one of them is NaN."""
    return float(np.sqrt(known * unknown))


def auc_new(is_new: Sequence[bool] | np.ndarray, scores: Sequence[float] | np.ndarray) -> float:
    """Compute the area under the ROC curve for detecting unknown individuals by a low score.

    Args:
        is_new: (N,) bool, True for images of individuals that are not in the database.
        scores: (N,) float, e.g. the similarity to the nearest image of the database.

    Returns:
        Probability that an unknown image has a lower score than a known one, ties counted half; NaN if one kind is
        missing.

    Raises:
        DataError: if the numbers of labels and scores differ, or a score is NaN.
    """
    is_new, scores = np.asarray(is_new, dtype=bool), np.asarray(scores, dtype=np.float64)
    if is_new.shape != scores.shape or np.isnan(scores).any():
        raise DataError(
            f"AUC-new needs one score for each image; got {is_new.shape} labels and {scores.shape} scores, of which "
            f"{int(np.isnan(scores).sum())} are NaN.\n  fix: pass the similarity of the nearest image for each image"
        )
    known, unknown = np.sort(scores[~is_new]), scores[is_new]
    not_above, below = (np.searchsorted(known, unknown, side=side) for side in ("right", "left"))
    if not len(known):
        return float("nan")
    return _mean((len(known) - (not_above + below) / 2) / len(known))


def average_precision_at_k(true: Any, ranked: Sequence[Any]) -> float:
    """Compute AP@K of one query from the labels of its K nearest images, nearest first.

    The sum of the precisions at the hits is divided by the number of hits among the K images, as in wildlife-datasets,
    not by the number of all images of the identity: AP@K can fall when a further hit is added. 0 without a hit.

    Raises:
        DataError: if texts and integers are mixed.
    """
    hits = _hits(true, ranked).astype(np.float64)
    if not hits.any():
        return 0.0
    precisions = np.cumsum(hits) / np.arange(1, len(hits) + 1)
    return float(precisions[hits > 0].mean())


def mean_average_precision_at_k(true: Sequence[Any], ranked: Sequence[Sequence[Any]]) -> float:
    """Compute the mean of ``average_precision_at_k`` over N queries; NaN without queries."""
    pairs = zip(true, ranked, strict=True)
    return _mean(np.array([average_precision_at_k(label, labels) for label, labels in pairs]))


def top_k_accuracy(true: Sequence[Any], ranked: Sequence[Sequence[Any]], k: int) -> float:
    """Compute the fraction of N queries whose label is among those of their ``k`` nearest images (not identities).

    Raises:
        DataError: if ``k`` is below 1, or texts and integers are mixed.
    """
    if k < 1:
        raise DataError(f"k must be at least 1; got {k}.\n  fix: pass the number of nearest images, e.g. 5")
    pairs = zip(true, ranked, strict=True)
    return _mean(np.array([_hits(label, labels)[:k].any() for label, labels in pairs], dtype=bool))


class _ClassCounts:
    """Number of images by class: in the truth, in the predictions, and predicted right."""

    def __init__(self, true: np.ndarray, predicted: np.ndarray) -> None:
        _, codes = np.unique(np.concatenate((true, predicted)), return_inverse=True)
        true, predicted = codes[: len(true)], codes[len(true) :]
        size = int(codes.max(initial=-1)) + 1
        self.true, self.predicted = np.bincount(true, minlength=size), np.bincount(predicted, minlength=size)
        self.right = np.bincount(true[true == predicted], minlength=size)

    def macro(self, part: np.ndarray, whole: np.ndarray, ignore_empty: bool) -> float:
        fractions = np.divide(part, whole, out=np.zeros(len(whole)), where=whole > 0)
        return _mean(fractions[self.true > 0] if ignore_empty else fractions)


def _kind(label: Any) -> str:
    """Return the name of a label's type; NumPy's integers and texts are of the types of Python's."""
    if isinstance(label, Integral) and not isinstance(label, bool | np.bool_):
        return "int"
    return "str" if isinstance(label, str) else type(label).__name__


def _check_kinds(*labels: Collection[Any], new: Label | None = None) -> None:
    """Check that labels other than ``new`` are all texts or all integers; labels of two types never match.

    Raises:
        DataError: if they are not.
    """
    kinds = {_kind(label) for part in labels for label in part if new is None or label != new}
    if len(kinds) > 1 or not kinds <= {"str", "int"}:
        raise DataError(
            f"labels must be all text or all integers, got {' and '.join(sorted(kinds))}.\n"
            "  fix: convert the labels to one type, e.g. text"
        )


def _is_member(labels: Sequence[Any], chosen: Collection[Any], new: Label) -> np.ndarray:
    """Return True for each label that is in ``chosen``, which must be of the same type."""
    if isinstance(chosen, str):
        raise DataError(f"expected a list of labels, got the text {chosen!r}.\n  fix: pass [{chosen!r}]")
    _check_kinds(labels, chosen, new=new)
    names = set(chosen)
    return np.array([label in names for label in labels], dtype=bool)


def _hits(true: Any, ranked: Sequence[Any]) -> np.ndarray:
    """Return True for each of the ranked labels that equals ``true``, which must be of the same type."""
    _check_kinds([true], ranked)
    return np.array([label == true for label in ranked], dtype=bool)


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _mean_per_class(codes: np.ndarray, right: np.ndarray) -> float:
    _, classes = np.unique(codes, return_inverse=True)
    return _mean(np.bincount(classes, weights=right) / np.bincount(classes))
