"""Evaluation by Recall@k, without cameras."""

from typing import Any, ClassVar

from fastamp.config import CfgNode, Key
from fastamp.data.datasets.base import DATASET_REGISTRY
from fastamp.evaluation import EVALUATOR_REGISTRY, Protocol, ReidEvaluator
from fastamp.evaluation.product_retrieval import recall_name
from fastamp.utils.errors import ConfigError

KEYS = (Key("TEST.RECALLS", (1, 2, 4, 8, 16, 32), "RetriEvaluator: numbers k of Recall@k to report.", low=1),)


@EVALUATOR_REGISTRY.register()
class RetriEvaluator(ReidEvaluator):
    """``ReidEvaluator`` with the ranks ``TEST.RECALLS``, and the published protocol of the test set.

    Each test image is a query against all others (``recall_at_k``), or the queries have a gallery
    (``recall_at_k_gallery``: InShop, and datasets that are not from this field). ``TEST.PROTOCOL`` other than
    market1501, its default, overrides the protocol, e.g. ``recall_at_k_first_hit``. ``metric`` is the first of the
    recalls. It is the evaluator of the datasets ``test_sets``; ``TEST.EVALUATOR`` selects it for others.

    Args:
        cfg: config.
        num_query, output_dir, options: see ``ReidEvaluator``.

    Raises:
        ConfigError: if the test sets have different protocols.
    """

    test_sets: ClassVar[tuple[str, ...]] = ("CUB", "CUB200", "Cars196", "SOP", "InShop", "DemoRetri")

    def __init__(self, cfg: CfgNode, num_query: int, output_dir: str | None = None, **options: Any) -> None:
        super().__init__(retrieval_config(cfg), num_query, output_dir, **options)
        self.first = recall_name(cfg.TEST.RECALLS[0])

    @classmethod
    def describe_protocol(cls, cfg: CfgNode) -> str:
        """Describe the evaluation in one line."""
        return Protocol.from_config(retrieval_config(cfg)).describe()

    def evaluate(self) -> dict[str, Any] | None:
        """Compute the metrics, see ``ReidEvaluator.evaluate``; ``metric`` is the first recall."""
        metrics = super().evaluate()
        return metrics if metrics is None else metrics | {"metric": metrics[self.first]}


def retrieval_config(cfg: CfgNode) -> Any:
    """Return the config with the ranks and the protocol of ``RetriEvaluator``.

    Raises:
        ConfigError: if the test sets have different protocols.
    """
    values = {"TEST.RANKS": cfg.TEST.RECALLS}
    if cfg.TEST.PROTOCOL == "market1501":
        protocols = {name: _protocol_of(name) for name in cfg.DATASETS.TESTS}
        if len(set(protocols.values())) > 1:
            raise ConfigError(
                f"RetriEvaluator: the test sets have different protocols: "
                f"{', '.join(f'{name} {protocol}' for name, protocol in protocols.items())}.\n"
                "  fix: evaluate them one after another, or set TEST.PROTOCOL"
            )
        values["TEST.PROTOCOL"] = next(iter(protocols.values()), "recall_at_k")
    return cfg.with_values(values)


def _protocol_of(name: str) -> str:
    """Return the first recall protocol of a test set."""
    published = DATASET_REGISTRY.get(name).protocols if name in DATASET_REGISTRY else ()
    return next((name for name in published if name.startswith("recall_at_k")), "recall_at_k_gallery")
