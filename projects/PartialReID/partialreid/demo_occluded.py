"""Generated occluded images: the images of the dataset Demo, partly covered by parts of its distractor images."""

from pathlib import Path

import numpy as np
from PIL import Image

from fastamp.demo import DEMO_VERSION
from fastamp.demo.generate import SPLITS, ensure_dataset, read_manifest, write_dataset
from fastamp.utils.errors import DataError

# Part of the folder names: increment it with every change of the images.
OCCLUDED_VERSION = "1"
SIDES = ("lower", "left", "right", "upper")
_PROBABILITIES = (0.5, 0.2, 0.2, 0.1)


def occlude(image: Image.Image, other: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Cover one side of an image with a region of another image.

    The covered side is the lower one with a probability of 0.5, the left or the right one of 0.2 each, and the upper
    one of 0.1. 30 to 50 % of the height or width is covered, by a region of this size at a random position.

    Args:
        image: image of a person.
        other: image that contains the occluding object; resized to the size of ``image``.
        rng: generator of side, fraction and position.
    """
    width, height = image.size
    side, fraction = rng.choice(SIDES, p=_PROBABILITIES), rng.uniform(0.3, 0.5)
    across = width if side in ("lower", "upper") else round(fraction * width)
    down = height if side in ("left", "right") else round(fraction * height)
    left, top = int(rng.integers(width - across + 1)), int(rng.integers(height - down + 1))
    region = other.resize(image.size).crop((left, top, left + across, top + down))
    occluded = image.copy()
    occluded.paste(region, (width - across if side == "right" else 0, height - down if side == "lower" else 0))
    return occluded


class OccludedDemo:
    """Occluded versions of the training and query images of ``Demo``, written when the class is first used; see
    ``occlude``.

    The occluding regions are from the distractors, gallery images of other people or without a person. The generator of
    an image depends on the seed and on the number of the image in the sorted list of its split.

    Args:
        demo: folder of the dataset ``Demo``.
        seed: random seed, at least 0.

    Raises:
        DataError: if the folder ``fastamp-demo-occluded-v<version>-seed<seed>`` next to ``demo`` is not writable, or
            contains other files.
    """

    def __init__(self, demo: Path, seed: int) -> None:
        self.demo, self.seed = demo, seed
        self.folder = demo.with_name(f"fastamp-demo-occluded-v{OCCLUDED_VERSION}-seed{seed}")
        ensure_dataset(self.folder, "occluded demo images", self._is_complete, self._generate)

    def path(self, image: str) -> str:
        """Return the path of the occluded version of an image of ``Demo``."""
        return str(self.folder / Path(image).relative_to(self.demo))

    def _settings(self) -> dict:
        images = (read_manifest(self.demo) or {}).get("images", {})
        return {"version": OCCLUDED_VERSION, "demo": DEMO_VERSION, "seed": self.seed, "images": images}

    def _is_complete(self, folder: Path) -> bool:
        return read_manifest(folder) == self._settings()

    def _generate(self, folder: Path) -> None:
        write_dataset(folder, self._settings(), self._is_complete, self._write)

    def _write(self, build: Path) -> dict:
        train, query, gallery = SPLITS
        distractors = sorted((self.demo / gallery).glob("0000_*.jpg"))
        if not distractors:
            raise DataError(
                f"{self.demo} has no distractor images (0000_*.jpg), which occlude the others.\n"
                "  fix: delete this folder, so that it is generated again"
            )
        for stream, split in enumerate((train, query)):
            (build / split).mkdir()
            for number, file in enumerate(sorted((self.demo / split).glob("*.jpg"))):
                rng = np.random.default_rng([self.seed, stream, number])
                with Image.open(file) as image, Image.open(distractors[rng.integers(len(distractors))]) as other:
                    occlude(image.convert("RGB"), other.convert("RGB"), rng).save(build / split / file.name, quality=90)
        return {}
