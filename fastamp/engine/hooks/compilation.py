"""Hook that compares compiled with eager steps."""

import logging
import statistics
from contextlib import ExitStack
from typing import TYPE_CHECKING

from torch import nn

from fastamp.engine.hooks.base import HookBase
from fastamp.utils import comm
from fastamp.utils.compiled import compilation_of, uncompiled

if TYPE_CHECKING:
    from fastamp.engine.train_loop import SimpleTrainer

logger = logging.getLogger(__name__)

COMPARED = 50
"""Number of iterations in which a compiled model runs eagerly every second time."""
_FIRST = 8  # earlier iterations after the start or a resume compile, and record CUDA graphs
_MIN_PAIRS = 10


class CompilationMonitor(HookBase):
    """Compare the times of compiled and eager steps in the first ``COMPARED`` iterations of a run, and log the result.

    Iterations with an even number run eagerly, so that a pair of neighbors is measured under the same load. The time of
    a step ends with the verdict, which waits for the device anyway, and excludes waiting for images. Which iterations
    run eagerly does not depend on where a run was resumed, except for the first pass after the resume.

    Args:
        model: model in training.
    """

    trainer: "SimpleTrainer"

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._eager = ExitStack()

    def before_train(self) -> None:
        self._seconds: list[float] = []

    def before_step(self) -> None:
        if self.trainer.iter < COMPARED and self.trainer.iter % 2 == 0:
            self._eager.enter_context(uncompiled(self.model))

    def after_step(self) -> None:
        trainer = self.trainer
        self._eager.close()
        if _FIRST + trainer.start_iter + trainer.start_iter % 2 <= trainer.iter < COMPARED:
            self._seconds.append(trainer.step_seconds - trainer.data_seconds)
        if trainer.iter == COMPARED - 1 and comm.is_main_process():
            self._report()

    def close(self) -> None:
        self._eager.close()

    def _report(self) -> None:
        """Log the speedup; warn if compiled steps are slower, or the iterations left cannot repay the warm-up."""
        compilation, pairs = compilation_of(self.model), list(zip(self._seconds[::2], self._seconds[1::2], strict=True))
        if compilation is None or len(pairs) < _MIN_PAIRS:
            return
        eager, compiled = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
        lower, ratio, upper = statistics.quantiles((second / first for first, second in pairs), n=4)
        text = (
            f"compiled steps take {ratio:.2f} (quartiles {lower:.2f} and {upper:.2f}) of the time of eager steps: "
            f"{1000 * compiled:.0f} and {1000 * eager:.0f} ms, medians of {len(pairs)} pairs; warm-up "
            f"{compilation.seconds:.0f} s"
        )
        fix = "\n  fix: set MODEL.COMPILE to off"
        left = self.trainer.max_iter - COMPARED
        if lower > 1:
            logger.warning("%s: compilation makes this run slower%s", text, fix)
        elif upper < 1 and compilation.seconds > left * (eager - compiled):
            logger.warning("%s, which the %d iterations left do not make up for%s", text, left, fix)
        else:
            logger.info("%s", text)
