"""Gallery index: nearest-neighbor search with faiss in a memory-mapped file."""

import logging
import math
import os
import shlex
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from fastamp.data.datasets.base import DATASET_REGISTRY
from fastamp.data.datasets.custom import PATH_DATASETS, image_files
from fastamp.layers.distance import squared_norms
from fastamp.retrieval.attribute_search import attribute_columns, has_attributes, parse_query, score
from fastamp.retrieval.features_file import (
    COLUMN_PREFIX,
    Extraction,
    check_columns,
    check_same_model,
    further_columns,
    map_array,
    open_arrays,
    read_extraction,
    text_of,
    write_arrays,
)
from fastamp.retrieval.features_table import SUFFIXES as TABLE_SUFFIXES
from fastamp.retrieval.gallery_store import DATABASE_FILE
from fastamp.utils.choices import EF_SEARCH, INDEX_KINDS, PROBED
from fastamp.utils.errors import ConfigError, DataError, WriteError, check_choice, summarize_error, writing
from fastamp.utils.files import write_atomically
from fastamp.utils.plural import plural
from fastamp.utils.progress import track

logger = logging.getLogger(__name__)

# Maximum number of features for exact search, and for HNSW; larger galleries use IVF.
FLAT_UP_TO = 50_000
HNSW_UP_TO = 200_000
_NEIGHBORS, _EF_CONSTRUCTION = 16, 40
_TRAINED_ON = 40  # features per list
_BLOCK = 16_384
# Features compared at once, so that they and their copy fit into the CPU cache.
_COMPARED_ROWS = 4096
_BUILD_AGAIN = "choose another file, or delete this one and build the index again"
_META = (
    "paths",
    "pids",
    "camids",
    "boxes",
    "cameras",
    "config_hash",
    "checkpoint",
    "metric",
    "kind",
    "fingerprint",
    "size",
    "crc",
)
_OPTIONAL = ("boxes", "cameras")


@dataclass(frozen=True)
class SearchResult:
    """The k nearest gallery images for each of Q queries, nearest first.

    Attributes:
        scores: (Q, k) float32, cosine similarities in -1..1, Euclidean distances, or probabilities of attributes.
        rows: (Q, k) int64, indices in the gallery.
        paths: (Q, k) str, paths of the image files.
        pids: (Q, k) int64 or str, -1 for unknown identities.
        camids: (Q, k) int64, -1 for unknown cameras.
        boxes: (Q, k, 4) int64, box of each image in its file; None if each image is an entire file.
        metric: ``"cosine"``, ``"euclidean"`` or ``"attributes"``.
        cameras: (Q, k) str, cameras as named in the dataset; None if they have no names besides ``camids``.
        columns: further columns of the gallery images, see ``Extraction``: name -> (Q, k) or (Q, k, L).
        known: (Q,) bool, True if the nearest gallery image is accepted, False if the identity of the query is unknown;
            None without a calibration of the model.
        threshold: score from which the nearest gallery image is accepted; None without a calibration.
        fpir: expected false-positive identification rate in 0..1 with this gallery, see ``Calibration.expected_fpir``;
            None without a calibration.
        searched: number of gallery images that the queries were compared with; None without a calibration.
        probabilities: (Q, k) float64, probability in 0..1 of the same identity at a prior of 0.5; None without a
            calibration.
    """

    scores: np.ndarray
    rows: np.ndarray
    paths: np.ndarray
    pids: np.ndarray
    camids: np.ndarray
    boxes: np.ndarray | None
    metric: str
    cameras: np.ndarray | None = None
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    known: np.ndarray | None = None
    threshold: float | None = None
    fpir: float | None = None
    searched: int | None = None
    probabilities: np.ndarray | None = None


