"""FastReID's default trainer and predictor."""

import inspect
import logging
import time
from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch.optim import Optimizer

from fastamp.amp import PrecisionPolicy
from fastamp.config import CfgNode
from fastamp.data.build import with_num_categories, with_num_classes
from fastamp.engine import defaults, train_loop
from fastamp.engine.evaluation import EvaluationOutput, check_test_set
from fastamp.engine.hooks import BestMetric
from fastamp.engine.hooks import HookBase as CoreHook
from fastamp.engine.hooks import LRScheduler as ScheduleHook
from fastamp.engine.run_state import labels_checksum
from fastamp.engine.setup import default_setup
from fastamp.fastreid.data.build import build_reid_test_loader, build_reid_train_loader
from fastamp.fastreid.engine import hooks
from fastamp.fastreid.engine.train_loop import (
    AMPTrainer,
    HookBase,
    MethodsHook,
    Points,
    SimpleTrainer,
    StepMethods,
    TrainerBase,
    build_grad_scaler,
)
from fastamp.fastreid.evaluation.reid_evaluation import build_evaluator
from fastamp.fastreid.modeling.meta_arch.build import adapt, build_model
from fastamp.fastreid.overrides import overrides, warn_of_uncalled_methods
from fastamp.fastreid.solver import build_lr_scheduler, build_optimizer
from fastamp.fastreid.utils.checkpoint import Checkpointer
from fastamp.fastreid.utils.events import CommonMetricPrinter, EventStorage, RunStorage, RunWriter, is_active
from fastamp.modeling import adapt_to_training_set
from fastamp.utils import comm
from fastamp.utils.arguments import default_argument_parser
from fastamp.zoo import warn_of_differences, with_local_files

logger = logging.getLogger(__name__)

__all__ = [
    "AMPTrainer",
    "DefaultPredictor",
    "DefaultTrainer",
    "SimpleTrainer",
    "TrainerBase",
    "default_argument_parser",
    "default_setup",
]

_NEVER = {
    "_write_metrics": "override record_metrics of a trainer registered in TRAINER_REGISTRY",
    "_detect_anomaly": "losses and gradients that are not finite are skipped; see SOLVER.AMP",
}
"""Method of FastReID's trainers that is not called -> what to do instead."""


