"""Training runs in which an optimizer receives no gradient, in plain PyTorch and in fastamp."""

import itertools

import loops
import pytest
import tiny
import torch
from torch import nn

from fastamp.amp import OptimizationStep
from fastamp.engine import DefaultTrainer
from fastamp.engine.hooks import FreezeLayers, HookBase
from fastamp.utils.errors import ConfigError, TrainingError

NO_INF_CHECKS = "No inf checks were recorded for this optimizer"


# No optimizer receives a gradient: frozen parameters, losses without a path to the parameters, cleared gradients.


def detached(loss, other):
    return loss.detach()


def detached_and_required(loss, other):
    return loss.detach().requires_grad_()


def rewrapped(loss, other):
    return torch.tensor(loss.item(), requires_grad=True)


def of_another_model(loss, other):
    return other(loops.make_batch())["loss_cls"]


class Spoiled(loops.Net):
    """Net that returns ``spoil(loss, other_net)`` instead of its loss, or, if ``beside``, as a second loss."""

    def __init__(self, spoil, beside=False):
        super().__init__()
        self.spoil, self.beside = spoil, beside
        self.others = [loops.make_net()]  # in a list, so that it is not a submodule

    def losses(self, logits, batch):
        losses = super().losses(logits, batch)
        spoiled = self.spoil(losses["loss_cls"] * 2, self.others[0])
        return losses | {"loss_new": spoiled} if self.beside else {"loss_new": spoiled}


REQUIRING = [detached_and_required, rewrapped, of_another_model]


@pytest.mark.failure("loss that does not depend on the model")
def test_loss_that_does_not_depend_on_the_model_raises(subtests):
    for dtype, spoil in itertools.product(loops.ALL, [detached, *REQUIRING]):
        with subtests.test(dtype=dtype, spoil=spoil):
            model = loops.make_net(Spoiled, spoil=spoil)
            before = loops.values(model)
            for scaler, message in ((None, None), (loops.plain_scaler(), NO_INF_CHECKS)):
                if spoil is detached:  # PyTorch raises, without the name of the loss
                    with pytest.raises(RuntimeError, match="element 0 of tensors does not require grad"):
                        loops.plain_step(model, loops.sgd(model), loops.make_batch(), dtype, scaler)
                elif message:
                    with pytest.raises(AssertionError, match=message):
                        loops.plain_step(model, loops.sgd(model), loops.make_batch(), dtype, scaler)
                else:
                    loops.plain_step(model, loops.sgd(model), loops.make_batch(), dtype)  # without an error
            assert loops.same(before, loops.values(model))

            with pytest.raises(TrainingError, match="'loss_new'") as error:
                loops.train(model, [loops.sgd(model)], dtype)
            found = {
                detached: "requires_grad is False",
                detached_and_required: "leaf tensor",
                rewrapped: "leaf tensor",
                of_another_model: "autograd graph",
            }
            assert found[spoil] in str(error.value)


@pytest.mark.failure("loss that does not depend on the model")
def test_second_loss_that_does_not_depend_on_the_model_raises(subtests):
    for dtype, spoil in itertools.product(loops.ALL, [detached, *REQUIRING]):
        with subtests.test(dtype=dtype, spoil=spoil):
            for scaler in (None, loops.plain_scaler()):
                model, reference = loops.make_net(Spoiled, spoil=spoil, beside=True), loops.make_net()
                for net in (model, reference):
                    for _ in range(3):
                        loops.plain_step(net, loops.sgd(net), loops.make_batch(), dtype, scaler)
                # plain PyTorch ignores the second loss without an error
                assert loops.same(loops.values(model), loops.values(reference))

            with pytest.raises(TrainingError, match="'loss_new'"):
                loops.train(model, [loops.sgd(model)], dtype)


