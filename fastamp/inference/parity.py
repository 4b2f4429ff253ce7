"""Parity check of exported models: comparison of their features and mAP with those of the PyTorch model."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastamp.config import CfgNode, fixed_input_size
from fastamp.contracts import Batch
from fastamp.data import build_reid_test_loader
from fastamp.data.subset import identity_subset, subsample_identities
from fastamp.evaluation import ReidEvaluator
from fastamp.inference.predictor import Predictor
from fastamp.utils.errors import DataError
from fastamp.utils.progress import track

BATCH_SIZES = (1, 3, 32)
"""Batch sizes of random images; several, because tracing may have fixed the batch size."""
_RAW_BATCHES = (1, 3, 1, 3, 32)

Features = Callable[[Batch], Tensor]


@dataclass(frozen=True)
class Comparison:
    """Comparison of the features that a model and a reference model compute for the same images.

    Attributes:
        images: description of the images.
        count: number of images.
        min_cosine, mean_cosine: minimum and mean cosine similarity between the two features of each image; NaN if a
            feature is not finite.
        difference: largest absolute difference between feature values, divided by the largest absolute value of the
            reference features.
    """

    images: str
    count: int
    min_cosine: float
    mean_cosine: float
    difference: float


def compare(images: str, expected: Tensor, actual: Tensor) -> Comparison:
    """Compare (N, D) features of an exported model with the expected features; ``images`` describes the images."""
    expected, actual = expected.double(), actual.double()
    if expected.shape != actual.shape:
        raise DataError(
            f"shape mismatch: expected features of shape {tuple(expected.shape)}, but the exported model returned "
            f"{tuple(actual.shape)}.\n  fix: use another format, and report a bug"
        )
    cosines = F.cosine_similarity(expected, actual)
    cosines = torch.where((expected == actual).all(1), 1.0, cosines)  # the cosine of zero vectors is undefined
    difference = (expected - actual).abs().max() / expected.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    return Comparison(images, len(expected), cosines.min().item(), cosines.mean().item(), difference.item())


def compare_on_random_images(
    predictor: Predictor, expected: Features, actual: Features, *, raw: bool = False
) -> list[Comparison]:
    """Compare two models on random pixels, once for each batch size in ``BATCH_SIZES``.

    Args:
        predictor: predictor that defines the preprocessing.
        expected: reference model.
        actual: exported model.
        raw: if True, ``actual`` takes images before resizing, here of each size in ``_sizes``. Default False.
    """
    cfg, generator = predictor.cfg, torch.Generator().manual_seed(0)
    size = exported_size(cfg)
    comparisons = []
    shapes = zip(_RAW_BATCHES, _sizes(size), strict=True) if raw else ((count, size) for count in BATCH_SIZES)
    for count, (height, width) in shapes:
        shape = (count, cfg.INPUT.CHANNELS, height, width)
        images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        batch: Batch = {}
        for name in ("camids", "viewids"):
            batch[name] = torch.randint(predictor.inputs.counts.get(name, 1), (count,), generator=generator)
        if column := predictor.inputs.required_modality:
            batch[column] = torch.randint(len(predictor.inputs.modalities), (count,), generator=generator)
        title = f"random, batch of {count}" + (f", {width} x {height} pixels" if raw else "")
        resized = torch.stack([predictor.transforms.resize(image) for image in images]) if raw else images
        rows = expected(batch | {"images": resized}), actual(batch | {"images": images})
        comparisons.append(compare(title, *rows))
    return comparisons


def exported_size(cfg: CfgNode) -> tuple[int, int]:
    """Return the height and width of the images of an exported model; raise ConfigError if they are not fixed."""
    return fixed_input_size(cfg, is_train=False, needed_by="an exported model")


def _sizes(size: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the sizes of random images before resizing: smaller and larger, narrower and wider, and equal."""
    height, width = size
    return [
        (height // 2 + 1, width // 3 + 2),
        (2 * height + 37, 3 * width + 5),
        (height - 1, 2 * width + 1),
        (3 * height, width // 2 + 1),
        size,
    ]


class RankedImages:
    """Batches from a test set, limited to a subset of its identities; all images of these identities are included.

    Args:
        predictor: predictor whose config defines the preprocessing and the evaluation protocol.
        name: dataset name.
        limit: approximate maximum number of images; 0 for all.

    Attributes:
        title: description of the images.
        ranks: True if mAP can be computed: there is a gallery, unlike for a classifier or attributes, or the protocol
            ranks all images for each image.

    Raises:
        DataError: if the dataset is missing or empty.
    """

    def __init__(self, predictor: Predictor, name: str, limit: int) -> None:
        self.cfg = predictor.cfg.with_values({"TEST.BASELINES": False, "TEST.PER_QUERY": False})
        loader, num_query = build_reid_test_loader(self.cfg, name, requires_gallery=False)
        self._dataset: Any = loader.dataset
        self._rows = identity_subset(loader.dataset, num_query, limit)
        self.batches, self.num_query, (count, total) = subsample_identities(
            loader, num_query, limit, self.cfg.TEST.IMS_PER_BATCH
        )
        self.ranks = self.num_query < count or ReidEvaluator(self.cfg, self.num_query).protocol.rule.all_images
        self.title = f"{name}, {count} images" if count == total else f"{name}, {count} of {total} images"

    def features(self, model: Features, *, raw: bool = False) -> list[Tensor]:
        """Compute the features of the images of each batch, not of their tracklets.

        Args:
            model: function from a batch to features.
            raw: if True, each batch has one image, before resizing. Default: False.
        """
        batches = track(self.batches, len(self.batches), "comparing")
        if raw:
            return [torch.cat([*map(model, self._raw(batch))]) for batch in batches]
        return [model(_without_tracklets(batch)) for batch in batches]

    def _raw(self, batch: Batch) -> Iterator[Batch]:
        """Yield a batch of one image, read again and not resized, for each image of a batch."""
        read, items = self._dataset.transforms.read_original, self._dataset.items
        for number, index in enumerate(batch["indices"].tolist()):
            row = self._rows[index]
            one = {name: values[number : number + 1] for name, values in _without_tracklets(batch).items()}
            yield one | {"images": read(items.path(row), box=items.box(row))[None]}

    def mean_average_precision(self, features: Iterable[Tensor]) -> float | None:
        """Compute mAP in percent from the features of each batch, under the protocol of the config.

        Returns:
            mAP, or None if there are no gallery images, unless the protocol ranks all images for each image.
        """
        if not self.ranks:
            return None
        evaluator = ReidEvaluator(self.cfg, self.num_query)
        for batch, rows in zip(self.batches, features, strict=True):
            evaluator.process(batch, rows)
        metrics = evaluator.evaluate()
        assert metrics is not None  # one process
        return float(metrics["mAP"])


def _without_tracklets(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if name != "tracklet"}
