"""Metrics of attribute recognition."""

from typing import Any

import torch

_EPS = 1e-20


class AttributeCounts:
    """Counts from which label-based and instance-based metrics are computed (Li et al. 2016, arXiv:1603.07054).

    Missing labels do not count. As in FastReID, an image without predicted or labeled attributes counts as 0 in the
    instance-based metrics, also if both sets are empty.

    Args:
        probabilities: (N, A) float, in 0..1.
        labels: (N, A) float: positive above 0.5; NaN for missing.
        threshold: an attribute is predicted if its probability is at least this value.
    """

    def __init__(self, probabilities: torch.Tensor, labels: torch.Tensor, threshold: float = 0.5) -> None:
        known = ~labels.isnan()
        positive, predicted = (labels > 0.5) & known, (probabilities >= threshold) & known
        hits = predicted & positive
        rows = (hits, positive, known & ~positive & ~predicted, known & ~positive)
        self.sums = torch.stack([row.sum(0).double() for row in rows])
        both, guessed, truth = (mask.sum(1).double() for mask in (hits, predicted, positive))
        ratios = (both / (guessed + truth - both + _EPS), both / (guessed + _EPS), both / (truth + _EPS))
        self.instances = [ratio.sum().item() / max(len(labels), 1) for ratio in ratios]

    def mean_accuracies(self) -> torch.Tensor:
        """Compute the mean of the rates of true positives and true negatives of each attribute, (A,) in 0..1.

        The rate of an attribute without positives, or without negatives, is 0.
        """
        hits, positives, rejected, negatives = self.sums
        return (hits / (positives + _EPS) + rejected / (negatives + _EPS)) / 2

    def of_attributes(self) -> dict[str, torch.Tensor]:
        """Compute the metrics of each attribute, a binary classification; each is (A,) float64, NaN if not defined.

        Returns:
            ``images`` and ``positives``, numbers of known and of positive labels; and in percent ``fraction`` (of
            positives), ``mA``, ``accuracy``, ``majority`` (accuracy of always giving the more frequent
            answer), ``precision``, ``recall`` and ``f1``.
        """
        hits, positives, rejected, negatives = self.sums
        images, predicted = positives + negatives, hits + negatives - rejected
        fractions = {
            "fraction": positives / images,
            "mA": self.mean_accuracies(),
            "accuracy": (hits + rejected) / images,
            "majority": torch.maximum(positives, negatives) / images,
            "precision": hits / predicted,
            "recall": hits / positives,
            "f1": 2 * hits / (predicted + positives),
        }
        return {"images": images, "positives": positives} | {
            name: 100 * fraction for name, fraction in fractions.items()
        }

    def one_sided(self) -> list[int]:
        """Return the attributes without positives or without negatives, which lower the mean accuracy."""
        return torch.where((self.sums[1] == 0) | (self.sums[3] == 0))[0].tolist()

    def metrics(self) -> dict[str, Any]:
        """Compute mA and the instance-based accuracy, precision, recall and F1, in percent.

        F1 is that of the mean precision and the mean recall. ``metric`` is mA.
        """
        accuracy, precision, recall = self.instances
        f1 = 2 * precision * recall / (precision + recall + _EPS)
        mean = self.mean_accuracies().mean().item()
        values = {"Accu": accuracy, "Prec": precision, "Recall": recall, "F1": f1, "mA": mean, "metric": mean}
        return {name: 100 * value for name, value in values.items()}
