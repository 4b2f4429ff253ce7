"""Contracts: what a model and its parts, a dataset, a loader and an evaluator offer to the rest of fastamp.

A class may derive from a contract to inherit the defaults of its members, with ``nn.Module`` before it in the list of
bases, but need not: a class from outside, such as any ``nn.Module``, gets the defaults of the attributes that it lacks
when it is registered or enters a model (``fastamp.utils.registry.adopt``), and all other code reads plain attributes.
The contracts in the second half are optional abilities of modules, each with one method or attribute; code asks for
them with ``isinstance``. An ability that only one module asks for stands in that module, e.g. ``Teacher`` and
``OptimizerOwner``.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from fastamp.config import CfgNode

Batch = dict[str, Any]
"""Batch of B images: ``images`` (B, C, H, W) in 0..255, uint8 or float; for training ``targets`` (B,) int64; optionally
``camids``, ``viewids``, ``indices`` (B,) int64, ``img_paths``, a list of str, and columns (B,) or (B, L) by name."""

State = dict[str, torch.Tensor]
"""State dict: tensor name -> tensor."""

Outputs = dict[str, torch.Tensor]
"""Outputs of a head in training mode: ``cls_outputs`` and ``pred_class_logits`` (B, K), the logits with and without
margin, and ``features`` (B, D), the input of metric losses, all float32."""


class ModelBuilder(Protocol):
    """Registered class or function that builds a model; its members are read before the model is built.

    Attributes:
        teaches_as: name of the meta-architecture as which a teacher of this class is built. Default "": its own.
        evaluator: name of the evaluator for ``TEST.EVALUATOR auto``.
    """

    teaches_as: str = ""
    evaluator: str = "ReidEvaluator"

    @classmethod
    def adapt_to_training_set(cls, cfg: CfgNode, dataset: Any) -> tuple[CfgNode, int]:
        """Adapt a config to the training set; return it and the number of classes. Default: that of identities."""
        return cfg, dataset.num_classes


class Model(ModelBuilder, Protocol):
    """Meta-architecture, an ``nn.Module``: a batch -> features (B, D) float32, or in training mode losses by name.

    Attributes:
        trunks: names of the submodules that ``MODEL.COMPILE`` compiles. Default none: it cannot be compiled.
        one_graph: whether ``MODEL.COMPILE_REGION model`` can compile the forward pass. Default False.
        training_only: names of the submodules that evaluation does not use. Default none.
        supports_partial_fc: whether it works without the logits of all classes (``MODEL.HEADS.PFC``). Default True.
        pools_tracklets: whether features are those of tracklets (``MODEL.HEADS.TEMPORAL_POOL``). Default False.
    """

    training: bool
    trunks: tuple[str, ...] = ()
    one_graph: bool = False
    training_only: tuple[str, ...] = ()
    supports_partial_fc: bool = True
    pools_tracklets: bool = False

    def __call__(self, batch: Batch) -> torch.Tensor | dict[str, torch.Tensor]:
        """Compute features or losses (scalars, float32)."""


class Backbone(Protocol):
    """Backbone, an ``nn.Module``: normalized images (B, C, H, W) -> feature maps (B, ``feature_dim``, h, w).

    Attributes:
        feature_dim: number of output channels. Default 0: ``MODEL.BACKBONE.FEAT_DIM``.
        takes_cameras: whether it is also called with ``camids`` and, if the batch has them, ``viewids``, (B,) int64,
            starting at 0. Default False.
        columns: columns of the batch that are passed by name. Default none.
        modality_column: column of the modality, for a backbone with a stem for each. Default "": it has one stem.
        default_modality: modality of batches without these columns. Default None: they are required.
        stem_pool: max pooling of the stem, ``MODEL.BACKBONE.STEM_POOL``. Default "": unknown.
        stem_relu: whether a ResNet has a ReLU in the stem, ``MODEL.BACKBONE.STEM_RELU``. Default False.
        checkpointing: whether activations are recomputed in the backward pass. Default None: not supported.
    """

    feature_dim: int = 0
    takes_cameras: bool = False
    columns: tuple[str, ...] = ()
    modality_column: str = ""
    default_modality: int | None = None
    stem_pool: str = ""
    stem_relu: bool = False
    checkpointing: bool | None = None

    def __call__(self, images: torch.Tensor, **columns: torch.Tensor) -> torch.Tensor:
        """Compute the feature maps."""


class HeadBuilder(Protocol):
    """Registered class or function that builds a head.

    Attributes:
        continues_backbone: whether it is built by ``from_config(cfg, backbone=backbone)``. Default False.
    """

    continues_backbone: bool = False


class Head(HeadBuilder, Protocol):
    """Head, an ``nn.Module``: feature maps (B, C, h, w) and, in training mode, targets (B,) -> outputs.

    Attributes:
        several_outputs: whether the output in training mode is a list of (weight, outputs). Default False.
        frames: frames of a tracklet that are pooled in training mode. Default 0: images are not pooled.
    """

    several_outputs: bool = False
    frames: int = 0

    def __call__(self, maps: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        """Compute features (B, D) float32 in evaluation mode, otherwise ``Outputs``, or a list of (weight, outputs)."""


class LossBuilder(Protocol):
    """Registered class or function that builds a loss.

    Attributes:
        start_epoch_key: config key of the epoch in which it begins to apply. Default "": it always applies.
    """

    start_epoch_key: str = ""


class Loss(LossBuilder, Protocol):
    """Loss, an ``nn.Module``: outputs of the head and targets (B,) int64 -> scalar float32.

    Attributes:
        loss_name: name in the logs, e.g. ``loss_cls``.
        over_pairs: whether it compares ``features`` of all images in a batch; with ``MODEL.LOSSES.GATHER``, it receives
            those of all ranks. Default False.
        columns: columns of the batch that ``outputs`` contains under their names. Default none.
        written_in_forward: whether forward passes write its buffers, which a skipped step restores. Default False.
    """

    loss_name: str
    over_pairs: bool = False
    columns: tuple[str, ...] = ()
    written_in_forward: bool = False

    def __call__(self, outputs: Outputs, targets: torch.Tensor) -> torch.Tensor:
        """Compute the loss."""


class Dataset(Protocol):
    """Dataset of N images. It gets the defaults of the members that it lacks when its loader enters a training.

    Attributes:
        labels: classes of the images, (N,) int64 in 0..num_classes-1. Default None: unknown.
        columns: further columns by name; ``columns[name].values`` is (N,) or (N, L). Default none.
        sources: the ``ImageDataset`` objects whose images it has. Default none.
        num_classes: number of classes. Without it, ``MODEL.HEADS.NUM_CLASSES`` is required.
    """

    labels: Any = None
    columns: Mapping[str, Any] = {}
    sources: Sequence[Any] = ()
    num_classes: int


@runtime_checkable
class Loader(Protocol):
    """Loader of a part of a dataset, that of one rank; ``torch.utils.data.DataLoader`` is one.

    Attributes:
        dataset: dataset whose images are loaded.
    """

    dataset: Dataset

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches."""


