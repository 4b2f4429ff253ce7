"""Models of attributes, with and without re-identification."""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fastamp.config import CfgNode
from fastamp.modeling import META_ARCH_REGISTRY
from fastamp.modeling.losses.compute import Outputs
from fastamp.modeling.meta_arch import Baseline
from fastamp.utils.errors import ConfigError
from fastattr.attributes import Attribute, labels_of, parse_names, with_attributes
from fastattr.head import AttrHead
from fastattr.loss import BinaryCrossEntropyLoss

logger = logging.getLogger(f"fastamp.{__name__}")

BCE = "BinaryCrossEntropyLoss"


class _AttributeModel(Baseline):
    """Baseline with attributes.

    Args:
        attributes: A attributes.
        attribute_loss: loss of the attributes.
        parts: keyword arguments of ``Baseline``.
    """

    def __init__(self, *, attributes: list[Attribute], attribute_loss: BinaryCrossEntropyLoss, **parts: Any) -> None:
        super().__init__(**parts)
        self.attributes, self.attribute_loss = attributes, attribute_loss

    training_only = ("losses", "attribute_loss")

    @classmethod
    def further_options(cls, cfg: CfgNode) -> dict[str, Any]:
        """Return the attributes of the config and their loss."""
        return {
            "attributes": parse_names(cfg.MODEL.ATTRIBUTES.NAMES, cfg.DATASETS.CATEGORIES),
            "attribute_loss": BinaryCrossEntropyLoss.from_config(cfg),
        }

    def set_training_columns(self, labels: np.ndarray, columns: Mapping[str, Any]) -> None:
        """Compute the fraction of positives of each attribute from the columns of the training set."""
        names = {attribute.column for attribute in self.attributes}
        tensors = {name: torch.as_tensor(columns[name]) for name in names}
        positive = labels_of(tensors, self.attributes, torch.device("cpu"))
        self.attribute_loss.set_positive_rates(positive.nanmean(0).nan_to_num(0.5))

    def _attribute_loss(self, logits: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        return self.attribute_loss(logits, labels_of(batch, self.attributes, logits.device))


@META_ARCH_REGISTRY.register()
class AttrBaseline(_AttributeModel):
    """Model that outputs the probabilities of attributes, (B, A), in evaluation mode.

    The columns of the training set determine the attributes, and ``MODEL.HEADS.NUM_CLASSES`` is their number.
    """

    evaluator = "AttrEvaluator"

    @classmethod
    def adapt_to_training_set(cls, cfg: CfgNode, dataset: Any) -> tuple[CfgNode, int]:
        """Return the config with the attributes of a training set, and their number.

        Raises:
            ConfigError: if the losses are not those of attributes.
        """
        _check_losses(cfg, (BCE,))
        requested, cfg = cfg.MODEL.HEADS.NUM_CLASSES, with_attributes(cfg, dataset)
        number = len(cfg.MODEL.ATTRIBUTES.NAMES)
        if requested not in (0, number):
            logger.warning(
                "MODEL.HEADS.NUM_CLASSES is %d, but the training set has %d attributes (a text column has one for each "
                "of its values): %d is used.\n  fix: set MODEL.HEADS.NUM_CLASSES to 0",
                requested,
                number,
                number,
            )
        return cfg.with_values({"MODEL.HEADS.NUM_CLASSES": number}), number

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        """Build the parts configured in ``MODEL``.

        Raises:
            ConfigError: if the head is not that of attributes.
        """
        if cfg.MODEL.HEADS.NAME != "AttrHead":
            raise ConfigError(
                f"MODEL.META_ARCHITECTURE=AttrBaseline requires MODEL.HEADS.NAME AttrHead, found "
                f"{cfg.MODEL.HEADS.NAME}.\n  fix: set MODEL.HEADS.NAME to AttrHead, or MODEL.META_ARCHITECTURE to "
                "JointAttrBaseline for features and attributes"
            )
        # An evaluation builds models without classes, but the attributes are the output of this model.
        number = len(cfg.MODEL.ATTRIBUTES.NAMES) or cfg.MODEL.HEADS.NUM_CLASSES
        cfg = cfg.with_values({"MODEL.LOSSES.NAME": (), "MODEL.HEADS.NUM_CLASSES": number})
        return super().from_config(cfg)

    def features_and_attributes(self, batch: dict[str, Any] | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the probabilities (B, A), which are also the features, in evaluation mode."""
        probabilities = self(batch)
        return probabilities, probabilities

    def targets(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return the identities of a batch, which are not used."""
        return batch["targets"]

    def loss_terms(
        self, outputs: Outputs | list[tuple[float, Outputs]], targets: torch.Tensor, batch: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Compute ``{"loss_bce": scalar}`` from the logits of the head."""
        assert isinstance(outputs, dict)
        return {"loss_bce": self._attribute_loss(outputs["cls_outputs"], batch)}

    def set_label_range(self, *_: Any) -> None:
        """Ignore the range of identities: the classes of this model are attributes."""


@META_ARCH_REGISTRY.register()
class JointAttrBaseline(_AttributeModel):
    """Re-identification and attributes over one backbone (Lin et al. 2019, arXiv:1703.07220).

    In evaluation mode the model outputs the features (B, D); ``features_and_attributes`` also returns probabilities.

    Args:
        attribute_head: head of the attributes.
        parts: keyword arguments of ``Baseline`` and its attributes and their loss.
    """

    evaluator = "JointAttrEvaluator"

    def __init__(self, *, attribute_head: AttrHead, **parts: Any) -> None:
        super().__init__(**parts)
        self.attribute_head = attribute_head

    @classmethod
    def adapt_to_training_set(cls, cfg: CfgNode, dataset: Any) -> tuple[CfgNode, int]:
        """Return the config with the attributes of a training set, and the number of identities.

        Raises:
            ConfigError: if the losses lack ``BinaryCrossEntropyLoss``.
        """
        _check_losses(cfg, None)
        return with_attributes(cfg, dataset), dataset.num_classes

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        """Build the parts in ``MODEL``; losses other than ``BinaryCrossEntropyLoss`` are those of features."""
        others = tuple(name for name in cfg.MODEL.LOSSES.NAME if name != BCE)
        return super().from_config(cfg.with_values({"MODEL.LOSSES.NAME": others}))

    @classmethod
    def further_options(cls, cfg: CfgNode) -> dict[str, Any]:
        """Return the attributes of the config, their loss and their head."""
        number = len(cfg.MODEL.ATTRIBUTES.NAMES)
        values = {"MODEL.HEADS.NUM_CLASSES": number, "MODEL.HEADS.CLS_LAYER": "Linear", "MODEL.HEADS.WITH_BNNECK": True}
        head = AttrHead(**AttrHead.from_config(cfg.with_values(values)))
        return super().further_options(cfg) | {"attribute_head": head}

    def forward(self, batch: dict[str, Any] | torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """Compute features, or losses including ``loss_bce``; see ``Baseline.forward``."""
        batch = self.as_batch(batch)
        maps = self.feature_maps(batch)
        if not self.training:
            return self.heads(maps)
        targets = self.targets(batch)
        logits = self.attribute_head(maps)["cls_outputs"]
        terms = self.loss_terms(self.heads(maps, targets), targets, batch)
        return terms | {"loss_bce": self._attribute_loss(logits, batch)}

    def features_and_attributes(self, batch: dict[str, Any] | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute features (B, D) and probabilities (B, A), in evaluation mode."""
        maps = self.feature_maps(self.as_batch(batch))
        return self.heads(maps), self.attribute_head(maps)


def _check_losses(cfg: CfgNode, expected: tuple[str, ...] | None) -> None:
    names = tuple(cfg.MODEL.LOSSES.NAME)
    if BCE not in names or (expected is not None and names != expected):
        raise ConfigError(
            f"MODEL.META_ARCHITECTURE={cfg.MODEL.META_ARCHITECTURE} requires MODEL.LOSSES.NAME "
            f"{list(expected) if expected else f'with {BCE}'}, found {list(names)}.\n"
            f"  fix: {f'set MODEL.LOSSES.NAME to {list(expected)}' if expected else f'add {BCE} to MODEL.LOSSES.NAME'}"
        )
