"""Random splits of a dataset, over which its protocol averages."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from fastamp.config import CfgNode
from fastamp.data.build import family_of, is_dataset_class
from fastamp.data.datasets.base import DATASET_REGISTRY, ImageDataset
from fastamp.utils.errors import ConfigError


def evaluated_splits(cfg: CfgNode, name: str) -> dict[str, dict[str, Any]]:
    """Return the parts of a test set that are evaluated: title -> config values, e.g. ``{"DATASETS.VIPER.SPLIT": 3}``.

    The title begins with the name of the test set, see ``test_set_of``. With ``TEST.ALL_SPLITS`` there is one entry for
    each random split in each direction. The test images of another split than that of the config may be training
    images: a dataset on which the model is trained (DATASETS.NAMES) has one entry for each direction.

    Args:
        cfg: config.
        name: name of the test set.
    """
    keys: dict[str, Sequence[Any]] = {}
    if cfg.TEST.ALL_SPLITS:
        is_trained = family_of(name) in map(family_of, cfg.DATASETS.NAMES)
        keys = ({} if is_trained else random_splits(cfg, name)) | _directions(cfg, name)
    return {", ".join([name, *describe_values(split)]): split for split in _combinations(keys)}


def test_set_of(title: str, names: Sequence[str]) -> str:
    """Return the name of the test set of a title of ``evaluated_splits``; the title if it is none of ``names``."""
    return next((name for name in names if title == name or title.startswith(f"{name}, ")), title)


def random_splits(cfg: CfgNode, name: str) -> dict[str, Sequence[Any]]:
    """Return the config key of the random splits of a dataset with its values; empty if it has one split."""
    component = _dataset_class(name)
    return _values(cfg, component.random_split_key(cfg)) if component else {}


def training_splits(cfg: CfgNode) -> list[dict[str, Any]]:
    """Return the config values of each random split of the training set; ``[{}]`` if it has no random splits.

    Raises:
        ConfigError: if several of DATASETS.NAMES have random splits.
    """
    found = {name: keys for name in cfg.DATASETS.NAMES if (keys := random_splits(cfg, name))}
    if len(found) > 1:
        raise ConfigError(f"several training sets have random splits: {', '.join(found)}.\n  fix: train on one of them")
    return _combinations(next(iter(found.values()), {}))


def describe_values(values: Mapping[str, Any]) -> list[str]:
    """Return config values with the last part of each key, e.g. ``split 3``."""
    return [f"{key.rpartition('.')[2].lower()} {value}" for key, value in values.items()]


def check_has_splits(cfg: CfgNode) -> None:
    """Check that ``TEST.ALL_SPLITS`` applies to a test set.

    Raises:
        ConfigError: if it is True, and no test set has several random splits or directions.
    """
    if cfg.TEST.ALL_SPLITS and not any(
        random_splits(cfg, name) or _directions(cfg, name) for name in cfg.DATASETS.TESTS
    ):
        raise ConfigError(
            f"TEST.ALL_SPLITS is True, but no test set has several splits: {', '.join(cfg.DATASETS.TESTS)}.\n"
            "  fix: set TEST.ALL_SPLITS to False; CUHK03 has several with DATASETS.CUHK03.CLASSIC True"
        )


def _directions(cfg: CfgNode, name: str) -> dict[str, Sequence[Any]]:
    component = _dataset_class(name)
    return _values(cfg, component.direction_key) if component else {}


def _dataset_class(name: str) -> type[ImageDataset] | None:
    component = DATASET_REGISTRY.get(name) if name in DATASET_REGISTRY else None
    return component if is_dataset_class(component) else None


def _values(cfg: CfgNode, path: str) -> dict[str, Sequence[Any]]:
    """Return a config key with all its values, which are its choices or lie between its bounds; empty for ""."""
    return {
        key.path: key.choices or range(int(key.low), int(key.high) + 1)  # type: ignore[arg-type]
        for key, _ in cfg.keys_below()
        if key.path == path
    }


def _combinations(keys: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*keys.values())]
