"""Batch augmentation in two steps: draw the parameters of every image, then apply them to the batch."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastamp.data.keyed_random import keyed_uniform
from fastamp.utils.moved import moved_names
from fastamp.utils.registry import Registry

__getattr__ = moved_names(
    __name__,
    {
        "bits": "fastamp.data.transforms.base.byte_mask",
        "choose": "fastamp.data.transforms.base.bitwise_where",
    },
)

TRANSFORM_REGISTRY = Registry("INPUT")

Parameters = dict[str, Tensor]


def bitwise_where(condition: Tensor, chosen: Tensor, others: Tensor) -> Tensor:
    """Select elements of two uint8 tensors like ``torch.where``.

    For uint8, bitwise selection is about six times as fast as ``torch.where`` (measured on a CPU).

    Args:
        condition (Tensor): uint8 mask of ``byte_mask``, broadcastable to (B, C, H, W).
        chosen (Tensor): uint8, broadcastable to (B, C, H, W); values where the mask is set.
        others (Tensor): (B, C, H, W) uint8; values elsewhere.

    Returns:
        Tensor: (B, C, H, W) uint8.
    """
    return others.bitwise_and(~condition).bitwise_or_(chosen & condition)


def byte_mask(condition: Tensor) -> Tensor:
    """Convert a bool tensor to a uint8 mask: 255 where true, 0 elsewhere."""
    return condition.to(torch.uint8) * 255


class BatchTransform:
    """Random operation on a uint8 batch.

    A subclass defines ``draws``, the number of uniform random numbers per image; ``parameters``, which converts these
    numbers to parameters of the operation; and ``apply``. Both methods are pure functions, so that ``apply`` can run in
    a worker process or on the device.

    Register a subclass with ``TRANSFORM_REGISTRY`` under the name of its config section in INPUT, e.g. ``FLIP``. It is
    built if ``ENABLED`` is True in that section. ``build.ORDER`` defines the order in which transforms are applied.

    Attributes:
        draws (int): uniform random numbers per image.
        size (tuple[int, int], optional): output height and width in pixels, for inputs of any size. Default: the input
            size.
        before (str): for a custom transform, the section in ``build.ORDER`` before which it is applied; "" applies it
            last. Default "".
    """

    draws: int
    size: tuple[int, int] | None = None
    before: str = ""

    @classmethod
    def from_config(cls, cfg: Any) -> "BatchTransform":
        """Build from the transform's section of INPUT.

        Raises:
            ConfigError: if values are inconsistent.
        """
        raise NotImplementedError

    def output_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the output height and width for images of ``size``."""
        return self.size or size

    def check_size(self, size: tuple[int, int]) -> None:
        """Check that images of this height and width are supported.

        Raises:
            ConfigError: if they are not supported.
        """

    def parameters(self, uniforms: np.ndarray, size: tuple[int, int]) -> Parameters:
        """Compute the parameters of each image.

        Args:
            uniforms (np.ndarray): (B, draws) float64 in [0, 1).
            size (tuple[int, int]): height and width of the images.

        Returns:
            dict[str, Tensor]: CPU tensors with first dimension B.
        """
        raise NotImplementedError

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Transform the images; return a new tensor, or ``images`` itself if no image is changed.

        Args:
            images (Tensor): (B, C, H, W) uint8, on any device.
            parameters (dict): return value of the method ``parameters``.

        Returns:
            Tensor: (B, C, H, W) uint8.
        """
        raise NotImplementedError


class Augmentation:
    """Sequence of transforms with independent random numbers.

    The random numbers of an image depend only on the seed, the transform, and the epoch and position of the image in
    the training stream. They do not depend on the batch, the worker, the rank or other transforms.

    Args:
        transforms (Sequence[BatchTransform]): transforms in order; may be empty.
        seed (int): any integer.
    """

    def __init__(self, *, transforms: Sequence[BatchTransform], seed: int) -> None:
        self.transforms = list(transforms)
        self.seed = seed
        earlier: Counter[str] = Counter()
        self._streams = []
        for transform in self.transforms:
            name = type(transform).__name__
            self._streams.append(f"{name}/{earlier[name]}")
            earlier[name] += 1

    def draw(self, epochs: Sequence[int], positions: Sequence[int], size: tuple[int, int]) -> list[Parameters]:
        """Draw the parameters of all transforms for a batch; return one dict per transform, in order.

        Args:
            epochs (Sequence[int]): (B,) epoch of each image.
            positions (Sequence[int]): (B,) position of each image in the epoch's stream.
            size (tuple[int, int]): height and width of the images.

        Raises:
            ConfigError: if a transform does not support images of this size.
        """
        keys = {"epochs": np.asarray(epochs, dtype=np.uint64), "positions": np.asarray(positions, dtype=np.uint64)}
        parameters = []
        for transform, stream in zip(self.transforms, self._streams, strict=True):
            transform.check_size(size)
            uniforms = keyed_uniform(seed=self.seed, stream=stream, count=transform.draws, **keys)
            parameters.append(transform.parameters(uniforms, size))
            size = transform.output_size(size)
        return parameters

    def apply(self, images: Tensor, parameters: Sequence[Parameters]) -> Tensor:
        """Apply each transform with its ``parameters`` to (B, C, H, W) uint8 ``images``."""
        for transform, transform_parameters in zip(self.transforms, parameters, strict=True):
            images = transform.apply(images, transform_parameters)
        return images
