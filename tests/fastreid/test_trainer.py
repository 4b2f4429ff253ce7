"""Trainers in the style of FastReID: own schedulers, writers, evaluation, hooks and attributes."""

import json
import warnings
from collections import OrderedDict

import numpy as np
import pytest
import tiny
import torch

from fastamp.engine import DefaultTrainer as CoreTrainer
from fastamp.fastreid.config import get_cfg
from fastamp.fastreid.data import build_reid_test_loader
from fastamp.fastreid.engine import AMPTrainer, DefaultTrainer, HookBase, TrainerBase, hooks
from fastamp.fastreid.engine.defaults import average_gradients
from fastamp.fastreid.evaluation import DatasetEvaluator, inference_on_dataset
from fastamp.fastreid.solver import build_lr_scheduler
from fastamp.fastreid.utils.checkpoint import Checkpointer
from fastamp.fastreid.utils.events import EventWriter, JSONWriter, get_event_storage
from fastamp.utils import comm

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
    assert trainer._trainer.model is trainer.model and trainer._hooks
    assert set(trainer.scheduler) == {"lr_sched", "warmup_sched"}


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


class CopiedHooksTrainer(DefaultTrainer):
    """Trainer with a copy of the end of FastReID's ``build_hooks``."""

    def build_hooks(self):
        ret = [hooks.IterationTimer(), hooks.LRScheduler(self.optimizer, self.scheduler)]
        ret.append(hooks.EvalHook(self.cfg.TEST.EVAL_PERIOD, lambda: self.test(self.cfg, self.model)))
        ret.append(hooks.PeriodicWriter(self.build_writers(), 2))
        return ret


class CopiedWritersTrainer(CopiedHooksTrainer):
    def build_writers(self):
        return [JSONWriter(f"{self.cfg.OUTPUT_DIR}/metrics.json")]


