"""Failures 16 and 17: a model in low precision, and runs that learn nothing, which say so in their first steps."""

import logging
import warnings

import pytest
import tiny
import torch
from loops import (
    ALL,
    Net,
    autocast,
    make_batch,
    make_net,
    make_trainer,
    plain_scaler,
    plain_step,
    same,
    sgd,
    spoil,
    values,
)
from torch import nn

from fastamp.amp import LossScaler, OptimizationStep
from fastamp.engine import DefaultTrainer
from fastamp.solver.clip import clip_gradients
from fastamp.utils.errors import TrainingError

GOOD = make_batch()


# 16. model.half() with a scaler.


class Low(Net):
    """Net for a body in low precision."""

    def forward(self, batch):
        return super().forward(batch | {"images": batch["images"].to(self.body[0].weight.dtype)})


def test_16_plain_half():
    model = make_net(Low).half()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        plain_step(model, sgd(model), GOOD, torch.float32, plain_scaler())


def test_16_plain_bfloat16_says_nothing():
    """The updates are below what the weights can resolve."""
    moved = []
    for dtype in (torch.bfloat16, torch.float32):
        model = make_net(Low).to(dtype)
        before = values(model)
        for _ in range(20):
            plain_step(model, sgd(model, lr=1e-3), GOOD, torch.float32, plain_scaler())
        moved.append(torch.cat([(before[name] != p).flatten() for name, p in model.named_parameters()]).float().mean())
    assert moved[0] < 0.2 and moved[1] > 0.8


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("change, found", [
    (lambda model: model.half(), "4 parameters are in low precision, e.g. body.0.weight, body.0.bias, head.weight"),
    (lambda model: model.bfloat16(), "4 parameters are in low precision, e.g. body.0.weight, body.0.bias, head.weight"),
    (lambda model: model.head.half(), "2 parameters are in low precision, e.g. head.weight, head.bias"),
], ids=["half", "bfloat16", "half head"])  # fmt: skip
def test_16_parameters_in_low_precision_are_named(change, found, dtype):
    model = make_net(Low)
    change(model)
    with pytest.raises(TrainingError, match=found) as error:
        make_trainer(model, [sgd(model)], [GOOD], dtype).train(0, 1, 1)
    assert "mixed precision keeps parameters in float32" in str(error.value)
    assert "fix: remove model.half() or .to(dtype)" in str(error.value)


@pytest.mark.parametrize("precision", ["off", "bf16", "fp16"])
def test_16_the_default_trainer(demo, tmp_path, precision):
    class Half(DefaultTrainer):
        @classmethod
        def build_model(cls, cfg):
            return super().build_model(cfg).half()

    with pytest.raises(TrainingError, match="parameters are in low precision, e.g. backbone.0.weight"):
        Half(tiny.tiny_config(tmp_path, "SOLVER.AMP", precision)).train()


# 17. A run that learns nothing.


class Weighted(Net):
    """Its loss has a weight."""

    def __init__(self, weight, **options):
        super().__init__(**options)
        self.weight = weight

    def losses(self, logits, batch):
        return {"loss_cls": super().losses(logits, batch)["loss_cls"] * self.weight}


class Dead(Net):
    """Its activations are dead, and the loss is what is left of them."""

    def losses(self, logits, batch):
        return {"loss_cls": (logits - 100).relu().sum()}


class Idle(torch.optim.SGD):
    """Does nothing."""

    def step(self, closure=None):
        pass


NOTHING = {
    "tiny rate": lambda: (model := make_net(), sgd(model, lr=1e-12)),
    "rate 0": lambda: (model := make_net(), sgd(model, lr=0.0)),
    "weight 0": lambda: (model := make_net(Weighted, weight=0.0), sgd(model)),
    "dead": lambda: (model := make_net(Dead), sgd(model)),
    "idle": lambda: (model := make_net(), Idle(model.parameters(), lr=0.1)),
}


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("name", NOTHING)
def test_17_plain_pytorch_says_nothing(name, dtype, caplog):
    for scaler in (None, plain_scaler()):
        model, optimizer = NOTHING[name]()
        before = values(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            losses = {plain_step(model, optimizer, GOOD, dtype, scaler) for _ in range(10)}
        assert len(losses) == 1 and same(before, values(model)) and not caplog.text


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("name", ["tiny rate", "idle"])
def test_17_no_parameter_moves(name, dtype):
    model, optimizer = NOTHING[name]()
    trainer = make_trainer(model, [optimizer], [GOOD] * 10, dtype)
    with pytest.raises(TrainingError, match="3 optimizer steps were taken, and not one parameter moved") as error:
        trainer.train(0, 1, 10)
    assert trainer.iter == 3
    rate = "1e-12" if name == "tiny rate" else "0.1"
    assert "found: gradient norms 0.62" in str(error.value) and f"learning rates {rate} to {rate}" in str(error.value)
    assert "cause: the updates are smaller than float32 can resolve, the optimizer does not step" in str(error.value)
    assert "fix:   a higher SOLVER.BASE_LR" in str(error.value)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("name, message", [
    ("rate 0", "the learning rate was 0 in the first 3 steps: nothing is learned so far"),
    ("weight 0", "the first 3 steps had no gradient, every element is exactly zero: nothing is learned so far"),
    ("dead", "the first 3 steps had no gradient, every element is exactly zero: nothing is learned so far"),
])  # fmt: skip
def test_17_a_warning_once(name, message, dtype, caplog):
    model, optimizer = NOTHING[name]()
    make_trainer(model, [optimizer], [GOOD] * 10, dtype).train(0, 1, 10)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] and message in caplog.text
    assert name == "rate 0" or "cause: the losses do not depend on the parameters, e.g. dead activ" in caplog.text


