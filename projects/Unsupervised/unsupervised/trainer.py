"""Trainer that clusters the training set before each epoch and trains with the clusters as labels."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from fastamp.config import CfgNode, Key
from fastamp.data.loader import TestLoader
from fastamp.data.unaugmented import build_unaugmented_loader, require_image_files
from fastamp.diagnostics.nan_locator import describe_evaluation
from fastamp.engine.train_loop import TRAINER_REGISTRY, AMPTrainer
from fastamp.evaluation.baselines import color_histogram, raw_pixels
from fastamp.evaluation.clustering import cluster_quality
from fastamp.feature_pass import collect_features
from fastamp.report import ClusterSheets
from fastamp.report.cluster_page import cluster_sheets, write_cluster_page
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError
from unsupervised.domain_norm import DomainBatchNorm2d
from unsupervised.memory import MemoryLoss
from unsupervised.pseudo_labels import PseudoLabels
from unsupervised.sampler import ClusterSampler

logger = logging.getLogger(f"fastamp.{__name__}")

KEYS = (
    Key("UNSUPERVISED.PAGE", True, "Write OUTPUT_DIR/clusters.html with images of the clusters of the last epoch."),
)
PAGE = "clusters.html"
BASELINES = {
    "pixels": lambda batch: raw_pixels(batch["images"]),
    "colors": lambda batch: color_histogram(batch["images"]),
}
"""Name of a baseline -> its features (B, D) of a batch."""
_PAGE_CLUSTERS, _REPORT_CLUSTERS, _PAGE_IMAGES = 40, 15, 10


def _check_labeled_names(names: list[str], labeled: list[str]) -> None:
    """Raise a ``ConfigError`` if ``UNSUPERVISED.LABELED`` is not a part of ``DATASETS.NAMES``."""
    unknown = [name for name in labeled if name not in names]
    if unknown or (labeled and set(labeled) == set(names)):
        problem = f"{unknown[0]} is not in DATASETS.NAMES" if unknown else "all of DATASETS.NAMES are labeled"
        raise ConfigError(
            f"UNSUPERVISED.LABELED {', '.join(labeled)}: {problem} ({', '.join(names)}).\n"
            "  fix: list the labeled and the unlabeled datasets in DATASETS.NAMES, and only the labeled ones in "
            "UNSUPERVISED.LABELED"
        )


@TRAINER_REGISTRY.register()
class ClusterTrainer(AMPTrainer):
    """Trainer for training sets without labels, or with labels of some datasets.

    Before each epoch, the features of the training images are extracted without augmentation and clustered, and the
    loss, a ``MemoryLoss``, sets its memory. Images of ``UNSUPERVISED.LABELED`` are not clustered: their identities are
    further classes. Identities of the other images are only used to log the purity and NMI of the clusters.
    Checkpoints contain the pseudo labels, the memory, and the numbers of clusters and outliers of each epoch. The
    precision is that of ``SOLVER.AMP``.

    Attributes:
        labels: (N,) int64 label of each training image: identities of labeled images, then clusters; -1 for outliers.
        targets: (N,) int64 row of the memory of each training image, -1 for images that are not used.
        history: ``{"epoch", "clusters", "outliers", "purity", "nmi"}`` of each epoch so far; the last two are None
            without identities.
        images: loader of the training images without augmentation.
        pseudo_labels: clustering of the unlabeled images.
    """

    images: TestLoader
    pseudo_labels: PseudoLabels

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.config: Any = None
        self.labels = np.empty(0, dtype=np.int64)
        self.history: list[dict[str, Any]] = []
        self.targets = self._classes = self.labels

    @classmethod
    def from_config(
        cls, cfg: CfgNode, *, model: nn.Module, data_loader: Iterable[dict[str, Any]], optimizers: list[Optimizer]
    ) -> "ClusterTrainer":
        """Build the trainer.

        Raises:
            ConfigError: if the loss or the sampler is not of the project, the training set is not one of
                ``DATASETS.NAMES``, or a setting of the clustering or of the labeled images is invalid.
        """
        if not any(isinstance(module, MemoryLoss) for module in model.modules()):
            raise ConfigError(
                "SOLVER.TRAINER=ClusterTrainer requires a loss with a memory, found MODEL.LOSSES.NAME "
                f"{', '.join(cfg.MODEL.LOSSES.NAME) or 'none'}.\n"
                "  fix: set MODEL.LOSSES.NAME to ClusterContrastLoss, HybridMemoryLoss or CameraProxyLoss"
            )
        dataset = require_image_files(data_loader.dataset, "SOLVER.TRAINER=ClusterTrainer")
        sampler = data_loader.batch_sampler.sampler
        if not isinstance(sampler, ClusterSampler):
            raise ConfigError(
                "SOLVER.TRAINER=ClusterTrainer requires a sampler of clusters, found DATALOADER.SAMPLER_TRAIN "
                f"{cfg.DATALOADER.SAMPLER_TRAIN}.\n  fix: set DATALOADER.SAMPLER_TRAIN to ClusterSampler"
            )
        _check_labeled_names(list(cfg.DATASETS.NAMES), list(cfg.UNSUPERVISED.LABELED))
        if not sampler.labeled.any() and any(isinstance(module, DomainBatchNorm2d) for module in model.modules()):
            raise ConfigError(
                "MODEL.BACKBONE.NORM or MODEL.HEADS.NORM is DomainBN, which requires labeled and unlabeled datasets, "
                "but UNSUPERVISED.LABELED is empty.\n"
                "  fix: set UNSUPERVISED.LABELED to the labeled datasets among DATASETS.NAMES, or the norm to BN"
            )
        trainer = super().from_config(cfg, model=model, data_loader=data_loader, optimizers=optimizers)
        assert isinstance(trainer, cls)
        trainer.config, trainer.images = cfg, build_unaugmented_loader(cfg, dataset, model.device)
        trainer.pseudo_labels = PseudoLabels.from_config(cfg, dataset, sampler.labeled)
        return trainer

    @property
    def loss(self) -> MemoryLoss:
        """Loss with the memory."""
        return next(module for module in self.model.modules() if isinstance(module, MemoryLoss))

    def prepare_epoch(self) -> bool:
        """Cluster the training set, unless a checkpoint of this epoch has been loaded."""
        if not self.history or self.history[-1]["epoch"] != self.epoch:
            self._cluster()
        self.data_loader.batch_sampler.sampler.set_labels(self._classes)
        return True

    def next_batch(self) -> dict[str, Any]:
        """Return the next batch, with the rows of the memory as ``targets``."""
        batch = super().next_batch()
        return batch | {"targets": torch.from_numpy(self.targets)[batch["indices"]]}

    def features_of_training_set(self, *, baselines: bool = False) -> list[torch.Tensor]:
        """Compute the features of the training images, on the CPU: of the model and, with ``baselines``, raw pixels and
        color histograms, each (N, D) float32."""
        comm.broadcast(self.model.buffers())  # batch-norm statistics differ between ranks
        policy = self.policy.for_evaluation(self.config.SOLVER.AMP.EVAL_DTYPE)
        columns = BASELINES if baselines else {}
        options = {"columns": columns, "title": "extracting", "locate": describe_evaluation}
        return [*collect_features(self.model, self.images, policy, **options).values()]

    def _cluster(self) -> None:
        """Set the labels, the memory and the history of this epoch.

        Raises:
            TrainingError: if there are fewer than two clusters.
        """
        keys, dataset, pseudo = self.config.UNSUPERVISED, self.data_loader.dataset, self.pseudo_labels
        with_baselines, loss = self.epoch < keys.BASELINE_EPOCHS, self.loss
        if loss.keeps_memory and len(loss.memory) and not with_baselines:
            features, baselines = torch.empty(len(dataset), loss.memory.shape[1]), []
            features[torch.from_numpy(~pseudo.labeled)] = loss.memory[loss.labeled :].cpu()
        else:
            features, *baselines = self.features_of_training_set(baselines=with_baselines)
        self.labels, quality = pseudo.compute(baselines or [features], self.epoch, self.model.device)
        logger.info("epoch %d: %s", self.epoch + 1, quality)
        self.targets, self._classes = loss.start_epoch(
            features, self.labels, cameras=dataset.camids, labeled=pseudo.labeled, epoch=self.epoch
        )
        self._warn_of_few_classes()
        record = {"clusters": quality.clusters, "outliers": quality.outliers}
        agreement = {"purity": quality.purity, "nmi": quality.nmi}
        self.history.append({"epoch": self.epoch, **record, **agreement})
        self.metrics.latest(**record, **{name: value for name, value in agreement.items() if value is not None})
        if keys.PAGE and comm.is_main_process() and Path(self.config.OUTPUT_DIR).is_dir():
            self._write_page()

    def _warn_of_few_classes(self) -> None:
        """Warn if the classes of the unlabeled images do not fill a batch."""
        unlabeled = ~self.pseudo_labels.labeled
        classes = len(np.unique(self._classes[unlabeled & (self._classes >= 0)]))
        images = self.config.SOLVER.IMS_PER_BATCH // (1 if unlabeled.all() else 2)
        per_batch = images // (self.config.DATALOADER.NUM_INSTANCE or 4)
        if classes < per_batch:
            logger.warning(
                "only %d clusters for batches of %d: clusters are repeated in a batch.\n"
                "  fix: reduce SOLVER.IMS_PER_BATCH, or change UNSUPERVISED.EPS",
                classes,
                per_batch,
            )

    def _sheet_options(self) -> dict[str, Any]:
        """Return the arguments of ``cluster_sheets`` for the unlabeled images."""
        pseudo, dataset = self.pseudo_labels, self.data_loader.dataset
        clusters = pseudo.clusters_of(self.labels)
        return {
            "labels": clusters,
            "items": dataset.items.take(np.flatnonzero(~pseudo.labeled)),
            "summary": str(cluster_quality(clusters, pseudo.identities)),
            "identities": None if pseudo.identities is None else pseudo.identities.astype(str),
        }

    def _write_page(self) -> None:
        """Write the page of the clusters."""
        title = f"{', '.join(self.config.DATASETS.NAMES)}, epoch {self.epoch + 1}"
        path = Path(self.config.OUTPUT_DIR) / PAGE
        write_cluster_page(path, title=title, clusters=_PAGE_CLUSTERS, images=_PAGE_IMAGES, **self._sheet_options())

    def cluster_sheets(self) -> ClusterSheets | None:
        """Return the clusters of the last epoch for the report; None without ``UNSUPERVISED.PAGE``."""
        if not self.config.UNSUPERVISED.PAGE or not self.history or not comm.is_main_process():
            return None
        return cluster_sheets(clusters=_REPORT_CLUSTERS, images=_PAGE_IMAGES, **self._sheet_options())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the trainer, the pseudo labels, the memory and the history of the clusters."""
        clusters = None  # before the first clustering
        if self.history:
            clusters = {
                "labels": torch.from_numpy(self.labels),
                "targets": torch.from_numpy(self.targets),
                "classes": torch.from_numpy(self._classes),
                "memory": self.loss.memory_state(),
                "threshold": self.pseudo_labels.threshold,
                "history": self.history,
            }
        return super().state_dict() | {"clusters": clusters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned.

        Raises:
            ValueError: if the number of training images or the loss has changed.
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
        if clusters["memory"].keys() != self.loss.memory_state().keys():
            raise ValueError(f"the checkpoint has no memory of {type(self.loss).__name__}: MODEL.LOSSES.NAME changed")
        self.labels, self.targets, self._classes = (clusters[name].numpy() for name in ("labels", "targets", "classes"))
        self.history = list(clusters["history"])
        self.pseudo_labels.set_threshold(clusters["threshold"])
        self.loss.set_memory(**clusters["memory"])
