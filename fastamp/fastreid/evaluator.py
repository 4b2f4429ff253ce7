"""Attributes of FastReID's ``ReidEvaluator`` for subclasses written for FastReID."""

from typing import Any

import torch

from fastamp.utils import comm
from fastamp.utils.errors import ConfigError


class FastReIDAttributes:
    """Base class of ``ReidEvaluator`` with the attributes that ``process`` and ``evaluate`` of FastReID use.

    Attributes:
        features, pids, camids: empty after ``reset``; filled by ``process`` of a subclass.
    """

    num_query: int
    output_dir: str | None
    _batches: dict[str, list[torch.Tensor]]

    def reset(self) -> None:
        """Discard all lists."""
        self.features: list[Any] = []
        self.pids: list[Any] = []
        self.camids: list[Any] = []

    @property
    def _num_query(self) -> int:
        return self.num_query

    @property
    def _output_dir(self) -> str | None:
        return self.output_dir

    @property
    def _predictions(self) -> "_Predictions":
        columns = [self._batches.get(name, []) for name in _COLUMNS.values()]
        batches = zip(*columns, strict=True)
        return _Predictions(self, [dict(zip(_COLUMNS, batch, strict=True)) for batch in batches])


_COLUMNS = {"feats": "features", "pids": "targets", "camids": "camids"}
"""Name in a prediction of FastReID -> name of the column in ``ReidEvaluator``."""


class _Predictions(list):
    """Predictions of an evaluator, one dict per batch, to which ``process`` of a subclass can append."""

    def __init__(self, evaluator: FastReIDAttributes, batches: list[dict[str, torch.Tensor]]) -> None:
        super().__init__(batches)
        self._evaluator = evaluator

    def append(self, prediction: dict[str, torch.Tensor]) -> None:
        """Accumulate a batch: ``feats`` (B, D), ``pids`` and ``camids`` (B,).

        Raises:
            ConfigError: if there are several processes.
        """
        super().append(prediction)
        if comm.is_distributed():
            raise ConfigError(
                f"{type(self._evaluator).__name__}._predictions.append does not support several processes, because the "
                "positions of the images are unknown.\n"
                "  fix: call super().process(inputs, outputs) instead"
            )
        from fastamp.evaluation.reid_evaluation import ReidEvaluator  # it imports this module

        inputs = {_COLUMNS[name]: torch.as_tensor(prediction[name]) for name in ("pids", "camids")}
        ReidEvaluator.process(self._evaluator, inputs, prediction["feats"])
