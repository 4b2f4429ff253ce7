"""Evaluator of re-identification: collect the features of a test set and compute the metrics."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastamp.amp import to_float32
from fastamp.config import CfgNode
from fastamp.evaluation.baselines import color_histogram, raw_pixels
from fastamp.evaluation.calibration import Calibration
from fastamp.evaluation.calibration_check import CalibrationCheck, check_calibration
from fastamp.evaluation.evaluator import EVALUATOR_REGISTRY, DatasetEvaluator
from fastamp.evaluation.identities import Identities
from fastamp.evaluation.metrics import baseline_metrics, compute_metrics
from fastamp.evaluation.pairs import PairScores, sample_pairs
from fastamp.evaluation.protocol import Protocol, check_columns
from fastamp.evaluation.rank import RankingResult
from fastamp.evaluation.result import EvaluationResult
from fastamp.evaluation.retrieval_examples import ReportOptions
from fastamp.evaluation.roc import write_roc
from fastamp.evaluation.tracklets import COLUMN as TRACKLET
from fastamp.evaluation.tracklets import FRAMES, pool_tracklets
from fastamp.feature_pass import Rows
from fastamp.layers.distance import DistanceBlocks
from fastamp.utils import comm
from fastamp.utils.errors import DataError, TrainingError, writing

logger = logging.getLogger(__name__)

# Names in a batch that are not columns of the dataset.
_RESERVED = ("images", "targets", "camids", "viewids", "indices", "img_paths")
# Prefix of columns of the dataset among the accumulated batches.
_COLUMN = "column "


@EVALUATOR_REGISTRY.register()
class ReidEvaluator(DatasetEvaluator):
    """Compute CMC, mAP, mINP and verification metrics of a test set that lists query images before gallery images.

    Args:
        cfg: config; only ``TEST`` is read.
        num_query: number of query images, at the start of the test set.
        output_dir: folder for the files that ``TEST.PER_QUERY`` and ``TEST.ROC`` request; None writes no files.
        report_options: settings of the retrieval examples. Default: ``ReportOptions()`` if ``TEST.REPORT``, else no
            examples.

    Attributes:
        rows: columns of the batches so far; a subclass may append further ones, which ``gather`` returns.
        result: result of the last evaluation; None without ``report_options``.
        column_names: text columns of the test set -> text of each number, see ``set_column_names``.
        ranking: results of each query of the last evaluation, on the main process.
        first_frames: (Q + G,) int64 position in the test set of the first frame of each query and gallery tracklet, if
            the features of frames were pooled (``TEST.TRACKLET.POOL``); None if the queries are images.
        pairs: scores of sampled genuine and impostor pairs, set by ``evaluate`` on the main process; None if there are
            no genuine or no impostor pairs.
        calibration_check: error rates of the decisions of a calibrated model, set by ``evaluate`` on the main process;
            None without a calibration.
    """

    pairs: PairScores | None = None
    calibration_check: CalibrationCheck | None = None
    _calibration: tuple[Calibration, str] | None = None

    def __init__(
        self,
        cfg: CfgNode,
        num_query: int,
        output_dir: str | None = None,
        *,
        report_options: ReportOptions | None = None,
    ) -> None:
        self.cfg = cfg
        self.protocol = Protocol.from_config(cfg)
        self.per_query = cfg.TEST.PER_QUERY
        self.baselines = {"raw pixels": raw_pixels, "color histogram": color_histogram} if cfg.TEST.BASELINES else {}
        self.num_query = num_query
        self.output_dir = output_dir
        self.report_options = report_options or (ReportOptions() if cfg.TEST.REPORT else None)
        self.column_names: dict[str, Sequence[str]] = {}
        self.result: EvaluationResult | None = None
        self.ranking: RankingResult | None = None
        self.tracklet_pool = cfg.TEST.TRACKLET.POOL
        self.first_frames: np.ndarray | None = None
        self.reset()

    def metric_names(self) -> list[str]:
        """List the names of the metrics that are in percent."""
        return self.protocol.metric_names()

    def set_column_names(self, column_names: Mapping[str, Sequence[str]]) -> None:
        """Set the text of each number in the text columns of the test set, for ``TEST.GROUP_BY``.

        Args:
            column_names: column name -> texts; value v of a column has the text at index v. See
                ``Identities.column_names``.
        """
        self.column_names = dict(column_names)

    def set_calibration(self, calibration: Calibration, dataset: str) -> None:
        """Set the calibration of the model, whose error rates ``evaluate`` then measures.

        Args:
            calibration: calibration of the model.
            dataset: name of the test set; see ``check_calibration``.
        """
        self._calibration = calibration, dataset

    def reset(self) -> None:
        """Discard all features."""
        self.rows = Rows()
        self._device = torch.device("cpu")

    def process(self, inputs: dict[str, Any], outputs: torch.Tensor) -> None:
        """Accumulate one batch.

        Args:
            inputs: batch with ``targets`` and ``camids``: (B,) int64. ``indices``: (B,) int64 positions in the test
                set; may be omitted if the first rank has the first images of the test set, the next rank the following
                ones, and so on, all in order. Columns that the protocol or ``TEST.GROUP_BY`` needs: (B,), under their
                names. ``tracklet``: (B,) int64, if present, the tracklet of each frame, whose features are pooled
                (``TEST.TRACKLET.POOL``).
            outputs: (B, D) features of any precision, stored on the CPU in float32, or in float64 if they are float64.

        Raises:
            DataError: if the batch does not contain a column that the evaluation needs.
            TrainingError: if ``outputs`` is not a tensor.
        """
        if not isinstance(outputs, torch.Tensor):
            raise TrainingError(
                f"in evaluation mode the model must return a tensor of (B, D) features, got {type(outputs).__name__}.\n"
                "  fix: return the features if self.training is False, or use an evaluator for these outputs"
            )
        self._device = outputs.device
        batch = {"features": to_float32(outputs.detach()).cpu()}
        batch |= {name: inputs[name].cpu() for name in ("targets", "camids")}
        batch["indices"] = self.rows.positions(inputs, len(outputs))
        if self.protocol.columns:
            check_columns(columns_of(inputs), self.protocol)
            batch |= {_COLUMN + name: inputs[name].cpu() for name in self.protocol.columns}
        batch |= {name: descriptor(inputs["images"].cpu()) for name, descriptor in self.baselines.items()}
        if TRACKLET in inputs and self.tracklet_pool != "none":
            batch = self._pool_tracklets(batch | {TRACKLET: inputs[TRACKLET].cpu()})
        self.rows.append(batch)

    def evaluate(self) -> dict[str, Any] | None:
        """Compute the metrics, on the model's device if it has enough memory, and discard the features.

        Returns:
            The metrics from ``EvaluationResult.metrics``; with ``TEST.BASELINES`` also ``baselines``: dict from
            baseline name to metrics; for tracklets also ``num_frames``: number of frames. None on ranks other than 0.

        Raises:
            ConfigError: if a file cannot be written, or query expansion overflows.
            DataError: if there are no images, a feature is not finite, or no query has a match.
        """
        features, identities, columns = self.gather()
        n, protocol = len(identities.query_pids), self.protocol
        features = features.to(ranking_device(features, protocol, self._device))
        queries, gallery = features[:n], features[n:]
        distances = self.distances(queries, gallery, identities)
        result = compute_metrics(queries, gallery, identities, protocol, self.report_options, distances=distances)
        baselines = {
            name: baseline_metrics(columns[name][:n], columns[name][n:], identities, protocol, name)
            for name in self.baselines
        }
        self.result = result if self.report_options else None
        if not comm.is_main_process():
            return None
        self.ranking = result.ranking
        self._write(result)
        rule, seed = protocol.rule, protocol.seed
        if rule.all_images:
            queries = gallery = features
        ranked = rule.arrange(identities)
        self.pairs = sample_pairs(
            queries, gallery, ranked, metric=protocol.metric, junk=rule.junk, same_images=rule.all_images, seed=seed
        )
        if self._calibration is not None:
            calibration, dataset = self._calibration
            self.calibration_check = check_calibration(features, identities, protocol, calibration, dataset=dataset)
        metrics = result.metrics()
        if FRAMES in columns:
            metrics["num_frames"] = int(columns[FRAMES].sum())
        if baselines:
            metrics["baselines"] = baselines
        return metrics

    def distances(
        self, query_features: torch.Tensor, gallery_features: torch.Tensor, identities: Identities
    ) -> DistanceBlocks | None:
        """Return the distances by which ``evaluate`` ranks the gallery. Default: None, those between the features."""
        return None

    def gather(self) -> tuple[torch.Tensor, Identities, dict[str, torch.Tensor]]:
        """Gather the batches of all ranks, pool the frames of tracklets, and free the batches.

        Returns:
            ``(features, identities, columns)``: (Q + G, D) features, queries first; their identities and columns; and
            all values by name, (Q + G, ...).

        Raises:
            DataError: if there are no images.
        """
        columns, n = self.rows.gather(), self.num_query
        if not columns:
            raise DataError("the test set has no images.\n  fix: check DATASETS.TESTS")
        self.first_frames = None
        if TRACKLET in columns:
            columns = self._pool_tracklets(columns)
            self.first_frames = columns["indices"].numpy()
            n = int((columns["indices"] < n).sum())
        values = {name: columns[_COLUMN + name] for name in self.protocol.columns}
        identities = Identities.split(n, columns["targets"], columns["camids"], values, self.column_names)
        return columns.pop("features"), identities, columns

    def _pool_tracklets(self, columns: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Pool the features, and the descriptors of the baselines, of the frames of each tracklet."""
        names = {"features", *self.baselines}
        return pool_tracklets(columns, names, num_query=self.num_query, pool=self.tracklet_pool)

    def _write(self, result: EvaluationResult) -> None:
        if self.output_dir is None:
            return
        folder = Path(self.output_dir)
        paths = []
        if self.per_query:
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
            paths.append(folder / "per_query.npz")
            write_per_query(result, paths[0])
        if result.roc is not None:
            paths += write_roc(result.roc, self.protocol.false_accept_rates or (), folder)
        for path in paths:
            logger.info("wrote %s", path)


