"""Comparison of models on one test set: metrics with paired intervals, latency, throughput, size and precision."""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastamp.config import CfgNode
from fastamp.data import build_reid_test_loader
from fastamp.evaluation import Identities, Protocol
from fastamp.evaluation.metrics import compute_metrics
from fastamp.evaluation.protocol import check_columns
from fastamp.evaluation.rank import RankingResult
from fastamp.evaluation.run_comparison import MetricDifference, compare_rankings
from fastamp.inference.feature_model import FeatureModel
from fastamp.inference.predictor import Predictor
from fastamp.inference.runtime import ExportedModel
from fastamp.report.panel import Line, Panel
from fastamp.utils.errors import UserError, WeightsError
from fastamp.utils.progress import track

_CHUNK = 256
_WARM_UP = 3


@dataclass(frozen=True)
class ModelResult:
    """One model on the test set.

    Attributes:
        name: SOURCE of the model.
        metrics: see ``EvaluationResult.metrics``; in percent.
        latency_ms: quartiles of the time of one preprocessed image, from host memory to features in host memory.
        images_per_s: throughput of a batch, from the median time.
        size_mib: size of the weights of a checkpoint, or of the files of an exported model.
        device: device that computes the features; exported models run on the CPU. ``precision``: of the features.
        ranking: result of each query.
    """

    name: str
    metrics: Mapping[str, Any]
    latency_ms: Sequence[float]
    images_per_s: float
    size_mib: float
    device: str
    precision: str
    ranking: RankingResult = field(repr=False)


@dataclass(frozen=True)
class ModelComparison:
    """Comparison of models on one test set.

    Attributes:
        dataset, protocol: test set, and description of the evaluation.
        models: results, by descending mAP.
        differences: for each pair of them, (better, worse) -> differences ``better - worse`` with paired intervals.
        failures: SOURCE -> why the model could not be compared.
        batch: images of a batch of the throughput.
        threads: threads of PyTorch.
    """

    dataset: str
    protocol: str
    models: Sequence[ModelResult]
    differences: Mapping[tuple[str, str], Sequence[MetricDifference]]
    failures: Mapping[str, str]
    batch: int
    threads: int

    def panel(self) -> Panel:
        """Return the chart of mAP against latency."""
        points = [
            Line(
                f"{model.name}, {model.device}",
                np.array([model.latency_ms[1]]),
                np.array([model.metrics["mAP"]]),
                dots=True,
            )
            for model in self.models
        ]
        note = f"one image, {self.threads} threads"
        return Panel(f"mAP on {self.dataset}", "latency in ms", "mAP in percent", points, x_log=True, note=note)


def compare_models(
    sources: Sequence[str], load: Callable[[str], FeatureModel], name: str, cfg: CfgNode, *, batch: int, rounds: int
) -> ModelComparison:
    """Evaluate models on one test set, and time them in turns.

    Each model preprocesses the images as it requires. The times do not include decoding and resizing.

    Args:
        sources: names of the models.
        load: function that loads a model. All are loaded first. One that fails is excluded, see ``failures``.
        name: test set, as in DATASETS.TESTS.
        cfg: config of the test set and of the protocol; the distance is that of each model.
        batch: number of images of a batch.
        rounds: number of timings of each model, of which the median is used.

    Raises:
        UserError: if the test set cannot be evaluated.
        WeightsError: if no model can be compared.
    """
    loader, num_query = build_reid_test_loader(cfg, name)
    dataset: Any = loader.dataset
    protocol = Protocol.from_config(cfg)
    rankable = dataset.rankable_columns()
    check_columns(rankable, protocol)
    values = {column: rankable[column] for column in protocol.columns}
    identities = Identities.split(num_query, dataset.labels, dataset.camids, values, dataset.column_names())
    models: dict[str, FeatureModel] = {}
    evaluated: dict[str, tuple[dict[str, Any], RankingResult]] = {}
    inputs: dict[str, list[Tensor]] = {}
    failures: dict[str, str] = {}
    for source in sources:
        try:
            models[source] = load(source)
        except UserError as error:
            failures[source] = str(error)
    for source, model in list(models.items()):
        try:
            features = _features(model, dataset.items, source)
            own = Protocol.from_config(cfg.with_values({"TEST.METRIC": model.metric}))
            result = compute_metrics(features[:num_query], features[num_query:], identities, own)
            inputs[source] = _inputs(model, dataset, batch)
            model.features_of_preprocessed(inputs[source])  # too large a batch fails here
            evaluated[source] = result.metrics(), result.ranking
        except UserError as error:
            failures[source] = str(error)
            del models[source]
    if not models:
        listed = "\n".join(f"{source}: {text}" for source, text in failures.items())
        raise WeightsError(f"no model can be compared.\n{listed}")
    times = _times(models, inputs, rounds)
    results = [
        ModelResult(
            source, metrics, *times[source], _size(models[source]), *_device_and_precision(models[source]), ranking
        )
        for source, (metrics, ranking) in evaluated.items()
    ]
    results.sort(key=lambda result: -result.metrics["mAP"])
    pids = identities.all_images().query_pids if protocol.rule.all_images else identities.query_pids
    differences = {
        (better.name, worse.name): compare_rankings(worse.ranking, better.ranking, pids.numpy())
        for better, worse in itertools.combinations(results, 2)
    }
    return ModelComparison(name, protocol.describe(), results, differences, failures, batch, torch.get_num_threads())