class GalleryIndex:
    """Gallery index, created by ``build_index``, ``load_index`` or ``open_gallery``.

    Attributes:
        kind: ``"flat"``: exact search; ``"ivf"``: search in the inverted lists nearest to the query; ``"hnsw"``: search
            in a neighbor graph.
        metric: ``"cosine"`` or ``"euclidean"``.
        config_hash, checkpoint: hash and checkpoint of the model, see ``Extraction``.
        fingerprint: fingerprint of the extraction, see ``Extraction``.
    """

    def __init__(self, path: Path, index: Any, meta: dict[str, np.ndarray]) -> None:
        self.path, self._index = path, index
        self.kind, self.metric, self.config_hash, self.checkpoint, self.fingerprint = (
            str(meta[name]) for name in ("kind", "metric", "config_hash", "checkpoint", "fingerprint")
        )
        self._columns = {name: meta.get(name) for name in ("paths", "pids", "camids", "boxes", "cameras")}
        self._further = further_columns(meta)

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """Further columns of the images, see ``Extraction``."""
        return self._further

    @property
    def width(self) -> int:
        """Dimension D of the features."""
        return int(self._index.d)

    def search(
        self,
        features: Tensor | np.ndarray,
        k: int = 10,
        *,
        effort: int | None = None,
        exact: bool = False,
        rows: np.ndarray | None = None,
    ) -> SearchResult:
        """Search for the nearest gallery images.

        Args:
            features: (Q, D) float, features from the same model, not normalized.
            k: number of results per query; limited to the size of the gallery. Default: 10.
            effort: number of lists to search for ``ivf`` (nprobe), or number of candidates for ``hnsw`` (efSearch);
                larger values increase recall and search time. Default: depends on the kind of index.
            exact: if True, compare with all features, regardless of the kind of index. Default: False.
            rows: (M,) int64, indices of the gallery images to compare with, always exactly. Default: None, all.

        Returns:
            The k nearest gallery images for each query.

        Raises:
            ConfigError: if ``k`` or ``effort`` is below 1.
            DataError: if the features have a wrong dimension or are not finite.
        """
        if k < 1 or (effort is not None and effort < 1):
            raise ConfigError(
                f"k and effort must be at least 1; got k={k} and effort={effort}.\n"
                "  fix: increase k (--top) or effort (--effort)"
            )
        features = np.ascontiguousarray(torch.as_tensor(features).float().cpu().numpy())
        if features.ndim != 2 or features.shape[1] != self.width or not np.isfinite(features).all():
            raise DataError(
                f"query features must be finite and have shape (Q, {self.width}); got shape {features.shape} with "
                f"{np.count_nonzero(~np.isfinite(features))} non-finite values.\n"
                "  fix: extract the query features with the model of the gallery"
            )
        if self.metric == "cosine":
            features = _normalized(features)
        if rows is None:
            values, rows = self._search(features, min(k, len(self)), effort, exact)
        else:
            values, rows = self._search_rows(features, min(k, len(rows)), rows)
        # Rounding may increase a similarity above 1 and decrease a squared distance below 0.
        scores = values.clip(-1, 1) if self.metric == "cosine" else np.sqrt(values.clip(min=0))
        return self._result(scores, rows, self.metric)

    def search_attributes(self, query: str, k: int = 10) -> SearchResult:
        """Search for the gallery images with attributes, by the product of their probabilities.

        Args:
            query: attributes separated by commas, e.g. ``"red upper, hat"``, see ``parse_query``.
            k: number of results; limited to the size of the gallery. Default: 10.

        Returns:
            Result of one query, with ``metric`` ``"attributes"``.

        Raises:
            ConfigError: if ``k`` is below 1, the gallery has no attributes, or none matches a term.
        """
        if k < 1:
            raise ConfigError(f"k must be at least 1; got k={k}.\n  fix: increase k (--top)")
        probabilities = attribute_columns(self.columns, self.path)
        scores = score(probabilities, parse_query(query, tuple(probabilities)))
        rows = np.argsort(-scores, kind="stable")[:k]
        return self._result(scores[rows].astype(np.float32)[None], rows[None], "attributes")

    def rows_with_attributes(self, query: str, threshold: float) -> np.ndarray:
        """Return the indices (M,) int64 of the gallery images with attributes.

        Args:
            query: see ``search_attributes``.
            threshold: probability in 0..1 from which an attribute is predicted.

        Raises:
            ConfigError: see ``search_attributes``.
        """
        probabilities = attribute_columns(self.columns, self.path)
        return np.flatnonzero(has_attributes(probabilities, parse_query(query, tuple(probabilities)), threshold))

    def rows_where(self, **conditions: Any) -> np.ndarray:
        """Return the rows of the images that meet conditions; only of a ``MutableGallery``.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"{self.path} cannot be limited by {', '.join(conditions)}: it is not a mutable gallery.\n"
            "  fix: add the images to one (fastamp gallery add)"
        )

    def _result(self, scores: np.ndarray, rows: np.ndarray, metric: str) -> SearchResult:
        """Build the result with the scores (Q, k) and the rows (Q, k)."""
        columns: dict[str, Any] = {
            name: None if column is None else column[rows] for name, column in self._columns.items()
        }
        columns["columns"] = {name: column[rows] for name, column in self.columns.items()}
        return SearchResult(scores=scores, rows=rows, metric=metric, **columns)

    def _search(self, features: np.ndarray, k: int, effort: int | None, exact: bool) -> tuple[np.ndarray, np.ndarray]:
        """Search with faiss, and return (Q, k) similarities or squared distances, and (Q, k) rows."""
        index = self._index
        if exact or self.kind == "flat":
            return self._search_all(features, k)
        import faiss

        if self.kind == "ivf":
            parameters = faiss.SearchParametersIVF(nprobe=min(effort or math.ceil(PROBED * index.nlist), index.nlist))
        else:
            parameters = faiss.SearchParametersHNSW(efSearch=max(effort or EF_SEARCH, k))
        values, rows = index.search(features, k, params=parameters)
        incomplete = (rows < 0).any(1)  # the probed lists contain fewer than k features
        if incomplete.any():
            values[incomplete], rows[incomplete] = self._search_all(features[incomplete], k)
        return values, rows

    def _search_rows(self, features: np.ndarray, k: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compare the queries with the features of ``rows``; k is at most their number."""
        import faiss

        selected = faiss.IDSelectorBatch(np.ascontiguousarray(rows, dtype=np.int64))
        if self.kind == "ivf":
            index, parameters = self._index, faiss.SearchParametersIVF(sel=selected, nprobe=self._index.nlist)
        else:
            index = faiss.downcast_index(self._index.storage) if self.kind == "hnsw" else self._index
            parameters = faiss.SearchParameters(sel=selected)
        values, indices = index.search(features, k, params=parameters)
        return values, indices

    def _search_all(self, features: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Compare the queries with all features: by matrix products of blocks, or for ``ivf`` by searching all lists.

        Compared to matrix products, the flat search of faiss took 3 to 18 times as long for 8 to 64 queries and
        50,000 features of dimension 512.
        """
        import faiss

        if self.kind == "ivf":
            values, indices = self._index.search(
                features, k, params=faiss.SearchParametersIVF(nprobe=self._index.nlist)
            )
            return values, indices
        storage = faiss.downcast_index(self._index.storage) if self.kind == "hnsw" else self._index
        gallery = faiss.rev_swig_ptr(storage.get_xb(), len(self) * self.width).reshape(len(self), self.width)
        queries = torch.from_numpy(features)
        buffer = torch.empty(min(_COMPARED_ROWS, len(self)), self.width)
        best, rows = torch.empty(len(features), 0), torch.empty(len(features), 0, dtype=torch.int64)
        for start in range(0, len(self), _COMPARED_ROWS):
            block = buffer[: min(_COMPARED_ROWS, len(self) - start)]
            block.numpy()[:] = gallery[
                start : start + len(block)
            ]  # copy, because the data in the file may be unaligned
            values = queries @ block.T
            if self.metric == "euclidean":
                values = 2 * values - squared_norms(block)
            values, indices = values.topk(min(k, len(block)), dim=1)
            best, rows = torch.cat((best, values), 1), torch.cat((rows, indices + start), 1)
            best, order = best.topk(min(k, best.shape[1]), dim=1)
            rows = rows.gather(1, order)
        if self.metric == "euclidean":  # avoids cancellation in the difference of large squares
            difference = features[:, None] - gallery[rows.numpy()]
            best = torch.from_numpy(np.einsum("qkd,qkd->qk", difference, difference))
            best, order = best.sort(dim=1, stable=True)
            rows = rows.gather(1, order)
        return best.numpy(), rows.numpy()


def choose_kind(count: int) -> str:
    """Choose the kind of index for the given number of features."""
    if count <= FLAT_UP_TO:
        return "flat"
    return "hnsw" if count <= HNSW_UP_TO else "ivf"


def build_index(extraction: Extraction, out: str | PathLike[str], *, kind: str = "auto") -> GalleryIndex:
    """Build the index of an extraction and write it atomically.

    Args:
        extraction: extraction with the features to index; they are normalized for ``cosine``.
        out: index file to write.
        kind: one of ``INDEX_KINDS``, or ``"auto"`` (default) to choose by ``choose_kind``.

    Returns:
        The index, loaded from the file.

    Raises:
        ConfigError: if the file cannot be written, or the kind is unknown.
        DataError: if a feature is not finite.
    """
    check_choice("kind", kind, ("auto", *INDEX_KINDS))
    out = Path(out).expanduser()
    kind = choose_kind(len(extraction.features)) if kind == "auto" else kind
    with writing(out):
        if out.is_dir() or not out.parent.is_dir():
            raise ConfigError(
                f"cannot write the index to {out}: expected a file in an existing folder.\n"
                "  fix: choose another file, or create the folder"
            )
    meta = {name: getattr(extraction, name, None) for name in _META} | {"kind": kind}
    meta |= {COLUMN_PREFIX + name: column for name, column in extraction.columns.items()}
    with writing(out):
        write_atomically(out, lambda file: _write(file, _build_filled(kind, extraction), meta))
    count, width = extraction.features.shape
    logger.info("wrote %s: %s of dimension %d, index kind %s", out, plural(count, "feature"), width, kind)
    return load_index(out, verify=False)


def load_index(path: str | PathLike[str], *, verify: bool = True) -> GalleryIndex:
    """Load a memory-mapped index.

    Args:
        path: file written by ``build_index``.
        verify: if True, read the entire file and verify its checksum, because faiss crashes on invalid graph links.
            Default: True.

    Returns:
        The index.

    Raises:
        DataError: if the file is missing, is truncated or damaged, or is not an index.
    """
    import faiss

    path = Path(path).expanduser()
    with open_arrays(path, "index", fix=_BUILD_AGAIN) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        missing = [name for name in _META if name not in _OPTIONAL and name not in names]
        if missing:
            raise ValueError(f"missing entries: {', '.join(missing)}")
        if verify and (record := archive.testzip()):
            raise ValueError(f"checksum mismatch in {record}")
        meta = {name: map_array(archive, name) for name in names if name in _META or name.startswith(COLUMN_PREFIX)}
        size, crc = (_number(path, name, meta[name]) for name in ("size", "crc"))
        with open(path, "rb") as file:
            if verify and _checksum(file, size) != crc:
                raise ValueError("checksum mismatch in the faiss index")
        # Older versions of faiss map only the lists of an IVF index, and read other kinds into memory.
        index = faiss.read_index(str(path), getattr(faiss, "IO_FLAG_MMAP_IFC", faiss.IO_FLAG_MMAP))
    _check_parts(path, index, meta)
    return GalleryIndex(path, index, meta)


def _number(path: Path, name: str, array: np.ndarray) -> int:
    if array.shape != () or array.dtype.kind not in "iu":
        raise DataError(
            f"{path}: expected {name} to be an integer, got {array.dtype} {array.shape}.\n  fix: {_BUILD_AGAIN}"
        )
    return int(array)


def _check_parts(path: Path, index: Any, meta: dict[str, np.ndarray]) -> None:
    """Check that the faiss index matches the metadata of the file.

    Raises:
        DataError: if the kind, the metric or the number of images does not match.
    """
    import faiss

    names = ("kind", "metric", "config_hash", "checkpoint", "fingerprint")
    texts = {name: text_of(path, name, meta[name], fix=_BUILD_AGAIN) for name in names}
    classes = {"flat": faiss.IndexFlat, "ivf": faiss.IndexIVFFlat, "hnsw": faiss.IndexHNSWFlat}
    metrics = {"cosine": faiss.METRIC_INNER_PRODUCT, "euclidean": faiss.METRIC_L2}
    kind, metric = texts["kind"], texts["metric"]
    if kind not in classes or not isinstance(index, classes[kind]) or index.metric_type != metrics.get(metric):
        raise DataError(
            f"{path}: the index does not match its metadata: expected kind {kind!r} and metric {metric!r}, got "
            f"{type(index).__name__} with faiss metric {index.metric_type}.\n  fix: {_BUILD_AGAIN}"
        )
    check_columns(path, meta, index.ntotal, fix=_BUILD_AGAIN)


def check_gallery(gallery: str | PathLike[str]) -> Path:
    """Return the path of a gallery, see ``open_gallery``, and check that it exists.

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
    """Return True for a gallery, see ``open_gallery``, that has features; False for a folder of images."""
    path = Path(gallery).expanduser()
    return not path.is_dir() or (path / DATABASE_FILE).is_file()


def open_gallery(
    gallery: str | PathLike[str], *, of: Any = None, index: str | PathLike[str] | None = None, kind: str = "auto"
) -> GalleryIndex:
    """Load a mutable gallery, an index file, or the index of an extraction file, which is built if missing or outdated.

    The features of a folder of images are extracted to a file next to it, ``FOLDER.HASH.npz`` with the hash of the
    model, or next to ``index``, ``INDEX.HASH.npz``. Later calls use this file, unless the images have changed. If
    MODEL.BACKBONE.MODALITY is set, it precedes the hash.

    Args:
        gallery: mutable gallery; index file; extraction file, whose name ends in ``.npz``; or folder of images.
        of: model that must match the model of the gallery; required for a folder. Default: None, no check.
        index: index file of an extraction. Default: the file next to the extraction with the suffix ``.index``.
        kind: kind of index to build, see ``build_index``. An existing index of a different kind is replaced.
            Default: ``"auto"``, which accepts an existing index of any kind.

    Returns:
        The index.

    Raises:
        DataError: if a file cannot be read, or was created with a different model.
        ConfigError: if the index cannot be written, the features of a folder would overwrite a different file, or
            ``index`` or ``kind`` is given for a mutable gallery.
    """
    path = check_gallery(gallery)
    if (path / DATABASE_FILE).is_file():
        return _open_mutable(path, of, index, kind)
    if path.is_dir():
        if of is None:
            raise DataError(
                f"{path} is a folder; expected an index file or a file with extracted features.\n"
                f"  fix: fastamp extract CHECKPOINT {path} -o gallery.npz, or pass the predictor (of=...)"
            )
        if not hasattr(of, "cfg"):  # an exported file
            raise ConfigError(
                f"{path} is a folder of images, which {of.checkpoint} cannot extract.\n"
                f"  fix: use the checkpoint, or fastamp gallery add NAME.gallery {path} --model {of.checkpoint}"
            )
        path = _extract_folder(path, of, index)
    if path.suffix != ".npz":
        return load_index(path)
    extraction = read_extraction(path)
    if of is not None:
        check_same_model(extraction, of.config_hash, of.checkpoint)
    out = Path(index).expanduser() if index is not None else path.with_suffix(".index")
    if out.exists():
        existing = load_index(out)
        if existing.fingerprint == extraction.fingerprint and kind in ("auto", existing.kind):
            return existing
        logger.info(
            "rebuilding the index %s, because it was built from different features or is of a different kind", out
        )
    return build_index(extraction, out, kind=kind)


def _open_mutable(path: Path, of: Any, index: str | PathLike[str] | None, kind: str) -> GalleryIndex:
    """Open a mutable gallery; see ``open_gallery``."""
    from fastamp.inference.gallery import MutableGallery  # a subclass of GalleryIndex

    if index is not None or kind != "auto":
        raise ConfigError(
            f"{path} is a mutable gallery, which has its own index: --index and --kind do not apply.\n"
            "  fix: remove --index and --kind"
        )
    gallery = MutableGallery(path)
    if of is not None:
        check_same_model(gallery, of.config_hash, of.checkpoint)
    return gallery


def _extract_folder(folder: Path, predictor: Any, index: str | PathLike[str] | None) -> Path:
    """Extract the images in a folder, or find the file of an earlier extraction; see ``open_gallery``."""
    from fastamp.inference.extract import extract  # imports the predictor, which imports this module

    folder = folder.absolute()
    target = folder if index is None else Path(index).expanduser().with_suffix("")
    modality = predictor.cfg.MODEL.BACKBONE.MODALITY if predictor.modality_column else ""
    out = target.parent / f"{target.name}{f'.{modality}' if modality else ''}.{predictor.config_hash}.npz"
    if os.path.lexists(out):
        stored = _read_extraction_of(folder, out, predictor.config_hash)
        files, changed = image_files(folder), out.stat().st_mtime
        # The inode change time detects moved files, too. Unreadable images are not in the extraction.
        states = [os.stat(file, follow_symlinks=os.path.exists(file)) for file in files]  # links may be broken
        is_current = all(max(state.st_mtime, state.st_ctime) <= changed for state in states)
        if is_current and {*stored.paths.tolist()} <= {*files}:
            return out
    if not os.access(out.parent, os.W_OK):
        raise ConfigError(
            f"cannot write the features of the images in {folder} to {out}: the folder is not writable.\n"
            "  fix: choose a file in another folder with --index"
        )
    logger.info("extracting the features of the images in %s to %s, for this and later searches", folder, out)
    try:
        _, skipped = extract(predictor, folder, out, skip_corrupt=True)
    except WriteError as error:
        raise WriteError(
            f"{summarize_error(error)}\n"
            "  fix: choose the folder of the features and the index: --index FOLDER/gallery.index"
        ) from error
    if skipped:
        logger.warning(
            "skipped %s of the gallery that cannot be read: %s.\n"
            "  fix: restore the files, or remove them from the folder",
            plural(len(skipped), "image"),
            "; ".join(skipped[:10]),
        )
    return out


def _read_extraction_of(folder: Path, path: Path, config_hash: str) -> Extraction:
    """Read an earlier extraction of the images in a folder.

    Raises:
        ConfigError: if the file is not such an extraction, because a new extraction would overwrite it.
    """
    cause, prefix = "", os.path.join(os.path.abspath(folder), "")
    try:
        extraction = read_extraction(path)
        other = next((path for path in extraction.paths.tolist() if not os.path.abspath(path).startswith(prefix)), None)
        if extraction.config_hash != config_hash:
            cause = f"it was extracted with a different model: {extraction.checkpoint} ({extraction.config_hash})"
        elif extraction.split is not None:
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
    return extraction


def _build_filled(kind: str, extraction: Extraction) -> Any:
    """Build a faiss index and add all features."""
    index, count = _build_empty(kind, extraction), len(extraction.features)
    starts = range(0, count, _BLOCK)
    for start in track(starts, len(starts), f"indexing {count} features ({kind})"):
        index.add(_load_features(extraction, slice(start, start + _BLOCK)))
    return index


def _build_empty(kind: str, extraction: Extraction) -> Any:
    """Build and train a faiss index without adding features."""
    import faiss

    count, width = extraction.features.shape
    metric = faiss.METRIC_INNER_PRODUCT if extraction.metric == "cosine" else faiss.METRIC_L2
    if kind == "flat":
        return faiss.IndexFlat(width, metric)
    if kind == "hnsw":
        index = faiss.IndexHNSWFlat(width, _NEIGHBORS, metric)
        index.hnsw.efConstruction = _EF_CONSTRUCTION
        return index
    # The power of 2 nearest to sqrt(count). Twice as many lists would take four times as long to train.
    lists = 2 ** round(math.log2(count) / 2)
    index = faiss.index_factory(width, f"IVF{lists},Flat", metric)
    index.cp.spherical = extraction.metric == "cosine"
    index.cp.min_points_per_centroid = 1
    chosen = np.random.default_rng(0).choice(count, min(count, lists * _TRAINED_ON), replace=False)
    index.train(_load_features(extraction, np.sort(chosen)))
    return index


def _load_features(extraction: Extraction, chosen: slice | np.ndarray) -> np.ndarray:
    """Load the ``chosen`` rows of the features; normalize them for ``cosine``."""
    features = np.array(extraction.features[chosen], dtype=np.float32)  # aligned copy
    if not np.isfinite(features).all():
        raise DataError(
            f"the features in {extraction.path} are not finite.\n  fix: create the file with fastamp extract"
        )
    return _normalized(features) if extraction.metric == "cosine" else features


def _normalized(features: np.ndarray) -> np.ndarray:
    return torch.nn.functional.normalize(torch.from_numpy(features), dim=1).numpy()


def _write(file: IO[bytes], index: Any, meta: dict[str, Any]) -> None:
    """Write the faiss index, which must be at the start of the file, and then an npz archive with the metadata."""
    import faiss

    crc, failures = 0, []

    def write(part: bytes) -> int:
        nonlocal crc
        crc = zlib.crc32(part, crc)
        try:
            return file.write(part)
        except OSError as error:
            failures.append(error)
            raise

    try:
        faiss.write_index(index, faiss.PyCallbackIOWriter(write, 2**24))
    except Exception as error:
        raise (failures[0] if failures else error) from None
    meta = meta | {"size": file.tell(), "crc": crc}
    write_arrays(file, {name: np.asarray(value) for name, value in meta.items() if value is not None})


def _checksum(file: IO[bytes], size: int) -> int:
    crc = 0
    while size:
        part = file.read(min(size, 2**24))
        if not part:
            break
        size -= len(part)
        crc = zlib.crc32(part, crc)
    return crc
