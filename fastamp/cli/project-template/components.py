"""Custom components of this project: a loss with a config key."""

from torch import Tensor, nn

from fastamp.amp import force_fp32
from fastamp.config import CfgNode, Key
from fastamp.modeling import LOSS_REGISTRY

KEYS = (Key("MODEL.LOSSES.UNIT_NORM.SCALE", 0.01, "Unit norm loss: loss weight."),)


@LOSS_REGISTRY.register()
class UnitNormLoss(nn.Module):
    """Squared distance of the features from the unit sphere.

    Args:
        scale: loss weight.
    """

    loss_name = "loss_norm"

    def __init__(self, *, scale: float) -> None:
        super().__init__()
        self.scale = scale

    @classmethod
    def from_config(cls, cfg: CfgNode) -> "UnitNormLoss":
        """Build the loss from the config."""
        return cls(scale=cfg.MODEL.LOSSES.UNIT_NORM.SCALE)

    @force_fp32
    def forward(self, outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
        """Compute the loss of the head's features (B, D)."""
        return self.scale * (outputs["features"].norm(dim=1) - 1).square().mean()
