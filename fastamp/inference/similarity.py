"""Compare the similarity of two images with the similarities of genuine and impostor pairs."""

from dataclasses import dataclass

import numpy as np
import torch

from fastamp.evaluation import Identities
from fastamp.evaluation.calibration import Calibration, percent
from fastamp.evaluation.identities import SAME_CAMERA, Junk
from fastamp.evaluation.pairs import PairScores, sample_pairs
from fastamp.retrieval.features import Features
from fastamp.utils.errors import DataError

_NO_PAIRS = (
    "no reference pairs: the model file contains none for this metric; checkpoints do after an evaluation in the "
    "training, and exported files never do\n"
    "  fix: extract features of images with identities (fastamp extract) and pass --reference FILE.npz"
)
_NO_DECISION = (
    "no decision: the model has no calibration for these features and this metric\n"
    "  fix: choose thresholds with fastamp calibrate SOURCE --data SET --far 0.001"
)


@dataclass(frozen=True)
class Comparison:
    """Similarity score of two images, with the scores of reference pairs, and the decision of a calibrated model.

    Attributes:
        score: cosine similarity in -1..1, or Euclidean distance.
        metric: ``"cosine"`` or ``"euclidean"``.
        pairs: scores of reference pairs; None if there are none.
        source: origin of the pairs: a dataset name, or the path of an extraction.
        calibration: calibration of the model; None if there is none.
    """

    score: float
    metric: str
    pairs: PairScores | None = None
    source: str = ""
    calibration: Calibration | None = None

    @property
    def genuine_fraction(self) -> float | None:
        """Fraction in 0..1 of genuine pairs less similar than the two images; None without reference pairs."""
        return self.pairs.percentile_of(self.score)[0] if self.pairs else None

    @property
    def impostor_fraction(self) -> float | None:
        """Fraction in 0..1 of impostor pairs less similar than the two images; None without reference pairs."""
        return self.pairs.percentile_of(self.score)[1] if self.pairs else None

    @property
    def decision(self) -> str | None:
        """``"same"``, ``"different"`` or ``"unknown"``, see ``Calibration``; None without a calibration."""
        return self.calibration.decide(self.score) if self.calibration else None

    @property
    def probability(self) -> float | None:
        """Probability in 0..1 of the same identity, at a prior of 0.5; None without a calibration."""
        return float(self.calibration.probability(self.score)) if self.calibration else None

    def describe(self) -> str:
        """Describe the comparison as text."""
        return f"{self._describe_score()}\n{self._describe_decision()}"

    def _describe_decision(self) -> str:
        if self.calibration is None:
            return _NO_DECISION
        calibration, rates = self.calibration, self.calibration.measured
        near, far = ("at least", "below") if self.metric == "cosine" else ("at most", "above")
        return (
            f"{self.decision}: probability {100 * calibration.probability(self.score):.1f} % of the same identity at a "
            f"prior of 50 %\n(same: {near} {calibration.same_threshold:.4f}, stated false accept rate "
            f"{percent(calibration.far)}, measured {rates.far}; different: {far} "
            f"{calibration.different_threshold:.4f}, stated false reject rate "
            f"{calibration.stated_frr}, measured {rates.frr}; {calibration.source})"
        )

    def _describe_score(self) -> str:
        name, more, less = ("cosine similarity", "higher", "lower")
        if self.metric == "euclidean":
            name, more, less = ("Euclidean distance", "nearer", "farther")
        text = f"{name} {self.score:.4f}"
        if self.pairs is None:
            return f"{text}\n{_NO_PAIRS}"
        genuine, impostor = self.pairs.percentile_of(self.score)
        return (
            f"{text}: {more} than {100 * impostor:.1f} % of impostor pairs; {less} than "
            f"{100 * (1 - genuine):.1f} % of genuine pairs\n({self.source}: a sample of "
            f"{self.pairs.num_genuine:,} genuine and {self.pairs.num_impostor:,} impostor pairs)"
        )


def sample_pair_scores(features: Features, *, junk: Junk | None = SAME_CAMERA, seed: int = 0) -> PairScores:
    """Sample pairs of images from an extraction and compute their scores.

    Each pair consists of a query image and a gallery image, or of any two images if the extraction has no query and
    gallery splits.

    Args:
        features: extraction of images with identities.
        junk: pairs to exclude, e.g. ``RankingRule.junk``; None for no junk. If no camera is known, no pairs are
            excluded. Default: ``SAME_CAMERA``, pairs of the same identity and camera.
        seed: seed of the sample. Default: 0.

    Returns:
        The scores of the sampled pairs, as quantiles.

    Raises:
        DataError: if it contains no genuine or no impostor pairs.
    """
    images = features.images
    sides = [np.flatnonzero(images.split == side) for side in ("query", "gallery")]
    all_images = not all(map(len, sides))
    queries, galleries = [np.arange(len(features))] * 2 if all_images else sides
    _, numbers = np.unique(images.pids, return_inverse=True)
    pids = torch.from_numpy(np.where(images.pids.astype(str) == "-1", -1, numbers.reshape(-1)))
    camids = torch.from_numpy(np.array(images.camids, dtype=np.int64))
    pairs = sample_pairs(
        _RowSubset(features.matrix, queries),
        _RowSubset(features.matrix, galleries),
        Identities(pids[queries], pids[galleries], camids[queries], camids[galleries]),
        metric=features.model.metric,
        junk=junk if (camids >= 0).any() else None,
        same_images=all_images,
        seed=seed,
    )
    if pairs is None:
        raise DataError(
            f"{features.path} contains no genuine or no impostor pairs to compare with.\n"
            "  fix: extract a dataset, a CSV file or folder:FOLDER with identities"
        )
    return pairs


class _RowSubset:
    """Subset of the rows of memory-mapped features; indexing reads only the requested rows."""

    def __init__(self, features: np.ndarray, rows: np.ndarray) -> None:
        self.features, self.rows = features, rows

    def __getitem__(self, chosen: np.ndarray) -> np.ndarray:
        features: np.ndarray = self.features[self.rows[chosen]]
        return features
