#!/usr/bin/env python
"""Reproduce training that updates no parameter and reports nothing (FastReID on PyTorch >= 2, without AMP)."""

import itertools
import sys

import torch
from torch import nn

from fastamp.amp import OptimizationStep, PrecisionPolicy
from fastamp.engine import SimpleTrainer
from fastamp.utils.errors import TrainingError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, batch):
        return {"loss_cls": nn.functional.cross_entropy(self.layers(batch["images"]), batch["targets"])}


def flat_buffer(model):
    """Flatten the parameters and gradients of a model into one parameter: one kernel per step instead of many."""
    parameters = list(model.parameters())
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in parameters]))
    flat.grad = torch.zeros_like(flat)
    sizes = [p.numel() for p in parameters]
    for p, values, gradients in zip(parameters, flat.data.split(sizes), flat.grad.split(sizes), strict=True):
        p.data, p.grad = values.view_as(p), gradients.view_as(p)
    return flat


def check(shown, what):
    if not shown:
        sys.exit(f"not shown: {what}")


def train(model, optimizer):
    """Train for 300 steps with a standard loop; return the number of distinct loss values."""
    losses, norms = [], []
    for _ in range(300):
        loss = model(batch)["loss_cls"]
        optimizer.zero_grad()  # since PyTorch 2, sets gradients to None, which detaches the flat buffer
        loss.backward()
        norms.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item())
        optimizer.step()
        losses.append(loss.item())
    print(f"  loss {losses[0]:.6f} -> {losses[-1]:.6f}, {len(set(losses))} value(s) in 300 steps")
    print(f"  gradient norm {norms[0]:.3f} -> {norms[-1]:.3f}; no message")
    return len(set(losses))


torch.manual_seed(0)
batch = {"images": torch.randn(64, 16), "targets": torch.arange(64) % 4}

cases = {
    "an optimizer over a flat buffer": lambda model: torch.optim.SGD([flat_buffer(model)], lr=0.1),
    "a learning rate too small for float32": lambda model: torch.optim.SGD(model.parameters(), lr=1e-12),
}

print("== plain PyTorch ==")
for name, build_optimizer in cases.items():
    model = Net()
    print(f"{name}:")
    check(train(model, build_optimizer(model)) == 1, "a constant loss")

print("\n== fastamp ==")
policy = PrecisionPolicy("cpu", torch.float32, "AMP is disabled")
for name, build_optimizer in cases.items():
    model, message = Net(), ""
    trainer = SimpleTrainer(model, itertools.repeat(batch), [build_optimizer(model)], policy=policy)
    try:
        trainer.train(0, max_epoch=1, iters_per_epoch=300)
    except TrainingError as error:
        message = str(error)
    print(f"{name}, at iteration {trainer.iter}:\n{message}\n")
    check("fix:" in message and trainer.iter <= 3, "an error within the first iterations")
    check("(676,)" in message or "no parameter changed" in message, "the cause")

model = Net()
step = OptimizationStep(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
losses = []
for _ in range(300):  # OptimizationStep runs the same checks in a custom loop
    step.zero_grad()
    loss = step.scale(model(batch))
    loss.backward()
    losses.append(loss.item())
    step.finish()
print(f"after the fix: loss {losses[0]:.4f} -> {losses[-1]:.4f} in 300 steps")
check(losses[-1] < 0.5 * losses[0], "a falling loss after the fix")
