"""Failures that plain PyTorch does not report, because training continues without an error; fastamp reports them."""

import logging
import math
import warnings

import pytest
import torch
from loops import make_batch, make_net, make_trainer
from torch import nn

from fastamp.amp import LossScaler, OptimizationStep, PrecisionFailure, PrecisionPolicy, apply_force_fp32
from fastamp.amp.checks import NonFiniteParameters
from fastamp.amp.module_monitor import FIRST_CHECK
from fastamp.amp.step import SKIP_WINDOW
from fastamp.config import read_config
from fastamp.engine import HookBase
from fastamp.utils.errors import TrainingError


class ScaleGradient(torch.autograd.Function):
    """Identity in the forward pass; multiply the gradient by ``factor`` in the backward pass."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


class Net(nn.Module):
    """Backbone whose gradient is multiplied by ``factor``, followed by a head that computes in float32."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.backbone = nn.Linear(8, 8)
        self.heads = nn.Linear(8, 4)
        self.factor = factor

    def forward(self, x, targets):
        features = ScaleGradient.apply(self.backbone(x), self.factor)
        with torch.autocast("cpu", enabled=False):
            logits = self.heads(features.float())
            return {"loss": nn.functional.cross_entropy(logits, targets)}


def make(kind=Net, *, lr=0.1, scaler=None, **options):
    torch.manual_seed(0)
    model = kind(**options)
    step = OptimizationStep(model, [torch.optim.SGD(model.parameters(), lr=lr)], scaler=scaler)
    return model, step


def batch(scale=1.0):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 8, generator=generator) * scale, torch.arange(8) % 4


def run(model, step, steps, dtype=torch.float32, hook=lambda number: None, check=True):
    policy = PrecisionPolicy("cpu", dtype)
    for number in range(steps):
        step.zero_grad()
        with policy.autocast():
            losses = model(*batch(math.inf if hook(number) == "overflow" else 1.0))
        step.scale(losses).backward()
        if hook(number) == "zero the backbone":
            for p in model.backbone.parameters():
                p.grad.zero_()
        step.finish()


