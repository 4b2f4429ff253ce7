"""Sampler of clusters: K images of each, from several cameras."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fastamp.config import Key
from fastamp.data.samplers import SAMPLER_REGISTRY, EpochSampler, generator

KEYS = (
    Key("UNSUPERVISED.ITERS_PER_EPOCH", 200, "ClusterSampler: batches in an epoch, between two clusterings.", low=1),
    Key(
        "UNSUPERVISED.CROSS_CAMERA",
        True,
        "ClusterSampler: draw the further images of a cluster from other cameras than the first.",
    ),
)

Choices = Callable[[list[int], int, bool], Sequence[int]]


def draw_images(
    images: Sequence[int], cameras: Sequence[int] | None, first: int, num_instances: int, choices: Choices
) -> list[int]:
    """Draw the images of a cluster: ``first``, and K - 1 others, if possible from other cameras.

    Args:
        images: images of the cluster.
        cameras: camera of each image; None ignores cameras.
        first: index of the first image in ``images``.
        num_instances: K.
        choices: function (candidates, count, replace) -> chosen candidates.

    Returns:
        K images; only the first if the cluster has no other. Images are repeated if there are fewer than K others.
    """
    others = [] if cameras is None else [row for row in range(len(images)) if cameras[row] != cameras[first]]
    if not others:
        others = [row for row in range(len(images)) if row != first]
    if not others or num_instances == 1:
        return [images[first]]
    chosen = choices(others, num_instances - 1, len(others) < num_instances)
    return [images[first], *(images[int(row)] for row in chosen)]


@SAMPLER_REGISTRY.register()
class ClusterSampler(EpochSampler):
    """Visit clusters in random order and draw K images of each: ``RandomMultipleGallerySampler`` of Dai et al. 2022.

    A cluster with a single image contributes one image, so that a batch may have parts of more than P clusters. The
    incomplete batch at the end of a pass over all clusters is dropped. Differs: if all clusters together do not fill a
    batch, the next pass continues it, where the program of the authors would wait forever.

    Args:
        camids (Sequence[int]): (N,) camera of each image.
        batch_size (int): images per batch over all ranks.
        num_instances (int): images per cluster, K.
        iters_per_epoch (int): batches per epoch.
        seed (int): seed of the random order; any integer.
        cross_camera (bool): prefer images of other cameras. Default True.

    Attributes:
        labels (np.ndarray): (N,) int64, cluster of each image; images with a negative label are not drawn.
    """

    needs_identities = False

    def __init__(
        self,
        *,
        camids: Sequence[int],
        batch_size: int,
        num_instances: int,
        iters_per_epoch: int,
        seed: int,
        cross_camera: bool = True,
    ) -> None:
        self.camids = np.asarray(camids)
        self.batch_size, self.num_instances, self.seed = batch_size, num_instances, seed
        self.cross_camera = cross_camera
        self.images_per_epoch = iters_per_epoch * batch_size
        # Until the first clustering, e.g. to inspect the batches: one cluster of all images.
        self.set_labels(np.zeros(len(self.camids), dtype=np.int64))

    @classmethod
    def from_config(cls, cfg: Any, *, camids: Sequence[int], **unused: Any) -> "ClusterSampler":
        """Build the sampler from SOLVER.IMS_PER_BATCH, DATALOADER.NUM_INSTANCE, UNSUPERVISED and SEED."""
        return cls(
            camids=camids,
            batch_size=cfg.SOLVER.IMS_PER_BATCH,
            num_instances=cfg.DATALOADER.NUM_INSTANCE,
            iters_per_epoch=cfg.UNSUPERVISED.ITERS_PER_EPOCH,
            seed=cfg.SEED,
            cross_camera=cfg.UNSUPERVISED.CROSS_CAMERA,
        )

    def set_labels(self, labels: np.ndarray) -> None:
        """Set the cluster of each image, (N,) int64; iterators that were created before keep the former labels."""
        self.labels = labels
        rows = np.flatnonzero(labels >= 0)
        order = rows[np.argsort(labels[rows], kind="stable")]
        starts = np.unique(labels[order], return_index=True)[1]
        self._clusters = np.split(order, starts[1:]) if len(order) else []

    def epoch(self, epoch: int) -> Iterator[int]:
        """Return an infinite stream of image indices, shuffled with a seed derived from ``epoch``."""
        rng, clusters = generator(self.seed, epoch), self._clusters
        while clusters:
            images = [image for number in rng.permutation(len(clusters)) for image in self._draw(rng, clusters[number])]
            whole = len(images) // self.batch_size * self.batch_size
            yield from images[: whole or len(images)]

    def _draw(self, rng: np.random.Generator, images: np.ndarray) -> list[int]:
        cameras = self.camids[images].tolist() if self.cross_camera else None
        first = int(rng.integers(len(images)))
        return draw_images(
            images.tolist(), cameras, first, self.num_instances, lambda rows, k, repeat: rng.choice(rows, k, repeat)
        )
