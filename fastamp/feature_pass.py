"""The one pass over a loader that computes features, or other outputs of a model in evaluation mode."""

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fastamp.amp import PrecisionPolicy, to_float32
from fastamp.amp.device_errors import IN_EVALUATION, DeviceErrorHandler
from fastamp.amp.policy import dtype_name
from fastamp.contracts import Batch
from fastamp.utils import comm
from fastamp.utils.errors import DataError, TrainingError
from fastamp.utils.progress import format_duration, track

logger = logging.getLogger(__name__)

Forward = Callable[[Any, Batch], Any]
Extract = Callable[[Any, Batch, PrecisionPolicy, bool, Forward], Any]
Locator = Callable[[nn.Module, Batch, PrecisionPolicy], str]


class NotFiniteError(DataError, TrainingError):
    """An output of the model is NaN or infinite: the weights, the precision or the images are unsuitable."""


def call_model(model: Callable[[Batch], Any], batch: Batch) -> Any:
    """Return the output of the model for a batch: the default of the argument ``forward``."""
    return model(batch)


def extract_features(
    model: Any, batch: Batch, policy: PrecisionPolicy, flip_test: bool = False, forward: Forward = call_model
) -> Any:
    """Compute the features, or other outputs, of a batch.

    Args:
        model: model in evaluation mode.
        batch: dict with ``images``: (B, C, H, W) in 0..255, and any further inputs of the model.
        policy: precision policy of the forward pass.
        flip_test: if True, average the outputs of each image and its mirror image. Default: False.
        forward: function (model, batch) -> tensor, or nested tuples and dicts of tensors, with one row for each image.
            Default: the output of the model, its (B, D) features.

    Returns:
        The output of ``forward`` on the model's device, float32, not normalized; float64 if the model is float64.
    """
    with policy.autocast():
        outputs = to_float32(forward(model, batch))
    if not flip_test:
        return outputs
    with policy.autocast():
        mirrored = to_float32(forward(model, batch | {"images": batch["images"].flip(3)}))
    return tree_map(lambda output, other: (output + other) / 2, outputs, mirrored)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode in a ``with`` block, and restore the mode of each module afterwards."""
    modes = {module: module.training for module in model.modules()}
    if any(modes.values()):
        model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            if module.training != mode:
                module.training = mode


def feature_pass(
    model: nn.Module,
    loader: Iterable[Batch],
    process: Callable[[Batch, Any], None],
    policy: PrecisionPolicy,
    *,
    forward: Forward = call_model,
    flip_test: bool = False,
    title: str = "",
    locate: Locator | None = None,
    on_all_ranks: bool = True,
    extract: Extract = extract_features,
) -> None:
    """Compute the outputs of a model for all batches of a loader, in evaluation mode and without gradients.

    The mode of each module and the state of PyTorch's CPU generator are restored.

    Args:
        model: model that maps a batch to (B, D) features in evaluation mode.
        loader: batches with uint8 or float ``images`` in 0..255. If outputs are not finite, it is iterated again, in
            the same order, to find the first such batch for the error message.
        process: function that receives each batch and its outputs, on the model's device.
        policy, forward, flip_test: see ``extract_features``.
        title: title of the progress bar; the loader then has a length in batches, and the speed is logged. Default: "",
            no progress.
        locate: function (model, first batch whose outputs are not finite, policy) -> text to append to the error
            message, e.g. ``fastamp.diagnostics.nan_locator.describe_evaluation``, which names the first module whose
            output is not finite. Default: None, no text.
        on_all_ranks: if True, all ranks call this function, and all raise an error if the outputs of one rank are not
            finite, at the end of the pass: the device is not read in each batch. If False, this process does not
            communicate, and raises the error before ``process`` receives the batch. Default: True.
        extract: function that computes the outputs of a batch. Default: ``extract_features``.

    Raises:
        NotFiniteError: if an output is not finite.
        TrainingError: if the device is out of memory.
    """
    start, images = time.perf_counter(), 0
    finite: list[Tensor] = []
    batches = track(loader, len(cast(Sized, loader)), title) if title else loader
    with (
        evaluation_mode(model),
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(),
        DeviceErrorHandler("the evaluation", IN_EVALUATION) as computing,
    ):
        for batch in batches:
            computing.batch = batch
            outputs = extract(model, batch, policy, flip_test, forward)
            tensors = [output for output in tree_leaves(outputs) if isinstance(output, Tensor)]
            finite.append(torch.stack([torch.isfinite(output).all() for output in tensors]).all())
            if not on_all_ranks and not finite[-1]:
                break
            process(batch, outputs)
            images += len(tensors[0])
    flags = torch.stack(finite).tolist() if finite else []
    failed = False in flags
    if comm.any_across_ranks(failed) if on_all_ranks else failed:
        text = ""
        if failed:
            number = flags.index(False)
            # None: the loader can be iterated only once.
            found = next(itertools.islice(iter(loader), number, None), None) if on_all_ranks else batch
            with comm.as_single_process(), evaluation_mode(model):
                text = _explain_not_finite(model, found, number, policy, locate)
        raise NotFiniteError(comm.select_message(text) if on_all_ranks else text)
    if title:
        seconds = time.perf_counter() - start
        images = int(comm.sum_over_ranks([images])[0]) if on_all_ranks else images
        logger.info(
            "extracted features of %d images in %s (%.0f images/s)", images, format_duration(seconds), images / seconds
        )


def _explain_not_finite(
    model: nn.Module, batch: Batch | None, number: int, policy: PrecisionPolicy, locate: Locator | None
) -> str:
    """Build the error message of a batch; ``number`` is its index in this process."""
    where = f"batch {number}" + (f", first image {batch['img_paths'][0]}" if batch and "img_paths" in batch else "")
    location = locate(model, batch, policy) if locate and batch else ""
    fix = "  fix: evaluate with SOLVER.AMP.EVAL_DTYPE float32; if this fails too, use other weights"
    return (
        f"features are not finite: the model returned NaN or Inf in {dtype_name(policy.dtype)} ({where}).\n"
        f"{location or fix}"
    )


class Rows:
    """Columns with one row for each image, collected from batches on the CPU and gathered from all ranks.

    Attributes:
        columns: name -> parts (n, ...) of this rank. The column ``indices``, int64, orders the gathered rows.
    """

    def __init__(self) -> None:
        self.columns: dict[str, list[Tensor]] = {}
        self._count, self._in_order = 0, False

    def positions(self, batch: Batch, count: int) -> Tensor:
        """Return the positions (count,) int64 of the images of the next batch among those of all ranks.

        They are its ``indices``. Without them, the first rank has the first images, the next rank the following ones,
        and so on, all in order; the positions are then relative to those of this rank until ``gather``.
        """
        self._in_order = "indices" not in batch
        in_order = torch.arange(self._count, self._count + count)
        self._count += count
        return in_order if self._in_order else cast(Tensor, batch["indices"]).cpu()

    def append(self, columns: Mapping[str, Tensor]) -> None:
        """Add rows to columns."""
        for name, rows in columns.items():
            self.columns.setdefault(name, []).append(rows.cpu())

    def gather(self, *, on_all_ranks: bool = True) -> dict[str, Tensor]:
        """Join the rows of all ranks, in the order of a column ``indices``, else of the ranks; and free the parts.

        Args:
            on_all_ranks: if False, only those of this process. Default: True.

        Raises:
            DataError: on all ranks, if one of several ranks has no rows.
        """
        gathered, rows = dict[str, Tensor](), None
        is_distributed = on_all_ranks and comm.is_distributed()
        if is_distributed and comm.any_across_ranks(not self.columns):
            raise DataError(
                f"a process has no images to evaluate: there are fewer than {comm.get_world_size()}.\n"
                "  fix: add images, or use fewer processes"
            )
        if "indices" in self.columns:
            indices = torch.cat(self.columns.pop("indices"))
            if is_distributed:
                counts = comm.gather_rows(torch.tensor([self._count]))
                indices = comm.gather_rows(indices + (counts[: comm.get_rank()].sum() if self._in_order else 0))
            rows, gathered["indices"] = indices.argsort().argsort(), indices.sort().values
        for name in list(self.columns):
            parts = self.columns.pop(name)
            if is_distributed:
                parts = [comm.gather_rows(torch.cat(parts))]
            joined = parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:])
            begin = 0
            # Free each part after copying it, so that a single process holds only one copy of all rows.
            while parts:
                part = parts.pop(0)
                place = slice(begin, begin + len(part))
                joined[place if rows is None else rows[place]] = part
                begin += len(part)
            gathered[name] = joined
        return gathered


def collect_features(
    model: nn.Module,
    loader: Iterable[Batch],
    policy: PrecisionPolicy,
    *,
    columns: Mapping[str, Callable[[Batch], Tensor]] | None = None,
    on_all_ranks: bool = True,
    **options: Any,
) -> dict[str, Tensor]:
    """Compute the features, or other outputs, of all images of a loader.

    Args:
        model, loader, policy: see ``feature_pass``.
        columns: name of a further column -> its rows (B, ...) of a batch. With a column ``indices``, the images are in
            this order, else in that of the ranks and their batches. Default: None, no further columns.
        on_all_ranks: if True, each rank has a part of the images, and receives those of all; if False, this process has
            all images, and does not communicate. Default: True.
        options: see ``feature_pass``.

    Returns:
        ``{"features": (N, D)}`` on the CPU, float32 (float64 if the model is), not normalized, or the names of the dict
        from ``forward``; and the further columns (N, ...). An empty dict without images.

    Raises:
        NotFiniteError, TrainingError: see ``feature_pass``.
        DataError: see ``Rows.gather``.
    """
    rows = Rows()

    def process(batch: Batch, outputs: Any) -> None:
        rows.append(outputs if isinstance(outputs, dict) else {"features": outputs})
        rows.append({name: column(batch) for name, column in (columns or {}).items()})

    feature_pass(model, loader, process, policy, on_all_ranks=on_all_ranks, **options)
    return rows.gather(on_all_ranks=on_all_ranks)
