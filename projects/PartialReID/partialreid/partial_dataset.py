"""Datasets of partial and occluded queries, and datasets whose queries are parts of whole images."""

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import numpy as np

from fastamp.config import CfgNode, Key
from fastamp.data.datasets.base import DATASET_REGISTRY, ImageDataset, ImageItem
from fastamp.data.datasets.catalog import DukeMTMC, OccludedDuke
from fastamp.data.datasets.demo import Demo
from fastamp.data.datasets.filename_dataset import FilenameDataset
from fastamp.data.datasets.market1501 import Market1501
from fastamp.data.decode import open_with_pil
from fastamp.data.split import hold_out
from partialreid.demo_occluded import OccludedDemo

HELD_OUT = "DATASETS.PARTIAL.HELD_OUT"
KEYS = (
    Key(
        "DATASETS.PARTIAL.CAMERA",
        "split",
        "Camera of the images of PartialREID, PartialiLIDS and OccludedREID: split (0 for queries, 1 for the gallery) "
        "or number, as in FastReID: the number of the image, so that a match with the query's number is excluded.",
        choices=("split", "number"),
    ),
    Key(
        "DATASETS.PARTIAL.HELD_OUT",
        0.2,
        "Fraction of the training identities, in (0, 1), that Market1501HeldOut and the like exclude from training.",
        above=0,
    ),
    Key(
        "DATASETS.PARTIAL.SEED",
        0,
        "Seed of the identities that are held out, and of the parts and occlusions of images.",
        low=0,
    ),
)


class _PartialDataset(FilenameDataset):
    """Base class of the datasets of partial queries: the file name is the identity and the number of the image.

    Args:
        root: data root. Default "datasets".
        camera: ``"split"`` or ``"number"``, see ``DATASETS.PARTIAL.CAMERA``. Default ``"split"``.

    Raises:
        DataError: if a folder is missing (raised at construction), or contains no image with a matching name (raised at
            first use).
    """

    train_folders = ()
    query_folders, gallery_folders = ("query",), ("gallery",)
    tree = "{query,gallery}/{pid}_{number}.jpg"
    layout = (r"^(?P<pid>\d+)_(?P<camera>\d+)",)
    example = "001_002.jpg (identity 1, image 2)"

    def __init__(self, root: str | Path = "datasets", *, camera: str = "split") -> None:
        super().__init__(root)
        self._by_split = camera == "split"

    @classmethod
    def from_config(cls, cfg: CfgNode, root: str) -> "_PartialDataset":
        """Build the dataset with the cameras of ``DATASETS.PARTIAL.CAMERA``."""
        return cls(root=root, camera=cfg.DATASETS.PARTIAL.CAMERA)

    def _load(self, split: str) -> list[ImageItem]:
        items = super()._load(split)
        return [item._replace(camid=int(split == "gallery")) for item in items] if self._by_split else items

    def camera(self, camid: int | str) -> str:
        """Return the split, or the number of the image."""
        return ("query", "gallery")[int(camid)] if self._by_split else super().camera(camid)


@DATASET_REGISTRY.register()
class PartialREID(_PartialDataset):
    """Partial-REID dataset (Zheng et al. 2015, "Partial person re-identification", ICCV).

    60 identities with five partial images, the queries, and five whole images each.
    """

    dataset_name = "partialreid"
    folder = "Partial_REID"
    tree = "{partial_body_images,whole_body_images}/{pid}_{number}.jpg"
    query_folders, gallery_folders = ("partial_body_images",), ("whole_body_images",)


@DATASET_REGISTRY.register()
class PartialiLIDS(_PartialDataset):
    """Partial-iLIDS dataset (He et al. 2018, arXiv:1801.00881): 119 identities with a partial and a whole image."""

    dataset_name = "partialilids"
    folder = "PartialiLIDS"


@DATASET_REGISTRY.register()
class OccludedREID(_PartialDataset):
    """Occluded-REID dataset (Zhuo et al. 2018, "Occluded person re-identification", ICME).

    200 identities with five occluded images, the queries, and five whole images each.
    """

    dataset_name = "occludedreid"
    folder = "OccludedREID"


def cut_parts(items: Iterable[ImageItem], seed: int) -> list[ImageItem]:
    """Replace images by a part of them, as ``box``: the upper, the lower, the left or the right part.

    The part keeps 40 to 70 % of the height or width. The upper part is chosen for half of the images, as most partial
    images show the upper body, and depends only on the seed and the position of the image.
    """
    parts = []
    for number, item in enumerate(items):
        rng = np.random.default_rng([seed, number])
        with open_with_pil(item.path) as image:
            left, top, right, bottom = item.box or (0, 0, *image.size)
        side, kept = rng.choice(4, p=(0.5, 0.2, 0.15, 0.15)), rng.uniform(0.4, 0.7)
        across, down = max(1, round(kept * (right - left))), max(1, round(kept * (bottom - top)))
        box = (
            (left, top, right, top + down),
            (left, bottom - down, right, bottom),
            (left, top, left + across, bottom),
            (right - across, top, right, bottom),
        )[side]
        parts.append(item._replace(box=box))
    return parts


