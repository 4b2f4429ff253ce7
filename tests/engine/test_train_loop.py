"""Training loop: hooks, overfitting of one batch, updates of all parameters, skipped steps."""

import itertools
import time
from dataclasses import dataclass

import pytest
import tiny
import torch
from torch import nn

from fastamp.amp import LossScaler, PrecisionFailure, PrecisionPolicy
from fastamp.diagnostics.precision_diagnostics import PrecisionDiagnostics
from fastamp.engine import TRAINER_REGISTRY, HookBase, Priority, SimpleTrainer, TrainerBase
from fastamp.engine.hooks import LRScheduler
from fastamp.modeling import build_model
from fastamp.solver import build_lr_schedule, build_optimizer
from fastamp.utils.errors import TrainingError

PRECISIONS = ["off", "bf16", "fp16"]
FLOAT32 = PrecisionPolicy("cpu", torch.float32, "test")


class Recorder(HookBase):
    def __init__(self):
        self.calls = []

    def __getattribute__(self, name):
        if name.startswith(("before_", "after_")):
            trainer = self.trainer
            return lambda: self.calls.append((name, trainer.epoch, trainer.iter))
        return super().__getattribute__(name)


class Counting(TrainerBase):
    def run_step(self):
        pass


def test_hook_methods_are_called_in_documented_order():
    trainer, recorder = Counting(), Recorder()
    trainer.register_hooks([recorder])
    trainer.train(start_iter=0, max_epoch=2, iters_per_epoch=2)
    step = ["before_step", "after_step"]
    epoch = ["before_epoch", *step, *step, "after_epoch"]
    assert [name for name, _, _ in recorder.calls] == ["before_train", *epoch, *epoch, "after_train"]
    assert [(e, i) for name, e, i in recorder.calls if name == "before_step"] == [(0, 0), (0, 1), (1, 2), (1, 3)]


def test_resume_within_an_epoch_calls_before_epoch():
    trainer, recorder = Counting(), Recorder()
    trainer.register_hooks([recorder])
    trainer.train(start_iter=3, max_epoch=2, iters_per_epoch=2)
    assert [name for name, _, _ in recorder.calls] == [
        "before_train", "before_epoch", "before_step", "after_step", "after_epoch", "after_train",
    ]  # fmt: skip


class Batches:
    """Loader of numbered batches, the number of the data and its own, with an iterator that has loaded one more."""

    iters_per_epoch = 3

    def __init__(self):
        self.data, self.starts = 0, []

    def start_at(self, batch):
        self.starts.append(batch)

    def __iter__(self):
        return iter([(self.data, number) for number in range(self.starts[-1], 9)])


