"""Smoke test of training: ten steps of a tiny model on one device and in one precision."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from fastamp.amp import checks, step
from fastamp.amp.policy import PrecisionPolicy, dtype_name
from fastamp.amp.step import LossScaler, OptimizationStep
from fastamp.utils import comm
from fastamp.utils.errors import TrainingError, summarize_error

STEPS = 10


@dataclass(frozen=True)
class SmokeTrainResult:
    """Result of ``smoke_train``.

    Attributes:
        taken, skipped: number of applied and skipped optimizer steps.
        first_loss, last_loss: loss before the first and after the last step; None after an exception.
        error: error message; empty if training works.
    """

    taken: int = 0
    skipped: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    error: str = ""

    def describe(self) -> str:
        """Format the result, e.g. ``"loss 1.5550 -> 0.1374, 10 steps applied, 0 skipped"``, or return the error."""
        if self.error:
            return self.error
        return f"loss {self.first_loss:.4f} -> {self.last_loss:.4f}, {self.taken} steps applied, {self.skipped} skipped"


class _TinyModel(nn.Module):
    """A convolution and a linear layer, to cover cuDNN or oneDNN and matrix products.

    Weights are drawn from ``generator``; layer constructors would draw from the global generator.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.filters = nn.Parameter(_normal(generator, 8, 3, 3, 3) / 27**0.5)
        self.weight = nn.Parameter(_normal(generator, 4, 8 * 4 * 4) / 128**0.5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (B, 3, 8, 8) to logits (B, 4)."""
        return F.linear(F.conv2d(images, self.filters, stride=2, padding=1).relu().flatten(1), self.weight)


def smoke_train(policy: PrecisionPolicy, device: torch.device) -> SmokeTrainResult:
    """Train a tiny model for ten steps on one batch with ``OptimizationStep``, in this process only.

    Random states, TF32 flags and the log are not changed. An exception becomes the error of the result.

    Args:
        policy: precision to test.
        device: device of model and batch.
    """
    taken, losses = 0, []
    scaler = LossScaler() if policy.needs_loss_scaling else None
    try:
        with comm.as_single_process(), _quiet(), torch.enable_grad():
            generator = torch.Generator("cpu").manual_seed(0)
            model = _TinyModel(generator).to(device)
            images = _normal(generator, 8, 3, 8, 8).to(device)
            targets = torch.arange(8, device=device) % 4
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimization = OptimizationStep(model, [optimizer], scaler=scaler)
            for _ in range(STEPS):
                optimization.zero_grad()
                loss = _loss(model, images, targets, policy)
                losses.append(float(loss.detach()))
                optimization.scale({"loss_cls": loss}).backward()
                taken += optimization.finish().ok
            losses.append(float(_loss(model, images, targets, policy).detach()))
    except Exception as error:
        return SmokeTrainResult(taken, first_loss=losses[0] if losses else None, error=summarize_error(error))
    skipped, fault = STEPS - taken, ""
    # With loss scaling, skipped steps after an overflow are normal.
    if not taken or (skipped and not scaler):
        fault = f"{skipped} of {STEPS} steps were skipped: losses or gradients are not finite"
    elif not losses[-1] < losses[0]:
        fault = f"the loss did not decrease in {taken} steps ({losses[0]:.4f} -> {losses[-1]:.4f})"
    return SmokeTrainResult(taken, skipped, losses[0], losses[-1], fault)


def _loss(model: nn.Module, images: torch.Tensor, targets: torch.Tensor, policy: PrecisionPolicy) -> torch.Tensor:
    try:
        with policy.checked_autocast():
            logits = model(images)
    except TrainingError as error:
        raise TrainingError(
            f"autocast has no effect: no operation computed in {dtype_name(policy.dtype)} under autocast for "
            f"{policy.device_type}, with the model on {images.device}"
        ) from error
    return F.cross_entropy(logits.float(), targets)


def _normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    # Explicit dtype and device: a program may have changed the defaults.
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the warnings and log lines of steps; the result contains the number of skipped steps."""

    def drop(record: logging.LogRecord) -> bool:
        return False

    loggers = (step.logger, checks.logger)
    for logger in loggers:
        logger.addFilter(drop)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(drop)
