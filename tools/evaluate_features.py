#!/usr/bin/env python
"""Judge saved features, fastamp's or any other project's: evaluate_features.py FEATURES.npz [TEST.KEY VALUE ...].

The file holds query_features (Q, D) and gallery_features (G, D), and query_pids, gallery_pids, query_camids and
gallery_camids, whole numbers or texts; cameras may be left out under TEST.PROTOCOL no_camera and vehicleid. It is read
without running anything in it. Keys below TEST are those of the config: python tools/train_net.py --list-config TEST.
"""

import argparse
import json
import logging
import sys
from pathlib import Path
from zipfile import BadZipFile, is_zipfile

import numpy as np
import torch

from fastamp.amp import resolve_device
from fastamp.config import CfgNode
from fastamp.engine import run_command_line
from fastamp.engine.setup import read_config
from fastamp.evaluation import Identities, Protocol, judge_features, print_results
from fastamp.evaluation.reid_evaluator import write_per_query
from fastamp.evaluation.roc import write_roc
from fastamp.utils.errors import DataError, did_you_mean
from fastamp.utils.logger import setup_logger

SIDES = ("query", "gallery")
COLUMNS = ("features", "pids", "camids")


def read_arrays(path: str, *, cameras: bool) -> dict[str, np.ndarray]:
    """Return the file's arrays by name; ``cameras`` says whether there must be camera numbers.

    Raises:
        DataError: there is no such file, it is no npz file, or arrays are missing.
    """
    if Path(path).is_file() and not is_zipfile(path):
        raise DataError(f"{path} is no npz file; numpy.savez writes one")
    names = [f"{side}_{column}" for column in COLUMNS for side in SIDES]
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [name for name in names if name not in file and (cameras or "camids" not in name)]
            if missing:
                near = did_you_mean(missing[0], file.files)
                raise DataError(
                    f"{path} has no {', '.join(missing)}.{near}\n"
                    f"  found: {', '.join(sorted(file.files)) or 'nothing'}\n  expected: {', '.join(names)}"
                )
            arrays = {name: file[name] for name in names if name in file}
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except (BadZipFile, ValueError, EOFError, AttributeError) as error:
        raise DataError(f"{path} is no npz file of plain arrays ({error}); numpy.savez writes one") from error
    for side in SIDES:
        arrays.setdefault(f"{side}_camids", np.zeros(len(arrays[f"{side}_pids"]), dtype=np.int64))
    return arrays


def features_of(arrays: dict[str, np.ndarray], side: str) -> torch.Tensor:
    """Return (N, D) float features.

    Raises:
        DataError: they are no numbers, or have other dimensions.
    """
    features = arrays[f"{side}_features"]
    if features.ndim != 2 or features.dtype.kind not in "fiu":
        raise DataError(
            f"{side}_features: expected (N, D) numbers, one row an image; found {features.shape} {features.dtype}"
        )
    if features.dtype not in (np.float16, np.float32, np.float64):
        features = features.astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(features))


def numbers_of(arrays: dict[str, np.ndarray], column: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (Q,) and (G,) int64; texts are numbered, the same text alike on both sides.

    Raises:
        DataError: they are neither whole numbers nor texts, or have other dimensions.
    """
    both = [arrays[f"{side}_{column}"] for side in SIDES]
    for side, array in zip(SIDES, both, strict=True):
        whole = array.dtype.kind in "iuUS" or (array.dtype.kind == "f" and np.array_equal(array, np.round(array)))
        if array.ndim != 1 or not whole:
            raise DataError(f"{side}_{column}: expected (N,) whole numbers or texts; found {array.shape} {array.dtype}")
    if any(array.dtype.kind in "US" for array in both):
        _, numbers = np.unique(np.concatenate([array.astype(str) for array in both]), return_inverse=True)
        both = np.split(numbers.reshape(-1), [len(both[0])])
    return tuple(torch.from_numpy(array.astype(np.int64)) for array in both)


def evaluate(args: argparse.Namespace, cfg: CfgNode) -> None:
    """Judge, print and write."""
    protocol = Protocol.from_config(cfg)
    device = resolve_device(cfg.MODEL.DEVICE)
    device = device if device.type == "cuda" else torch.device("cpu")
    arrays = read_arrays(args.features, cameras=protocol.cross_camera)
    (query_pids, gallery_pids), (query_camids, gallery_camids) = (numbers_of(arrays, name) for name in COLUMNS[1:])
    ids = Identities(query_pids, gallery_pids, query_camids, gallery_camids)
    features = [features_of(arrays, side).to(device) for side in SIDES]
    saved = str(features[0].dtype).removeprefix("torch.")
    judgement = judge_features(*features, ids, protocol)
    metrics = judgement.metrics()
    written = []
    if args.per_query:
        written.append(Path(args.per_query))
        write_per_query(judgement, written[0])
    if judgement.roc is not None:
        written += write_roc(judgement.roc, protocol.false_accept_rates, Path(cfg.OUTPUT_DIR))
    if args.json:
        counted = {"num_valid_queries": judgement.ranking.num_valid}
        print(json.dumps({name: metrics[name] for name in ("mAP", "mINP", "Rank-1")} | counted))
        return
    print_results({Path(args.features).stem: metrics}, protocol=f"{protocol}; features saved as {saved}")
    for path in written:
        print(f"wrote {path}")


def cli(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", metavar="FEATURES.npz")
    parser.add_argument("--config-file", default="", metavar="FILE", help="YAML config file, for what is below TEST")
    parser.add_argument("--json", action="store_true", help="print mAP, mINP, Rank-1 and num_valid_queries as JSON")
    parser.add_argument("--per-query", metavar="OUT.npz", help="keep ap, inp and valid of each query")
    parser.add_argument("opts", nargs="*", metavar="KEY VALUE", help="config keys and their values")
    args = parser.parse_intermixed_args(argv)

    def run() -> None:
        if args.per_query and not Path(args.per_query).parent.is_dir():
            raise DataError(f"--per-query: there is no folder {Path(args.per_query).parent}")
        evaluate(args, read_config(args.config_file, ["MODEL.DEVICE", "auto", *args.opts]))

    setup_logger()
    if args.json:
        logging.getLogger("fastamp").setLevel(logging.ERROR)
    return run_command_line(run)


if __name__ == "__main__":
    sys.exit(cli())
