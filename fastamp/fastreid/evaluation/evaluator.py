"""FastReID's base class of evaluators."""

from typing import Any

from fastamp.evaluation import evaluator
from fastamp.evaluation.evaluator import inference_on_dataset
from fastamp.fastreid.overrides import warn_of_uncalled_methods
from fastamp.feature_pass import evaluation_mode

__all__ = ["DatasetEvaluator", "inference_context", "inference_on_dataset"]


_NEVER = {
    "preprocess_inputs": "override process, or build_transforms",
    "_compile_dependencies": "remove it: the ranking needs no compilation",
}
"""Method of FastReID's evaluators that is not called -> what to do instead."""


class DatasetEvaluator(evaluator.DatasetEvaluator):
    """Base class of evaluators; a subclass overrides ``reset``, ``process`` and ``evaluate``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        warn_of_uncalled_methods(cls, DatasetEvaluator, _NEVER)


inference_context = evaluation_mode