class TrainLoader(Loader, Protocol):
    """Infinite loader of training batches, with ``iters_per_epoch`` batches in an epoch."""

    iters_per_epoch: int

    def start_at(self, start_iter: int) -> None:
        """Let the next iterator start at batch ``start_iter``, counted from the start of training."""


class Evaluator(Protocol):
    """Evaluator of a test set: accumulates batches with the model's outputs, and then computes metrics.

    An evaluator derives from ``fastamp.evaluation.DatasetEvaluator``, which has the optional members.
    """

    def reset(self) -> None:
        """Discard all accumulated batches."""

    def forward(self, model: Any, batch: Batch) -> Any:
        """Compute the outputs of a model for ``process``."""

    def process(self, inputs: Batch, outputs: Any) -> None:
        """Accumulate a batch and its outputs."""

    def evaluate(self) -> dict[str, Any] | None:
        """Compute the metrics, name -> value; None on ranks other than 0."""


# Optional abilities of the modules of a model.


@runtime_checkable
class EpochUser(Protocol):
    """Module that changes with the epoch, such as a loss that starts later."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, from 0; called before each epoch."""


@runtime_checkable
class ClassCountUser(Protocol):
    """Module that uses the number of training images of each class, such as margins of a classification layer."""

    def set_class_counts(self, counts: Sequence[int] | np.ndarray) -> None:
        """Set the counts, (num_classes,) int64; called before the training."""


@runtime_checkable
class TrainingColumnUser(Protocol):
    """Module that uses the columns of the training set."""

    def set_training_columns(self, labels: np.ndarray, columns: Mapping[str, Any]) -> None:
        """Set the labels (N,) int64 and the columns, name -> (N,) or (N, L); called before the training."""


@runtime_checkable
class StateConverter(Protocol):
    """Module that reads the parameter names of other programs."""

    def convert_state_dict(self, state: State, notes: list[str]) -> State:
        """Return the module's tensors under its own names; append remarks to ``notes``."""


@runtime_checkable
class ClassDependent(Protocol):
    """Module with tensors per training identity, which weights with another number of identities do not replace."""

    classifiers: tuple[str, ...]


@runtime_checkable
class ClassIndexer(Protocol):
    """Module that uses class labels as indices, if its attribute is True, so that labels must be in range."""

    indexes_classes: bool


@runtime_checkable
class IdChecker(Protocol):
    """Backbone that checks ``camids`` and ``viewids`` on the CPU; on a device, it would have to wait for them."""

    def check_side_ids(self, *, camids: torch.Tensor, viewids: torch.Tensor | None = None) -> None:
        """Raise DataError if an ID has no embedding."""


@runtime_checkable
class LayeredModule(Protocol):
    """Module whose layers can have different learning rates (``SOLVER.LAYER_DECAY``)."""

    def layer_groups(self) -> Sequence[Sequence[Any]]:
        """List the modules and parameters of each layer, in order."""
