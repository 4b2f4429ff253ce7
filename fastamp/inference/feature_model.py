"""Comparison and search with the features of a model: checkpoints (``Predictor``) and exported files."""

import functools
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import torch
from torch import Tensor

from fastamp.data.transforms import Transforms
from fastamp.evaluation.calibration import Calibration
from fastamp.evaluation.pairs import PairScores
from fastamp.evaluation.protocol import Protocol
from fastamp.inference.image_folder import open_source
from fastamp.inference.images import COLORS, Boxes, Image, Images, as_list, decode, has_pixels
from fastamp.inference.outputs import OUTPUT_REGISTRY, PredictorOutput
from fastamp.inference.search_terms import SearchTerm
from fastamp.inference.similarity import Comparison, sample_pair_scores
from fastamp.layers.distance import pairwise_distance
from fastamp.retrieval.features_file import read_features
from fastamp.retrieval.gallery import Conditions, Gallery
from fastamp.retrieval.model_id import ModelId
from fastamp.retrieval.search import SearchResult, decide, search, search_by_scores
from fastamp.utils.errors import ConfigError, DataError, check_choice, summarize_error

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)


Reference = PairScores | str | os.PathLike[str] | None


class ImageOptions(TypedDict, total=False):
    """Options of images; see ``Predictor.features``."""

    color: str
    camids: Sequence[int] | None
    viewids: Sequence[int] | None
    modality: str | Sequence[str] | None


