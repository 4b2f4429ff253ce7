"""Knowledge distillation meta-architecture."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fastamp.amp import apply_force_fp32
from fastamp.config import CfgNode, Key
from fastamp.modeling.losses.compute import Outputs, main_outputs
from fastamp.modeling.losses.distillation import distillation_loss
from fastamp.modeling.meta_arch.baseline import Baseline
from fastamp.modeling.meta_arch.build import META_ARCH_REGISTRY
from fastamp.modeling.meta_arch.momentum import MomentumCopy
from fastamp.modeling.meta_arch.teachers import build_teachers
from fastamp.utils.errors import ConfigError

KEYS = (
    Key("KD.MODEL_CONFIG", (), "Distiller: config files of the teachers.", of=str),
    Key(
        "KD.MODEL_WEIGHTS",
        (),
        "Distiller: weights files of the teachers, in the same order as KD.MODEL_CONFIG.",
        of=str,
    ),
    Key("KD.EMA.ENABLED", False, "Distiller: use a moving average of the student's weights as an additional teacher."),
    Key("KD.EMA.MOMENTUM", 0.999, "Distiller: momentum of the moving average, per iteration.", low=0, high=1),
)


@META_ARCH_REGISTRY.register()
class Distiller(Baseline):
    """Baseline with a distillation loss from teachers (Hinton et al. 2015, arXiv:1503.02531).

    Teachers process the same images in evaluation mode, without gradients, under the training precision policy. They
    are not part of the state dict: a checkpoint contains only the student and can be loaded into a Baseline. A moving
    average of the student's weights and batch norm statistics can be an additional teacher. The average is part of the
    state dict, under the prefix ``ema.``, and is restored when a run is resumed.

    Example of KEY VALUE pairs on the command line, with the config and weights of the teacher's run:

        MODEL.META_ARCHITECTURE Distiller
        KD.MODEL_CONFIG  logs/market1501/sbs_R101-ibn/config.yaml
        KD.MODEL_WEIGHTS logs/market1501/sbs_R101-ibn/model_best.pth

    Args:
        teachers: models with ``class_logits(batch) -> (B, K)``, in evaluation mode, on the student's device.
        ema_momentum: momentum of the moving average per forward pass in training mode, in 0..1. Default None: no moving
            average.
        temperature: see ``distillation_loss``. Default 16.
        force_fp32: ``SOLVER.AMP.FORCE_FP32``, applied to the student before the moving average is copied from it.
        parts: keyword arguments of ``Baseline``.
    """

    one_graph = False
    training_only = ("losses", "ema")
    teaches_as = "Baseline"
    pools_tracklets = False
    supports_partial_fc = False

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
        # Modules in a list are not submodules: they are not in the state dict and do not follow train().
        self._teachers = list(teachers)
        self.temperature = temperature
        self.ema: MomentumCopy | None = None
        if ema_momentum is not None:
            apply_force_fp32(self, tuple(force_fp32))
            self.ema = MomentumCopy(self, parts=("backbone", "heads"), momentum=ema_momentum).eval()
            self.trunks = (*self.trunks, "ema.backbone")

    @classmethod
    def further_options(cls, cfg: CfgNode) -> dict[str, Any]:
        """Build the teachers configured in ``KD``. A model built without classes, for evaluation only, has no teachers.

        Raises:
            ConfigError: if no teacher is configured; see also ``build_teachers``.
            WeightsError: see ``build_teachers``.
        """
        if cfg.MODEL.HEADS.NUM_CLASSES == 0:
            return {"teachers": ()}
        if not (cfg.KD.MODEL_CONFIG or cfg.KD.MODEL_WEIGHTS or cfg.KD.EMA.ENABLED):
            raise ConfigError(
                f"MODEL.META_ARCHITECTURE={cfg.MODEL.META_ARCHITECTURE} requires a teacher.\n"
                "  fix: set KD.MODEL_CONFIG and KD.MODEL_WEIGHTS to the teacher's files, or set KD.EMA.ENABLED to True"
            )
        momentum = cfg.KD.EMA.MOMENTUM ** (1 / cfg.SOLVER.ACCUM_STEPS)  # per iteration, not per micro-batch
        return {
            "teachers": build_teachers(cfg),
            "ema_momentum": momentum if cfg.KD.EMA.ENABLED else None,
            "force_fp32": cfg.SOLVER.AMP.FORCE_FP32,
        }

    def train(self, mode: bool = True) -> "Distiller":
        """Set the training mode of the student; the moving average stays in evaluation mode."""
        super().train(mode)
        if self.ema is not None:
            self.ema.eval()
        return self

    def forward(self, batch: dict[str, Any] | torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """Compute features or losses; see ``Baseline.forward``."""
        batch = self.as_batch(batch)
        if self.training and self.ema is not None:
            self.ema.update(self, statistics=True)
        return super().forward(batch | {"images": batch["images"].to(self.device, non_blocking=True)})

    def loss_terms(
        self, outputs: Outputs | list[tuple[float, Outputs]], targets: torch.Tensor, batch: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Compute the losses of ``Baseline`` and ``loss_jsdiv``, the mean distillation loss over the teachers."""
        losses = super().loss_terms(outputs, targets, batch)
        student_logits = main_outputs(outputs)["pred_class_logits"]
        terms = [
            distillation_loss(student_logits, teacher_logits, temperature=self.temperature)
            for teacher_logits in self._teacher_logits(batch)
        ]
        return losses | {"loss_jsdiv": torch.stack(terms).mean()}

    @torch.no_grad()
    def _teacher_logits(self, batch: dict[str, Any]) -> list[torch.Tensor]:
        """Compute the class logits of each teacher, (B, K) float32."""
        logits = [teacher.class_logits(batch) for teacher in self._teachers]
        if self.ema is not None:
            logits.append(self.ema.heads.logits(self.feature_maps(batch, self.ema.backbone)))
        return logits

    def convert_state_dict(self, state: dict[str, torch.Tensor], notes: list[str]) -> dict[str, torch.Tensor]:
        """Convert ``state`` as ``Baseline`` does; if it has no moving average, add a copy of the student's tensors."""
        state = super().convert_state_dict(state, notes)
        return state if self.ema is None else self.ema.fill_from_model(state, "ema.")

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Distiller":
        """Apply ``fn`` to the tensors of the student and the teachers, e.g. to move them to another device."""
        for teacher in self._teachers:
            teacher._apply(fn, recurse)
        return super()._apply(fn, recurse)
