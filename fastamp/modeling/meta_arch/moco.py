"""Momentum contrast (MoCo) with labels: a memory bank of features from a momentum encoder."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastamp.amp import apply_force_fp32, force_fp32
from fastamp.checkpoint.load_state import classifiers, convert_state_dict
from fastamp.config import CfgNode, Key
from fastamp.modeling.losses.build import feature_dim
from fastamp.modeling.losses.compute import Outputs, main_outputs
from fastamp.modeling.losses.pairwise_cosine import log_sum_exp_loss
from fastamp.modeling.meta_arch.baseline import Baseline
from fastamp.modeling.meta_arch.build import META_ARCH_REGISTRY
from fastamp.modeling.meta_arch.momentum import MomentumCopy
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError

KEYS = (
    Key("MODEL.QUEUE_SIZE", 8192, "MoCo: number of features in the memory bank.", low=1),
    Key(
        "MODEL.MOCO.MOMENTUM",
        0.999,
        "MoCo: momentum of the key encoder, per iteration; if 0, the memory bank holds features of the model itself, "
        "as in FastReID.",
        low=0,
        high=1,
    ),
    Key(
        "MODEL.MOCO.MARGIN", 0.25, "MoCo: margin between the cosine similarities of positive and negative pairs.", low=0
    ),
    Key("MODEL.MOCO.GAMMA", 32.0, "MoCo: scale factor of the cosine similarities with the memory bank.", above=0),
    Key("MODEL.MOCO.SCALE", 1.0, "MoCo: weight of the memory bank loss in the total loss.", low=0),
)

_EMPTY = -1


@META_ARCH_REGISTRY.register()
class MoCo(Baseline):
    """Baseline with an additional loss on pairs of features and stored keys (He et al. 2020, arXiv:1911.05722).

    The keys of a batch are features of the same images, computed by the key encoder. The key encoder is a moving
    average of backbone and head, updated before each forward pass in training mode. Each module of the key encoder has
    the same training mode as in the model, so that batch norm uses the statistics of the batch. Evaluation uses only
    backbone and head.

    Differences from the paper: all keys of the same identity are positives, because labels are known; there is one view
    per image, and the key of the image itself is excluded; the loss is pairwise CosFace; as in FastReID, there is no
    shuffling BN across ranks. Differences from FastReID: FastReID's keys are features of the model itself (momentum 0
    here), FastReID's memory bank starts with random features of class 0, and FastReID excludes the key of the image
    itself only if the batch is stored at the start of the bank.

    Args:
        queue_size: number of keys in the memory bank.
        feature_dim: width of the ``features`` of the head.
        momentum: momentum of the key encoder per forward pass, in 0..1. Default 0.999.
        margin, gamma: see ``MemoryBank``.
        scale: weight of the memory bank loss in the total loss. Default 1.
        force_fp32: ``SOLVER.AMP.FORCE_FP32``, applied to the model before the key encoder is copied from it.
        parts: keyword arguments of ``Baseline``.
    """

    trunks = ("backbone", "key_encoder.backbone")
    one_graph = False
    training_only = ("losses", "key_encoder", "memory")
    teaches_as = "Baseline"
    pools_tracklets = False
    supports_partial_fc = False

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
    def further_options(cls, cfg: CfgNode) -> dict[str, Any]:
        """Return the constructor arguments configured in ``MODEL.QUEUE_SIZE`` and ``MODEL.MOCO``."""
        moco = cfg.MODEL.MOCO
        return {
            "queue_size": cfg.MODEL.QUEUE_SIZE,
            "feature_dim": feature_dim(cfg),
            "momentum": moco.MOMENTUM ** (1 / cfg.SOLVER.ACCUM_STEPS),  # per iteration, not per micro-batch
            "margin": moco.MARGIN,
            "gamma": moco.GAMMA,
            "scale": moco.SCALE,
            "force_fp32": cfg.SOLVER.AMP.FORCE_FP32,
        }

    def forward(self, batch: dict[str, Any] | torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """Compute features or losses; see ``Baseline.forward``."""
        batch = self.as_batch(batch)
        if self.training:
            self.key_encoder.update(self, statistics=False)
        return super().forward(batch)

    def loss_terms(
        self, outputs: Outputs | list[tuple[float, Outputs]], targets: torch.Tensor, batch: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Compute the losses of ``Baseline`` and ``loss_mb``, the memory bank loss."""
        losses = super().loss_terms(outputs, targets, batch)
        keys = self.keys(batch, targets)
        return losses | {"loss_mb": self.scale * self.memory(main_outputs(outputs)["features"], keys, targets)}

    @torch.no_grad()
    def keys(self, batch: dict[str, Any], targets: torch.Tensor) -> torch.Tensor:
        """Compute the features of a training batch by the key encoder, (B, D)."""
        self.key_encoder.copy_training_modes(self)
        maps = self.feature_maps(batch, self.key_encoder.backbone)
        return main_outputs(self.key_encoder.heads(maps, targets))["features"]

    def convert_state_dict(self, state: dict[str, torch.Tensor], notes: list[str]) -> dict[str, torch.Tensor]:
        """Convert ``state`` as ``Baseline`` does; if it has no key encoder, add a copy of the model's tensors.

        The memory bank in ``state`` is not loaded if its size or class labels do not match the model.
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
            mismatch = f"shape {' x '.join(map(str, file_queue.shape))}, expected {' x '.join(map(str, queue.shape))}"
        elif any(
            name not in file_head or file_head[name].shape != head_state[name].shape for name in classifiers(self.heads)
        ):
            mismatch = "labels of other identities"
        if not mismatch:
            return state
        notes.append(
            f"the memory bank in the file does not match and was not loaded; the bank starts empty: {mismatch}"
        )
        return {name: value for name, value in state.items() if not name.startswith("memory.")}


class MemoryBank(nn.Module):
    """Queue of the latest normalized keys and class labels, and the loss between queries and the keys.

    The buffers are equal on all ranks and have FastReID's names: keys (``queue``), class labels (``queue_label``; -1 in
    empty slots) and the next slot (``queue_ptr``).

    Args:
        feature_dim: width of a key.
        size: number of slots.
        margin: margin between the similarities of positive and negative pairs. Default 0.25.
        gamma: scale factor of the similarities. Default 32.
    """

    queue: torch.Tensor
    queue_label: torch.Tensor
    queue_ptr: torch.Tensor

    def __init__(self, *, feature_dim: int, size: int, margin: float = 0.25, gamma: float = 32.0) -> None:
        super().__init__()
        self.margin, self.gamma = margin, gamma
        self.register_buffer("queue", torch.zeros(feature_dim, size))
        self.register_buffer("queue_label", torch.full((1, size), _EMPTY))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.int64))
        self._overwritten: list[tuple[torch.Tensor, ...]] | None = None

    @force_fp32
    def forward(self, queries: torch.Tensor, keys: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Replace the oldest keys with the keys of all ranks, and compute the loss of this rank's queries.

        The loss is pairwise CosFace (see ``pairwise_cosface``) of each query with all keys except that of the same
        image.

        Args:
            queries: (B, D) float, features of the model.
            keys: (B, D) float, features of the same images from the key encoder, without gradient.
            targets: (B,) int64 class labels.

        Returns:
            Scalar float32.

        Raises:
            ConfigError: if the batches of all ranks together contain more images than the memory bank has slots.
        """
        slots = self._store(keys, targets)
        # clone(): the next forward pass, which modifies the queue in place, may precede this backward pass.
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
        """Store the keys of all ranks, in rank order; return the indices of this rank's slots, (B,) int64."""
        count, size = len(keys), self.queue.shape[1]
        keys, targets = comm.all_gather(F.normalize(keys, dim=1)), comm.all_gather(targets)
        if len(keys) > size:
            raise ConfigError(
                f"MODEL.QUEUE_SIZE is {size}, but the batches of all ranks contain {len(keys)} images.\n"
                f"  fix: set MODEL.QUEUE_SIZE to at least {len(keys)}"
            )
        slots = (self.queue_ptr + torch.arange(len(keys), device=keys.device)) % size
        if self._overwritten is not None:
            former = self.queue.index_select(1, slots), self.queue_label.index_select(1, slots), self.queue_ptr.clone()
            self._overwritten.append((slots, *former))
        self.queue.index_copy_(1, slots, keys.t())
        self.queue_label.index_copy_(1, slots, targets[None])
        self.queue_ptr.add_(len(keys)).remainder_(size)
        first = comm.get_rank() * count
        return slots[first : first + count]

    def record_writes(self, on: bool) -> None:
        """Discard the recorded values; if ``on``, record the values that later forward passes overwrite."""
        self._overwritten = [] if on else None

    @torch.no_grad()
    def undo_writes(self) -> None:
        """Restore the values that were overwritten since ``record_writes(True)``."""
        for slots, keys, labels, pointer in reversed(self._overwritten or []):
            self.queue.index_copy_(1, slots, keys)
            self.queue_label.index_copy_(1, slots, labels)
            self.queue_ptr.copy_(pointer)

    def equal_on_all_ranks(self) -> tuple[str, ...]:
        """Return the names of the buffers that are equal on all ranks."""
        return ("queue", "queue_label", "queue_ptr")
