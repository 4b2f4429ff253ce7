"""Hooks of every trainer: precision diagnostics, DDP checks and device errors."""

import logging
import time
import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from fastamp.amp import PrecisionFailure
from fastamp.amp.checks import check_communication, check_replicas
from fastamp.amp.device_errors import IN_TRAINING, explain_device_error
from fastamp.amp.policy import dtype_name
from fastamp.engine.hooks.base import HookBase, Priority
from fastamp.utils import comm
from fastamp.utils.errors import TrainingError

if TYPE_CHECKING:
    from fastamp.engine.train_loop import SimpleTrainer

logger = logging.getLogger(__name__)


class PrecisionHook(HookBase):
    """Check the model with the trainer's ``precision_diagnostics`` before each epoch, and after too many skipped steps.

    After too many skipped steps, the trainer's ``on_failure`` determines whether training continues in another dtype,
    at most once per run, or raises ``PrecisionFailure``.
    """

    trainer: "SimpleTrainer"
    priority = Priority.VERY_HIGH

    def before_epoch(self) -> None:
        # Hooks and custom code may have replaced a module, converted parameters, or loaded weights.
        self.trainer.precision_diagnostics.check(self.trainer.step, self.trainer.policy)

    def after_step(self) -> None:
        """After too many skipped steps, switch to the dtype in ``on_failure`` or raise ``PrecisionFailure``.

        Skipped steps change neither weights nor batch-norm statistics, so training continues from a valid state.
        """
        trainer = self.trainer
        try:
            trainer.precision_diagnostics.check_skips(trainer.step, trainer.policy, iteration=trainer.iter)
        except PrecisionFailure as failure:
            reason = f"fell back from {dtype_name(trainer.policy.dtype)} at iteration {trainer.iter + 1}"
            fallback = trainer.policy.fall_back(trainer.on_failure, reason)
            if fallback is None:
                raise
            logger.warning("%s\n  continuing in %s (SOLVER.AMP.ON_FAILURE)", failure, trainer.on_failure)
            trainer.set_policy(fallback)
            trainer.metrics.latest(skipped_in_a_row=0)


class PreflightHook(HookBase):
    """Run the pre-flight check on the first batch, and record the batches of each step for a replay.

    Its priority is VERY_LOW because other hooks may modify the batch before the model receives it.
    """

    trainer: "SimpleTrainer"
    priority = Priority.VERY_LOW

    def __init__(self) -> None:
        self._done = False

    def before_train(self) -> None:
        self._done = False

    def before_step(self) -> None:
        self.trainer.precision_diagnostics.begin_recording()

    def before_forward(self, batch: dict[str, Any]) -> None:
        trainer, diagnostics = self.trainer, self.trainer.precision_diagnostics
        if not self._done:
            self._done = True
            start = time.perf_counter()
            policy = diagnostics.before_first_step(trainer.step, batch, trainer.policy, iteration=trainer.iter)
            trainer.set_policy(policy)
            trainer.exclude_time(time.perf_counter() - start)
        diagnostics.record(batch)


class ParallelChecks(HookBase):
    """Check that all ranks train the same model.

    Gradients are checked once per DDP instance: at the start, and after layers have been frozen or unfrozen. Parameters
    and the names of the losses are checked after each epoch.
    """

    trainer: "SimpleTrainer"
    priority = Priority.VERY_HIGH

    def __init__(self) -> None:
        self._checked: Any = lambda: None

    def before_train(self) -> None:
        self._checked = lambda: None

    def after_backward(self) -> None:
        """Check the dtype of the gradient all-reduce, and that every trainable parameter has a gradient.

        If a gradient were missing, DDP would hang.

        Raises:
            TrainingError: if scaled gradients are communicated in float16, or a trainable parameter has no gradient.
        """
        if not comm.is_distributed():
            return
        parallel = self.trainer.parallel_model()
        if parallel is self._checked():
            return
        self._checked = weakref.ref(parallel)
        check_communication(parallel, scaled=self.trainer.step.scaler is not None)
        _check_all_reached(self.trainer.model)

    def after_epoch(self) -> None:
        check_replicas(self.trainer.model, self.trainer.step.loss_names)


def _check_all_reached(model: nn.Module) -> None:
    missing = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if missing:
        raise TrainingError(
            f"{len(missing)} trainable parameters have no gradient, e.g. {', '.join(missing[:3])}; training with "
            "several processes requires a gradient for every trainable parameter.\n"
            "  fix: add a loss that depends on these parameters to MODEL.LOSSES.NAME, or train in one process"
        )


class DeviceErrors(HookBase):
    """Replace device errors in a step, e.g. out-of-memory errors, with errors that state the batch shapes and a fix."""

    priority = Priority.VERY_HIGH

    def __init__(self) -> None:
        self._batch: dict[str, Any] = {}

    def before_forward(self, batch: dict[str, Any]) -> None:
        self._batch = batch

    def after_step(self) -> None:
        self._batch = {}  # release the memory

    def on_step_error(self, error: Exception) -> None:
        batch, self._batch = self._batch, {}
        explained = explain_device_error(error, f"iteration {self.trainer.iter + 1}", batch, IN_TRAINING)
        if explained is not None:
            raise explained from error