def columns_of(batch: Mapping[str, Any]) -> list[str]:
    """List the columns in a batch that an evaluation can use: tensors with one number for each image."""
    return [
        name
        for name, values in batch.items()
        if name not in _RESERVED and isinstance(values, torch.Tensor) and values.shape == batch["targets"].shape
    ]


def write_per_query(result: EvaluationResult, path: Path) -> None:
    """Write per-query results to an npz file.

    The arrays are ``ap``, ``inp`` and ``valid``: (Q,), and ``first_match``: (Q, R), see ``RankingResult``; and the text
    ``protocol``, see ``Protocol.describe``.

    Raises:
        ConfigError: if the file cannot be written.
    """
    ranking = result.ranking
    with writing(path), path.open("wb") as file:  # np.savez appends .npz to other file names
        arrays = {name: getattr(ranking, name).numpy() for name in ("ap", "inp", "valid", "first_match")}
        np.savez_compressed(file, protocol=np.array(result.protocol.describe()), **arrays)


def ranking_device(features: torch.Tensor, protocol: Protocol, device: torch.device) -> torch.device:
    """Return ``device`` if it is a CUDA device with enough free memory for ranking on all ranks, else the CPU."""
    if device.type != "cuda":
        return torch.device("cpu")
    copies = 1 + 4 * (protocol.expansion is not None) + 2 * (protocol.re_ranking is not None)
    needed = copies * features.nbytes + 4 * protocol.memory_budget_mb * 2**20
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + kept
    if not comm.any_across_ranks(needed > free):
        return device
    logger.info(
        "ranking on the CPU: ranking requires %.1f GiB, but only %.1f GiB are free on %s",
        needed / 2**30,
        free / 2**30,
        device,
    )
    return torch.device("cpu")
