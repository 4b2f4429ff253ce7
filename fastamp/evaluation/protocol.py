"""Settings of an evaluation: the ranking rule, and everything that is not a part of it."""

from dataclasses import dataclass, field

import torch

from fastamp.config import CfgNode
from fastamp.evaluation.identities import CAMERA
from fastamp.evaluation.neighbors import BACKENDS
from fastamp.evaluation.query_expansion import QueryExpansion
from fastamp.evaluation.ranking_rule import PROTOCOL_REGISTRY, Market1501, RankingRule
from fastamp.evaluation.rerank import ReRanking
from fastamp.layers.distance import check_metric
from fastamp.utils.errors import ConfigError, check_choice


def accept_rate_name(rate: float) -> str:
    """Return the metric name of the true accept rate at the false accept rate ``rate``, e.g. ``TAR@FAR=0.001``."""
    return f"TAR@FAR={rate:.10g}"


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Settings of an evaluation.

    Attributes:
        metric: ``"cosine"`` (default) or ``"euclidean"``.
        rule: ranking rule. Default: that of Market-1501.
        seed: seed of the bootstrap, and of the pairs sampled for reports. Default: 0.
        ranks: ranks at which to report the CMC. Default: 1, 5, 10.
        resamples: number of bootstrap resamples for the 95 % confidence intervals of mAP and Rank-1. Default: 1000; 0
            disables them.
        false_accept_rates: false accept rates in 0..1 at which to report the true accept rate. Default: None, no
            verification.
        expansion: query expansion. Default: None.
        re_ranking: re-ranking. Default: None.
        backend: backend of ``nearest_neighbors``. Default: ``"auto"``.
        memory_budget_mb: memory for distances in MiB. Default: 256.
        group_by: column, or ``"camera"``, by whose value in the query the metrics are also computed. Default: "", no
            groups.

    Raises:
        ConfigError: if a value is unknown, or settings are incompatible.
    """

    metric: str = "cosine"
    rule: RankingRule = field(default_factory=Market1501)
    seed: int = 0
    ranks: tuple[int, ...] = (1, 5, 10)
    resamples: int = 1000
    false_accept_rates: tuple[float, ...] | None = None
    expansion: QueryExpansion | None = None
    re_ranking: ReRanking | None = None
    backend: str = "auto"
    memory_budget_mb: float = 256
    group_by: str = ""

    def __post_init__(self) -> None:
        check_metric(self.metric)
        check_choice("TEST.KNN_BACKEND", self.backend, BACKENDS)
        parts = {"RERANK": self.re_ranking, "AQE": self.expansion, "ROC": self.false_accept_rates}
        for name, part in parts.items():
            if part is None:
                continue
            if self.rule.draws:
                raise ConfigError(
                    f"TEST.{name}.ENABLED=True requires a fixed gallery, but TEST.PROTOCOL={self.rule.name} draws "
                    "random galleries.\n"
                    f"  fix: set TEST.{name}.ENABLED False, or TEST.PROTOCOL no_camera to use the fixed gallery"
                )
            if self.rule.all_images and name != "ROC":
                raise ConfigError(
                    f"TEST.{name}.ENABLED=True requires separate queries and gallery images, but under TEST.PROTOCOL="
                    f"{self.rule.name} each image is a query against all others.\n"
                    f"  fix: set TEST.{name}.ENABLED False, or use another TEST.PROTOCOL"
                )

    @classmethod
    def from_config(cls, cfg: CfgNode) -> "Protocol":
        """Build the settings from ``cfg.TEST``.

        Raises:
            ConfigError: if a value is invalid, or settings are incompatible.
        """
        test = cfg.TEST
        return cls(
            metric=test.METRIC,
            rule=PROTOCOL_REGISTRY.build(test.PROTOCOL, cfg),
            seed=test.SEED,
            ranks=tuple(sorted({1, 5, 10, *test.RANKS})),
            resamples=test.BOOTSTRAP,
            false_accept_rates=tuple(sorted(test.ROC.FAR)) if test.ROC.ENABLED else None,
            expansion=QueryExpansion.from_config(cfg) if test.AQE.ENABLED else None,
            re_ranking=ReRanking.from_config(cfg) if test.RERANK.ENABLED else None,
            backend=test.KNN_BACKEND,
            memory_budget_mb=test.MEMORY_BUDGET_MB,
            group_by=test.GROUP_BY,
        )

    def metric_names(self) -> list[str]:
        """List the names of the metrics in percent that ``EvaluationResult.metrics`` computes with these settings.

        The names are known before an evaluation, so that the config can select the metric for the best model.
        """
        return self.rule.metric_names(self.ranks) + [accept_rate_name(rate) for rate in self.false_accept_rates or ()]

    @property
    def columns(self) -> dict[str, str]:
        """Name of each column that the evaluation needs -> the config key and value that need it."""
        needed = dict.fromkeys(self.rule.columns, f"TEST.PROTOCOL={self.rule.name}")
        if self.group_by not in ("", CAMERA, *needed):
            needed[self.group_by] = f"TEST.GROUP_BY={self.group_by}"
        return needed

    def dtype(self, features: torch.dtype) -> torch.dtype:
        """Return the dtype of distances: float64 for float64 features if AQE and re-ranking are off, else float32."""
        if features == torch.float64 and self.expansion is None and self.re_ranking is None:
            return torch.float64
        return torch.float32

    def describe(self, features: torch.dtype = torch.float32) -> str:
        """Describe the evaluation in one line, for features of the given dtype."""
        parts = [
            f"{self.metric} distance in {str(self.dtype(features)).removeprefix('torch.')}",
            self.rule.describe(),
            "trapezoid AP" if self.rule.trapezoid else "",
            str(self.expansion or ""),
            str(self.re_ranking or "no re-ranking"),
        ]
        return "; ".join(filter(None, parts))