class _ChangedQueries(Demo):
    """Base class of variants of ``Demo`` with other queries.

    Args:
        root: data root. Default "datasets".
        seed: seed of the queries. Default 0.
    """

    def __init__(self, root: str | Path = "datasets", *, seed: int = 0) -> None:
        super().__init__(root)
        self._seed = seed

    @classmethod
    def from_config(cls, cfg: CfgNode, root: str) -> "_ChangedQueries":
        """Build the dataset with the seed ``DATASETS.PARTIAL.SEED``."""
        return cls(root=root, seed=cfg.DATASETS.PARTIAL.SEED)

    def _load(self, split: str) -> list[ImageItem]:
        items = super()._load(split)
        return self._change(items) if split == "query" else items

    def _change(self, items: list[ImageItem]) -> list[ImageItem]:
        raise NotImplementedError


@DATASET_REGISTRY.register()
class DemoPartial(_ChangedQueries):
    """``Demo`` with parts of the query images as queries; see ``cut_parts``."""

    def _change(self, items: list[ImageItem]) -> list[ImageItem]:
        return cut_parts(items, self._seed)


@DATASET_REGISTRY.register()
class DemoOccluded(_ChangedQueries):
    """``Demo`` with occluded query images as queries; see ``OccludedDemo``."""

    def _change(self, items: list[ImageItem]) -> list[ImageItem]:
        return _occluded(items, self.dataset_dir, self._seed)


def _occluded(items: Iterable[ImageItem], demo: Path, seed: int) -> list[ImageItem]:
    """Replace images of ``Demo`` by their occluded versions."""
    images = OccludedDemo(demo, seed)
    return [item._replace(path=images.path(item.path)) for item in items]


class _HeldOut(ImageDataset):
    """Base class of datasets that hold out training identities of another dataset.

    The training images are those of the other identities. Queries and gallery are images of the held-out identities,
    see ``hold_out``; the queries are parts of images, see ``cut_parts``, of ``DemoHeldOut`` also occluded images.

    Args:
        whole: dataset with training images.
        fraction: fraction of the training identities that is held out, in (0, 1).
        seed: seed of the identities and the parts.

    Raises:
        ConfigError: if fewer than two identities remain for training.
        DataError: if no held-out identity has a query.
    """

    whole: ClassVar[type[ImageDataset]]

    def __init__(self, whole: ImageDataset, *, fraction: float, seed: int) -> None:
        train, query, gallery = hold_out(whole.train, fraction, seed, key=HELD_OUT)
        self._whole, self._seed = whole, seed
        self.dataset_name, self.identities_of = f"{whole.name}heldout", whole.name
        super().__init__(train, lambda: self._queries(query), gallery)

    def _queries(self, items: list[ImageItem]) -> list[ImageItem]:
        return cut_parts(items, self._seed)

    @classmethod
    def from_config(cls, cfg: CfgNode, root: str) -> "_HeldOut":
        """Build the dataset from the config section ``DATASETS.PARTIAL``."""
        whole = cls.whole.from_config(cfg, root)
        return cls(whole, fraction=cfg.DATASETS.PARTIAL.HELD_OUT, seed=cfg.DATASETS.PARTIAL.SEED)


@DATASET_REGISTRY.register()
class Market1501HeldOut(_HeldOut):
    """Training identities of Market-1501, a fraction of which is held out to choose the weight of reconstruction."""

    whole = Market1501


@DATASET_REGISTRY.register()
class DukeMTMCHeldOut(_HeldOut):
    """Training identities of DukeMTMC-reID, a fraction of which is held out to choose the weight of reconstruction."""

    whole = DukeMTMC


@DATASET_REGISTRY.register()
class OccludedDukeHeldOut(_HeldOut):
    """Training identities of Occluded-Duke, a fraction of which is held out to choose the weight of reconstruction."""

    whole = OccludedDuke


@DATASET_REGISTRY.register()
class DemoHeldOut(_HeldOut):
    """Training identities of ``Demo``, a fraction of which is held out to choose the weight of reconstruction.

    Every second query is an occluded image, see ``OccludedDemo``.
    """

    whole = Demo

    def _queries(self, items: list[ImageItem]) -> list[ImageItem]:
        parts, occluded = cut_parts(items, self._seed), _occluded(items, self._whole.dataset_dir, self._seed)
        return [occluded[number] if number % 2 else part for number, part in enumerate(parts)]