class FeatureModel(ABC):
    """Base class of models that compute features of images, and compare and search with them.

    Attributes:
        checkpoint: file of the model.
        transforms: limits of images, and the transform that resizes and crops them.
        metric: metric of the features: ``"cosine"`` or ``"euclidean"``.
        batch_size: number of images that are computed at once.
        stored_calibration: calibration in the file of the model; None if there is none.
        outputs: outputs of the model other than its features: name -> output. Default: none.
        default_modality: modality of images without a stated one. Default: "", the model has no modalities.
    """

    checkpoint: Path
    transforms: Transforms
    metric: str
    batch_size: int
    stored_calibration: Calibration | None
    outputs: Mapping[str, PredictorOutput] = MappingProxyType({})
    default_modality: str = ""

    @property
    @abstractmethod
    def config_hash(self) -> str:
        """Hash of the model; features from models with equal hashes can be compared."""

    @cached_property
    def calibration(self) -> Calibration | None:
        """``stored_calibration``; None if there is none, or if it is for other features or another metric."""
        stored = self.stored_calibration
        if stored is None:
            return None
        if (stored.metric, stored.config_hash) == (self.metric, self.config_hash):
            return stored
        logger.warning(
            "the calibration in %s is not used: it is for TEST.METRIC %s and the model %s, but this is %s and %s, so "
            "there are no decisions.\n"
            "  fix: use the model without overrides and without --l2, or calibrate it again with fastamp calibrate",
            *(self.checkpoint, stored.metric, stored.config_hash, self.metric, self.config_hash),
        )
        return None

    @property
    @abstractmethod
    def feature_dim(self) -> int:
        """Dimension D of the features."""

    @property
    def model_id(self) -> ModelId:
        """Description of the model that files of features and galleries store."""
        return ModelId(self.feature_dim, self.metric, self.config_hash, str(self.checkpoint))

    @property
    def pairs(self) -> tuple[str, PairScores | None]:
        """Name of a dataset, and scores of pairs of its images; "" and None if there are none."""
        return "", None

    @property
    def protocol(self) -> Protocol:
        """Evaluation protocol, whose junk is excluded from pairs of a reference."""
        return Protocol()

    def extract_folder(self, folder: Path, out: Path) -> list[str]:
        """Extract the images in a folder to a file, and return the error messages of unreadable images.

        Raises:
            ConfigError: unless the model is a checkpoint.
        """
        raise ConfigError(
            f"{folder} is a folder of images, which {self.checkpoint} cannot extract.\n"
            f"  fix: use the checkpoint, or fastamp gallery add NAME.gallery {folder} --model {self.checkpoint}"
        )

    @abstractmethod
    def features(self, images: Images, *, boxes: Boxes | None = None, **options: "Unpack[ImageOptions]") -> Tensor:
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
        (image,) = as_list([image])
        if not has_pixels(image):
            raise DataError(
                f"the image has no pixels: it is a {type(image).__name__} of size 0.\n"
                "  fix: pass an image of at least 1 x 1 pixels"
            )
        return self._load(image, color)

    def _load(self, image: Image, color: str) -> Tensor:
        """Decode and resize an image to (C, H, W) uint8."""
        return self.transforms.resize(decode(image, color, self.transforms, self.transforms.least_size))

    @abstractmethod
    def features_of_preprocessed(self, images: Sequence[Tensor]) -> Tensor:
        """Extract the features (N, D) of images from ``preprocess``; see ``Predictor.features_of_preprocessed``."""

    def require_features(self, images: Images, **options: "Unpack[ImageOptions]") -> Tensor:
        """Extract the features of images; raise DataError if an image has no pixels.

        NaN always indicates an image without pixels, because ``compute`` rejects non-finite features.
        """
        features = self.features(images, **options)
        empty = features.isnan().any(dim=1).nonzero()[:, 0].tolist()
        if empty:
            raise DataError(f"image {empty[0]} has no pixels.\n  fix: remove this image, or pass at least 1 x 1 pixels")
        return features

    def readable_features(self, paths: Sequence[str]) -> tuple[list[str], Tensor, list[str]]:
        """Extract the features of those image files that can be read.

        Returns:
            The paths of M images, their features (M, D), and the errors of the others, one line each.

        Raises:
            DataError: if there are no paths.
        """
        try:
            return [*paths], self.require_features(paths), []
        except DataError as error:
            if not paths:
                raise
            if len(paths) == 1:
                return [], torch.empty(0), [summarize_error(error)]
        half = len(paths) // 2
        parts = [self.readable_features(part) for part in (paths[:half], paths[half:])]
        readable, features, faults = zip(*parts, strict=True)
        return [*chain(*readable)], torch.cat(features), [*chain(*faults)]

    def compare(
        self, a: Image, b: Image, *, reference: Reference = None, **options: "Unpack[ImageOptions]"
    ) -> Comparison:
        """Compare two images, and compare their score with the scores of genuine and impostor pairs.

        Args:
            a, b: images, see ``features``.
            reference: pairs to compare the score with: an extraction of images with identities, or the result of
                ``sample_pair_scores``. Default: the pairs stored in the checkpoint, from the first test set.
            options: color; cameras, views and modalities of the two images, see ``features``.

        Returns:
            The score, the reference pairs, and the decision and probability of a calibrated model.

        Raises:
            DataError: if an image or the reference cannot be read, or the reference was extracted with a different
                model or contains no pairs.
            ConfigError: see ``features``.
        """
        images = [*as_list(a), *as_list(b)]
        if len(images) != 2:
            raise DataError(
                f"a comparison requires exactly two images; got {len(images)} images.\n"
                "  fix: compare one pair of images per call"
            )
        return self.compare_features(*self.require_features(images, **options), reference=reference)

    def compare_features(self, a: Tensor, b: Tensor, *, reference: Reference = None) -> Comparison:
        """Compare two images by their features (D,); see ``compare``."""
        distance = pairwise_distance(a[None], b[None], self.metric).item()
        # Rounding may increase the similarity of equal images above 1.
        score = min(max(1 - distance, -1.0), 1.0) if self.metric == "cosine" else distance
        return self.compare_score(score, reference)

    def compare_score(self, score: float, reference: Reference = None) -> Comparison:
        """Compare the score of two images, as in ``SearchResult.scores``, with the scores of pairs; see ``compare``."""
        source, pairs = self.pairs
        if isinstance(reference, PairScores):
            source, pairs = "the reference", reference
        elif reference is not None:
            stored = read_features(reference)
            stored.check_model(self)
            pairs = sample_pair_scores(stored, junk=self.protocol.rule.junk, seed=self.protocol.seed)
            source = str(reference)
        if pairs is not None and pairs.metric != self.metric:  # opts changed it
            pairs = None
        return Comparison(score, self.metric, pairs, source, self.calibration)

    def search(
        self,
        query: Images | None,
        gallery: Gallery | str | os.PathLike[str],
        k: int = 10,
        *,
        features: Tensor | None = None,
        effort: int | None = None,
        exact: bool = False,
        terms: Sequence[SearchTerm] = (),
        conditions: Conditions | None = None,
        **options: "Unpack[ImageOptions]",
    ) -> SearchResult:
        """Search for the nearest gallery images of each query.

        Args:
            query: one or more images, see ``features``. None: the queries are given by ``features``.
            gallery: gallery of this model, or the path of one: see ``open_source``.
            k: number of results per query; limited to the size of the gallery. Default: 10.
            features: (N, D) features of the queries, used if ``query`` is None. Default: None; without queries, the
                gallery images are ranked by ``terms``.
            effort, exact: see ``fastamp.retrieval.search.search``.
            terms: conditions of plugins that the gallery images must meet. Default: none.
            conditions: conditions that the gallery images must meet. Default: None, all images.
            options: color; cameras, views and modalities of the queries, see ``features``.

        Returns:
            The k nearest gallery images for each query, and whether a calibrated model accepts the nearest one.

        Raises:
            TypeError: if ``gallery`` is neither a gallery nor a path.
            DataError: if an image or the gallery cannot be read, the gallery is of a different model, or no gallery
                image meets the terms.
            ConfigError: if ``k`` or ``effort`` is below 1, there are neither queries nor terms, or the gallery has no
                values for ``terms`` or ``conditions``; see also ``features``.
        """
        if query is not None:
            features = self.require_features(query, **options)
        if isinstance(gallery, (str, os.PathLike)):
            gallery = open_source(gallery, self)
        elif not isinstance(gallery, Gallery):
            raise TypeError(
                f"expected a gallery or the path of one, got {type(gallery).__name__}.\n"
                "  fix: pass the output file of `fastamp extract`, or the result of open_gallery"
            )
        gallery.check_model(self)
        with gallery.reading():  # the rows of terms are those of the search, also if other processes change the gallery
            limits = [gallery.rows_where(conditions)] if conditions else []
            if features is None:
                if not terms:
                    raise ConfigError(
                        f"expected queries or terms, got {query} and {len(terms)} terms.\n  fix: pass one of them"
                    )
                scores = np.prod([term.scores(gallery) for term in terms], axis=0)
                rows = limits[0] if limits else None
                return search_by_scores(scores, gallery, k, metric=", ".join(term.name for term in terms), rows=rows)
            limits += [term.rows(gallery) for term in terms]
            where = functools.reduce(np.intersect1d, limits) if limits else None
            result = search(features, gallery, k, effort=effort, exact=exact, where=where)
        return replace(result, decision=decide(result, self.calibration))

    def require_output(self, name: str) -> PredictorOutput:
        """Return an output of the model.

        Raises:
            ConfigError: if there is no output of this name, or the model does not have it.
        """
        if name not in self.outputs:
            fix = OUTPUT_REGISTRY.get(name).fix
            raise ConfigError(f"{self.checkpoint}: the model has no output {name!r}.\n  fix: {fix}")
        return self.outputs[name]
