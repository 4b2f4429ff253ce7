"""Hook that writes the training report."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from PIL import Image

from fastamp.engine.hooks.base import HookBase, Priority
from fastamp.engine.reporting import write_training_report
from fastamp.report import Run, rank_list_image
from fastamp.report.cluster_page import sheet_image


@runtime_checkable
class ImageWriter(Protocol):
    """Writer that shows images."""

    def write_image(self, iteration: int, name: str, image: Image.Image) -> None:
        """Write an image of an iteration."""


class ReportHook(HookBase):
    """Write ``report.html`` after each evaluation. Register this hook after the hooks that save checkpoints.

    Args:
        run: returns the data of the last evaluation, or None if its report has already been written.
        writers: each ``ImageWriter`` receives the images of the worst queries of each test set, and of
            the clusters of the training images. Default: none.
    """

    priority = Priority.LOW

    def __init__(self, run: Callable[[], Run | None], writers: Sequence[Any] = ()) -> None:
        self.run = run
        self.writers = writers

    def after_epoch(self) -> None:
        run = self.run()
        if run is None:
            return
        write_training_report(run)
        iteration = self.trainer.iters_before + self.trainer.iter
        writers = [writer for writer in self.writers if isinstance(writer, ImageWriter)]
        clusters = sheet_image(run.clusters) if run.clusters is not None else None
        if clusters is not None:
            for writer in writers:
                writer.write_image(iteration, "clusters", clusters)
        for test_set in run.sets if writers else ():
            image = rank_list_image(test_set)
            if image is not None:
                for writer in writers:
                    writer.write_image(iteration, f"worst_queries/{test_set.name}", image)
