"""The report of a training, written after each evaluation."""

from collections.abc import Callable

from fastamp.engine.hooks.base import HookBase
from fastamp.engine.reporting import write_training_report
from fastamp.report import Run


class ReportHook(HookBase):
    """Write the report after each evaluation, behind the checkpoint; register it behind what saves that.

    Args:
        run: returns what was evaluated last, None when that has been written already.
    """

    saves = True

    def __init__(self, run: Callable[[], Run | None]) -> None:
        self.run = run

    def after_epoch(self) -> None:
        run = self.run()
        if run is not None:
            write_training_report(run)
