"""Collect the features of a test set and compute the field's metrics from them."""

import logging
from typing import Any

import torch

from fastamp.amp import to_float32
from fastamp.evaluation.evaluator import DatasetEvaluator
from fastamp.evaluation.floors import colour_histogram, raw_pixels
from fastamp.evaluation.rank import Identities, RankingResult, rank_features
from fastamp.utils import comm
from fastamp.utils.errors import DataError

logger = logging.getLogger(__name__)

REPORTED_RANKS = (1, 5, 10)


class ReidEvaluator(DatasetEvaluator):
    """CMC, mAP and mINP of one test set: query images first, then the gallery.

    Args:
        cfg: ``TEST.METRIC`` and ``TEST.FLOORS`` are read.
        num_query: number of query images.
        output_dir: not written to; FastReID's users pass it.
    """

    def __init__(self, cfg: Any, num_query: int, output_dir: str | None = None) -> None:
        self.metric = cfg.TEST.METRIC
        self.floors = {"raw pixels": raw_pixels, "colour histogram": colour_histogram} if cfg.TEST.FLOORS else {}
        self.num_query = num_query
        self.output_dir = output_dir
        self.reset()

    def reset(self) -> None:
        """Forget all features."""
        self._columns: dict[str, list[torch.Tensor]] = {}
        self._rows = 0

    def process(self, inputs: dict[str, Any], outputs: torch.Tensor) -> None:
        """Take one batch.

        Args:
            inputs: the batch, with ``targets``, ``camids`` and, unless the batches come in the order of the test set
                and in one process, ``indices``: (B,) int64 each.
            outputs: (B, D) features, any precision; kept as float32 on the CPU.
        """
        columns = {"features": to_float32(outputs.detach()).cpu()}
        columns |= {name: inputs[name].cpu() for name in ("targets", "camids")}
        rows = torch.arange(self._rows, self._rows + len(outputs))
        columns["indices"] = inputs["indices"].cpu() if "indices" in inputs else rows
        self._rows += len(outputs)
        columns |= {name: floor(inputs["images"].cpu()) for name, floor in self.floors.items()}
        for name, column in columns.items():
            self._columns.setdefault(name, []).append(column)

    def evaluate(self) -> dict[str, Any] | None:
        """Rank and return the metrics; None on ranks other than 0.

        Returns:
            ``Rank-1``, ``Rank-5``, ``Rank-10``, ``mAP``, ``mINP`` and ``metric`` (the mean of mAP and Rank-1) as
            floats in percent, and the counts ``num_query``, ``num_gallery`` and ``num_query_without_match``; with
            ``TEST.FLOORS`` also ``floors``: name -> {mAP, Rank-1}.

        Raises:
            DataError: a feature is not finite, or no query has a match.
        """
        if not self._columns:
            raise DataError("no image was evaluated: the test set, or this process's share of it, is empty")
        columns = _gather({name: torch.cat(parts) for name, parts in self._columns.items()})
        if columns is None:
            return None
        n = self.num_query
        pids, camids = columns["targets"], columns["camids"]
        ids = Identities(pids[:n], pids[n:], camids[:n], camids[n:])
        result = rank_features(columns["features"][:n], columns["features"][n:], ids, metric=self.metric)
        if result.num_valid == 0:
            raise DataError(
                f"none of the {n} queries has a match in the gallery (the same identity from another camera).\n"
                "  cause: query and gallery have no identity in common, or all images are from one camera"
            )
        metrics: dict[str, Any] = _percentages(result)
        metrics |= {
            "num_query": n,
            "num_gallery": len(pids) - n,
            "num_query_without_match": n - result.num_valid,
        }
        if self.floors:
            metrics["floors"] = {
                name: _percentages(rank_features(columns[name][:n], columns[name][n:], ids, metric="cosine"))
                for name in self.floors
            }
        return metrics


def _percentages(result: RankingResult) -> dict[str, float]:
    metrics = {f"Rank-{rank}": 100 * result.cmc(rank) for rank in REPORTED_RANKS}
    metrics |= {"mAP": 100 * result.mean_ap, "mINP": 100 * result.mean_inp}
    metrics["metric"] = (metrics["mAP"] + metrics["Rank-1"]) / 2
    return metrics


def _gather(columns: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """Return the columns of all ranks on rank 0 in the order of ``indices``, None on the other ranks."""
    if comm.is_distributed():
        columns = {name: comm.gather_rows(column) for name, column in columns.items()}
        if not comm.is_main_process():
            return None
    order = torch.argsort(columns["indices"])
    return {name: column[order] for name, column in columns.items()}
