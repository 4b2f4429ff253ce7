"""Minimal model with two training loops: plain PyTorch, as in the PyTorch documentation, and fastamp."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fastamp.amp import LossScaler, PrecisionPolicy
from fastamp.engine import HookBase, SimpleTrainer

LOW = [torch.float16, torch.bfloat16]
ALL = [*LOW, torch.float32]


class Net(nn.Module):
    """Two linear layers, with a batch norm between them if ``normalize``.

    Maps a batch {"images": (B, 8), "targets": (B,) in 0..3} to {"loss_cls": ()} in training, and to (B, 4) logits in
    evaluation.
    """

    def __init__(self, *, normalize: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16) if normalize else nn.Identity(), nn.ReLU())
        self.head = nn.Linear(16, 4)

    def forward(self, batch: dict[str, torch.Tensor]) -> Any:
        logits = self.head(self.body(batch["images"])).float()
        return self.losses(logits, batch) if self.training else logits

    def losses(self, logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"loss_cls": nn.functional.cross_entropy(logits, batch["targets"])}


def make_net(kind: type[Net] = Net, **options: Any) -> Net:
    """Build a model with the same initial weights on each call."""
    torch.manual_seed(0)
    return kind(**options)


def make_batch(seed: int = 0, size: int = 8) -> dict[str, torch.Tensor]:
    """Create a random batch with four classes."""
    generator = torch.Generator().manual_seed(seed)
    return {"images": torch.randn(size, 8, generator=generator), "targets": torch.arange(size) % 4}


def spoil(batch: dict[str, torch.Tensor], value: float = float("inf")) -> dict[str, torch.Tensor]:
    """Fill the images of a batch with ``value``."""
    return batch | {"images": torch.full_like(batch["images"], value)}


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    """Build a plain SGD optimizer for a model."""
    return torch.optim.SGD(model.parameters(), lr=lr)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copy the parameters and buffers of a model."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Return True if two results of ``values`` are bit-identical."""
    return first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return True if all elements are finite."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def grad_norm(model: nn.Module) -> float:
    """Compute the L2 norm of all gradients together."""
    return torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()])).item()


def autocast(dtype: torch.dtype) -> torch.autocast:
    """Create PyTorch's autocast context, disabled for float32."""
    return torch.autocast("cpu", dtype, enabled=dtype != torch.float32)


def plain_scaler(**options: Any) -> torch.amp.GradScaler:
    """Create PyTorch's loss scaler."""
    return torch.amp.GradScaler("cpu", **options)


def plain_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: dict[str, torch.Tensor],
    dtype: torch.dtype,
    scaler: torch.amp.GradScaler | None = None,
) -> float:
    """Run one step of the plain PyTorch loop and return the loss."""
    optimizer.zero_grad()
    with autocast(dtype):
        loss = sum(model(batch).values())
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return loss.item()


def make_trainer(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    batches: Iterable[dict[str, torch.Tensor]],
    dtype: torch.dtype,
    *,
    kind: type[SimpleTrainer] = SimpleTrainer,
    init_scale: float = 65536.0,
    **options: Any,
) -> SimpleTrainer:
    """Build fastamp's trainer for ``dtype``, with loss scaling for float16."""
    policy = PrecisionPolicy("cpu", dtype, "test")
    scaler = LossScaler(init_scale=init_scale) if policy.needs_loss_scaling else None
    return kind(model, batches, optimizers, policy=policy, scaler=scaler, **options)


def train(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    dtype: torch.dtype,
    *,
    steps: int = 5,
    hooks: Iterable[HookBase] = (),
) -> None:
    """Train with fastamp on a single batch."""
    trainer = make_trainer(model, optimizers, [make_batch()] * steps, dtype)
    trainer.register_hooks(hooks)
    trainer.train(0, 1, steps)
