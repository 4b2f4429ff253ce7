"""Training loop over epochs and iterations."""

import itertools
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fastamp.engine.hooks.base import HookBase
from fastamp.report import ClusterSheets
from fastamp.utils import comm
from fastamp.utils.events import MetricStore

if TYPE_CHECKING:
    from fastamp.engine.stages import Stage

logger = logging.getLogger(__name__)


class TrainerBase:
    """Training loop over epochs and iterations that calls hooks. Subclasses implement ``run_step``.

    Attributes:
        iter: current iteration, from 0.
        epoch: current epoch, from 0.
        start_iter: first iteration to run; above 0 after a resume.
        max_iter: total number of iterations.
        iters_per_epoch: number of iterations in an epoch.
        labels_checksum: CRC32 of the training labels, verified on resume; None disables the check.
        images_per_batch: number of images in a batch, on all ranks.
        step_seconds, data_seconds: time of the last step, and the part of it spent waiting for its batches, in seconds.
        processes: number of training processes.
        metrics: metrics of the current log period.
        rank_maxima: numbers that hooks such as ``StopOnSignal`` register. Their maxima over all ranks are computed in
            the all-reduce of the verdict.
        earlier_stages: stages of the run before this loop. Default: none.
        stage_name: name of this stage; empty if the run has no other.
        iters_before, epochs_before: number of iterations and of epochs of the run before this stage.
        is_last_stage: whether the run ends with this stage.
    """

    def __init__(self) -> None:
        self._hooks: list[HookBase] = []
        self._in_step = False
        self.iter = self.start_iter = self.max_iter = 0
        self.epoch = self.max_epoch = 0
        self.iters_per_epoch = 1
        self.labels_checksum: int | None = None
        self.processes = comm.get_world_size()
        self.metrics = MetricStore()
        self.rank_maxima = comm.RankMaxima()
        self.images_per_batch = 0
        self.step_seconds = self.data_seconds = 0.0
        self.earlier_stages: list[Stage] = []
        self.set_stage("", iters_before=0, epochs_before=0, is_last=True)

    def register_hooks(self, hooks: Iterable[HookBase]) -> None:
        """Add hooks that are not registered yet, and set their ``trainer``.

        They are called by ``priority``, and hooks of the same priority in the order of registration.
        """
        added = list(hooks)
        for hook in added:
            hook.trainer = self
        by_id = {id(hook): hook for hook in [*self._hooks, *added]}  # a hook may be equal to another one
        self._hooks = sorted(by_id.values(), key=lambda hook: hook.priority)

    def set_data(self, iters_per_epoch: int, labels_checksum: int | None = None, *, images_per_batch: int = 0) -> None:
        """Set the attributes that depend on the training set: see the class. The first two are verified on resume."""
        self.iters_per_epoch, self.labels_checksum = iters_per_epoch, labels_checksum
        self.images_per_batch = images_per_batch

    def set_stage(self, name: str, *, iters_before: int, epochs_before: int, is_last: bool) -> None:
        """Set the place of this loop among the stages of the run; see the attributes of the class."""
        self.stage_name, self.is_last_stage = name, is_last
        self.iters_before, self.epochs_before = iters_before, epochs_before

    def move_to(self, iteration: int, max_epoch: int) -> None:
        """Set ``iter`` and ``epoch`` for ``iteration``, and ``max_iter`` to the length of ``max_epoch`` epochs."""
        self.max_epoch, self.max_iter = max_epoch, max_epoch * self.iters_per_epoch
        self.iter, self.epoch = iteration, iteration // self.iters_per_epoch

    def train(self, start_iter: int, max_epoch: int, iters_per_epoch: int) -> None:
        """Run iterations ``start_iter`` to ``max_epoch * iters_per_epoch - 1``."""
        self.start_iter, self.iters_per_epoch = start_iter, iters_per_epoch
        self.move_to(start_iter, max_epoch)
        self.call_hooks("before_train")
        try:
            for iteration in range(start_iter, self.max_iter):
                self.move_to(iteration, max_epoch)
                if self.iter == start_iter or self.iter % iters_per_epoch == 0:
                    if self.prepare_epoch():
                        self.restart_loader()
                    self.call_hooks("before_epoch")
                self.rank_maxima.discard()  # run_step may be overridden and compute no verdict
                with self.step_context():
                    self.run_step()
                if (self.iter + 1) % iters_per_epoch == 0:
                    self.call_hooks("after_epoch")
            self.call_hooks("after_train")
        finally:
            self.call_hooks("close")

    def prepare_epoch(self) -> bool:
        """Prepare the data of the current epoch, e.g. pseudo labels; called before ``before_epoch`` of the hooks.

        It is called again for an epoch in which the run was resumed.

        Returns:
            True if the batches of the epoch differ from those that workers may have loaded in advance: the loader is
            then started again, at the batch of the current iteration. Default False.
        """
        return False

    def restart_loader(self) -> None:
        """Start the loader again at the batch of the current iteration. This class has no loader."""

    def run_step(self) -> None:
        """Run one iteration."""
        raise NotImplementedError

    def cluster_sheets(self) -> ClusterSheets | None:
        """Return the clusters of the training images for the report. Default: None, a training with labels."""
        return None

    def batches_before(self, iteration: int) -> int:
        """Return the number of batches consumed before ``iteration``. This class uses one batch per iteration."""
        return iteration

    def call_hooks(self, moment: str, *args: Any) -> None:
        """Call the method named ``moment``, e.g. ``"after_step"``, of every hook."""
        for hook in self._hooks:
            getattr(hook, moment)(*args)

    @contextmanager
    def step_context(self) -> Iterator[None]:
        """Return a context manager for one step, which calls ``before_step``, and ``after_step`` or ``on_step_error``.

        A context nested in another one has no effect. Both ``train`` and ``run_step`` enter the context, because a
        subclass may override either of them.
        """
        if self._in_step:
            yield
            return
        self.call_hooks("before_step")
        self._in_step = True
        try:
            yield
        except Exception as error:
            self._notify_error(error)
            raise
        finally:
            self._in_step = False
        self.call_hooks("after_step")

    def _notify_error(self, error: Exception) -> None:
        """Call ``on_step_error`` of every hook, then raise the first error that a hook raised, if any."""
        first = None
        for hook in self._hooks:
            try:
                hook.on_step_error(error)
            except Exception as other:
                if first is not None:
                    logger.warning("%s.on_step_error also raised an error: %s", type(hook).__name__, other)
                first = first or other
        if first is not None:
            raise first

    def state_dict(self) -> dict[str, Any]:
        """Return the next iteration, the states of the hooks, and the values that are verified on resume."""
        return {
            "iteration": self.iter + 1,
            "iters_per_epoch": self.iters_per_epoch,
            "processes": self.processes,
            "labels_checksum": self.labels_checksum,
            "hooks": {name: state for name, hook in self._hooks_by_name() if (state := hook.state_dict())},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state``, a return value of ``state_dict``. All hooks must already be registered.

        Raises:
            ValueError: if the number of iterations per epoch or the training labels have changed.
        """
        if state["iters_per_epoch"] != self.iters_per_epoch:
            raise ValueError(
                f"the number of iterations per epoch changed from {state['iters_per_epoch']} to "
                f"{self.iters_per_epoch}: SOLVER.IMS_PER_BATCH, SOLVER.ACCUM_STEPS or the training data changed"
            )
        before = state["labels_checksum"]
        if before is not None and self.labels_checksum is not None and before != self.labels_checksum:
            raise ValueError(
                "the labels of the training images differ from those in the checkpoint: DATASETS or the training data "
                "changed"
            )
        processes = state["processes"]
        if processes != self.processes:
            logger.warning(
                "the number of processes changed from %d to %d: the batches are the same, but dropout, batch norm and "
                "losses that are computed per process give different results.\n"
                "  fix: for the same results, resume with the earlier number of processes",
                processes,
                self.processes,
            )
        self.start_iter = state["iteration"]
        for name, hook in self._hooks_by_name():
            if name in state["hooks"]:
                hook.load_state_dict(state["hooks"][name])

    def _hooks_by_name(self) -> Iterator[tuple[str, HookBase]]:
        counts: dict[str, Iterator[int]] = {}
        for hook in self._hooks:
            name = type(hook).__name__
            number = next(counts.setdefault(name, itertools.count()))
            yield (name if number == 0 else f"{name}.{number}"), hook
