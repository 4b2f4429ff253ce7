"""Warm-up of the EMA decay."""

import pytest
import torch
from loops import make_batch, make_net, make_trainer, plain_step, sgd, values
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fastamp.config import get_cfg
from fastamp.engine import HookBase
from fastamp.engine.hooks import EMA
from fastamp.solver import WeightAverage


class Record(HookBase):
    """Record the parameters after each step."""

    def __init__(self):
        self.steps = []

    def after_step(self):
        self.steps.append(values(self.trainer.model))


def train(steps, **options):
    model, record = make_net(), Record()
    average = WeightAverage(model, "ema")
    initial = values(model)
    trainer = make_trainer(model, [sgd(model)], [make_batch()] * steps, torch.float32)
    trainer.register_hooks([EMA(average, 0.999, **options), record])
    trainer.train(0, 1, steps)
    return average.tensors(), initial, record.steps


@pytest.mark.failure("EMA without warm-up")
def test_ema_warmup_matches_a_naive_loop_with_timm_decay():
    average, initial, steps = train(20)
    expected = {name: value.double() for name, value in initial.items()}
    for number, step in enumerate(steps):
        decay = min(0.999, 1 - (1 + number / 1) ** -(2 / 3))
        expected = {name: decay * value + (1 - decay) * step[name].double() for name, value in expected.items()}
    for name, value in expected.items():
        torch.testing.assert_close(average[name].double(), value, rtol=1e-6, atol=1e-7)


@pytest.mark.failure("EMA without warm-up")
def test_plain_pytorch_ema_keeps_initial_weights_in_a_short_run():
    model = make_net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    initial, optimizer = values(model)["head.weight"], sgd(model)
    average.update_parameters(model)  # the first update copies the weights
    for _ in range(20):
        plain_step(model, optimizer, make_batch(), torch.float32)
        average.update_parameters(model)
    weight, averaged = model.head.weight, average.module.head.weight
    assert (weight - averaged).norm() > 0.95 * (weight - initial).norm()


@pytest.mark.failure("EMA without warm-up")
def test_warmup_removes_initial_weights_from_ema_of_a_short_run():
    def kept(average, initial, steps):
        moved = steps[-1]["head.weight"] - initial["head.weight"]
        return ((steps[-1]["head.weight"] - average["head.weight"]).norm() / moved.norm()).item()

    assert kept(*train(20, warmup=False)) > 0.95
    assert kept(*train(20)) < 0.5


@pytest.mark.failure("EMA without warm-up")
@pytest.mark.parametrize("expected", [False, True])
def test_resume_keeps_the_ema_warmup_setting_of_the_checkpoint(expected, caplog):
    hook = EMA(WeightAverage(make_net(), "ema"), 0.9, warmup=not expected)
    hook.load_state_dict({"warmup": expected})
    assert hook.warmup is expected and "SOLVER.EMA.WARMUP" in caplog.text
    again = EMA(WeightAverage(make_net(), "ema"), 0.9)
    again.load_state_dict(hook.state_dict())
    assert again.warmup is expected


@pytest.mark.failure("EMA without warm-up")
def test_ema_warmup_is_enabled_by_default():
    assert get_cfg().SOLVER.EMA.WARMUP is True
