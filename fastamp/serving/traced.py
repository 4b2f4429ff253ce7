"""Traced network of a checkpoint, which computes features without holding the global interpreter lock (GIL)."""

import logging
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fastamp.feature_pass import extract_features
from fastamp.inference.predictor import Predictor
from fastamp.utils.errors import summarize_error

logger = logging.getLogger(__name__)

Compute = Callable[[Sequence[Tensor]], Tensor]
_TOLERANCE = 1e-4  # of the largest value


def traced_features(model: Predictor, example: Tensor) -> Compute:
    """Trace the network of a Predictor on the CPU, so that computing features does not hold the GIL.

    In eager mode, Python code runs between the operators, so the network and the threads that handle requests wait for
    each other.

    Args:
        model: Predictor on the CPU.
        example: preprocessed image (C, H, W) uint8.

    Returns:
        Function from preprocessed images to features, as ``model.features_of_preprocessed``. It is this method if the
        trace fails or has other features; it is also called for images of other sizes than the example.
    """
    generator = torch.Generator().manual_seed(0)
    images = list(torch.randint(256, (3, *example.shape), generator=generator, dtype=torch.uint8))
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constants in the trace, which is checked below; deprecation
        try:
            # Two images: a size of 1 could be taken for a constant.
            traced = torch.jit.trace(_Network(model).eval(), torch.stack(images[:2]), check_trace=False)
            if model.policy.dtype == torch.float32:  # folds batch norm; in bfloat16, this changes the rounding
                traced = torch.jit.freeze(traced)
            for batch in (images, images[:1]):
                expected = model.features_of_preprocessed(batch)
                limit = _TOLERANCE * expected.abs().max().item()
                torch.testing.assert_close(_compute(traced, batch), expected, rtol=0, atol=limit)
        except Exception as error:  # PyTorch raises many exception types
            logger.info("computing without a trace: %s", summarize_error(error))
            return model.features_of_preprocessed

    def compute(images: Sequence[Tensor]) -> Tensor:
        if all(image.shape == example.shape for image in images):
            features = _compute(traced, images)
            if torch.isfinite(features).all():
                return features
        return model.features_of_preprocessed(images)

    return compute


class _Network(nn.Module):
    """Network of a Predictor, as a function of (B, C, H, W) images."""

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        self.model, self.policy, self.flip = predictor.model, predictor.policy, predictor.cfg.TEST.FLIP.ENABLED

    def forward(self, images: Tensor) -> Tensor:
        return extract_features(self.model, {"images": images}, self.policy, self.flip)


def _compute(traced: torch.jit.ScriptModule, images: Sequence[Tensor]) -> Tensor:
    # Without optimization, which would compile the network again for each number of images.
    with torch.inference_mode(), torch.jit.optimized_execution(False):
        features: Tensor = traced(torch.stack(list(images)))
    return features
