"""Predictor: feature extraction, comparison and search with the model of a checkpoint."""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastamp.amp import PrecisionPolicy
from fastamp.amp.policy import dtype_name
from fastamp.checkpoint.entries import damaged_entry_error
from fastamp.config import CfgNode
from fastamp.contracts import Batch
from fastamp.data.jpeg_warnings import decoding_pool, read_in_threads
from fastamp.data.transforms import build_transforms
from fastamp.evaluation.calibration import read_calibration
from fastamp.evaluation.pairs import PairScores
from fastamp.evaluation.protocol import Protocol
from fastamp.feature_pass import Forward, call_model, collect_features
from fastamp.inference.config_hash import hash_of_features
from fastamp.inference.extract import extract
from fastamp.inference.feature_model import FeatureModel, ImageOptions
from fastamp.inference.images import Boxes, Image, Images, as_list, has_pixels, list_or_crop
from fastamp.inference.model_inputs import ModelInputs
from fastamp.inference.outputs import OUTPUT_REGISTRY
from fastamp.modeling import load_model
from fastamp.utils.errors import DataError
from fastamp.utils.files import expand
from fastamp.utils.logger import log_to_console
from fastamp.utils.progress import track
from fastamp.utils.structure import structure_mismatch

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)

_MAX_LISTED = 20


