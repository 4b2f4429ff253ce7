#!/usr/bin/env python
"""Write copies of the training images with exchanged color channels, for the datasets NAIC20_R1CNV and NAIC20_R2CNV.

The copies of all images of an identity have the same random order of the channels, which is not the original one. They
are a new identity, because the colors of the clothes differ.

example:
  python projects/NAIC20/shuffle_channels.py datasets/naic/2020_NAIC/fusai/train
"""

import argparse
import itertools
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from fastamp.cli.options import at_least
from fastamp.engine import run_command_line
from fastamp.utils.atomic_dir import temporary_folder
from fastamp.utils.errors import ConfigError, DataError, writing
from fastamp.utils.progress import track

sys.path.append(str(Path(__file__).parent))

ORDERS = tuple(itertools.permutations(range(3)))[1:]
"""Orders of the three channels without the original one."""
IMAGES = "images_convert"


def shuffle_channels(folder: Path, seed: int = 0) -> int:
    """Write ``images_convert`` next to ``images``; return the number of images.

    Args:
        folder: folder of ``NAIC20_R1`` or ``NAIC20_R2``, with ``images`` and the list of the training images.
        seed: random seed of the orders, at least 0. Default 0.

    Raises:
        ConfigError: if the copies exist.
        DataError: if the list or an image is missing or damaged.
    """
    from naic.datasets import NAIC20_R1, NAIC20_R2, read_list

    if (folder / IMAGES).exists():
        raise ConfigError(f"{folder / IMAGES} exists.\n  fix: remove it")
    lists = [folder / dataset.lists["train"] for dataset in (NAIC20_R2, NAIC20_R1)]
    file = next((candidate for candidate in lists if candidate.exists()), lists[-1])
    pairs = read_list("shuffle_channels", file)
    if elsewhere := next((name for name, _ in pairs if Path(name).name != name), None):
        raise DataError(
            f"{file}: expected names of files in {folder / 'images'}, got {elsewhere!r}.\n  fix: correct the line"
        )
    identities = sorted({identity for _, identity in pairs})
    rng = np.random.default_rng(seed)
    orders = dict(zip(identities, rng.integers(len(ORDERS), size=len(identities)).tolist(), strict=True))
    with writing(folder / IMAGES), temporary_folder(folder / IMAGES) as build:
        for name, identity in track(pairs, len(pairs), "images"):
            try:
                with Image.open(folder / "images" / name) as image:
                    pixels = np.asarray(image.convert("RGB"))
            except OSError as error:
                raise DataError(
                    f"cannot read {folder / 'images' / name}: {error}.\n  fix: restore the image"
                ) from error
            Image.fromarray(np.ascontiguousarray(pixels[:, :, ORDERS[orders[identity]]])).save(build / name)
        build.rename(folder / IMAGES)
    return len(pairs)


def main(args: argparse.Namespace) -> None:
    """Write the copies."""
    print(f"wrote {shuffle_channels(args.folder, args.seed)} images to {args.folder / IMAGES}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with images and the list of the training images")
    parser.add_argument("--seed", type=at_least(0), default=0, help="random seed (default: 0)")
    arguments = parser.parse_args()
    sys.exit(run_command_line(lambda: main(arguments)))
