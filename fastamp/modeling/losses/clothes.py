"""Clothes-based adversarial loss (CAL), which makes features of a person independent of the clothes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fastamp.amp import force_fp32
from fastamp.config import Key
from fastamp.modeling.losses.build import LOSS_REGISTRY, feature_dim
from fastamp.utils.errors import ConfigError, DataError, did_you_mean

KEYS = (
    Key("MODEL.LOSSES.CAL.SCALE", 1.0, "Clothes-based adversarial loss: weight in the total loss.", low=0),
    Key(
        "MODEL.LOSSES.CAL.COLUMN",
        "clothes",
        "Clothes-based adversarial loss: column with the clothes. Clothes of different identities are different.",
    ),
    Key("MODEL.LOSSES.CAL.EPSILON", 0.1, "Clothes-based adversarial loss: label smoothing.", low=0, high=1),
    Key("MODEL.LOSSES.CAL.LOGIT_SCALE", 16.0, "Clothes-based adversarial loss: factor of the cosines.", above=0),
    Key(
        "MODEL.LOSSES.CAL.START_EPOCH",
        25,
        "Clothes-based adversarial loss: number of epochs before it applies. The clothes classifier is trained from "
        "the beginning.",
        low=0,
    ),
    Key("MODEL.LOSSES.CAL.LR", 3.5e-4, "Constant learning rate of the clothes classifier's own Adam.", low=0),
    Key("MODEL.LOSSES.CAL.WEIGHT_DECAY", 5e-4, "Weight decay of the clothes classifier.", low=0),
)


@force_fp32
def clothes_adversarial_loss(
    logits: torch.Tensor, clothes: torch.Tensor, own: torch.Tensor, *, epsilon: float = 0.1
) -> torch.Tensor:
    """Compute the clothes-based adversarial loss.

    Gu et al. 2022, "Clothes-changing person re-identification with RGB modality only", arXiv:2204.06890, eqs. 5 and 6:
    each outfit c of the identity has the probability exp(s_c) / (exp(s_c) + sum of exp(s) over the outfits of other
    identities) and the weight epsilon / K, plus 1 - epsilon for the outfit that is worn; K is the number of outfits of
    the identity.

    Args:
        logits (torch.Tensor): (B, C) float, scaled cosines of the features and the clothes classes.
        clothes (torch.Tensor): (B,) int64 clothes classes in 0..C-1.
        own (torch.Tensor): (B, C) bool, True for the outfits of the identity of each image.
        epsilon (float): label smoothing. Default 0.1.

    Returns:
        torch.Tensor: scalar float32, the mean over the batch.
    """
    # Not minus infinity: the gradient would be NaN for an identity that owns all outfits.
    others = logits.masked_fill(own, torch.finfo(logits.dtype).min / 2).logsumexp(1, keepdim=True)
    log_probability = logits - torch.logaddexp(logits, others)
    weights = own * (epsilon / own.sum(1, keepdim=True).clamp_min(1))
    weights = weights + (1 - epsilon) * F.one_hot(clothes, logits.shape[1])
    return -(weights * log_probability).sum(1).mean()


@LOSS_REGISTRY.register()
class ClothesAdversarialLoss(nn.Module):
    """Loss of the clothes classifier, and the clothes-based adversarial loss of the features.

    The classifier is trained with a cross entropy over scaled cosines of detached features, by its own Adam. The
    adversarial loss has no gradient for the classifier. Differs from the program of the authors: the adversarial loss
    uses the classifier before its update with this batch, not after it, because one backward pass computes both.

    Args:
        num_clothes (int): number of outfits in the training set.
        feature_dim (int): width of the features.
        column (str): column of the outfits. Default "clothes".
        scale, epsilon, logit_scale (float): see ``MODEL.LOSSES.CAL``.
        start_epoch (int): number of epochs before the adversarial loss applies. Default 0.
        batch_size (int): number of training images in a pass, over all ranks. Default 64.
        lr, weight_decay (float): settings of the classifier's optimizer.
    """

    loss_name = "loss_cal"
    classifiers = ("weight",)

    def __init__(
        self,
        *,
        num_clothes: int,
        feature_dim: int,
        column: str = "clothes",
        scale: float = 1.0,
        epsilon: float = 0.1,
        logit_scale: float = 16.0,
        start_epoch: int = 0,
        batch_size: int = 64,
        lr: float = 3.5e-4,
        weight_decay: float = 5e-4,
    ) -> None:
        super().__init__()
        self.columns = (column,)
        self.scale, self.epsilon, self.logit_scale = scale, epsilon, logit_scale
        self.start_epoch, self.batch_size, self.start = start_epoch, batch_size, 0
        self.lr, self.weight_decay = lr, weight_decay
        self.weight = nn.Parameter(torch.empty(num_clothes, feature_dim))
        nn.init.kaiming_normal_(self.weight, mode="fan_out")
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        # Not persistent: derived from the training set, see ``set_training_columns``.
        self.register_buffer("identity_of", torch.full((num_clothes,), -1), persistent=False)

    @classmethod
    def from_config(cls, cfg: Any) -> "ClothesAdversarialLoss | None":
        """Build the loss configured in ``MODEL.LOSSES.CAL``; None for an evaluation, which has no training set.

        Raises:
            ConfigError: if the training set has no texts in the column of the clothes.
        """
        settings, categories = cfg.MODEL.LOSSES.CAL, cfg.DATASETS.NUM_CATEGORIES
        num_clothes = categories.get(settings.COLUMN, 0)
        if not num_clothes and not cfg.MODEL.HEADS.NUM_CLASSES:
            return None
        if not num_clothes:
            raise ConfigError(
                f"ClothesAdversarialLoss needs the text column {settings.COLUMN!r} (MODEL.LOSSES.CAL.COLUMN); text "
                f"columns of the training set: {', '.join(categories) or 'none'}."
                f"{did_you_mean(settings.COLUMN, categories)}\n"
                f"  fix: use a dataset with this column; for integers, set DATASETS.CATEGORIES.{settings.COLUMN} to []"
            )
        return cls(
            num_clothes=num_clothes,
            feature_dim=feature_dim(cfg),
            column=settings.COLUMN,
            scale=settings.SCALE,
            epsilon=settings.EPSILON,
            logit_scale=settings.LOGIT_SCALE,
            start_epoch=settings.START_EPOCH,
            batch_size=cfg.SOLVER.IMS_PER_BATCH,
            lr=settings.LR,
            weight_decay=settings.WEIGHT_DECAY,
        )

    def set_training_columns(self, labels: np.ndarray, columns: Mapping[str, Any]) -> None:
        """Set the identity of each outfit, and the length of an epoch, from the training set.

        Args:
            labels (np.ndarray): (N,) int64 identities.
            columns (Mapping): column name -> (N,) values.

        Raises:
            DataError: if an image has no outfit, or an outfit belongs to several identities.
        """
        clothes = np.asarray(columns[self.columns[0]])
        if (clothes < 0).any():
            raise DataError(
                f"ClothesAdversarialLoss: {int((clothes < 0).sum())} of {len(clothes)} training images have no value "
                f"in the column {self.columns[0]!r}.\n  fix: label these images, or remove them from the training set"
            )
        pairs = np.unique(np.stack((clothes, labels)), axis=1)
        if len(pairs[0]) > len(np.unique(pairs[0])):
            raise DataError(
                f"ClothesAdversarialLoss: a value of the column {self.columns[0]!r} belongs to several identities.\n"
                "  fix: give each outfit of each identity its own name, e.g. IDENTITY_OUTFIT"
            )
        self.start = self.start_epoch * (len(clothes) // self.batch_size)
        self.identity_of[torch.from_numpy(pairs[0])] = torch.from_numpy(pairs[1]).to(self.identity_of.device)

    def build_optimizer(self) -> torch.optim.Optimizer:
        """Build the classifier's Adam, whose learning rate is constant."""
        groups = [{"params": [self.weight], "scheduled": False}]
        return torch.optim.Adam(groups, lr=self.lr, weight_decay=self.weight_decay)

    @force_fp32
    def forward(self, outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        features, clothes = F.normalize(outputs["features"], dim=1), outputs[self.columns[0]]
        weight = F.normalize(self.weight, dim=1)
        classification = F.cross_entropy(self.logit_scale * features.detach() @ weight.T, clothes)
        own = self.identity_of == targets[:, None]
        logits = self.logit_scale * features @ weight.detach().T
        adversarial = clothes_adversarial_loss(logits, clothes, own, epsilon=self.epsilon)
        started = self.passes >= self.start
        if self.training:
            self.passes += 1
        return classification + self.scale * started * adversarial