@pytest.mark.parametrize("trainer_class", [CopiedHooksTrainer, CopiedWritersTrainer])
def test_periodic_writer_of_own_hooks_writes_the_metrics_once(trainer_class, cfg, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.json").write_text('{"iteration": 0, "total_loss": 1.0}\n')  # of an earlier run
    trainer = trainer_class(cfg)
    trainer.train()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.json").read_text().splitlines()]
    iterations = [row["iteration"] for row in rows if "total_loss" in row]
    assert iterations == list(range(1, trainer.max_iter, 2)) and "lr" in rows[0] and "mAP" in rows[-1]


def test_hooks_with_fastreids_arguments(cfg, tmp_path):
    trainer = HooksTrainer(cfg)
    trainer.train()
    assert trainer.seen == [False, False] + [True] * (trainer.max_iter - 2)
    assert trainer.storage.latest()["mAP"][0] > 0 and "total_loss" in trainer.lines.names[0]
    assert (tmp_path / "run" / "model_final.pth").exists()
    with pytest.raises(TypeError):
        hooks.CallbackHook(before_all=print)


class InnerStepTrainer(DefaultTrainer):
    """Trainer that changes nothing in the step, as written in FastReID's ``DefaultTrainer``."""

    def run_step(self):
        self.own_steps = getattr(self, "own_steps", 0) + 1
        self._trainer.iter = self.iter
        self._trainer.run_step()


class SuperStepTrainer(DefaultTrainer):
    def run_step(self):
        self.own_steps = getattr(self, "own_steps", 0) + 1
        super().run_step()


class OwnStepTrainer(DefaultTrainer):
    """Trainer with a custom step, written as in FastReID's ``SimpleTrainer``."""

    def run_step(self):
        self.own_steps = getattr(self, "own_steps", 0) + 1
        data = next(self._trainer._data_loader_iter)
        loss_dict = self.model(data)
        losses = sum(loss_dict.values())
        self.optimizer.zero_grad()
        losses.backward()
        self._trainer._write_metrics(loss_dict, 0.0)
        self.optimizer.step()


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("trainer_class", [InnerStepTrainer, SuperStepTrainer, OwnStepTrainer])
def test_overridden_run_step_is_called_in_each_iteration(trainer_class, amp, cfg, tmp_path):
    trainer = trainer_class(cfg.with_values({"SOLVER.AMP.ENABLED": amp, "SOLVER.MAX_EPOCH": 1}))
    weights = [parameter.clone() for parameter in trainer.model.parameters()]
    assert "mAP" in trainer.train()
    assert trainer.own_steps == trainer.max_iter == trainer.steps_taken
    assert len(trainer.storage.history("total_loss").values()) == trainer.max_iter
    assert not all(map(torch.equal, weights, trainer.model.parameters()))
    assert "total_loss" in (tmp_path / "run" / "metrics.json").read_text()


def test_hooks_have_the_default_trainer_as_trainer(cfg):
    class Images(HookBase):
        def after_step(self):
            self.trainer.found.append((self.trainer.cfg, self.trainer.model, self.trainer.optimizer))
            self.trainer.storage.put_image("batch", torch.rand(3, 8, 4))
            self.trainer.storage.put_image("mask", torch.zeros(1, 8, 4, dtype=torch.uint8))

    class Scaled(DefaultTrainer):
        @staticmethod
        def auto_scale_hyperparams(config, num_classes):
            config = config.clone()
            config.defrost()
            config.MODEL.HEADS.NUM_CLASSES = num_classes
            config.SOLVER.BASE_LR = 0.125
            config.freeze()
            return config

        def __init__(self, config):
            super().__init__(config)
            self.found = []
            self.register_hooks([None, Images()])

    trainer = Scaled(cfg.with_values({"SOLVER.MAX_EPOCH": 1}))
    shown = []

    class ImageWriter:
        def write(self, iteration, metrics):
            pass

        def write_image(self, iteration, tag, image):
            shown.append((iteration, tag, image.size, image.mode))

        def close(self):
            pass

    trainer.writers.append(ImageWriter())
    trainer.train()
    assert trainer.found == [(trainer.cfg, trainer.model, trainer.optimizer)] * trainer.max_iter
    assert trainer.cfg.SOLVER.BASE_LR == 0.125
    assert shown[:2] == [(0, "batch", (4, 8), "RGB"), (0, "mask", (4, 8), "RGB")]


def test_overridden_evaluation_of_eval_hook_is_called():
    class Report(hooks.EvalHook):
        def _do_eval(self):
            self.trainer.reported.append(hooks.flatten_results_dict(self._func()))

    class Loop(TrainerBase):
        reported = ()

        def run_step(self):
            self.storage.put_scalar("x", self.iter)

    loop = Loop()
    loop.reported = []
    loop.register_hooks([Report(2, lambda: {"A": {"mAP": 1.0}})])
    loop.train(0, 3, 2)
    assert loop.reported == [{"A/mAP": 1.0}] * 2


def test_methods_that_are_never_called_give_a_warning(subtests):
    cases = [
        (DefaultTrainer, "build_test_loaders", "build_test_loader"),
        (DefaultTrainer, "before_iter", "before_step"),
        (DefaultTrainer, "_detect_anomaly", "SOLVER.AMP"),
        (HookBase, "after_iter", "after_step"),
        (hooks.EvalHook, "after_epochs", "after_epoch"),
    ]
    for base, name, fix in cases:
        with subtests.test(name), pytest.warns(UserWarning, match=rf"Own\.{name}(.|\n)*fix:.*{fix}"):
            type("Own", (base,), {name: lambda self: None})
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        class Called(DefaultTrainer):
            def before_step(self):
                self.after_loading()

            def after_loading(self):
                pass

            def build_center_loss(self):
                pass

        class CalledHook(HookBase):
            def after_step(self):
                pass


class Pairs(torch.utils.data.Dataset):
    """Images without labels, which belong to one label per pair, as in FastFace."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return {"images": torch.full((3, 64, 32), float(index))}


class PairEvaluator(DatasetEvaluator):
    def __init__(self, cfg, labels, output_dir=None):
        self.labels = labels

    def reset(self):
        self.count = 0

    def process(self, inputs, outputs):
        self.count += len(outputs)

    def evaluate(self):
        return OrderedDict({"metric": 100.0 * (self.count == 2 * len(self.labels))})


class PairTrainer(DefaultTrainer):
    @classmethod
    def build_test_loader(cls, cfg, dataset_name):
        return build_reid_test_loader(cfg, test_set=Pairs())[0], np.array([0, 1, 1])

    @classmethod
    def build_evaluator(cls, cfg, dataset_name, output_dir=None):
        data_loader, labels = cls.build_test_loader(cfg, dataset_name)
        return data_loader, PairEvaluator(cfg, labels, output_dir)


def test_test_loader_with_labels_for_an_own_evaluator(cfg):
    trainer = PairTrainer(cfg)
    assert trainer.evaluate()["Demo"]["metric"] == 100.0
    assert trainer.data_loader.dataset.img_items[0][1] == "demo_1"


class AssembledTrainer(DefaultTrainer):
    """Trainer that builds its parts itself, as FastFace's."""

    loop = AMPTrainer

    def __init__(self, cfg):
        TrainerBase.__init__(self)
        loader = self.build_train_loader(cfg)
        self.cfg = cfg = self.auto_scale_hyperparams(cfg, loader.dataset.num_classes)
        model = self.build_model(cfg)
        optimizer, parameters = self.build_optimizer(cfg, model)
        self._trainer = self.loop(model, loader, optimizer, parameters)
        self.iters_per_epoch = len(loader.dataset) // cfg.SOLVER.IMS_PER_BATCH
        self.scheduler = self.build_lr_scheduler(cfg, optimizer, self.iters_per_epoch)
        self.checkpointer = Checkpointer(model, cfg.OUTPUT_DIR, optimizer=optimizer, **self.scheduler)
        self.start_epoch, self.max_epoch = 0, cfg.SOLVER.MAX_EPOCH
        self.register_hooks(self.build_hooks())

    def build_hooks(self):
        built = super().build_hooks()
        built.append(Rates())
        return built


class OwnLoop(AMPTrainer):
    """Loop with a custom step."""

    def run_step(self):
        losses = self.model(next(self._data_loader_iter))
        self.optimizer.zero_grad()
        sum(losses.values()).backward()
        self.optimizer.step()
        self._write_metrics(losses, 0.0)


def test_loop_with_an_own_step_is_run_by_the_default_trainer(cfg, tmp_path):
    class Trainer(AssembledTrainer):
        loop = OwnLoop

    trainer, losses = Trainer(cfg), []
    trainer.register_hooks([hooks.CallbackHook(after_step=lambda run: losses.append(run.storage.latest()["loss_cls"]))])
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.train()
    assert [iteration for _, iteration in losses] == list(range(trainer.max_iter)) and losses
    assert not all(map(torch.equal, before, trainer.model.parameters()))
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.json").read_text().splitlines()]
    assert any("total_loss" in row and "loss_cls" in row for row in rows)


def test_checkpointer_of_the_trainer_has_the_methods_of_fastreid(cfg):
    checkpointer = DefaultTrainer(cfg).checkpointer
    assert not checkpointer.has_checkpoint() and checkpointer.get_checkpoint_file() == ""
    checkpointer.save("model_0000")
    assert checkpointer.has_checkpoint() and checkpointer.get_checkpoint_file().endswith("model_0000.pth")
    assert "versions" in checkpointer.resume_or_load("", resume=True)


class ScaledLoop(AMPTrainer):
    """Loop with the step of FastReID's ``AMPTrainer``."""

    def run_step(self):
        losses = self.model(next(self._data_loader_iter))
        self.optimizer.zero_grad()
        self.grad_scaler.scale(sum(losses.values())).backward()
        self._write_metrics({**losses, "loss_scaled": losses["loss_cls"]}, 0.0)
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()


def test_loop_assigned_after_the_construction_is_used(cfg):
    class Trainer(DefaultTrainer):
        def __init__(self, cfg):
            super().__init__(cfg)
            self._trainer = ScaledLoop(self._trainer.model, self._trainer.data_loader, self._trainer.optimizer)

        def build_hooks(self):
            return [*super().build_hooks(), Rates()]

    trainer, losses = Trainer(cfg), []
    assert sum(isinstance(hook, Rates) for hook in trainer._hooks) == 1
    trainer.register_hooks(
        [hooks.CallbackHook(after_step=lambda run: losses.append(run.storage.latest()["loss_scaled"]))]
    )
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    assert trainer.train()["mAP"] > 0
    assert [iteration for _, iteration in losses] == list(range(trainer.max_iter)) and losses
    assert not all(map(torch.equal, before, trainer.model.parameters()))


def test_gradients_of_an_own_step_are_averaged_over_the_ranks(monkeypatch):
    monkeypatch.setattr(comm, "all_reduce_sum", lambda value: value + 3)  # of a second rank whose gradient is 3
    monkeypatch.setattr(comm, "get_world_size", lambda: 2)
    layer = torch.nn.Linear(1, 1)
    layer.weight.grad = torch.ones(1, 1)
    average_gradients(torch.optim.SGD(layer.parameters(), lr=1.0), (), {})
    assert layer.weight.grad.item() == 2 and layer.bias.grad is None
    monkeypatch.setattr(comm, "all_reduce_max", torch.ones_like)  # the second rank also has a gradient of the bias
    average_gradients(torch.optim.SGD(layer.parameters(), lr=1.0), (), {})
    assert layer.weight.grad.item() == 2.5 and layer.bias.grad.item() == 1.5


def test_all_optimizers_of_an_own_loop_are_stored_in_checkpoints(cfg):
    class TwoOptimizers(AssembledTrainer):
        def build_optimizer(self, cfg, model):
            weights, others = list(model.heads.parameters()), list(model.backbone.parameters())
            return [torch.optim.SGD(weights, lr=0.1), torch.optim.SGD(others, lr=0.1)], None

        def build_lr_scheduler(self, cfg, optimizer, iters_per_epoch):
            return build_lr_scheduler(cfg, optimizer[0] if isinstance(optimizer, list) else optimizer, iters_per_epoch)

    trainer = TwoOptimizers(cfg)
    assert {"optimizer", "optimizer1"} <= trainer.checkpoint_parts().keys() and len(trainer.optimizers) == 2


def test_own_step_of_the_default_trainer_has_a_loss_scaler(cfg):
    assert DefaultTrainer(cfg)._trainer.grad_scaler.scale(torch.tensor(2.0)) == 2


def test_attribute_that_is_read_too_early_is_named(cfg):
    class Trainer(DefaultTrainer):
        def __init__(self, cfg):
            self.model.train()

    with pytest.raises(AttributeError, match="'model'"):
        Trainer(cfg)


def test_trainer_that_builds_its_parts_trains_and_resumes_like_the_default(cfg):
    weights = []
    for number, trainer_class in enumerate((DefaultTrainer, AssembledTrainer)):
        for epochs, resume in ((1, False), (2, True)):
            torch.manual_seed(0)
            values = {"SOLVER.MAX_EPOCH": epochs, "OUTPUT_DIR": f"{cfg.OUTPUT_DIR}{number}", "SOLVER.AMP.ENABLED": True}
            trainer = trainer_class(cfg.with_values(values))
            trainer.resume_or_load(resume)
            trainer.train()
        weights.append(trainer.model.state_dict())
    own_hooks = [hook for hook in trainer._hooks if isinstance(hook, Rates)]
    assert len(own_hooks) == 1 and len(own_hooks[0].rates) == trainer.max_iter - trainer.start_iter > 0
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items()) and weights[0]


