"""How far an exported model's features are from the ones that PyTorch computes, and what that costs in mAP."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastamp.config import input_size
from fastamp.data import build_reid_test_loader
from fastamp.data.subset import subsample_identities
from fastamp.evaluation import ReidEvaluator
from fastamp.inference.predictor import Predictor
from fastamp.utils.errors import DataError
from fastamp.utils.moved import moved_names
from fastamp.utils.progress import track

__getattr__ = moved_names(
    __name__,
    {
        "on_random_images": "fastamp.inference.parity.compare_on_random_images",
    },
)

BATCH_SIZES = (1, 3, 32)
"""Sizes of the batches of random images: a model may have been fixed to the size that it was traced with."""

Batch = dict[str, Any]
Features = Callable[[Batch], Tensor]


@dataclass(frozen=True)
class Comparison:
    """Two models' features of the same images.

    Attributes:
        images: what they are, in words.
        count: their number.
        min_cosine, mean_cosine: between the two features of an image, over the images; NaN where one is not finite.
        difference: the largest of any value, as a share of the largest value.
    """

    images: str
    count: int
    min_cosine: float
    mean_cosine: float
    difference: float


def compare(images: str, expected: Tensor, found: Tensor) -> Comparison:
    """Return how far (N, D) features are from those expected; ``images`` says of what."""
    expected, found = expected.double(), found.double()
    if expected.shape != found.shape:
        raise DataError(f"features of shape {tuple(found.shape)} where {tuple(expected.shape)} was expected")
    cosines = F.cosine_similarity(expected, found)
    cosines = torch.where((expected == found).all(1), 1.0, cosines)  # of zeros there is no cosine
    difference = (expected - found).abs().max() / expected.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    return Comparison(images, len(expected), cosines.min().item(), cosines.mean().item(), difference.item())


def compare_on_random_images(predictor: Predictor, expected: Features, found: Features) -> list[Comparison]:
    """Return a comparison for each of ``BATCH_SIZES``, of images of random pixels."""
    cfg, generator = predictor.cfg, torch.Generator().manual_seed(0)
    comparisons = []
    for size in BATCH_SIZES:
        shape = (size, cfg.INPUT.CHANNELS, *input_size(cfg, is_train=False))
        batch = {"images": torch.randint(256, shape, dtype=torch.uint8, generator=generator)}
        for name in ("camids", "viewids"):
            batch[name] = torch.randint(predictor.camera_view_counts.get(name, 1), (size,), generator=generator)
        comparisons.append(compare(f"random, batch of {size}", expected(batch), found(batch)))
    return comparisons


class RankedImages:
    """Whole identities of a test set, in batches.

    Args:
        predictor: its config says how images are read and judged.
        name: of the data set.
        limit: take about so many images at most; 0 takes all.

    Attributes:
        title: what they are, in words.

    Raises:
        DataError: the data set is missing or empty.
    """

    def __init__(self, predictor: Predictor, name: str, limit: int) -> None:
        self.cfg = predictor.cfg.with_values({"TEST.BASELINES": False, "TEST.PER_QUERY": False})
        loader, num_query = build_reid_test_loader(self.cfg, name)
        self.batches, self.num_query, (count, total) = subsample_identities(
            loader, num_query, limit, self.cfg.TEST.IMS_PER_BATCH
        )
        self.title = f"{name}, {count} images" if count == total else f"{name}, {count} of {total} images"

    def features(self, model: Features) -> list[Tensor]:
        """Return a model's features of each batch."""
        return [model(batch) for batch in track(self.batches, len(self.batches), "comparing")]

    def mean_average_precision(self, features: Iterable[Tensor]) -> float:
        """Return the mAP, in percent, of the features of each batch, by the config's protocol."""
        evaluator = ReidEvaluator(self.cfg, self.num_query)
        for batch, rows in zip(self.batches, features, strict=True):
            evaluator.process(batch, rows)
        return evaluator.evaluate()["mAP"]
