#!/usr/bin/env python
"""Reproduce NaN features in evaluation after successful training, and infinite gradient norms, with a small VMamba."""

import contextlib
import math
import sys
from unittest import mock

import torch
from torch import nn

from fastamp.amp import LossScaler, OptimizationStep, PrecisionPolicy
from fastamp.diagnostics.preflight import preflight
from fastamp.modeling.backbones import vmamba


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = vmamba.VMamba(vmamba.Depth(8, (1, 1, 1, 1), 1), last_stride=2, drop_path=0)
        self.head = nn.Linear(64, 8)
        nn.init.normal_(self.head.weight, std=0.2)
        # As after a long training: weights for which the outputs of the first scan exceed 65504, the largest float16.
        with torch.no_grad():
            first = self.backbone.layers[0].blocks[0].op
            first.in_proj.weight.mul_(60)
            first.Ds.mul_(1e6)

    def forward(self, batch):
        features = self.backbone(batch["images"]).mean((2, 3))
        if not self.training:
            return features.float()
        return {"loss_cls": nn.functional.cross_entropy(self.head(features).float(), batch["targets"])}


@contextlib.contextmanager
def float32_only_in_training():
    """Remove the float32 regions of the backbone if gradients are disabled: the bug."""

    def only_in_training(guarded):
        def forward(self, *inputs, **options):
            return (guarded if torch.is_grad_enabled() else guarded.__wrapped__)(self, *inputs, **options)

        return forward

    def scan(u, *inputs, **options):  # returns the dtype of its input, as mamba_ssm's kernel
        return exact_scan(u, *inputs, **options).to(u.dtype)

    exact_scan = vmamba.selective_scan
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(vmamba, "selective_scan", scan))
        for module in (vmamba.CrossScan, vmamba.ScanNorm):
            stack.enter_context(mock.patch.object(module, "forward", only_in_training(module.forward)))
        yield


def check(shown, what):
    if not shown:
        sys.exit(f"not shown: {what}")


def new_model():
    torch.manual_seed(1)
    model = Net()
    return model, torch.optim.Adam(model.parameters(), lr=5e-3)


def report(model, losses, norms, context):
    """Print the results of training and evaluation; return the number of NaN features."""
    model.eval()
    with torch.no_grad(), context:
        features = model(batch)
    bad, mean = int(features.isnan().sum()), sum(norms) / len(norms)
    print(f"training: loss {losses[0]:.4f} -> {losses[-1]:.4f}, {sum(map(math.isnan, losses))} of {STEPS} are NaN")
    print(f"gradient norm: {', '.join(f'{norm:.3f}' for norm in norms[:3])}, ...; mean of the run {mean:.3f}")
    print(f"test: {bad} of {features.numel()} features are NaN")
    check(losses[-1] < 0.5, "a successful training")
    return bad


torch.manual_seed(0)
targets = torch.arange(16) % 8
batch = {"images": torch.randn(8, 3, 32, 16)[targets] + 0.3 * torch.randn(16, 3, 32, 16), "targets": targets}
STEPS = 10

print("== plain PyTorch ==")
(model, optimizer), losses, norms = new_model(), [], []
scaler = torch.amp.GradScaler("cpu")
with float32_only_in_training():
    for _ in range(STEPS):
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
model, _ = new_model()
with float32_only_in_training():
    found = preflight(model, batch, policy=policy, scaler=LossScaler())  # SOLVER.AMP.PREFLIGHT, enabled by default
print(f"before the first step: {found.problem}")
check(
    "in evaluation" in found.problem and found.location.module == "backbone.layers.0.blocks.0.op.scan",
    "the module that overflows, before the first step",
)

(model, optimizer), losses, norms = new_model(), [], []
found = preflight(model, batch, policy=policy, scaler=LossScaler())  # with the float32 regions of the backbone
print(f"\nwith the float32 regions of VMamba: {found.describe()}")
step = OptimizationStep(model, [optimizer], scaler=LossScaler(init_scale=found.loss_scale or 1.0))
for _ in range(STEPS):
    step.zero_grad()
    with policy.autocast():
        loss_terms = model(batch)
    step.scale(loss_terms).backward()
    losses.append(sum(loss_terms.values()).item())
    norms.append(step.finish().grad_norm)
bad = report(model, losses, norms, policy.autocast())
check(bad == 0 and all(map(math.isfinite, norms)), "finite values with the float32 regions")
