#!/usr/bin/env python
"""Write the images of a RecordIO file (.rec) or of insightface's pairs (.bin) to a folder that FastFace reads.

examples:
  python projects/FastFace/unpack.py faces_emore/train.rec datasets/MS_Celeb_1M
  python projects/FastFace/unpack.py faces_emore/lfw.bin datasets/lfw
"""

import argparse
import shutil
import sys
from pathlib import Path

from fastamp.engine import run_command_line
from fastamp.utils.atomic_dir import remove_abandoned, temporary_path
from fastamp.utils.errors import DataError, writing

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
    """Write the images of pairs and ``folder/pairs.txt``; return the number of images.

    The two images of a pair of one identity are images 1 and 2 of a name; those of another pair are of two names.
    """
    from fastface.packed_files import read_pairs

    images, same = read_pairs(source)
    lines = [f"1 {len(same)}"]
    for pair, is_same in enumerate(same):
        names = [f"{pair:05d}a", f"{pair:05d}a" if is_same else f"{pair:05d}b"]
        numbers = (1, 2) if is_same else (1, 1)
        for name, number, image in zip(names, numbers, images[2 * pair : 2 * pair + 2], strict=True):
            path = folder / name / f"{name}_{number:04d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(image)
        lines.append(f"{names[0]} 1 2" if is_same else f"{names[0]} 1 {names[1]} 1")
    (folder / "pairs.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(images)


def main() -> int:
    """Unpack the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="file .rec, with .idx next to it, or .bin")
    parser.add_argument("folder", type=Path, help="folder to write, which must not exist")
    args = parser.parse_args()

    if args.folder.exists():
        raise DataError(f"{args.folder} exists.\n  fix: choose another folder")
    unpack = unpack_pairs if args.source.suffix == ".bin" else unpack_records
    remove_abandoned(args.folder)
    build = temporary_path(args.folder)
    try:
        with writing(str(args.folder)):
            build.mkdir(parents=True)
            count = unpack(args.source, build)
            build.rename(args.folder)
    finally:
        shutil.rmtree(build, ignore_errors=True)
    print(f"wrote {count} images to {args.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command_line(main))
