#!/usr/bin/env python
"""Evaluate an ensemble of models by the weighted mean of their distances, from files of `fastamp extract`.

The mean of cosine distances is the cosine distance of the normalized features side by side, each scaled by the root of
its weight; the same holds for squared Euclidean distances without the normalization. The output is such a file of
features, so that re-ranking and all other keys below TEST apply to the ensemble.

examples:
  fastamp extract logs/a Market1501 -o a.npz && fastamp extract logs/b Market1501 -o b.npz
  python tools/ensemble.py -o both.npz a.npz b.npz
  python tools/ensemble.py -o both.npz --weights 2,1 a.npz b.npz TEST.RERANK on
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np

from fastamp.config import CfgNode, read_config
from fastamp.engine import run_command_line
from fastamp.evaluation import print_results
from fastamp.inference.evaluate_features import check, compute
from fastamp.retrieval.features import Features
from fastamp.retrieval.features_file import read_features, write_features
from fastamp.retrieval.model_id import ModelId
from fastamp.utils.errors import ConfigError, DataError, NoMatchError, writing
from fastamp.utils.logger import setup_logger

_BLOCK = 4096


def rows_of(first: Features, other: Features) -> np.ndarray:
    """Return the row in ``other`` of each image of ``first``, (N,) int64.

    Raises:
        DataError: if the files are not of the same images, or differ in identities or cameras.
    """
    rows, paths, other_paths = np.arange(len(first)), first.images.paths, other.images.paths
    if not np.array_equal(paths, other_paths):
        order = np.argsort(other_paths, kind="stable")
        places = np.searchsorted(other_paths, paths, sorter=order).clip(max=len(order) - 1)
        rows = order[places]
        missing = np.flatnonzero(other_paths[rows] != paths)
        if len(missing) or len(first) != len(other) or len({*rows.tolist()}) != len(rows):
            example = f", e.g. {paths[missing[0]]}" if len(missing) else ""
            raise DataError(
                f"{other.path} is not of the images of {first.path}: {len(other)} and {len(first)} images, "
                f"{len(missing)} of them missing{example}.\n  fix: extract the features of the same dataset"
            )
    for name in ("pids", "camids", "split"):
        ours, theirs = vars(first.images)[name], vars(other.images)[name]
        if (ours is None) != (theirs is None) or (ours is not None and not np.array_equal(ours, theirs[rows])):
            raise DataError(
                f"{name} in {other.path} differ from those in {first.path}.\n"
                "  fix: extract the features of the same dataset"
            )
    return rows


def scaled_blocks(
    members: Sequence[Features], rows: Sequence[np.ndarray], weights: Sequence[float], *, normalize: bool
) -> Iterator[np.ndarray]:
    """Yield blocks of the features of all members side by side, each scaled by the root of its weight."""
    for start in range(0, len(members[0]), _BLOCK):
        parts = []
        for member, order, weight in zip(members, rows, weights, strict=True):
            part = np.asarray(member.matrix[order[start : start + _BLOCK]], dtype=np.float32)
            if normalize:
                part = part / np.maximum(np.linalg.norm(part, axis=1, keepdims=True), 1e-12)
            parts.append(part * np.float32(weight**0.5))
        yield np.concatenate(parts, axis=1)


def write_ensemble(members: Sequence[Features], weights: Sequence[float], out: Path, *, metric: str) -> None:
    """Write the features of an ensemble, with the identities, cameras and splits of the first member, as an extraction.

    Args:
        members: files of the same images.
        weights: weight of the distances of each member.
        out: npz file to write.
        metric: ``"cosine"`` or ``"euclidean"``.

    Raises:
        DataError: see ``rows_of``.
    """
    first = members[0]
    rows = [rows_of(first, member) for member in members]
    names = [" + ".join(vars(member.model)[name] for member in members) for name in ("config_hash", "checkpoint")]
    images = replace(first.images, boxes=None, cameras=None, further={})
    width = sum(member.model.width for member in members)
    with writing(out), TemporaryFile(dir=out.parent) as file:  # the matrix may be larger than the memory
        file.writelines(scaled_blocks(members, rows, weights, normalize=metric == "cosine"))
        matrix = np.memmap(file, np.float32, "r", shape=(len(first), width))
        write_features(Features(out, matrix, images, ModelId(width, metric, *names)))


def read_weights(text: str, count: int) -> list[float]:
    """Parse the weights of ``count`` files, separated by commas; "" gives equal weights.

    Raises:
        ConfigError: if there are not ``count`` positive numbers.
    """
    try:
        weights = [float(word) for word in text.split(",")] if text else [1.0] * count
    except ValueError:
        weights = []
    if len(weights) != count or not all(0 < weight < float("inf") for weight in weights):
        raise ConfigError(
            f"--weights: expected {count} positive numbers separated by commas, got {text!r}.\n"
            "  fix: give one weight for each file"
        )
    return weights


def main(args: argparse.Namespace) -> None:
    """Write the ensemble, and print the metrics of each member and of the ensemble, unless no query has a match."""
    weights = read_weights(args.weights, len(args.features))
    if args.output.suffix != ".npz" or not args.output.parent.is_dir():
        raise ConfigError(f"-o {args.output}: expected a file .npz in an existing folder.\n  fix: choose another file")
    setup_logger()
    members = [read_features(path) for path in args.features]
    cfg: CfgNode = read_config("", ["MODEL.DEVICE", "auto", "TEST.METRIC", members[0].model.metric, *args.opts])
    check(cfg, args.opts)
    write_ensemble(members, weights, args.output, metric=cfg.TEST.METRIC)
    results, description = {}, ""
    for path in (*args.features, str(args.output)):
        try:
            result, description = compute(path, cfg)
        except NoMatchError as error:  # a test set whose identities are unknown, for a submission
            print(f"no metrics: {error}")
            break
        results[f"ensemble {Path(path).stem}" if path == str(args.output) else Path(path).stem] = result.metrics()
    else:
        print_results(results, protocol=description)
    print(f"wrote {args.output}")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "features", nargs="+", metavar="FEATURES.npz", help="files of `fastamp extract`, then KEY VALUE"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT.npz", help="file to write")
    parser.add_argument("--weights", default="", metavar="W,W", help="weight of each file (default: equal weights)")
    args = parser.parse_args(argv)
    files = [word for word in args.features if word.endswith(".npz")]
    opts = [word for word in args.features if not word.endswith(".npz")]
    if len(files) < 2 or len(opts) % 2:
        parser.error("expected at least two files .npz, and KEY VALUE pairs")
    return argparse.Namespace(output=args.output, weights=args.weights, features=files, opts=opts)


if __name__ == "__main__":
    arguments = parse()
    sys.exit(run_command_line(lambda: main(arguments)))
