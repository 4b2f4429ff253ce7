"""Verification of templates, i.e. sets of images of a face, as in IJB-B and IJB-C (Maze et al. 2018)."""

import warnings
from pathlib import Path

import numpy as np

from fastamp.utils.errors import DataError, system_cause

_BLOCK = 2**18  # pairs whose features are multiplied at once


def read_table(path: Path, columns: tuple[str, ...]) -> list[np.ndarray]:
    """Read a text file of rows that are separated by spaces: one array for each column.

    IJB-C has 15,658,489 pairs, so the rows are never Python objects.

    Args:
        path: text file.
        columns: names of the columns; the first is text if it is "image", the others are integers.

    Raises:
        DataError: if the file cannot be read or is empty, or a row is invalid.
    """
    named = columns[0] == "image"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an empty file
            table = np.loadtxt(path, dtype=np.str_ if named else np.int64, comments=None, ndmin=2, encoding="utf-8")
        if table.shape[1:] != (len(columns),):
            raise ValueError(f"got {' '.join(map(str, table[0]))!r}" if table.size else "the file is empty")
        return [table[:, 0], *table[:, 1:].astype(np.int64).T]
    except OSError as error:
        raise DataError(f"cannot read {path.absolute()}: {system_cause(error)}.\n  fix: correct the path") from error
    except (ValueError, OverflowError) as error:
        raise DataError(
            f"{path.absolute()}: expected rows of {', '.join(columns)}: {error}.\n"
            "  fix: restore this file of the dataset"
        ) from error


def template_features(features: np.ndarray, templates: np.ndarray, media: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pool the features of images to features of templates.

    The images of a medium, e.g. the frames of a video, are averaged within each template, so that a long video does not
    count more than a photograph; the template is the normalized sum of its media.

    Args:
        features: (N, D) float, features of the images; their norms weight them.
        templates: (N,) int64, template of each image.
        media: (N,) int64, medium of each image.

    Returns:
        ``(numbers, pooled)``: (T,) int64 sorted numbers of the templates, and their (T, D) float64 unit features.
    """
    numbers, rows = np.unique(templates, return_inverse=True)
    pairs, medium = np.unique(np.stack((rows, media), axis=1), axis=0, return_inverse=True)
    means = np.zeros((len(pairs), features.shape[1]))
    np.add.at(means, medium.reshape(-1), features)
    means /= np.bincount(medium.reshape(-1))[:, None]
    pooled = np.zeros((len(numbers), features.shape[1]))
    np.add.at(pooled, pairs[:, 0], means)
    return numbers, pooled / np.maximum(np.linalg.norm(pooled, axis=1, keepdims=True), 1e-12)


def pair_scores(numbers: np.ndarray, pooled: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Compute the cosine similarity of pairs of templates, (P,) float64, in blocks.

    Args:
        numbers, pooled: result of ``template_features``.
        first, second: (P,) int64, numbers of the templates of each pair.

    Raises:
        DataError: if a template has no image.
    """
    rows = []
    for side in (first, second):
        row = np.searchsorted(numbers, side).clip(max=len(numbers) - 1)
        if (numbers[row] != side).any():
            missing = np.unique(side[numbers[row] != side])
            raise DataError(
                f"{len(missing)} templates of the pairs have no image, e.g. {missing[0]}.\n"
                "  fix: use the lists of one dataset"
            )
        rows.append(row)
    scores = np.empty(len(first))
    for start in range(0, len(first), _BLOCK):
        block = slice(start, start + _BLOCK)
        scores[block] = np.einsum("pd,pd->p", pooled[rows[0][block]], pooled[rows[1][block]])
    return scores


def true_accept_rates(scores: np.ndarray, same: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """Compute the true-accept rate at false-accept rates, (F,) float64 in 0..1.

    A pair is accepted if its score is above a threshold. The threshold of a rate is the lowest one at which the
    fraction of accepted pairs of different identities does not exceed the rate. The curve is not interpolated.

    Args:
        scores: (P,) float, higher for more similar pairs.
        same: (P,) bool, True for pairs of one identity.
        rates: (F,) float, false-accept rates in 0..1.

    Raises:
        DataError: if the pairs are all of one identity or all of different identities.
    """
    genuine, impostors = np.sort(scores[same]), np.sort(scores[~same])[::-1]
    if not len(genuine) or not len(impostors):
        raise DataError(
            f"expected pairs of one and of different identities, got {len(genuine)} and {len(impostors)}.\n"
            "  fix: use the list of pairs of the dataset"
        )
    # Rounded first: 0.29 * 100 is 28.999999999999996.
    allowed = np.floor(np.round(np.asarray(rates) * len(impostors), 9)).astype(np.int64)
    thresholds = np.where(allowed < len(impostors), impostors[allowed.clip(max=len(impostors) - 1)], -np.inf)
    return 1 - np.searchsorted(genuine, thresholds, side="right") / len(genuine)
