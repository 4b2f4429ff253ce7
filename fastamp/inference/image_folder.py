"""Search in a folder of images, whose features are computed, and stored in a file if there are many."""

import logging
import os
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fastamp.data.datasets.custom import image_files
from fastamp.inference.readable import compute_readable
from fastamp.retrieval.columns import ImageColumns
from fastamp.retrieval.features import Features
from fastamp.retrieval.features_file import read_features
from fastamp.retrieval.gallery import Gallery
from fastamp.retrieval.open_gallery import has_features, open_gallery
from fastamp.utils.errors import ConfigError, DataError, WriteError, summarize_error
from fastamp.utils.plural import plural

if TYPE_CHECKING:
    from fastamp.inference.feature_model import FeatureModel

logger = logging.getLogger(__name__)

# Maximum number of images whose features are computed for each search instead of being stored in a file.
_IN_MEMORY_UP_TO = 200


def open_source(
    gallery: str | PathLike[str],
    model: "FeatureModel",
    *,
    index: str | PathLike[str] | None = None,
    kind: str = "auto",
) -> Gallery:
    """Open a gallery, or a folder of images.

    The features of up to 200 images in a folder are computed in memory. Those of more images, or if ``index`` is given,
    are extracted to a file next to the folder, ``FOLDER.HASH.npz`` with the hash of the model, or next to ``index``,
    ``INDEX.HASH.npz``. Later calls use this file, unless the images have changed. If MODEL.BACKBONE.MODALITY is set, it
    precedes the hash. Images that cannot be read are skipped with a warning.

    Args:
        gallery: see ``open_gallery``; or folder of images, including those in subfolders.
        model: model of the gallery.
        index, kind: see ``open_gallery``.

    Raises:
        DataError: see ``open_gallery``; also if none of the images can be read.
        ConfigError: see ``open_gallery``; also if the features would overwrite a different file, or an exported model
            would have to write them.
    """
    if has_features(gallery):
        return open_gallery(gallery, of=model, index=index, kind=kind)
    folder = Path(gallery).expanduser().absolute()
    target = folder if index is None else Path(index).expanduser().with_suffix("")
    modality = model.default_modality
    out = target.parent / f"{target.name}{f'.{modality}' if modality else ''}.{model.config_hash}.npz"
    files = image_files(folder)
    if index is None and len(files) <= _IN_MEMORY_UP_TO and not os.path.lexists(out):
        return _compute(folder, files, model)
    if not _is_current(folder, files, out, model.config_hash):
        _extract(folder, out, model)
    return open_gallery(out, of=model, index=index, kind=kind)


def _compute(folder: Path, files: list[str], model: "FeatureModel") -> Features:
    """Compute the features of images in memory."""
    parts, faults = list[tuple[list[str], Tensor]](), list[str]()
    for start in range(0, len(files), model.batch_size):
        computed, failed = compute_readable(files[start : start + model.batch_size], model.require_features)
        parts, faults = parts + computed, faults + failed
    if not parts:
        cause = f"none of the {len(files)} images can be read; first error: {faults[0]}" if files else "no images found"
        raise DataError(f"{folder}: {cause}\n  fix: choose a folder that contains image files")
    _warn_skipped([fault.partition("\n  fix:")[0].replace("\n  ", "; ") for fault in faults])
    paths = np.array([path for readable, _ in parts for path in readable])
    unknown = np.full(len(paths), -1)
    matrix = torch.cat([features for _, features in parts]).numpy()
    return Features(folder, matrix, ImageColumns(paths=paths, pids=unknown, camids=unknown), model.model_id)


def _is_current(folder: Path, files: list[str], out: Path, config_hash: str) -> bool:
    """Return True if a file contains the features of the images in a folder, which have not changed since.

    Raises:
        ConfigError: if the file has other features.
    """
    if not os.path.lexists(out):
        return False
    stored, changed = _read_stored(folder, out, config_hash), out.stat().st_mtime
    # The inode change time detects moved files, too. Unreadable images are not in the extraction.
    states = [os.stat(file, follow_symlinks=os.path.exists(file)) for file in files]  # links may be broken
    is_unchanged = all(max(state.st_mtime, state.st_ctime) <= changed for state in states)
    return is_unchanged and {*stored.images.paths.tolist()} <= {*files}


def _extract(folder: Path, out: Path, model: "FeatureModel") -> None:
    """Extract the images in a folder to a file."""
    logger.info("extracting the features of the images in %s to %s, for this and later searches", folder, out)
    try:
        _warn_skipped(model.extract_folder(folder, out))
    except WriteError as error:
        raise WriteError(
            f"{summarize_error(error)}\n"
            "  fix: choose the folder of the features and the index: --index FOLDER/gallery.index"
        ) from error


def _warn_skipped(faults: list[str]) -> None:
    if faults:
        logger.warning(
            "skipped %s of the gallery that cannot be read: %s.\n"
            "  fix: restore the files, or remove them from the folder",
            plural(len(faults), "image"),
            "; ".join(faults[:10]),
        )


def _read_stored(folder: Path, path: Path, config_hash: str) -> Features:
    """Read an earlier extraction of the images in a folder.

    Raises:
        ConfigError: if the file is not such an extraction, because a new extraction would overwrite it.
    """
    cause, prefix = "", os.path.join(os.path.abspath(folder), "")
    try:
        features = read_features(path)
        images, model = features.images, features.model
        other = next((path for path in images.paths.tolist() if not os.path.abspath(path).startswith(prefix)), None)
        if model.config_hash != config_hash:
            cause = f"it was extracted with a different model: {model.checkpoint} ({model.config_hash})"
        elif images.split is not None:
            cause = "it is the extraction of a dataset"
        elif other is not None:
            cause = f"it contains features of other images: {other}"
    except DataError as error:
        cause = str(error).split("\n")[0]
    if cause:
        raise ConfigError(
            f"cannot write the features of the images in {folder} to {path}: this file exists and is not an extraction "
            f"of this folder.\n  cause: {cause}\n  fix: rename or delete the file, or choose another index (--index)"
        )
    return features
