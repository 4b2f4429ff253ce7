#!/usr/bin/env python
"""Find the images of a folder that have given attributes, with a model of FastAttr.

example:
  python projects/FastAttr/find.py logs/demo_attributes photos/ "upper_color=red, hat=cap" --top 5
"""

import argparse
import sys
from pathlib import Path


def main() -> int:
    """Print the images with the highest scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint or run folder")
    parser.add_argument("folder", help="folder of images")
    parser.add_argument("query", help='attributes, separated by commas, e.g. "upper_color=red, hat=cap"')
    parser.add_argument("--top", type=int, default=10, help="number of images (default: %(default)s)")
    args = parser.parse_args()

    from fastamp import Predictor
    from fastamp.data.datasets.custom import image_files
    from fastamp.utils.errors import DataError
    from fastamp.utils.table import format_table

    predictor = Predictor(args.model)
    from fastattr.search import parse_query, score  # the project is loaded with the model

    query = parse_query(args.query, predictor.cfg.MODEL.ATTRIBUTES.NAMES)
    images = image_files(Path(args.folder)) if Path(args.folder).is_dir() else []
    if not images:
        raise DataError(f"no images found in {args.folder}.\n  fix: choose a folder that contains image files")
    scores = [score(each, query) for each in predictor.attributes(images)]
    best = sorted(zip(scores, images, strict=True), key=lambda pair: (-pair[0], pair[1]))[: args.top]
    rows = [[rank, f"{value:.3f}", path] for rank, (value, path) in enumerate(best, start=1)]
    print(format_table(rows, ["rank", "score", "path"]))
    return 0


if __name__ == "__main__":
    from fastamp.engine import run_command_line

    sys.exit(run_command_line(main))
