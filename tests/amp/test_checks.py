"""Correct models, losses and optimizers pass the checks; test_failures_*.py covers incorrect ones."""

import itertools

import pytest
import torch
from loops import ALL, Net, make_batch, make_net, make_trainer, sgd
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastamp.amp import OptimizationStep
from fastamp.amp.checks import check_finite, check_losses, check_optimizers, zero_fraction
from fastamp.utils.errors import TrainingError


class Double(torch.autograd.Function):
    """Custom autograd function that saves no tensors for the backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Checkpointed(Net):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, batch):
        features = checkpoint(self.body, batch["images"].requires_grad_(), use_reentrant=self.reentrant)
        return self.losses(self.head(features).float(), batch)


class OnlyInsideACheckpoint(Net):
    """Net whose parameters are hidden from the autograd graph by reentrant checkpointing."""

    def forward(self, batch):
        run = nn.Sequential(self.body, self.head)
        return self.losses(checkpoint(run, batch["images"].requires_grad_(), use_reentrant=True).float(), batch)


class OwnFunction(Net):
    def losses(self, logits, batch):
        return super().losses(Double.apply(logits), batch)


class OfAParameterItself(Net):
    """Net with a second loss that is itself a parameter."""

    def __init__(self):
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(()))

    def losses(self, logits, batch):
        return super().losses(logits, batch) | {"loss_offset": self.offset}


CONNECTED = {
    "plain": Net,
    "checkpoint": lambda: Checkpointed(reentrant=False),
    "reentrant checkpoint": lambda: Checkpointed(reentrant=True),
    "only inside a checkpoint": OnlyInsideACheckpoint,
    "custom function": OwnFunction,
    "a parameter itself": OfAParameterItself,
}


def test_losses_that_depend_on_parameters_pass_the_check(subtests):
    for dtype, name in itertools.product(ALL, CONNECTED):
        with subtests.test(dtype=dtype, name=name):
            model = make_net(CONNECTED[name])
            trainer = make_trainer(model, [sgd(model)], [make_batch()] * 3, dtype)
            trainer.train(0, 1, 3)
            assert trainer.steps_taken == 3


def test_check_losses_accepts_detached_loss_if_modules_are_frozen():
    model = make_net()
    losses = {"loss_frozen": torch.ones(()), **model(make_batch())}
    check_losses(losses, frozen=["body"], model=model)
    with pytest.raises(TrainingError, match="'loss_frozen'"):
        check_losses(losses, model=model)


def test_check_optimizers_accepts_frozen_parameters_in_the_optimizer():
    model = make_net()
    model.body.requires_grad_(False)
    check_optimizers(model, [sgd(model)])
    check_optimizers(model, [sgd(model.body), sgd(model.head)])


def test_check_finite_accepts_all_dtypes_and_reports_float16_overflow():
    model = nn.Module()
    model.register_buffer("largest", torch.tensor(torch.finfo(torch.float32).max))
    model.register_buffer("short", torch.tensor(65504.0, dtype=torch.float16))
    model.register_buffer("count", torch.tensor(2**40))
    model.register_buffer("empty", torch.empty(0, 4))
    check_finite(model)
    model.short.mul_(2)
    with pytest.raises(TrainingError, match="1 .*short"):
        check_finite(model)
    check_finite(nn.Module())


def test_zero_fraction_counts_only_exact_zeros():
    gradients = [torch.tensor([0.0, 1.0, -0.0, 1e-45]), torch.zeros(2, 2)]
    assert zero_fraction(gradients).item() == pytest.approx(6 / 8)


def test_step_accepts_parameter_without_elements():
    model = nn.Linear(2, 1)
    model.empty = nn.Parameter(torch.zeros(0))
    step = OptimizationStep(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    for _ in range(4):
        step.zero_grad()
        step.scale({"loss": model(torch.ones(1, 2)).sum() + model.empty.sum()}).backward()
        assert step.finish().ok
