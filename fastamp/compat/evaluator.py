"""Attributes of FastReID's ``ReidEvaluator`` for subclasses written for FastReID."""

from typing import Any

import torch


class FastReIDAttributes:
    """Base class of ``ReidEvaluator`` with the attributes that ``process`` and ``evaluate`` of FastReID use.

    Attributes:
        features, pids, camids (list): empty after ``reset``; filled by ``process`` of a subclass.
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
    def _predictions(self) -> list[dict[str, torch.Tensor]]:
        columns = [self._batches.get(name, []) for name in ("features", "targets", "camids")]
        return [dict(zip(("feats", "pids", "camids"), batch, strict=True)) for batch in zip(*columns, strict=True)]
