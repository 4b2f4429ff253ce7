"""Graph sampling (Liao and Shao 2022, arXiv:2104.01546): batches of identities that the model confuses."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fastamp.data.samplers import SAMPLER_REGISTRY, IdentitySampler, generator
from fastamp.utils.errors import ConfigError


class ImageTurns:
    """Images of each identity, taken in turn from a shuffled list, which is shuffled again after each pass.

    Args:
        images: images of each identity.
        shuffle: function that shuffles a list in place.
    """

    def __init__(self, images: Sequence[Sequence[int]], shuffle: Callable[[list[int]], None]) -> None:
        self._images, self._shuffle = [list(image) for image in images], shuffle
        self._next = [0] * len(self._images)
        for image in self._images:
            shuffle(image)

    def take(self, identity: int, count: int) -> list[int]:
        """Return the next ``count`` images of an identity; images are repeated if it has fewer."""
        images, taken = self._images[identity], []
        while len(taken) < count:
            first = self._next[identity]
            part = images[first : first + count - len(taken)]
            taken += part
            self._next[identity] = first + len(part)
            if self._next[identity] >= len(images):
                self._shuffle(images)
                self._next[identity] = 0
        return taken


def nearest_identities(distances: np.ndarray, count: int) -> np.ndarray:
    """Return the ``count`` nearest other identities of each identity, nearest first, for distances (C, C): int64."""
    others = distances.astype(np.float64)
    np.fill_diagonal(others, np.inf)
    return np.argsort(others, axis=1, kind="stable")[:, :count]


def graph_batches(nearest: np.ndarray, turns: ImageTurns, num_instances: int) -> np.ndarray:
    """Form a batch for each identity: its nearest identities, and itself last, with K images each.

    Args:
        nearest: (C, P - 1) int64, see ``nearest_identities``.
        turns: images of the identities.
        num_instances: K.

    Returns:
        (C, P * K) int64, images.
    """
    return np.array(
        [
            [image for other in (*row, identity) for image in turns.take(other, num_instances)]
            for identity, row in enumerate(nearest.tolist())
        ]
    )


@SAMPLER_REGISTRY.register()
class GraphSampler(IdentitySampler):
    """Draw batches of an identity and the P - 1 identities nearest to it, with K images each.

    An epoch has one batch for each identity, in random order. ``GraphTrainer`` sets the nearest identities before each
    epoch, from one random image of each identity. Differs from the authors' program: the lists of images are shuffled
    at the start of each epoch, so that an epoch depends only on the seed and its graph.

    Args:
        options: keyword arguments of ``IdentitySampler``.

    Raises:
        ConfigError: if a batch has only one identity.

    Attributes:
        nearest: (C, P - 1) int64, see ``nearest_identities``; None (default) for random identities.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.identities_per_batch < 2:
            raise ConfigError(
                "GraphSampler requires at least two identities in a batch, but SOLVER.IMS_PER_BATCH / "
                f"DATALOADER.NUM_INSTANCE is {self.identities_per_batch}.\n"
                "  fix: increase SOLVER.IMS_PER_BATCH, or reduce DATALOADER.NUM_INSTANCE"
            )
        self.nearest: np.ndarray | None = None
        self.images_per_epoch = len(self.identities) * self.identities_per_batch * self.num_instances

    def set_nearest(self, nearest: np.ndarray) -> None:
        """Set the nearest identities, (C, P - 1) int64; iterators that were created before keep the former ones."""
        self.nearest = nearest

    def choose_images(self, epoch: int) -> list[int]:
        """Choose one random image of each identity for the graph of an epoch."""
        rng = np.random.default_rng([self.seed % 2**64, epoch, 1])
        return [int(rng.choice(self.images_of(number))) for number in range(len(self.identities))]

    def epoch(self, epoch: int) -> Iterator[int]:
        """Return an infinite stream of image indices, shuffled with a seed derived from ``epoch``."""
        rng, count = generator(self.seed, epoch), len(self.identities)
        nearest = self.nearest
        if nearest is None:
            nearest = nearest_identities(rng.random((count, count)), self.identities_per_batch - 1)
        turns = ImageTurns([self.images_of(number).tolist() for number in range(count)], rng.shuffle)
        while True:
            yield from rng.permutation(graph_batches(nearest, turns, self.num_instances)).flatten().tolist()
