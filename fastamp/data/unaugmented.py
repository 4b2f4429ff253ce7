"""Loader of the training images without augmentation, for methods that compute features of the training set."""

from collections.abc import Sequence
from typing import Any

import torch

from fastamp.config import CfgNode
from fastamp.data.dataset import ReidDataset
from fastamp.data.loader import TestLoader, worker_count
from fastamp.data.samplers import InferenceSampler
from fastamp.data.transforms import build_transforms
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError


def require_image_files(dataset: Any, user: str) -> ReidDataset:
    """Return a training set whose images can be loaded again.

    Args:
        dataset: training set of the run.
        user: the setting that requires it, for the message.

    Raises:
        ConfigError: if it is a custom training set.
    """
    if not isinstance(dataset, ReidDataset):
        raise ConfigError(
            f"{user} does not support a custom training set: it loads the images again without augmentation.\n"
            "  fix: set DATASETS.NAMES, e.g. to csv:FILE"
        )
    return dataset


def build_unaugmented_loader(
    cfg: CfgNode,
    dataset: ReidDataset,
    device: torch.device,
    *,
    images: Sequence[int] | None = None,
    all_on_each_rank: bool = False,
) -> TestLoader:
    """Build a loader of training images in the order of the dataset, with the transforms of the evaluation.

    Args:
        cfg: config of the run; batches have ``TEST.IMS_PER_BATCH`` images on all ranks together.
        dataset: training set, whose identities and columns the batches have.
        device: device of the batches.
        images: indices of the images. Default: all.
        all_on_each_rank: load all images on each rank, instead of a part of them. Default False.
    """
    plain = ReidDataset(
        dataset.items,
        build_transforms(cfg, is_train=False),
        relabel=True,
        skip_corrupt=dataset.skip_corrupt,
        sources=dataset.sources,
        categories=cfg.DATASETS.CATEGORIES,
    )
    rank, world_size = (0, 1) if all_on_each_rank else (comm.get_rank(), comm.get_world_size())
    sampler = InferenceSampler(
        size=len(plain if images is None else images),
        batch_size=max(1, cfg.TEST.IMS_PER_BATCH // world_size),
        rank=rank,
        world_size=world_size,
        images=images,
    )
    workers = worker_count("DATALOADER.NUM_WORKERS", cfg.DATALOADER.NUM_WORKERS)
    return TestLoader(plain, sampler, num_workers=workers, device=device)
