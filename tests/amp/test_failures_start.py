"""Failures at the start of training: parameters in low precision, and parameters that do not change."""

import logging
import warnings

import loops
import pytest
import tiny
import torch
from torch import nn

from fastamp.amp import LossScaler, OptimizationStep
from fastamp.engine import DefaultTrainer
from fastamp.solver.clip import clip_gradients
from fastamp.utils.errors import TrainingError

GOOD = loops.make_batch()


# model.half() with a scaler.


class Low(loops.Net):
    """Net that casts the images to the dtype of its weights, so that it also runs in low precision."""

    def forward(self, batch):
        return super().forward(batch | {"images": batch["images"].to(self.body[0].weight.dtype)})


@pytest.mark.failure("parameters in 16 bits")
def test_plain_pytorch_scaler_rejects_float16_parameters():
    model = loops.make_net(Low).half()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        loops.plain_step(model, loops.sgd(model), GOOD, torch.float32, loops.plain_scaler())


@pytest.mark.failure("parameters in 16 bits")
def test_plain_pytorch_bfloat16_parameters_lose_small_updates_without_an_error():
    """In bfloat16, rounding absorbs most updates at learning rate 1e-3; the float32 model is the control."""
    moved = []
    for dtype in (torch.bfloat16, torch.float32):
        model = loops.make_net(Low).to(dtype)
        before = loops.values(model)
        for _ in range(20):
            loops.plain_step(model, loops.sgd(model, lr=1e-3), GOOD, torch.float32, loops.plain_scaler())
        moved.append(torch.cat([(before[name] != p).flatten() for name, p in model.named_parameters()]).float().mean())
    assert moved[0] < 0.2 and moved[1] > 0.8


@pytest.mark.failure("parameters in 16 bits")
@pytest.mark.parametrize("dtype", loops.ALL)
@pytest.mark.parametrize("change, found", [
    (lambda model: model.half(), "4 .*body.0.weight, body.0.bias, head.weight"),
    (lambda model: model.bfloat16(), "4 .*body.0.weight, body.0.bias, head.weight"),
    (lambda model: model.head.half(), "2 .*head.weight, head.bias"),
], ids=["half", "bfloat16", "half head"])  # fmt: skip
def test_trainer_rejects_model_with_low_precision_parameters(change, found, dtype):
    model = loops.make_net(Low)
    change(model)
    with pytest.raises(TrainingError, match=found):
        loops.make_trainer(model, [loops.sgd(model)], [GOOD], dtype).train(0, 1, 1)


@pytest.mark.integration
@pytest.mark.failure("parameters in 16 bits")
@pytest.mark.parametrize("precision", ["off", "bf16", "fp16"])
def test_default_trainer_rejects_model_with_low_precision_parameters(demo, tmp_path, precision):
    class Half(DefaultTrainer):
        @classmethod
        def build_model(cls, cfg):
            return super().build_model(cfg).half()

    with pytest.raises(TrainingError, match=r"backbone.0.weight"):
        Half(tiny.tiny_config(tmp_path, "SOLVER.AMP", precision)).train()


# A run in which the parameters do not change.


class Weighted(loops.Net):
    """Net whose loss is multiplied by ``weight``."""

    def __init__(self, weight, **options):
        super().__init__(**options)
        self.weight = weight

    def losses(self, logits, batch):
        return {"loss_cls": super().losses(logits, batch)["loss_cls"] * self.weight}


class Dead(loops.Net):
    """Net whose loss is the sum of dead ReLU outputs, so that all gradients are zero."""

    def losses(self, logits, batch):
        return {"loss_cls": (logits - 100).relu().sum()}


class Idle(torch.optim.SGD):
    """Optimizer whose ``step`` does nothing."""

    def step(self, closure=None):
        pass


