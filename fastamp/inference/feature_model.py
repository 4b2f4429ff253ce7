"""Comparison and search with the features of a model: checkpoints (``Predictor``) and exported files."""

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fastamp.data.transforms import Transforms
from fastamp.evaluation.calibration import Calibration
from fastamp.evaluation.pairs import PairScores
from fastamp.evaluation.protocol import Protocol
from fastamp.inference.images import COLORS, Image, as_one, decode
from fastamp.inference.index import GalleryIndex, SearchResult, open_gallery
from fastamp.inference.similarity import Comparison, sample_pair_scores
from fastamp.layers.distance import pairwise_distance
from fastamp.retrieval.features_file import check_same_model, read_extraction
from fastamp.utils.errors import ConfigError, DataError, check_choice

logger = logging.getLogger(__name__)

# A gallery this many times as large as that of the calibration causes a warning.
_MUCH_LARGER = 2


class FeatureModel(ABC):
    """Base class of models that compute features of images, and compare and search with them.

    Attributes:
        checkpoint: file of the model.
        transforms: limits of images, and the transform that resizes and crops them.
        metric: metric of the features: ``"cosine"`` or ``"euclidean"``.
        batch_size: number of images that are computed at once.
        pairs: name of a dataset, and scores of pairs of its images; "" and None if there are none.
        protocol: protocol whose junk is excluded from the pairs of a reference.
    """

    checkpoint: Path
    transforms: Transforms
    metric: str
    batch_size: int

    @property
    @abstractmethod
    def config_hash(self) -> str:
        """Hash of the model; features from models with equal hashes can be compared."""

    @property
    @abstractmethod
    def calibration(self) -> Calibration | None:
        """Calibration of the model for these features; None if there is none."""

    @property
    @abstractmethod
    def feature_dim(self) -> int:
        """Dimension D of the features."""

    @property
    def pairs(self) -> tuple[str, PairScores | None]:
        """Name of a dataset, and scores of pairs of its images; "" and None if there are none."""
        return "", None

    @property
    def protocol(self) -> Protocol:
        """Evaluation protocol, whose junk is excluded from pairs of a reference."""
        return Protocol()

    @property
    def attribute_names(self) -> tuple[str, ...]:
        """Names of the attributes that the model recognizes; () for none."""
        return ()

    @abstractmethod
    def features(
        self,
        images: Image | Sequence[Image],
        *,
        boxes: Sequence[Sequence[float]] | np.ndarray | Tensor | None = None,
        color: str = "rgb",
        camids: Sequence[int] | None = None,
        viewids: Sequence[int] | None = None,
        modality: str | Sequence[str] | None = None,
    ) -> Tensor:
        """Extract the features (N, D) of images; see ``Predictor.features``."""

    def preprocess(self, image: Image, *, color: str = "rgb") -> Tensor:
        """Preprocess an image for the model: resize it to the input size, and crop it if the model does.

        Args:
            image, color: see ``Predictor.features``.

        Returns:
            (C, H, W) uint8, a row of a batch's ``images``.

        Raises:
            DataError, ConfigError: see ``Predictor.features``; also DataError if the image has no pixels.
        """
        check_choice("color", color, COLORS)
        pixels = self._load(image, color)
        if pixels is None:
            raise DataError(
                f"the image has no pixels: it is a {type(image).__name__} of size 0.\n"
                "  fix: pass an image of at least 1 x 1 pixels"
            )
        return pixels

    def _load(self, image: Image, color: str) -> Tensor | None:
        """Decode and resize an image to (C, H, W) uint8; return None if it has no pixels."""
        pixels = self._decode(image, color, self.transforms.resize.least_side)
        return self.transforms.resize(pixels) if pixels.numel() else None

    def _decode(self, image: Image, color: str, least_side: int | None = None) -> Tensor:
        """Decode an image to (C, H, W) uint8 with the model's channels; see ``read_image`` for ``least_side``."""
        transforms = self.transforms
        limits: dict[str, Any] = {"max_pixels": transforms.max_pixels, "least_side": least_side}
        return decode(image, color, transforms.channels, bit_depth=transforms.bit_depth, **limits)

    @abstractmethod
    def features_of_preprocessed(self, images: Sequence[Tensor]) -> Tensor:
        """Extract the features (N, D) of images from ``preprocess``; see ``Predictor.features_of_preprocessed``."""

    def require_features(self, images: Image | Sequence[Image], **options: Any) -> Tensor:
        """Extract the features of images; raise DataError if an image has no pixels.

        NaN always indicates an image without pixels, because ``features_of_batch`` rejects non-finite features.
        """
        features = self.features(images, **options)
        empty = features.isnan().any(dim=1).nonzero()[:, 0].tolist()
        if empty:
            raise DataError(f"image {empty[0]} has no pixels.\n  fix: remove this image, or pass at least 1 x 1 pixels")
        return features

    def compare(
        self,
        a: Image,
        b: Image,
        *,
        reference: PairScores | str | os.PathLike[str] | None = None,
        color: str = "rgb",
        camids: Sequence[int] | None = None,
        viewids: Sequence[int] | None = None,
        modality: str | Sequence[str] | None = None,
    ) -> Comparison:
        """Compare two images, and compare their score with the scores of genuine and impostor pairs.

        Args:
            a, b: images, see ``features``.
            reference: pairs to compare the score with: an extraction of images with identities, or the result of
                ``sample_pair_scores``. Default: the pairs stored in the checkpoint, from the first test set.
            color: see ``features``.
            camids, viewids, modality: cameras, views and modalities of the two images, see ``features``.

        Returns:
            The score, the reference pairs, and the decision and probability of a calibrated model.

        Raises:
            DataError: if an image or the reference cannot be read, or the reference was extracted with a different
                model or contains no pairs.
            ConfigError: see ``features``.
        """
        features = self.require_features(
            [*as_one(a), *as_one(b)], color=color, camids=camids, viewids=viewids, modality=modality
        )
        return self.compare_features(*features, reference=reference)

    def compare_features(
        self, a: Tensor, b: Tensor, *, reference: PairScores | str | os.PathLike[str] | None = None
    ) -> Comparison:
        """Compare two images by their features (D,); see ``compare``."""
        distance = pairwise_distance(a[None], b[None], self.metric).item()
        # Rounding may increase the similarity of equal images above 1.
        score = min(max(1 - distance, -1.0), 1.0) if self.metric == "cosine" else distance
        return self.compare_score(score, reference)

    def compare_score(self, score: float, reference: PairScores | str | os.PathLike[str] | None = None) -> Comparison:
        """Compare the score of two images, as in ``SearchResult.scores``, with the scores of pairs; see ``compare``."""
        source, pairs = self.pairs
        if isinstance(reference, PairScores):
            source, pairs = "the reference", reference
        elif reference is not None:
            extraction = read_extraction(reference)
            check_same_model(extraction, self.config_hash, self.checkpoint)
            pairs = sample_pair_scores(extraction, junk=self.protocol.junk, seed=self.protocol.seed)
            source = str(reference)
        if pairs is not None and pairs.metric != self.metric:  # opts changed it
            pairs = None
        return Comparison(score, self.metric, pairs, source, self.calibration)

    def search(
        self,
        query: Image | Sequence[Image],
        index: GalleryIndex | str | os.PathLike[str],
        k: int = 10,
        *,
        effort: int | None = None,
        exact: bool = False,
        attributes: str = "",
        conditions: Mapping[str, Any] | None = None,
        color: str = "rgb",
        camids: Sequence[int] | None = None,
        viewids: Sequence[int] | None = None,
        modality: str | Sequence[str] | None = None,
    ) -> SearchResult:
        """Search for the nearest gallery images of each query.

        Args:
            query: one or more images, see ``features``.
            index: gallery index, mutable gallery, index file, or extraction file, whose index is built and written next
                to it if needed.
            k: number of results per query; limited to the size of the gallery. Default: 10.
            effort, exact: see ``GalleryIndex.search``.
            attributes: attributes of the gallery images to compare with, e.g. ``"red upper, hat"``, predicted with a
                probability of at least TEST.THRES, for a model of FastAttr. Default: "", all gallery images.
            conditions: conditions that the items of a mutable gallery must meet, the arguments of
                ``MutableGallery.rows_where``. Default: None, all items.
            color: see ``features``.
            camids, viewids, modality: cameras, views and modalities of the queries, see ``features``.

        Returns:
            The k nearest gallery images for each query, and whether a calibrated model accepts the nearest one.

        Raises:
            TypeError: if ``index`` is neither a gallery index nor a path.
            DataError: if an image or the index cannot be read, the index was created with a different model, or no
                gallery image has the attributes.
            ConfigError: if ``k`` or ``effort`` is below 1, the model does not recognize the attributes, or the gallery
                has no values for ``conditions``; see also ``features``.
        """
        if not isinstance(index, (GalleryIndex, str, os.PathLike)):
            raise TypeError(
                f"expected a gallery index or the path of one, got {type(index).__name__}.\n"
                "  fix: pass the output file of `fastamp extract`, or a GalleryIndex"
            )
        gallery = index if isinstance(index, GalleryIndex) else open_gallery(index, of=self)
        check_same_model(gallery, self.config_hash, self.checkpoint)
        features = self.require_features(query, color=color, camids=camids, viewids=viewids, modality=modality)
        rows = self._rows_with_attributes(gallery, attributes) if attributes else None
        rows = gallery.rows_where(**conditions) if conditions else rows
        result = gallery.search(features, k, effort=effort, exact=exact, rows=rows)
        return self._with_decisions(result, len(gallery) if rows is None else len(rows))

    def require_attributes(self) -> tuple[str, ...]:
        """Return ``attribute_names``; raise ConfigError if the model does not recognize attributes."""
        if not self.attribute_names:
            raise ConfigError(
                f"{self.checkpoint}: the model does not recognize attributes.\n"
                "  fix: use a checkpoint of FastAttr, which has attributes"
            )
        return self.attribute_names

    def _rows_with_attributes(self, gallery: GalleryIndex, attributes: str) -> np.ndarray:
        """Return the gallery images to compare with; see ``search``."""
        self.require_attributes()
        raise NotImplementedError

    def _with_decisions(self, result: SearchResult, gallery_size: int) -> SearchResult:
        """Add the decisions of a calibrated model to a search result."""
        calibration = self.calibration
        if calibration is None:
            return result
        if result.metric != calibration.metric:
            logger.warning(
                "the search threshold is not used: it is for TEST.METRIC %s, but the gallery was extracted for %s.\n"
                "  fix: extract the gallery again with this model",
                calibration.metric,
                result.metric,
            )
            return result
        rate = calibration.expected_fpir(gallery_size)
        if gallery_size > _MUCH_LARGER * calibration.gallery_size:
            logger.warning(
                "the gallery has %d images, but the search threshold was chosen for %d: up to %.1f %% of the queries "
                "without a match are accepted, instead of %.3g %%.\n"
                "  fix: calibrate on a dataset with more images, or for a lower rate (fastamp calibrate --fpir)",
                gallery_size,
                calibration.gallery_size,
                100 * rate,
                100 * calibration.fpir,
            )
        # An empty gallery has no match.
        known: np.ndarray = np.asarray(calibration.accepts(result.scores[:, :1]).any(1))
        return replace(
            result,
            known=known,
            threshold=calibration.search_threshold,
            fpir=rate,
            searched=gallery_size,
            probabilities=calibration.probability(result.scores.astype(np.float64)),
        )
