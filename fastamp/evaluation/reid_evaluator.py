"""Collect the features of a test set and compute the field's metrics from them."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastamp.amp import to_float32
from fastamp.evaluation.details import Wanted
from fastamp.evaluation.evaluator import DatasetEvaluator
from fastamp.evaluation.floors import colour_histogram, raw_pixels
from fastamp.evaluation.judge import Judgement, judge_features
from fastamp.evaluation.matches import Identities
from fastamp.evaluation.pairs import PairScores, sample_pairs
from fastamp.evaluation.protocol import Protocol
from fastamp.evaluation.roc import write_roc
from fastamp.utils import comm
from fastamp.utils.errors import DataError, writing

logger = logging.getLogger(__name__)


class ReidEvaluator(DatasetEvaluator):
    """CMC, mAP, mINP and verification of one test set: query images first, then the gallery.

    Args:
        cfg: ``TEST`` is read.
        num_query: number of query images.
        output_dir: folder for the files that ``TEST.PER_QUERY`` and ``TEST.ROC`` write; None writes none.
        wanted: how much is to be shown of the ranking; None is what a report shows under ``TEST.REPORT``, else nothing.

    Attributes:
        judgement: of the last evaluation, if its ranking is to be shown.
        pairs: after ``evaluate``, on the main process: the scores of a sample of genuine and impostor pairs; None where
            there are none.
    """

    pairs: PairScores | None = None

    def __init__(
        self, cfg: Any, num_query: int, output_dir: str | None = None, *, wanted: Wanted | None = None
    ) -> None:
        self.protocol = Protocol.from_config(cfg)
        self.per_query = cfg.TEST.PER_QUERY
        self.floors = {"raw pixels": raw_pixels, "colour histogram": colour_histogram} if cfg.TEST.FLOORS else {}
        self.num_query = num_query
        self.output_dir = output_dir
        self.wanted = wanted or (Wanted() if cfg.TEST.REPORT else None)
        self.judgement: Judgement | None = None
        self.reset()

    def metric_names(self) -> list[str]:
        """Return the names of the metrics in percent."""
        return self.protocol.metric_names()

    def reset(self) -> None:
        """Forget all features."""
        self._columns: dict[str, list[torch.Tensor]] = {}
        self._rows = 0
        self._device = torch.device("cpu")

    def process(self, inputs: dict[str, Any], outputs: torch.Tensor) -> None:
        """Take one batch.

        Args:
            inputs: the batch, with ``targets``, ``camids`` and, unless the batches come in the order of the test set
                and in one process, ``indices``: (B,) int64 each.
            outputs: (B, D) features, any precision; kept on the CPU as float32, float64 as it is.
        """
        self._device = outputs.device
        columns = {"features": to_float32(outputs.detach()).cpu()}
        columns |= {name: inputs[name].cpu() for name in ("targets", "camids")}
        rows = torch.arange(self._rows, self._rows + len(outputs))
        columns["indices"] = inputs["indices"].cpu() if "indices" in inputs else rows
        self._rows += len(outputs)
        columns |= {name: floor(inputs["images"].cpu()) for name, floor in self.floors.items()}
        for name, column in columns.items():
            self._columns.setdefault(name, []).append(column)

    def evaluate(self) -> dict[str, Any] | None:
        """Judge the features, on the model's device if they fit there, and forget them; the ranks share the work.

        Returns:
            What ``Judgement.metrics`` returns, percentages as floats; with ``TEST.FLOORS`` also ``floors``: name ->
            the same of that floor. None on ranks other than 0.

        Raises:
            ConfigError: a file cannot be written, or query expansion overflows.
            DataError: a feature is not finite, or no query has a match.
        """
        if not self._columns:
            raise DataError("no image was evaluated: the test set, or this process's share of it, is empty")
        columns, n = self._gathered(), self.num_query
        sides = [(columns[name][:n], columns[name][n:]) for name in ("targets", "camids")]
        ids = Identities(*sides[0], *sides[1])
        features = columns.pop("features")
        features = features.to(ranking_device(features, self.protocol, self._device))
        judgement = judge_features(features[:n], features[n:], ids, self.protocol, self.wanted)
        self.judgement = judgement if self.wanted else None
        plain = self.protocol.plain()
        floors = {name: judge_features(columns[name][:n], columns[name][n:], ids, plain) for name in self.floors}
        if not comm.is_main_process():
            return None
        self._write(judgement)
        self.pairs = self._sampled_pairs(features, ids)
        metrics = judgement.metrics()
        if floors:
            metrics["floors"] = {name: floor.metrics() for name, floor in floors.items()}
        return metrics

    def _sampled_pairs(self, features: torch.Tensor, ids: Identities) -> PairScores | None:
        protocol, n = self.protocol, self.num_query
        sides = (features[:n], features[n:])
        if protocol.draws_queries:
            sides, ids = (features, features), ids.all_images()
        return sample_pairs(
            *sides,
            ids,
            metric=protocol.metric,
            cross_camera=protocol.cross_camera,
            same_images=protocol.draws_queries,
            seed=protocol.seed,
        )

    def _gathered(self) -> dict[str, torch.Tensor]:
        """Return the columns of all ranks in the order of ``indices``, and let go of the batches."""
        indices = comm.gather_rows(torch.cat(self._columns.pop("indices")))
        places = indices.argsort().argsort()
        columns = {}
        for name in list(self._columns):
            parts = self._columns.pop(name)
            if comm.is_distributed():
                parts = [comm.gather_rows(torch.cat(parts))]
            ordered = parts[0].new_empty(len(indices), *parts[0].shape[1:])
            begin = 0
            # Batch by batch, each freed at once: two copies of all features need not fit into memory.
            while parts:
                part = parts.pop(0)
                ordered[places[begin : begin + len(part)]] = part
                begin += len(part)
            columns[name] = ordered
        return columns

    def _write(self, judgement: Judgement) -> None:
        if self.output_dir is None:
            return
        folder = Path(self.output_dir)
        paths = []
        if self.per_query:
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
            paths.append(folder / "per_query.npz")
            write_per_query(judgement, paths[0])
        if judgement.roc is not None:
            paths += write_roc(judgement.roc, self.protocol.false_accept_rates, folder)
        for path in paths:
            logger.info("wrote %s", path)


def write_per_query(judgement: Judgement, path: Path) -> None:
    """Write ``ap``, ``inp``, ``valid``: (Q,), and ``first_match``: (Q, R), see ``RankingResult``, to an npz file.

    Raises:
        ConfigError: it cannot be written.
    """
    ranking = judgement.ranking
    columns = {name: getattr(ranking, name).numpy() for name in ("ap", "inp", "valid", "first_match")}
    with writing(path), path.open("wb") as file:  # NumPy would add .npz to another name
        np.savez_compressed(file, **columns)


def ranking_device(features: torch.Tensor, protocol: Protocol, device: torch.device) -> torch.device:
    """Return where to judge (N, D) features: ``device`` if it is CUDA and has room on every rank, else the CPU."""
    if device.type != "cuda":
        return torch.device("cpu")
    copies = 1 + 4 * (protocol.expansion is not None) + 2 * (protocol.re_ranking is not None)
    needed = copies * features.nbytes + 4 * protocol.memory_budget_mb * 2**20
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + kept
    if not comm.any_rank(needed > free):
        return device
    logger.info(
        "ranking on the CPU: it needs %.1f GiB, and %.1f GiB are free on %s", needed / 2**30, free / 2**30, device
    )
    return torch.device("cpu")
