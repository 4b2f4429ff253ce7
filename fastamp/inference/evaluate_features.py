"""Evaluation of features saved by fastamp or another program."""

import contextlib
import json
import sys
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
# Keys that only affect the computation of features, or that this tool replaces by an option.
WITHOUT_EFFECT = ("TEST.FLIP", "TEST.BASELINES", "TEST.PRECISE_BN", "TEST.PER_QUERY")
_FIX = "  fix: save this array with the expected shape and type"


def read_arrays(path: str, *, cameras: bool, protocol: Protocol | None = None) -> dict[str, np.ndarray]:
    """Read the query and gallery arrays of an npz file: name -> array.

    Args:
        path: npz file.
        cameras: True if the arrays of camids are required.
        protocol: evaluation protocol, whose columns are read, too. Default None: no further columns.

    Raises:
        DataError: if the file is missing, damaged or not an npz file, or arrays or columns are missing.
    """
    protocol_columns = list(protocol.columns) if protocol is not None else []
    names = [f"{side}_{column}" for column in COLUMNS for side in SIDES]
    needed = [name for name in names if cameras or "camids" not in name]
    with open_arrays(path, "npz file of plain arrays", fix="write the file with numpy.savez") as archive:
        stored = sorted(name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy"))
        if "split" in stored and not any(name in stored for name in names):
            available = [name.removeprefix(COLUMN_PREFIX) for name in stored if name.startswith(COLUMN_PREFIX)]
            columns = {name: read_array(archive, name) for name in ("split", *COLUMNS) if name in stored}
            columns |= {
                name: read_array(archive, COLUMN_PREFIX + name) for name in protocol_columns if name in available
            }
            arrays = split_arrays(columns)
        else:
            both = (name.removeprefix("query_") for name in stored if name.startswith("query_"))
            available = [name for name in both if f"gallery_{name}" in stored and name not in COLUMNS]
            read_names = [*needed, *(f"{side}_{name}" for name in protocol_columns for side in SIDES)]
            arrays = {name: read_array(archive, name) for name in read_names if name in stored}
    missing = [name for name in needed if name not in arrays]
    if missing:
        text = f"{path} has no {', '.join(missing)}."
        if all("camids" in name for name in missing):
            text += "\n  fix: add them, or set TEST.PROTOCOL to no_camera"
        else:
            text += did_you_mean(missing[0], [name for name in stored if name not in names])
        raise DataError(f"{text}\n  found: {', '.join(stored) or 'nothing'}\n  expected: {', '.join(needed)}")
    if protocol is not None:
        check_columns(available, protocol)
    return arrays


def split_arrays(file: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Split the arrays of an extraction into query and gallery arrays; consecutive rows become views.

    Each unknown camera (-1) is replaced by a unique negative number, so that no images are from the same camera.
    """
    split, arrays = file["split"], {}
    if split.ndim != 1 or split.dtype.kind != "U":
        raise DataError(
            f"split: expected an array of shape (N,) of the strings query and gallery; got {split.dtype} of shape "
            f"{split.shape}.\n{_FIX}"
        )
    for column in dict.fromkeys((*COLUMNS, *file)):
        if column == "split":
            continue
        rows = np.atleast_1d(file.get(column, np.empty(0)))
        if column == "camids" and rows.dtype.kind in "iu":
            rows = np.where(is_missing(rows), -2 - np.arange(len(rows)), rows)
        for side in SIDES:
            chosen = np.flatnonzero(split == side)
            if not len(chosen) or len(rows) != len(split):
                continue
            consecutive = chosen[-1] - chosen[0] == len(chosen) - 1
            arrays[f"{side}_{column}"] = rows[chosen[0] : chosen[-1] + 1] if consecutive else rows[chosen]
    return arrays


def features_of(arrays: dict[str, np.ndarray], side: str) -> torch.Tensor:
    """Return the query or gallery features as a float tensor (N, D).

    Raises:
        DataError: if the array is not numeric or not two-dimensional.
    """
    features = arrays[f"{side}_features"]
    if features.ndim != 2 or features.dtype.kind not in "fiu":
        raise DataError(
            f"{side}_features: expected a numeric array of shape (N, D); got {features.dtype} of shape "
            f"{features.shape}.\n{_FIX}"
        )
    native = features.dtype.newbyteorder("=")
    native = native if native in (np.float16, np.float32, np.float64) else np.dtype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(features, dtype=native))


def numbers_of(arrays: dict[str, np.ndarray], column: str) -> torch.Tensor:
    """Return a column of queries, and then of the gallery, as an int64 tensor ``(Q + G,)``.

    If any value is text that is not an integer, each distinct value is replaced by a number.

    Raises:
        DataError: if an array is neither integers nor text, or not one-dimensional.
    """
    both = []
    for side in SIDES:
        array = arrays[f"{side}_{column}"]
        if array.dtype.kind == "S":
            array = np.char.decode(array, "latin-1")
        # float64 cannot represent every integer above 2^53.
        is_whole = array.dtype.kind == "f" and (np.abs(array) < 2**53).all() and (array == np.round(array)).all()
        if array.ndim != 1 or not (array.dtype.kind in "iuU" or is_whole):
            raise DataError(
                f"{side}_{column}: expected an array of integers or text of shape (N,); got {array.dtype} of shape "
                f"{array.shape}.\n{_FIX}"
            )
        both.append(array if array.dtype.kind == "U" else array.astype(np.int64))
    try:
        values = np.concatenate([array.astype(np.int64) for array in both])
    except (ValueError, OverflowError):
        _, values = np.unique(np.concatenate([array.astype(str) for array in both]), return_inverse=True)
    return torch.from_numpy(values.reshape(-1).astype(np.int64))


def column_of(arrays: dict[str, np.ndarray], column: str) -> tuple[torch.Tensor, tuple[str, ...] | None]:
    """Return the values of a further column of queries and gallery, and the text of each number of a text column.

    Returns:
        ``(values (Q + G,), texts)``: int64 or float32. Texts are numbered in sorted order, and an empty text, which is
        a missing value, is -1; texts are () for integers whose lowest value is -1, which ``fastamp extract`` writes for
        a missing value, and None for other numbers.

    Raises:
        DataError: if an array is neither numbers nor text, or has another length than the identities.
    """
    both = [arrays[f"{side}_{column}"] for side in SIDES]
    for side, array in zip(SIDES, both, strict=True):
        if array.shape != arrays[f"{side}_pids"].shape or array.dtype.kind not in "biufU":
            raise DataError(
                f"{side}_{column}: expected an array of numbers or text of shape {arrays[f'{side}_pids'].shape}; got "
                f"{array.dtype} of shape {array.shape}.\n{_FIX}"
            )
    if all(array.dtype.kind != "U" for array in both):
        values = np.concatenate(both)
        dtype = np.float32 if values.dtype.kind == "f" else np.int64
        return torch.from_numpy(values.astype(dtype)), () if has_missing_integers(values) else None
    texts = np.concatenate([array.astype(str) for array in both])
    names = np.unique(texts[~is_missing(texts)])
    return torch.from_numpy(np.where(is_missing(texts), MISSING, np.searchsorted(names, texts))), tuple(names.tolist())


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
    # With --json, only JSON may be printed on stdout.
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        result, description = compute(path, cfg)
    protocol = Protocol.from_config(cfg)
    metrics = result.metrics()
    name, written = Path(path).stem, []
    if per_query is not None:
        written.append(Path(per_query))
        write_per_query(result, written[0])
    if result.roc is not None:
        written += write_roc(result.roc, protocol.false_accept_rates or (), Path(cfg.OUTPUT_DIR) / "evaluation" / name)
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
    cameras = protocol.rule.uses_cameras or protocol.group_by == CAMERA
    arrays = read_arrays(path, cameras=cameras, protocol=protocol)
    pids = numbers_of(arrays, "pids")
    has_cameras = all(f"{side}_camids" in arrays for side in SIDES)
    columns = {name: column_of(arrays, name) for name in protocol.columns}
    ids = Identities.split(
        len(arrays["query_pids"]),
        pids,
        numbers_of(arrays, "camids") if has_cameras else torch.zeros_like(pids),
        {name: values for name, (values, _) in columns.items()},
        {name: texts for name, (_, texts) in columns.items() if texts is not None},
    )
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
        if key.startswith(WITHOUT_EFFECT):
            fix = (
                "use --per-query OUT.npz"
                if key.startswith("TEST.PER_QUERY")
                else "set it when you compute the features"
            )
            raise ConfigError(f"{key} has no effect on saved features.\n  fix: {fix}")
    if cfg.TEST.ROC.ENABLED:
        with writing(cfg.OUTPUT_DIR):
            Path(cfg.OUTPUT_DIR).mkdir(parents=True, exist_ok=True)