@pytest.mark.parametrize("start", [0, 4])
def test_loader_restarts_after_prepare_epoch_has_changed_the_data(start):
    class Relabeling(SimpleTrainer):
        def prepare_epoch(self):
            assert self.epoch == self.iter // 3
            self.data_loader.data = self.epoch
            return self.epoch != 2

        def run_step(self):
            seen.append(self.next_batch())

    model, seen = nn.Linear(1, 1), []
    trainer = Relabeling(model, Batches(), [torch.optim.SGD(model.parameters())], policy=FLOAT32)
    trainer.train(start, 3, 3)
    assert seen == [(min(number // 3, 1), number) for number in range(start, 9)]
    assert trainer.data_loader.starts == ([0, 3] if start == 0 else [4])


def test_hooks_that_are_equal_are_registered_both_and_each_once():
    @dataclass
    class Counting(HookBase):
        count: int = 0

        def before_train(self):
            self.count += 1

    hooks, trainer = [Counting(), Counting()], TrainerBase()
    for _ in range(2):
        trainer.register_hooks(hooks)
    trainer.train(0, 0, 1)
    assert [hook.count for hook in hooks] == [1, 1]


def test_hooks_of_the_same_class_have_separate_states():
    class Stateful(HookBase):
        value = 0

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            self.value = state["value"]

    trainer, other = Counting(), Counting()
    trainer.register_hooks([Stateful(), Stateful()])
    other.register_hooks([Stateful(), Stateful()])
    trainer._hooks[0].value, trainer._hooks[1].value = 1, 2
    other.load_state_dict(trainer.state_dict())
    assert [hook.value for hook in other._hooks] == [1, 2]


class RecordCalls(HookBase):
    """Hook that records the names of its called methods and the error passed to ``on_step_error``."""

    def __init__(self):
        self.calls, self.error = [], None

    def before_step(self):
        self.calls.append("before_step")

    def before_forward(self, batch):
        self.calls.append(f"before_forward {batch['number']}")

    def after_backward(self):
        assert all(p.grad is not None for p in self.trainer.model.parameters())
        self.calls.append("after_backward")

    def after_step(self):
        assert all(p.grad is None for p in self.trainer.model.parameters())
        self.calls.append("after_step")

    def on_step_error(self, error):
        self.error = error


def test_clipping_rule_can_be_replaced_after_construction():
    trainer, norms = explosive_trainer([{"number": 0}]), []
    trainer.step.clip = lambda tensors, total_norm: norms.append(total_norm) or total_norm
    trainer.train(0, 1, 1)
    assert len(norms) == 1


def test_hooks_registered_during_training_are_called():
    class Registering(HookBase):
        def after_step(self):
            if self.trainer.iter == 1:
                self.trainer.register_hooks([moments])

    moments, trainer = RecordCalls(), explosive_trainer([{"number": n} for n in range(3)])
    trainer.register_hooks([Registering()])
    trainer.train(0, 1, 3)
    assert moments.calls == ["before_step", "before_forward 2", "after_backward", "after_step"]


def test_before_forward_is_called_for_each_accumulated_batch():
    moments = RecordCalls()
    trainer = explosive_trainer([{"number": 0}, {"number": 1}], accum_steps=2)
    trainer.register_hooks([moments])
    trainer.train(0, 1, 1)
    inside = ["before_forward 0", "before_forward 1", "after_backward"]
    assert moments.calls == ["before_step", *inside, "after_step"] and moments.error is None


def test_error_in_a_step_is_passed_to_hooks():
    moments = RecordCalls()
    trainer = explosive_trainer([{"number": 0}])
    trainer.register_hooks([moments])
    with pytest.raises(StopIteration):
        trainer.train(0, 1, 2)
    assert isinstance(moments.error, StopIteration) and trainer.iter == 1


def test_error_raised_by_a_hook_replaces_the_step_error():
    class Explain(HookBase):
        def on_step_error(self, error):
            raise TrainingError("the batches have ended") from error

    trainer = explosive_trainer([])
    trainer.register_hooks([Explain()])
    with pytest.raises(TrainingError, match="have ended"):
        trainer.train(0, 1, 1)


def test_trainer_state_dict_excludes_hooks_without_state():
    class Stateful(HookBase):
        def state_dict(self):
            return {"value": 0}

    trainer = explosive_trainer([{"number": 0}])
    trainer.register_hooks([RecordCalls(), Stateful(), Stateful()])
    assert trainer.state_dict()["hooks"] == {"Stateful": {"value": 0}, "Stateful.1": {"value": 0}}


def test_hooks_are_called_by_priority_then_in_the_order_of_registration():
    class Named(HookBase):
        def __init__(self, name, priority):
            self.name, self.priority = name, priority

        def after_step(self):
            calls.append(self.name)

    calls, trainer = [], explosive_trainer([{}])
    trainer.register_hooks([Named("last", Priority.LOW + 1), Named("first", Priority.NORMAL)])
    trainer.register_hooks([Named("before", -1), Named("second", Priority.NORMAL), Named("third", Priority.LOW)])
    trainer.train(0, 1, 1)
    assert calls == ["before", "first", "second", "third", "last"]


def test_step_time_includes_hooks_but_not_the_preflight(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class Slow(HookBase):
        def before_forward(self, batch):
            now[0] += 5

    class SlowPreflight(PrecisionDiagnostics):
        def before_first_step(self, step, batch, policy, *, iteration=0):
            now[0] += 100
            return policy

    trainer = explosive_trainer([{}], precision_diagnostics=SlowPreflight())
    trainer.model.register_forward_hook(lambda *_: now.append(now.pop() + 1))
    trainer.register_hooks([Slow()])
    trainer.train(0, 1, 1)
    assert trainer.metrics.flush()["time"] == 6


class OutOfMemory(HookBase):
    def after_backward(self):
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("loop", ["train", "run_step"])
def test_each_hook_receives_a_step_error_once_and_first_replacement_is_raised(loop):
    class Count(HookBase):
        errors = ()

        def on_step_error(self, error):
            self.errors += (error,)
            raise TrainingError("another explanation")

    trainer, count = explosive_trainer([{"images": torch.zeros(2, 3, 4, 4)}]), Count()
    trainer.register_hooks([OutOfMemory(), count])
    with pytest.raises(TrainingError, match="memory") as raised:
        trainer.train(0, 1, 1) if loop == "train" else trainer.run_step()
    assert [type(error) for error in count.errors] == [torch.OutOfMemoryError]
    assert raised.value.__cause__ is count.errors[0]


def bad_trainer(**options):
    model = Explosive(bad=set(range(100)))
    optimizers = [torch.optim.SGD(model.parameters(), 0.1)]
    return SimpleTrainer(model, itertools.repeat({}), optimizers, policy=FLOAT32, max_consecutive_skips=3, **options)


def test_run_step_outside_train_raises_after_too_many_skips():
    trainer = bad_trainer()
    for _ in range(3):
        trainer.run_step()
    with pytest.raises(PrecisionFailure, match="SOLVER.AMP.MAX_CONSECUTIVE_SKIPS"):
        trainer.run_step()


def test_overridden_run_step_raises_after_too_many_skips():
    class CustomTrainer(SimpleTrainer):
        def run_step(self):
            self.step.zero_grad()
            self.step.scale(self.model({})).backward()
            gradients = self.step.unscale()
            self.step.check_finite(gradients)
            self.step.skip()

    model = Explosive(bad=set(range(100)))
    optimizers = [torch.optim.SGD(model.parameters(), 0.1)]
    trainer = CustomTrainer(model, [], optimizers, policy=FLOAT32, max_consecutive_skips=3)
    with pytest.raises(PrecisionFailure):
        trainer.train(0, 1, 9)
    assert trainer.iter == 3


def test_run_step_outside_train_calls_the_hooks_of_a_step():
    moments, trainer = RecordCalls(), explosive_trainer([{"number": 0}])
    trainer.register_hooks([moments])
    trainer.run_step()
    assert moments.calls == ["before_step", "before_forward 0", "after_backward", "after_step"]


def test_precision_diagnostics_and_on_failure_can_be_replaced_after_construction():
    trainer = bad_trainer()
    assert trainer.on_failure == "error"
    checked = []

    class CustomTrainer(PrecisionDiagnostics):
        def check_skips(self, step, policy, *, iteration):
            checked.append(iteration)

    trainer.precision_diagnostics = CustomTrainer()
    trainer.train(0, 1, 2)
    assert checked == [0, 1]
    trainer = bad_trainer()
    trainer.policy, trainer.on_failure = PrecisionPolicy("cpu", torch.bfloat16, "test"), "float32"
    trainer._autocast_checked = True
    for _ in range(4):
        trainer.run_step()
    assert trainer.policy.dtype == torch.float32 and trainer.step.skipped_in_a_row == 0


def test_only_batches_of_the_current_step_are_recorded():
    """``run_step`` does not advance ``iter``, and ``train`` is called twice."""
    diagnostics = PrecisionDiagnostics(trace_nonfinite=True)
    model = Explosive(bad=set())
    optimizers = [torch.optim.SGD(model.parameters(), 0.1)]
    trainer = SimpleTrainer(
        model,
        itertools.repeat({}),
        optimizers,
        policy=FLOAT32,
        accum_steps=2,
        precision_diagnostics=diagnostics,
    )
    for _ in range(3):
        trainer.run_step()
        assert len(diagnostics._micro_batches) == 2
    for _ in range(2):
        trainer.train(0, 1, 1)
        assert len(diagnostics._micro_batches) == 2


def test_recorded_batch_includes_changes_by_before_forward_hooks():
    class Replace(HookBase):
        def before_forward(self, batch):
            batch["number"] = 7

    trainer = explosive_trainer([{"number": 0}], precision_diagnostics=PrecisionDiagnostics(trace_nonfinite=True))
    trainer.register_hooks([Replace()])
    trainer.train(0, 1, 1)
    assert [micro_batch.batch for micro_batch in trainer.precision_diagnostics._micro_batches] == [{"number": 7}]


def explosive_trainer(batches, **options):
    model = Explosive(bad=set())
    optimizers = [torch.optim.SGD(model.parameters(), 0.1)]
    return SimpleTrainer(model, batches, optimizers, policy=FLOAT32, **options)


def fixed_batch():
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (8, 3, 64, 32), dtype=torch.uint8, generator=generator)
    return {"images": images, "targets": torch.arange(8) // 2}


def make(tmp_path, precision, *opts):
    cfg = tiny.tiny_config(tmp_path, "SOLVER.AMP", precision, "MODEL.HEADS.NUM_CLASSES", "4", *opts)
    cfg.SOLVER.AMP.INIT_SCALE = 1024.0
    torch.manual_seed(0)
    model = build_model(cfg)
    model.backbone[3].p = 0.0
    return TRAINER_REGISTRY.build(
        "AMPTrainer" if cfg.SOLVER.AMP else "SimpleTrainer",
        cfg,
        model=model,
        data_loader=itertools.repeat(fixed_batch()),
        optimizers=[build_optimizer(cfg, model)],
    )


@pytest.mark.parametrize("precision", PRECISIONS)
def test_training_overfits_one_batch_and_updates_every_parameter(tmp_path, precision):
    trainer = make(tmp_path, precision, "SOLVER.BASE_LR", "0.01")
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train(0, 1, 1)
    first = trainer.metrics.flush()
    trainer.train(1, 80, 1)
    trainer.metrics.flush()
    trainer.train(80, 81, 1)
    last = trainer.metrics.flush()
    assert last["loss_cls"] < 0.2 * first["loss_cls"]
    assert last["total_loss"] == pytest.approx(last["loss_cls"] + last["loss_triplet"], rel=1e-5)
    assert trainer.steps_taken == 81 and last["skipped_total"] == 0
    unmoved = [name for name, p in trainer.model.named_parameters() if name in before and torch.equal(before[name], p)]
    assert unmoved == []
    assert torch.equal(trainer.model.heads.bottleneck[0].bias, torch.zeros(tiny.WIDTH))  # frozen


def test_amp_training_matches_float32(tmp_path):
    losses = {}
    for precision in PRECISIONS:
        trainer = make(tmp_path, precision)
        history = []
        for i in range(10):
            trainer.train(i, i + 1, 1)
            history.append(trainer.metrics.flush()["total_loss"])
        losses[precision] = torch.tensor(history)
    torch.testing.assert_close(losses["fp16"], losses["off"], rtol=0.02, atol=0.0)
    torch.testing.assert_close(losses["bf16"], losses["off"], rtol=0.1, atol=0.0)
    assert not torch.equal(losses["bf16"], losses["off"])  # negative control: the precision differs


class Explosive(nn.Module):
    """Model whose loss is NaN in the calls whose numbers, from 0, are in ``bad``."""

    def __init__(self, bad):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.bad = bad
        self.calls = 0

    def forward(self, batch):
        factor = float("nan") if self.calls in self.bad else 1.0
        self.calls += 1
        return {"loss": (self.weight * factor).square().sum()}


def test_skipped_steps_are_excluded_from_metrics_and_warmup(tmp_path):
    model = Explosive(bad={1, 2})
    optimizer = torch.optim.SGD([{"params": model.parameters(), "base_lr": 1.0}], lr=1.0)
    cfg = tiny.tiny_config(tmp_path, "SOLVER.WARMUP_ITERS", "4")
    rates = []

    class Rates(HookBase):
        def after_step(self):
            rates.append(optimizer.param_groups[0]["lr"])

    scaler = LossScaler(init_scale=16.0)
    trainer = SimpleTrainer(model, itertools.repeat({}), [optimizer], policy=FLOAT32, scaler=scaler)
    trainer.register_hooks([LRScheduler(build_lr_schedule(cfg, 100)), Rates()])
    trainer.train(0, 1, 5)
    metrics = trainer.metrics.flush()
    assert rates == pytest.approx([0.1, 0.325, 0.325, 0.325, 0.55])
    assert trainer.steps_taken == 3
    assert metrics["skipped_total"] == 2 and metrics["skipped_in_a_row"] == 0 and metrics["loss_scale"] == 4.0
    assert metrics["grad_norm"] == metrics["grad_norm"] and metrics["loss"] == metrics["loss"]  # no NaN


def test_amp_that_has_no_effect_on_the_model_raises(tmp_path):
    model = Explosive(bad=set())
    policy = PrecisionPolicy("cpu", torch.bfloat16, "test")
    trainer = SimpleTrainer(model, itertools.repeat({}), [torch.optim.SGD(model.parameters(), 0.1)], policy=policy)
    with pytest.raises(TrainingError, match="bfloat16"):
        trainer.train(0, 1, 1)


def test_lr_schedule_uses_the_learning_rate_of_a_custom_optimizer(tmp_path):
    model = Explosive(bad=set())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = SimpleTrainer(model, itertools.repeat({}), [optimizer], policy=FLOAT32)
    cfg = tiny.tiny_config(tmp_path, "SOLVER.WARMUP_ITERS", "0")
    trainer.register_hooks([LRScheduler(build_lr_schedule(cfg, 100))])
    trainer.train(0, 1, 2)
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.cuda
@pytest.mark.parametrize("precision", PRECISIONS)
def test_training_overfits_one_batch_on_cuda(tmp_path, precision):
    trainer = make(tmp_path, precision, "SOLVER.BASE_LR", "0.01", "MODEL.DEVICE", "cuda")
    trainer.train(0, 80, 1)
    trainer.metrics.flush()
    trainer.train(80, 81, 1)
    assert trainer.metrics.flush()["loss_cls"] < 0.5