def plain_run(model, steps, dtype, scale):
    """Train in plain PyTorch with a fixed loss scale; return the last gradient norm of the backbone."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = model(*batch())["loss"]
        (loss * scale).backward()
        for p in model.parameters():
            p.grad /= scale
        optimizer.step()
    return torch.cat([p.grad.flatten() for p in model.backbone.parameters()]).norm().item()


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


class PlainRun:
    """Plain PyTorch training loop that raises warnings as errors.

    Args:
        kind: class of the model.
        rates: learning rate of each top-level module. Default 0.1 for all.
    """

    def __init__(self, kind=Net, rates=()):
        torch.manual_seed(0)
        self.model = kind()
        groups = [
            {"params": part.parameters(), "lr": dict(rates).get(name, 0.1)}
            for name, part in self.model.named_children()
        ]
        self.optimizer = torch.optim.SGD(groups)
        self.scaler = None

    def train(self, steps, before_step=lambda number: None, scale=lambda number: 1.0):
        """Train on batches multiplied by ``scale(number)``; return the loss of each step."""
        losses = []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number in range(steps):
                self.optimizer.zero_grad()
                loss = self.model(*batch(scale(number)))["loss"]
                (self.scaler.scale(loss) if self.scaler else loss).backward()
                before_step(number)
                if self.scaler:
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
                else:
                    self.optimizer.step()
                losses.append(loss.item())
        return losses


@pytest.mark.failure("module that does not change")
@pytest.mark.failure("module frozen by accident")
@pytest.mark.failure("zero gradients in one module")
def test_plain_pytorch_does_not_warn_if_the_backbone_does_not_train(caplog):
    def zero(number):
        for p in plain.model.backbone.parameters():
            p.grad.zero_()

    def reset(number):
        plain.model.backbone.load_state_dict(start)

    for rates, change in (((), zero), ((), "freeze"), ({"backbone": 1e-30}, None), ((), reset)):
        plain = PlainRun(rates=rates)
        if change == "freeze":
            plain.model.backbone.requires_grad_(False)
        start = {name: p.clone() for name, p in plain.model.backbone.state_dict().items()}
        losses = plain.train(20, change if callable(change) else lambda number: None)
        reset(0) if change is reset else None
        assert losses[-1] < losses[0]  # the head trains
        assert all(torch.equal(p, start[name]) for name, p in plain.model.backbone.state_dict().items())
    assert not warnings_of(caplog)


@pytest.mark.failure("loss scale that stays small")
@pytest.mark.failure("loss scale that does not grow after a resume")
@pytest.mark.parametrize("interval, counted", [(2000, 0), (10, 25)], ids=["17 overflows", "lowered interval"])
def test_plain_pytorch_loss_scale_does_not_grow_and_is_not_reported(interval, counted, caplog):
    plain = PlainRun()
    plain.scaler = torch.amp.GradScaler("cpu", growth_interval=interval)
    if counted:
        plain.scaler.load_state_dict(plain.scaler.state_dict() | {"scale": 1.0, "_growth_tracker": counted})
    plain.train(217, scale=lambda number: math.inf if number < 17 and not counted else 1.0)
    assert plain.scaler.get_scale() <= 1.0 and not warnings_of(caplog)


@pytest.mark.failure("most steps skipped")
def test_plain_pytorch_does_not_end_if_most_steps_are_skipped(caplog):
    plain = PlainRun()
    plain.scaler = torch.amp.GradScaler("cpu")
    weights, changes = plain.model.heads.weight.clone(), 0
    for _ in range(20):  # one good step, 25 overflows
        plain.train(1)
        changes += not torch.equal(weights, plain.model.heads.weight)
        weights = plain.model.heads.weight.clone()
        plain.train(25, scale=lambda number: math.inf)
        assert torch.equal(weights, plain.model.heads.weight)
    assert changes < 20 and not warnings_of(caplog)


@pytest.mark.failure("weights that diverged")
@pytest.mark.parametrize("rate", [math.nan, 1e38])
def test_plain_pytorch_continues_after_the_weights_diverged(rate, caplog):
    plain = PlainRun()
    plain.scaler = torch.amp.GradScaler("cpu")
    plain.train(2)
    for group in plain.optimizer.param_groups:
        group["lr"] = rate
    plain.train(1)
    for group in plain.optimizer.param_groups:
        group["lr"] = 0.1
    losses = plain.train(20)
    assert not any(map(math.isfinite, losses)) and not warnings_of(caplog)


@pytest.mark.failure("model changed after the first epoch")
@pytest.mark.parametrize("change", ["head replaced", "weights assigned"])
def test_plain_pytorch_does_not_report_a_changed_model(change, caplog):
    """A head converted to bfloat16: see ``test_failures_start.py``."""
    plain = PlainRun()
    plain.train(5)
    if change == "head replaced":
        plain.model.heads = nn.Linear(8, 4)
    else:
        state = {name: p.clone() for name, p in plain.model.state_dict().items()}
        plain.model.load_state_dict(state, assign=True)
    weights = plain.model.heads.weight.detach().clone()
    plain.train(20)
    assert torch.equal(plain.model.heads.weight, weights) and not warnings_of(caplog)


@pytest.mark.failure("float16 underflow in the backbone")
def test_float16_backbone_underflow_below_float32_head_warns(caplog):
    model, _ = make(factor=1e-9)
    weights = model.backbone.weight.clone()
    assert plain_run(model, 20, torch.float16, 1.0) == 0
    assert torch.equal(model.backbone.weight, weights) and not warnings_of(caplog)  # plain PyTorch: silence

    model, step = make(factor=1e-9, scaler=LossScaler(init_scale=1.0, max_scale=1.0))
    run(model, step, FIRST_CHECK + 1, torch.float16)
    (message,) = [warning for warning in warnings_of(caplog) if "'backbone'" in warning]
    assert "100.0 %" in message and "fp16" not in message and "SOLVER.AMP.INIT_SCALE" in message

    caplog.clear()
    model, step = make(factor=1e-9, scaler=LossScaler(init_scale=2.0**20))
    run(model, step, FIRST_CHECK + 1, torch.float16)
    assert not any("100.0 %" in warning for warning in warnings_of(caplog))


@pytest.mark.failure("zero gradients in one module")
def test_zeroed_backbone_gradients_warn_only_once(caplog):
    model, step = make()
    run(model, step, 160, hook=lambda number: "zero the backbone" if number >= 5 else None)
    (message,) = warnings_of(caplog)
    assert "'backbone'" in message and "100.0 %" in message


@pytest.mark.failure("zero gradients in one module")
@pytest.mark.parametrize("log_period, expected", [(10, 1), (50, 0)])
def test_modules_are_checked_every_log_period(caplog, log_period, expected):
    cfg = read_config("", ["LOG_PERIOD", str(log_period)])
    model, plain = make()
    step = OptimizationStep.from_config(cfg, model, plain.optimizers, PrecisionPolicy("cpu", torch.float32), None)
    run(model, step, 12, hook=lambda number: "zero the backbone" if number >= FIRST_CHECK else None)
    assert len([warning for warning in warnings_of(caplog) if "'backbone'" in warning]) == expected


@pytest.mark.failure("zero gradients in one module")
def test_zero_gradient_warning_repeats_if_module_stops_training_again(caplog):
    model, step = make()
    run(model, step, 210, hook=lambda number: "zero the backbone" if number < 60 or number > 120 else None)
    assert len(warnings_of(caplog)) == 2


@pytest.mark.failure("zero gradients in one module")
def test_zero_learning_rate_warning_does_not_suppress_later_zero_gradient_warning(caplog):
    model, step = make(lr=0.0)
    run(model, step, 5)
    (first,) = warnings_of(caplog)
    assert "learning rate is 0" in first
    caplog.clear()
    for group in step.optimizers[0].param_groups:
        group["lr"] = 0.1
    run(model, step, 50, hook=lambda number: "zero the backbone")
    (message,) = warnings_of(caplog)
    assert "'backbone'" in message and "100.0 %" in message


@pytest.mark.failure("loss scale that stays small")
@pytest.mark.parametrize("scale, expected", [(64.0, 1), (1024.0, 0)])
def test_small_loss_scale_warns_despite_an_earlier_learning_rate_warning(scale, expected, caplog):
    model, step = make(lr=0.0, scaler=LossScaler(init_scale=scale))
    run(model, step, 210)
    assert sum("SOLVER.AMP.GROWTH_INTERVAL" in warning for warning in warnings_of(caplog)) == expected


@pytest.mark.failure("module frozen by accident")
def test_frozen_backbone_missing_from_freeze_layers_warns(caplog):
    model, step = make()
    model.backbone.requires_grad_(False)
    run(model, step, 2)
    (message,) = warnings_of(caplog)
    assert "'backbone'" in message and "MODEL.FREEZE_LAYERS" in message


@pytest.mark.failure("module frozen by accident")
@pytest.mark.parametrize("name", ["backbone", "backbone.layer1"])
def test_backbone_listed_in_freeze_layers_does_not_warn(name, caplog):
    model, step = make()
    model.backbone.requires_grad_(False)
    step.set_frozen([name])
    run(model, step, FIRST_CHECK + 1)
    assert not warnings_of(caplog)


@pytest.mark.failure("zero gradients in one module")
def test_modules_with_zero_learning_rate_or_sparse_gradients_do_not_warn(caplog):
    class Centers(nn.Module):
        sparse_gradients = True

        def __init__(self):
            super().__init__()
            self.centers = nn.Parameter(torch.zeros(1000, 8))

    model, step = make()
    model.losses = Centers()
    forward = model.forward
    model.forward = lambda x, targets: forward(x, targets) | {"center": model.losses.centers[0].sub(1).square().sum()}
    groups = [{"params": model.backbone.parameters(), "lr": 0.0}]
    groups += [{"params": part.parameters()} for part in (model.heads, model.losses)]
    step = OptimizationStep(model, [torch.optim.SGD(groups, lr=0.1)])
    run(model, step, FIRST_CHECK + 1, hook=lambda number: "zero the backbone")
    assert not warnings_of(caplog)


class Narrow(nn.Module):
    """Convolutions of a feature map as narrow as a pixel: six of nine kernel positions only see the padding."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1))
        self.heads = nn.Linear(4, 4)

    def forward(self, x, targets):
        features = self.backbone(x[:, None, :, None]).mean((2, 3))
        return {"loss": nn.functional.cross_entropy(self.heads(features), targets)}


