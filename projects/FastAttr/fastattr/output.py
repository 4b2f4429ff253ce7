"""Probabilities of attributes as an output of ``Predictor``."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fastamp.config import CfgNode
from fastamp.inference.outputs import OUTPUT_REGISTRY, PredictorOutput
from fastattr.model import AttrBaseline, JointAttrBaseline


@OUTPUT_REGISTRY.register("attributes")
class AttributeProbabilities(PredictorOutput):
    """Probabilities in 0..1 of the attributes that a model recognizes, e.g. of ``upper_color=red``.

    Args:
        names: names of the attributes.
        threshold: probability from which an attribute is predicted, ``TEST.THRES``.
    """

    stored = True
    fix = "use a checkpoint of FastAttr, which has attributes"

    def __init__(self, names: Sequence[str], threshold: float) -> None:
        super().__init__(names)
        self.threshold = threshold

    @classmethod
    def from_model(cls, model: nn.Module, cfg: CfgNode) -> "AttributeProbabilities | None":
        """Build the output of ``AttrBaseline`` and ``JointAttrBaseline``."""
        if not isinstance(model, AttrBaseline | JointAttrBaseline):
            return None
        return cls(cfg.MODEL.ATTRIBUTES.NAMES, float(cfg.TEST.THRES))

    def compute(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Compute features and probabilities."""
        assert isinstance(model, AttrBaseline | JointAttrBaseline)
        return model.features_and_attributes(batch)
