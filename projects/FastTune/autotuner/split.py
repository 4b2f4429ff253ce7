"""Validation split of the training identities, so that a search does not use the test set."""

from fastamp.config import CfgNode
from fastamp.data.build import build_dataset
from fastamp.data.datasets.base import ImageItem
from fastamp.data.split import hold_out, register_part
from fastamp.data.training_images import training_items

VAL_FRACTION = "TUNE.VAL_FRACTION"


def define_keys(cfg: CfgNode) -> None:
    """Declare FastTune's keys."""
    cfg.define(
        VAL_FRACTION, 0.2, "Fraction of the training identities, in (0, 1), that is held out to evaluate trials."
    )


def split_training(
    cfg: CfgNode, fraction: float, seed: int
) -> tuple[list[ImageItem], list[ImageItem], list[ImageItem]]:
    """Split the training images of DATASETS.NAMES into ``(training, query, gallery)`` images; see ``hold_out``.

    Raises:
        ConfigError: if a dataset name is unknown, or fewer than two identities remain for training.
        DataError: if a dataset is missing, or no held-out identity has a query image.
    """
    items = training_items([build_dataset(name, cfg) for name in cfg.DATASETS.NAMES])
    return hold_out(items, fraction, seed, key=VAL_FRACTION)


def register_split(cfg: CfgNode, fraction: float, seed: int) -> tuple[str, str]:
    """Register the training split and the validation split as two datasets.

    Args:
        cfg: config; the training images of ``DATASETS.NAMES`` are split.
        fraction, seed: see ``hold_out``.

    Returns:
        ``(training, validation)``: the names of these datasets, for DATASETS.NAMES and DATASETS.TESTS.

    Raises:
        ConfigError: if a dataset name is unknown, or fewer than two identities remain for training.
        DataError: if a dataset is missing, or no held-out identity has a query image.
    """
    training, query, gallery = split_training(cfg, fraction, seed)
    title = "+".join(cfg.DATASETS.NAMES)
    # The title comes last, because a name that starts with csv: or folder: is a path.
    return (
        register_part(f"training part of {title}", train=training),
        register_part(f"validation part of {title}", query=query, gallery=gallery),
    )
