#!/usr/bin/env python
"""Reproduce autocast with a missing or wrong device type, and evaluation in another precision (RF-DETR)."""

import io
import logging
import os
import sys
import warnings

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # same result on machines with CUDA

import torch
from torch import nn

from fastamp.amp import LossScaler, PrecisionPolicy, resolve_device
from fastamp.config import get_cfg
from fastamp.utils.errors import TrainingError


def check(shown, what):
    if not shown:
        sys.exit(f"not shown: {what}")


@torch.no_grad()
def features_under(context):
    with context:
        return nn.functional.normalize(model(images).float())


def compare(name, features, reference):
    """Count and print for how many of 500 queries the first-ranked gallery image changes."""
    first, expected = ((f[:500] @ f[500:].T).argmax(dim=1) for f in (features, reference))
    changed = int((first != expected).sum())
    largest = (features - reference).abs().max()
    print(f"{name}: features differ by up to {largest:.1e}, the first-ranked image for {changed} of 500 queries")
    return changed


torch.manual_seed(0)
warnings.simplefilter("ignore")  # PyTorch warns if CUDA is missing, but not about CPU tensors
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128))
images, targets = 1 + 0.05 * torch.randn(2000, 64), torch.arange(2000) % 128  # similar features, as in ReID
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(images)
    optimizer.zero_grad()
    nn.functional.cross_entropy(logits.float(), targets).backward()
    optimizer.step()

print("== plain PyTorch ==")
try:
    torch.amp.autocast(enabled=True, dtype=torch.bfloat16)
    check(False, "a TypeError")
except TypeError as error:
    print(f"autocast(enabled=True): TypeError: {error}")
    check("device_type" in str(error), "the TypeError of a missing device type")
with torch.autocast("cuda", dtype=torch.bfloat16):
    output = model(images)
scaled = torch.amp.GradScaler("cuda").scale(torch.ones(()))
print(f'autocast("cuda", dtype=bfloat16), model on the CPU: no error, output {output.dtype}')
print(f'GradScaler("cuda"): no error, a loss of 1 is scaled to {scaled}')
check(output.dtype == torch.float32 and scaled == 1, "AMP that is disabled without an error")
trained = features_under(torch.autocast("cpu", dtype=torch.bfloat16))
for dtype in (torch.float32, torch.float16):
    features = features_under(torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32))
    check(compare(f"trained in bfloat16, evaluated in {str(dtype)[6:]}", features, trained) > 0, "a different ranking")

print("\n== fastamp ==")
cfg = get_cfg()
cfg.SOLVER.AMP = "bf16"
policy = PrecisionPolicy.from_config(cfg, resolve_device("cpu"))
print(policy.describe())
policy.check_model(model)
evaluation = policy.for_evaluation(cfg.SOLVER.AMP.EVAL_DTYPE)
changed = compare("trained and evaluated with this policy", features_under(evaluation.checked_autocast()), trained)
check(changed == 0, "an evaluation in the precision of training")
wrong = PrecisionPolicy("cuda", torch.bfloat16, "example")
for use in (lambda: wrong.check_model(model), lambda: features_under(wrong.checked_autocast())):
    try:
        use()
        check(False, "an error for the wrong device type")
    except TrainingError as error:
        print(f"\na policy with another device type: {error}")
log = io.StringIO()
logging.getLogger("fastamp").addHandler(logging.StreamHandler(log))
cfg.SOLVER.AMP = "fp16"
other = PrecisionPolicy.from_config(cfg, resolve_device("cpu"))
other.compare(policy.state_dict(), "these weights were trained")
print(f"\nthe checkpoint under another policy: {log.getvalue().strip()}")
print(f"{other.describe()}; loss scale {LossScaler.from_config(cfg, other).scale:g}, independent of the device")
check("trained in bfloat16, but this process computes in float16" in log.getvalue(), "the logged difference")
