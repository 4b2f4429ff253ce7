"""Sampler of clusters: K images of each, from several cameras."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fastamp.config import CfgNode, Key
from fastamp.data.samplers import SAMPLER_REGISTRY, EpochSampler, batch_size_per_rank, generator
from fastamp.utils.errors import ConfigError
from fastamp.utils.plural import plural

KEYS = (
    Key("UNSUPERVISED.ITERS_PER_EPOCH", 200, "ClusterSampler: batches in an epoch, between two clusterings.", low=1),
    Key(
        "UNSUPERVISED.CROSS_CAMERA",
        True,
        "ClusterSampler: draw the further images of a cluster from other cameras than the first.",
    ),
    Key(
        "UNSUPERVISED.LABELED",
        (),
        "Datasets of DATASETS.NAMES whose identities are used: the source domain, half of each batch. The others are "
        "clustered. Empty: all are clustered.",
    ),
)


def draw_images(
    images: Sequence[int], cameras: Sequence[int] | None, first: int, num_instances: int, rng: np.random.Generator
) -> list[int]:
    """Draw the images of a cluster: ``first``, and K - 1 others, if possible from other cameras.

    Args:
        images: images of the cluster.
        cameras: camera of each image; None ignores cameras.
        first: index of the first image in ``images``.
        num_instances: K.
        rng: generator of the others.

    Returns:
        K images; only the first if the cluster has no other. Images are repeated if there are fewer than K others.
    """
    others = [] if cameras is None else [row for row in range(len(images)) if cameras[row] != cameras[first]]
    if not others:
        others = [row for row in range(len(images)) if row != first]
    if not others or num_instances == 1:
        return [images[first]]
    chosen = rng.choice(others, num_instances - 1, len(others) < num_instances)
    return [images[first], *(images[int(row)] for row in chosen)]


@SAMPLER_REGISTRY.register()
class ClusterSampler(EpochSampler):
    """Visit clusters in random order and draw K images of each: ``RandomMultipleGallerySampler`` of Dai et al. 2022.

    A cluster with a single image contributes one image, so that a batch may have parts of more than P clusters. The
    incomplete batch at the end of a pass over all clusters is dropped. Differs: if all clusters together do not fill a
    batch, the next pass continues it, where the program of the authors would wait forever.

    If there are labeled images, they are at the even positions of the batches, and the others at the odd ones; both
    are drawn independently.

    Args:
        camids: (N,) camera of each image.
        batch_size: images per batch over all ranks.
        num_instances: images per cluster, K.
        iters_per_epoch: batches per epoch.
        seed: seed of the random order; any integer.
        cross_camera: prefer images of other cameras. Default True.
        labeled: (N,) whether the identity of each image is used. Default: none.

    Attributes:
        labels: (N,) int64, cluster of each image; images with a negative label are not drawn.
        labeled: (N,) bool.
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
        labeled: Sequence[bool] | None = None,
    ) -> None:
        self.camids = np.asarray(camids)
        self.labeled = np.zeros(len(self.camids), dtype=bool) if labeled is None else np.asarray(labeled)
        self.batch_size, self.num_instances, self.seed = batch_size, num_instances, seed
        self.cross_camera = cross_camera
        self.images_per_epoch = iters_per_epoch * batch_size
        # Until the first clustering, e.g. to inspect the batches: one cluster of all images.
        self.set_labels(np.zeros(len(self.camids), dtype=np.int64))

    @classmethod
    def from_config(
        cls, cfg: CfgNode, *, camids: Sequence[int], sets: Sequence[int], world_size: int, **unused: Any
    ) -> "ClusterSampler":
        """Build the sampler from SOLVER.IMS_PER_BATCH, DATALOADER.NUM_INSTANCE, UNSUPERVISED and SEED.

        Raises:
            ConfigError: if the batch of a rank cannot be halved into labeled and unlabeled images.
        """
        names, labeled = list(cfg.DATASETS.NAMES), list(cfg.UNSUPERVISED.LABELED)
        if labeled and batch_size_per_rank(cfg.SOLVER.IMS_PER_BATCH, world_size) % 2:
            raise ConfigError(
                f"SOLVER.IMS_PER_BATCH {cfg.SOLVER.IMS_PER_BATCH} on {plural(world_size, 'rank')} cannot be halved: "
                "UNSUPERVISED.LABELED requires as many labeled as unlabeled images.\n"
                f"  fix: set SOLVER.IMS_PER_BATCH to a multiple of {2 * world_size}"
            )
        return cls(
            labeled=np.isin(sets, [names.index(name) for name in labeled if name in names]),
            camids=camids,
            batch_size=cfg.SOLVER.IMS_PER_BATCH,
            num_instances=cfg.DATALOADER.NUM_INSTANCE or 4,
            iters_per_epoch=cfg.UNSUPERVISED.ITERS_PER_EPOCH,
            seed=cfg.SEED,
            cross_camera=cfg.UNSUPERVISED.CROSS_CAMERA,
        )

    def set_labels(self, labels: np.ndarray) -> None:
        """Set the cluster of each image, (N,) int64; iterators that were created before keep the former labels."""
        self.labels = labels
        kinds = [labels] if not self.labeled.any() else [np.where(self.labeled == kind, labels, -1) for kind in (1, 0)]
        self._clusters = [_rows_of_clusters(clusters) for clusters in kinds]

    def epoch(self, epoch: int) -> Iterator[int]:
        """Return an infinite stream of image indices, shuffled with a seed derived from ``epoch``."""
        rng, size = generator(self.seed, epoch), self.batch_size // len(self._clusters)
        streams = [self._stream(rng, clusters, size) for clusters in self._clusters]
        for images in zip(*streams, strict=True):
            yield from images

    def _stream(self, rng: np.random.Generator, clusters: list[np.ndarray], size: int) -> Iterator[int]:
        """Return the image indices of ``clusters`` for parts of batches with ``size`` images."""
        while clusters:
            images = [image for number in rng.permutation(len(clusters)) for image in self._draw(rng, clusters[number])]
            whole = len(images) // size * size
            yield from images[: whole or len(images)]

    def _draw(self, rng: np.random.Generator, images: np.ndarray) -> list[int]:
        cameras = self.camids[images].tolist() if self.cross_camera else None
        first = int(rng.integers(len(images)))
        return draw_images(images.tolist(), cameras, first, self.num_instances, rng)


def _rows_of_clusters(labels: np.ndarray) -> list[np.ndarray]:
    """Return the rows of each cluster, in the order of their labels; negative labels are excluded."""
    rows = np.flatnonzero(labels >= 0)
    order = rows[np.argsort(labels[rows], kind="stable")]
    starts = np.unique(labels[order], return_index=True)[1]
    return np.split(order, starts[1:]) if len(order) else []
