"""Evaluation by deep spatial reconstruction: candidates by the global distance, then the mixture of both distances."""

import logging
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fastamp.config import CfgNode, Key
from fastamp.evaluation import EVALUATOR_REGISTRY, Identities, Protocol, ReidEvaluator
from fastamp.evaluation.metrics import rank_metrics
from fastamp.layers.distance import DistanceBlocks, FeatureDistances
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError
from fastamp.utils.progress import track
from partialreid.dsr_distance import reconstruction_distances
from partialreid.partialbaseline import PartialBaseline

logger = logging.getLogger(f"fastamp.{__name__}")

KEYS = (
    Key("TEST.DSR.ENABLED", True, "Rank the gallery by the mixture of the global and the reconstruction distance."),
    Key(
        "TEST.DSR.WEIGHT",
        0.5,
        "Weight of the reconstruction distance; choose_weight.py of PartialReID sets it for a run.",
        low=0,
        high=1,
    ),
    Key("TEST.DSR.CANDIDATES", 100, "Gallery images for each query whose reconstruction distance is computed.", low=1),
    Key("TEST.DSR.RIDGE", 0.001, "Weight of the squared coefficients of the reconstruction.", above=0),
)

FAR = 100.0
"""Reconstruction distance of images that are not candidates, as in FastReID; that of a candidate is at most 1."""
WEIGHTS = tuple(number / 100 for number in range(101))


class PlaceFile:
    """Places of images in a temporary file, so that memory holds only a part of them.

    The places of an image of 384 x 128 pixels need 0.9 MB with a ResNet-50. The file is deleted when it is closed.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  closed with the object
        self._rows: list[torch.Tensor] = []
        self._shape: tuple[int, ...] = ()

    def append(self, rows: torch.Tensor, places: torch.Tensor) -> None:
        """Write the places (B, C, P) of the images with the given positions in the test set (B,)."""
        shape = tuple(places.shape[1:])
        self._shape = self._shape or shape
        if shape != self._shape:
            raise ConfigError(
                f"the images have different numbers of places: {self._shape} and {shape} (channels, places).\n"
                "  fix: use test images of one size (INPUT.SIZE_TEST)"
            )
        self._rows.append(rows.cpu())
        self._file.write(places.float().cpu().contiguous().numpy().tobytes())

    def finish(self) -> None:
        """Receive the rows of all ranks, and prepare for reading."""
        self._file.flush()
        self._positions = torch.cat(self._rows)
        if comm.is_distributed():
            self._receive()
        self._places = np.memmap(self._file, np.float32, "r", shape=(len(self._positions), *self._shape))
        self._order = self._positions.argsort().numpy()

    def _receive(self) -> None:
        """Write the rows of all ranks to the file of each rank, in parts of 64 images."""
        local = np.memmap(self._file, np.float32, "r", shape=(len(self._positions), *self._shape))
        positions, complete = self._positions, PlaceFile()
        parts = int(max(comm.gather_rows(torch.tensor([-(-len(positions) // 64)])).tolist()))
        for part in range(parts):
            chunk = slice(64 * part, 64 * (part + 1))
            places = torch.from_numpy(np.array(local[chunk]))
            complete.append(comm.gather_rows(positions[chunk]), comm.gather_rows(places))
        complete._file.flush()
        self._file, self._positions = complete._file, torch.cat(complete._rows)

    def read(self, rows: Sequence[int] | np.ndarray, device: torch.device) -> torch.Tensor:
        """Return the places of images, (B, C, P) float32 of unit length over the channels."""
        places = torch.from_numpy(np.stack([self._places[self._order[row]] for row in rows]))
        return F.normalize(places.to(device), dim=1)

    @property
    def image_bytes(self) -> int:
        """Size of the places of one image in bytes."""
        return int(np.prod(self._shape)) * 4


class MixedDistances(DistanceBlocks):
    """Distances (1 - weight) * cosine distance + weight * reconstruction distance.

    Args:
        features: cosine distances of Q queries to G gallery images.
        candidates: (Q, K) int64, gallery images whose reconstruction distances are known.
        reconstruction: (Q, K) float32, their reconstruction distances; that of others is ``FAR``.
        weight: weight of the reconstruction distance, in 0..1.
    """

    def __init__(
        self, features: FeatureDistances, candidates: torch.Tensor, reconstruction: torch.Tensor, weight: float
    ) -> None:
        self.features, self.weight = features, weight
        self.shape, self.dtype, self.device = features.shape, features.dtype, features.device
        self.memory_budget_mb = features.memory_budget_mb
        self.candidates = candidates.to(self.device)
        self.reconstruction = reconstruction.to(self.device, self.dtype)
        self.limit = 2 - weight  # of candidates

    def rows(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Write the distances of a range of queries into ``out``; see ``DistanceBlocks.rows``."""
        self.features.rows(start, stop, out)
        self.mix(start, out, self.weight)

    def mix(self, start: int, distances: torch.Tensor, weight: float) -> None:
        """Replace the cosine distances (B, G) of queries ``start:start + B`` by their mixture, in place."""
        rows = slice(start, start + len(distances))
        near = distances.gather(1, self.candidates[rows]).mul_(1 - weight)
        near.add_(self.reconstruction[rows], alpha=weight)
        distances.mul_(1 - weight).add_(weight * FAR).scatter_(1, self.candidates[rows], near)


