"""Trainers in the style of FastReID: own schedulers, writers, evaluation, hooks and attributes."""

import json
from collections import OrderedDict

import pytest
import tiny
import torch
from fastamp.fastreid.engine import DefaultTrainer, HookBase, hooks
from fastamp.fastreid.utils.events import JSONWriter

from fastamp.fastreid.config import get_cfg
from fastamp.fastreid.evaluation import inference_on_dataset
from fastamp.fastreid.events import EventWriter, get_event_storage
from fastamp.fastreid.solver import build_lr_scheduler

pytestmark = pytest.mark.integration


@pytest.fixture
def cfg(demo, tmp_path):
    config = get_cfg()
    config.merge_from_list(tiny.tiny_options(tmp_path / "run", "SOLVER.MAX_EPOCH", "2", "TEST.EVAL_PERIOD", "1"))
    config.SOLVER.WARMUP_ITERS = 0
    return config


class Rates(HookBase):
    """Hook that records the learning rate of each step."""

    def __init__(self):
        self.rates = []

    def before_step(self):
        self.rates.append(self.trainer.optimizer.param_groups[0]["lr"])


def rates_of(trainer_class, cfg, resume=False):
    trainer = trainer_class(cfg)
    hook = Rates()
    trainer.register_hooks([hook])
    trainer.resume_or_load(resume)
    trainer.train()
    return hook.rates


class StepTrainer(DefaultTrainer):
    @classmethod
    def build_lr_scheduler(cls, cfg, optimizer, iters_per_epoch):
        return {"lr_sched": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)}


class OldTrainer(DefaultTrainer):
    @classmethod
    def build_lr_scheduler(cls, cfg, optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)


class SameTrainer(DefaultTrainer):
    @classmethod
    def build_lr_scheduler(cls, cfg, optimizer, iters_per_epoch):
        return build_lr_scheduler(cfg, optimizer, iters_per_epoch)


@pytest.mark.parametrize("trainer", [StepTrainer, OldTrainer])
def test_own_scheduler_sets_the_learning_rate_and_is_resumed(trainer, cfg):
    rates = rates_of(trainer, cfg.with_values({"SOLVER.MAX_EPOCH": 3}))
    steps = len(rates) // 3
    assert rates == pytest.approx([1e-3] * steps + [1e-4] * steps + [1e-5] * steps)
    cfg.OUTPUT_DIR += "-2"
    rates_of(trainer, cfg.with_values({"SOLVER.MAX_EPOCH": 2}))
    resumed = rates_of(trainer, cfg.with_values({"SOLVER.MAX_EPOCH": 3}), resume=True)
    assert resumed == pytest.approx([1e-5] * steps)


def test_schedulers_of_build_lr_scheduler_equal_the_schedule(cfg):
    values = {"SOLVER.WARMUP_ITERS": 3, "SOLVER.STEPS": (1,), "SOLVER.GAMMA": 0.5, "SOLVER.MAX_EPOCH": 3}
    cfg = cfg.with_values(values)
    expected = rates_of(DefaultTrainer, cfg)
    assert rates_of(SameTrainer, cfg) == pytest.approx(expected) and len(set(expected)) > 3


class Lines(EventWriter):
    """Writer of FastReID's storage."""

    def __init__(self):
        self.names = []

    def write(self):
        self.names.append(set(get_event_storage().latest()))


class WriterTrainer(DefaultTrainer):
    def build_writers(self):
        self.lines = Lines()
        return [JSONWriter(f"{self.cfg.OUTPUT_DIR}/own.json"), self.lines]


def test_own_writers_without_parameter(cfg, tmp_path):
    trainer = WriterTrainer(cfg)
    trainer.train()
    rows = [json.loads(line) for line in (tmp_path / "run" / "own.json").read_text().splitlines()]
    assert any("total_loss" in row for row in rows) and any("Demo/mAP" in row for row in rows)
    assert {"lr", "time", "Demo/mAP"} <= trainer.lines.names[-1]


class TestTrainer(DefaultTrainer):
    __test__ = False
    calls = 0

    @classmethod
    def test(cls, cfg, model):
        cls.calls += 1
        loader, evaluator = cls.build_evaluator(cfg, cfg.DATASETS.TESTS[0])
        results = inference_on_dataset(model, loader, evaluator, flip_test=cfg.TEST.FLIP.ENABLED)
        return OrderedDict({"mine": torch.tensor(7.0), "metric": float(cls.calls), "mAP": results["mAP"], "of": "x"})


def test_own_method_test_is_called_in_training(cfg, tmp_path):
    TestTrainer.calls = 0
    results = TestTrainer(cfg).train()
    assert TestTrainer.calls == 2 and results["mine"] == 7 and "of" not in results
    best = torch.load(tmp_path / "run" / "model_best.pth", weights_only=True)["best"]
    assert best["value"] == 2.0
    assert '"Demo/mine": 7.0' in (tmp_path / "run" / "metrics.json").read_text()


def test_attributes_of_the_trainer(cfg):
    trainer = DefaultTrainer(cfg)
    assert (trainer.start_iter, trainer.start_epoch, trainer.max_epoch) == (0, 0, 2)
    assert trainer.max_iter == 2 * trainer.iters_per_epoch > 2
    assert (
        trainer._trainer is trainer.trainer
        and trainer._hooks
        and set(trainer.scheduler)
        == {
            "lr_sched",
            "warmup_sched",
        }
    )


class HooksTrainer(DefaultTrainer):
    """Trainer with the list of hooks that FastReID's ``build_hooks`` returns."""

    def build_hooks(self):
        self.seen = []
        self.lines = Lines()
        return [
            hooks.IterationTimer(),
            hooks.LRScheduler(self.optimizer, self.scheduler),
            hooks.PreciseBN(self.model, self.build_train_loader(self.cfg), 2),
            hooks.LayerFreeze(self.model, ["backbone"], 2),
            hooks.CallbackHook(
                before_step=lambda trainer: self.seen.append(next(self.model.backbone.parameters()).requires_grad)
            ),
            hooks.PeriodicCheckpointer(self.checkpointer, self.cfg.SOLVER.CHECKPOINT_PERIOD),
            hooks.EvalHook(self.cfg.TEST.EVAL_PERIOD, lambda: self.test(self.cfg, self.model)),
            hooks.PeriodicWriter([self.lines], 1),
        ]


def test_hooks_with_fastreids_arguments(cfg, tmp_path):
    trainer = HooksTrainer(cfg)
    trainer.train()
    assert trainer.seen == [False, False] + [True] * (trainer.max_iter - 2)
    assert trainer.storage.latest()["mAP"][0] > 0 and "total_loss" in trainer.lines.names[0]
    assert (tmp_path / "run" / "model_final.pth").exists()
    with pytest.raises(TypeError):
        hooks.CallbackHook(before_all=print)
