"""Training of CLIP-ReID (Li et al. 2023, arXiv:2211.13977): prompts on cached features, then the image encoder."""

import logging
import math
import zlib
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Adam, Optimizer

from clipreid.losses import image_text_supcon
from clipreid.model import CLIPReID
from fastamp.amp import LossScaler
from fastamp.config import CfgNode, Key
from fastamp.data.dataset import ReidDataset
from fastamp.data.unaugmented import build_unaugmented_loader, require_image_files
from fastamp.diagnostics.nan_locator import describe_evaluation
from fastamp.engine import Stage
from fastamp.engine.hooks import LRScheduler
from fastamp.engine.train_loop import TRAINER_REGISTRY, AMPTrainer
from fastamp.feature_pass import collect_features
from fastamp.solver.lr_schedule import EpochCosineSchedule
from fastamp.utils.errors import ConfigError
from fastamp.utils.plural import plural

logger = logging.getLogger(f"fastamp.{__name__}")

KEYS = (
    Key("CLIPREID.STAGE1.MAX_EPOCH", 120, "CLIP-ReID: epochs of the prompts; 0 uses those in MODEL.WEIGHTS.", low=0),
    Key("CLIPREID.STAGE1.IMS_PER_BATCH", 64, "CLIP-ReID: images per batch of the first stage.", low=1),
    Key("CLIPREID.STAGE1.BASE_LR", 3.5e-4, "CLIP-ReID: learning rate of the prompts.", above=0),
    Key("CLIPREID.STAGE1.WARMUP_EPOCHS", 5, "CLIP-ReID: warm-up of the first stage, in epochs.", low=0),
    Key("CLIPREID.STAGE1.WARMUP_LR", 1e-5, "CLIP-ReID: rate from which the warm-up of the first stage rises.", low=0),
    Key("CLIPREID.STAGE1.ETA_MIN_LR", 1e-6, "CLIP-ReID: rate of the last epoch of the first stage.", low=0),
    Key("CLIPREID.STAGE1.WEIGHT_DECAY", 1e-4, "CLIP-ReID: weight decay of the prompts.", low=0),
)


