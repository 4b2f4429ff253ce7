"""The moments of a training at which hooks are called."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastamp.engine.train_loop import TrainerBase


class HookBase:
    """Something that happens at one of six moments of training; ``self.trainer`` is the trainer that calls it.

    ::

        before_train()
        for each epoch:
            before_epoch()
            for each iteration: before_step(), trainer.run_step(), after_step()
            after_epoch()
        after_train()

    After a resume in the middle of an epoch, that epoch's ``before_epoch`` is called again.

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

    def state_dict(self) -> dict[str, Any]:
        """Return what the hook needs to continue after a resume, as tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
