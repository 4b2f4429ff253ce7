"""Trainer that computes the graph of identities for ``GraphSampler`` before each epoch."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from domaingeneralization.graph_sampler import GraphSampler, nearest_identities
from domaingeneralization.head import MatchingBaseline
from fastamp.config import CfgNode
from fastamp.data.unaugmented import build_unaugmented_loader, require_image_files
from fastamp.diagnostics.nan_locator import describe_evaluation
from fastamp.engine.train_loop import TRAINER_REGISTRY, AMPTrainer
from fastamp.feature_pass import call_model, collect_features
from fastamp.layers import pairwise_distance
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError


def _matched_maps(model: MatchingBaseline, batch: dict[str, Any]) -> torch.Tensor:
    return model.features_and_maps(batch)[1]


@TRAINER_REGISTRY.register()
class GraphTrainer(AMPTrainer):
    """Trainer for ``GraphSampler``: before each epoch, the distances between identities are computed.

    They are those of one random image of each identity, without augmentation: the negative matching scores if the model
    has a matcher, else the cosine distances of features. Checkpoints contain the nearest identities of the epoch. The
    precision is that of ``SOLVER.AMP``.

    Attributes:
        graph_epoch: epoch of the graph; -1 before the first one.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.config: Any = None
        self.graph_epoch = -1

    @classmethod
    def from_config(
        cls, cfg: CfgNode, *, model: nn.Module, data_loader: Iterable[dict[str, Any]], optimizers: list[Optimizer]
    ) -> "GraphTrainer":
        """Build the trainer.

        Raises:
            ConfigError: if the sampler is not that of the project, or the training set is not one of
                ``DATASETS.NAMES``.
        """
        require_image_files(data_loader.dataset, "SOLVER.TRAINER=GraphTrainer")
        if not isinstance(data_loader.batch_sampler.sampler, GraphSampler):
            raise ConfigError(
                "SOLVER.TRAINER=GraphTrainer requires the sampler GraphSampler, found DATALOADER.SAMPLER_TRAIN "
                f"{cfg.DATALOADER.SAMPLER_TRAIN}.\n  fix: set DATALOADER.SAMPLER_TRAIN to GraphSampler"
            )
        trainer = super().from_config(cfg, model=model, data_loader=data_loader, optimizers=optimizers)
        assert isinstance(trainer, cls)
        trainer.config = cfg
        return trainer

    @property
    def sampler(self) -> GraphSampler:
        """Sampler of the training set."""
        return self.data_loader.batch_sampler.sampler

    def prepare_epoch(self) -> bool:
        """Compute the graph, unless a checkpoint of this epoch has been loaded."""
        if self.graph_epoch != self.epoch:
            distances = self.identity_distances(self.sampler.choose_images(self.epoch)).cpu().numpy()
            nearest = nearest_identities(distances, self.sampler.identities_per_batch - 1)
            # The sums may differ between machines: all ranks use the graph of the first.
            shared = torch.from_numpy(nearest).to(self.model.device)
            comm.broadcast([shared])
            self.sampler.set_nearest(shared.cpu().numpy())
            self.graph_epoch = self.epoch
        return True

    def identity_distances(self, images: list[int]) -> torch.Tensor:
        """Compute the distances (N, N) float32 between training images, for their order only."""
        comm.broadcast(self.model.buffers())  # batch-norm statistics differ between ranks
        policy = self.policy.for_evaluation(self.config.SOLVER.AMP.EVAL_DTYPE)
        loader = build_unaugmented_loader(self.config, self.data_loader.dataset, self.model.device, images=images)
        matches = isinstance(self.model, MatchingBaseline)
        forward = _matched_maps if matches else call_model
        outputs = collect_features(
            self.model, loader, policy, forward=forward, title="extracting", locate=describe_evaluation
        )["features"]
        outputs = outputs.to(self.model.device)
        return (
            -self.model.heads.matcher.all_scores(outputs) if matches else pairwise_distance(outputs, outputs, "cosine")
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the trainer and the graph."""
        graph = None  # before the first epoch
        if self.sampler.nearest is not None:
            graph = {"epoch": self.graph_epoch, "nearest": torch.from_numpy(self.sampler.nearest)}
        return super().state_dict() | {"graph": graph}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned.

        Raises:
            ValueError: if the number of training identities, or of those in a batch, has changed.
        """
        super().load_state_dict(state)
        graph = state.get("graph")
        if graph is None:
            return
        expected = (len(self.sampler.identities), self.sampler.identities_per_batch - 1)
        if tuple(graph["nearest"].shape) != expected:
            raise ValueError(
                f"the checkpoint has a graph of {graph['nearest'].shape[0]} identities with "
                f"{graph['nearest'].shape[1]} neighbors, expected {expected[0]} and {expected[1]}: DATASETS, "
                "SOLVER.IMS_PER_BATCH or the training data changed"
            )
        self.sampler.set_nearest(graph["nearest"].numpy())
        self.graph_epoch = graph["epoch"]
