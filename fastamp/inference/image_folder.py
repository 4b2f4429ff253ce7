"""Search in a folder of images, whose features are computed, and stored in a file if there are many."""

import logging
import os
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fastamp.inference.image_list import image_paths
from fastamp.retrieval.columns import ImageColumns
from fastamp.retrieval.features import Features
from fastamp.retrieval.features_file import read_features
from fastamp.retrieval.gallery import Gallery
from fastamp.retrieval.model_id import ModelId
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
    out = target.parent / ".".join(filter(None, (target.name, model.default_modality, model.config_hash, "npz")))
    files = image_paths([folder])
    if index is None and len(files) <= _IN_MEMORY_UP_TO and not os.path.lexists(out):
        return _compute(folder, files, model)
    if not os.path.lexists(out) or not _is_current(folder, files, out, model):
        logger.info("extracting the features of the images in %s to %s, for this and later searches", folder, out)
        try:
            _warn_skipped(model.extract_folder(folder, out))
        except WriteError as error:
            raise WriteError(
                f"{summarize_error(error)}\n"
                "  fix: choose the folder of the features and the index: --index FOLDER/gallery.index"
            ) from error
    return open_gallery(out, of=model, index=index, kind=kind)


def _compute(folder: Path, files: list[str], model: "FeatureModel") -> Features:
    """Compute the features of images in memory."""
    readable, features, faults = model.readable_features(files)
    if not readable:
        raise DataError(
            f"{folder}: none of the {len(files)} images can be read; first error: {faults[0]}\n"
            "  fix: choose a folder that contains image files"
        )
    _warn_skipped(faults)
    unknown = np.full(len(readable), -1)
    images = ImageColumns(paths=np.array(readable), pids=unknown, camids=unknown)
    model_id = ModelId(features.shape[1], model.metric, model.config_hash, str(model.checkpoint))
    return Features(folder, features.numpy(), images, model_id)


def _is_current(folder: Path, files: list[str], out: Path, model: "FeatureModel") -> bool:
    """Return True if an earlier extraction of the images in a folder has those that it contains now, unchanged.

    Raises:
        ConfigError: if the file is not such an extraction, because a new extraction would overwrite it.
    """
    prefix = os.path.join(os.path.abspath(folder), "")
    try:
        features = read_features(out)
        features.check_model(model)
        paths = features.images.paths.tolist()
        others = [path for path in paths if not os.path.abspath(path).startswith(prefix)]
        if features.images.split is not None or others:
            raise DataError(
                f"it is the extraction of a dataset, or has features of other images, e.g. {(others or paths)[0]}\n"
                "  fix: choose another file"
            )
    except DataError as error:
        raise ConfigError(
            f"cannot write the features of the images in {folder} to {out}: this file exists and is not an extraction "
            f"of this folder.\n  cause: {summarize_error(error)}\n"
            "  fix: rename or delete the file, or choose another index (--index)"
        ) from error
    # The inode change time detects moved files, too. Unreadable images are not in the extraction.
    changed = out.stat().st_mtime
    states = [os.stat(file, follow_symlinks=os.path.exists(file)) for file in files]  # links may be broken
    return {*paths} <= {*files} and all(max(state.st_mtime, state.st_ctime) <= changed for state in states)


def _warn_skipped(faults: list[str]) -> None:
    if faults:
        logger.warning(
            "skipped %s of the gallery that cannot be read: %s.\n"
            "  fix: restore the files, or remove them from the folder",
            plural(len(faults), "image"),
            "; ".join(faults[:10]),
        )
