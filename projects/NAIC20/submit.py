#!/usr/bin/env python
"""Write the submission of the challenge: a JSON file with the names of the 200 nearest gallery images of each query.

The features are those of `fastamp extract`, or of an ensemble by tools/ensemble.py. The keys of the
metric, query expansion and re-ranking apply.

examples:
  fastamp extract logs/naic20/r34 NAIC20_R2A -o a.npz
  python projects/NAIC20/submit.py -o submission.json a.npz TEST.RERANK on
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch

from fastamp.amp import resolve_device
from fastamp.cli.options import at_least
from fastamp.config import read_config
from fastamp.engine import run_command_line
from fastamp.evaluation import Protocol
from fastamp.evaluation.metrics import distances_of
from fastamp.retrieval.features import Features
from fastamp.retrieval.features_file import read_features
from fastamp.utils.errors import ConfigError, DataError
from fastamp.utils.files import write_atomically
from fastamp.utils.progress import track

_KEYS = ("MODEL.DEVICE", "TEST.METRIC", "TEST.AQE", "TEST.RERANK", "TEST.KNN_BACKEND", "TEST.MEMORY_BUDGET_MB")


def nearest_names(extraction: Features, protocol: Protocol, device: torch.device, count: int) -> dict[str, list[str]]:
    """Return the names of the nearest gallery images of each query: name -> names, nearest first.

    Args:
        extraction: features of queries and gallery.
        protocol: distance, query expansion and re-ranking. No image is excluded.
        device: device of the computation.
        count: number of names for each query; fewer in a smaller gallery.

    Raises:
        DataError: if the file has no queries or no gallery, or two images of a split have the same name.
    """
    splits = extraction.images.split
    features, names = {}, {}
    for side in ("query", "gallery"):
        rows = np.flatnonzero(splits == side) if splits is not None else np.empty(0, dtype=np.int64)
        if not len(rows):
            raise DataError(
                f"{extraction.path} has no {side} images.\n  fix: extract the features of a test set: "
                "fastamp extract RUN NAIC20_R2A -o FILE.npz"
            )
        names[side] = [Path(path).name for path in extraction.images.paths[rows].tolist()]
        if len(set(names[side])) != len(rows):
            twice = next(name for name in names[side] if names[side].count(name) > 1)
            raise DataError(f"{extraction.path}: several {side} images are named {twice}.\n  fix: rename the images")
        features[side] = torch.from_numpy(np.array(extraction.matrix[rows])).to(device)
    blocks = distances_of(features["query"], features["gallery"], protocol)
    gallery, nearest = np.array(names["gallery"]), {}
    number = -(-len(names["query"]) // blocks.block_rows)
    for first, block in track(blocks.blocks(), number, "ranking"):
        order = block.argsort(dim=1, stable=True)[:, :count].cpu().numpy()
        for row, indices in enumerate(order):
            nearest[names["query"][first + row]] = gallery[indices].tolist()
    return nearest


def main(args: argparse.Namespace) -> None:
    """Write the submission."""
    if not args.output.parent.is_dir():
        raise ConfigError(f"-o {args.output}: the folder does not exist.\n  fix: create it, or choose another file")
    for key in args.opts[::2]:
        if not any(f"{key}.".startswith(f"{prefix}.") for prefix in _KEYS):
            raise ConfigError(f"{key} has no effect on a submission.\n  fix: omit it; choices: {', '.join(_KEYS)}")
    extraction = read_features(args.features)
    cfg = read_config("", ["MODEL.DEVICE", "auto", "TEST.METRIC", extraction.model.metric, *args.opts])
    nearest = nearest_names(extraction, Protocol.from_config(cfg), resolve_device(cfg.MODEL.DEVICE), args.count)
    write_atomically(args.output, lambda file: file.write(json.dumps(nearest).encode()))
    print(f"wrote {args.output}: {len(nearest)} queries, {len(next(iter(nearest.values())))} names each")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT.json", help="file to write")
    parser.add_argument(
        "--count", type=at_least(1), default=200, metavar="N", help="names for each query (default: 200)"
    )
    parser.add_argument("features", metavar="FEATURES.npz", help="file of `fastamp extract` or tools/ensemble.py")
    parser.add_argument("opts", nargs="*", metavar="KEY VALUE", help="config keys and values")
    arguments = parser.parse_args()
    sys.exit(run_command_line(lambda: main(arguments)))
