"""Probabilities of classes as an output of ``Predictor``."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fastamp.config import CfgNode
from fastamp.inference.outputs import OUTPUT_REGISTRY, PredictorOutput
from fastamp.modeling.heads import ClasHead
from fastamp.modeling.meta_arch import Baseline
from fastamp.utils.errors import ConfigError


@OUTPUT_REGISTRY.register("classes")
class ClassProbabilities(PredictorOutput):
    """Probabilities in 0..1 of the classes that a classifier distinguishes, the most probable first."""

    fix = (
        "use a classifier (MODEL.HEADS.NAME ClasHead) with class names; for weights without class names, set "
        "DATASETS.CLASSES to the names in the order of the labels"
    )

    @classmethod
    def from_model(cls, model: nn.Module, cfg: CfgNode) -> "ClassProbabilities | None":
        """Build the output of a model with ``ClasHead`` and class names."""
        if not isinstance(model, Baseline) or not isinstance(model.heads, ClasHead):
            return None
        names = cfg.DATASETS.CLASSES if "CLASSES" in cfg.DATASETS else ()  # declared by this project
        return cls(names) if names else None

    def compute(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Compute the logits of the classes, which are also the features."""
        logits = model(batch)
        if logits.shape[1] != len(self.names):
            raise ConfigError(
                f"DATASETS.CLASSES has {len(self.names)} names, but the model has {logits.shape[1]} classes.\n"
                "  fix: set DATASETS.CLASSES to the names of all classes in the order of the labels"
            )
        return logits, logits

    def finish(self, values: Tensor) -> Tensor:
        """Convert logits to probabilities."""
        return values.softmax(1)

    def named(self, values: Sequence[float]) -> dict[str, float]:
        """Return class -> probability, the most probable first."""
        return dict(sorted(super().named(values).items(), key=lambda pair: -pair[1]))
