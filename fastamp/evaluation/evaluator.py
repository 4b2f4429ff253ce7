"""Evaluators: run a model over a test set, collect the features and compute the metrics."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from fastamp.amp import PrecisionPolicy
from fastamp.config import CfgNode
from fastamp.config.key import Key
from fastamp.contracts import Evaluator
from fastamp.evaluation.report_section import ReportSection
from fastamp.feature_pass import Extract, Locator, call_model, extract_features, feature_pass
from fastamp.utils.registry import Registry

KEYS = (
    Key(
        "TEST.EVALUATOR",
        "auto",
        "Name of a registered evaluator; auto means that of the test sets, else that of the meta-architecture, "
        "ReidEvaluator if it has none.",
    ),
)


class DatasetEvaluator:
    """Base class of evaluators, which accumulate the batches of a test set and then compute metrics.

    Attributes:
        test_sets: names of the datasets that it evaluates with ``TEST.EVALUATOR auto``. Default (): none.
    """

    test_sets: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def describe_protocol(cls, cfg: CfgNode) -> str:
        """Describe the protocol in one line. Default "": that of ``TEST.PROTOCOL``."""
        return ""

    def metric_names(self) -> list[str] | None:
        """List the metrics from ``evaluate`` by which the best model can be selected; None if not known in advance."""
        return None

    def reset(self) -> None:
        """Discard all accumulated batches."""

    def forward(self, model: nn.Module, batch: dict[str, Any]) -> Any:
        """Compute the outputs of a model for ``process``, see ``extract_features``. Default: those of the model."""
        return call_model(model, batch)

    def process(self, inputs: dict[str, Any], outputs: torch.Tensor) -> None:
        """Accumulate a batch and the corresponding model output."""
        raise NotImplementedError

    def evaluate(self) -> dict[str, Any] | None:
        """Compute and return the metrics; return None on ranks other than 0."""
        raise NotImplementedError

    def report_sections(self) -> Sequence[ReportSection]:
        """Return sections for the report of the last evaluation, on rank 0. Default: none."""
        return ()


EVALUATOR_REGISTRY = Registry("TEST.EVALUATOR", contract=DatasetEvaluator)
"""Registry of evaluators, classes with the arguments ``(cfg, num_query, output_dir)``."""


def inference_on_dataset(
    model: nn.Module,
    data_loader: Iterable[dict[str, Any]],
    evaluator: Evaluator,
    flip_test: bool = False,
    *,
    policy: PrecisionPolicy | None = None,
    locate: Locator | None = None,
    extract: Extract = extract_features,
) -> dict[str, Any]:
    """Evaluate a model on a test set, in evaluation mode; the mode of each module is restored afterwards.

    Args:
        model: model that maps a batch to (B, D) features in evaluation mode, or to several tensors for an evaluator
            that accepts them.
        data_loader: loader of batches with uint8 or float images in 0..255.
        evaluator: evaluator that receives each batch and its features.
        flip_test: if True, average the features of each image and its mirror image. Default: False.
        policy: precision policy of the forward passes. Default: float32.
        locate, extract: see ``feature_pass``.

    Returns:
        The evaluator's metrics; an empty dict on ranks other than 0.

    Raises:
        TrainingError: if features are not finite, or the device is out of memory.
    """
    policy = policy or PrecisionPolicy(next(model.parameters()).device.type, torch.float32, "no policy given")
    evaluator.reset()
    feature_pass(
        model,
        data_loader,
        evaluator.process,
        policy,
        forward=evaluator.forward,
        flip_test=flip_test,
        title="evaluating",
        locate=locate,
        extract=extract,
    )
    return evaluator.evaluate() or {}
