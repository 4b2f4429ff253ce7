"""Run a model over a test set under one precision policy."""

import itertools
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from fastamp.amp import PrecisionPolicy, to_float32
from fastamp.amp.policy import dtype_name
from fastamp.amp.refusal import IN_EVALUATION, Refusals
from fastamp.utils import comm
from fastamp.utils.errors import TrainingError
from fastamp.utils.progress import format_duration, track

logger = logging.getLogger(__name__)


class DatasetEvaluator:
    """Takes a test set batch by batch, then returns its metrics."""

    def metric_names(self) -> list[str] | None:
        """Return the metrics that ``evaluate`` returns and models can be compared by; None when that is not known."""
        return None

    def reset(self) -> None:
        """Start anew."""

    def process(self, inputs: dict[str, Any], outputs: torch.Tensor) -> None:
        """Take one batch and what the model returned for it."""
        raise NotImplementedError

    def evaluate(self) -> dict[str, Any] | None:
        """Return the metrics; None on ranks other than 0."""
        raise NotImplementedError


def inference_on_dataset(
    model: nn.Module,
    data_loader: Iterable[dict[str, Any]],
    evaluator: DatasetEvaluator,
    flip_test: bool = False,
    *,
    policy: PrecisionPolicy | None = None,
    locate: Callable[[nn.Module, dict[str, Any], PrecisionPolicy], str] | None = None,
) -> dict[str, Any]:
    """Evaluate a model; it is in evaluation mode meanwhile, and back in its former mode afterwards.

    Args:
        model: batch -> (B, D) features in evaluation mode.
        data_loader: batches, of uint8 or float images in 0..255.
        evaluator: gets each batch with its features.
        flip_test: use the mean of the features of each image and of its mirror image.
        policy: the trainer's precision policy; None computes in float32.
        locate: is given the model, the first batch whose features are not finite, and the policy, and returns text for
            the error message, e.g. ``fastamp.diagnostics.locate.describe_evaluation``; None adds nothing.

    Returns:
        The evaluator's metrics; an empty dict on ranks other than 0.

    Raises:
        TrainingError: features are not finite, with what ``locate`` returned; or memory ran out.
    """
    policy = policy or PrecisionPolicy(next(model.parameters()).device.type, torch.float32, "no policy given")
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    evaluator.reset()
    start, images = time.perf_counter(), 0
    finite = []
    try:
        with torch.inference_mode(), Refusals("the evaluation", IN_EVALUATION) as computing:
            for batch in track(data_loader, len(data_loader), "evaluating"):
                computing.batch = batch
                features = extract_features(model, batch, policy, flip_test)
                finite.append(torch.isfinite(features).all())
                evaluator.process(batch, features)
                images += len(features)
        # Read once, at the end: the loop need not wait for it.
        flags = torch.stack(finite).tolist() if finite else []
        bad = flags.index(False) if False in flags else None
        if comm.any_rank(bad is not None):
            raise TrainingError(_explain_not_finite(model, data_loader, bad, policy, locate))
    finally:
        for module, mode in was_training.items():
            module.training = mode
    seconds = time.perf_counter() - start
    (images,) = comm.sum_over_ranks([images])
    logger.info("features of %d images in %s (%.0f images/s)", images, format_duration(seconds), images / seconds)
    return evaluator.evaluate() or {}


def extract_features(
    model: nn.Module, batch: dict[str, Any], policy: PrecisionPolicy, flip_test: bool = False
) -> torch.Tensor:
    """Return the features of a batch.

    Args:
        model: batch -> (B, D) features, in evaluation mode.
        batch: ``images``: (B, C, H, W) in 0..255, and whatever else the model needs.
        policy: the precision that the model computes in.
        flip_test: return the mean of the features of each image and of its mirror image.

    Returns:
        (B, D) float32, on the model's device, not normalized; float64 of a float64 model.
    """
    with policy.autocast():
        features = to_float32(model(batch))
    if not flip_test:
        return features
    mirrored = batch | {"images": batch["images"].flip(3)}
    with policy.autocast():
        return (features + to_float32(model(mirrored))) / 2


def _explain_not_finite(
    model: nn.Module,
    data_loader: Iterable[dict[str, Any]],
    number: int | None,
    policy: PrecisionPolicy,
    locate: Callable[[nn.Module, dict[str, Any], PrecisionPolicy], str] | None,
) -> str:
    """Return the message about batch ``number``, the first whose features are not finite; None has none."""
    text = ""
    if number is not None:
        batch = next(itertools.islice(iter(data_loader), number, None))
        where = f"test batch {number}" + (
            f", which begins with {batch['img_paths'][0]}" if "img_paths" in batch else ""
        )
        text = f"the features that the model returned in {dtype_name(policy.dtype)} are not all finite ({where})"
        with comm.alone():
            found = locate(model, batch, policy) if locate else ""
        text += f".\n{found}" if found else ""
    return comm.first_text(text)
