"""Meta-architecture of PartialReID."""

from typing import Any

import torch

from fastamp.modeling import META_ARCH_REGISTRY
from fastamp.modeling.losses.compute import Outputs
from fastamp.modeling.meta_arch import Baseline
from fastamp.utils.errors import ConfigError
from partialreid.dsr_head import DSRHead


@META_ARCH_REGISTRY.register()
class PartialBaseline(Baseline):
    """``Baseline`` with ``DSRHead``, evaluated by deep spatial reconstruction (``DsrEvaluator``).

    Each loss is computed for the global branch and, under the name ``<loss>_fore``, for the foreground branch.

    Args:
        options: arguments of ``Baseline``.

    Raises:
        ConfigError: if the head has no places to reconstruct.
    """

    evaluator = "DsrEvaluator"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if not isinstance(self.heads, DSRHead):
            raise ConfigError(
                f"MODEL.META_ARCHITECTURE=PartialBaseline requires DSRHead, got {type(self.heads).__name__}.\n"
                "  fix: set MODEL.HEADS.NAME to DSRHead"
            )

    def loss_terms(
        self, outputs: Outputs | list[tuple[float, Outputs]], targets: torch.Tensor, batch: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Compute the losses of both branches, name -> scalar float32."""
        (_, whole), (_, foreground) = outputs
        losses = super().loss_terms(foreground, targets, batch)
        return super().loss_terms(whole, targets, batch) | {f"{name}_fore": loss for name, loss in losses.items()}

    def places(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute features, places and scores of a batch in evaluation mode; see ``DSRHead.places``."""
        return self.heads.places(self.feature_maps(self.as_batch(batch)))
