#!/usr/bin/env python
"""AMP checks failed: a pre-flight that fed RGB images to a model that takes one channel (YOLOv5)."""

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
    """A batch -> losses in training, (B, 16) features in evaluation."""

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


class Root(nn.Module):  # NaN where its input is negative, in any precision
    def forward(self, x):
        return x.sqrt()


def check(shown, what):
    if not shown:
        sys.exit(f"not shown: {what}")


def check_amp(model):
    """A check as many training scripts have it: a picture of its own, and any exception is AMP's fault."""
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
healthy = Net(channels=1)
fine = check_amp(healthy)
print(f"a healthy one-channel model: AMP checks {'passed' if fine else 'failed: training without AMP'}")
with torch.autocast("cpu", dtype=torch.bfloat16):
    loss = healthy(batch)["loss_cls"].item()
print(f"(on its own images its loss in bfloat16 is {loss:.4f})")
check(not fine and math.isfinite(loss), "a healthy model that is blamed")
fine = check_amp(Net(channels=3, squash=Root()))
print(f"a model that makes NaN in float32 too: AMP checks {'passed' if fine else 'failed: training without AMP'}")
check(not fine, "a broken model of which nothing else is said")

print("\n== fastamp ==")
report = preflight(healthy, batch, policy=policy)
print(f"a healthy one-channel model: {report.describe()}")
check(not report.problem, "a healthy model that passes")

report = preflight(Net(channels=1, squash=Root()), batch, policy=policy)
print(f"\na model that makes NaN in float32 too: {report.describe()}")
check(report.in_float32 and report.location.module == "squash", "the module that makes NaN in float32")

# In a run the pre-flight is the trainer's: SOLVER.AMP.PREFLIGHT, which is on unless it is turned off.
model = Net(channels=3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checks = PrecisionDiagnostics(preflight="error")
trainer = SimpleTrainer(model, itertools.repeat(batch), [optimizer], policy=policy, precision_diagnostics=checks)
said = ""
try:
    trainer.train(0, max_epoch=1, iters_per_epoch=10)
except TrainingError as error:
    said = str(error)
print(f"\na three-channel model on one-channel images, after {trainer.steps_taken} steps: {said}")
check("not of mixed precision" in said and "expected 3 channels, got 1" in said, "the number of channels")
