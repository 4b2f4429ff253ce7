#!/usr/bin/env python
"""Reproduce "AMP checks failed": a check with an RGB image fails for a model with one input channel (YOLOv5)."""

import itertools
import math
import sys

import torch
from torch import nn

from fastamp.amp import PrecisionPolicy
from fastamp.diagnostics.precision_diagnostics import PrecisionDiagnostics
from fastamp.diagnostics.preflight import preflight
from fastamp.engine import SimpleTrainer
from fastamp.utils.errors import TrainingError


class Net(nn.Module):
    """Model that returns losses in training and (B, 16) features in evaluation."""

    def __init__(self, channels, squash=None):
        super().__init__()
        self.stem = nn.Conv2d(channels, 16, 3, stride=2)
        self.squash = squash or nn.ReLU()
        self.head = nn.Linear(16, 4)

    def forward(self, batch):
        features = self.squash(self.stem(batch["images"])).mean((2, 3))
        if not self.training:
            return features.float()
        return {"loss_cls": nn.functional.cross_entropy(self.head(features).float(), batch["targets"])}


class Root(nn.Module):  # NaN for negative inputs in any precision
    def forward(self, x):
        return x.sqrt()


def check(shown, what):
    if not shown:
        sys.exit(f"not shown: {what}")


def check_amp(model):
    """AMP check of many training scripts: a fixed image, and any exception counts as an AMP failure."""
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model({"images": torch.rand(1, 3, 32, 32), "targets": torch.zeros(1, dtype=torch.long)})["loss_cls"]
        return math.isfinite(loss.item())
    except Exception:
        return False


torch.manual_seed(0)
batch = {"images": torch.randn(16, 1, 32, 32), "targets": torch.arange(16) % 4}
policy = PrecisionPolicy("cpu", torch.bfloat16, "asked for")

print("== plain PyTorch ==")
valid = Net(channels=1)
passes = check_amp(valid)
print(f"a valid one-channel model: AMP checks {'passed' if passes else 'failed: training without AMP'}")
with torch.autocast("cpu", dtype=torch.bfloat16):
    loss = valid(batch)["loss_cls"].item()
print(f"(on one-channel images the loss in bfloat16 is {loss:.4f})")
check(not passes and math.isfinite(loss), "a valid model that fails the check")
passes = check_amp(Net(channels=3, squash=Root()))
print(f"a model that produces NaN in float32: AMP checks {'passed' if passes else 'failed: training without AMP'}")
check(not passes, "a broken model without a diagnosis")

print("\n== fastamp ==")
report = preflight(valid, batch, policy=policy)
print(f"a valid one-channel model: {report.describe()}")
check(not report.problem, "a valid model that passes")

report = preflight(Net(channels=1, squash=Root()), batch, policy=policy)
print(f"\na model that produces NaN in float32: {report.describe()}")
check(report.in_float32 and report.location.module == "squash", "the module that produces NaN in float32")

# In a run, the trainer runs the pre-flight: SOLVER.AMP.PREFLIGHT, enabled by default.
model = Net(channels=3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checks = PrecisionDiagnostics(preflight="error")
trainer = SimpleTrainer(model, itertools.repeat(batch), [optimizer], policy=policy, precision_diagnostics=checks)
message = ""
try:
    trainer.train(0, max_epoch=1, iters_per_epoch=10)
except TrainingError as error:
    message = str(error)
print(f"\na three-channel model on one-channel images, after {trainer.steps_taken} steps: {message}")
check("in float32" in message and "expected 3 channels, got 1" in message, "the number of channels")
