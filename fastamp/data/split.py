"""Divide images by identity: those that a model trains on, and query and gallery of others."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from fastamp.data.datasets.base import ImageItem
from fastamp.utils.errors import ConfigError, DataError


def hold_out(
    items: Sequence[ImageItem], fraction: float, seed: int, *, key: str
) -> tuple[list[ImageItem], list[ImageItem], list[ImageItem]]:
    """Return training, query and gallery images; no identity is in training and in the other two.

    Identities are held out at random. As in Market-1501 the first image of an identity under each camera is a query,
    where the camera has another and there are other cameras; all others are the gallery. Where all images are from one
    camera, or each is from another, cameras mean nothing: the first of each identity is a query, and each image gets a
    camera of its own, so that none is left out as of the query's.

    Args:
        items: images.
        fraction: of the identities, in 0..1, that is held out; two at least.
        seed: of the draw.
        key: the config key of the fraction, for messages.

    Returns:
        The training images as they were, and query and gallery with identities and cameras numbered, from 1 and from 0.

    Raises:
        ConfigError: nothing is left to train on, or to evaluate.
        DataError: no held-out identity has a query.
    """
    identities = sorted({str(item.pid) for item in items})
    count = max(2, round(fraction * len(identities)))
    if not 0 < fraction < 1 or len(identities) - count < 2:
        raise ConfigError(
            f"{key} {fraction:g} of {len(identities)} identities leaves {max(0, len(identities) - count)} to train on; "
            "at least 2 must be left on either side"
        )
    held_out_ids = set(np.random.default_rng(seed).permutation(identities)[:count].tolist())
    training = [item for item in items if str(item.pid) not in held_out_ids]
    query, gallery = query_and_gallery([item for item in items if str(item.pid) in held_out_ids])
    if not query:
        raise DataError(f"none of the {count} identities held out by {key} has two images to match")
    return training, query, gallery


def query_and_gallery(items: Sequence[ImageItem]) -> tuple[list[ImageItem], list[ImageItem]]:
    """Return images as query and gallery, see ``hold_out``."""
    pids = {pid: number for number, pid in enumerate(sorted({str(item.pid) for item in items}), start=1)}
    camids = {camid: number for number, camid in enumerate(sorted({str(item.camid) for item in items}))}
    has_cameras = 1 < len(camids) < len(items)
    groups: dict[int, dict[int, list[ImageItem]]] = defaultdict(lambda: defaultdict(list))
    for number, item in enumerate(items):
        pid = pids[str(item.pid)]
        camid = camids[str(item.camid)] if has_cameras else number
        groups[pid][camid if has_cameras else 0].append(item._replace(pid=pid, camid=camid))
    query: list[ImageItem] = []
    gallery: list[ImageItem] = []
    for _, cameras in sorted(groups.items()):
        has_match = len(cameras) > 1 or (not has_cameras and len(cameras[0]) > 1)
        # A camera keeps an image in the gallery, to match the others' queries; where none has two, one is a query.
        query_cameras = [camid for camid, images in sorted(cameras.items()) if len(images) > 1] or [min(cameras)]
        for camid, images in sorted(cameras.items()):
            num_queries = int(has_match and camid in query_cameras)
            query += images[:num_queries]
            gallery += images[num_queries:]
    return query, gallery
