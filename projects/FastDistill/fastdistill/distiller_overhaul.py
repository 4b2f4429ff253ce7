"""Knowledge distillation of logits and feature maps."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastamp.config import CfgNode, Key
from fastamp.modeling import META_ARCH_REGISTRY
from fastamp.modeling.meta_arch import Distiller
from fastamp.modeling.meta_arch.image_model import ImageModel
from fastamp.utils.errors import ConfigError
from fastdistill.overhaul import build_connector, channel_margins, overhaul_loss
from fastdistill.stages import last_norms, tap_stages

KEYS = (
    Key(
        "KD.OVERHAUL.SCALE",
        1e-4,
        "DistillerOverhaul: weight of the loss of the feature maps, a sum over all of their values.",
        low=0,
    ),
    Key(
        "KD.OVERHAUL.VARIANT",
        "paper",
        "DistillerOverhaul: paper compares the feature maps before the last ReLU of each stage; fastreid compares the "
        "last stage before and the others after the ReLU, as FastReID's code does, whose ReLU works in place.",
        choices=("paper", "fastreid"),
    ),
)


@META_ARCH_REGISTRY.register()
class DistillerOverhaul(Distiller):
    """Distiller with a loss of the feature maps of each stage (Heo et al. 2019, arXiv:1904.01866).

    Connectors, 1x1 convolutions with batch norm, map the student's stages to the width of the teacher's. They are
    trained with the student and are part of the state dict, under ``connectors.<teacher>.<stage>.``; a Baseline loads
    the checkpoint without them. The margins follow the teacher's batch norm: those of the moving average
    (``KD.EMA.ENABLED``) change during training, whereas FastReID keeps its initial ones.

    Args:
        scale: weight of ``loss_overhaul``. Default 1e-4.
        variant: "paper" (default) or "fastreid", see ``KD.OVERHAUL.VARIANT``.
        teachers, parts: see ``Distiller``.

    Raises:
        ConfigError: if student and teacher are not residual networks with the same number of stages.
    """

    training_only = ("losses", "ema", "connectors")

    def __init__(self, *, scale: float = 1e-4, variant: str = "paper", **parts: Any) -> None:
        super().__init__(**parts)
        self.scale, self.variant = scale, variant
        self.connectors = nn.ModuleList(self._build_connectors(backbone) for backbone in self._teacher_backbones())

    @classmethod
    def further_options(cls, cfg: CfgNode) -> dict[str, Any]:
        """Build the teachers, see ``Distiller.further_options``.

        Raises:
            ConfigError: if ``MODEL.COMPILE`` is not off, since the feature maps are read by hooks.
        """
        if cfg.MODEL.COMPILE != "off" and cfg.MODEL.HEADS.NUM_CLASSES:
            raise ConfigError(
                f"MODEL.COMPILE={cfg.MODEL.COMPILE} is not supported by MODEL.META_ARCHITECTURE=DistillerOverhaul, "
                "which reads feature maps within the backbone.\n  fix: set MODEL.COMPILE to off"
            )
        options = {"scale": cfg.KD.OVERHAUL.SCALE, "variant": cfg.KD.OVERHAUL.VARIANT}
        return super().further_options(cfg) | options

    def forward(self, batch: dict[str, Any] | torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """Compute features, or the losses of ``Distiller`` and ``loss_overhaul``, the mean over the teachers."""
        if not self.training:
            return super().forward(batch)
        backbones = self._teacher_backbones()
        with tap_stages(self.backbone, *backbones) as (student, *teachers):
            losses = super().forward(batch)
        terms = [
            self._overhaul_loss(student, stages, backbone, connectors)
            for stages, backbone, connectors in zip(teachers, backbones, self.connectors, strict=True)
        ]
        return losses | {"loss_overhaul": self.scale * torch.stack(terms).mean()}

    def _teacher_backbones(self) -> list[nn.Module]:
        """Return the backbones of the teachers, that of the moving average last."""
        backbones = [teacher.backbone if isinstance(teacher, ImageModel) else teacher for teacher in self._teachers]
        return backbones if self.ema is None else [*backbones, self.ema.backbone]

    def _build_connectors(self, teacher: nn.Module) -> nn.ModuleList:
        student_norms, others = last_norms(self.backbone), last_norms(teacher)
        if len(student_norms) != len(others):
            raise ConfigError(
                f"DistillerOverhaul: the student's {type(self.backbone).__name__} has {len(student_norms)} stages, but "
                f"the teacher's {type(teacher).__name__} has {len(others)}.\n"
                "  fix: choose a teacher in KD.MODEL_CONFIG with the student's number of stages"
            )
        return nn.ModuleList(
            build_connector(len(norm.weight), len(other.weight))
            for norm, other in zip(student_norms, others, strict=True)
        )

    def _overhaul_loss(
        self, student: list[torch.Tensor], teacher: list[torch.Tensor], backbone: nn.Module, connectors: nn.ModuleList
    ) -> torch.Tensor:
        """Compute the loss for one teacher.

        Raises:
            ConfigError: if the feature maps of student and teacher differ in height or width.
        """
        for stage, (of_student, other) in enumerate(zip(student, teacher, strict=True), start=1):
            if of_student.shape[-2:] != other.shape[-2:]:
                raise ConfigError(
                    f"DistillerOverhaul: the feature maps of stage {stage} are {tuple(of_student.shape[-2:])} (height, "
                    f"width) in the student, but {tuple(other.shape[-2:])} in the teacher.\n"
                    "  fix: set MODEL.BACKBONE.LAST_STRIDE and STEM_POOL as in the teacher's config"
                )
        if self.variant == "fastreid":
            student, teacher = ([*map(F.relu, maps[:-1]), maps[-1]] for maps in (student, teacher))
        connected = [connector(maps) for connector, maps in zip(connectors, student, strict=True)]
        return overhaul_loss(connected, teacher, [channel_margins(norm) for norm in last_norms(backbone)])