class PlainEvaluator(DatasetEvaluator):
    """Evaluator without a result ``metric``, as PartialReID's."""

    def reset(self):
        self.images = 0

    def process(self, inputs, outputs):
        self.images += len(outputs)

    def evaluate(self):
        return {"Rank-1": 20.0, "mAP": float(self.images)}


class PlainTrainer(DefaultTrainer):
    @classmethod
    def build_evaluator(cls, cfg, dataset_name, output_dir=None):
        return cls.build_test_loader(cfg, dataset_name)[0], PlainEvaluator()


def test_best_model_of_an_evaluator_without_metric_is_selected_by_map(cfg):
    trainer = PlainTrainer(cfg)
    results = trainer.train()
    assert results["Rank-1"] == 20 and trainer.eval_hook.best == results["mAP"] > 0


def test_hook_of_all_stages_has_the_default_trainer(cfg):
    class Saver(hooks.PeriodicCheckpointer):
        def after_epoch(self):
            assert self.trainer.cfg is trainer.cfg
            super().after_epoch()

    trainer = DefaultTrainer(cfg)
    trainer.register_hooks([Saver(trainer.checkpointer, 1)])
    trainer.train()


def test_length_of_an_epoch_is_that_which_build_trainer_sets(cfg):
    class Short(CoreTrainer):
        def build_trainer(self):
            trainer = super().build_trainer()
            trainer.set_data(3)
            return trainer

    assert Short(cfg).trainer.iters_per_epoch == 3
