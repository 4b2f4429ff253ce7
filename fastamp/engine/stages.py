"""Stages of a training run: training loops that run one after the other."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fastamp.contracts import TrainLoader
from fastamp.engine.hooks.base import HookBase
from fastamp.engine.train_loop import SimpleTrainer
from fastamp.solver import OptimizerState
from fastamp.utils.plural import plural

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Stage:
    """Part of a training run.

    Attributes:
        name: name in the log and in checkpoints.
        trainer: training loop with the losses, batches and optimizers of the stage. Hooks that are registered with it,
            e.g. ``LRScheduler``, are called in this stage only.
        max_epoch: number of epochs.
        data_loader: loader of the stage, started at the first batch to train on. Default: None, that of the trainer.
            Required if the trainer has an iterator over it; ``prepare_epoch`` cannot restart an iterator.
    """

    name: str
    trainer: SimpleTrainer
    max_epoch: int
    data_loader: TrainLoader | None = None


class Stages:
    """Stages of a run, in order. The last one trains the model of the run; most runs have no other.

    A checkpoint has the state of the current stage, in which a resumed run continues.

    Args:
        stages: the stages. The optimizers of the last one are entries of the checkpoint of their own.

    Attributes:
        current: the stage that runs, or runs next.
        start_iter: first iteration to run, from the start of the run; above 0 after a resume.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages, self.current, self.start_iter = list(stages), stages[0], 0
        self._shared: list[HookBase] = []
        iterations = epochs = 0
        for stage in stages:
            name, trainer = stage.name if len(stages) > 1 else "", stage.trainer
            trainer.set_stage(name, iters_before=iterations, epochs_before=epochs, is_last=stage is stages[-1])
            trainer.move_to(0, stage.max_epoch)
            iterations, epochs = iterations + trainer.max_iter, epochs + stage.max_epoch

    def register_hooks(self, hooks: Iterable[HookBase]) -> None:
        """Register hooks with the last stage, and those with ``every_stage`` with all stages."""
        added = list(hooks)
        self._shared += [hook for hook in added if hook.every_stage]
        for stage in self._stages:
            stage.trainer.register_hooks(added if stage.trainer.is_last_stage else self._shared)

    def left(self) -> list[Stage]:
        """Return the stages to run: the current one and those after it; none if the run is complete."""
        trainer = self.current.trainer
        complete = trainer.is_last_stage and trainer.start_iter >= trainer.max_iter
        return [] if complete else self._stages[self._stages.index(self.current) :]

    def train(self, stage: Stage) -> None:
        """Run the iterations of a stage that are left."""
        self.current, trainer, start = stage, stage.trainer, stage.trainer.start_iter
        if len(self._stages) > 1:
            trainer.register_hooks(self._shared)  # sets their trainer
        loader = trainer.data_loader if stage.data_loader is None else stage.data_loader
        loader.start_at(trainer.batches_before(start))
        if start < trainer.max_iter:
            logger.info(
                "%straining %s of %s%s",
                f"{trainer.stage_name}: " if trainer.stage_name else "",
                plural(stage.max_epoch, "epoch"),
                plural(trainer.iters_per_epoch, "iteration"),
                f", from iteration {start + 1} of {trainer.max_iter}" if start else "",
            )
        trainer.train(start, stage.max_epoch, trainer.iters_per_epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the current stage, with its name and, before the last stage, its optimizers."""
        optimizers = {name: optimizer.state_dict() for name, optimizer in self._own_optimizers().items()}
        return self.current.trainer.state_dict() | {"stage": self.current.name, "stage_optimizers": optimizers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned.

        Raises:
            ValueError: if the run has no stage of the name, or its state does not match.
        """
        by_name = {stage.name: stage for stage in self._stages}
        if state["stage"] not in by_name:
            raise ValueError(
                f"the checkpoint was saved in the stage {state['stage']}, the run has {', '.join(by_name)}: "
                "SOLVER.TRAINER or the names of its stages changed"
            )
        self.current = by_name[state["stage"]]
        trainer = self.current.trainer
        trainer.load_state_dict(state)
        self.start_iter = trainer.iters_before + trainer.start_iter
        for name, optimizer in self._own_optimizers().items():
            optimizer.load_state_dict(state["stage_optimizers"][name])

    def _own_optimizers(self) -> dict[str, OptimizerState]:
        """Return the optimizers of the current stage, by number; none for the last stage."""
        trainer = self.current.trainer
        optimizers = [] if trainer.is_last_stage else trainer.optimizers
        return {str(number): OptimizerState(optimizer, trainer.model) for number, optimizer in enumerate(optimizers)}