@pytest.mark.failure("zero gradients in one module")
def test_kernel_positions_that_only_see_padding_do_not_warn(caplog):
    model, step = make(Narrow)
    gradient = torch.empty(0)

    def keep(number):
        nonlocal gradient
        gradient = model.backbone[1].weight.grad

    run(model, step, FIRST_CHECK + 1, hook=keep)
    assert (gradient == 0).float().mean() > 0.6 and not warnings_of(caplog)
    run(model, step, 60, hook=lambda number: "zero the backbone")
    assert len(warnings_of(caplog)) == 1


@pytest.mark.failure("module that does not change")
def test_backbone_parameters_that_do_not_change_warn(caplog):
    model, _ = make()
    groups = [{"params": model.backbone.parameters(), "lr": 1e-30}, {"params": model.heads.parameters()}]
    step = OptimizationStep(model, [torch.optim.SGD(groups, lr=0.1)])
    run(model, step, FIRST_CHECK + 1)
    (message,) = warnings_of(caplog)
    assert "'backbone'" in message and "SOLVER.LR_FACTORS" in message


@pytest.mark.failure("loss scale that stays small")
def test_loss_scale_that_stays_small_for_200_steps_warns(caplog):
    scaler = LossScaler()
    model, step = make(scaler=scaler)
    run(model, step, 17, hook=lambda number: "overflow")
    assert scaler.scale == 1.0
    caplog.clear()
    run(model, step, 200)
    (message,) = warnings_of(caplog)
    assert scaler.scale == 1.0 and "SOLVER.AMP.GROWTH_INTERVAL" in message


