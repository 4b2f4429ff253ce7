"""Any model of timm's as a backbone."""

from typing import Any

from torch import nn


def build_timm_backbone(cfg: Any, name: str) -> nn.Module:
    """Return timm's model ``name``."""
    raise NotImplementedError
