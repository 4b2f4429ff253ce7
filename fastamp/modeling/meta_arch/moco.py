"""Momentum contrast with labels: a memory bank of features, which an encoder that moves slowly has filled."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastamp.amp import apply_force_fp32, force_fp32
from fastamp.checkpoint.load_state import classifiers, convert_state_dict
from fastamp.config import Key
from fastamp.modeling.losses.build import feature_dim
from fastamp.modeling.losses.compute import Outputs, main_outputs
from fastamp.modeling.losses.pairwise_cosine import log_sum_exp_loss
from fastamp.modeling.meta_arch.baseline import Baseline
from fastamp.modeling.meta_arch.build import META_ARCH_REGISTRY
from fastamp.modeling.meta_arch.momentum import MomentumCopy
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError

KEYS = (
    Key("MODEL.QUEUE_SIZE", 8192, "Features kept in the memory bank of the MoCo architecture.", low=1),
    Key(
        "MODEL.MOCO.MOMENTUM",
        0.999,
        "MoCo: share of the key encoder's weights that each iteration keeps, the rest being the model's; 0 stores the "
        "model's own features, as FastReID does.",
        low=0,
        high=1,
    ),
    Key("MODEL.MOCO.MARGIN", 0.25, "MoCo: margin on the cosine similarities with the memory bank.", low=0),
    Key("MODEL.MOCO.GAMMA", 32.0, "MoCo: factor on them.", above=0),
    Key("MODEL.MOCO.SCALE", 1.0, "MoCo: weight of the loss over the memory bank in the sum.", low=0),
)

_EMPTY = -1


@META_ARCH_REGISTRY.register()
class MoCo(Baseline):
    """Baseline and a loss between its features and a memory bank of keys (He et al. 2020, arXiv:1911.05722).

    The keys of a batch are the features that the key encoder has for its images. That encoder is a moving average of
    backbone and head, moved before each training forward pass, and computes as they do, batch norm with the statistics
    of the batch. Evaluation uses backbone and head alone.

    Differs from the paper: the classes are known, so that all keys of an image's identity are positives; one view of
    an image is enough, and its own key is left out; the loss is pairwise CosFace; batch norm is not shuffled over the
    ranks, as FastReID's is not. Differs from FastReID: its keys are the model's own features (momentum 0 here), its
    bank starts with random features of class 0, and the key that it leaves out is the image's own only where the
    batch stands first in the bank.

    Args:
        queue_size: keys in the memory bank.
        feature_dim: width of the head's ``features``.
        momentum: share of the key encoder's weights that a forward pass keeps, 0..1.
        margin, gamma: see ``MemoryBank``.
        scale: weight of the loss over the bank in the sum.
        force_fp32: ``SOLVER.AMP.FORCE_FP32``, which the key encoder is to have in common with the model.
        parts: see ``Baseline``.
    """

    trunks = ("backbone", "key_encoder.backbone")
    training_only = ("losses", "key_encoder", "memory")

    def __init__(
        self,
        *,
        queue_size: int,
        feature_dim: int,
        momentum: float = 0.999,
        margin: float = 0.25,
        gamma: float = 32.0,
        scale: float = 1.0,
        force_fp32: Sequence[str] = (),
        **parts: Any,
    ) -> None:
        super().__init__(**parts)
        apply_force_fp32(self, tuple(force_fp32))
        self.key_encoder = MomentumCopy(self, parts=("backbone", "heads"), momentum=momentum)
        self.memory = MemoryBank(feature_dim=feature_dim, size=queue_size, margin=margin, gamma=gamma)
        self.scale = scale

    @classmethod
    def further_options(cls, cfg: Any) -> dict[str, Any]:
        """Return those of ``MODEL.QUEUE_SIZE`` and ``MODEL.MOCO``."""
        moco = cfg.MODEL.MOCO
        return {
            "queue_size": cfg.MODEL.QUEUE_SIZE,
            "feature_dim": feature_dim(cfg),
            "momentum": moco.MOMENTUM ** (1 / cfg.SOLVER.ACCUM_STEPS),  # so that a step keeps so much of it
            "margin": moco.MARGIN,
            "gamma": moco.GAMMA,
            "scale": moco.SCALE,
            "force_fp32": cfg.SOLVER.AMP.FORCE_FP32,
        }

    def forward(self, batch: dict[str, Any] | torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """Compute features, or losses; see ``Baseline.forward``."""
        batch = self.as_batch(batch)
        if self.training:
            self.key_encoder.update(self, statistics=False)
        return super().forward(batch)

    def loss_terms(
        self, outputs: Outputs | list[tuple[float, Outputs]], targets: torch.Tensor, batch: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return ``Baseline``'s losses, and ``loss_mb`` over the memory bank."""
        losses = super().loss_terms(outputs, targets, batch)
        self.key_encoder.copy_training_modes(self)
        with torch.no_grad():
            maps = self.feature_maps(batch, self.key_encoder.backbone)
            keys = main_outputs(self.key_encoder.heads(maps, targets))["features"]
        return losses | {"loss_mb": self.scale * self.memory(main_outputs(outputs)["features"], keys, targets)}

    def convert_state_dict(self, state: dict[str, torch.Tensor], notes: list[str]) -> dict[str, torch.Tensor]:
        """Return the tensors of a file of this or another architecture, as ``Baseline`` does.

        Without a key encoder in it, the file's model is where that starts.
        """
        state = self.key_encoder.fill_from_model(super().convert_state_dict(state, notes), "key_encoder.")
        file_queue = state.get("memory.queue")
        if file_queue is None:
            return state
        head_tensors = {
            name.removeprefix("heads."): value for name, value in state.items() if name.startswith("heads.")
        }
        file_head, head_state = convert_state_dict(self.heads, head_tensors)[0], self.heads.state_dict()
        mismatch, queue = "", self.memory.queue
        if file_queue.shape != queue.shape:
            mismatch = f"it is {' x '.join(map(str, file_queue.shape))}, and here {' x '.join(map(str, queue.shape))}"
        elif any(
            name not in file_head or file_head[name].shape != head_state[name].shape for name in classifiers(self.heads)
        ):
            mismatch = "its labels are of other identities"
        if not mismatch:
            return state
        notes.append(f"the file's memory bank is not taken, and this model's is empty: {mismatch}")
        return {name: value for name, value in state.items() if not name.startswith("memory.")}


