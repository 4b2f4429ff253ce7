"""Trainer that clusters the training set before each epoch and trains with the clusters as labels."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from fastamp.amp import PrecisionPolicy
from fastamp.config import Key
from fastamp.data.dataset import ReidDataset
from fastamp.data.loader import TestLoader, worker_count
from fastamp.data.samplers import InferenceSampler
from fastamp.data.transforms import build_transforms
from fastamp.engine.hooks import HookBase
from fastamp.engine.train_loop import TRAINER_REGISTRY, AMPTrainer
from fastamp.evaluation import DatasetEvaluator, inference_on_dataset
from fastamp.evaluation.baselines import color_histogram, raw_pixels
from fastamp.evaluation.clustering import Clustering, cluster_features, cluster_quality, describe_few_clusters
from fastamp.report.cluster_page import write_cluster_page
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError, TrainingError
from unsupervised.cluster_contrast import ClusterContrastLoss, compute_centroids
from unsupervised.sampler import ClusterSampler

logger = logging.getLogger(f"fastamp.{__name__}")

KEYS = (
    Key("UNSUPERVISED.EPS", 0.6, "Clustering: largest Jaccard distance of neighbors.", above=0, high=0.9999),
    Key("UNSUPERVISED.MIN_SAMPLES", 4, "Clustering: neighbors of a core image, itself included.", low=1),
    Key("UNSUPERVISED.K1", 30, "Clustering: nearest neighbors for the reciprocity test, itself included.", low=1),
    Key("UNSUPERVISED.K2", 6, "Clustering: nearest neighbors whose weights are averaged; 1 disables it.", low=1),
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
    Key("UNSUPERVISED.PAGE", True, "Write OUTPUT_DIR/clusters.html with images of the clusters of the last epoch."),
)
PAGE = "clusters.html"
_PAGE_CLUSTERS, _PAGE_IMAGES = 40, 10


class _FeatureCollector(DatasetEvaluator):
    """Collect the features of all images, on every rank.

    Args:
        baselines (bool): also compute raw pixels and color histograms.

    Attributes:
        features (list[torch.Tensor]): features of the model and, with ``baselines``, raw pixels and color histograms,
            each (N, D) float32 on the CPU.
    """

    def __init__(self, *, baselines: bool) -> None:
        self.baselines = baselines
        self.features: list[torch.Tensor] = []
        self._batches: list[list[torch.Tensor]] = []

    def reset(self) -> None:
        self._batches = []

    def process(self, inputs: dict[str, Any], outputs: torch.Tensor) -> None:
        images = inputs["images"]
        found = [outputs.float(), *((raw_pixels(images), color_histogram(images)) if self.baselines else ())]
        self._batches.append([each.cpu() for each in found])

    def evaluate(self) -> dict[str, Any]:
        self.features = [comm.gather_rows(torch.cat(kind)) for kind in zip(*self._batches, strict=True)]
        self._batches = []
        return {}


def center_cameras(features: torch.Tensor, cameras: np.ndarray) -> torch.Tensor:
    """Subtract from each feature (N, D) the mean feature of its camera (N,)."""
    numbers = torch.from_numpy(np.unique(cameras, return_inverse=True)[1])
    counts = torch.bincount(numbers)[:, None]
    means = torch.zeros(len(counts), features.shape[1]).index_add_(0, numbers, features) / counts
    return features - means[numbers]


class _Relabel(HookBase):
    """Cluster the training set before each epoch."""

    def before_epoch(self) -> None:
        assert isinstance(self.trainer, ClusterTrainer)
        self.trainer.start_epoch()


@TRAINER_REGISTRY.register()
class ClusterTrainer(AMPTrainer):
    """Trainer for training sets without labels.

    Before each epoch, the features of the training images are extracted without augmentation and clustered; clusters
    are the labels of the epoch, outliers are not used, and the centroids are the memory of ``ClusterContrastLoss``.
    Identities of the training set are only used to log the purity and NMI of the clusters. Checkpoints contain the
    pseudo labels, the memory, and the numbers of clusters and outliers of each epoch. The precision is that of
    ``SOLVER.AMP``.

    Attributes:
        labels (np.ndarray): (N,) int64 cluster of each training image, -1 for outliers.
        history (list[dict]): ``{"epoch", "clusters", "outliers", "purity", "nmi"}`` of each epoch so far; the last two
            are None without identities.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.config: Any = None
        self.labels = np.empty(0, dtype=np.int64)
        self.history: list[dict[str, Any]] = []
        self._plain: TestLoader | None = None
        self.attach_internal_hooks(_Relabel())

    @classmethod
    def from_config(
        cls, cfg: Any, *, model: nn.Module, data_loader: Iterable[dict[str, Any]], optimizers: list[Optimizer]
    ) -> "ClusterTrainer":
        """Build the trainer.

        Raises:
            ConfigError: if the loss or the sampler is not that of the project, the training set is not one of
                ``DATASETS.NAMES``, or a setting of the clustering is invalid.
        """
        if not any(isinstance(module, ClusterContrastLoss) for module in model.modules()):
            raise ConfigError(
                f"SOLVER.TRAINER=ClusterTrainer requires the loss ClusterContrastLoss, found MODEL.LOSSES.NAME "
                f"{', '.join(cfg.MODEL.LOSSES.NAME) or 'none'}.\n"
                "  fix: set MODEL.LOSSES.NAME to ClusterContrastLoss"
            )
        if not isinstance(getattr(data_loader, "dataset", None), ReidDataset):
            raise ConfigError(
                "SOLVER.TRAINER=ClusterTrainer does not support a custom training set: it loads the images again "
                "without augmentation.\n  fix: set DATASETS.NAMES, e.g. to csv:FILE"
            )
        if not isinstance(data_loader.batch_sampler.sampler, ClusterSampler):
            raise ConfigError(
                "SOLVER.TRAINER=ClusterTrainer requires a sampler of clusters, found DATALOADER.SAMPLER_TRAIN "
                f"{cfg.DATALOADER.SAMPLER_TRAIN}.\n  fix: set DATALOADER.SAMPLER_TRAIN to ClusterSampler"
            )
        trainer = super().from_config(cfg, model=model, data_loader=data_loader, optimizers=optimizers)
        assert isinstance(trainer, cls)
        trainer.config = cfg
        return trainer

    @classmethod
    def build_policy(cls, cfg: Any, device: torch.device) -> PrecisionPolicy:
        """Build the precision policy from ``SOLVER.AMP``; float32 if it is not enabled."""
        enabled = cfg.SOLVER.AMP.ENABLED
        return PrecisionPolicy.from_config(cfg, device) if enabled else PrecisionPolicy.float32(cfg, device)

    @property
    def loss(self) -> ClusterContrastLoss:
        """Loss with the memory."""
        return next(module for module in self.model.modules() if isinstance(module, ClusterContrastLoss))

    @property
    def clustering(self) -> Clustering:
        """Settings of the clustering."""
        keys = self.config.UNSUPERVISED
        return Clustering(eps=keys.EPS, min_samples=keys.MIN_SAMPLES, k1=keys.K1, k2=keys.K2)

    def start_epoch(self) -> None:
        """Cluster the training set, unless a checkpoint of this epoch has been loaded, and start the loader."""
        if not self.history or self.history[-1]["epoch"] != self.epoch:
            self._cluster()
        self.data_loader.batch_sampler.sampler.set_labels(self.labels)
        # The workers prefetch batches of the former labels: start again at the first batch of the epoch.
        self._batches = None
        self.data_loader.start_at(self.batches_before(self.iter))

    def next_batch(self) -> dict[str, Any]:
        """Return the next batch, with the clusters as ``targets``."""
        batch = super().next_batch()
        return batch | {"targets": torch.from_numpy(self.labels)[batch["indices"]]}

    def extract_features(self, *, baselines: bool = False) -> list[torch.Tensor]:
        """Compute the features of the training images; see ``_FeatureCollector.features``."""
        cfg = self.config
        if self._plain is None:
            dataset = self.data_loader.dataset
            plain = ReidDataset(
                dataset.items,
                build_transforms(cfg, is_train=False),
                relabel=True,
                skip_corrupt=dataset.skip_corrupt,
                sources=dataset.sources,
                categories=cfg.DATASETS.CATEGORIES,
            )
            world_size = comm.get_world_size()
            sampler = InferenceSampler(
                size=len(plain),
                batch_size=max(1, cfg.TEST.IMS_PER_BATCH // world_size),
                rank=comm.get_rank(),
                world_size=world_size,
            )
            workers = worker_count("DATALOADER.NUM_WORKERS", cfg.DATALOADER.NUM_WORKERS)
            self._plain = TestLoader(plain, sampler, num_workers=workers, device=self.model.device)
        comm.broadcast(self.model.buffers())  # batch-norm statistics differ between ranks
        collector, policy = (
            _FeatureCollector(baselines=baselines),
            self.policy.for_evaluation(cfg.SOLVER.AMP.EVAL_DTYPE),
        )
        inference_on_dataset(self.model, self._plain, collector, policy=policy)
        return collector.features

    def _cluster(self) -> None:
        """Extract the features, and set the labels, the memory and the history of this epoch.

        Raises:
            TrainingError: if there are fewer than two clusters.
        """
        keys, dataset = self.config.UNSUPERVISED, self.data_loader.dataset
        features, *baselines = self.extract_features(baselines=self.epoch < keys.BASELINE_EPOCHS)
        kinds = baselines or [features]
        if keys.CENTER_CAMERAS:
            kinds = [center_cameras(each, dataset.camids) for each in kinds]
        clustered = torch.cat([F.normalize(each, dim=1) for each in kinds], dim=1)
        labels = cluster_features(clustered.to(self.model.device), self.clustering)
        # The sums of distances may differ between machines: all ranks use the labels of the first.
        shared = torch.from_numpy(labels).to(self.model.device)
        comm.broadcast([shared])
        self.labels = shared.cpu().numpy()
        quality = cluster_quality(self.labels, dataset.labels if dataset.num_classes > 1 else None)
        logger.info("epoch %d: %s", self.epoch + 1, quality)
        problem = describe_few_clusters(
            quality, self.clustering, eps="UNSUPERVISED.EPS", min_samples="UNSUPERVISED.MIN_SAMPLES"
        )
        if problem:
            raise TrainingError(f"cannot train epoch {self.epoch + 1} without labels: {problem} (MODEL.WEIGHTS)")
        per_batch = self.config.SOLVER.IMS_PER_BATCH // self.config.DATALOADER.NUM_INSTANCE
        if quality.clusters < per_batch:
            logger.warning(
                "only %d clusters for batches of %d: clusters are repeated in a batch.\n"
                "  fix: reduce SOLVER.IMS_PER_BATCH, or change UNSUPERVISED.EPS",
                quality.clusters,
                per_batch,
            )
        self.loss.set_memory(compute_centroids(features, self.labels))
        found = {"clusters": quality.clusters, "outliers": quality.outliers}
        agreement = {"purity": quality.purity, "nmi": quality.nmi}
        self.history.append({"epoch": self.epoch, **found, **agreement})
        self.metrics.latest(**found, **{name: value for name, value in agreement.items() if value is not None})
        folder = Path(self.config.OUTPUT_DIR)
        if keys.PAGE and comm.is_main_process() and folder.is_dir():
            write_cluster_page(
                folder / PAGE,
                self.labels,
                dataset.items,
                title=f"{', '.join(self.config.DATASETS.NAMES)}, epoch {self.epoch + 1}",
                summary=str(quality),
                identities=dataset.labels.astype(str) if dataset.num_classes > 1 else None,
                clusters=_PAGE_CLUSTERS,
                images=_PAGE_IMAGES,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the trainer, the pseudo labels, the memory and the history of the clusters."""
        clusters = None  # before the first clustering
        if self.history:
            clusters = {"labels": torch.from_numpy(self.labels), "memory": self.loss.memory, "history": self.history}
        return super().state_dict() | {"clusters": clusters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned.

        Raises:
            ValueError: if the number of training images has changed.
        """
        super().load_state_dict(state)
        clusters, images = state.get("clusters"), len(self.data_loader.dataset)
        if clusters is None:
            return
        if len(clusters["labels"]) != images:
            raise ValueError(
                f"the checkpoint has pseudo labels of {len(clusters['labels'])} images, but the training set has "
                f"{images}: DATASETS or the training data changed"
            )
        self.labels, self.history = clusters["labels"].numpy(), list(clusters["history"])
        self.loss.set_memory(clusters["memory"])
