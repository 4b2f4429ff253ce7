"""Clothes-based adversarial loss (CAL), which makes features of a person independent of the clothes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fastamp.amp import force_fp32
from fastamp.config import CfgNode, Key
from fastamp.modeling.losses.build import LOSS_REGISTRY, feature_dim
from fastamp.utils import comm
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
        "Clothes-based adversarial loss: number of epochs before the clothes classifier is trained and the loss "
        "applies.",
        low=0,
    ),
    Key("MODEL.LOSSES.CAL.LR", 3.5e-4, "Constant learning rate of the clothes classifier's Adam.", low=0),
    Key("MODEL.LOSSES.CAL.WEIGHT_DECAY", 5e-4, "Weight decay of the clothes classifier.", low=0),
    Key(
        "MODEL.LOSSES.CAL.MEMORY",
        "none",
        "Clothes-based adversarial loss: features of the outfits instead of a trained classifier. mean stores the mean "
        "of the images of an outfit in the batch, last that of its last image, as the program of the authors.",
        choices=("none", "mean", "last"),
    ),
    Key(
        "MODEL.LOSSES.CAL.MOMENTUM",
        0.0,
        "Clothes-based adversarial loss: weight of the stored feature of an outfit when MEMORY is updated.",
        low=0,
        high=1,
    ),
)


@force_fp32
def clothes_adversarial_loss(
    logits: torch.Tensor, clothes: torch.Tensor, is_of_identity: torch.Tensor, *, epsilon: float = 0.1
) -> torch.Tensor:
    """Compute the clothes-based adversarial loss.

    Gu et al. 2022, "Clothes-changing person re-identification with RGB modality only", arXiv:2204.06890, eqs. 5 and 6:
    each outfit c of the identity has the probability exp(s_c) / (exp(s_c) + sum of exp(s) over the outfits of other
    identities) and the weight epsilon / K, plus 1 - epsilon for the outfit that is worn; K is the number of outfits of
    the identity.

    Args:
        logits: (B, C) float, scaled cosines of the features and the clothes classes.
        clothes: (B,) int64 clothes classes in 0..C-1.
        is_of_identity: (B, C) bool, True for the outfits of the identity of each image.
        epsilon: label smoothing. Default 0.1.

    Returns:
        Scalar float32, the mean over the batch.
    """
    # Not minus infinity: the gradient would be NaN for an identity that owns all outfits.
    others = logits.masked_fill(is_of_identity, torch.finfo(logits.dtype).min / 2).logsumexp(1, keepdim=True)
    log_probability = logits - torch.logaddexp(logits, others)
    weights = is_of_identity * (epsilon / is_of_identity.sum(1, keepdim=True).clamp_min(1))
    weights = weights + (1 - epsilon) * F.one_hot(clothes, logits.shape[1])
    return -(weights * log_probability).sum(1).mean()


@torch.no_grad()
def adam_step(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    steps: torch.Tensor,
    *,
    lr: float,
    weight_decay: float,
) -> None:
    """Update a tensor in place with one step of Adam (Kingma and Ba 2015, arXiv:1412.6980, algorithm 1).

    Equals ``torch.optim.Adam`` with its default betas and epsilon, but neither reads the device nor needs a parameter.

    Args:
        parameter, gradient: (C, D) float32.
        exp_avg, exp_avg_sq: (C, D) float32, moving averages of the gradient and its square; updated.
        steps: (C,) float32, number of former steps of each row; updated.
        lr: learning rate.
        weight_decay: weight of the parameter in the gradient.
    """
    beta1, beta2, epsilon = 0.9, 0.999, 1e-8
    gradient = gradient + weight_decay * parameter
    exp_avg.lerp_(gradient, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    count = steps.add_(1)[:, None]
    denominator = (exp_avg_sq / (1 - beta2**count)).sqrt_().add_(epsilon)
    parameter.sub_(lr * exp_avg / (1 - beta1**count) / denominator)


@LOSS_REGISTRY.register()
class ClothesAdversarialLoss(nn.Module):
    """Clothes-based adversarial loss of the features, and training of its clothes classifier.

    As in the paper and the program of the authors, a forward pass in training mode first updates the classifier with
    the cross entropy of the scaled cosines of the features, with Adam, and then computes the adversarial loss with the
    updated classifier. Weights and optimizer state of the classifier are buffers: only the forward pass changes them, a
    skipped step restores them, and checkpoints contain them. If gradients are accumulated, each batch is one update.

    With ``memory``, the classifier consists of stored features of the outfits instead, updated before the loss. The
    loss is then over the outfits that were seen so far.

    The value of the loss is the sum of the cross entropy of the classifier before its update, which has no gradient,
    and the weighted adversarial loss. Before ``start_epoch``, it is 0.

    Args:
        num_clothes: number of outfits in the training set.
        feature_dim: width of the features.
        column: column of the outfits. Default "clothes".
        scale, epsilon, logit_scale: see ``MODEL.LOSSES.CAL``.
        start_epoch: number of epochs before the classifier is trained and the loss applies. Default 0.
        lr, weight_decay: settings of the classifier's Adam.
        memory: "none" (default) trains the classifier; "mean" stores the mean feature of the images of each outfit in
            the batch; "last" stores the feature of the last one, as the program of the authors.
        momentum: weight of the stored feature of an outfit in an update of the memory. Default 0. Differs from the
            program, which ignores it until all outfits are stored.

    Attributes:
        epoch: current epoch of the training, from 0; see ``set_epoch``.
    """

    loss_name = "loss_cal"
    start_epoch_key = "MODEL.LOSSES.CAL.START_EPOCH"
    written_in_forward = True

    weight: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    steps: torch.Tensor
    seen: torch.Tensor
    identity_of: torch.Tensor

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
        lr: float = 3.5e-4,
        weight_decay: float = 5e-4,
        memory: str = "none",
        momentum: float = 0.0,
    ) -> None:
        super().__init__()
        self.columns = (column,)
        self.scale, self.epsilon, self.logit_scale = scale, epsilon, logit_scale
        self.start_epoch, self.epoch = start_epoch, 0
        self.lr, self.weight_decay = lr, weight_decay
        self.memory, self.momentum = memory, momentum
        if memory == "none":
            self.register_buffer("weight", F.normalize(torch.empty(num_clothes, feature_dim).uniform_(-1, 1), dim=1))
            self.register_buffer("exp_avg", torch.zeros(num_clothes, feature_dim))
            self.register_buffer("exp_avg_sq", torch.zeros(num_clothes, feature_dim))
            # One number for each outfit: weights of another training set then replace none of the buffers.
            self.register_buffer("steps", torch.zeros(num_clothes))
            self.classifiers: tuple[str, ...] = ("weight", "exp_avg", "exp_avg_sq", "steps")
        else:
            self.register_buffer("weight", torch.zeros(num_clothes, feature_dim))
            self.register_buffer("seen", torch.zeros(num_clothes, dtype=torch.bool))
            self.classifiers = ("weight", "seen")
        # Not persistent: derived from the training set, see ``set_training_columns``.
        self.register_buffer("identity_of", torch.full((num_clothes,), -1), persistent=False)

    @classmethod
    def from_config(cls, cfg: CfgNode) -> "ClothesAdversarialLoss | None":
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
            lr=settings.LR,
            weight_decay=settings.WEIGHT_DECAY,
            memory=settings.MEMORY,
            momentum=settings.MOMENTUM,
        )

    def set_epoch(self, epoch: int) -> None:
        """Set the current epoch of the training, from 0."""
        self.epoch = epoch

    def set_training_columns(self, labels: np.ndarray, columns: Mapping[str, Any]) -> None:
        """Set the identity of each outfit from the training set.

        Args:
            labels: (N,) int64 identities.
            columns: column name -> (N,) values.

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
        self.identity_of[torch.from_numpy(pairs[0])] = torch.from_numpy(pairs[1]).to(self.identity_of.device)

    def equal_on_all_ranks(self) -> tuple[str, ...]:
        """Return the names of the buffers that are equal on all ranks: all of them."""
        return tuple(name for name, _ in self.named_buffers())

    @force_fp32
    def forward(self, outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        features, clothes = outputs["features"], outputs[self.columns[0]]
        if self.epoch < self.start_epoch:
            return 0 * features.sum()
        # Passes without gradients, such as a validation loss, do not train.
        updates = self.training and torch.is_grad_enabled()
        classification = features.new_zeros(())
        if self.memory == "none":
            classification = self._train_classifier(features.detach(), clothes, updates=updates)
        elif updates:
            self._update_memory(features.detach(), clothes)
        logits = self.logit_scale * F.normalize(features, dim=1) @ F.normalize(self.weight, dim=1).T
        is_of_identity = self.identity_of == targets[:, None]
        if self.memory != "none":
            is_of_identity = is_of_identity & self.seen
            logits = logits.masked_fill(~self.seen, torch.finfo(logits.dtype).min / 2)
        adversarial = clothes_adversarial_loss(logits, clothes, is_of_identity, epsilon=self.epsilon)
        return classification + self.scale * adversarial

    @torch.no_grad()
    def _train_classifier(self, features: torch.Tensor, clothes: torch.Tensor, *, updates: bool) -> torch.Tensor:
        """Compute the cross entropy of the clothes classifier; if ``updates``, update the classifier with it."""
        features, unit = F.normalize(features, dim=1), F.normalize(self.weight, dim=1)
        logits = self.logit_scale * features @ unit.T
        if updates:
            error = logits.softmax(1) - F.one_hot(clothes, logits.shape[1])
            slope = self.logit_scale / len(features) * error.T @ features  # derivative with respect to unit
            slope = slope - (slope * unit).sum(1, keepdim=True) * unit
            gradient = slope / self.weight.norm(dim=1, keepdim=True).clamp_min(1e-12)
            gradient = comm.all_reduce_sum(gradient) / comm.get_world_size()
            state = (self.exp_avg, self.exp_avg_sq, self.steps)
            adam_step(self.weight, gradient, *state, lr=self.lr, weight_decay=self.weight_decay)
        return F.cross_entropy(logits, clothes)

    @torch.no_grad()
    def _update_memory(self, features: torch.Tensor, clothes: torch.Tensor) -> None:
        """Store the features of the outfits in the batches of all ranks."""
        features, clothes = comm.all_gather(features), comm.all_gather(clothes)
        same = clothes[:, None] == clothes
        new = same.to(features.dtype) @ features / same.sum(1, keepdim=True) if self.memory == "mean" else features
        # Images of one outfit all write the value of the last one, so that their order does not matter.
        new = new[(same * torch.arange(1, len(clothes) + 1, device=clothes.device)).argmax(1)]
        momentum = self.momentum * self.seen[clothes, None]
        self.weight[clothes] = momentum * self.weight[clothes] + (1 - momentum) * new
        self.seen[clothes] = True