@pytest.mark.parametrize("dtype", ALL)
def test_17_weight_decay_is_no_learning(dtype, caplog):
    """It moves the parameters, and there is no gradient."""
    model = make_net(Weighted, weight=0.0)
    before = values(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    make_trainer(model, [optimizer], [GOOD] * 5, dtype).train(0, 1, 5)
    assert "every element is exactly zero" in caplog.text and not same(before, values(model))


def test_17_the_share_of_zero_gradients():
    for weight, share in ((1.0, None), (1e-4, 0.05), (0.0, 1.0)):
        model = make_net(Weighted, weight=weight)
        step = OptimizationStep(model, [sgd(model)])
        step.scale(model(GOOD)).backward()
        zero_share = step.finish().zero_fraction
        if share is None:
            assert zero_share is None  # nobody asks, where the norm is large
        else:
            assert zero_share.item() == pytest.approx(share, abs=0.051)


@pytest.mark.parametrize("dtype", ALL)
def test_17_a_tiny_rate_in_a_model_with_batch_norm(dtype):
    model = make_net(normalize=True)
    with pytest.raises(TrainingError, match="SOLVER.BASE_LR"):
        make_trainer(model, [sgd(model, lr=1e-12)], [GOOD] * 10, dtype).train(0, 1, 10)


def test_17_gradients_below_float16(caplog):
    model = make_net(Weighted, weight=1e-12)
    make_trainer(model, [sgd(model)], [GOOD] * 5, torch.float16).train(0, 1, 5)
    assert "every element is exactly zero" in caplog.text
    assert "float16" in caplog.text


@pytest.mark.parametrize("dtype", ALL)
def test_17_a_healthy_run_says_nothing(dtype, caplog):
    model = make_net(normalize=True)
    make_trainer(model, [sgd(model)], [GOOD] * 10, dtype).train(0, 1, 10)
    assert not caplog.text


@pytest.mark.parametrize("dtype", ALL)
def test_17_skipped_steps_are_not_counted(dtype):
    model = make_net()
    batches = [spoil(GOOD)] * 5 + [GOOD] * 5
    trainer = make_trainer(model, [sgd(model, lr=1e-12)], batches, dtype)
    with pytest.raises(TrainingError, match="3 optimizer steps were taken, and not one parameter moved"):
        trainer.train(0, 1, 10)
    assert trainer.iter == 8


def warm_up_from_zero(optimizer, iteration):
    optimizer.param_groups[0]["lr"] = 0.01 * iteration


@pytest.mark.parametrize("dtype", ALL)
def test_17_a_warm_up_from_zero_says_nothing(dtype, caplog):
    model = make_net()
    optimizer = sgd(model)
    trainer = make_trainer(model, [optimizer], [GOOD] * 5, dtype)
    zero_grad = trainer.step.zero_grad
    trainer.step.zero_grad = lambda: (warm_up_from_zero(optimizer, trainer.iter), zero_grad())
    trainer.train(0, 1, 5)
    assert not caplog.text


def clip(gradients, norm):
    return clip_gradients(gradients, norm, clip_type="global_norm", clip_value=1.0)


@pytest.fixture
def reads(monkeypatch):
    """Reads of a tensor's value on the host, which all go through one of these methods."""
    reads = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu", "numpy", "nonzero", "equal"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *a, _o=original, _n=name, **k: (reads.append(_n), _o(self, *a, **k))[1]
        )
    return reads


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("clipping", [None, clip])
@pytest.mark.parametrize("weight", [1.0, 1e-4])
def test_17_a_good_step_reads_the_device_once(reads, dtype, clipping, weight):
    """The first ones too, where it is looked whether they move anything, and how many gradients are zero."""
    model = make_net(Weighted, weight=weight, normalize=True)
    scaler = LossScaler(init_scale=64.0) if dtype == torch.float16 else None
    step = OptimizationStep(model, [sgd(model)], scaler=scaler, clip=clipping)
    for number in range(6):
        step.zero_grad()
        with autocast(dtype):
            losses = model(GOOD)
        reads.clear()
        step.scale(losses).backward()
        verdict = step.finish()
        assert reads == ["tolist"], f"step {number}"
        assert verdict.ok and (verdict.zero_fraction is not None) == (weight < 1)


def test_17_a_skipped_step_reads_it_twice(reads):
    """Which shows that reads are seen: those of a skipped step name its parameters."""
    model = nn.Linear(4, 1)
    step = OptimizationStep(model, [sgd(model)])
    step.scale({"loss": model(torch.full((2, 4), float("inf"))).sum()}).backward()
    reads.clear()
    assert not step.finish().ok and reads == ["tolist", "tolist"]