def mixed_distances(
    features: FeatureDistances,
    scores: torch.Tensor,
    places: PlaceFile,
    *,
    weight: float,
    candidates: int = 100,
    ridge: float = 0.001,
) -> MixedDistances:
    """Compute the reconstruction distances of each query to its nearest gallery images by the global distance.

    Blocks of queries are kept in memory, and gallery images are read one after another. Each rank computes a part of
    the queries.

    Args:
        features: cosine distances of Q queries to G gallery images.
        scores: (Q, P) float32 weights of the places of the queries.
        places: places of the Q queries and then of the G gallery images.
        weight: weight of the reconstruction distance.
        candidates: gallery images for each query; all images of a smaller gallery. Default 100.
        ridge: see ``reconstruction_distances``. Default 0.001.
    """
    num_query, num_gallery = features.shape
    device, count = features.device, min(candidates, num_gallery)
    # The queries of a block, their copies in the matrix products, and the residuals.
    size = max(1, int(features.memory_budget_mb * 2**20 / 5 / places.image_bytes))
    start, stop = comm.shard_range(num_query)
    mixed = torch.empty(stop - start, count)
    blocks = [block.topk(count, largest=False).indices.cpu() for _, block in features.blocks(start, stop)]
    nearest = torch.cat([torch.empty(0, count, dtype=torch.int64), *blocks])
    for first in track(range(start, stop, size), -(-(stop - start) // size), "reconstructing"):
        last = min(first + size, stop)
        queries, weights = places.read(range(first, last), device), scores[first:last].to(device)
        block = nearest[first - start : last - start]
        for image in block.unique().tolist():
            rows, columns = (block == image).nonzero(as_tuple=True)
            (dictionary,) = places.read([num_query + image], device)
            chosen = rows.to(device)
            near_distances = reconstruction_distances(queries[chosen], weights[chosen], dictionary, ridge)
            mixed[first - start + rows, columns] = near_distances.cpu()
    return MixedDistances(features, comm.gather_rows(nearest), comm.gather_rows(mixed), weight)


def rank1_by_weight(
    mixed: MixedDistances, identities: Identities, protocol: Protocol, weights: Sequence[float] = WEIGHTS
) -> list[float]:
    """Compute Rank-1 in percent for each weight of the reconstruction distance; 0 if no query has a match."""
    matches = protocol.rule.ranker(identities, protocol.metric).matches
    hits, valid = np.zeros(len(weights)), 0
    for start, distances in mixed.features.blocks():
        for first, last in matches.spans(start, start + len(distances)):
            pairs = matches.pairs(first, last)
            part = distances[first - start : last - start]
            matching = torch.zeros(part.shape, dtype=torch.bool)
            matching[pairs.rows, pairs.columns] = True
            valid += int(matching.any(1).sum())
            for number, weight in enumerate(weights):
                mixture = part.clone()
                mixed.mix(first, mixture, weight)
                mixture[pairs.junk_rows, pairs.junk_columns] = torch.inf
                hits[number] += int(matching[torch.arange(len(part)), mixture.argmin(1).cpu()].sum())
    return (100 * hits / max(valid, 1)).tolist()


def best_weight(rates: Sequence[float]) -> float:
    """Return the weight in ``WEIGHTS`` with the highest Rank-1; of equal ones the smallest."""
    return WEIGHTS[int(np.argmax(rates))]


@EVALUATOR_REGISTRY.register()
class DsrEvaluator(ReidEvaluator):
    """Evaluate by deep spatial reconstruction, and report the results of the global features next to it.

    FastReID chooses the weight of the reconstruction distance by the Rank-1 of the test queries. Here, the weight is
    ``TEST.DSR.WEIGHT``, which ``choose_weight`` chooses on training identities that were held out. The result with the
    best weight for the test queries is reported as an oracle.

    Args:
        cfg, num_query, output_dir, options: see ``ReidEvaluator``.

    Raises:
        ConfigError: if ``TEST.DSR.ENABLED`` is combined with another distance, another ranking or the flip test.

    Attributes:
        rates: Rank-1 in percent for each weight in ``WEIGHTS``, of the last evaluation.
    """

    def __init__(self, cfg: CfgNode, num_query: int, output_dir: str | None = None, **options: Any) -> None:
        self.dsr = cfg.TEST.DSR
        if self.dsr.ENABLED:
            for conflict, fix in (
                (cfg.TEST.METRIC != "cosine", "TEST.METRIC cosine"),
                (cfg.TEST.RERANK.ENABLED, "TEST.RERANK.ENABLED False"),
                (cfg.TEST.AQE.ENABLED, "TEST.AQE.ENABLED False"),
                (cfg.TEST.FLIP.ENABLED, "TEST.FLIP.ENABLED False"),
                (cfg.TEST.PROTOCOL not in ("market1501", "no_camera"), "TEST.PROTOCOL market1501 or no_camera"),
            ):
                if conflict:
                    raise ConfigError(
                        "TEST.DSR.ENABLED=True mixes the reconstruction distance with the cosine distance of features "
                        f"from unchanged images, and needs a fixed query and gallery set.\n  fix: set {fix}, or "
                        "TEST.DSR.ENABLED False"
                    )
        self.rates: list[float] = []
        super().__init__(cfg, num_query, output_dir, **options)

    def reset(self) -> None:
        """Discard all features and places."""
        super().reset()
        self._places = PlaceFile()

    def forward(self, model: nn.Module, batch: dict[str, Any]) -> Any:
        """Compute ``(features, places, scores)`` of a batch; only the features without ``TEST.DSR.ENABLED``.

        Raises:
            ConfigError: if the model has no places.
        """
        if not self.dsr.ENABLED:
            return super().forward(model, batch)
        if not isinstance(model, PartialBaseline):
            raise ConfigError(
                f"TEST.EVALUATOR=DsrEvaluator requires PartialBaseline, got {type(model).__name__}.\n"
                "  fix: set MODEL.META_ARCHITECTURE to PartialBaseline, or TEST.DSR.ENABLED to False"
            )
        return model.places(batch)

    def process(self, inputs: dict[str, Any], outputs: Any) -> None:
        """Accumulate one batch; see ``ReidEvaluator.process``."""
        if not self.dsr.ENABLED:
            return super().process(inputs, outputs)
        features, places, scores = outputs
        super().process(inputs, features)
        self._places.append(self.rows.columns["indices"][-1], places)
        self.rows.append({"scores": scores})
        return None

    def gather(self) -> tuple[torch.Tensor, Identities, dict[str, torch.Tensor]]:
        """Gather the batches of all ranks; see ``ReidEvaluator.gather``."""
        features, identities, columns = super().gather()
        if self.dsr.ENABLED:
            self._all_scores = columns["scores"]
            self._places.finish()
        return features, identities, columns

    def distances(
        self, query_features: torch.Tensor, gallery_features: torch.Tensor, identities: Identities
    ) -> DistanceBlocks | None:
        """Return the mixed distances, and compute the results without reconstruction and with the oracle's weight."""
        if not self.dsr.ENABLED:
            return None
        budget = self.protocol.memory_budget_mb
        cosine = FeatureDistances(query_features, gallery_features, metric="cosine", memory_budget_mb=budget)
        mixed = mixed_distances(
            cosine,
            self._all_scores[: len(query_features)],
            self._places,
            weight=self.dsr.WEIGHT,
            candidates=self.dsr.CANDIDATES,
            ridge=self.dsr.RIDGE,
        )
        self.rates = rank1_by_weight(mixed, identities, self.protocol)
        oracle = best_weight(self.rates)
        best = MixedDistances(cosine, mixed.candidates, mixed.reconstruction, oracle)
        self._compared = {
            "global features": rank_metrics(cosine, identities, self.protocol),
            "oracle": rank_metrics(best, identities, self.protocol) | {"weight": oracle},
        }
        return mixed

    def evaluate(self) -> dict[str, Any] | None:
        """Compute the metrics; see ``ReidEvaluator.evaluate``.

        Returns:
            The metrics of the mixed distances and ``dsr``: ``{"weight", "global features": metrics without
            reconstruction, "oracle": metrics and weight of the oracle}``. None on ranks other than 0.
        """
        metrics = super().evaluate()
        if metrics is None or not self.dsr.ENABLED:
            return metrics
        compared = self._compared
        logger.info(
            "DSR with weight %.2f: Rank-1 %.2f, mAP %.2f; global features: Rank-1 %.2f, mAP %.2f; oracle (weight %.2f, "
            "chosen by the Rank-1 of these test queries): Rank-1 %.2f, mAP %.2f",
            self.dsr.WEIGHT,
            *(metrics[name] for name in ("Rank-1", "mAP")),
            *(compared["global features"][name] for name in ("Rank-1", "mAP")),
            *(compared["oracle"][name] for name in ("weight", "Rank-1", "mAP")),
        )
        return metrics | {"dsr": {"weight": self.dsr.WEIGHT, **compared}}