@pytest.mark.failure("loss scale that does not grow after a resume")
def test_loss_scale_grows_if_growth_interval_was_lowered_on_resume():
    scaler = LossScaler(init_scale=1.0, growth_interval=10)
    scaler.load_state_dict({"scale": 1.0, "good_steps": 25})
    scaler.update(True)
    assert scaler.scale == 2.0


@pytest.mark.failure("most steps skipped")
def test_training_raises_if_more_than_half_of_the_steps_are_skipped(caplog):
    model, step = make()
    with pytest.raises(PrecisionFailure, match=str(SKIP_WINDOW)):
        run(model, step, 1000, hook=lambda number: "overflow" if number % 26 else None)
    assert SKIP_WINDOW // 2 < step.skipped_total < SKIP_WINDOW
    assert len(warnings_of(caplog)) < 25


@pytest.mark.failure("weights that diverged")
@pytest.mark.parametrize("rate", [math.nan, 1e38])
def test_first_skipped_step_raises_if_weights_diverged(rate):
    model, step = make()
    run(model, step, 1)
    for group in step.optimizers[0].param_groups:
        group["lr"] = rate
    with pytest.raises(NonFiniteParameters, match=r"backbone\.weight"):
        run(model, step, 3)
    assert step.skipped_in_a_row == 1


@pytest.mark.failure("weights that diverged")
def test_overflow_with_finite_weights_skips_the_step_without_an_error():
    model, step = make()
    run(model, step, 1, hook=lambda number: "overflow")
    assert step.skipped_in_a_row == 1


class Listed(Net):
    """Net with layers in a plain list and a plain dict, which PyTorch does not register."""

    def __init__(self):
        super().__init__()
        self.extra = [nn.Linear(8, 8)]
        self.more = {"a": nn.Linear(8, 8, bias=False)}

    def forward(self, x, targets):
        return super().forward(self.more["a"](self.extra[0](x)), targets)


