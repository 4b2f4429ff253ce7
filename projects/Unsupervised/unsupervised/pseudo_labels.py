"""Pseudo labels of an epoch: clusters of the unlabeled images, and identities of the labeled ones."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from fastamp.config import CfgNode, Key
from fastamp.data.dataset import ReidDataset
from fastamp.evaluation.clustering import (
    OUTLIER,
    Clustering,
    ClusterQuality,
    cluster_features,
    cluster_quality,
    dbscan,
    describe_few_clusters,
    jaccard_distances,
)
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError, TrainingError
from unsupervised.reliability import distances_up_to, reliable_labels, without_own_labels

KEYS = (
    Key(
        "UNSUPERVISED.METHOD",
        "dbscan",
        "Clustering: dbscan, or hdbscan, which does not use EPS and requires scikit-learn.",
        choices=("dbscan", "hdbscan"),
    ),
    Key("UNSUPERVISED.EPS", 0.6, "Clustering: largest Jaccard distance of neighbors.", above=0, high=0.9999),
    Key("UNSUPERVISED.MIN_SAMPLES", 4, "Clustering: neighbors of a core image, itself included.", low=1),
    Key("UNSUPERVISED.K1", 30, "Clustering: nearest neighbors for the reciprocity test, itself included.", low=1),
    Key("UNSUPERVISED.K2", 6, "Clustering: nearest neighbors whose weights are averaged; 1 disables it.", low=1),
    Key(
        "UNSUPERVISED.EPS_GAP",
        0.0,
        "Clustering: keep only the clusters that are stable between EPS minus and plus this value, the reliability "
        "criterion of SpCL; 0 keeps all.",
        low=0,
    ),
    Key(
        "UNSUPERVISED.CENTER_CAMERAS",
        False,
        "Subtract the mean feature of each camera before the clustering: images of a camera resemble each other.",
    ),
    Key(
        "UNSUPERVISED.BASELINE_EPOCHS",
        0,
        "Number of first epochs whose clusters are those of raw pixels and color histograms, for networks without "
        "pretrained weights, whose features are worse.",
        low=0,
    ),
)


def center_cameras(features: torch.Tensor, cameras: np.ndarray) -> torch.Tensor:
    """Subtract from each feature (N, D) the mean feature of its camera (N,)."""
    numbers = torch.from_numpy(np.unique(cameras, return_inverse=True)[1])
    counts = torch.bincount(numbers)[:, None]
    means = torch.zeros(len(counts), features.shape[1]).index_add_(0, numbers, features) / counts
    return features - means[numbers]


class PseudoLabels:
    """Clustering of the unlabeled images of a training set.

    Args:
        clustering: settings of the clustering.
        gap: distance in eps of the two further clusterings of the reliability criterion; 0 disables it.
        center: subtract the mean feature of each camera.
        cameras, identities: (N,) int64 of the training images.
        labeled: (N,) bool, whether the identity of an image is used.

    Attributes:
        identities: (U,) int64, identities of the unlabeled images; None if all are the same.
        threshold: threshold of the reliability criterion; None before the first epoch.
    """

    def __init__(
        self,
        clustering: Clustering,
        *,
        gap: float,
        center: bool,
        cameras: np.ndarray,
        identities: np.ndarray,
        labeled: np.ndarray,
    ) -> None:
        self.clustering, self.gap, self.center, self.labeled = clustering, gap, center, labeled
        unlabeled = identities[~labeled]
        self.identities = unlabeled if len(np.unique(unlabeled)) > 1 else None
        self.threshold: float | None = None
        self._cameras = cameras[~labeled]
        self._known = np.unique(identities[labeled], return_inverse=True)[1]
        self._num_known = len(np.unique(identities[labeled]))

    @classmethod
    def from_config(cls, cfg: CfgNode, dataset: ReidDataset, labeled: np.ndarray) -> "PseudoLabels":
        """Build it from ``UNSUPERVISED``.

        Raises:
            ConfigError: if a setting is invalid.
        """
        keys = cfg.UNSUPERVISED
        if keys.EPS_GAP and not (keys.EPS - keys.EPS_GAP > 0 and keys.EPS + keys.EPS_GAP < 1):
            raise ConfigError(
                f"UNSUPERVISED.EPS_GAP {keys.EPS_GAP:g} is too large for UNSUPERVISED.EPS {keys.EPS:g}: the "
                "clusterings at EPS minus and plus EPS_GAP require distances above 0 and below 1.\n"
                "  fix: reduce UNSUPERVISED.EPS_GAP, e.g. to 0.02"
            )
        if keys.EPS_GAP and keys.METHOD != "dbscan":
            raise ConfigError(
                f"UNSUPERVISED.EPS_GAP {keys.EPS_GAP:g} compares clusterings of different UNSUPERVISED.EPS, which "
                f"UNSUPERVISED.METHOD {keys.METHOD} does not use.\n"
                "  fix: set UNSUPERVISED.EPS_GAP to 0, or UNSUPERVISED.METHOD to dbscan"
            )
        return cls(
            Clustering(eps=keys.EPS, min_samples=keys.MIN_SAMPLES, k1=keys.K1, k2=keys.K2, method=keys.METHOD),
            gap=keys.EPS_GAP,
            center=keys.CENTER_CAMERAS,
            cameras=dataset.camids,
            identities=dataset.labels,
            labeled=labeled,
        )

    def set_threshold(self, threshold: float | None) -> None:
        """Set the threshold of the reliability criterion, e.g. from a checkpoint."""
        self.threshold = threshold

    def clusters_of(self, labels: np.ndarray) -> np.ndarray:
        """Return the clusters 0, 1, ... of the unlabeled images, (U,) int64, -1 for outliers, from all ``labels``."""
        unlabeled = labels[~self.labeled]
        return np.where(unlabeled < 0, OUTLIER, unlabeled - self._num_known)

    def compute(
        self, features: Sequence[torch.Tensor], epoch: int, device: torch.device
    ) -> tuple[np.ndarray, ClusterQuality]:
        """Cluster the unlabeled images; a collective operation.

        Args:
            features: (N, D) float32 on the CPU, one or more kinds, which are concatenated.
            epoch: number of the epoch, for messages.
            device: device for the neighbors.

        Returns:
            (N,) int64: the identities 0..S-1 of labeled images, clusters from S, -1 for outliers; and the quality of
            the clusters.

        Raises:
            TrainingError: if there are fewer than two clusters.
        """
        kinds = [rows[torch.from_numpy(~self.labeled)] for rows in features]
        if self.center:
            kinds = [center_cameras(features_of_kind, self._cameras) for features_of_kind in kinds]
        unit = torch.cat([F.normalize(features_of_kind, dim=1) for features_of_kind in kinds], dim=1).to(device)
        clusters, *others = self._cluster(unit)
        quality = self._checked(clusters, epoch)
        if others:
            labels, self.threshold = reliable_labels(clusters, *others, self.threshold)
            clusters = without_own_labels(labels)
            reliable = cluster_quality(clusters, self.identities)
            if reliable.clusters < 2:
                raise TrainingError(
                    f"cannot train epoch {epoch + 1} without labels: {quality.clusters} clusters found, but only "
                    f"{reliable.clusters} reliable between eps {self.clustering.eps - self.gap:g} and "
                    f"{self.clustering.eps + self.gap:g}.\n"
                    "  fix: reduce UNSUPERVISED.EPS_GAP, or set it to 0 to keep all clusters"
                )
            quality = reliable
        labels = np.empty(len(self.labeled), dtype=np.int64)
        labels[self.labeled] = self._known
        labels[~self.labeled] = np.where(clusters < 0, OUTLIER, clusters + self._num_known)
        return labels, quality

    def _cluster(self, features: torch.Tensor) -> np.ndarray:
        """Return the clusters at eps and, with a gap, at eps - gap and eps + gap; (1 or 3, U) int64."""
        options = self.clustering
        if self.gap:
            distances = jaccard_distances(features, replace(options, eps=options.eps + self.gap))
            sizes = (options.eps, options.eps - self.gap, options.eps + self.gap)
            clusterings = [dbscan(distances_up_to(distances, eps), min_samples=options.min_samples) for eps in sizes]
        else:
            clusterings = [cluster_features(features, options)]
        # The sums of distances may differ between machines: all ranks use the clusters of the first.
        shared = torch.from_numpy(np.stack(clusterings)).to(features.device)
        comm.broadcast([shared])
        return shared.cpu().numpy()

    def _checked(self, clusters: np.ndarray, epoch: int) -> ClusterQuality:
        """Return the quality of the clusters.

        Raises:
            TrainingError: if there are fewer than two.
        """
        quality = cluster_quality(clusters, self.identities)
        problem = describe_few_clusters(
            quality, self.clustering, eps="UNSUPERVISED.EPS", min_samples="UNSUPERVISED.MIN_SAMPLES"
        )
        if problem:
            raise TrainingError(f"cannot train epoch {epoch + 1} without labels: {problem} (MODEL.WEIGHTS)")
        return quality