class DefaultTrainer(Points, defaults.DefaultTrainer):
    """Trainer with the methods, signatures and attributes of FastReID's, which a subclass may override.

    Hooks that derive from FastReID's ``HookBase`` have this trainer as ``trainer``. Attributes that are not found here
    are those of the training loop, e.g. ``iter``. The ``__init__`` of a subclass may build the model, the loader, the
    optimizer and ``_trainer`` itself, and call ``TrainerBase.__init__(self)``: ``build_hooks`` builds what is missing.
    It may also call ``super().__init__(cfg)``, and then assign another ``_trainer``.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        warn_of_uncalled_methods(cls, DefaultTrainer, _NEVER)

    def __init__(self, cfg: CfgNode) -> None:
        super().__init__(cfg)
        self._connect()

    def _connect(self) -> None:
        """Call the methods that a subclass overrides."""
        loop: Any = self.trainer
        own_loop = isinstance(loop, TrainerBase)
        self.storage: RunStorage = loop.storage if own_loop else RunStorage(loop)
        vars(self.storage).update(writers=self.writers)
        self.register_hooks([MethodsHook(self, Points)])
        if own_loop or overrides(type(self), "run_step", DefaultTrainer):
            vars(self.trainer)["run_step"] = self._run_own_step
            for optimizer in self.optimizers.values() if comm.is_distributed() else ():
                optimizer.register_step_pre_hook(average_gradients)

    def __getattr__(self, name: str) -> Any:
        if "trainer" not in vars(self):  # not built yet
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name == "start_epoch":  # first epoch of the run; above 0 after a resume
            return self.trainer.start_iter // self.trainer.iters_per_epoch
        if name in ("max_epoch", "max_iter"):
            return self.cfg.SOLVER.MAX_EPOCH * (1 if name == "max_epoch" else self.trainer.iters_per_epoch)
        return getattr(self.trainer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_trainer" and "trainer" in vars(self):
            self._complete()

    def _complete(self) -> None:
        """Build what the ``__init__`` of a subclass has not built for its ``_trainer``."""
        loop = vars(self)["_trainer"]
        model, loader, optimizers = loop.model, loop.data_loader, list(loop.optimizers)
        if type(loop) in (SimpleTrainer, AMPTrainer):  # with the options of the config
            kind = getattr(train_loop, type(loop).__name__)
            loop = kind.from_config(self.cfg, model=model, data_loader=loader, optimizers=optimizers)
        else:
            vars(loop)["train"] = partial(train_loop.SimpleTrainer.train, loop)  # from an iteration instead of an epoch

        def build_trainer() -> Any:
            vars(loop)["data_loader"] = self.data_loader
            loop.set_data(
                -(-self.data_loader.iters_per_epoch // loop.accum_steps),
                labels_checksum(self.data_loader),
                images_per_batch=self.cfg.SOLVER.IMS_PER_BATCH,
            )
            return loop

        given: dict[str, Any] = {
            "build_train_loader": lambda cfg: loader,
            "build_model": lambda cfg: model,
            "build_optimizers": lambda: {
                f"optimizer{number or ''}": optimizer for number, optimizer in enumerate(optimizers)
            },
            "build_trainer": build_trainer,
        }
        if "trainer" not in vars(self):
            given["build_hooks"] = list  # they are being built
        vars(self).update(given)
        super().__init__(self.cfg)
        for name in (*given, "_trainer"):
            del vars(self)[name]
        self._connect()

    @cached_property
    def _trainer(self) -> "_Loop":
        return _Loop(self.trainer, self.storage)

    def register_hooks(self, hooks_: Iterable[CoreHook | None]) -> None:
        """Register hooks; None is ignored."""
        added = [hook for hook in hooks_ if hook is not None]
        super().register_hooks(added)
        for hook in added:
            if isinstance(hook, HookBase):
                hook.trainer = self

    def train(self) -> dict[str, Any]:
        """Train and return the metrics of the last evaluation; see ``fastamp.engine.DefaultTrainer.train``."""
        with self.storage:
            return super().train()

    def build_writers(self) -> list[Any]:
        """Build the writers of the run; before the training, those for ``PeriodicWriter``, which pass on to them."""
        if is_active(vars(self).get("storage")):
            return super().build_writers()
        return [CommonMetricPrinter(self.max_iter), RunWriter(self.writers)]

    def open_writers(self) -> None:
        """Add the writers of the run, unless they are those of a ``PeriodicWriter`` that a subclass has registered."""
        own = any(isinstance(hook, hooks.PeriodicWriter) for hook in self._hooks)
        if not (own and overrides(type(self), "build_writers", DefaultTrainer)):
            super().open_writers()

    def run_step(self) -> None:
        """Run one iteration. An override may call it, or ``self._trainer.run_step()``, or compute the step itself."""
        self._trainer.run_step()

    def _run_own_step(self) -> None:
        """Call ``run_step`` of a subclass; record what the loop would have recorded if it has not been used."""
        loop, began = self.trainer, time.perf_counter()
        self._trainer.used = False
        self.run_step()
        if not self._trainer.used:
            vars(loop)["steps_taken"] += 1
            loop.metrics.average(time=time.perf_counter() - began, data_time=0.0)
            loop.metrics.latest(loss_scale=1.0, skipped_total=0, skipped_in_a_row=0)

    def build_checkpointer(self, parts: Mapping[str, Any] | None = None) -> Checkpointer:
        """Build the checkpointer, with FastReID's methods; see ``fastamp.engine.DefaultTrainer``."""
        checkpointer: Any = super().build_checkpointer(parts)
        checkpointer.__class__ = Checkpointer
        assert isinstance(checkpointer, Checkpointer)
        return checkpointer

    def build_hooks(self) -> list[CoreHook]:
        """Build the hooks; ``build_lr_scheduler`` of a subclass replaces the learning rate schedule."""
        if "trainer" not in vars(self):
            self._complete()
        built = super().build_hooks()
        if not overrides(type(self), "build_lr_scheduler", DefaultTrainer):
            return built
        scheduler = hooks.LRScheduler(self.optimizer, self.scheduler)
        return [scheduler if isinstance(hook, ScheduleHook) else hook for hook in built]

    @cached_property
    def scheduler(self) -> Any:
        """Result of ``build_lr_scheduler``."""
        arguments = (self.cfg, self.optimizer, self.trainer.iters_per_epoch)
        accepted = len(inspect.signature(self.build_lr_scheduler).parameters)  # 2 up to FastReID v1.0
        return self.build_lr_scheduler(*arguments[:accepted])

    @classmethod
    def build_lr_scheduler(cls, cfg: CfgNode, optimizer: Optimizer, iters_per_epoch: int) -> Any:
        """Build the schedulers; only used if a subclass overrides this method or reads ``scheduler``."""
        return build_lr_scheduler(cfg, optimizer, iters_per_epoch)

    @classmethod
    def build_model(cls, cfg: CfgNode) -> torch.nn.Module:
        """Build the model; see ``fastamp.fastreid.modeling.build_model``."""
        return adapt(super().build_model(cfg), cfg)

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: torch.nn.Module) -> Optimizer:
        """Build the optimizer, which can be unpacked as a pair; see ``fastamp.fastreid.solver.build_optimizer``."""
        return build_optimizer(cfg, model)

    def build_optimizers(self) -> dict[str, Optimizer]:
        """Build the optimizers; ``build_optimizer`` may return a tuple, whose first value is used."""
        built = super().build_optimizers().items()
        return {name: value[0] if isinstance(value, tuple) else value for name, value in built}

    @classmethod
    def auto_scale_hyperparams(cls, cfg: CfgNode, num_classes: int) -> CfgNode:
        """Return a frozen copy of ``cfg`` with ``MODEL.HEADS.NUM_CLASSES`` set to ``num_classes``.

        Raises:
            ConfigError: if ``MODEL.HEADS.NUM_CLASSES`` is set to a different number.
        """
        return with_num_classes(cfg, num_classes)

    @classmethod
    def build_run_config(cls, cfg: CfgNode, dataset: Any) -> CfgNode:
        """Return a copy of ``cfg`` with the keys that depend on the training set; see ``auto_scale_hyperparams``."""
        return with_num_categories(cls.auto_scale_hyperparams(*adapt_to_training_set(cfg, dataset)), dataset)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> Any:
        """Build the training loader; see ``build_reid_train_loader``."""
        return build_reid_train_loader(cfg)

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, dataset_name: str) -> Any:
        """Build a test loader; see ``build_reid_test_loader``. An override may return only the loader."""
        return build_reid_test_loader(cfg, dataset_name)

    @classmethod
    def _build_test_loaders(cls, cfg: CfgNode) -> dict[str, tuple[Any, int]]:
        loaders = {}
        for name, test in super()._build_test_loaders(cfg).items():
            loader, second = test if isinstance(test, tuple) else (test, 0)
            loaders[name] = loader, second if isinstance(second, int) else 0  # or labels for a custom evaluator
        return loaders

    @classmethod
    def build_evaluator(cls, cfg: CfgNode, dataset_name: str, output_dir: str | None = None) -> Any:  # type: ignore[override]
        """Build the test loader and the evaluator of a test set.

        Returns:
            ``(loader, evaluator)``.
        """
        loader, num_query = cls.build_test_loader(cfg, dataset_name)
        return loader, build_evaluator(cfg, num_query, output_dir)

    @classmethod
    def build_test(
        cls, cfg: CfgNode, name: str, test: tuple[Any, int], output_dir: str | None = None
    ) -> tuple[Any, Any]:
        """Return the loader and the evaluator of a test set; by ``build_evaluator`` if it is overridden."""
        if overrides(cls, "build_evaluator", DefaultTrainer):
            loader, evaluator = cls.build_evaluator(cfg, name, output_dir)
        else:
            loader, evaluator = test[0], build_evaluator(cfg, test[1], output_dir)
        check_test_set(cfg, name, loader, evaluator)
        return loader, evaluator

    def build_best_metric(self) -> BestMetric:
        """Parse ``SOLVER.BEST_METRIC``; the metrics of a ``test`` of a subclass are not known."""
        if overrides(type(self), "test", DefaultTrainer):
            return _BestMetric.by_name(self.cfg.SOLVER.BEST_METRIC, dict.fromkeys(self.test_loaders))
        metric = super().build_best_metric()
        return _BestMetric(metric.metric, metric.datasets, metric.meaning)

    def evaluate_loaders(self, policy: PrecisionPolicy, loaders: dict[str, tuple[Any, int]]) -> EvaluationOutput:
        """Evaluate the model on the test sets in ``loaders``; by ``test`` if a subclass overrides it."""
        if loaders is not self.test_loaders or not overrides(type(self), "test", DefaultTrainer):
            return super().evaluate_loaders(policy, loaders)
        results = _results_by_dataset(self.test(self.cfg, self.model), self.test_loaders)
        return EvaluationOutput(results if comm.is_main_process() else {})


