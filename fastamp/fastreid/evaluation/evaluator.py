"""FastReID's base class of evaluators."""

from typing import Any

from torch import nn

from fastamp import evaluation
from fastamp.diagnostics.nan_locator import describe_evaluation
from fastamp.fastreid.overrides import warn_of_uncalled_methods
from fastamp.feature_pass import evaluation_mode

__all__ = ["DatasetEvaluator", "inference_context", "inference_on_dataset"]


_NEVER = {
    "preprocess_inputs": "override process, or build_transforms",
    "_compile_dependencies": "remove it: the ranking needs no compilation",
}
"""Method of FastReID's evaluators that is not called -> what to do instead."""


class DatasetEvaluator(evaluation.DatasetEvaluator):
    """Base class of evaluators; a subclass overrides ``reset``, ``process`` and ``evaluate``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        warn_of_uncalled_methods(cls, DatasetEvaluator, _NEVER)


inference_context = evaluation_mode


def inference_on_dataset(
    model: nn.Module, data_loader: Any, evaluator: Any, flip_test: bool = False, **options: Any
) -> dict[str, Any]:
    """Evaluate a model on a test set; see ``fastamp.evaluation.inference_on_dataset``."""
    options = {"locate": describe_evaluation} | options
    return evaluation.inference_on_dataset(model, data_loader, evaluator, flip_test, **options)
