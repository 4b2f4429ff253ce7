"""The moments of a training at which hooks are called."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastamp.engine.train_loop import TrainerBase


class HookBase:
    """Something that happens at certain moments of training; ``self.trainer`` is the trainer that calls it.

    ::

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

    After a resume in the middle of an epoch, that epoch's ``before_epoch`` is called again. A trainer with a
    ``run_step`` of its own calls ``before_forward`` and ``after_backward`` if it wants to. A call of ``run_step``
    outside ``train`` has the moments within it, and ``on_step_error``.

    Attributes:
        saves: whether it saves the run. Such a hook has its turn after all others, whose states it saves too.
    """

    trainer: "TrainerBase"
    saves = False

    def before_train(self) -> None:
        """Before the first iteration."""

    def after_train(self) -> None:
        """After the last iteration; not after an error or an interruption."""

    def before_epoch(self) -> None:
        """Before the first iteration of an epoch."""

    def after_epoch(self) -> None:
        """After the last iteration of an epoch."""

    def before_step(self) -> None:
        """Before each iteration."""

    def after_step(self) -> None:
        """After each iteration."""

    def before_forward(self, batch: dict[str, Any]) -> None:
        """Before each forward pass, of which an iteration has several under gradient accumulation."""

    def after_backward(self) -> None:
        """After the last backward pass of an iteration, before its gradients are unscaled."""

    def on_step_error(self, error: Exception) -> None:
        """After an exception in ``run_step``; may raise another one that explains it, which is raised instead.

        Every hook is called with the original error; where several raise, the first one's is raised.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what the hook needs to continue after a resume, as tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