class _BestMetric(BestMetric):
    """Metric that selects the best model, also if an evaluator does not report ``metric``: mAP, or its first number."""

    def of(self, results: Mapping[str, Mapping[str, Any]]) -> float:
        """Compute the mean of the metric over ``datasets``; see ``BestMetric.of``."""
        reported = [results[name] for name in self.datasets]
        if self.metric != "metric" or all("metric" in metrics for metrics in reported):
            return super().of(results)
        numbers = [name for name, value in reported[0].items() if isinstance(value, int | float)]
        metric = next((name for name in ("mAP", *numbers) if all(name in metrics for metrics in reported)), "metric")
        logger.info("the results have no 'metric': model_best.pth is selected by %s", metric)
        return BestMetric(metric, self.datasets, "").of(results)


def average_gradients(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Average the gradients over the ranks, for a custom step, whose model is not in DistributedDataParallel.

    A gradient that only some ranks have counts as 0 on the others. Every rank must call ``optimizer.step``.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.float32)
    present = comm.all_reduce_max(own.to(parameters[0].device)).tolist()
    used = [parameter for parameter, anywhere in zip(parameters, present, strict=True) if anywhere]
    if not used:
        return
    for parameter in used:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    gradients = [parameter.grad for parameter in used]
    total = comm.all_reduce_sum(torch.cat([gradient.flatten() for gradient in gradients])) / comm.get_world_size()
    for gradient, mean in zip(gradients, total.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


class _Loop(StepMethods):
    """FastReID's ``DefaultTrainer._trainer``: the training loop, with the attributes that steps of FastReID use.

    Args:
        loop: the training loop, whose attributes are those of this object.
        storage: storage of the run.

    Attributes:
        used: set by ``run_step``, to False if a subclass of FastReID's ``SimpleTrainer`` computes the step.
    """

    def __init__(self, loop: Any, storage: EventStorage) -> None:
        self._loop, self.storage, self.used = loop, storage, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def run_step(self) -> None:
        """Run one iteration of the training loop."""
        self.used = type(self._loop).run_step is train_loop.SimpleTrainer.run_step
        type(self._loop).run_step(self._loop)

    @property
    def optimizer(self) -> Optimizer:
        """The first optimizer."""
        return self._loop.optimizers[0]

    @cached_property
    def grad_scaler(self) -> Any:
        """PyTorch's loss scaler for a custom step."""
        return getattr(self._loop, "grad_scaler", None) or build_grad_scaler(self._loop.model)


def _results_by_dataset(results: Any, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Convert the return value of FastReID's ``test``: dataset name -> metrics; empty if there are no results."""
    if not results:
        return {}
    if not all(isinstance(metrics, Mapping) for metrics in results.values()):
        results = {next(iter(names)): results}
    numbers = (int, float)
    return {
        name: {
            metric: value.item() if hasattr(value, "item") else value
            for metric, value in metrics.items()
            if isinstance(value, numbers) or hasattr(value, "item") or isinstance(value, Mapping)
        }
        for name, metrics in results.items()
    }


class DefaultPredictor:
    """Model of a config with its weights, for features of preprocessed images.

    ``fastamp.Predictor`` reads image files, and has the same preprocessing and precision as an evaluation.

    Args:
        cfg: config with ``MODEL.WEIGHTS``.

    Attributes:
        cfg: config without pretraining.
        model: model in evaluation mode.
    """

    def __init__(self, cfg: CfgNode) -> None:
        warn_of_differences(cfg, evaluated=True)
        self.cfg = with_local_files(cfg.with_values({"MODEL.BACKBONE.PRETRAIN": False}))
        self.model = build_model(self.cfg).eval()
        Checkpointer(
            self.model,
            min_match=self.cfg.MODEL.WEIGHTS_MIN_MATCH,
            allow_missing=self.cfg.MODEL.WEIGHTS_ALLOW_MISSING,
        ).load(self.cfg.MODEL.WEIGHTS)

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """Compute the features of images (B, C, H, W) in 0..255, resized to ``INPUT.SIZE_TEST``: (B, D) float32."""
        with torch.no_grad():
            return self.model({"images": image.to(self.model.device)})
