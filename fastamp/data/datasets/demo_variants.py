"""Generated pedestrians with columns: infrared images, clothes, tracklets and aerial images."""

import csv
from functools import partial
from pathlib import Path
from typing import ClassVar

from fastamp.data.datasets.base import DATASET_REGISTRY, ImageDataset, ImageItem
from fastamp.data.datasets.csv_columns import parse_values
from fastamp.demo.generate import ensure_dataset
from fastamp.demo.variants import VARIANTS_VERSION, generate_variant, is_complete_variant


class DemoVariant(ImageDataset):
    """Base class of the generated datasets with columns, which are written when the class is first used.

    Subclasses set ``variant``, see ``generate_variant``, and the number of training identities. 40 test identities, six
    cameras.

    Args:
        root: data root; the images are in ``root/fastamp-demo-<variant>-v<version>``. Default "datasets".

    Raises:
        DataError: if the folder is not writable, or contains other files.
    """

    variant: ClassVar[str] = ""
    train_identities: ClassVar[int] = 100

    def __init__(self, root: str | Path = "datasets") -> None:
        self.dataset_dir = Path(root) / f"fastamp-demo-{self.variant}-v{VARIANTS_VERSION}"
        generate = partial(generate_variant, self.variant, train_identities=self.train_identities)
        ensure_dataset(self.dataset_dir, f"demo dataset {self.title}", is_complete_variant, generate)
        super().__init__(
            lambda: self._add_name_prefix(self._read("train")),
            lambda: self._read("query"),
            lambda: self._read("gallery"),
        )

    def camera(self, camid: int | str) -> str:
        """Return the number of the camera, from 1."""
        return str(camid + 1) if isinstance(camid, int) else super().camera(camid)

    def _read(self, split: str) -> list[ImageItem]:
        with (self.dataset_dir / "attributes.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        names = [name for name in rows[0] if name not in ("path", "pid", "camid", "split")]
        columns = {name: parse_values([row[name] for row in rows]) for name in names}
        return [
            ImageItem(
                str(self.dataset_dir / row["path"]),
                int(row["pid"]),
                int(row["camid"]),
                columns={name: columns[name][number] for name in names},
            )
            for number, row in enumerate(rows)
            if row["split"] == split
        ]


@DATASET_REGISTRY.register()
class DemoInfrared(DemoVariant):
    """Cameras 1, 2, 4 and 5 are visible, 3 and 6 infrared, as in SYSU-MM01; column ``modality``. Queries are infrared,
    the gallery is visible."""

    variant = "infrared"
    train_identities = 240


@DATASET_REGISTRY.register()
class DemoClothes(DemoVariant):
    """Three outfits of each person, some of them shared by several people; column ``clothes``. Two thirds of the
    queries wear an outfit that is not in the gallery."""

    variant = "clothes"
    train_identities = 240


@DATASET_REGISTRY.register()
class DemoVideo(DemoVariant):
    """Tracklets of eight frames, in temporal order; column ``tracklet``."""

    variant = "video"


@DATASET_REGISTRY.register()
class DemoAerial(DemoVariant):
    """Cameras 1 to 3 are on the ground, 4 to 6 on a drone at three altitudes; columns ``platform`` and ``altitude``,
    the latter missing on the ground. Queries are aerial, the gallery is from the ground."""

    variant = "aerial"