@pytest.mark.failure("loss that does not depend on the model")
@pytest.mark.parametrize("spoil", [detached, *REQUIRING])
def test_loss_that_becomes_detached_after_the_first_steps_raises(spoil):
    """Only the first steps trace the autograd graph; the error must be raised without this trace too."""

    class Later(HookBase):
        def before_step(self):
            model.spoil = spoil if self.trainer.iter == 6 else lambda loss, other: loss

    model = loops.make_net(Spoiled, spoil=None)
    with pytest.raises(TrainingError, match="'loss_new'" if spoil is detached else NO_INF_CHECKS) as error:
        loops.train(model, [loops.sgd(model)], torch.bfloat16, steps=8, hooks=[Later()])
    if spoil is not detached:
        assert "0 with a gradient" in str(error.value)


@pytest.mark.failure("frozen model or optimizer")
@pytest.mark.parametrize("dtype", loops.ALL)
def test_training_a_completely_frozen_model_raises(dtype):
    frozen = loops.make_net().requires_grad_(False)
    for scaler in (None, loops.plain_scaler()):
        with pytest.raises(RuntimeError, match="does not require grad"):
            loops.plain_step(frozen, loops.sgd(frozen), loops.make_batch(), dtype, scaler)

    with pytest.raises(TrainingError, match="'loss_cls'"):
        loops.train(frozen, [loops.sgd(frozen)], dtype)
    model = loops.make_net()
    freeze = FreezeLayers(model, ["body", "head"], iterations=2)
    with pytest.raises(TrainingError, match=r"\(loss_cls\)[\s\S]*MODEL.FREEZE_LAYERS \(body, head\)"):
        loops.train(model, [loops.sgd(model)], dtype, hooks=[freeze])


@pytest.mark.failure("frozen model or optimizer")
@pytest.mark.parametrize("dtype", loops.ALL)
def test_optimizer_that_holds_only_frozen_parameters_raises(dtype):
    """The optimizer holds the frozen head but not the trainable body."""

    def make():
        model = loops.make_net()
        return model, loops.sgd(model.head.requires_grad_(False))

    model, optimizer = make()
    assert len({loops.plain_step(model, optimizer, loops.make_batch(), dtype) for _ in range(3)}) == 1
    with pytest.raises(AssertionError, match=NO_INF_CHECKS):
        loops.plain_step(model, optimizer, loops.make_batch(), dtype, loops.plain_scaler())

    model, optimizer = make()
    with pytest.raises(TrainingError, match=r"body.0.weight"):
        loops.train(model, [optimizer], dtype)


@pytest.mark.failure("frozen model or optimizer")
def test_step_error_names_parameters_if_optimizer_holds_only_frozen_ones():
    model = loops.make_net()
    step = OptimizationStep(model, [loops.sgd(model.head.requires_grad_(False))])
    step.scale(model(loops.make_batch())).backward()
    with pytest.raises(TrainingError) as error:
        step.finish()
    assert "all parameters in the optimizer are frozen, e.g. head.weight" in str(error.value)


@pytest.mark.failure("frozen model or optimizer")
def test_default_trainer_rejects_completely_frozen_model(demo, tmp_path):
    class Frozen(DefaultTrainer):
        @classmethod
        def build_model(cls, cfg):
            return super().build_model(cfg).requires_grad_(False)

    with pytest.raises(ConfigError, match="requires_grad"):
        Frozen(tiny.tiny_config(tmp_path))


@pytest.mark.failure("gradients cleared before the step")
@pytest.mark.parametrize("dtype", loops.ALL)
def test_clearing_gradients_before_the_step_raises(dtype):
    model = loops.make_net()
    optimizer = loops.sgd(model)
    before = loops.values(model)
    for scaler in (None, loops.plain_scaler()):
        with loops.autocast(dtype):
            loss = model(loops.make_batch())["loss_cls"]
        (scaler.scale(loss) if scaler else loss).backward()
        optimizer.zero_grad()
        if scaler:
            with pytest.raises(AssertionError, match=NO_INF_CHECKS):
                scaler.step(optimizer)
        else:
            optimizer.step()
        assert loops.same(before, loops.values(model))

    trainer = loops.make_trainer(model, [optimizer], [loops.make_batch()], dtype)
    unscale = trainer.step.unscale
    trainer.step.unscale = lambda: (optimizer.zero_grad(), unscale())[1]
    with pytest.raises(TrainingError, match=r"zero_grad\(\)") as error:
        trainer.train(0, 1, 1)
    assert NO_INF_CHECKS in str(error.value)
    assert "4 of them in the optimizer, 0 with a gradient" in str(error.value)