class PromptLosses(nn.Module):
    """Losses of the first stage, of cached image features and the text features of their identities.

    Args:
        model: model whose prompts are trained.
    """

    def __init__(self, model: CLIPReID) -> None:
        super().__init__()
        self.prompt_learner, self.text_encoder = model.prompt_learner, model.text_encoder

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Compute ``{"loss_i2t": scalar, "loss_t2i": scalar}`` of ``{"features": (B, D), "targets": (B,)}``."""
        images, targets = batch["features"], batch["targets"]
        texts = self.text_encoder(self.prompt_learner(targets))
        return {
            "loss_i2t": image_text_supcon(images, texts, targets, targets),
            "loss_t2i": image_text_supcon(texts, images, targets, targets),
        }


class CachedFeatures:
    """Infinite loader of batches of cached features, in a random order of each epoch.

    Batch n depends on the seed only. The last batch of an epoch may be smaller.

    Args:
        size: number N of features.
        batch_size: features per batch.
        seed: seed of the order.

    Attributes:
        features: (N, D) float32; None before ``cache`` and after ``clear``.
        targets: (N,) int64.
    """

    def __init__(self, size: int, *, batch_size: int, seed: int) -> None:
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.iters_per_epoch = math.ceil(size / batch_size)
        self._start = 0
        self.clear()

    def cache(self, features: torch.Tensor, targets: torch.Tensor) -> None:
        """Set the features and targets."""
        self.features, self.targets = features, targets

    def clear(self) -> None:
        """Release the memory of the features."""
        self.features: torch.Tensor | None = None
        self.targets: torch.Tensor | None = None

    def start_at(self, batch: int) -> None:
        """Start the next iterator at a batch, counted from the start of training."""
        self._start = batch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        epoch, skip = divmod(self._start, self.iters_per_epoch)
        while True:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            order = torch.randperm(self.size, generator=generator)
            for rows in order.split(self.batch_size)[skip:]:
                rows = rows.to(self.features.device)
                yield {"features": self.features[rows], "targets": self.targets[rows]}
            epoch, skip = epoch + 1, 0


class PromptTrainer(AMPTrainer):
    """Training loop of the first stage: trains the prompts, with the features of the training images.

    Args:
        clipreid: model whose prompts are trained.
        images: loader of the training images without augmentation.
        identities: (K,) int64, checksums of the identities; see ``identity_checksums``.
        args, options: see ``AMPTrainer``; the loader is a ``CachedFeatures``.
    """

    def __init__(
        self, *args: Any, clipreid: CLIPReID, images: Iterable[dict[str, Any]], identities: torch.Tensor, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.clipreid, self.images, self.identities = clipreid, images, identities

    def train(self, start_iter: int, max_epoch: int, iters_per_epoch: int) -> None:
        """Train the prompts, and compute the text features.

        Raises:
            ConfigError: if there are no epochs, and the prompts are of other identities.
        """
        prompts = self.clipreid.prompt_learner
        if max_epoch == 0:
            check_identities(prompts.identities, self.identities)
        prompts.identities.copy_(self.identities)
        prompts.cls_ctx.requires_grad_(True)
        try:
            super().train(start_iter, max_epoch, iters_per_epoch)
        finally:
            prompts.cls_ctx.requires_grad_(False)
            self.data_loader.clear()
        self.clipreid.update_text_features()
        logger.info("computed the text features of %s", plural(len(self.identities), "identity", "identities"))

    def prepare_epoch(self) -> bool:
        """Compute the projections of the training images before the first epoch, and after a resume."""
        if self.data_loader.features is not None:
            return False
        columns = collect_features(
            self.clipreid,
            self.images,
            self.policy,
            forward=CLIPReID.prompt_image_features,
            columns={"targets": itemgetter("targets")},
            title="caching features",
            locate=describe_evaluation,
            on_all_ranks=False,
        )
        device = self.clipreid.device
        self.data_loader.cache(columns["features"].to(device), columns["targets"].to(device))
        return True


@TRAINER_REGISTRY.register()
class CLIPReIDTrainer(AMPTrainer):
    """Trainer of the image encoder, in the second stage of the run; the first one is that of ``PromptTrainer``.

    The precision of both stages is that of ``SOLVER.AMP``.
    """

    @classmethod
    def from_config(
        cls, cfg: CfgNode, *, model: nn.Module, data_loader: Iterable[dict[str, Any]], optimizers: list[Optimizer]
    ) -> "CLIPReIDTrainer":
        """Build the trainer.

        Raises:
            ConfigError: if the model is not CLIPReID, or the training set is not one of ``DATASETS.NAMES``.
        """
        if not isinstance(model, CLIPReID):
            raise ConfigError(
                f"SOLVER.TRAINER=CLIPReIDTrainer requires MODEL.META_ARCHITECTURE CLIPReID, found "
                f"{type(model).__name__}.\n  fix: set MODEL.META_ARCHITECTURE to CLIPReID"
            )
        dataset = require_image_files(data_loader.dataset, "SOLVER.TRAINER=CLIPReIDTrainer")
        trainer = super().from_config(cfg, model=model, data_loader=data_loader, optimizers=optimizers)
        assert isinstance(trainer, cls)
        trainer.step.set_frozen(("prompt_learner", "text_encoder"))
        trainer.earlier_stages.append(build_prompt_stage(cfg, model, dataset, trainer))
        return trainer


def build_prompt_stage(cfg: CfgNode, model: CLIPReID, dataset: ReidDataset, images: AMPTrainer) -> Stage:
    """Build the first stage from ``CLIPREID.STAGE1``.

    Args:
        cfg: config of the run.
        model: the model.
        dataset: training set.
        images: training loop of the second stage, with the same precision.
    """
    options = cfg.CLIPREID.STAGE1
    group = {"params": [model.prompt_learner.cls_ctx], "base_lr": options.BASE_LR, "role": "prompts"}
    trainer = PromptTrainer(
        PromptLosses(model),
        CachedFeatures(len(dataset), batch_size=options.IMS_PER_BATCH, seed=max(cfg.SEED, 0)),
        [Adam([group], lr=options.BASE_LR, weight_decay=options.WEIGHT_DECAY)],
        policy=images.policy,
        scaler=LossScaler.from_config(cfg, images.policy),
        on_failure=images.on_failure,
        max_consecutive_skips=cfg.SOLVER.AMP.MAX_CONSECUTIVE_SKIPS,
        clipreid=model,
        images=build_unaugmented_loader(cfg, dataset, model.device, all_on_each_rank=True),
        identities=identity_checksums(dataset).to(model.device),
    )
    trainer.set_data(trainer.data_loader.iters_per_epoch, images_per_batch=options.IMS_PER_BATCH)
    trainer.step.set_frozen(("text_encoder",))
    schedule = EpochCosineSchedule(
        warmup_epochs=options.WARMUP_EPOCHS,
        total_epochs=options.MAX_EPOCH,
        first=options.WARMUP_LR,
        lowest=options.ETA_MIN_LR,
    )
    trainer.register_hooks([LRScheduler(schedule)])
    return Stage("prompts", trainer, options.MAX_EPOCH)


def identity_checksums(dataset: ReidDataset) -> torch.Tensor:
    """Compute the CRC-32 of the name of each identity of a training set, (K,) int64 in the order of the labels."""
    rows = np.unique(dataset.labels, return_index=True)[1]
    return torch.tensor([zlib.crc32(str(dataset.items[int(row)].pid).encode()) for row in rows])


def check_identities(stored: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that the prompts of a model are those of the training set.

    Args:
        stored: (K,) int64, checksums in the model, 0 where they are not known.
        expected: (K,) int64, checksums of the training set.

    Raises:
        ConfigError: if the prompts are of other identities, or were not loaded.
    """
    known = stored != 0
    if not known.any():
        logger.warning(
            "CLIPREID.STAGE1.MAX_EPOCH is 0, and the identities of the prompts are not known: they are correct only if "
            "MODEL.WEIGHTS was trained with the same training set by CLIP-ReID's program.\n"
            "  fix: if it was not, set CLIPREID.STAGE1.MAX_EPOCH above 0"
        )
        return
    wrong = int((known & (stored != expected)).sum())
    if wrong:
        raise ConfigError(
            f"CLIPREID.STAGE1.MAX_EPOCH is 0, but the prompts in MODEL.WEIGHTS are of other identities: {wrong} of "
            f"{len(expected)} differ.\n"
            "  fix: set DATASETS.NAMES to the training set of MODEL.WEIGHTS, or CLIPREID.STAGE1.MAX_EPOCH above 0"
        )
