"""A validation set out of the training identities: a search must not see the test set."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from fastamp.config import CfgNode
from fastamp.data.build import build_dataset, training_items
from fastamp.data.datasets.base import DATASET_REGISTRY, ImageDataset, ImageItem
from fastamp.utils.errors import ConfigError, DataError

VAL_FRACTION = "TUNE.VAL_FRACTION"


def define_keys(cfg: CfgNode) -> None:
    """Declare FastTune's keys."""
    cfg.define(VAL_FRACTION, 0.2, "Share of the training identities, in 0..1, that trials are judged on.")


def hold_out(
    items: Sequence[ImageItem], fraction: float, seed: int
) -> tuple[list[ImageItem], list[ImageItem], list[ImageItem]]:
    """Return training, query and gallery images; no identity is in training and in the other two.

    Identities are held out at random. As in Market-1501 the first image of an identity under each camera is a query,
    where the camera has another and there are other cameras; all others are the gallery. Where all images are from one
    camera, the first of each identity is a query.

    Args:
        items: training images.
        fraction: of the identities, in 0..1, that is held out; two at least.
        seed: of the draw.

    Returns:
        The training images as they were, and query and gallery with identities and cameras numbered, from 1 and from 0.

    Raises:
        ConfigError: nothing is left to train on, or to validate.
        DataError: no held-out identity has a query.
    """
    identities = sorted({str(item.pid) for item in items})
    count = max(2, round(fraction * len(identities)))
    if not 0 < fraction < 1 or len(identities) - count < 2:
        raise ConfigError(
            f"{VAL_FRACTION} {fraction:g} of {len(identities)} training identities leaves "
            f"{max(0, len(identities) - count)} to train on; at least 2 must be left on either side"
        )
    held = set(np.random.default_rng(seed).permutation(identities)[:count].tolist())
    training = [item for item in items if str(item.pid) not in held]
    pids = {pid: number for number, pid in enumerate(sorted(held), start=1)}
    camids = {camid: number for number, camid in enumerate(sorted({str(item.camid) for item in items}))}
    groups: dict[int, dict[int, list[ImageItem]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        if str(item.pid) in held:
            pid, camid = pids[str(item.pid)], camids[str(item.camid)]
            groups[pid][camid].append(ImageItem(item.path, pid, camid, item.viewid))
    query: list[ImageItem] = []
    gallery: list[ImageItem] = []
    for _, cameras in sorted(groups.items()):
        matched = len(cameras) > 1 or (len(camids) == 1 and len(cameras[0]) > 1)
        # A camera keeps an image in the gallery, to match the others' queries; where none has two, one is a query.
        givers = [camid for camid, images in sorted(cameras.items()) if len(images) > 1] or [min(cameras)]
        for camid, images in sorted(cameras.items()):
            taken = int(matched and camid in givers)
            query += images[:taken]
            gallery += images[taken:]
    if not query:
        raise DataError(f"none of the {count} identities held out for validation has two images to match")
    return training, query, gallery


def register_split(names: Sequence[str], fraction: float, seed: int) -> tuple[str, str]:
    """Register the two parts of data sets' training images; return names for ``DATASETS.NAMES`` and ``DATASETS.TESTS``.

    Args:
        names: of ``DATASETS.NAMES``.
        fraction, seed: see ``hold_out``.

    Raises:
        ConfigError: nothing has such a name, or too few identities are left.
        DataError: a data set is not there.
    """
    training, query, gallery = hold_out(training_items([build_dataset(name) for name in names]), fraction, seed)
    title = "+".join(names)
    parts = {
        f"{title}, training part": (training, [], []),
        f"{title}, validation part": ([], query, gallery),
    }
    for name, images in parts.items():
        _register(name, images)
    return tuple(parts)


def _register(name: str, images: tuple[list[ImageItem], list[ImageItem], list[ImageItem]]) -> None:
    def build(root: str) -> ImageDataset:
        dataset = ImageDataset(*images)
        dataset.dataset_name = name
        return dataset

    if name not in DATASET_REGISTRY:
        DATASET_REGISTRY.register(name)(build)
