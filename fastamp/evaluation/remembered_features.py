"""Feature extraction for test sets that share images."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastamp.amp import PrecisionPolicy
from fastamp.contracts import Batch
from fastamp.feature_pass import Forward, extract_features


class RememberedFeatures:
    """``extract_features`` with a memory: an image in several random splits passes through the model once.

    The path identifies an image, so datasets with boxes are not supported. Nothing is remembered of batches without
    ``img_paths``, or of outputs that are not one row per image.
    """

    def __init__(self) -> None:
        self._rows: dict[str, Tensor] = {}

    def __call__(self, model: Any, batch: Batch, policy: PrecisionPolicy, flip_test: bool, forward: Forward) -> Any:
        """Return the outputs (B, ...) for a batch; see ``extract_features``."""
        paths: Sequence[str] = batch.get("img_paths", ())
        new = [row for row, path in enumerate(paths) if path not in self._rows]
        if new or not paths:
            part = batch if len(new) == len(paths) else _select(batch, new, len(paths))
            outputs = extract_features(model, part, policy, flip_test, forward)
            if not paths:
                return outputs
            if not isinstance(outputs, Tensor) or len(outputs) != len(new):
                return extract_features(model, batch, policy, flip_test, forward)
            self._rows |= zip((paths[row] for row in new), outputs, strict=True)
        return torch.stack([self._rows[path] for path in paths])


def _select(batch: Batch, rows: Sequence[int], count: int) -> Batch:
    """Return some rows of a batch of ``count`` images."""
    selected = dict(batch)
    for name, values in batch.items():
        if isinstance(values, Tensor) and values.shape[:1] == (count,):
            selected[name] = values[list(rows)]
        elif isinstance(values, list | tuple) and len(values) == count:
            selected[name] = [values[row] for row in rows]
    return selected
