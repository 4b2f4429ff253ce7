"""How alike two images are, and whether that is much or little for the model."""

from dataclasses import dataclass
from os import PathLike

import numpy as np
import torch

from fastamp.evaluation import Identities
from fastamp.evaluation.pairs import PairScores, sample_pairs
from fastamp.evaluation.protocol import SAME_CAMERA, Junk, junk_from_cross_camera
from fastamp.inference.features_file import Extraction, read_extraction
from fastamp.utils.errors import DataError
from fastamp.utils.moved import moved_names, renamed_arguments, renamed_attribute

__getattr__ = moved_names(
    __name__,
    {
        "pairs_of": "fastamp.inference.similarity.sample_pair_scores",
    },
)

_NO_PAIRS = (
    "where that stands among genuine and impostor pairs is not known: the checkpoint has no sample of them, as those "
    "that training writes after an evaluation have. A reference, an extraction of images with identities, says it "
    "(fastamp extract, then --reference FILE.npz)"
)


@dataclass(frozen=True)
class Comparison:
    """How alike two images are.

    Attributes:
        score: the cosine similarity in -1..1, or the Euclidean distance.
        metric: ``cosine`` or ``euclidean``.
        pairs: what the score is held against; None where there is nothing.
        source: whose pairs these are.
    """

    score: float
    metric: str
    pairs: PairScores | None = None
    source: str = ""

    genuine_share = renamed_attribute("genuine_share", "genuine_fraction")
    impostor_share = renamed_attribute("impostor_share", "impostor_fraction")

    @property
    def genuine_fraction(self) -> float | None:
        """The share, in 0..1, of the genuine pairs that are less alike than these two images."""
        return self.pairs.percentile_of(self.score)[0] if self.pairs else None

    @property
    def impostor_fraction(self) -> float | None:
        """The share, in 0..1, of the impostor pairs that are less alike than these two images."""
        return self.pairs.percentile_of(self.score)[1] if self.pairs else None

    def describe(self) -> str:
        """Return all of it in words."""
        name, more, less = ("cosine similarity", "higher", "lower")
        if self.metric == "euclidean":
            name, more, less = ("Euclidean distance", "nearer", "farther")
        text = f"{name} {self.score:.4f}"
        if self.pairs is None:
            return f"{text}\n{_NO_PAIRS}"
        return (
            f"{text}: {more} than {100 * self.impostor_fraction:.1f} % of impostor pairs; {less} than "
            f"{100 * (1 - self.genuine_fraction):.1f} % of genuine pairs\n({self.source}: a sample of "
            f"{self.pairs.num_genuine:,} genuine and {self.pairs.num_impostor:,} impostor pairs)"
        )


@renamed_arguments(cross_camera=("junk", junk_from_cross_camera))
def sample_pair_scores(
    reference: Extraction | str | PathLike[str],
    *,
    junk: Junk | None = SAME_CAMERA,
    seed: int = 0,
) -> PairScores:
    """Return the scores of a sample of pairs of an extraction: of its queries and gallery, or else of all its images.

    Args:
        reference: with identities.
        junk: pairs to exclude, e.g. ``Protocol.junk``; None is none, as where no camera is known. Default: pairs of one
            identity that are from one camera.
        seed: of the draws.

    Raises:
        DataError: it cannot be read, or has no two images of one identity, or none of two.
    """
    extraction = reference if isinstance(reference, Extraction) else read_extraction(reference)
    queries = galleries = np.arange(len(extraction.paths))
    split = extraction.split
    all_images = split is None or not {"query", "gallery"} <= set(np.unique(split).tolist())
    if not all_images:
        queries, galleries = np.flatnonzero(split == "query"), np.flatnonzero(split == "gallery")
    pids, camids = (
        _integer_ids(np.asarray(extraction.pids)),
        torch.from_numpy(np.array(extraction.camids, dtype=np.int64)),
    )
    pairs = sample_pairs(
        _RowSubset(extraction.features, queries),
        _RowSubset(extraction.features, galleries),
        Identities(pids[queries], pids[galleries], camids[queries], camids[galleries]),
        metric=extraction.metric,
        junk=junk if (camids >= 0).any() else None,
        same_images=all_images,
        seed=seed,
    )
    if pairs is None:
        raise DataError(
            f"{extraction.path} has no genuine or no impostor pairs: nothing to hold a comparison against.\n"
            "  fix: extract a data set, a CSV file or a folder:FOLDER, whose images have identities"
        )
    return pairs


class _RowSubset:
    """Some rows of features that are mapped, to take still fewer from."""

    def __init__(self, features: np.ndarray, rows: np.ndarray) -> None:
        self.features, self.rows = features, rows

    def __getitem__(self, chosen: np.ndarray) -> np.ndarray:
        return self.features[self.rows[chosen]]


def _integer_ids(pids: np.ndarray) -> torch.Tensor:
    """Return a whole number from 0 for each identity; -1 stays."""
    _, numbers = np.unique(pids, return_inverse=True)
    return torch.from_numpy(np.where(pids == ("-1" if pids.dtype.kind == "U" else -1), -1, numbers.reshape(-1)))
