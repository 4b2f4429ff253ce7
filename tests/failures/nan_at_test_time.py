#!/usr/bin/env python
"""Reproduce NaN features in evaluation after successful training, and infinite gradient norms (VMamba)."""

import math
import sys

import torch
from torch import nn

from fastamp.amp import LossScaler, OptimizationStep, PrecisionPolicy, apply_force_fp32
from fastamp.diagnostics.preflight import preflight


class Scan(nn.Module):
    """Scan of x and delta (B, T, D): y_t is the sum over s <= t of exp(-(delta_(s+1) + ... + delta_t)) x_s."""

    def forward(self, x, delta):
        if torch.is_grad_enabled():  # the bug: float32 only in training
            x, delta = x.float(), delta.float()
        decay = delta.cumsum(dim=1)
        return torch.exp(-decay) * (torch.exp(decay) * x).cumsum(dim=1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.delta, self.head = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 8)
        self.scan = Scan()

    def forward(self, batch):
        tokens = batch["images"]
        features = self.scan(self.embed(tokens), nn.functional.softplus(self.delta(tokens) - 1)).mean(dim=1)
        if not self.training:
            return features.float()
        return {"loss_cls": nn.functional.cross_entropy(self.head(features).float(), batch["targets"])}


def check(shown, what):
    if not shown:
        sys.exit(f"not shown: {what}")


def new_model():
    torch.manual_seed(1)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def report(model, losses, norms, context):
    """Print the results of training and evaluation; return the number of NaN features."""
    model.eval()
    with torch.no_grad(), context:
        features = model(batch)
    bad, mean = int(features.isnan().sum()), sum(norms) / len(norms)
    print(f"training: loss {losses[0]:.4f} -> {losses[-1]:.4f}, {sum(map(math.isnan, losses))} of 30 are NaN")
    print(f"gradient norm: {', '.join(f'{norm:.3f}' for norm in norms[:3])}, ...; mean of the run {mean:.3f}")
    print(f"test: {bad} of {features.numel()} features are NaN")
    check(losses[-1] < 0.5, "a successful training")
    return bad


torch.manual_seed(0)
targets = torch.arange(64) % 8
batch = {"images": torch.randn(8, 1, 16)[targets] + torch.randn(64, 40, 16), "targets": targets}

print("== plain PyTorch ==")
(model, optimizer), losses, norms = new_model(), [], []
scaler = torch.amp.GradScaler("cpu")
for _ in range(30):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(batch)["loss_cls"]
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norms.append(nn.utils.clip_grad_norm_(model.parameters(), 5.0).item())
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
bad = report(model, losses, norms, torch.autocast("cpu", dtype=torch.float16))
check(bad > 0 and math.inf in norms, "infinite gradient norms and NaN features in evaluation, without a message")

print("\n== fastamp ==")
policy = PrecisionPolicy("cpu", torch.float16, "asked for")
(model, optimizer), losses, norms = new_model(), [], []
found = preflight(model, batch, policy=policy, scaler=LossScaler())  # SOLVER.AMP.PREFLIGHT, enabled by default
print(f"before the first step: {found.problem}")
check(
    "in evaluation" in found.problem and found.location.module == "scan",
    "the module that overflows, before the first step",
)

apply_force_fp32(model, ["scan"])  # same as SOLVER.AMP.FORCE_FP32; in code, decorate forward with @force_fp32
found = preflight(model, batch, policy=policy, scaler=LossScaler())
print(f"\nwith that fix: {found.describe()}")
step = OptimizationStep(model, [optimizer], scaler=LossScaler(init_scale=found.loss_scale))
for _ in range(30):
    step.zero_grad()
    with policy.autocast():
        loss_terms = model(batch)
    step.scale(loss_terms).backward()
    losses.append(sum(loss_terms.values()).item())
    norms.append(step.finish().grad_norm)
bad = report(model, losses, norms, policy.autocast())
check(bad == 0 and all(map(math.isfinite, norms)), "finite values with the fix")
