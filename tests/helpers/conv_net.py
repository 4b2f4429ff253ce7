"""Small model with two convolutions, and a matching batch, for precision checks."""

import torch
from torch import nn

from fastamp.amp import PrecisionPolicy


def policy(dtype):
    return PrecisionPolicy("cpu", dtype, "test")


class Net(nn.Module):
    """Model with two convolutions and a linear head, for any image size."""

    def __init__(self, channels, gain=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(channels, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()
        )
        self.head, self.unused = nn.Linear(8, 4), nn.Linear(8, 4)
        self.gain = gain
        self.unused.requires_grad_(False)

    def forward(self, batch):
        features = self.body(batch["images"].float()).mean((2, 3))
        if not self.training:
            return features
        logits = self.head(features).float()
        return {"loss_cls": nn.functional.cross_entropy(logits, batch["targets"]) * self.gain}


def make_batch(channels=3, size=(12, 10)):
    return {"images": torch.rand(8, channels, *size), "targets": torch.arange(8) % 4, "img_paths": ["x"] * 8}


class Hungry(Net):
    """Model that runs out of memory for batches of more than ``most`` images, in float32 or in every precision."""

    def __init__(self, most, in_low_too):
        super().__init__(3)
        self.most, self.in_low_too = most, in_low_too

    def forward(self, batch):
        low = torch.is_autocast_enabled("cpu")
        if len(batch["images"]) > self.most and (self.in_low_too or not low):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return super().forward(batch)