@pytest.mark.failure("layers in plain lists or dicts")
def test_warning_names_layers_in_plain_lists_and_dicts(caplog):
    model, step = make(Listed)
    weights = model.extra[0].weight.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(*batch())["loss"].backward()
    optimizer.step()
    assert torch.equal(model.extra[0].weight, weights) and not warnings_of(caplog)  # plain PyTorch: silence

    run(model, step, 2)
    (message,) = warnings_of(caplog)
    assert all(name in message for name in ("extra[0].weight", "extra[0].bias", "more['a'].weight"))


def epochs_with(change, caplog):
    """Train for two epochs, and call ``change(trainer)`` after each."""

    class Change(HookBase):
        def after_epoch(self):
            change(self.trainer)

    model = make_net()
    trainer = make_trainer(model, [torch.optim.SGD(model.parameters(), lr=0.1)], [make_batch()] * 8, torch.bfloat16)
    trainer.register_hooks([Change()])
    trainer.train(0, 2, 4)


@pytest.mark.failure("model changed after the first epoch")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda trainer: setattr(trainer.model, "head", nn.Linear(16, 4)), "head.weight"),
        (lambda trainer: trainer.model.head.bfloat16(), "head.weight"),
        (
            lambda trainer: trainer.model.load_state_dict(
                {name: t.clone() for name, t in trainer.model.state_dict().items()}, assign=True
            ),
            "optimizers hold",
        ),
    ],
    ids=["head replaced", "head converted", "weights assigned"],
)
def test_model_changed_after_the_first_epoch_raises(change, words, caplog):
    with pytest.raises(TrainingError, match=words):
        epochs_with(change, caplog)


@pytest.mark.failure("module that does not change")
def test_parameters_reset_between_steps_warn(caplog):
    model, step = make()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    def reset(number):
        with torch.no_grad():
            for name, p in model.backbone.named_parameters():
                p.copy_(weights[f"backbone.{name}"])

    run(model, step, 60, hook=reset)
    (message,) = warnings_of(caplog)
    assert "'backbone'" in message and "reset" in message


class TwoClasses(nn.Module):
    """Two logits whose sum the gradient of the loss does not change, as in every softmax classifier."""

    def __init__(self):
        super().__init__()
        self.logits = nn.ParameterList([torch.tensor([1.0, 2.0])])

    def forward(self, x, targets):
        return {"loss": self.logits[0][0] - self.logits[0][1] + 0 * x.sum()}


@pytest.mark.failure("module that does not change")
def test_parameters_with_a_constant_sum_are_not_reported_as_reset(caplog):
    model, step = make(TwoClasses, lr=2.0**-6)  # exact in float32
    run(model, step, 110)
    assert model.logits[0].sum() == 3 and warnings_of(caplog) == []


class Disabled(nn.Module):
    """Linear layer that disables autocast in its forward pass."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 16)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.layer(x).relu()


@pytest.mark.failure("autocast disabled in one module")
@pytest.mark.parametrize("forced", [False, True])
def test_child_module_that_disables_autocast_warns_unless_in_force_fp32(forced, caplog):
    model = make_net()
    model.body = Disabled()
    if forced:
        apply_force_fp32(model, ["body"])
    make_trainer(model, [torch.optim.SGD(model.parameters(), lr=0.1)], [make_batch()], torch.bfloat16).train(0, 1, 1)
    assert ("head: bfloat16" if forced else "body: float32; head: bfloat16") in caplog.text
    assert [("'body'" in warning) for warning in warnings_of(caplog)] == ([] if forced else [True])


@pytest.mark.failure("autocast disabled in one module")
def test_plain_pytorch_does_not_warn_if_child_module_disables_autocast(caplog):
    model = make_net()
    model.body = Disabled()
    with torch.autocast("cpu", torch.bfloat16):
        model(make_batch())["loss_cls"].backward()
    assert not warnings_of(caplog)
