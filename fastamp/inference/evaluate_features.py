"""Evaluation of features saved by fastamp or another program."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from fastamp.amp import resolve_device
from fastamp.config import CfgNode
from fastamp.evaluation import EvaluationResult, Identities, Protocol, compute_metrics, print_results
from fastamp.evaluation.identities import CAMERA
from fastamp.evaluation.protocol import check_columns
from fastamp.evaluation.reid_evaluation import ranking_device, write_per_query
from fastamp.evaluation.roc import write_roc
from fastamp.retrieval.columns import has_missing_integers
from fastamp.retrieval.features_file import COLUMN_PREFIX
from fastamp.retrieval.npz import open_arrays, read_array
from fastamp.utils.errors import ConfigError, DataError, did_you_mean, writing
from fastamp.utils.missing import MISSING, is_missing

SIDES = ("query", "gallery")
COLUMNS = ("features", "pids", "camids")
# Prefix of keys that only affect the computation of features, or that an option replaces -> fix.
_WITHOUT_EFFECT = {
    **dict.fromkeys(("TEST.FLIP", "TEST.BASELINES", "TEST.PRECISE_BN"), "set it when you compute the features"),
    "TEST.PER_QUERY": "use --per-query OUT.npz",
}


def read_arrays(path: str, protocol: Protocol) -> dict[str, np.ndarray]:
    """Read the query and gallery arrays of an npz file: name -> array, e.g. ``query_pids``.

    Args:
        path: npz file.
        protocol: evaluation protocol, whose columns are read, too. If it needs no cameras, ``camids`` may be missing.

    Raises:
        DataError: if the file is missing, damaged or not an npz file, or arrays or columns are missing.
    """
    names = [f"{side}_{column}" for column in COLUMNS for side in SIDES]
    with open_arrays(path, "npz file of plain arrays", fix="write the file with numpy.savez") as archive:
        stored = sorted(name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy"))
        if "split" in stored and not any(name in stored for name in names):
            available = [name.removeprefix(COLUMN_PREFIX) for name in stored if name.startswith(COLUMN_PREFIX)]
            places = {name: name for name in COLUMNS} | {name: COLUMN_PREFIX + name for name in protocol.columns}
            columns = {name: read_array(archive, place) for name, place in places.items() if place in stored}
            arrays = split_arrays(columns, read_array(archive, "split"))
        else:
            both = (name.removeprefix("query_") for name in stored if name.startswith("query_"))
            available = [name for name in both if f"gallery_{name}" in stored and name not in COLUMNS]
            wanted = [*names, *(f"{side}_{name}" for name in protocol.columns for side in SIDES)]
            arrays = {name: read_array(archive, name) for name in wanted if name in stored}
    cameras = protocol.rule.uses_cameras or protocol.group_by == CAMERA
    needed = [name for name in names if cameras or "camids" not in name]
    missing = [name for name in needed if name not in arrays]
    if missing:
        similar = did_you_mean(missing[0], [name for name in stored if name not in names])
        if "features" in stored and "split" not in stored:
            raise DataError(
                f"{path} has features, but no split, so queries and gallery are unknown.\n"
                f"  found: {', '.join(stored)}\n"
                "  fix: extract a dataset with query and gallery images (fastamp extract MODEL csv:FILE), or add the "
                "array split, with query or gallery for each row"
            )
        no_cameras = ", or set TEST.PROTOCOL to no_camera" if all("camids" in name for name in missing) else ""
        raise DataError(
            f"{path} has no {', '.join(missing)}.{similar}\n  found: {', '.join(stored) or 'nothing'}\n"
            f"  expected: {', '.join(needed)}\n  fix: add them{no_cameras}"
        )
    check_columns(available, protocol)
    return arrays


def split_arrays(columns: dict[str, np.ndarray], split: np.ndarray) -> dict[str, np.ndarray]:
    """Split the arrays of an extraction into query and gallery arrays; consecutive rows become views.

    Each unknown camera (-1) is replaced by a unique negative number, so that no images are from the same camera.
    """
    _check_array("split", split, "U", (split.size,), "the strings query and gallery")
    if "camids" in columns and columns["camids"].dtype.kind in "iu":
        camids = columns["camids"]
        columns = columns | {"camids": np.where(is_missing(camids), -2 - np.arange(camids.size), camids)}
    arrays: dict[str, np.ndarray] = {}
    for side in SIDES:
        chosen = np.flatnonzero(split == side)
        is_range = len(chosen) and chosen[-1] - chosen[0] == len(chosen) - 1
        rows = slice(chosen[0], chosen[-1] + 1) if is_range else chosen
        arrays |= {f"{side}_{name}": array[rows] for name, array in columns.items() if array.shape[:1] == split.shape}
    return arrays


def features_of(arrays: dict[str, np.ndarray], side: str) -> torch.Tensor:
    """Return the query or gallery features as a float tensor (N, D).

    Raises:
        DataError: if the array is not numeric or not two-dimensional.
    """
    features = arrays[f"{side}_features"]
    shape = features.shape if features.ndim == 2 else ("N", "D")
    _check_array(f"{side}_features", features, "fiu", shape, "numbers")
    native = features.dtype.newbyteorder("=")
    native = native if native in (np.float16, np.float32, np.float64) else np.dtype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(features, dtype=native))


def column_of(arrays: dict[str, np.ndarray], column: str) -> tuple[torch.Tensor, tuple[str, ...] | None]:
    """Return the values of a column of queries, and then of the gallery, and the text of each number of a text column.

    Identities and cameras are integers; if all their texts are integers, these are the values.

    Returns:
        ``(values (Q + G,), texts)``: int64 or float32. Texts are numbered in sorted order, and an empty text, which is
        a missing value, is -1; texts are () for integers whose lowest value is -1, which ``fastamp extract`` writes for
        a missing value, and None for other numbers.

    Raises:
        DataError: if an array is neither numbers nor text, or has another length than the identities.
    """
    is_label, both = column in COLUMNS, []
    for side in SIDES:
        array, count = arrays[f"{side}_{column}"], arrays[f"{side}_pids"].size
        if array.dtype.kind == "S":
            array = np.char.decode(array, "latin-1")
        # float64 cannot represent every integer above 2^53.
        if is_label and array.dtype.kind == "f" and ((np.abs(array) < 2**53) & (array == np.round(array))).all():
            array = array.astype(np.int64)
        kinds, expected = ("iuU", "integers or text") if is_label else ("biufU", "numbers or text")
        _check_array(f"{side}_{column}", array, kinds, (count,), expected)
        both.append(array)
    if all(array.dtype.kind != "U" for array in both):
        values = np.concatenate(both)
        dtype = np.float32 if values.dtype.kind == "f" else np.int64
        return torch.from_numpy(values.astype(dtype)), () if has_missing_integers(values) else None
    texts = np.concatenate([array.astype(str) for array in both])
    if is_label:
        with contextlib.suppress(ValueError, OverflowError):
            return torch.from_numpy(texts.astype(np.int64)), None
    names = np.unique(texts[~is_missing(texts)])
    return torch.from_numpy(np.where(is_missing(texts), MISSING, np.searchsorted(names, texts))), tuple(names.tolist())


def _check_array(name: str, array: np.ndarray, kinds: str, shape: tuple[int | str, ...], expected: str) -> None:
    """Raise DataError if an array has another kind of dtype or another shape."""
    if array.dtype.kind not in kinds or array.shape != shape:
        raise DataError(
            f"{name}: expected an array of {expected} of shape ({', '.join(map(str, shape))}); got {array.dtype} of "
            f"shape {array.shape}.\n  fix: save this array with the expected shape and type"
        )


def evaluate(path: str, cfg: CfgNode, *, per_query: str | None = None, as_json: bool = False) -> None:
    """Compute the metrics, print them and write the files.

    Args:
        path: npz file.
        cfg: config; only the keys below TEST, MODEL.DEVICE and OUTPUT_DIR are used.
        per_query: npz file to write the results of each query to. Default None: not written.
        as_json: print JSON instead of a table. Default False.

    Raises:
        UserError: if the file or a value is invalid, or a file cannot be written.
    """
    result, description = compute(path, cfg)
    metrics = result.metrics()
    name, written = Path(path).stem, []
    if per_query is not None:
        written.append(Path(per_query))
        write_per_query(result, written[0])
    if result.roc is not None:
        folder = Path(cfg.OUTPUT_DIR) / "evaluation" / name
        written += write_roc(result.roc, result.protocol.false_accept_rates or (), folder)
    if as_json:
        counted = {"num_valid_queries": result.ranking.num_valid}
        print(json.dumps({name: metrics[name] for name in ("mAP", "mINP", "Rank-1")} | counted))
        return
    print_results({name: metrics}, protocol=description)
    for file in written:
        print(f"wrote {file}")


def compute(path: str, cfg: CfgNode) -> tuple[EvaluationResult, str]:
    """Compute the metrics of a file; see ``evaluate``.

    Returns:
        ``(result, description)``: the result, and a one-line description of the evaluation.
    """
    protocol = Protocol.from_config(cfg)
    arrays = read_arrays(path, protocol)
    pids, _ = column_of(arrays, "pids")
    has_cameras = all(f"{side}_camids" in arrays for side in SIDES)
    camids = column_of(arrays, "camids")[0] if has_cameras else torch.zeros_like(pids)
    columns = {name: column_of(arrays, name) for name in protocol.columns}
    values = {name: both for name, (both, _) in columns.items()}
    texts = {name: names for name, (_, names) in columns.items() if names is not None}
    ids = Identities.split(len(arrays["query_pids"]), pids, camids, values, texts)
    features = [features_of(arrays, side) for side in SIDES]
    saved = " and ".join(dict.fromkeys(str(arrays[f"{side}_features"].dtype) for side in SIDES))
    arrays.clear()
    device = ranking_device(features[1], protocol, resolve_device(cfg.MODEL.DEVICE))
    result = compute_metrics(features[0].to(device), features[1].to(device), ids, protocol)
    widest = torch.promote_types(*(side.dtype for side in features))
    return result, f"{protocol.describe(widest)}; features saved as {saved}"


def check(cfg: CfgNode, opts: Sequence[str]) -> None:
    """Check the options before any computation.

    Raises:
        ConfigError: if a key has no effect on saved features, or an output file cannot be created.
    """
    for key in opts[::2]:
        for prefix, fix in _WITHOUT_EFFECT.items():
            if key.startswith(prefix):
                raise ConfigError(f"{key} has no effect on saved features.\n  fix: {fix}")
    if cfg.TEST.ROC.ENABLED:
        with writing(cfg.OUTPUT_DIR):
            Path(cfg.OUTPUT_DIR).mkdir(parents=True, exist_ok=True)
