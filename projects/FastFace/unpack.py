#!/usr/bin/env python
"""Write the images of a RecordIO file, or of pairs (insightface's .bin, bcolz array), to a folder that FastFace reads.

examples:
  python projects/FastFace/unpack.py faces_emore/train.rec datasets/MS_Celeb_1M
  python projects/FastFace/unpack.py faces_emore/lfw.bin datasets/lfw
  python projects/FastFace/unpack.py --bgr faces_emore_val/lfw datasets/lfw
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from fastamp.engine import run_command_line
from fastamp.utils.atomic_dir import temporary_folder
from fastamp.utils.errors import ConfigError, DataError, writing

sys.path.append(str(Path(__file__).parent))


def unpack_records(source: Path, folder: Path) -> int:
    """Write ``folder/<identity>/<number>.jpg`` for each record; return the number of images."""
    from fastface.packed_files import read_records

    count = 0
    for count, (identity, image) in enumerate(read_records(source), start=1):
        path = folder / str(identity) / f"{count}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
    return count


def unpack_pairs(source: Path, folder: Path) -> int:
    """Write the encoded images of a ``.bin`` file and ``folder/pairs.txt``; return the number of images."""
    from fastface.packed_files import read_pairs

    images, same = read_pairs(source)
    for path, image in zip(_write_list(folder, same, ".jpg"), images, strict=True):
        path.write_bytes(image)
    return len(images)


def unpack_array(source: Path, folder: Path, *, bgr: bool = False) -> int:
    """Write the images of a bcolz array as PNG files and ``folder/pairs.txt``; return the number of images.

    Args:
        source: folder of the array, with ``<name>_list.npy`` next to it.
        folder: folder to write.
        bgr: if True, the channels of the array are blue, green, red. Default False.
    """
    from fastface.carray import read_images, read_labels

    count = 0
    for count, image in enumerate(read_images(source), start=1):
        Image.fromarray(np.ascontiguousarray(image[:, :, ::-1] if bgr else image)).save(folder / f"{count}.png")
    same = read_labels(source.with_name(f"{source.name}_list.npy"), count)
    for number, path in enumerate(_write_list(folder, same, ".png"), start=1):
        (folder / f"{number}.png").rename(path)
    return count


def _write_list(folder: Path, same: list[bool], suffix: str) -> Iterator[Path]:
    """Write ``folder/pairs.txt`` and yield the file of each image, two for each pair.

    The two images of a pair of one identity are images 1 and 2 of a name; those of another pair are of two names.
    """
    lines = [f"1 {len(same)}"]
    for pair, is_same in enumerate(same):
        names = [f"{pair:05d}a", f"{pair:05d}a" if is_same else f"{pair:05d}b"]
        numbers = (1, 2) if is_same else (1, 1)
        for name, number in zip(names, numbers, strict=True):
            path = folder / name / f"{name}_{number:04d}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            yield path
        lines.append(f"{names[0]} 1 2" if is_same else f"{names[0]} 1 {names[1]} 1")
    (folder / "pairs.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    """Unpack the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "source",
        type=Path,
        help="file .rec, with .idx next to it; .bin; or bcolz folder, with <name>_list.npy next to it",
    )
    parser.add_argument("folder", type=Path, help="folder to write, which must not exist")
    parser.add_argument("--bgr", action="store_true", help="the channels of the bcolz array are blue, green, red")
    args = parser.parse_args()

    if args.bgr and not args.source.is_dir():
        raise ConfigError(f"--bgr: {args.source} is not a bcolz folder.\n  fix: omit --bgr")
    if args.folder.exists():
        raise DataError(f"{args.folder} exists.\n  fix: choose another folder")
    unpack: Callable[[Path, Path], int] = unpack_pairs if args.source.suffix == ".bin" else unpack_records
    if args.source.is_dir():
        unpack = partial(unpack_array, bgr=args.bgr)
    with writing(args.folder), temporary_folder(args.folder) as build:
        count = unpack(args.source, build)
        build.rename(args.folder)
    print(f"wrote {count} images to {args.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command_line(main))
