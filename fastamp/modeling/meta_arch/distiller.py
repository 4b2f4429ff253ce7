"""Knowledge distillation: a Baseline that also learns from teachers' class probabilities."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fastamp.amp import apply_force_fp32
from fastamp.config import Key
from fastamp.modeling.losses.compute import Outputs, main_outputs
from fastamp.modeling.losses.distillation import distillation_loss
from fastamp.modeling.meta_arch.baseline import Baseline
from fastamp.modeling.meta_arch.build import META_ARCH_REGISTRY
from fastamp.modeling.meta_arch.momentum import MomentumCopy
from fastamp.modeling.meta_arch.teachers import build_teachers
from fastamp.utils.errors import ConfigError

KEYS = (
    Key("KD.MODEL_CONFIG", (), "Distiller: config files of the teachers.", of=str),
    Key("KD.MODEL_WEIGHTS", (), "Distiller: weight files of the teachers, in the order of MODEL_CONFIG.", of=str),
    Key("KD.EMA.ENABLED", False, "Distiller: also learn from a moving average of the student itself."),
    Key("KD.EMA.MOMENTUM", 0.999, "Distiller: share of that average that each iteration keeps.", low=0, high=1),
)


@META_ARCH_REGISTRY.register()
class Distiller(Baseline):
    """Baseline with a loss between its class probabilities and teachers' (Hinton et al. 2015, arXiv:1503.02531).

    Teachers see the same images, and are always in evaluation mode, without gradients, under the precision policy of
    the training. They are no part of the state dict: checkpoints are the student's, and load into a Baseline. One more
    teacher may be a moving average of the student itself, with its batch-norm statistics; it is a part of the state
    dict, below ``ema.``, so that a resumed run goes on with it.

    For example, on the command line or in YAML, with the config and the weights that the teacher's run has left::

        MODEL.META_ARCHITECTURE Distiller
        KD.MODEL_CONFIG  logs/market1501/sbs_R101-ibn/config.yaml
        KD.MODEL_WEIGHTS logs/market1501/sbs_R101-ibn/model_best.pth

    Args:
        teachers: models with ``class_logits(batch) -> (B, K)``, ready to be used.
        ema_momentum: share of the moving average that a training forward pass keeps, 0..1; None is no such teacher.
        temperature: see ``distillation_loss``.
        force_fp32: ``SOLVER.AMP.FORCE_FP32``, which the moving average is to have in common with the student.
        parts: see ``Baseline``.
    """

    training_only = ("losses", "ema")

    def __init__(
        self,
        *,
        teachers: Sequence[nn.Module],
        ema_momentum: float | None = None,
        temperature: float = 16.0,
        force_fp32: Sequence[str] = (),
        **parts: Any,
    ) -> None:
        super().__init__(**parts)
        # In a list they are no submodules: not in the state dict, nor put in training mode with the student.
        self._teachers = list(teachers)
        self.temperature = temperature
        self.ema: MomentumCopy | None = None
        if ema_momentum is not None:
            apply_force_fp32(self, tuple(force_fp32))
            self.ema = MomentumCopy(self, parts=("backbone", "heads"), momentum=ema_momentum).eval()
            self.trunks = (*self.trunks, "ema.backbone")

    @classmethod
    def further_options(cls, cfg: Any) -> dict[str, Any]:
        """Return those of ``KD``; a model without classes, which is for evaluation alone, has no teachers.

        Raises:
            ConfigError: there is no teacher, or see ``build_teachers``.
            WeightsError: see ``build_teachers``.
        """
        if cfg.MODEL.HEADS.NUM_CLASSES == 0:
            return {"teachers": ()}
        if not (cfg.KD.MODEL_CONFIG or cfg.KD.MODEL_WEIGHTS or cfg.KD.EMA.ENABLED):
            raise ConfigError(
                "MODEL.META_ARCHITECTURE Distiller has no teacher.\n"
                "  fix: name its files in KD.MODEL_CONFIG and KD.MODEL_WEIGHTS, or set KD.EMA.ENABLED True"
            )
        momentum = cfg.KD.EMA.MOMENTUM ** (1 / cfg.SOLVER.ACCUM_STEPS)  # so that a step keeps so much of it
        return {
            "teachers": build_teachers(cfg),
            "ema_momentum": momentum if cfg.KD.EMA.ENABLED else None,
            "force_fp32": cfg.SOLVER.AMP.FORCE_FP32,
        }

    def train(self, mode: bool = True) -> "Distiller":
        """Put the student in training or evaluation mode; its moving average stays in evaluation mode."""
        super().train(mode)
        if self.ema is not None:
            self.ema.eval()
        return self

    def forward(self, batch: dict[str, Any] | torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """Compute features, or losses; see ``Baseline.forward``."""
        batch = self.as_batch(batch)
        if self.training and self.ema is not None:
            self.ema.update(self, statistics=True)
        return super().forward(batch | {"images": batch["images"].to(self.device, non_blocking=True)})

    def loss_terms(
        self, outputs: Outputs | list[tuple[float, Outputs]], targets: torch.Tensor, batch: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return ``Baseline``'s losses, and ``loss_jsdiv``, the mean of the distillation losses of all teachers."""
        losses = super().loss_terms(outputs, targets, batch)
        student_logits = main_outputs(outputs)["pred_class_logits"]
        terms = [
            distillation_loss(student_logits, teacher_logits, temperature=self.temperature)
            for teacher_logits in self._teacher_logits(batch)
        ]
        return losses | {"loss_jsdiv": torch.stack(terms).mean()}

    @torch.no_grad()
    def _teacher_logits(self, batch: dict[str, Any]) -> list[torch.Tensor]:
        """Return the class logits of each teacher: (B, K) float32."""
        logits = [teacher.class_logits(batch) for teacher in self._teachers]
        if self.ema is not None:
            logits.append(self.ema.heads.logits(self.feature_maps(batch, self.ema.backbone)))
        return logits

    def convert_state_dict(self, state: dict[str, torch.Tensor], notes: list[str]) -> dict[str, torch.Tensor]:
        """Return the tensors of a file of this or another architecture, as ``Baseline`` does.

        Without a moving average in it, the file's model is where that starts.
        """
        state = super().convert_state_dict(state, notes)
        return state if self.ema is None else self.ema.fill_from_model(state, "ema.")

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Distiller":
        """Take the teachers along to another device."""
        for teacher in self._teachers:
            teacher._apply(fn, recurse)
        return super()._apply(fn, recurse)
