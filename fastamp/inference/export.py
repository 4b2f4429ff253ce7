"""A trained model as a file that needs no fastamp: traced, compared with the original, and only then written."""

import contextlib
import copy
import logging
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import fastamp
from fastamp.amp import PrecisionPolicy, force_fp32
from fastamp.amp.fp16_export import to_float16
from fastamp.config import fixed_input_size, input_size
from fastamp.evaluation.evaluator import extract_features
from fastamp.inference.export_formats import FORMATS, ExportError, Format, Run, quiet
from fastamp.inference.parity import Comparison, Features, RankedImages, compare, compare_on_random_images
from fastamp.inference.predictor import Predictor
from fastamp.modeling.meta_arch.image_model import ImageModel
from fastamp.utils.errors import ConfigError, DataError, check_choice, writing
from fastamp.utils.files import write_atomically
from fastamp.utils.moved import moved_names

__getattr__ = moved_names(
    __name__,
    {
        "LEAST_COSINE": "fastamp.inference.export.MIN_COSINE",
    },
)

logger = logging.getLogger(__name__)

PRECISIONS = ("float32", "fp16")
MIN_COSINE = {"float32": 0.9999, "fp16": 0.99}
"""Between a feature of the exported model and PyTorch's; measured, float32 differs by 1e-6 and fp16 by 1e-4."""

_COLOR_ORDERS = {1: "L", 3: "RGB", 4: "RGBA"}


@dataclass
class ExportReport:
    """What was exported, and how near it is to the model that PyTorch computes in float32.

    Attributes:
        path: the file.
        format: its kind.
        metadata: what the file says of itself.
        size: its bytes.
        comparisons: of features.
        data: the data set whose mAP was compared; "" where random images alone were.
        expected_map, found_map: in percent, before and after; None without ``data``.
    """

    path: Path
    format: str
    metadata: dict[str, Any]
    size: int = 0
    comparisons: list[Comparison] = field(default_factory=list)
    data: str = ""
    expected_map: float | None = None
    found_map: float | None = None

    @property
    def map_difference(self) -> float | None:
        """mAP points that the export has gained, below 0 lost."""
        return None if self.found_map is None else self.found_map - self.expected_map

    def table(self) -> str:
        """Return the comparisons as text."""
        headers = ("images", "number", "cosine, least", "cosine, mean", "largest difference")
        rows = [tuple(asdict(each).values()) for each in self.comparisons]
        text = tabulate(rows, headers, floatfmt=("", "", ".6f", ".6f", ".1e"))
        if self.found_map is not None:
            text += (
                f"\nmAP: {self.expected_map:.2f} in PyTorch, {self.found_map:.2f} exported, difference "
                f"{self.map_difference:+.2f}"
            )
        return text


def export(
    predictor: Predictor,
    path: str | os.PathLike[str],
    *,
    precision: str = "float32",
    normalization: bool = True,
    l2: bool = False,
    data: str | None = None,
    max_images: int = 1000,
    tolerance: float = 0.1,
    opset: int | None = None,
) -> ExportReport:
    """Write a model to an ONNX or a torch.export file, once its features are found to be the model's.

    The file's model takes ``images``: (B, C, H, W) float32 for any B, at ``INPUT.SIZE_TEST``, or ``INPUT.CROP.SIZE``
    where ``INPUT.CROP`` is on, and, with camera or view embeddings, ``camids`` and ``viewids``: (B,) int64. It returns
    ``features``: (B, D) float32, with the mirror image's in them where ``TEST.FLIP`` says so. Compared is with PyTorch
    in float32, on random images in batches of 1, 3 and 32 and on a test set.

    Args:
        predictor: the model.
        path: ends with .onnx or .pt2.
        precision: float32, or fp16: weights and computation in float16, but for what must be float32 (``to_float16``).
        normalization: images are 0..255, and the file holds mean and standard deviation; else the caller has
            normalized them.
        l2: features have length 1.
        data: a test set; None takes the config's first, if that is there, and "" none.
        max_images: compare about so many of it at most; 0 takes all.
        tolerance: mAP points that may be lost.
        opset: of ONNX; None leaves the choice to PyTorch.

    Raises:
        ConfigError: an argument is wrong, a package is missing, the file cannot be written, or the size of test images
            is not fixed.
        DataError: ``data`` is missing.
        ExportError: the model cannot be traced, or what was exported is not good enough; no file is left then.
    """
    path = Path(path).expanduser()
    format = _check_arguments(path, precision, opset, tolerance)
    fixed_input_size(predictor.cfg, is_train=False, needed_by="an exported model")
    images = _load_test_images(predictor, data, max_images)
    extractor = _FeatureExtractor(predictor, precision=precision, normalization=normalization, l2=l2)
    program = _trace(extractor, predictor)
    metadata = _metadata(predictor, precision=precision, normalization=normalization, l2=l2)
    (outputs,) = next(iter(reversed(program.graph.nodes))).args
    metadata["feature_width"] = outputs[0].meta["val"].shape[1]
    content = format.content(program, metadata, opset)
    report = ExportReport(path, format.title, metadata, len(content))
    found = _exported_features(format.runner(content), predictor, metadata)
    _compare(report, predictor, found, images, l2)
    _check_quality(report, tolerance)
    with writing(path):
        write_atomically(path, lambda file: file.write(content))
    return report


