"""Split images by identity into training, query and gallery."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from fastamp.data.datasets.base import DATASET_REGISTRY, ImageDataset, ImageItem
from fastamp.utils.errors import ConfigError, DataError


def hold_out(
    items: Sequence[ImageItem], fraction: float, seed: int, *, key: str
) -> tuple[list[ImageItem], list[ImageItem], list[ImageItem]]:
    """Hold out random identities for testing.

    Training and test identities are disjoint. As in Market-1501, the queries of a test identity with images from
    several cameras are its first image from each camera that took at least two of its images, or, if there is no such
    camera, its image from the first camera. All other test images are gallery images.

    If all test images are from the same camera, or each is from a different camera, cameras are ignored: the first
    image of each identity with at least two images is a query, and each image is assigned its own camera number, so
    that no gallery image is excluded for being from the query's camera.

    Args:
        items: images to split.
        fraction: fraction of identities to hold out, in (0, 1); at least two identities are held out.
        seed: seed of the random choice of identities.
        key: config key that sets ``fraction``, for error messages.

    Returns:
        ``(train, query, gallery)``, lists of images. Training images are unchanged. Identities of query and gallery
        images are numbered from 1, and their cameras from 0.

    Raises:
        ConfigError: if fewer than two identities remain for training, or ``fraction`` is not in (0, 1).
        DataError: if no held-out identity has a query.
    """
    identities = sorted({str(item.pid) for item in items})
    count = max(2, round(fraction * len(identities)))
    if not 0 < fraction < 1 or len(identities) - count < 2:
        raise ConfigError(
            f"{key} is {fraction:g}, which leaves {max(0, len(identities) - count)} of {len(identities)} identities "
            "for training; expected at least 2 for training and 2 for testing.\n"
            f"  fix: change {key}, or add images of other identities"
        )
    held_out_ids = set(np.random.default_rng(seed).permutation(identities)[:count].tolist())
    training = [item for item in items if str(item.pid) not in held_out_ids]
    query, gallery = query_and_gallery([item for item in items if str(item.pid) in held_out_ids])
    if not query:
        raise DataError(
            f"no query images: none of the {count} test identities selected by {key} has both a query image and a "
            f"matching gallery image.\n  fix: increase {key}, or add images from other cameras"
        )
    return training, query, gallery


def query_and_gallery(items: Sequence[ImageItem]) -> tuple[list[ImageItem], list[ImageItem]]:
    """Split test images into ``(query, gallery)``; see ``hold_out``."""
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
        # Each camera keeps a gallery image to match the other cameras' queries. If none has two, one image is a query.
        query_cameras = [camid for camid, images in sorted(cameras.items()) if len(images) > 1] or [min(cameras)]
        for camid, images in sorted(cameras.items()):
            num_queries = int(has_match and camid in query_cameras)
            query += images[:num_queries]
            gallery += images[num_queries:]
    return query, gallery


_PARTS: dict[str, dict[str, Sequence[ImageItem]]] = {}
"""Registered name -> splits of the last call with this name in this process."""


def register_part(
    name: str,
    *,
    train: Sequence[ImageItem] = (),
    query: Sequence[ImageItem] = (),
    gallery: Sequence[ImageItem] = (),
) -> str:
    """Register images as a dataset in this process, for DATASETS.NAMES and DATASETS.TESTS, and return its name.

    Args:
        name: name of the dataset; images that were registered with it before are replaced.
        train, query, gallery: images of each split. Default: none.
    """
    _PARTS[name] = {"train": train, "query": query, "gallery": gallery}

    def build(root: str) -> ImageDataset:
        class Part(ImageDataset):
            dataset_name = name

        return Part(**_PARTS[name])

    if name not in DATASET_REGISTRY:
        DATASET_REGISTRY.register(name)(build)
    return name
