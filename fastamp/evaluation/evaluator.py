"""Evaluators: run a model over a test set, collect the features and compute the metrics."""

import itertools
import logging
import pkgutil
import time
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fastamp.amp import PrecisionPolicy, to_float32
from fastamp.amp.device_errors import IN_EVALUATION, DeviceErrorHandler
from fastamp.amp.policy import dtype_name
from fastamp.config.key import Key
from fastamp.evaluation.report_section import ReportSection
from fastamp.utils import comm
from fastamp.utils.errors import TrainingError
from fastamp.utils.progress import format_duration, track
from fastamp.utils.registry import Registry

logger = logging.getLogger(__name__)

EVALUATOR_REGISTRY = Registry("TEST.EVALUATOR")
"""Registry of evaluators, classes with the arguments ``(cfg, num_query, output_dir)``."""

KEYS = (
    Key(
        "TEST.EVALUATOR",
        "auto",
        "Name of a registered evaluator; auto means that of the test sets, else that of the meta-architecture, "
        "ReidEvaluator if it has none.",
    ),
)

Locator = Callable[[nn.Module, dict[str, Any], PrecisionPolicy], str]
LOCATOR = "fastamp.diagnostics.nan_locator:describe_evaluation"
"""Default locator of ``inference_on_dataset``, imported only on failure because diagnostics imports evaluation."""


class DatasetEvaluator:
    """Base class of evaluators, which accumulate the batches of a test set and then compute metrics."""

    def metric_names(self) -> list[str] | None:
        """List the metrics from ``evaluate`` by which the best model can be selected; None if not known in advance."""
        return None

    def reset(self) -> None:
        """Discard all accumulated batches."""

    def extract(self, model: nn.Module, batch: dict[str, Any], policy: PrecisionPolicy, flip_test: bool = False) -> Any:
        """Compute the model output of a batch for ``process``. Default: the features, see ``extract_features``."""
        return extract_features(model, batch, policy, flip_test)

    def process(self, inputs: dict[str, Any], outputs: torch.Tensor) -> None:
        """Accumulate a batch and the corresponding model output."""
        raise NotImplementedError

    def evaluate(self) -> dict[str, Any] | None:
        """Compute and return the metrics; return None on ranks other than 0."""
        raise NotImplementedError

    def report_sections(self) -> Sequence[ReportSection]:
        """Return sections for the report of the last evaluation, on rank 0. Default: none."""
        return ()


def inference_on_dataset(
    model: nn.Module,
    data_loader: Iterable[dict[str, Any]],
    evaluator: DatasetEvaluator,
    flip_test: bool = False,
    *,
    policy: PrecisionPolicy | None = None,
    locate: Locator | str | None = LOCATOR,
) -> dict[str, Any]:
    """Evaluate a model on a test set, in evaluation mode; the mode of each module is restored afterwards.

    Args:
        model: model that maps a batch to (B, D) features in evaluation mode, or to several tensors for an evaluator
            that accepts them.
        data_loader: loader of batches with uint8 or float images in 0..255.
        evaluator: evaluator that receives each batch and its features.
        flip_test: if True, average the features of each image and its mirror image. Default: False.
        policy: precision policy of the forward passes. Default: float32.
        locate: function (model, first batch with non-finite features, policy) -> text to append to the error
            message, or the import path of such a function, ``"module:function"``. Default: a function that names the
            first module whose output is not finite. None appends no text.

    Returns:
        The evaluator's metrics; an empty dict on ranks other than 0.

    Raises:
        TrainingError: if features are not finite, or the device is out of memory.
    """
    policy = policy or PrecisionPolicy(next(model.parameters()).device.type, torch.float32, "no policy given")
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    evaluator.reset()
    start, images = time.perf_counter(), 0
    finite = []
    try:
        with torch.inference_mode(), DeviceErrorHandler("the evaluation", IN_EVALUATION) as computing:
            for batch in track(data_loader, len(cast(Sized, data_loader)), "evaluating"):
                computing.batch = batch
                features = evaluator.extract(model, batch, policy, flip_test)
                outputs = [output for output in tree_leaves(features) if isinstance(output, torch.Tensor)]
                finite.append(torch.stack([torch.isfinite(output).all() for output in outputs]).all())
                evaluator.process(batch, features)
                images += len(outputs[0])
        # Read once after the loop to avoid one device synchronization per batch.
        flags = torch.stack(finite).tolist() if finite else []
        first_nonfinite = flags.index(False) if False in flags else None
        if comm.any_across_ranks(first_nonfinite is not None):
            raise TrainingError(_explain_not_finite(model, data_loader, first_nonfinite, policy, locate))
    finally:
        for module, mode in was_training.items():
            module.training = mode
    seconds = time.perf_counter() - start
    images = int(comm.sum_over_ranks([images])[0])
    logger.info(
        "extracted features of %d images in %s (%.0f images/s)", images, format_duration(seconds), images / seconds
    )
    return evaluator.evaluate() or {}


def extract_features(
    model: nn.Module, batch: dict[str, Any], policy: PrecisionPolicy, flip_test: bool = False
) -> torch.Tensor:
    """Extract the features of a batch.

    Args:
        model: model in evaluation mode that maps a batch to (B, D) features.
        batch: dict with ``images``: (B, C, H, W) in 0..255, and any further inputs of the model.
        policy: precision policy of the forward pass.
        flip_test: if True, average the features of each image and its mirror image. Default: False.

    Returns:
        (B, D) float32 on the model's device, not normalized; float64 if the model is float64.
    """
    with policy.autocast():
        features: torch.Tensor = to_float32(model(batch))
    if not flip_test:
        return features
    mirrored = batch | {"images": batch["images"].flip(3)}
    with policy.autocast():
        features = (features + to_float32(model(mirrored))) / 2
    return features


def _explain_not_finite(
    model: nn.Module,
    data_loader: Iterable[dict[str, Any]],
    number: int | None,
    policy: PrecisionPolicy,
    locate: Locator | str | None,
) -> str:
    """Build the error message; ``number`` is the index of this rank's first batch with non-finite features, or None."""
    text = ""
    if number is not None:
        batch = next(itertools.islice(iter(data_loader), number, None))
        where = f"test batch {number}" + (f", first image {batch['img_paths'][0]}" if "img_paths" in batch else "")
        text = f"features are not finite: the model returned NaN or Inf in {dtype_name(policy.dtype)} ({where})"
        locate = pkgutil.resolve_name(locate) if isinstance(locate, str) else locate
        with comm.as_single_process():
            location = locate(model, batch, policy) if locate else ""
        fix = "  fix: evaluate with SOLVER.AMP.EVAL_DTYPE float32; if this fails too, use other weights"
        text += f".\n{location or fix}"
    return comm.select_message(text)