class _FeatureExtractor(nn.Module):
    """What an exported file computes, on the CPU."""

    def __init__(self, predictor: Predictor, *, precision: str, normalization: bool, l2: bool) -> None:
        super().__init__()
        self.model = _to_deploy_form(predictor.model)
        if not isinstance(self.model, ImageModel):
            raise ExportError(f"a {type(self.model).__name__} is no ImageModel, and only those are exported")
        if not normalization:
            self.model.take_normalized_images()
        if precision == "fp16":
            for part in self.model.children():  # not the model's own pixel mean and deviation
                to_float16(part)
        self.flip, self.l2 = predictor.cfg.TEST.FLIP.ENABLED, l2
        # Float32 regions apart, the dtype is that of the weights: autocast would be traced into the file.
        self.policy = PrecisionPolicy("cpu", torch.float32)

    def forward(self, images: Tensor, camids: Tensor | None = None, viewids: Tensor | None = None) -> Tensor:
        """Return (B, D) float32 features."""
        batch = {"images": images, "camids": camids, "viewids": viewids}
        if viewids is not None and camids is None:
            batch["camids"] = viewids  # asked for, and not looked at
        batch = {name: tensor for name, tensor in batch.items() if tensor is not None}
        features = extract_features(self.model, batch, self.policy, self.flip)
        return _normalized(features) if self.l2 else features


@force_fp32
def _normalized(features: Tensor) -> Tensor:
    return F.normalize(features, dim=1)


def _to_deploy_form(model: nn.Module) -> nn.Module:
    """Return a copy on the CPU in the form that is meant for inference."""
    model = copy.deepcopy(model).to("cpu", memory_format=torch.contiguous_format).eval().requires_grad_(False)
    for name in getattr(model, "training_only", ()):
        setattr(model, name, None)
    before = len(model.state_dict())
    for module in list(model.modules()):
        if hasattr(module, "switch_to_deploy"):
            with contextlib.suppress(ConfigError):  # without batch norm there is no such form
                module.switch_to_deploy()
    if len(model.state_dict()) != before:
        logger.info("the branches of each block are fused into one convolution (MODEL.BACKBONE.DEPLOY)")
    return model


def _trace(extractor: _FeatureExtractor, predictor: Predictor) -> ExportedProgram:
    """Return the program, for any batch size."""
    cfg = predictor.cfg
    # Two images: one would be taken for the only number there is.
    inputs = {"images": torch.zeros(2, cfg.INPUT.CHANNELS, *input_size(cfg, is_train=False))}
    inputs |= {name: torch.zeros(2, dtype=torch.int64) for name in predictor.camera_view_counts}
    batch = Dim("batch", min=1)
    with quiet("the model cannot be traced by torch.export"), torch.no_grad():
        return torch.export.export(
            extractor, (), inputs, dynamic_shapes={name: {0: batch} for name in inputs}, strict=False
        )


def _check_arguments(path: Path, precision: str, opset: int | None, tolerance: float) -> Format:
    """Return the format of ``path``; see ``export`` for what is raised."""
    if path.suffix not in FORMATS:
        raise ConfigError(
            f"{path} is of no format that is known: expected a name that ends with {' or '.join(FORMATS)}"
        )
    check_choice("--precision", precision, PRECISIONS)
    if not 0 <= tolerance <= 100:
        raise ConfigError(f"--tolerance {tolerance}: expected mAP points, 0..100")
    format = FORMATS[path.suffix]
    format.check(opset)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file in it")
    with writing(path), tempfile.TemporaryFile(dir=path.parent):
        pass  # better now than after minutes
    return format


