"""Evaluation with a matcher: candidates by the distance of features, ranked by their matching scores."""

import logging
from typing import Any

import torch
from torch import nn

from domaingeneralization.head import MatchingBaseline
from domaingeneralization.matcher import QAConv
from fastamp.config import CfgNode, Key
from fastamp.evaluation import EVALUATOR_REGISTRY, Identities, ReidEvaluator, compute_metrics
from fastamp.evaluation.tracklets import COLUMN as TRACKLET
from fastamp.feature_pass import evaluation_mode
from fastamp.layers.distance import DistanceBlocks, FeatureDistances
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError
from fastamp.utils.progress import track

logger = logging.getLogger(f"fastamp.{__name__}")

KEYS = (
    Key("TEST.MATCHING.ENABLED", True, "Rank the nearest gallery images of each query by their matching scores."),
    Key("TEST.MATCHING.CANDIDATES", 100, "Gallery images for each query whose matching score is computed.", low=1),
)
# Bytes of the maps of candidates and of the similarities of their places that are computed at once.
_BLOCK_BYTES = 128 * 2**20


class MatchedDistances(DistanceBlocks):
    """Distances that rank the candidates by descending score, and all others behind them by their features.

    Args:
        features: distances of Q queries to G gallery images.
        candidates: (Q, K) int64, gallery images with a score.
        scores: (Q, K) float32, matching scores.
    """

    def __init__(self, features: FeatureDistances, candidates: torch.Tensor, scores: torch.Tensor) -> None:
        self.features = features
        self.shape, self.dtype, self.device = features.shape, features.dtype, features.device
        self.memory_budget_mb, self.limit = features.memory_budget_mb, None
        self.candidates = candidates.to(self.device)
        self.near = (scores.max() - scores).to(self.device, self.dtype)
        self.offset = float(self.near.max()) + 1

    def rows(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Write the distances of a range of queries into ``out``; see ``DistanceBlocks.rows``."""
        self.features.rows(start, stop, out)
        out.add_(self.offset).scatter_(1, self.candidates[start:stop], self.near[start:stop])


@torch.no_grad()
def matched_distances(
    features: FeatureDistances, matcher: QAConv, maps: torch.Tensor, *, candidates: int = 100
) -> MatchedDistances:
    """Compute the matching scores of each query and its nearest gallery images; each rank computes a part.

    Args:
        features: distances of Q queries to G gallery images.
        matcher: matcher in evaluation mode.
        maps: (Q + G, C, h, w) float32, maps of the queries and then of the gallery, on the CPU.
        candidates: gallery images for each query; all images of a smaller gallery. Default: 100.
    """
    num_query, num_gallery = features.shape
    count, device = min(candidates, num_gallery), matcher.fc.weight.device
    places = maps[0, 0].numel()
    size = max(1, _BLOCK_BYTES // (4 * count * places * (maps.shape[1] + 3 * places)))
    start, stop = comm.shard_range(num_query)
    nearest = [torch.empty(0, count, dtype=torch.int64)]
    nearest += [block.topk(count, largest=False).indices.cpu() for _, block in features.blocks(start, stop)]
    neighbors, scores = torch.cat(nearest), [torch.empty(0, count)]
    for first in track(range(start, stop, size), -(-(stop - start) // size), "matching"):
        last = min(first + size, stop)
        gallery = maps[num_query + neighbors[first - start : last - start]]
        scores.append(matcher.pairs(maps[first:last].to(device), gallery.to(device)).cpu())
    return MatchedDistances(features, comm.gather_rows(neighbors), comm.gather_rows(torch.cat(scores)))


@EVALUATOR_REGISTRY.register()
class MatchingEvaluator(ReidEvaluator):
    """Evaluate with the matcher of ``MatchingBaseline``, and report the results of the features next to it.

    The maps of all images are in memory: C * h * w * 4 bytes each, 98 KB for 128 channels and 24 x 8 places.

    Args:
        cfg, num_query, output_dir, options: see ``ReidEvaluator``.

    Raises:
        ConfigError: if ``TEST.MATCHING.ENABLED`` is combined with another ranking or the flip test.
    """

    def __init__(self, cfg: CfgNode, num_query: int, output_dir: str | None = None, **options: Any) -> None:
        self.matching = cfg.TEST.MATCHING
        if self.matching.ENABLED:
            for conflict, fix in (
                (cfg.TEST.RERANK.ENABLED, "TEST.RERANK.ENABLED False"),
                (cfg.TEST.AQE.ENABLED, "TEST.AQE.ENABLED False"),
                (cfg.TEST.FLIP.ENABLED, "TEST.FLIP.ENABLED False"),
                (cfg.TEST.PROTOCOL not in ("market1501", "no_camera"), "TEST.PROTOCOL market1501 or no_camera"),
            ):
                if conflict:
                    raise ConfigError(
                        "TEST.MATCHING.ENABLED=True ranks single, unchanged images, and needs a fixed query and "
                        f"gallery set.\n  fix: set {fix}, or TEST.MATCHING.ENABLED False"
                    )
        self._matcher: QAConv | None = None
        super().__init__(cfg, num_query, output_dir, **options)

    def forward(self, model: nn.Module, batch: dict[str, Any]) -> Any:
        """Compute ``(features, maps)`` of a batch; only the features without ``TEST.MATCHING.ENABLED``.

        Raises:
            ConfigError: if the model has no matcher.
        """
        if not self.matching.ENABLED:
            return super().forward(model, batch)
        if not isinstance(model, MatchingBaseline):
            raise ConfigError(
                f"TEST.EVALUATOR=MatchingEvaluator requires MatchingBaseline, got {type(model).__name__}.\n"
                "  fix: set MODEL.META_ARCHITECTURE to MatchingBaseline, or TEST.MATCHING.ENABLED to False"
            )
        self._matcher = model.heads.matcher
        return model.features_and_maps(batch)

    def process(self, inputs: dict[str, Any], outputs: Any) -> None:
        """Accumulate one batch; see ``ReidEvaluator.process``.

        Raises:
            ConfigError: if the features of tracklets are pooled.
        """
        if not self.matching.ENABLED:
            return super().process(inputs, outputs)
        if TRACKLET in inputs and self.tracklet_pool != "none":
            raise ConfigError(
                "TEST.MATCHING.ENABLED=True matches images, but features of tracklets are pooled.\n"
                "  fix: set TEST.TRACKLET.POOL none, or TEST.MATCHING.ENABLED False"
            )
        super().process(inputs, outputs[0])
        self.rows.append({"maps": outputs[1]})
        return None

    def gather(self) -> tuple[torch.Tensor, Identities, dict[str, torch.Tensor]]:
        """Gather the batches of all ranks; see ``ReidEvaluator.gather``."""
        features, identities, columns = super().gather()
        self._maps = columns.pop("maps", None)
        return features, identities, columns

    def distances(
        self, query_features: torch.Tensor, gallery_features: torch.Tensor, identities: Identities
    ) -> DistanceBlocks | None:
        """Return the distances by matching scores, and compute the results of the features only."""
        if self._maps is None or self._matcher is None:
            return None
        protocol = self.protocol
        self._plain = compute_metrics(query_features, gallery_features, identities, protocol).metrics()
        blocks = FeatureDistances(
            query_features, gallery_features, metric=protocol.metric, memory_budget_mb=protocol.memory_budget_mb
        )
        with evaluation_mode(self._matcher):
            return matched_distances(blocks, self._matcher, self._maps, candidates=self.matching.CANDIDATES)

    def evaluate(self) -> dict[str, Any] | None:
        """Compute the metrics; see ``ReidEvaluator.evaluate``.

        Returns:
            The metrics of the ranking by matching scores and ``features``, those of the features only. None on ranks
            other than 0.
        """
        metrics = super().evaluate()
        if metrics is None or not self.matching.ENABLED:
            return metrics
        names = ("Rank-1", "mAP")
        logger.info(
            "matching: Rank-1 %.2f, mAP %.2f; features: Rank-1 %.2f, mAP %.2f",
            *(metrics[name] for name in names),
            *(self._plain[name] for name in names),
        )
        return metrics | {"features": self._plain}
