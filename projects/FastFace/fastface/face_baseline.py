"""Model of face recognition that loads insightface's files."""

from typing import Any

import torch

from fastamp.config import CfgNode
from fastamp.modeling import META_ARCH_REGISTRY
from fastamp.modeling.heads import HEADS_REGISTRY, EmbeddingHead
from fastamp.modeling.meta_arch import Baseline
from fastamp.utils.errors import ConfigError
from fastface.datasets import FaceRecords


@HEADS_REGISTRY.register()
class FaceHead(EmbeddingHead):
    """FastReID's name of ``EmbeddingHead`` in its configs of faces."""


@META_ARCH_REGISTRY.register()
class FaceBaseline(Baseline):
    """Baseline whose features are evaluated by pairs of faces."""

    evaluator = "FaceEvaluator"
    supports_partial_fc = True

    @classmethod
    def adapt_to_training_set(cls, cfg: CfgNode, dataset: Any) -> tuple[Any, int]:
        """Return the config and the number of identities.

        Raises:
            ConfigError: if ``DATASETS.REC_PATH`` is set, and no training set reads it.
        """
        if cfg.DATASETS.REC_PATH and not any(isinstance(source, FaceRecords) for source in dataset.sources):
            raise ConfigError(
                f"DATASETS.REC_PATH={cfg.DATASETS.REC_PATH} is not read by the training sets "
                f"{', '.join(cfg.DATASETS.NAMES)}.\n"
                "  fix: set DATASETS.NAMES FaceFolder, or DATASETS.REC_PATH to an empty text"
            )
        return cfg, dataset.num_classes

    def convert_state_dict(self, state: dict[str, torch.Tensor], notes: list[str]) -> dict[str, torch.Tensor]:
        """Convert insightface's names, a linear layer ``fc`` and a batch norm ``features``, to those of the head.

        The bias of the linear layer becomes a part of the batch norm's mean.
        """
        if "fc.weight" in state and "features.running_mean" in state:
            state = dict(state)
            weight, bias = state.pop("fc.weight"), state.pop("fc.bias")
            of_head = {name: state.pop(name) for name in list(state) if name.startswith("features.")}
            state = {f"backbone.{name}": value for name, value in state.items()}
            state["heads.bottleneck.0.weight"] = weight[:, :, None, None]
            for name, value in of_head.items():
                part = name.removeprefix("features.")
                state[f"heads.bottleneck.1.{part}"] = value - bias if part == "running_mean" else value
        return super().convert_state_dict(state, notes)
