"""Distiller with FastReID's attributes."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from fastamp.fastreid.modeling.meta_arch.baseline import Baseline
from fastamp.modeling.losses.compute import Outputs
from fastamp.modeling.losses.distillation import distillation_loss
from fastamp.modeling.meta_arch import distiller


class Distiller(Baseline, distiller.Distiller):
    """Baseline with teachers; see ``fastamp.modeling.meta_arch.Distiller``.

    Attributes:
        model_ts: teachers, first the moving average; ``backbone(images)`` returns feature maps, and
            ``heads(maps, targets)`` returns ``{"pred_class_logits": (B, K)}``.
        ema_enabled, ema_momentum: whether there is a moving average of the student, and its momentum.
    """

    @property
    def model_ts(self) -> list[SimpleNamespace]:
        """Teachers; see the class."""
        teachers: list[Any] = [*self._teachers] if self.ema is None else [self.ema, *self._teachers]
        return [SimpleNamespace(backbone=teacher.backbone, heads=_Logits(teacher.heads)) for teacher in teachers]

    @property
    def ema_enabled(self) -> bool:
        """True if there is a moving average of the student."""
        return self.ema is not None

    @property
    def ema_momentum(self) -> float:
        """Momentum of the moving average; 0 without one."""
        return self.ema.momentum if self.ema is not None else 0.0

    def _momentum_update_key_encoder(self, m: float = 0.999) -> None:
        """Update the moving average; ``m`` is ``ema_momentum``."""
        if self.ema is not None:
            self.ema.update(self, statistics=True)

    def loss_terms(self, outputs: Outputs, targets: torch.Tensor, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Compute the losses by the method ``losses``."""
        teachers = [{"pred_class_logits": logits} for logits in self._teacher_logits(batch)]
        return self.losses(outputs, teachers, targets)

    def losses(  # type: ignore[override]  # as in FastReID
        self, s_outputs: Outputs, t_outputs: list[Outputs], gt_labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Compute the losses of ``Baseline`` and ``loss_jsdiv``, the mean distillation loss over the teachers."""
        logits = s_outputs["pred_class_logits"]
        terms = [self.jsdiv_loss(logits, teacher["pred_class_logits"].detach()) for teacher in t_outputs]
        return super().losses(s_outputs, gt_labels) | {"loss_jsdiv": torch.stack(terms).mean()}

    def jsdiv_loss(self, y_s: torch.Tensor, y_t: torch.Tensor, t: float = 16) -> torch.Tensor:
        """Compute the distillation loss of logits (B, K) at temperature ``t``; see ``distillation_loss``."""
        return distillation_loss(y_s, y_t, temperature=t)


class _Logits:
    """Head of a teacher, called as in training mode."""

    def __init__(self, head: nn.Module) -> None:
        self.head = head

    def __call__(self, features: torch.Tensor, targets: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"pred_class_logits": self.head.logits(features)}