def _load_test_images(predictor: Predictor, data: str | None, max_images: int) -> RankedImages | None:
    """Return the test images to compare on, None where there are none."""
    if data == "":
        return None
    name = next(iter(predictor.cfg.DATASETS.TESTS), None) if data is None else data
    if name is None:
        return None
    try:
        return RankedImages(predictor, name, max_images)
    except (ConfigError, DataError) as error:
        if data is not None:
            raise
        logger.warning(
            "random images alone are compared, and no mAP, since %s is not here (%s)\n  fix: --data NAME compares on "
            "other test images",
            name,
            str(error).splitlines()[0],
        )
        return None


def _metadata(predictor: Predictor, *, precision: str, normalization: bool, l2: bool) -> dict[str, Any]:
    """Return what a file says of itself."""
    cfg, model = predictor.cfg, predictor.model
    resize = predictor.resize
    return {
        "fastamp_version": fastamp.__version__,
        "config_hash": predictor.config_hash,
        "input_size": list(input_size(cfg, is_train=False)),
        "resize": list(resize.size),
        "aspect": "stretched" if len(resize.size) == 2 else "kept",
        "interpolation": resize.interpolation,
        "antialias": resize.interpolation != "nearest",
        "center_crop": None if resize.crop is None else list(resize.crop),
        "channels": cfg.INPUT.CHANNELS,
        "color_order": _COLOR_ORDERS.get(cfg.INPUT.CHANNELS, ""),
        "colour_order": _COLOR_ORDERS.get(cfg.INPUT.CHANNELS, ""),
        "normalization": "inside" if normalization else "outside",
        "pixel_mean": model.pixel_mean.flatten().tolist(),
        "pixel_std": model.pixel_std.flatten().tolist(),
        "l2": l2,
        "flip": cfg.TEST.FLIP.ENABLED,
        "metric": cfg.TEST.METRIC,
        "precision": precision,
    }


def _exported_features(run: Run, predictor: Predictor, metadata: dict[str, Any]) -> Features:
    """Return what computes an exported model's features of a batch in 0..255."""
    mean, std = (predictor.model.get_buffer(name).cpu() for name in ("pixel_mean", "pixel_std"))

    def features(batch: dict[str, Any]) -> Tensor:
        images = batch["images"].float()
        if metadata["normalization"] == "outside":
            images = (images - mean) / std
        with quiet(f"the exported model does not run on a batch of {len(images)}"):
            return run({"images": images} | {name: batch[name] for name in predictor.camera_view_counts})

    return features


def _compare(
    report: ExportReport, predictor: Predictor, found: Features, images: RankedImages | None, l2: bool
) -> None:
    """Fill in the comparisons; what fails before the test set is not compared on it."""
    policy = predictor.policy.in_float32()

    def raw_features(batch: dict[str, Any]) -> Tensor:
        with torch.inference_mode():
            return extract_features(predictor.model, batch, policy, predictor.cfg.TEST.FLIP.ENABLED).cpu()

    def expected(batch: dict[str, Any]) -> Tensor:
        return _normalized(raw_features(batch)) if l2 else raw_features(batch)

    report.comparisons = compare_on_random_images(predictor, expected, found)
    if images is None or _differs_too_much(report):
        return
    rows = images.features(raw_features), images.features(found)
    report.data = images.title
    joined = [torch.cat(each) for each in rows]
    report.comparisons.append(compare(images.title, _normalized(joined[0]) if l2 else joined[0], joined[1]))
    if not _differs_too_much(report):
        report.expected_map, report.found_map = map(images.mean_average_precision, rows)


def _differs_too_much(report: ExportReport) -> bool:
    minimum = MIN_COSINE[report.metadata["precision"]]
    return any(not each.min_cosine >= minimum for each in report.comparisons)  # NaN too


def _check_quality(report: ExportReport, tolerance: float) -> None:
    """Raise ExportError unless the exported model is good enough."""
    precision, lost = report.metadata["precision"], -(report.map_difference or 0)
    if _differs_too_much(report):
        minimum = min((each.min_cosine for each in report.comparisons), key=lambda cosine: (cosine == cosine, cosine))
        problem = f"an embedding cosine of {minimum:.6f} is below {MIN_COSINE[precision]}"
    elif lost > tolerance:
        problem = f"mAP falls by {lost:.2f} points, and --tolerance is {tolerance:g}"
    else:
        return
    fix = "--precision float32, or SOLVER.AMP.FORCE_FP32 with the modules that float16 breaks (the doctor finds them)"
    if precision == "float32":
        fix = "another format; and please report the model, since this is a fault of the exporter's or of ours"
        if report.metadata["l2"] and report.metadata["metric"] == "euclidean" and lost > tolerance:
            fix = "--no-l2: the euclidean metric ranks by length too"
    raise ExportError(f"{report.path} was not written: {problem}.\n{report.table()}\n  fix: {fix}")
