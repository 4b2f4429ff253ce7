#!/usr/bin/env python
"""Reproduce "No inf checks were recorded for this optimizer" (AssertionError in reid_baseline and FastReID)."""

import copy
import itertools
import sys

import torch
from torch import nn

from fastamp.amp import LossScaler, OptimizationStep, PrecisionPolicy
from fastamp.engine import HookBase, SimpleTrainer
from fastamp.utils.errors import TrainingError


class Net(nn.Module):
    """Model that maps a batch to a dict of losses."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, batch):
        return {"loss_cls": nn.functional.cross_entropy(self.layers(batch["images"]).float(), batch["targets"])}


class Losses(HookBase):
    def before_train(self):
        self.values = []

    def after_step(self):
        self.values.append(self.trainer.metrics.flush()["total_loss"])


def check(shown, what):
    if not shown:
        sys.exit(f"not shown: {what}")


torch.manual_seed(0)
batch = {"images": torch.randn(64, 16), "targets": torch.arange(64) % 8}
model = Net()
# Flat buffers, a rebuilt model and load_state_dict(assign=True) also leave other tensors in the optimizer.
stale = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.5)

print("== plain PyTorch ==")
scaler = torch.amp.GradScaler("cpu")
with torch.autocast("cpu", dtype=torch.float16):
    loss = model(batch)["loss_cls"]
scaler.scale(loss).backward()
try:
    scaler.step(stale)
    check(False, "an AssertionError")
except AssertionError as error:
    print(f"loss {loss.item():.4f}, backward done, then AssertionError: {error}")
    check("No inf checks were recorded" in str(error), "PyTorch's assertion")

print("\n== fastamp ==")
policy = PrecisionPolicy("cpu", torch.float16, "asked for")
model.zero_grad()
trainer = SimpleTrainer(model, itertools.repeat(batch), [stale], policy=policy, scaler=LossScaler())
message = ""
try:
    trainer.train(0, max_epoch=1, iters_per_epoch=30)
except TrainingError as error:
    message = str(error)
print(f"SimpleTrainer.train, after {trainer.steps_taken} steps:\n{message}")
check("0 in both" in message and "fix:" in message and trainer.steps_taken == 0, "an error before the first step")

# In a custom loop, OptimizationStep also quotes the assertion, so that the message can be searched.
step = OptimizationStep(model, [stale], scaler=LossScaler())
message = ""
try:
    step.zero_grad()
    with policy.autocast():
        losses = model(batch)
    step.scale(losses).backward()
    step.finish()
except TrainingError as error:
    message = str(error)
print(f"\nOptimizationStep.finish:\n{message}")
check("No inf checks" in message and "0 of them in the optimizer" in message, "the error of OptimizationStep")

optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model.zero_grad()
trainer = SimpleTrainer(model, itertools.repeat(batch), [optimizer], policy=policy, scaler=LossScaler())
losses = Losses()
trainer.register_hooks([losses])
trainer.train(0, max_epoch=1, iters_per_epoch=30)
print(f"\nafter the fix: loss {losses.values[0]:.4f} -> {losses.values[-1]:.4f} in {trainer.steps_taken} steps")
check(losses.values[-1] < 0.9 * losses.values[0], "a falling loss after the fix")
