"""Attributes of images, from the columns of a dataset.

An integer column with the values 0 and 1 is one attribute, of the column's name. A text column is one attribute for
each of its values, e.g. ``upper_color=red``. Missing values have the label NaN; they count neither in the loss nor in
the metrics.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fastamp.config import CfgNode, Key
from fastamp.data.columns import EncodedColumn, check_column
from fastamp.modeling.losses.compute import column_of
from fastamp.utils.errors import ConfigError, DataError
from fastattr.datasets import IdentityAttributes

logger = logging.getLogger(f"fastamp.{__name__}")

KEYS = (
    Key(
        "MODEL.ATTRIBUTES.COLUMNS",
        (),
        "FastAttr: columns of the dataset that are attributes; (): all columns, e.g. of PA100K.",
        of=str,
    ),
    Key("MODEL.ATTRIBUTES.NAMES", (), "FastAttr: names of the attributes. Set by the training.", of=str),
)


@dataclass(frozen=True)
class Attribute:
    """Attribute of an image.

    Attributes:
        column: name of the column.
        value: number of the text of a text column; None for an integer column, whose value is the label.
    """

    column: str
    value: int | None = None


def parse_names(names: Iterable[str], categories: Mapping[str, Sequence[Any]]) -> list[Attribute]:
    """Convert names such as ``hat`` and ``upper_color=red`` to attributes.

    Args:
        names: ``MODEL.ATTRIBUTES.NAMES``.
        categories: ``DATASETS.CATEGORIES``, which numbers the texts.

    Raises:
        ConfigError: if a text is not in ``categories``.
    """
    attributes = []
    for name in names:
        column, equals, text = name.partition("=")
        if not equals:
            attributes.append(Attribute(column))
            continue
        texts = [str(text) for text in categories.get(column, ())]
        if text not in texts:
            raise ConfigError(
                f"MODEL.ATTRIBUTES.NAMES: {name!r} is not in DATASETS.CATEGORIES.{column}; found: "
                f"{', '.join(texts) or 'none'}.\n  fix: train again, or correct DATASETS.CATEGORIES"
            )
        attributes.append(Attribute(column, texts.index(text)))
    return attributes


def labels_of(columns: Mapping[str, Any], attributes: Sequence[Attribute], device: torch.device) -> torch.Tensor:
    """Compute the labels of a batch.

    Args:
        columns: batch, with each column (B,) int64; -1 is a missing value.
        attributes: A attributes.
        device: device of the result.

    Returns:
        (B, A) float32: 1 for positive, 0 for negative, NaN for missing; larger numbers only for the columns
        ``number_attributes`` of a dataset.

    Raises:
        ConfigError: if the batch does not contain a column.
    """
    labels = []
    for attribute in attributes:
        numbers = column_of(columns, attribute.column).to(device, non_blocking=True)
        label = (numbers if attribute.value is None else numbers == attribute.value).float()
        labels.append(torch.where(numbers < 0, torch.nan, label))
    return torch.stack(labels, dim=1)


def most_frequent_values(attributes: Sequence[Attribute], positives: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Return the labels of an image with the most frequent value of each column, (A,) float32.

    Args:
        attributes: A attributes.
        positives: (A,) number of positive labels of each attribute.
        known: (A,) number of labels of each attribute that are not missing.
    """
    constant = (2 * positives >= known).float()
    for column in {attribute.column for attribute in attributes if attribute.value is not None}:
        rows = [row for row, attribute in enumerate(attributes) if attribute.column == column]
        constant[rows] = 0.0
        constant[rows[int(positives[rows].argmax())]] = 1.0
    return constant


def with_attributes(cfg: CfgNode, dataset: Any) -> CfgNode:
    """Return a copy of the config with the attributes of a training set.

    Args:
        cfg: config; ``MODEL.ATTRIBUTES.COLUMNS`` may be empty.
        dataset: training set, with ``columns``.

    Returns:
        Config with ``MODEL.ATTRIBUTES.COLUMNS``, ``MODEL.ATTRIBUTES.NAMES`` and ``DATASETS.CATEGORIES``.

    Raises:
        ConfigError: if the training set has no columns, or a selected column does not exist.
        DataError: if a column is neither text nor integers 0 and 1.
    """
    title = f"the training set ({', '.join(cfg.DATASETS.NAMES)})"
    columns = dataset.columns
    selected = cfg.MODEL.ATTRIBUTES.COLUMNS or tuple(columns)
    if not selected:
        raise ConfigError(
            f"{title} has no columns, which are the attributes.\n"
            "  fix: add a column for each attribute to the CSV file, or use a dataset with attributes, e.g. PA100K"
        )
    # Datasets that define labels as FastReID does, e.g. Market1501AttrFastReID.
    numbers = {
        name
        for source in dataset.sources
        if isinstance(source, IdentityAttributes)
        for name in source.number_attributes
    }
    names: list[str] = []
    categories = dict(cfg.DATASETS.CATEGORIES)
    for column in selected:
        check_column(column, columns, "MODEL.ATTRIBUTES.COLUMNS", title)
        encoded = columns[column]
        if encoded.names:
            categories[column] = list(encoded.names)
            names += [f"{column}={text}" for text in encoded.names]
        else:
            if column not in numbers:
                _check_binary(column, encoded, title)
            names.append(column)
    return cfg.with_values(
        {"MODEL.ATTRIBUTES.COLUMNS": selected, "MODEL.ATTRIBUTES.NAMES": names, "DATASETS.CATEGORIES": categories}
    )


def _check_binary(name: str, column: EncodedColumn, title: str) -> None:
    values = column.values
    numbers = values.ravel().tolist() if isinstance(values, np.ndarray) and values.ndim == 1 else [None]
    others = sorted(set(numbers) - {-1, 0, 1}, key=str)
    if others:
        shown = "lists" if others == [None] else ", ".join(map(str, others[:5]))
        raise DataError(
            f"{title}: the attribute {name!r} must have the values 0 and 1, or texts; found {shown}.\n"
            "  fix: write its values as texts, e.g. young and old, or list only the other columns in "
            "MODEL.ATTRIBUTES.COLUMNS"
        )
