"""Predictor outputs: named values of images that a model computes besides the features, e.g. class probabilities."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fastamp.config import CfgNode
from fastamp.utils.registry import Registry

OUTPUT_REGISTRY = Registry("predictor output")
"""Name for ``Predictor.predict`` -> a ``PredictorOutput``."""


class PredictorOutput:
    """Named values of images that a model computes besides the features.

    Subclasses are registered in ``OUTPUT_REGISTRY``.

    Args:
        names: A names of the values.

    Attributes:
        stored: whether an extraction stores the values, in the columns ``probability.NAME``.
        fix: advice if a model lacks the output.
    """

    stored = False
    fix = "use a model with this output"

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    @classmethod
    def from_model(cls, model: nn.Module, cfg: CfgNode) -> "PredictorOutput | None":
        """Build the output of a model; return None if the model lacks it."""
        raise NotImplementedError

    def compute(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Compute the features (B, D) and the values (B, A) of a batch; a flip test averages both."""
        raise NotImplementedError

    def finish(self, values: Tensor) -> Tensor:
        """Convert the values (N, A) of ``compute`` after the flip test. Default: return them."""
        return values

    def named(self, values: Sequence[float]) -> dict[str, float]:
        """Return name -> value of an image. Default: in the order of ``names``."""
        return dict(zip(self.names, values, strict=True))
