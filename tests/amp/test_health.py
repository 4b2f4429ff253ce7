"""Failures that plain PyTorch lets pass in silence, each shown first, and what fastamp says of them."""

import copy

import pytest
import tiny
import torch
import train_net
from torch import nn

from fastamp.amp import LossScaler, OptimizationStep
from fastamp.amp.health import check_finite, check_optimizers
from fastamp.engine import DefaultTrainer, HookBase
from fastamp.utils.errors import TrainingError


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))


def train(model, optimizer, steps=5):
    """Return the losses of a plain PyTorch loop."""
    generator = torch.Generator().manual_seed(0)
    images, targets = torch.randn(8, 3, 8, 8, generator=generator), torch.arange(8) % 2
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def flat_buffers(model):
    """Return one tensor of all parameters' values, as an optimizer with flat buffers holds it."""
    return [nn.Parameter(torch.cat([p.detach().flatten() for p in model.parameters()]))]


STRANGERS = {
    "flat buffers": lambda model: flat_buffers(model),
    "a copied model": lambda model: copy.deepcopy(model).parameters(),
    "replaced layers": lambda model: [*nn.Linear(144, 2).parameters(), *list(model.parameters())[:-2]],
}


@pytest.mark.parametrize("name", STRANGERS)
def test_an_optimizer_of_other_tensors(name):
    model = make()
    optimizer = torch.optim.SGD(STRANGERS[name](model), lr=0.1)
    if name != "replaced layers":
        losses = train(model, optimizer)
        assert max(losses) - min(losses) < 1e-6  # nothing is learned, and nothing is said
    with pytest.raises(TrainingError, match="tensors that are not the model's parameters") as error:
        check_optimizers(model, [optimizer])
    assert "trainable parameters of the model: 6" in str(error.value)


def test_a_state_dict_loaded_with_assign():
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
    losses = train(model, optimizer)
    assert max(losses) - min(losses) < 1e-6
    with pytest.raises(TrainingError, match="assign=True"):
        check_optimizers(model, [optimizer])


def test_a_head_that_was_replaced_and_kept_out():
    model = make()
    optimizer = torch.optim.SGD(list(model.parameters())[:-2], lr=0.1)
    before = model[4].weight.detach().clone()
    train(model, optimizer)
    assert torch.equal(before, model[4].weight)  # it never moves, and nothing is said
    with pytest.raises(TrainingError, match=r"2 trainable parameters are held by no optimizer.*4.weight, 4.bias"):
        check_optimizers(model, [optimizer])
    model[4].requires_grad_(False)
    check_optimizers(model, [optimizer])


@pytest.mark.parametrize("precision", ["off", "bf16"])
def test_the_trainer_checks_its_optimizer(demo, tmp_path, precision):
    class Copied(DefaultTrainer):
        @classmethod
        def build_optimizer(cls, cfg, model):
            return super().build_optimizer(cfg, copy.deepcopy(model))

    with pytest.raises(TrainingError, match="not the model's parameters"):
        Copied(tiny.tiny_config(tmp_path, "SOLVER.AMP", precision)).train()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("guard", [True, False])
def test_one_overflowing_batch_and_the_running_statistics(dtype, guard):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = LossScaler(init_scale=8.0) if dtype == torch.float16 else None
    step = OptimizationStep(model, [optimizer], scaler=scaler, guard_buffers=guard)
    good, bad = torch.randn(8, 3, 8, 8), torch.full((8, 3, 8, 8), float("inf"))
    history = []
    for images in (good, bad, good):
        step.begin()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            logits = model(images).float()
        step.backward({"loss": nn.functional.cross_entropy(logits, torch.arange(8) % 2)})
        history.append((step.finish().ok, {name: b.clone() for name, b in model.named_buffers()}))
    assert [ok for ok, _ in history] == [True, False, True]
    assert all(torch.isfinite(p).all() for p in model.parameters())
    statistics = torch.cat([model[1].running_mean, model[1].running_var])
    if not guard:  # as plain PyTorch: the step was skipped, and every evaluation from now on is NaN
        assert not torch.isfinite(statistics).any()
        assert not torch.isfinite(model.eval()(good)).any()
        with pytest.raises(TrainingError, match=r"2 of the model's tensors are not finite, e.g. 1.running_mean"):
            check_finite(model)
        return
    check_finite(model)
    for name, kept in history[0][1].items():
        assert torch.equal(kept, history[1][1][name]), name
    assert torch.isfinite(model.eval()(good)).all()


class Poison(HookBase):
    """Makes a weight infinite after the last step of an epoch."""

    def __init__(self, epoch):
        self.epoch = epoch

    def after_step(self):
        if self.trainer.iter + 1 == self.epoch * self.trainer.iters_per_epoch:
            with torch.no_grad():
                self.trainer.model.heads.weight[0, 0] = float("inf")


@pytest.mark.parametrize("period", ["1", "4"])
def test_a_model_that_is_not_finite_is_neither_evaluated_nor_saved(demo, tmp_path, period):
    options = ("SOLVER.MAX_EPOCH", "4", "TEST.EVAL_PERIOD", period, "SOLVER.CHECKPOINT_PERIOD", "1")
    trainer = DefaultTrainer(tiny.tiny_config(tmp_path, *options))
    trainer.register_hooks([Poison(epoch=2)])
    with pytest.raises(TrainingError, match=r"heads.weight: it is neither evaluated nor saved"):
        trainer.train()
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000.pth"
    assert all(torch.isfinite(t).all() for t in tiny.weights(tmp_path / "model_0000.pth").values())


def test_bn_guard_by_key(demo, tmp_path, monkeypatch, capfd):
    """A batch that overflows, through the command line."""
    original = DefaultTrainer.build_train_loader.__func__

    def with_a_bad_batch(cls, cfg):
        loader = original(cls, cfg)
        fetch, calls = type(loader).__iter__, []

        class Loader(type(loader)):
            def __iter__(self):
                for batch in fetch(self):
                    calls.append(1)
                    if len(calls) == 3:
                        batch["images"] = batch["images"].float() * float("inf")
                    yield batch

        loader.__class__ = Loader
        return loader

    monkeypatch.setattr(DefaultTrainer, "build_train_loader", classmethod(with_a_bad_batch))
    options = ("SOLVER.MAX_EPOCH", "1", "SOLVER.AMP", "bf16")
    assert train_net.cli(tiny.tiny_options(tmp_path / "on", *options)) == 0
    assert all(torch.isfinite(t).all() for t in tiny.weights(tmp_path / "on/model_final.pth").values())
    assert train_net.cli(tiny.tiny_options(tmp_path / "off", *options, "SOLVER.AMP.BN_GUARD", "off")) == 2
    assert "running statistics took in an overflow" in capfd.readouterr().err
    assert not (tmp_path / "off/last_checkpoint").exists()
