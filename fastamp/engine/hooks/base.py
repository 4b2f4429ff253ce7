"""Base class of training hooks."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastamp.engine.train_loop import TrainerBase


class HookBase:
    """Base class of hooks: callbacks at fixed points of the training loop.

    Order of the calls:

        before_train()
        for each epoch:
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

    After a resume in the middle of an epoch, ``before_epoch`` is called again for that epoch. A trainer that overrides
    ``run_step`` must call ``before_forward`` and ``after_backward`` itself. Outside ``train``, ``run_step`` calls only
    ``before_forward``, ``after_backward`` and ``on_step_error``.

    Attributes:
        trainer: the trainer, set by ``register_hooks``.
        saves: whether the hook saves the state of the run. Such hooks are called last, so that they save the updated
            state of all other hooks. Default False.
    """

    trainer: "TrainerBase"
    saves = False

    def before_train(self) -> None:
        """Called before the first iteration."""

    def after_train(self) -> None:
        """Called after the last iteration. Not called after an error or an interruption."""

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
        """Called after an exception in ``run_step``; may raise a more specific error instead.

        Every hook is called with the original error. If several hooks raise an error, the first of these errors is
        raised.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in checkpoints, as tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned."""
