"""FastReID's base class of evaluators."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fastamp.evaluation import evaluator
from fastamp.evaluation.evaluator import inference_on_dataset
from fastamp.fastreid.overrides import warn_of_uncalled_methods

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


@contextmanager
def inference_context(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode in a ``with`` block, and restore its mode afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
