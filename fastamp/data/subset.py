"""Subset of a test set with complete identities."""

from typing import Any

import torch


def subsample_identities(
    loader: Any, num_query: int, max_images: int, batch_size: int
) -> tuple[list[dict[str, Any]], int, tuple[int, int]]:
    """Load all images of the first query identities, up to a maximum number of images.

    Args:
        loader: loader of the test set.
        num_query: number of query images, which are the first items in the dataset.
        max_images: maximum number of images, exceeded only if the first identity has more images; 0 loads all images.
        batch_size: number of images per batch.

    Returns:
        ``(batches, num_query, (num_loaded, num_total))``: list of batches, whose ``indices`` count from 0, number of
        query images in these batches, number of loaded images and number of images in the test set.
    """
    dataset = loader.dataset
    total = len(dataset)
    chosen = identity_subset(dataset, num_query, max_images)
    starts = range(0, len(chosen), batch_size)
    batches = [dataset.__getitems__([(0, i, i) for i in chosen[start : start + batch_size]]) for start in starts]
    for start, batch in zip(starts, batches, strict=True):
        batch["indices"] = torch.arange(start, start + len(batch["indices"]))
    return batches, sum(index < num_query for index in chosen), (len(chosen), total)


def identity_subset(dataset: Any, num_query: int, max_images: int) -> list[int]:
    """List the indices, sorted, of all images of the first query identities; see ``subsample_identities``."""
    if not 0 < max_images < len(dataset):
        return list(range(len(dataset)))
    by_identity: dict[int, list[int]] = {}
    for index, label in enumerate(dataset.labels):
        by_identity.setdefault(label, []).append(index)
    chosen: list[int] = []
    for label in dict.fromkeys(dataset.labels[:num_query]):
        if chosen and len(chosen) + len(by_identity[label]) > max_images:
            break
        chosen += by_identity[label]
    return sorted(chosen)
