"""Base class of training hooks."""

from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastamp.engine.trainer_base import TrainerBase


class Priority(IntEnum):
    """Priorities of hooks, as in MMEngine: the lower the number, the earlier a hook is called."""

    VERY_HIGH = 0
    HIGH = 10
    ABOVE_NORMAL = 30
    NORMAL = 50
    BELOW_NORMAL = 70
    LOW = 90
    VERY_LOW = 100


class HookBase:
    """Base class of hooks: callbacks at fixed points of the training loop.

    At each point, the hooks are called by ``priority``. Order of the points, in each stage of the run:

        before_train()
        for each epoch:
            trainer.prepare_epoch()
            before_epoch()
            for each iteration:
                before_step()
                trainer.run_step():
                    for each batch: before_forward(batch), forward and backward pass
                    after_backward()
                    optimizer step, or skip
                after_step()
            after_epoch()
        after_train()
        close()

    After a resume in the middle of an epoch, ``before_epoch`` is called again for that epoch. A trainer that overrides
    ``run_step`` must call ``before_forward`` and ``after_backward`` itself. Outside ``train``, ``run_step`` calls the
    points from ``before_step`` to ``after_step``.

    Attributes:
        trainer: the trainer, set by ``register_hooks``.
        priority: number, see ``Priority``, read by ``register_hooks``. The checks of the trainer are VERY_HIGH. Hooks
            that save the state of the run are LOW, so that they save the updated state of the others. Default NORMAL.
        every_stage: whether ``DefaultTrainer.register_hooks`` adds the hook to all stages of the run; else, only to the
            last. Default False.
    """

    trainer: "TrainerBase"
    priority: int = Priority.NORMAL
    every_stage = False

    def before_train(self) -> None:
        """Called before the first iteration of a stage."""

    def after_train(self) -> None:
        """Called after the last iteration of a stage. Not called after an error or an interruption."""

    def close(self) -> None:
        """Called at the end of a stage, also after an error or an interruption since ``before_train``."""

    def before_epoch(self) -> None:
        """Called before the first iteration of an epoch."""

    def after_epoch(self) -> None:
        """Called after the last iteration of an epoch."""

    def before_step(self) -> None:
        """Called before each iteration."""

    def after_step(self) -> None:
        """Called after each iteration."""

    def before_forward(self, batch: dict[str, Any]) -> None:
        """Called before each forward pass; several times per iteration under gradient accumulation."""

    def after_backward(self) -> None:
        """Called after the last backward pass of an iteration, before the gradients are unscaled."""

    def on_step_error(self, error: Exception) -> None:
        """Called after an exception in ``run_step``, instead of ``after_step``; may raise a more specific error.

        It is not called after an exception in ``after_step`` of a hook, e.g. ``PrecisionFailure``.
        Every hook is called with the original error. If several hooks raise an error, the first of these errors is
        raised.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in checkpoints, as tensors and plain values. Default: empty, which is not saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned."""