class MemoryBank(nn.Module):
    """The newest normalized keys and their classes, the same on all ranks, and a loss of queries over them.

    Keys, classes and the place of the next key are buffers under FastReID's names; places that are empty have class -1.

    Args:
        feature_dim: width of a key.
        size: keys that are kept.
        margin: a positive pair's similarity is to exceed a negative one's by this.
        gamma: factor on the similarities.
    """

    written_in_forward = True

    def __init__(self, *, feature_dim: int, size: int, margin: float = 0.25, gamma: float = 32.0) -> None:
        super().__init__()
        self.margin, self.gamma = margin, gamma
        self.register_buffer("queue", torch.zeros(feature_dim, size))
        self.register_buffer("queue_label", torch.full((1, size), _EMPTY))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.int64))

    @force_fp32
    def forward(self, queries: torch.Tensor, keys: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Store the keys of all ranks over the oldest ones, and return the loss of this rank's queries over the bank.

        The loss is pairwise CosFace's (``pairwise_cosface``), where a query is compared with every key but its own.

        Args:
            queries: (B, D) float features.
            keys: (B, D) float features of the same images, without a gradient.
            targets: (B,) int64 class numbers.

        Returns:
            () float32.

        Raises:
            ConfigError: the batch, over all ranks, is larger than the bank.
        """
        slots = self._store(keys, targets)
        # The bank itself is written into by the next forward pass, which may come before this one's backward pass.
        cosines = F.normalize(queries, dim=1) @ self.queue.clone()
        same = targets[:, None] == self.queue_label
        own_key = slots[:, None] == torch.arange(cosines.shape[1], device=cosines.device)
        return log_sum_exp_loss(
            -self.gamma * cosines,
            self.gamma * (cosines + self.margin),
            same & ~own_key,
            ~same & (self.queue_label != _EMPTY),
        )

    @torch.no_grad()
    def _store(self, keys: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Store the keys of all ranks, in the order of the ranks, and return the places of this rank's: (B,) int64."""
        count, size = len(keys), self.queue.shape[1]
        keys, targets = comm.all_gather(F.normalize(keys, dim=1)), comm.all_gather(targets)
        if len(keys) > size:
            raise ConfigError(f"MODEL.QUEUE_SIZE is {size}, and a batch of {len(keys)} images does not fit into it")
        slots = (self.queue_ptr + torch.arange(len(keys), device=keys.device)) % size
        self.queue.index_copy_(1, slots, keys.t())
        self.queue_label.index_copy_(1, slots, targets[None])
        self.queue_ptr.add_(len(keys)).remainder_(size)
        first = comm.get_rank() * count
        return slots[first : first + count]

    def equal_on_all_ranks(self) -> tuple[str, ...]:
        """Return the buffers that every rank computes alike: all."""
        return ("queue", "queue_label", "queue_ptr")
