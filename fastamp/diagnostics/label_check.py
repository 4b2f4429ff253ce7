"""Checks of the labels of a dataset's test images, by the functions that an evaluation uses."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from fastamp.data.columns import encode_columns, rankable_columns
from fastamp.data.datasets.base import ImageDataset, ImageItem
from fastamp.data.datasets.items import PackedItems
from fastamp.evaluation import Identities, Protocol
from fastamp.evaluation.protocol import check_columns, check_evaluable, count_matches
from fastamp.utils.errors import DataError, NoMatchError

NO_IMAGE, JUNK = "no image", "junk"


def _labels(dataset: ImageDataset, queries: Sequence[ImageItem], gallery: Sequence[ImageItem]) -> Identities:
    """Return the labels of the test images; identities and cameras that are texts are numbered.

    Raises:
        DataError: if the values of a column cannot be encoded.
    """
    items = PackedItems.of([*queries, *gallery])
    columns = encode_columns(items.columns, title=dataset.title, training=False)
    names = {name: column.names for name, column in columns.items() if column.names is not None}
    return Identities.split(len(queries), items.pids.codes, items.camids.codes, rankable_columns(columns), names)


def find_matchless(
    dataset: ImageDataset, queries: Sequence[ImageItem], gallery: Sequence[ImageItem], protocol: Protocol
) -> list[str]:
    """Find queries without a match; none if the dataset lacks a column that the protocol needs.

    Returns:
        For each query ``NO_IMAGE``, ``JUNK`` if all images of its identity are junk, or "" if it has a match.
    """
    rule = protocol.rule
    try:
        identities = _labels(dataset, queries, gallery)
        check_columns(identities.columns, protocol)
    except DataError:  # reported by ``find_test_problem``
        return [""] * len(queries)
    if not queries:
        return []
    ranked = rule.arrange(identities)
    matched = np.concatenate([counts > 0 for counts in count_matches(identities, rule)])
    if rule.all_images and "query" in rule.draws:  # an identity with one image is always in the gallery
        matched |= matched.any()
    pids, images = np.unique(ranked.gallery_pids, return_counts=True)
    several = pids[images > rule.all_images]
    known = np.isin(identities.query_pids, several)
    return [
        "" if match else JUNK if is_known else NO_IMAGE
        for match, is_known in zip(matched[: len(queries)].tolist(), known.tolist(), strict=True)
    ]


def find_test_problem(
    dataset: ImageDataset, splits: Mapping[str, Sequence[ImageItem]], protocol: Protocol
) -> Iterator[str]:
    """Yield the problem that prevents an evaluation of the test set, except for missing splits and matches."""
    queries, gallery = (splits.get(split, ()) for split in ("query", "gallery"))
    if not queries or not (gallery or protocol.rule.all_images):
        return
    try:
        check_evaluable(_labels(dataset, queries, gallery), protocol)
    except NoMatchError:
        return
    except DataError as error:
        yield str(error)
