"""Augmentation of a batch in two steps: draw every image's parameters, then apply them to all images at once."""

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
    """Return ``chosen`` where ``condition`` holds and ``others`` elsewhere, as ``torch.where``.

    On bytes, blending by bits is about six times as fast as ``where`` (measured on a CPU).

    Args:
        condition: uint8 of ``byte_mask``, broadcastable to (B, C, H, W).
        chosen: uint8, broadcastable to (B, C, H, W).
        others: (B, C, H, W) uint8.
    """
    return others.bitwise_and(~condition).bitwise_or_(chosen & condition)


def byte_mask(condition: Tensor) -> Tensor:
    """Return a bool tensor as uint8 with all bits set where it is true, and none elsewhere."""
    return condition.to(torch.uint8) * 255


class BatchTransform:
    """One random operation on a uint8 batch.

    A subclass says how many uniform numbers an image needs (``draws``), turns them into parameters, and applies
    those. Both methods are pure functions, so that the same parameters can be applied in a worker or on the device.

    It registers with ``TRANSFORM_REGISTRY`` under the name of its section of INPUT, e.g. ``FLIP``, and is built from
    the config where that section's ``ENABLED`` is true. ``build.ORDER`` lists the sections in their order.

    Attributes:
        draws: uniform numbers that an image needs.
        size: height and width of the output in pixels, for images of any size; None keeps the size of the input.
        before: the section in ``build.ORDER`` that a project's transform is applied before; "" applies it last.
    """

    draws: int
    size: tuple[int, int] | None = None
    before: str = ""

    @classmethod
    def from_config(cls, cfg: Any) -> "BatchTransform":
        """Return the transform of its section of INPUT.

        Raises:
            ConfigError: its values do not go together.
        """
        raise NotImplementedError

    def output_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the height and width that images of ``size`` have afterwards."""
        return self.size or size

    def check_size(self, size: tuple[int, int]) -> None:
        """Check that images of this height and width can be transformed.

        Raises:
            ConfigError: they cannot.
        """

    def parameters(self, uniforms: np.ndarray, size: tuple[int, int]) -> Parameters:
        """Return the parameters of each image.

        Args:
            uniforms: (B, draws) float64 in [0, 1).
            size: height and width of the images.

        Returns:
            Tensors on the CPU whose first dimension is B.
        """
        raise NotImplementedError

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Return the transformed images as a new tensor, or ``images`` itself where nothing is to be done.

        Args:
            images: (B, C, H, W) uint8 on any device.
            parameters: what ``parameters`` returned.

        Returns:
            (B, C, H, W) uint8.
        """
        raise NotImplementedError


class Augmentation:
    """Operations one after the other, each with random numbers of its own.

    The numbers of an image depend on the seed, the operation and the image's place in the training stream alone: not
    on the batch it is in, nor on the worker, the rank, or the other operations.

    Args:
        transforms: in the order in which they are applied; none leaves the images as they are.
        seed: any integer.
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
        """Return the parameters of each operation, in order.

        Args:
            epochs: (B,) epoch of each image.
            positions: (B,) place of each image in its epoch's stream.
            size: height and width of the images.

        Raises:
            ConfigError: an operation cannot transform images of this size.
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
        """Return (B, C, H, W) uint8 ``images`` with each operation's ``parameters`` applied in order."""
        for transform, transform_parameters in zip(self.transforms, parameters, strict=True):
            images = transform.apply(images, transform_parameters)
        return images