def _features(model: FeatureModel, items: Any, title: str) -> Tensor:
    """Compute the features (N, D) of all images, with the cameras and views that the model requires."""
    inputs = model.inputs.counts if isinstance(model, Predictor) else {}
    parts = []
    for start in track(range(0, len(items), _CHUNK), -(-len(items) // _CHUNK), title):
        chunk = [items[row] for row in range(start, min(start + _CHUNK, len(items)))]
        boxes = [item.box for item in chunk]
        options: dict[str, Any] = {} if not any(boxes) else {"boxes": boxes}
        for key, attribute in (("camids", "camid"), ("viewids", "viewid")):
            if key in inputs:
                options[key] = [int(getattr(item, attribute)) for item in chunk]
        parts.append(model.require_features([item.path for item in chunk], **options))
    return torch.cat(parts)


def _inputs(model: FeatureModel, dataset: Any, batch: int) -> list[Tensor]:
    """Preprocess the images of a batch; those of a smaller test set are repeated."""
    return [model.preprocess(dataset.items.path(row % len(dataset.items))) for row in range(batch)]


def _times(
    models: Mapping[str, FeatureModel], inputs: Mapping[str, Sequence[Tensor]], rounds: int
) -> dict[str, tuple[list[float], float]]:
    """Measure the latency of one image in ms (quartiles), and the throughput of a batch in images/s, of each model.

    The models take turns, so that a change of the machine's speed affects all of them.
    """
    seconds: dict[tuple[str, bool], list[float]] = {}
    for number in range(_WARM_UP + rounds):
        for source, model in models.items():
            for one in (True, False):
                images = inputs[source][:1] if one else inputs[source]
                start = time.perf_counter()
                model.features_of_preprocessed(images)
                if number >= _WARM_UP:
                    seconds.setdefault((source, one), []).append(time.perf_counter() - start)
    return {
        source: (
            (1000 * np.quantile(seconds[source, True], (0.25, 0.5, 0.75))).tolist(),
            len(inputs[source]) / statistics.median(seconds[source, False]),
        )
        for source in models
    }


def _size(model: FeatureModel) -> float:
    """Return the size of the weights, or of the files of an exported model, in MiB."""
    if isinstance(model, Predictor):
        tensors = model.model.state_dict().values()
        return float(sum(tensor.numel() * tensor.element_size() for tensor in tensors)) / 2**20
    file = model.checkpoint
    weights = file.with_suffix(".bin") if file.suffix == ".xml" else file.with_name(f"{file.name}.data")
    return sum(part.stat().st_size for part in (file, weights) if part.is_file()) / 2**20


def _device_and_precision(model: FeatureModel) -> tuple[str, str]:
    if isinstance(model, Predictor):
        return str(model.device), model.policy.describe()
    assert isinstance(model, ExportedModel)
    return "cpu", str(model.metadata.get("precision", "unknown"))
