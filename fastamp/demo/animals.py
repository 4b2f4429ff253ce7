"""Generate photographs of animals: three species, whose individuals differ in the markings of each flank.

An encounter is a burst of frames of one flank on one day, with the same place and light; the other flank has other
markings. As in real catalogs, some animals have many encounters and most have few.
"""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import numpy as np
from PIL import Image

from fastamp.demo.generate import has_all_images, write_dataset

# Part of the default folder name: increment it with every change of the images.
ANIMALS_VERSION = "2"
ANIMALS_TABLE = "animals.csv"
_COLUMNS = ("path", "pid", "species", "side", "date", "encounter")
_SIDES = ("left", "right")
_FRAMES = 2
_FIRST_DAY = date(2018, 1, 1)
_MARKS = 26


@dataclass(frozen=True)
class _Species:
    """Look of a species: color of the coat and of the markings, shape of the markings, and width of the body."""

    coat: tuple[float, float, float]
    marking: tuple[float, float, float]
    shape: str
    width: float


_SPECIES = {
    "giraffe": _Species((0.86, 0.74, 0.52), (0.50, 0.30, 0.14), "patches", 0.80),
    "leopard": _Species((0.84, 0.68, 0.40), (0.16, 0.12, 0.08), "spots", 0.95),
    "zebra": _Species((0.92, 0.90, 0.86), (0.10, 0.10, 0.12), "stripes", 0.88),
}


def generate_animals(
    folder: str | Path,
    *,
    individuals: int = 40,
    image_size: int = 96,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write photographs and the table ``animals.csv`` to ``folder`` unless it is complete.

    Args:
        folder: folder of the dataset; parents are created.
        individuals: animals of each species, at least 2. Default 40.
        image_size: height and width in pixels, at least 32. Default 96.
        seed: random seed, at least 0. Default 0.
        progress: called as ``progress(images_written, total_images)``.

    Raises:
        ValueError: if an argument is out of range.
        DataError: if ``folder`` contains other files, or a demo dataset with different arguments.
    """
    if individuals < 2 or image_size < 32 or seed < 0:
        raise ValueError(f"individuals {individuals}, image_size {image_size} and seed {seed}: expected 2, 32 and 0")
    settings = {
        "variant": "animals",
        "version": ANIMALS_VERSION,
        "seed": seed,
        "image_size": image_size,
        "individuals": individuals,
    }

    def write(build: Path) -> dict:
        (build / "images").mkdir()
        rows = _plan(individuals, seed)
        for number, (path, name, species, side, _, encounter) in enumerate(rows):
            picture = _draw(name, species, side, encounter, number % _FRAMES, image_size, seed)
            Image.fromarray(picture).save(build / path, quality=90)
            if progress is not None:
                progress(number + 1, len(rows))
        with (build / ANIMALS_TABLE).open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([_COLUMNS, *rows])
        return {"images": len(rows)}

    write_dataset(folder, settings, animals_are_complete, write)


def animals_are_complete(folder: str | Path) -> bool:
    """Return True if ``folder`` has as many images of this version as its manifest states."""
    return has_all_images(folder, "images", "images", version=ANIMALS_VERSION)


def _plan(individuals: int, seed: int) -> list[tuple[str, ...]]:
    """List the rows of the table."""
    rng = np.random.default_rng([seed, 1])
    rows: list[tuple[str, ...]] = []
    for species in sorted(_SPECIES):
        for number in range(individuals):
            name = f"{species} {number:02d}"
            # 8 to 20 encounters, of each flank at least four; most animals have few.
            for visit in range(8 + int(13 * rng.random() ** 2.5)):
                day = _FIRST_DAY + timedelta(days=int(rng.integers(0, 1460)))
                side, encounter = _SIDES[visit % 2], f"{species} {number:02d} {visit}"
                for frame in range(_FRAMES):
                    path = f"images/{species}_{number:02d}_{visit:02d}_{frame}.jpg"
                    rows.append((path, name, species, side, day.isoformat(), encounter))
    return rows


def _stream(seed: int, *words: str) -> np.random.Generator:
    return np.random.default_rng([seed, *(byte for word in words for byte in (*word.encode(), 0))])


def _draw(name: str, species: str, side: str, encounter: str, frame: int, size: int, seed: int) -> np.ndarray:
    """Draw a photograph: (size, size, 3) uint8."""
    look, place = _SPECIES[species], _stream(seed, encounter)
    grid = (np.arange(size) + 0.5) / size * 2 - 1
    x, y = np.meshgrid(grid, grid)
    light = 0.65 + 0.5 * place.random()
    tint = 1 + 0.12 * place.normal(size=3)
    ground, sky = 0.25 + 0.5 * place.random((2, 3))
    horizon, waves = place.uniform(-0.5, 0.3), place.uniform(4, 14, 2)
    angle, scale = place.normal(0, 0.16), place.uniform(0.85, 1.15)
    shift, stretch = place.normal(0, 0.07, 2), place.normal(1, 0.07)
    shot = np.random.default_rng([seed, frame, *encounter.encode()])
    angle, scale, shift = angle + shot.normal(0, 0.02), scale + shot.normal(0, 0.015), shift + shot.normal(0, 0.012, 2)

    grass = 0.08 * np.sin(waves[0] * x + 9 * y) * np.sin(waves[1] * y + 5 * x)
    image = np.where((y < horizon)[..., None], sky, ground) + grass[..., None]
    u = (np.cos(angle) * (x - shift[0]) + np.sin(angle) * (y - shift[1])) / scale
    v = (np.cos(angle) * (y - shift[1]) - np.sin(angle) * (x - shift[0])) / scale * stretch
    u = u if side == "left" else -u
    body = (u / look.width) ** 2 + (v / 0.52) ** 2 < 1
    head = ((u + 0.82) / 0.2) ** 2 + ((v + 0.38) / 0.18) ** 2 < 1
    legs = (v > 0.3) & (v < 0.92) & (np.abs(np.abs(u) - 0.42) < 0.07)
    coat = np.asarray(look.coat) * (1 - 0.25 * np.clip(v, -1, 1))[..., None]
    coat = np.where(_markings(look.shape, u, v, _stream(seed, name, side))[..., None], look.marking, coat)
    image = np.where((head | legs)[..., None], np.asarray(look.coat) * 0.8, image)
    image = np.where(body[..., None], coat, image) * light * tint
    image = image + shot.normal(0, 0.04, image.shape)
    return (image.clip(0, 1) * 255).round().astype(np.uint8)


def _markings(shape: str, u: np.ndarray, v: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return True where the flank with this random stream is marked."""
    if shape == "stripes":
        phase = sum(
            rng.normal(0, 0.9) * np.sin(rng.uniform(1, 5) * u + rng.uniform(1, 5) * v + rng.uniform(0, 6))
            for _ in range(4)
        )
        stripes: np.ndarray = np.sin(rng.uniform(13, 19) * u + 2.5 * v + phase) > rng.uniform(-0.2, 0.2)
        return stripes
    centers = np.stack((rng.uniform(-0.95, 0.95, _MARKS), rng.uniform(-0.5, 0.5, _MARKS)))
    distances = np.stack([np.hypot(u - a, v - b) for a, b in centers.T])
    if shape == "spots":
        radii = rng.uniform(0.03, 0.11, _MARKS)
        spots: np.ndarray = np.any(distances < radii[:, None, None], axis=0)
        return spots
    nearest = np.sort(distances, axis=0)
    patches: np.ndarray = nearest[1] - nearest[0] > 0.05
    return patches
