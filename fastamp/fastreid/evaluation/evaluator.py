"""FastReID's base class of evaluators."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fastamp.evaluation import evaluator
from fastamp.evaluation.evaluator import inference_on_dataset

__all__ = ["DatasetEvaluator", "inference_context", "inference_on_dataset"]


class DatasetEvaluator(evaluator.DatasetEvaluator):
    """Base class of evaluators; a subclass overrides ``reset``, ``process`` and ``evaluate``."""


@contextmanager
def inference_context(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode in a ``with`` block, and restore its mode afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
