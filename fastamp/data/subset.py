"""A part of a test set: whole identities."""

from typing import Any


def subsample_identities(
    loader: Any, num_query: int, max_images: int, batch_size: int
) -> tuple[list[dict[str, Any]], int, tuple[int, int]]:
    """Take whole identities of a test set until a number of images is reached.

    Args:
        loader: of the test set.
        num_query: its first items are queries.
        max_images: images to take at most, but one identity at least; 0 takes all.
        batch_size: images of a batch.

    Returns:
        The batches, the number of queries in them, and the numbers of images in them and in the test set.
    """
    dataset = loader.dataset
    total = len(dataset)
    chosen = list(range(total))
    if 0 < max_images < total:
        chosen = []
        by_identity: dict[int, list[int]] = {}
        for index, label in enumerate(dataset.labels):
            by_identity.setdefault(label, []).append(index)
        for label in dict.fromkeys(dataset.labels[:num_query]):
            if chosen and len(chosen) + len(by_identity[label]) > max_images:
                break
            chosen += by_identity[label]
        chosen.sort()
    starts = range(0, len(chosen), batch_size)
    batches = [dataset.__getitems__([(0, i, i) for i in chosen[start : start + batch_size]]) for start in starts]
    return batches, sum(index < num_query for index in chosen), (len(chosen), total)
