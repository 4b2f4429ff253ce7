"""FastReID's predictor."""

from typing import Any

import torch

from fastamp.checkpoint.checkpointer import Checkpointer
from fastamp.modeling import build_model


class DefaultPredictor:
    """Model of a config with its weights, for features of preprocessed images.

    ``fastamp.Predictor`` reads image files, and has the same preprocessing and precision as an evaluation.

    Args:
        cfg: config with ``MODEL.WEIGHTS``.

    Attributes:
        cfg: config without pretraining.
        model: model in evaluation mode.
    """

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg.with_values({"MODEL.BACKBONE.PRETRAIN": False})
        self.model = build_model(self.cfg).eval()
        Checkpointer(
            self.model,
            min_match=self.cfg.MODEL.WEIGHTS_MIN_MATCH,
            allow_missing=self.cfg.MODEL.WEIGHTS_ALLOW_MISSING,
        ).load(self.cfg.MODEL.WEIGHTS)

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """Compute the features of images (B, C, H, W) in 0..255, resized to ``INPUT.SIZE_TEST``: (B, D) float32."""
        with torch.no_grad():
            return self.model({"images": image.to(self.model.device)})
