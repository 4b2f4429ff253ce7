"""Base class of the meta-architectures: image normalization and backbone."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from fastamp.checkpoint.state_dict_conversion import whole_model_names
from fastamp.config import CfgNode, per_channel
from fastamp.contracts import Backbone, ClassIndexer, Head, IdChecker, Model
from fastamp.modeling.losses.compute import column_of
from fastamp.utils.errors import DataError, WeightsError
from fastamp.utils.registry import adopt

_CONTRACTS = {"backbone": Backbone, "heads": Head}
_OLD_MGN = re.compile(r"b\d+_(pool\.|head\.bnneck\.)")  # FastReID's first MGN, July and August 2020


class ImageModel(nn.Module, Model):
    """Base class of models for images in 0..255; subclasses define the modules after the ``backbone``.

    The contract ``Model`` describes its attributes.

    Args:
        backbone: module (B, C, H, W) -> feature maps, see the contract ``Backbone``; its ``columns`` are passed on the
            device where the batch has them.
        pixel_mean, pixel_std: C values each, for pixels in 0..255.
    """

    trunks: tuple[str, ...] = ("backbone",)
    training_only: tuple[str, ...] = ("losses",)
    supports_partial_fc = False
    pixel_mean: torch.Tensor
    pixel_std: torch.Tensor

    def __init__(
        self,
        *,
        backbone: nn.Module,
        pixel_mean: list[float] | tuple[float, ...],
        pixel_std: list[float] | tuple[float, ...],
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self._num_classes = 0
        self._datasets: tuple[str, ...] = ()
        # Not persistent: the values are in the config.
        self.register_buffer("pixel_mean", torch.tensor(pixel_mean).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("pixel_std", torch.tensor(pixel_std).view(1, -1, 1, 1), persistent=False)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a backbone or head, also one of a subclass, gets the defaults of its contract."""
        if isinstance(value, nn.Module) and name in _CONTRACTS:
            adopt(value, _CONTRACTS[name])
        super().__setattr__(name, value)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.pixel_mean.device

    def take_normalized_images(self) -> None:
        """Disable the image normalization: from now on, the model expects normalized images."""
        self.preprocess = _identity

    def preprocess(self, images: torch.Tensor) -> torch.Tensor:
        """Normalize images (B, C, H, W) in 0..255, any dtype; return a copy on the device of the model."""
        # Transferred in the original dtype: uint8 needs a quarter of the bytes of float32.
        images = images.to(self.device, non_blocking=True)
        return (images - self.pixel_mean) / self.pixel_std

    def equal_on_all_ranks(self) -> tuple[str, ...]:
        """Return the names of the buffers that are equal on all ranks: constants."""
        return ("pixel_mean", "pixel_std")

    def preprocess_image(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return the normalized images of a batch; see ``preprocess``."""
        return self.preprocess(batch["images"])

    def as_batch(self, batch: dict[str, Any] | torch.Tensor) -> dict[str, Any]:
        """Validate the input of the model; wrap a tensor of images in a dict.

        Args:
            batch: ``{"images": (B, C, H, W) in 0..255, ...}``; in evaluation mode, a tensor of images is also accepted.

        Raises:
            TypeError: if ``batch`` is neither a dict nor a tensor, or is a tensor in training mode, which requires
                targets.
            KeyError: if ``batch`` contains no images.
            ValueError: if the images are not a tensor, or have the wrong number of dimensions or channels.
        """
        if isinstance(batch, torch.Tensor):
            if self.training:
                raise TypeError(
                    f"{type(self).__name__} is in training mode: expected a dict with images and targets, got a "
                    'tensor.\n  fix: call model.eval() first, or model({"images": images, "targets": targets})'
                )
            batch = {"images": batch}
        if not isinstance(batch, Mapping):
            raise TypeError(
                f"{type(self).__name__}: expected a dict or, in evaluation mode, a tensor of images (B, C, H, W) in "
                f"0..255, got {type(batch).__name__}.\n"
                '  fix: call model({"images": images}); for files, call fastamp.Predictor(checkpoint).features(paths)'
            )
        if "images" not in batch:
            raise KeyError(
                f'the batch does not contain "images"; found keys: {", ".join(map(str, batch))}; '
                'fix: call model({"images": images})'
            )
        images, channels = batch["images"], self.pixel_mean.shape[1]
        if not isinstance(images, torch.Tensor) or images.dim() != 4 or images.shape[1] != channels:
            description = (
                tuple(images.shape) if isinstance(images, torch.Tensor | np.ndarray) else type(images).__name__
            )
            raise ValueError(
                f"images: expected a tensor (B, {channels}, H, W) in 0..255, got {description}.\n"
                "  fix: pass images[None] for a single image, or images.permute(0, 3, 1, 2) for images (B, H, W, C)"
            )
        if images.dtype == torch.bool or images.is_complex():
            raise ValueError(
                f"images: expected pixels in 0..255 (uint8 or float), got {images.dtype}.\n"
                "  fix: pass images of dtype uint8, before any normalization"
            )
        return batch

    def feature_maps(self, batch: dict[str, Any], backbone: nn.Module | None = None) -> torch.Tensor:
        """Run the backbone on the images of a batch; pass camera and view IDs if the backbone requires them.

        Args:
            batch: see ``forward`` of the subclass.
            backbone: backbone to run, e.g. a momentum copy. Default None: the backbone of the model.

        Raises:
            KeyError: if the backbone requires ``camids``, but the batch does not contain them.
            ConfigError: if the backbone requires a column that the batch does not contain.
        """
        backbone = self.backbone if backbone is None else backbone
        images = self.preprocess_image(batch)
        names = backbone.columns
        if names and (backbone.default_modality is None or any(name in batch for name in names)):
            return backbone(images, **{name: column_of(batch, name) for name in names})
        if not backbone.takes_cameras:
            return backbone(images)
        if "camids" not in batch:
            raise KeyError(
                'the batch does not contain "camids", which a backbone with camera or view embeddings requires; '
                'fix: add "camids", (B,) int64, starting at 0, to the batch'
            )
        ids = {name: batch[name] for name in ("camids", "viewids") if name in batch}
        if isinstance(backbone, IdChecker):  # before the IDs are on a device
            backbone.check_side_ids(**ids)
        return backbone(images, **{name: value.to(self.device, non_blocking=True) for name, value in ids.items()})

    def targets(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return the class labels of a training batch, (B,) int64, on the device of the model."""
        if "targets" not in batch:
            raise KeyError(
                'the batch does not contain "targets", which training requires; fix: add "targets", (B,) int64, to the '
                "batch; for evaluation, call model.eval() first"
            )
        labels = batch["targets"]
        if not isinstance(labels, torch.Tensor) or labels.dim() != 1 or labels.is_floating_point():
            description = type(labels).__name__
            if isinstance(labels, torch.Tensor):
                description = f"{str(labels.dtype).removeprefix('torch.')} {tuple(labels.shape)}"
            raise ValueError(
                f"targets: expected a tensor (B,) of class labels, int64, got {description}.\n"
                "  fix: pass torch.tensor(labels), with one integer per image"
            )
        self._check_labels(labels, batch.get("img_paths"))
        return labels.to(self.device, non_blocking=True)

    def prepare(self, batch: dict[str, Any] | torch.Tensor) -> dict[str, Any]:
        """Check the labels and IDs of a batch on the host, and return it with its tensors on the device of the model.

        Used before a compiled forward pass, which cannot read values.

        Args:
            batch: see ``forward`` of the subclass.

        Raises:
            DataError: if a label or an ID is out of range.
        """
        batch = self.as_batch(batch)
        if self.training:
            self.targets(batch)
        if isinstance(self.backbone, IdChecker):
            self.backbone.check_side_ids(**{name: batch[name] for name in ("camids", "viewids") if name in batch})
        return {
            name: value.to(self.device, non_blocking=True) if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }

    def set_label_range(self, num_classes: int, datasets: Sequence[str]) -> None:
        """Set the range of training labels, 0..num_classes-1, for models with a module that uses labels as indices.

        If such a module exists, i.e. one whose attribute ``indexes_classes`` is True, training raises DataError for a
        label out of range; none of these modules supports an ignore index. Without the check, the label would trigger
        a device-side assert on a CUDA device, after which the process cannot use the device.

        Args:
            num_classes: number of classes; 0 disables the check.
            datasets: names of the training sets, for the message.
        """
        indexed = any(isinstance(module, ClassIndexer) and module.indexes_classes for module in self.modules())
        self._num_classes, self._datasets = num_classes if indexed else 0, tuple(datasets)

    def _check_labels(self, labels: torch.Tensor, paths: Sequence[str] | None) -> None:
        """Check that labels on the CPU are in the range of ``set_label_range``; on a device, this would wait for it.

        Raises:
            DataError: if a label is negative or at least the number of classes.
        """
        if torch.compiler.is_compiling() or not self._num_classes or labels.device.type != "cpu":
            return
        wrong = [(row, label) for row, label in enumerate(labels.tolist()) if not 0 <= label < self._num_classes]
        if not wrong:
            return
        row, label = wrong[0]
        image = f" of {paths[row]}" if paths else ""
        raise DataError(
            f"label out of range: MODEL.HEADS.NUM_CLASSES is {self._num_classes}, so training labels must be in "
            f"0..{self._num_classes - 1}.\n"
            f"  found: label {label}{image} (training set {', '.join(self._datasets)}; {len(wrong)} of "
            f"{len(labels)} labels of the batch are out of range)\n"
            "  fix: map the identities of the training set to 0..N-1 (as ReidDataset does with relabel=True), exclude "
            "images without an identity, and set MODEL.HEADS.NUM_CLASSES to N"
        )

    def convert_state_dict(self, state: dict[str, torch.Tensor], notes: list[str]) -> dict[str, torch.Tensor]:
        """Convert the parameter names of a FastReID, torchreid or TransReID file to ``backbone.*`` and ``heads.*``.

        Raises:
            WeightsError: if the weights are from FastReID's first MGN, which is not equivalent.
        """
        for name, values in (("pixel_mean", self.pixel_mean), ("pixel_std", self.pixel_std)):
            if name in state and not torch.allclose(state[name].flatten().float(), values.cpu().flatten()):
                notes.append(
                    f"the weights were trained with MODEL.{name.upper()} {state[name].flatten().tolist()}, but the "
                    f"config has {values.flatten().tolist()}"
                )
        if any(_OLD_MGN.match(name) for name in state):
            raise WeightsError(
                "the weights are from FastReID's MGN of before September 2020, whose reductions (b1_pool, ...) have a "
                "batch norm and a ReLU, which MODEL.META_ARCHITECTURE MGN does not have.\n"
                "  fix: use weights of a later FastReID release or train again"
            )
        for architecture, head in (("MGN", "b1_head"), ("LightMBN", "average_head")):
            has_head = any(name.startswith(f"{head}.") for name in state)
            if has_head != (head in self._modules):
                weights, model = ("", " not") if has_head else (" not", "")
                notes.append(
                    f"the weights are{weights} of MODEL.META_ARCHITECTURE {architecture}, but the model is{model}"
                )
        stem = {"pools_without_padding": self.backbone.stem_pool == "ceil", "has_relu": self.backbone.stem_relu}
        return whole_model_names(state, self.backbone, notes, **stem)


def normalization(cfg: CfgNode) -> dict[str, Any]:
    """Read ``pixel_mean`` and ``pixel_std`` from ``MODEL``, each with ``INPUT.CHANNELS`` values.

    Raises:
        ConfigError: see ``per_channel``.
    """
    return {
        name: per_channel(f"MODEL.{name.upper()}", cfg.MODEL[name.upper()], channels=cfg.INPUT.CHANNELS)
        for name in ("pixel_mean", "pixel_std")
    }


def _identity(images: torch.Tensor) -> torch.Tensor:
    return images