# A second optimizer without gradients in some steps.


class Alternating(loops.Net):
    """Net with a second head that contributes a loss only in every second forward pass."""

    def __init__(self):
        super().__init__()
        self.second = nn.Linear(16, 4)
        self.calls = 0

    def forward(self, batch):
        losses = super().forward(batch)
        self.calls += 1
        if self.calls % 2 == 0:
            logits = self.second(self.body(batch["images"])).float()
            losses["loss_second"] = nn.functional.cross_entropy(logits, batch["targets"])
        return losses


def two_optimizers(model):
    first = torch.optim.Adam([*model.body.parameters(), *model.head.parameters()], lr=0.01)
    return [first, torch.optim.Adam(model.second.parameters(), lr=0.01, weight_decay=0.1)]


@pytest.mark.failure("second optimizer without gradients")
@pytest.mark.parametrize("dtype", loops.LOW)
def test_plain_pytorch_scaler_fails_if_one_optimizer_has_no_gradients(dtype):
    model = loops.make_net(Alternating)
    optimizers, scaler = two_optimizers(model), loops.plain_scaler()
    with loops.autocast(dtype):
        loss = sum(model(loops.make_batch()).values())
    scaler.scale(loss).backward()
    scaler.step(optimizers[0])
    with pytest.raises(AssertionError, match=NO_INF_CHECKS):
        scaler.step(optimizers[1])


@pytest.mark.failure("second optimizer without gradients")
@pytest.mark.parametrize("dtype", loops.ALL)
def test_optimizer_without_gradients_does_not_step(dtype):
    class Record(HookBase):
        def after_step(self):
            history.append(loops.values(model))

    model = loops.make_net(Alternating)
    history = [loops.values(model)]
    optimizers = two_optimizers(model)
    stepped = []
    for optimizer in optimizers:
        optimizer.register_step_post_hook(lambda optimizer, *_: stepped.append(optimizers.index(optimizer)))
    loops.train(model, optimizers, dtype, steps=4, hooks=[Record()])
    assert stepped == [0, 0, 1, 0, 0, 1]
    moved = [[not torch.equal(a[name], b[name]) for a, b in itertools.pairwise(history)]
             for name in ("body.0.weight", "head.weight", "second.weight")]  # fmt: skip
    assert moved == [[True] * 4, [True] * 4, [False, True, False, True]]


@pytest.mark.failure("Inf in the gradients of one of two optimizers")
def test_all_optimizers_skip_the_step_if_one_gradient_is_infinite():
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizers, scaler = [torch.optim.SGD([p], lr=0.1) for p in (a, b)], loops.plain_scaler()
    scaler.scale((a * 2 + b * float("inf")).sum()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert a.item() != 1.0 and b.item() == 1.0  # one optimizer steps, the other skips

    a.data.fill_(1.0)
    for optimizer in optimizers:
        optimizer.zero_grad()
    step = OptimizationStep(nn.ParameterDict({"a": a, "b": b}), optimizers)
    step.scale({"loss": (a * 2 + b * float("inf")).sum()}).backward()
    assert not step.finish().ok and a.item() == b.item() == 1.0
    step.scale({"loss": (a * 2 + b).sum()}).backward()
    assert step.finish().ok and a.item() == pytest.approx(0.8) and b.item() == pytest.approx(0.9)