NOTHING = {
    "tiny rate": lambda: (model := loops.make_net(), loops.sgd(model, lr=1e-12)),
    "rate 0": lambda: (model := loops.make_net(), loops.sgd(model, lr=0.0)),
    "weight 0": lambda: (model := loops.make_net(Weighted, weight=0.0), loops.sgd(model)),
    "dead": lambda: (model := loops.make_net(Dead), loops.sgd(model)),
    "idle": lambda: (model := loops.make_net(), Idle(model.parameters(), lr=0.1)),
}


@pytest.mark.failure("gradients that are all zero")
@pytest.mark.failure("parameters that do not change")
@pytest.mark.parametrize("dtype", loops.ALL)
@pytest.mark.parametrize("name", NOTHING)
def test_plain_pytorch_does_not_warn_if_parameters_do_not_change(name, dtype, caplog):
    for scaler in (None, loops.plain_scaler()):
        model, optimizer = NOTHING[name]()
        before = loops.values(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            losses = {loops.plain_step(model, optimizer, GOOD, dtype, scaler) for _ in range(10)}
        assert len(losses) == 1 and loops.same(before, loops.values(model)) and not caplog.text


@pytest.mark.failure("parameters that do not change")
@pytest.mark.parametrize("dtype", loops.ALL)
@pytest.mark.parametrize("name", ["tiny rate", "idle"])
def test_unchanged_parameters_raise_after_three_steps(name, dtype):
    model, optimizer = NOTHING[name]()
    trainer = loops.make_trainer(model, [optimizer], [GOOD] * 10, dtype)
    with pytest.raises(TrainingError, match=r"SOLVER.BASE_LR") as error:
        trainer.train(0, 1, 10)
    assert trainer.iter == 3
    rate = "1e-12" if name == "tiny rate" else "0.1"
    assert "gradient norms 0.62" in str(error.value) and f"learning rates {rate} to {rate}" in str(error.value)


@pytest.mark.failure("gradients that are all zero")
@pytest.mark.parametrize("dtype", loops.ALL)
@pytest.mark.parametrize("name, message", [
    ("rate 0", "the learning rate is 0"),
    ("weight 0", "gradients are exactly zero"),
    ("dead", "gradients are exactly zero"),
])  # fmt: skip
def test_zero_gradients_and_zero_learning_rate_warn_once(name, message, dtype, caplog):
    model, optimizer = NOTHING[name]()
    loops.make_trainer(model, [optimizer], [GOOD] * 10, dtype).train(0, 1, 10)
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert message in warning.getMessage()


@pytest.mark.failure("gradients that are all zero")
@pytest.mark.parametrize("dtype", loops.ALL)
def test_zero_gradients_warn_although_weight_decay_changes_parameters(dtype, caplog):
    """Weight decay changes the parameters, so unchanged parameters are not the only sign of zero gradients."""
    model = loops.make_net(Weighted, weight=0.0)
    before = loops.values(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    loops.make_trainer(model, [optimizer], [GOOD] * 5, dtype).train(0, 1, 5)
    assert "gradients are exactly zero" in caplog.text and not loops.same(before, loops.values(model))


@pytest.mark.failure("gradients that are all zero")
def test_verdict_contains_zero_gradient_fraction_if_gradient_norm_is_tiny():
    for weight, expected in ((1.0, None), (1e-4, 0.05), (0.0, 1.0)):
        model = loops.make_net(Weighted, weight=weight)
        step = OptimizationStep(model, [loops.sgd(model)])
        step.scale(model(GOOD)).backward()
        fraction = step.finish().zero_fraction
        if expected is None:
            assert fraction is None  # not measured for a large norm
        else:
            assert fraction.item() == pytest.approx(expected, abs=0.051)


@pytest.mark.failure("parameters that do not change")
@pytest.mark.parametrize("dtype", loops.ALL)
def test_tiny_learning_rate_raises_despite_batch_norm_updates(dtype):
    model = loops.make_net(normalize=True)
    with pytest.raises(TrainingError, match="SOLVER.BASE_LR"):
        loops.make_trainer(model, [loops.sgd(model, lr=1e-12)], [GOOD] * 10, dtype).train(0, 1, 10)


@pytest.mark.failure("gradients that are all zero")
def test_float16_gradient_underflow_logs_zero_gradient_warning(caplog):
    model = loops.make_net(Weighted, weight=1e-12)
    loops.make_trainer(model, [loops.sgd(model)], [GOOD] * 5, torch.float16).train(0, 1, 5)
    assert "gradients are exactly zero" in caplog.text and "float16" in caplog.text


@pytest.mark.failure("parameters that do not change")
@pytest.mark.parametrize("dtype", loops.ALL)
def test_training_that_changes_the_parameters_logs_no_warning(dtype, caplog):
    model = loops.make_net(normalize=True)
    loops.make_trainer(model, [loops.sgd(model)], [GOOD] * 10, dtype).train(0, 1, 10)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.failure("parameters that do not change")
@pytest.mark.parametrize("dtype", loops.ALL)
def test_parameter_update_monitor_ignores_skipped_steps(dtype):
    model = loops.make_net()
    batches = [loops.spoil(GOOD)] * 5 + [GOOD] * 5
    trainer = loops.make_trainer(model, [loops.sgd(model, lr=1e-12)], batches, dtype)
    with pytest.raises(TrainingError, match=r"SOLVER.BASE_LR"):
        trainer.train(0, 1, 10)
    assert trainer.iter == 8


def warm_up_from_zero(optimizer, iteration):
    optimizer.param_groups[0]["lr"] = 0.01 * iteration


@pytest.mark.failure("parameters that do not change")
@pytest.mark.parametrize("dtype", loops.ALL)
def test_warmup_from_zero_logs_no_warning(dtype, caplog):
    model = loops.make_net()
    optimizer = loops.sgd(model)
    trainer = loops.make_trainer(model, [optimizer], [GOOD] * 5, dtype)
    zero_grad = trainer.step.zero_grad
    trainer.step.zero_grad = lambda: (warm_up_from_zero(optimizer, trainer.iter), zero_grad())
    trainer.train(0, 1, 5)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def clip(gradients, norm):
    return clip_gradients(gradients, norm, clip_type="global_norm", clip_value=1.0)


@pytest.fixture
def reads(monkeypatch):
    """Record the name of each called tensor method that copies a value to the host."""
    reads = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu", "numpy", "nonzero", "equal"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *a, _o=original, _n=name, **k: (reads.append(_n), _o(self, *a, **k))[1]
        )
    return reads


@pytest.mark.failure("parameters that do not change")
@pytest.mark.parametrize("dtype", loops.ALL)
@pytest.mark.parametrize("clipping", [None, clip])
@pytest.mark.parametrize("weight", [1.0, 1e-4])
def test_applied_optimizer_step_copies_to_the_host_only_once(reads, dtype, clipping, weight):
    """Monitoring parameter updates in the first steps and counting zero gradients add no synchronization."""
    model = loops.make_net(Weighted, weight=weight, normalize=True)
    scaler = LossScaler(init_scale=64.0) if dtype == torch.float16 else None
    step = OptimizationStep(model, [loops.sgd(model)], scaler=scaler, clip=clipping)
    for number in range(6):
        step.zero_grad()
        with loops.autocast(dtype):
            losses = model(GOOD)
        reads.clear()
        step.scale(losses).backward()
        verdict = step.finish()
        assert reads == ["tolist"], f"step {number}"
        assert verdict.ok and (verdict.zero_fraction is not None) == (weight < 1)


@pytest.mark.failure("parameters that do not change")
def test_skipped_optimizer_step_copies_to_the_host_twice(reads):
    """The second copy lists the non-finite parameters. This test is also the negative control of ``reads``."""
    model = nn.Linear(4, 1)
    step = OptimizationStep(model, [loops.sgd(model)])
    step.scale({"loss": model(torch.full((2, 4), float("inf"))).sum()}).backward()
    reads.clear()
    assert not step.finish().ok and reads == ["tolist", "tolist"]
