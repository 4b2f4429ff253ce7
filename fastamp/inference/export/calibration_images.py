"""Calibration images of int8: a sample of the training images, with which the ranges of activations are measured."""

import numpy as np
import torch

from fastamp.contracts import Batch
from fastamp.data.build import build_dataset
from fastamp.data.dataset import ReidDataset
from fastamp.data.datasets.items import PackedItems
from fastamp.data.training_images import training_parts
from fastamp.data.transforms import build_transforms
from fastamp.data.unaugmented import build_unaugmented_loader
from fastamp.inference.predictor import Predictor
from fastamp.utils.errors import ConfigError, DataError

CALIBRATION_IMAGES = 256
"""Default number of calibration images."""

_BATCH = 32


def load_calibration_images(predictor: Predictor, count: int) -> tuple[str, list[Batch]]:
    """Load a deterministic sample of the training images, spread over the identities, preprocessed as in evaluation.

    Args:
        predictor: model, whose config names the training sets (``DATASETS.NAMES``).
        count: number of images; all, if there are fewer.

    Returns:
        The names of the datasets, and the batches, in 0..255, with their cameras, views and modalities.

    Raises:
        DataError: if no training set is given, or one is not available.
    """
    cfg = predictor.cfg.with_values({"TEST.IMS_PER_BATCH": _BATCH, "DATALOADER.NUM_WORKERS": 0})
    names = ", ".join(cfg.DATASETS.NAMES)
    try:
        if not cfg.DATASETS.NAMES:
            raise ConfigError("no dataset is given")
        datasets = [build_dataset(name, cfg) for name in cfg.DATASETS.NAMES]
        items = PackedItems.concat(training_parts(datasets, combine_all=cfg.DATASETS.COMBINEALL))
    except (ConfigError, DataError, ValueError) as error:
        raise DataError(
            f"int8 requires calibration images of the training set (DATASETS.NAMES: {names or 'empty'}), which is not "
            f"available: {str(error).splitlines()[0].removesuffix('; looked for')}.\n"
            "  fix: append DATASETS.NAMES and a dataset of similar images to the command, or use --precision fp16"
        ) from error
    dataset = ReidDataset(
        items,
        build_transforms(cfg, is_train=False),
        relabel=True,
        skip_corrupt=cfg.DATALOADER.ON_CORRUPT == "skip",
        sources=datasets,
        categories=cfg.DATASETS.CATEGORIES,
    )
    images = spread_over_identities(dataset.labels, count)
    loader = build_unaugmented_loader(cfg, dataset, torch.device("cpu"), images=images)
    return ", ".join(name.rpartition("/")[2] for name in cfg.DATASETS.NAMES), list(loader)  # without folders


def spread_over_identities(labels: np.ndarray, count: int) -> list[int]:
    """Select ``count`` images at random, with a fixed seed: one of each identity, then a second one of each, and so on.

    Args:
        labels: (N,) int64 identities.
        count: number of images; all, if N is smaller.
    """
    order = np.random.default_rng(0).permutation(len(labels))
    by_identity = np.argsort(labels[order], kind="stable")
    grouped = labels[order][by_identity]
    turns = np.empty(len(labels), dtype=np.int64)
    turns[by_identity] = np.arange(len(labels)) - np.searchsorted(grouped, grouped)
    images: list[int] = order[np.argsort(turns, kind="stable")][:count].tolist()
    return images
