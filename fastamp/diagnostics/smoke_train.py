"""Ten training steps of a tiny model: whether a device trains in a precision at all."""

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
from fastamp.utils.moved import moved_names

__getattr__ = moved_names(
    __name__,
    {
        "first_line": "fastamp.utils.errors.summarize_error",
        "ten_steps": "fastamp.diagnostics.smoke_train.smoke_train",
        "LoopResult": "fastamp.diagnostics.smoke_train.SmokeTrainResult",
    },
)

STEPS = 10


@dataclass(frozen=True)
class SmokeTrainResult:
    """What ``smoke_train`` has shown.

    Attributes:
        taken, skipped: optimizer steps.
        first_loss, last_loss: before the first step and after the last; None when it did not come to that.
        error: why training does not work in this precision; empty when it does.
    """

    taken: int = 0
    skipped: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    error: str = ""

    def describe(self) -> str:
        """Return it in half a line, e.g. ``"loss 1.5550 -> 0.1374, 10 steps taken, 0 skipped"``, or the error."""
        if self.error:
            return self.error
        return f"loss {self.first_loss:.4f} -> {self.last_loss:.4f}, {self.taken} steps taken, {self.skipped} skipped"


class _TinyModel(nn.Module):
    """A convolution and a linear layer, so that cuDNN or oneDNN and the matrix products all have their turn.

    Its weights come from a generator of its own, where a layer's constructor would draw from the global one.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.filters = nn.Parameter(_normal(generator, 8, 3, 3, 3) / 27**0.5)
        self.weight = nn.Parameter(_normal(generator, 4, 8 * 4 * 4) / 128**0.5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits (B, 4) of images (B, 3, 8, 8)."""
        return F.linear(F.conv2d(images, self.filters, stride=2, padding=1).relu().flatten(1), self.weight)


def smoke_train(policy: PrecisionPolicy, device: torch.device) -> SmokeTrainResult:
    """Train a tiny model on one batch under ``policy``, with the step of every training, in this process alone.

    Random states, TF32 flags and the log stay as they are, and an error is a part of the result.

    Args:
        policy: the precision to try.
        device: of model and batch.
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
    skipped, error = STEPS - taken, ""
    # A step that overflows is skipped by right where there is a loss scale to lower.
    if not taken or (skipped and not scaler):
        error = f"{skipped} of {STEPS} steps were skipped: losses or gradients are not finite"
    elif not losses[-1] < losses[0]:
        error = f"the loss did not fall in {taken} steps ({losses[0]:.4f} -> {losses[-1]:.4f})"
    return SmokeTrainResult(taken, skipped, losses[0], losses[-1], error)


def _loss(model: nn.Module, images: torch.Tensor, targets: torch.Tensor, policy: PrecisionPolicy) -> torch.Tensor:
    try:
        with policy.checked_autocast():
            logits = model(images)
    except TrainingError as error:
        raise TrainingError(
            f"low precision did not run: no operation computed in {dtype_name(policy.dtype)} under autocast for "
            f"{policy.device_type}, the model being on {images.device}"
        ) from error
    return F.cross_entropy(logits.float(), targets)


def _normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    # dtype and device are given, whatever the defaults are that a program has set.
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


@contextmanager
def _quiet() -> Iterator[None]:
    """Drop the warnings and the log lines of a step; that it was skipped is in the result."""

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