class Predictor(FeatureModel):
    """Extract features, compare images and search galleries with a trained model.

    The model and the config are loaded from a checkpoint. Preprocessing, precision, weight averaging and flip test are
    the same as in evaluations during training.

    ``predictor(images)`` is short for ``predictor.features(images)``.

    Args:
        checkpoint: checkpoint of a run, e.g. ``logs/x/model_best.pth``, which contains the config; run folder, whose
            ``model_best.pth`` is loaded (``model_final.pth`` if there is none); packaged model, i.e. a folder with
            ``model.safetensors`` and ``config.yaml``; or a config with ``MODEL.WEIGHTS``.
        device: ``auto`` (default: CUDA, else MPS, else CPU), ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.
        opts: alternating keys and values that override the config, e.g. ``["SOLVER.AMP.EVAL_DTYPE", "float32"]``.
        plugin: Python file that registers custom components of the model; it is executed. Ignored for a
            config. Default: "".

    Attributes:
        cfg: config of the run, frozen.
        model: model in evaluation mode.
        policy: precision policy.
        inputs: cameras, views and modalities that the model requires.
        extra: entries of the checkpoint other than the weights.

    Raises:
        TypeError: if ``checkpoint`` is neither a path nor a config.
        WeightsError: if the file is missing or damaged, or contains no config.
        ConfigError: if an option is invalid, or the device is not available or does not support the precision.
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str] | CfgNode,
        *,
        device: str | torch.device = "auto",
        opts: Sequence[str] = (),
        plugin: str = "",
    ) -> None:
        log_to_console()
        loaded = load_model(checkpoint, device=device, opts=opts, plugin=plugin)
        self.checkpoint = expand(loaded.cfg.MODEL.WEIGHTS)
        self.cfg, self.model, self.policy, self.extra = loaded.cfg, loaded.model, loaded.policy, loaded.extra
        self.stored_calibration = read_calibration(self.extra, self.checkpoint)
        self.transforms, self.inputs = build_transforms(self.cfg, is_train=False), ModelInputs(self.cfg, self.model)
        self.metric, self.batch_size = str(self.cfg.TEST.METRIC), int(self.cfg.TEST.IMS_PER_BATCH)
        self.default_modality = self.inputs.default_modality
        outputs = {name: OUTPUT_REGISTRY.get(name).from_model(self.model, self.cfg) for name in OUTPUT_REGISTRY}
        self.outputs = {name: output for name, output in outputs.items() if output is not None}

    def __call__(self, images: Images, **options: Any) -> Tensor:
        """Extract the features of images; see ``features`` for arguments, result and errors."""
        return self.features(images, **options)

    def __repr__(self) -> str:
        cfg = self.cfg
        return (
            f"Predictor({str(self.checkpoint)!r}, model={cfg.MODEL.META_ARCHITECTURE}, "
            f"backbone={cfg.MODEL.BACKBONE.NAME}, input={tuple(cfg.INPUT.SIZE_TEST)}, "
            f"precision={dtype_name(self.policy.dtype)}, device={self.device})"
        )

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

    @property
    def pairs(self) -> tuple[str, PairScores | None]:
        """Name of a dataset in the checkpoint, and scores of pairs of its images; "" and None if there are none.

        Raises:
            WeightsError: if the pairs in the checkpoint are damaged.
        """
        stored, form = self.extra.get("pairs") or {}, PairScores.form()
        wrong = structure_mismatch(dict.fromkeys(stored, form) if isinstance(stored, dict) else {}, stored, "pairs")
        if not wrong and any(scores and scores.keys() != form.keys() for scores in stored.values()):
            wrong = f"pairs: expected {', '.join(form)} for each dataset"
        if wrong:
            raise damaged_entry_error(self.checkpoint, wrong)
        name, scores = next(iter(stored.items()), ("", None))
        return name, PairScores(**scores) if scores else None

    @property
    def protocol(self) -> Protocol:
        """Evaluation protocol, whose junk is excluded from pairs of a reference."""
        return Protocol.from_config(self.cfg)

    def extract_folder(self, folder: Path, out: Path) -> list[str]:
        """Extract the images in a folder to a file, and return the error messages of unreadable images."""
        return extract(self, folder, out, skip_corrupt=True)[1]

    @cached_property
    def config_hash(self) -> str:
        """Hash of the weights and of the config keys that affect the features, 16 hex digits.

        Features from models with equal hashes can be compared.
        """
        return hash_of_features(self.cfg, self.model.state_dict(), self.transforms.resize)

    def features(self, images: Images, *, boxes: Boxes | None = None, **options: "Unpack[ImageOptions]") -> Tensor:
        """Extract the features of images, or of boxes in one frame.

        The features of images without pixels, such as boxes outside the frame, are NaN; a warning lists their indices.

        Args:
            images: one or more images. Each is a path, the bytes of an image file, a file opened as bytes, a PIL image,
                a uint8 array (H, W) or (H, W, C), or a uint8 tensor (C, H, W); arrays and tensors are gray, RGB or
                RGBA. A batch may also be an array (N, H, W, C) or a tensor (N, C, H, W). With ``boxes``, exactly one
                image, the frame.
            boxes: (N, 4) left, top, right and bottom in pixels of the frame, right and bottom exclusive; coordinates
                are rounded and clipped to the frame. Default: None, full images.
            color: channel order of arrays and tensors: ``rgb`` (default), or ``bgr`` as in OpenCV (also BGRA). Ignored
                for paths and PIL images.
            camids, viewids: camera and view of each image or box; required if the model has camera or view embeddings.
            modality: ``visible`` or ``infrared``, of all images or of each, for a model with a stem for each modality.
                Default: MODEL.BACKBONE.MODALITY.

        Returns:
            (N, D) float32 on the CPU, not normalized, in the order of the images or boxes.

        Raises:
            DataError: if an image cannot be read, an image or ``boxes`` has a wrong shape or dtype, or the images of a
                batch have different sizes after resizing (possible if INPUT.SIZE_TEST is one number and INPUT.CROP is
                off).
            ConfigError: if required ``camids``, ``viewids`` or ``modality`` are missing or invalid, or ``color`` is
                unknown.
        """
        return self._compute(images, boxes=boxes, **options)

    def predict(
        self, output: str, images: Images, *, boxes: Boxes | None = None, **options: "Unpack[ImageOptions]"
    ) -> list[dict[str, float]]:
        """Compute an output of the model other than its features, of images or of boxes in one frame.

        Args:
            output: name of the output in ``OUTPUT_REGISTRY``, e.g. ``"attributes"``.
            images, boxes, options: see ``features``.

        Returns:
            For each image or box: name -> value, e.g. ``"upper_color=red"`` -> probability in 0..1; NaN for an image
            without pixels.

        Raises:
            ConfigError: if the model does not have the output; see also ``features``.
            DataError: see ``features``.
        """
        found = self.require_output(output)
        width, forward = len(found.names), lambda model, batch: found.compute(model, batch)[1]
        values = self._compute(images, boxes=boxes, forward=forward, width=width, **options)
        is_known = ~values.isnan().any(1)  # not those of images that cannot be read
        values[is_known] = found.finish(values[is_known]).to(values.dtype)
        return [found.named(row) for row in values.tolist()]

    def _compute(
        self,
        images: Images,
        *,
        boxes: Boxes | None,
        color: str = "rgb",
        forward: Forward = call_model,
        width: int | None = None,
        **labels: Any,
    ) -> Tensor:
        """Compute the outputs (N, width) of ``forward`` for images, by default as wide as the features."""
        images, color = list_or_crop(images, boxes, color, self.transforms)
        inputs = self.inputs.of_images(len(images), **labels)
        kept = [number for number, image in enumerate(images) if has_pixels(image)]
        starts = range(0, len(kept), self.batch_size)

        def load(number: int) -> Tensor:
            try:
                return self._load(images[number], color)
            except DataError as error:
                raise DataError(f"image {number}: {error}" if len(images) > 1 else str(error)) from error

        def name(number: int) -> str:
            image = images[number]
            return os.fspath(image) if isinstance(image, str | os.PathLike) else f"number {number}"

        def batches(pool: ThreadPoolExecutor) -> Iterator[Batch]:
            for start in track(starts, len(starts), "extracting features") if len(starts) > 1 else starts:
                numbers = kept[start : start + self.batch_size]
                batch: Batch = {name: values[numbers] for name, values in inputs.items()}
                yield batch | {"images": self.transforms.stack([*read_in_threads(pool, load, numbers, name)])}

        with decoding_pool() as pool:
            features = self.compute(batches(pool), forward=forward)
        result = torch.full((len(images), features.shape[1] or width or self.feature_dim), torch.nan)
        if kept:
            result[kept] = features
        if empty := sorted({*range(len(images))} - {*kept}):
            listed = ", ".join(map(str, empty[:_MAX_LISTED])) + ", ..." * (len(empty) > _MAX_LISTED)
            logger.warning(
                "%d of %d %s have no pixels, so their features are NaN; indices: %s.\n"
                "  fix: exclude them, or pass boxes that contain a pixel of their image",
                *(len(empty), len(result), "images" if boxes is None else "boxes", listed),
            )
        return result

    def tracklet_features(self, frames: Sequence[Image], *, color: str = "rgb", **labels: Any) -> Tensor:
        """Extract the feature of a tracklet, from one batch with all of its frames.

        Models without temporal pooling (MODEL.HEADS.TEMPORAL_POOL) average the features of the frames.

        Args:
            frames: frames in temporal order, see ``features``.
            color: see ``features``.
            labels: ``camids``, ``viewids`` and ``modality`` of each frame, see ``features``.

        Returns:
            (D,) float32 on the CPU, not normalized.

        Raises:
            DataError: if there are no frames; see also ``preprocess``.
            ConfigError: see ``features``.
        """
        frames = as_list(frames)
        batch: Batch = self.inputs.of_images(len(frames), **labels)
        batch["images"] = self.transforms.stack([self.preprocess(frame, color=color) for frame in frames])
        batch["tracklet"] = torch.zeros(len(frames), dtype=torch.int64)
        return self.compute([batch]).mean(0)

    def features_of_preprocessed(self, images: Sequence[Tensor]) -> Tensor:
        """Extract the features of images from ``preprocess`` in one batch, without cameras, views and modality.

        Args:
            images: N images (C, H, W) uint8.

        Returns:
            (N, D) float32 on the CPU, not normalized.

        Raises:
            ConfigError: if the model requires cameras, views or modalities.
            DataError: if the images have different sizes, or a feature is not finite.
        """
        batch: Batch = self.inputs.of_images(len(images))
        batch["images"] = self.transforms.stack(list(images))
        return self.compute([batch])

    @cached_property
    def feature_dim(self) -> int:
        """Dimension D of the features."""
        image, modality = torch.zeros(self.transforms.channels, 256, 128, dtype=torch.uint8), self.inputs.modalities[:1]
        return self.features(image, camids=[0], viewids=[0], modality=modality or None).shape[1]

    def compute(
        self, batches: Iterable[Batch], *, forward: Forward = call_model, policy: PrecisionPolicy | None = None
    ) -> Tensor:
        """Compute the features of preprocessed batches.

        Args:
            batches: dicts with ``images``: (B, C, H, W) in 0..255, and with ``camids``, ``viewids`` and the column of
                the modality if the model requires them.
            forward: other outputs of the model; see ``extract_features``. Default: the features.
            policy: precision. Default: that of the model.

        Returns:
            (N, D) float32 on the CPU, not normalized; (0, 0) without batches.

        Raises:
            DataError: if a feature is not finite.
        """
        flip = self.cfg.TEST.FLIP.ENABLED
        options: dict[str, Any] = {"on_all_ranks": False, "flip_test": flip, "forward": forward}
        found = collect_features(self.model, batches, policy or self.policy, **options)
        return found.get("features", torch.empty(0, 0))
