"""Monitored values in training: fractions of skipped steps and zero gradients, clipping, largest activation."""

import itertools
import json

import pytest
import tiny
import torch
import train_net
from torch import nn

from fastamp.amp import LossScaler, OptimizationStep, PrecisionPolicy
from fastamp.amp.step import TINY_GRAD_NORM
from fastamp.engine import SimpleTrainer
from fastamp.engine.hooks import ActivationMonitor, console_line
from fastamp.solver.clip import clip_gradients

FLOAT32 = PrecisionPolicy("cpu", torch.float32, "test")


def rows(output):
    return [json.loads(line) for line in (output / "metrics.json").read_text().splitlines()]


def scalars(output):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(output))
    events.Reload()
    return set(events.Tags()["scalars"])


@pytest.mark.integration
@pytest.mark.parametrize("precision", ["off", "bf16", "fp16"])
def test_training_writes_monitored_values_to_metrics_and_log(demo, tmp_path, precision):
    opts = (
        "SOLVER.AMP",
        precision,
        "SOLVER.MAX_EPOCH",
        "1",
        "LOG_ACTIVATION_STATS",
        "True",
        "SOLVER.CLIP_GRADIENTS.ENABLED",
        "True",
    )
    assert train_net.cli(tiny.tiny_options(tmp_path, *opts)) == 0
    written = [row for row in rows(tmp_path) if "total_loss" in row]
    assert len(written) == 3
    for row in written:
        assert row["skip_ratio"] == row["skipped_total"] == row["skipped_in_a_row"] == 0
        assert row["grad_norm"] > 0 and 0 < row["clip_coefficient"] <= 1
        assert row["loss_scale"] == (65536 if precision == "fp16" else 1)
        assert row["largest_activation"] > 1 and row["largest_activation_layer"]
        limit = {"off": 3.4e38, "bf16": 3.4e38, "fp16": 65504}[precision]
        assert row["activation_limit_share"] == pytest.approx(row["largest_activation"] / limit, rel=0.01)
    numbers = {
        "grad_norm",
        "clip_coefficient",
        "loss_scale",
        "skip_ratio",
        "largest_activation",
        "activation_limit_share",
    }
    assert {f"precision/{name}" for name in numbers} <= scalars(tmp_path)
    log = (tmp_path / "log.txt").read_text()
    assert "of the limit, " in log and "scale " in log and "clip " in log


class Controlled(nn.Module):
    """Model whose gradient is equal to the ``factors`` in the batch."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, batch):
        return {"loss": (self.weight * batch["factors"]).sum()}


def train(batches):
    model = Controlled()
    trainer = SimpleTrainer(model, batches, [torch.optim.SGD(model.parameters(), 0.1)], policy=FLOAT32)
    trainer.train(0, 1, len(batches))
    return trainer.metrics.flush()


def test_skip_ratio_is_the_fraction_of_skipped_steps_in_a_log_period():
    good, bad = {"factors": torch.ones(4)}, {"factors": torch.full((4,), float("nan"))}
    metrics = train([good, bad, bad, good])
    assert metrics["skip_ratio"] == 0.5 and metrics["skipped_total"] == 2
    assert metrics["grad_norm"] == 2.0  # without skipped steps


def test_zero_gradients_are_reported_only_for_a_tiny_gradient_norm():
    tiny_norm = {"factors": torch.tensor([TINY_GRAD_NORM / 10, 0.0, 0.0, 0.0])}
    assert train([tiny_norm])["zero_gradients"] == 0.75
    assert "zero_gradients" not in train([{"factors": torch.tensor([1.0, 0.0, 0.0, 0.0])}])


def test_zero_gradients_reveal_float16_underflow_without_loss_scaling():
    """With loss scaling, few gradients of the same model are zero."""

    def share(scale):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        step = OptimizationStep(model, [torch.optim.SGD(model.parameters(), 0.1)], scaler=LossScaler(init_scale=scale))
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(torch.randn(4, 8))
        step.scale({"loss": (out.float() * 1e-8).mean()}).backward()
        return step.finish().zero_fraction

    assert share(1.0) > 0.5 > 0.2 > share(65536.0)


def test_console_line_contains_monitored_values():
    metrics = {
        "epoch": 0, "total_loss": 1.0, "loss_scale": 8.0, "skipped_total": 3, "skipped_in_a_row": 1, "lr": 0.1,
        "images_per_second": 1.0, "data_time": 0.0, "peak_memory_mb": 1.0, "eta_seconds": 1.0, "zero_gradients": 0.97,
        "largest_activation": 60000.0, "activation_limit_share": 0.916, "largest_activation_layer": "backbone.4",
    }  # fmt: skip
    line = console_line(1, 2, metrics)
    assert "zero gradients 97 %" in line and "activation 6e+04 (92 % of the limit, backbone.4)" in line
    assert "skipped 3 (1 in a row)" in line


def test_activations_are_monitored_once_per_log_period():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    monitor = ActivationMonitor(model, period=3)
    hooked = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = model

        def forward(self, batch):
            hooked.append(bool(model[0]._forward_hooks))
            return {"loss": self.body(batch["x"]).mean()}

    trained = Model()
    batches, optimizer = itertools.repeat({"x": torch.randn(8, 4)}), torch.optim.SGD(trained.parameters(), 1e-3)
    trainer = SimpleTrainer(trained, batches, [optimizer], policy=FLOAT32)
    trainer.register_hooks([monitor])
    trainer.train(0, 1, 7)
    assert hooked == [False, False, True, False, False, True, True]
    assert not model[0]._forward_hooks


def test_clip_coefficient_is_clip_value_divided_by_gradient_norm():
    model = Controlled()
    clip = lambda gradients, norm: clip_gradients(gradients, norm, clip_type="global_norm", clip_value=1.0)  # noqa: E731
    step = OptimizationStep(model, [torch.optim.SGD(model.parameters(), 0.1)], clip=clip)
    step.scale(model({"factors": torch.full((4,), 2.0)})).backward()
    assert step.finish().clip_coefficient.item() == pytest.approx(0.25, rel=1e-4)
