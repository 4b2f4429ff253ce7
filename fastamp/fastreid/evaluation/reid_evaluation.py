"""FastReID's evaluator of re-identification."""

from typing import Any

import torch

from fastamp.config import CfgNode
from fastamp.engine import evaluation
from fastamp.evaluation import evaluator as core
from fastamp.evaluation import reid_evaluation
from fastamp.fastreid.evaluation.evaluator import DatasetEvaluator

_COLUMNS = {"feats": "features", "pids": "targets", "camids": "camids"}
"""Name in a prediction of FastReID -> name of the column in fastamp's evaluator."""


class ReidEvaluator(DatasetEvaluator, reid_evaluation.ReidEvaluator):
    """Evaluator with the attributes that ``process`` and ``evaluate`` of FastReID use.

    The constructor of a subclass need not call that of this class.

    Args:
        cfg, num_query, output_dir, options: see ``fastamp.evaluation.ReidEvaluator``.

    Attributes:
        features, pids, camids: empty after ``reset``; filled by ``process`` of a subclass.
    """

    _cpu_device = torch.device("cpu")

    def __new__(
        cls, cfg: CfgNode, num_query: int, output_dir: str | None = None, *arguments: Any, **options: Any
    ) -> "ReidEvaluator":
        """Create an evaluator that is initialized already."""
        evaluator = super().__new__(cls)
        ReidEvaluator.__init__(evaluator, cfg, num_query, output_dir)
        return evaluator

    def __init__(self, cfg: CfgNode, num_query: int, output_dir: str | None = None, **options: Any) -> None:
        # Without ``reset`` of a subclass, whose attributes do not exist yet.
        vars(self).update(vars(reid_evaluation.ReidEvaluator(cfg, num_query, output_dir, **options)))
        ReidEvaluator.reset(self)

    def reset(self) -> None:
        """Discard all features and lists."""
        super().reset()
        self.features: list[Any] = []
        self.pids: list[Any] = []
        self.camids: list[Any] = []

    @property
    def _num_query(self) -> int:
        return self.num_query

    @_num_query.setter
    def _num_query(self, number: int) -> None:
        self.num_query = number

    @property
    def _output_dir(self) -> str | None:
        return self.output_dir

    @_output_dir.setter
    def _output_dir(self, folder: str | None) -> None:
        self.output_dir = folder

    @property
    def _predictions(self) -> "_Predictions":
        columns = [self.rows.columns.get(name, []) for name in _COLUMNS.values()]
        batches = zip(*columns, strict=True)
        return _Predictions(self, [dict(zip(_COLUMNS, batch, strict=True)) for batch in batches])

    @_predictions.setter
    def _predictions(self, predictions: list[dict[str, torch.Tensor]]) -> None:
        reid_evaluation.ReidEvaluator.reset(self)
        for prediction in predictions:
            self._predictions.append(prediction)


def build_evaluator(cfg: CfgNode, num_query: int, output_dir: str | None = None) -> core.DatasetEvaluator:
    """Build the evaluator of a test set; see ``fastamp.engine.evaluation.build_evaluator``."""
    evaluator = evaluation.build_evaluator(cfg, num_query, output_dir)
    if type(evaluator) is reid_evaluation.ReidEvaluator:
        return ReidEvaluator(cfg, num_query, output_dir)
    return evaluator


class _Predictions(list):
    """Predictions of an evaluator, one dict per batch, to which ``process`` of a subclass can append."""

    def __init__(self, evaluator: ReidEvaluator, batches: list[dict[str, torch.Tensor]]) -> None:
        super().__init__(batches)
        self._evaluator = evaluator

    def __reduce__(self) -> tuple[Any, ...]:
        return list, ([*self],)  # ``comm.gather`` sends the batches, without the evaluator

    def append(self, prediction: dict[str, torch.Tensor]) -> None:
        """Accumulate a batch: ``feats`` (B, D), ``pids`` and ``camids`` (B,)."""
        super().append(prediction)
        inputs = {_COLUMNS[name]: torch.as_tensor(prediction[name]) for name in ("pids", "camids")}
        ReidEvaluator.process(self._evaluator, inputs, prediction["feats"])
