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
from fastamp.data.unaugmented import build_unaugmented_loader
from fastamp.diagnostics.precision_diagnostics import PrecisionDiagnostics
from fastamp.engine.hooks import HookBase, LRScheduler, Priority, StopOnSignal
from fastamp.engine.train_loop import TRAINER_REGISTRY, AMPTrainer
from fastamp.feature_pass import collect_features
from fastamp.solver.lr_schedule import EpochCosineSchedule
from fastamp.solver.state import OptimizerState
from fastamp.utils import comm
from fastamp.utils.command_line import TrainingInterrupted
from fastamp.utils.errors import ConfigError, WeightsError
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
    Key(
        "CLIPREID.STAGE1.CHECKPOINT_PERIOD",
        20,
        "CLIP-ReID: period of checkpoints in the first stage, in epochs.",
        low=1,
    ),
)
CHECKPOINT = "model_stage1"


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
        features: (N, D) float32.
        targets: (N,) int64.
        batch_size: features per batch.
        seed: seed of the order.
    """

    def __init__(self, features: torch.Tensor, targets: torch.Tensor, *, batch_size: int, seed: int) -> None:
        self.features, self.targets, self.batch_size, self.seed = features, targets, batch_size, seed
        self.iters_per_epoch = math.ceil(len(features) / batch_size)
        self._start = 0

    def start_at(self, batch: int) -> None:
        """Start the next iterator at a batch, counted from the start of training."""
        self._start = batch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        epoch, skip = divmod(self._start, self.iters_per_epoch)
        while True:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            order = torch.randperm(len(self.features), generator=generator)
            for rows in order.split(self.batch_size)[skip:]:
                rows = rows.to(self.features.device)
                yield {"features": self.features[rows], "targets": self.targets[rows]}
            epoch, skip = epoch + 1, 0


class _StageHook(HookBase):
    """Log the losses of each epoch, save checkpoints, and stop on a signal.

    Args:
        outer: trainer of the run.
        period: period of checkpoints in epochs.
    """

    priority = Priority.LOW

    def __init__(self, outer: "CLIPReIDTrainer", period: int) -> None:
        self.outer, self.period = outer, period
        self._sums: dict[str, torch.Tensor] = {}
        self._steps = 0

    def before_epoch(self) -> None:
        self._sums, self._steps = {}, 0

    def after_step(self) -> None:
        self._steps += 1
        for name, value in self.trainer.losses.items():
            self._sums[name] = self._sums.get(name, 0) + value
        stop = self.outer.stop_hook()
        if stop is None:
            return
        number = stop.received or 0
        if number := int(comm.max_over_ranks(number)) if comm.is_distributed() else number:
            path = stop.checkpointer.save("model_interrupted")
            comm.synchronize()
            raise TrainingInterrupted(number, str(path))

    def after_epoch(self) -> None:
        trainer = self.trainer
        losses = ", ".join(f"{name} {float(value) / self._steps:.4f}" for name, value in self._sums.items())
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        logger.info("prompts: epoch %d of %d: %s, lr %.3g", trainer.epoch + 1, trainer.max_epoch, losses, rate)
        stop = self.outer.stop_hook()
        if stop is not None and (trainer.epoch + 1) % self.period == 0 and trainer.epoch + 1 < trainer.max_epoch:
            logger.info("saved %s", stop.checkpointer.save(CHECKPOINT))


@TRAINER_REGISTRY.register()
class CLIPReIDTrainer(AMPTrainer):
    """Trainer that first trains the prompts, in its method ``train``, and then the image encoder.

    Both stages are part of one run: checkpoints of the first stage contain the state of the prompts' optimizer, and the
    run continues in the stage in which it was interrupted. The precision of both stages is that of ``SOLVER.AMP``.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.config: Any = None
        self.prompts_done = False
        self._stage: tuple[AMPTrainer, OptimizerState] | None = None
        self._saved: dict[str, Any] = {}

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
        if not isinstance(data_loader.dataset, ReidDataset):
            raise ConfigError(
                "SOLVER.TRAINER=CLIPReIDTrainer does not support a custom training set: the first stage loads its "
                "images without augmentation.\n  fix: set DATASETS.NAMES, e.g. to csv:FILE"
            )
        trainer = super().from_config(cfg, model=model, data_loader=data_loader, optimizers=optimizers)
        assert isinstance(trainer, cls)
        trainer.config = cfg
        return trainer

    def stop_hook(self) -> StopOnSignal | None:
        """Return the hook that receives stop signals and has the checkpointer of the run; None in a dry run."""
        return next((hook for hook in self._hooks if isinstance(hook, StopOnSignal)), None)

    def train(self, start_iter: int, max_epoch: int, iters_per_epoch: int) -> None:
        """Train the prompts, unless that is done, and run the training loop of the image encoder."""
        if not self.prompts_done:
            self._train_prompts()
            self.prompts_done, self._stage, self._saved = True, None, {}
        self.step.set_frozen(("prompt_learner", "text_encoder"))
        super().train(start_iter, max_epoch, iters_per_epoch)

    def _train_prompts(self) -> None:
        model, options = self.model, self.config.CLIPREID.STAGE1
        identities = identity_checksums(self.data_loader.dataset).to(model.device)
        if options.MAX_EPOCH == 0:
            check_identities(model.prompt_learner.identities, identities)
        model.prompt_learner.identities.copy_(identities)
        if options.MAX_EPOCH:
            self._run_stage()
        model.update_text_features()
        logger.info("computed the text features of %s", plural(len(identities), "identity", "identities"))

    def _run_stage(self) -> None:
        """Train the prompts on the cached features of the training set.

        Raises:
            WeightsError: if the state of the first stage in the checkpoint does not fit.
        """
        model, options = self.model, self.config.CLIPREID.STAGE1
        features, targets = self._cache_features()
        loader = CachedFeatures(features, targets, batch_size=options.IMS_PER_BATCH, seed=max(self.config.SEED, 0))
        module = PromptLosses(model)
        vectors = model.prompt_learner.cls_ctx.requires_grad_(True)
        group = {"params": [vectors], "base_lr": options.BASE_LR, "role": "prompts"}
        optimizer = Adam([group], lr=options.BASE_LR, weight_decay=options.WEIGHT_DECAY)
        stage = AMPTrainer(
            module,
            loader,
            [optimizer],
            policy=self.policy,
            scaler=LossScaler.from_config(self.config, self.policy),
            precision_diagnostics=PrecisionDiagnostics(),
            on_failure=self.on_failure,
            max_consecutive_skips=self.config.SOLVER.AMP.MAX_CONSECUTIVE_SKIPS,
        )
        schedule = EpochCosineSchedule(
            warmup_epochs=options.WARMUP_EPOCHS,
            total_epochs=options.MAX_EPOCH,
            first=options.WARMUP_LR,
            lowest=options.ETA_MIN_LR,
        )
        stage.register_hooks([LRScheduler(schedule), _StageHook(self, options.CHECKPOINT_PERIOD)])
        stage.set_data(loader.iters_per_epoch)
        stage.step.set_frozen(("text_encoder",))
        state = OptimizerState(optimizer, module)
        self._stage = (stage, state)
        if self._saved:
            try:
                stage.load_state_dict(self._saved["trainer"])
                state.load_state_dict(self._saved["optimizer"])
            except (ValueError, LookupError, TypeError, RuntimeError, AttributeError) as error:
                raise WeightsError(
                    f"cannot resume the first stage of CLIP-ReID: {error}.\n"
                    "  fix: resume with the run's original config (config.yaml next to the checkpoint)"
                ) from error
        loader.start_at(stage.start_iter)
        logger.info(
            "training the prompts of %s: %s of %s",
            plural(len(vectors), "identity", "identities"),
            plural(options.MAX_EPOCH, "epoch"),
            plural(loader.iters_per_epoch, "iteration"),
        )
        stage.train(stage.start_iter, options.MAX_EPOCH, loader.iters_per_epoch)
        vectors.requires_grad_(False)
        vectors.grad = None

    def _cache_features(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the projections (N, D) float32 and the targets (N,) of the training set, without augmentation."""
        cfg, model, dataset = self.config, self.model, self.data_loader.dataset
        found = collect_features(
            model,
            build_unaugmented_loader(cfg, dataset, model.device, all_on_each_rank=True),
            self.policy,
            forward=CLIPReID.prompt_image_features,
            columns={"targets": itemgetter("targets")},
            title="caching features",
            on_all_ranks=False,
        )
        return found["features"].to(model.device), found["targets"].to(model.device)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the trainer and of the first stage."""
        state = super().state_dict() | {"prompts_done": self.prompts_done, "prompts": None}
        if not self.prompts_done:
            state["iteration"] = 0
            if self._stage is not None:
                stage, optimizer = self._stage
                state["prompts"] = {"trainer": stage.state_dict(), "optimizer": optimizer.state_dict()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned."""
        super().load_state_dict(state)
        self.prompts_done, self._saved = bool(state["prompts_done"]), state["prompts"] or {}


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
