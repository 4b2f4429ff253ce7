"""Open a gallery: a mutable gallery, or a file of features with its index, which is built if needed."""

import logging
import shlex
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from fastamp.data.datasets.base import DATASET_REGISTRY
from fastamp.data.datasets.custom import PATH_DATASETS
from fastamp.retrieval.features import Features
from fastamp.retrieval.features_file import read_features
from fastamp.retrieval.features_table import SUFFIXES as TABLE_SUFFIXES
from fastamp.retrieval.gallery import Gallery
from fastamp.retrieval.gallery_store import DATABASE_FILE
from fastamp.retrieval.index_file import read_header, read_index, write_index
from fastamp.retrieval.indices import INDEX_REGISTRY, Index, choose_kind, sample_rows
from fastamp.retrieval.mutable_gallery import MutableGallery
from fastamp.utils.errors import ConfigError, DataError, check_choice
from fastamp.utils.plural import plural
from fastamp.utils.progress import track

logger = logging.getLogger(__name__)

_BLOCK = 16_384
_SMALLEST_MEASURED = 11  # 10 neighbors and the query


def check_gallery(gallery: str | PathLike[str]) -> Path:
    """Return the path of a gallery, see ``open_gallery``, or of a folder of images, and check that it exists.

    Raises:
        DataError: if the path does not exist, or names a dataset or a table.
    """
    path = Path(gallery).expanduser()
    is_dataset = not path.exists() and (
        str(gallery) in DATASET_REGISTRY or str(gallery).partition(":")[0] in PATH_DATASETS
    )
    expected = "expected a folder of images, a file with extracted features (.npz) or an index file"
    if is_dataset or (path.suffix in TABLE_SUFFIXES and not path.is_dir()):
        source = "SOURCE" if path.suffix == ".parquet" else shlex.quote(str(gallery))
        raise DataError(
            f"{gallery} is a {'dataset' if is_dataset else 'table'}; {expected}.\n"
            f"  fix: fastamp extract CHECKPOINT {source} -o gallery.npz, and search gallery.npz"
        )
    if not path.exists():
        raise DataError(f"{gallery} not found; {expected}.\n  fix: correct the path")
    return path


def has_features(gallery: str | PathLike[str]) -> bool:
    """Return True for a gallery, see ``open_gallery``; False for a folder of images."""
    path = Path(gallery).expanduser()
    return not path.is_dir() or (path / DATABASE_FILE).is_file()


def open_gallery(
    gallery: str | PathLike[str], *, of: Any = None, index: str | PathLike[str] | None = None, kind: str = "auto"
) -> Gallery:
    """Open a mutable gallery, or a file of features.

    A file of up to 50,000 features is searched without an index. For a larger one, or if ``kind`` names it, the index
    is read from its file, or built and written if it is missing, of another kind or of other features.

    Args:
        gallery: folder of a mutable gallery; file of features, whose name ends in ``.npz``; or index file, next to
            its file of features.
        of: model (``FeatureModel``) that must be that of the gallery. Default: None, no check.
        index: index file of the features. Default: the file next to them with the suffix ``.index``.
        kind: kind of the search, ``"flat"`` or a name in ``INDEX_REGISTRY``. Default: ``"auto"``, that of an existing
            index, or by ``choose_kind``.

    Raises:
        DataError: if a file cannot be read, or is of a different model.
        ConfigError: if the index cannot be written, or ``index`` or ``kind`` is given for a mutable gallery.
    """
    check_choice("kind", kind, ("auto", "flat", *INDEX_REGISTRY))
    path = check_gallery(gallery)
    if (path / DATABASE_FILE).is_file():
        if index is not None or kind != "auto":
            raise ConfigError(
                f"{path} is a mutable gallery, which has its own index: --index and --kind do not apply.\n"
                "  fix: remove --index and --kind"
            )
        opened: MutableGallery | Features = MutableGallery(path)
    elif path.is_dir():
        raise DataError(
            f"{path} is a folder; expected an index file or a file with extracted features.\n"
            f"  fix: fastamp extract CHECKPOINT {path} -o gallery.npz"
        )
    else:
        if path.suffix != ".npz":
            index, path = path, _features_of(path)
        opened = read_features(path)
    if of is not None:
        opened.check_model(of)
    if isinstance(opened, Features):
        opened = with_index(opened, Path(index or path.with_suffix(".index")).expanduser(), kind)
    return opened


def _features_of(index: Path) -> Path:
    """Return the file of the features of an index file, in the same folder."""
    path = index.with_name(Path(read_header(index)["features"]).name or "?")
    if not path.is_file():
        raise DataError(
            f"{path}, the file with the features of the index {index}, is not found.\n"
            f"  fix: move both files to the same folder, or build the index again"
        )
    return path


def with_index(features: Features, path: Path, kind: str = "auto") -> Features:
    """Return features with the index in a file, which is built and written if needed.

    Args:
        features: features in a file.
        path: file of the index.
        kind: see ``open_gallery``.
    """
    stored = read_header(path) if path.exists() else {}
    is_current = stored.get("fingerprint") == features.fingerprint
    if kind == "auto":
        kind = stored["kind"] if is_current else choose_kind(len(features))
    if kind == "flat":
        return features
    if not is_current or stored["kind"] != kind:
        if stored:
            logger.info("the index %s is built again: it is of different features or of a different kind", path)
        built = build_index(features, kind)
        write_index(path, built, features)
        logger.info(
            "wrote %s: %s, index kind %s, recall %.3f", path, plural(len(features), "feature"), kind, built.recall
        )
    return replace(features, index=read_index(path, features))


def build_index(features: Features, kind: str) -> Index:
    """Build the index of features, and measure its recall."""
    count, vectors, model = len(features), features.vectors, features.model
    index: Index = INDEX_REGISTRY.get(kind).create(count, model.width, model.metric)
    if not index.faiss.is_trained:
        index.faiss.train(vectors.block(sample_rows(count)))
    starts = range(0, count, _BLOCK)
    for start in track(starts, len(starts), f"indexing {count} features ({kind})"):
        index.faiss.add(vectors.block(slice(start, start + _BLOCK)))
    if count >= _SMALLEST_MEASURED:
        index.measure(vectors)
    return index
