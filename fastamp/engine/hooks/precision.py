"""What guards each step of a training: hooks that the trainer attaches by itself, whatever others it is given."""

import logging
import time
import weakref
from typing import Any

from torch import nn

from fastamp.amp import PrecisionFailure
from fastamp.amp.checks import check_communication
from fastamp.amp.device_errors import IN_TRAINING, explain_device_error
from fastamp.amp.policy import dtype_name
from fastamp.engine.hooks.base import HookBase
from fastamp.utils import comm
from fastamp.utils.errors import TrainingError

logger = logging.getLogger(__name__)


class PrecisionHook(HookBase):
    """The pre-flight on the first batch, the recording of batches, and the crash file or fallback when steps fail.

    The work is done by the trainer's ``precision_diagnostics``. Its ``on_failure`` is the dtype to continue in, once,
    after too many skipped steps in a row.
    """

    def __init__(self) -> None:
        self._preflight_done = False

    def before_train(self) -> None:
        # Checked here as well because subclasses may override run_step.
        self.trainer.precision_diagnostics.check(self.trainer.step, self.trainer.policy)
        self.trainer.precision_diagnostics.begin_recording()
        self._preflight_done = False

    def before_step(self) -> None:
        self.trainer.precision_diagnostics.begin_recording()

    def before_forward(self, batch: dict[str, Any]) -> None:
        trainer = self.trainer
        if not self._preflight_done:
            self._preflight_done = True
            trainer.step.check_overrides()
            start = time.perf_counter()
            diagnostics = trainer.precision_diagnostics
            policy = diagnostics.before_first_step(trainer.step, batch, trainer.policy, iteration=trainer.iter)
            trainer.set_policy(policy)
            trainer.exclude_time(time.perf_counter() - start)
        trainer.precision_diagnostics.remember(batch)

    def after_step(self) -> None:
        """Continue in another dtype where the config has one, and too many steps were skipped.

        These have changed neither weights nor statistics, so that the training continues from the last good state.
        """
        trainer = self.trainer
        try:
            trainer.precision_diagnostics.check_skips(trainer.step, trainer.policy, iteration=trainer.iter)
        except PrecisionFailure as failure:
            reason = f"fell back from {dtype_name(trainer.policy.dtype)} at iteration {trainer.iter}"
            fallback = trainer.policy.fall_back(trainer.on_failure, reason)
            if fallback is None:
                raise
            logger.warning("%s\nSOLVER.AMP.ON_FAILURE: going on in %s", failure, trainer.on_failure)
            trainer.set_policy(fallback)
            trainer.metrics.latest(skipped_in_a_row=0)


class ParallelChecks(HookBase):
    """Check the gradients of several processes when DDP has been made, at the start and after a freeze."""

    def __init__(self) -> None:
        self._checked: Any = lambda: None

    def before_train(self) -> None:
        self._checked = lambda: None

    def after_backward(self) -> None:
        """Check how gradients travel, and that the losses reach every parameter: DDP would wait for the others forever.

        Raises:
            TrainingError: they travel in float16 under a loss scale, or do not reach a trainable parameter.
        """
        if not comm.is_distributed():
            return
        parallel = self.trainer.parallel_model()
        if parallel is self._checked():
            return
        self._checked = weakref.ref(parallel)
        check_communication(parallel, scaled=self.trainer.step.scaler is not None)
        _check_all_reached(self.trainer.model)


def _check_all_reached(model: nn.Module) -> None:
    missing = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if missing:
        raise TrainingError(
            f"no loss reaches {len(missing)} trainable parameters, e.g. {', '.join(missing[:3])}, and with several "
            "processes each must get a gradient.\n"
            "  fix: name a loss in MODEL.LOSSES.NAME that reaches them, or train in one process"
        )


class DeviceErrors(HookBase):
    """Turn a device's error in a step, e.g. out of memory, into a message with shapes, cause and fix."""

    def __init__(self) -> None:
        self._batch: dict[str, Any] = {}

    def before_forward(self, batch: dict[str, Any]) -> None:
        self._batch = batch

    def after_step(self) -> None:
        self._batch = {}  # its memory is wanted

    def on_step_error(self, error: Exception) -> None:
        batch, self._batch = self._batch, {}
        explained = explain_device_error(error, f"iteration {self.trainer.iter}", batch, IN_TRAINING)
        if explained is not None:
            raise explained from error
