"""Search among the features of a gallery: a faiss index in one file, which is mapped into memory."""

import logging
import math
import zlib
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from fastamp.inference.features_file import (
    Extraction,
    check_columns,
    check_same_model,
    map_array,
    open_arrays,
    read_extraction,
    text_of,
    write_arrays,
)
from fastamp.layers.distance import squared_norms
from fastamp.utils.errors import ConfigError, DataError, check_choice, writing
from fastamp.utils.files import write_atomically
from fastamp.utils.moved import moved_names
from fastamp.utils.progress import track

__getattr__ = moved_names(
    __name__,
    {
        "kind_for": "fastamp.inference.index.choose_kind",
    },
)

logger = logging.getLogger(__name__)

KINDS = ("flat", "ivf", "hnsw")
# Up to so many features every one is compared with a query; beyond, a share of them.
FLAT_UP_TO = 50_000
HNSW_UP_TO = 200_000
# The share of its lists that an IVF search looks into, and candidates that an HNSW search keeps; see README.md for what
# they find.
PROBED, EF_SEARCH = 0.2, 128
_NEIGHBORS, _EF_CONSTRUCTION = 16, 40
_TRAINED_ON = 40  # features for each list
_BLOCK = 16_384
# Features that are compared at once: they and their copy stay in the cache.
_COMPARED_ROWS = 4096
_BUILD_AGAIN = "name another file, or remove this one and build the index again"
_META = (
    "paths",
    "pids",
    "camids",
    "boxes",
    "config_hash",
    "checkpoint",
    "metric",
    "kind",
    "fingerprint",
    "size",
    "crc",
)


@dataclass(frozen=True)
class SearchResult:
    """The k gallery images nearest to each of Q queries, the nearest first.

    Attributes:
        scores: (Q, k) float32, cosine similarities in -1..1, or Euclidean distances.
        rows: (Q, k) int64, the images' places in the gallery.
        paths: (Q, k) text.
        pids: (Q, k) int64 or text, -1 where the identity is not known.
        camids: (Q, k) int64, -1 where the camera is not known.
        boxes: (Q, k, 4) int64, the part of the file that is the image; None where all are whole.
        metric: ``cosine`` or ``euclidean``.
    """

    scores: np.ndarray
    rows: np.ndarray
    paths: np.ndarray
    pids: np.ndarray
    camids: np.ndarray
    boxes: np.ndarray | None
    metric: str


class GalleryIndex:
    """A gallery that can be searched; see ``build_index`` and ``open_gallery``.

    Attributes:
        kind: ``flat`` compares a query with all features, ``ivf`` with those in the nearest of some lists, ``hnsw``
            with those on a way through a graph.
        metric: ``cosine`` or ``euclidean``.
        config_hash, checkpoint: of the model whose features they are.
        fingerprint: of the extraction.
    """

    def __init__(self, path: Path, index: Any, meta: dict[str, np.ndarray]) -> None:
        self.path, self._index = path, index
        self.kind, self.metric, self.config_hash, self.checkpoint, self.fingerprint = (
            str(meta[name]) for name in ("kind", "metric", "config_hash", "checkpoint", "fingerprint")
        )
        self._columns = {name: meta.get(name) for name in ("paths", "pids", "camids", "boxes")}

    def __len__(self) -> int:
        return self._index.ntotal

    @property
    def width(self) -> int:
        """D of the features."""
        return self._index.d

    def search(
        self, features: Tensor | np.ndarray, k: int = 10, *, effort: int | None = None, exact: bool = False
    ) -> SearchResult:
        """Return the nearest gallery images.

        Args:
            features: (Q, D) float, of the same model, not normalized.
            k: how many; no more than there are.
            effort: of ``ivf`` the lists that are looked into (nprobe), of ``hnsw`` the candidates that are kept
                (efSearch): more find more and take longer; None is the default of the kind.
            exact: compare with all features, whatever the kind.

        Raises:
            ConfigError: ``k`` or ``effort`` is below 1.
            DataError: the features are of another width or not finite.
        """
        if k < 1 or (effort is not None and effort < 1):
            raise ConfigError(f"k is {k} and effort {effort}; both must be at least 1")
        features = np.ascontiguousarray(torch.as_tensor(features).float().cpu().numpy())
        if features.ndim != 2 or features.shape[1] != self.width or not np.isfinite(features).all():
            raise DataError(f"queries {features.shape}: expected (Q, {self.width}) finite features, as the gallery's")
        if self.metric == "cosine":
            features = _normalized(features)
        k = min(k, len(self))
        values, rows = self._search(features, k, effort, exact)
        # Rounding may take the similarity of equal features beyond 1, and a squared distance below 0.
        scores = values.clip(-1, 1) if self.metric == "cosine" else np.sqrt(values.clip(min=0))
        columns = {name: None if column is None else column[rows] for name, column in self._columns.items()}
        return SearchResult(scores=scores, rows=rows, metric=self.metric, **columns)

    def _search(self, features: np.ndarray, k: int, effort: int | None, exact: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return (Q, k) values as faiss has them, and (Q, k) rows."""
        index = self._index
        if exact or self.kind == "flat":
            return self._search_all(features, k)
        import faiss

        if self.kind == "ivf":
            parameters = faiss.SearchParametersIVF(nprobe=min(effort or math.ceil(PROBED * index.nlist), index.nlist))
        else:
            parameters = faiss.SearchParametersHNSW(efSearch=max(effort or EF_SEARCH, k))
        values, rows = index.search(features, k, params=parameters)
        incomplete = (rows < 0).any(1)  # what was looked into holds fewer than k
        if incomplete.any():
            values[incomplete], rows[incomplete] = self._search_all(features[incomplete], k)
        return values, rows

    def _search_all(self, features: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Compare with all features.

        By products of blocks: with 8 to 64 queries faiss's flat search took 3 to 18 times as long (50,000 x 512).
        """
        import faiss

        if self.kind == "ivf":
            return self._index.search(features, k, params=faiss.SearchParametersIVF(nprobe=self._index.nlist))
        storage = faiss.downcast_index(self._index.storage) if self.kind == "hnsw" else self._index
        gallery = faiss.rev_swig_ptr(storage.get_xb(), len(self) * self.width).reshape(len(self), self.width)
        queries = torch.from_numpy(features)
        buffer = torch.empty(min(_COMPARED_ROWS, len(self)), self.width)
        best, rows = torch.empty(len(features), 0), torch.empty(len(features), 0, dtype=torch.int64)
        for start in range(0, len(self), _COMPARED_ROWS):
            block = buffer[: min(_COMPARED_ROWS, len(self) - start)]
            block.numpy()[:] = gallery[start : start + len(block)]  # which need not be aligned in the file
            values = queries @ block.T
            if self.metric == "euclidean":
                values = 2 * values - squared_norms(block)
            values, found = values.topk(min(k, len(block)), dim=1)
            best, rows = torch.cat((best, values), 1), torch.cat((rows, found + start), 1)
            best, order = best.topk(min(k, best.shape[1]), dim=1)
            rows = rows.gather(1, order)
        if self.metric == "euclidean":  # without the rounding of the difference of large squares
            difference = features[:, None] - gallery[rows.numpy()]
            best = torch.from_numpy(np.einsum("qkd,qkd->qk", difference, difference))
            best, order = best.sort(dim=1, stable=True)
            rows = rows.gather(1, order)
        return best.numpy(), rows.numpy()


def choose_kind(count: int) -> str:
    """Return the kind of index for so many features."""
    if count <= FLAT_UP_TO:
        return "flat"
    return "hnsw" if count <= HNSW_UP_TO else "ivf"


def build_index(extraction: Extraction, out: str | PathLike[str], *, kind: str = "auto") -> GalleryIndex:
    """Build an index of an extraction, write it atomically, and return it as it is loaded.

    Args:
        extraction: whose features are copied; those of ``cosine`` are normalized.
        out: the file.
        kind: one of ``KINDS``, or ``auto`` for ``choose_kind`` the number of features.

    Raises:
        ConfigError: the file cannot be written, or there is no such kind.
        DataError: a feature is not finite.
    """
    check_choice("kind", kind, ("auto", *KINDS))
    out = Path(out).expanduser()
    kind = choose_kind(len(extraction.features)) if kind == "auto" else kind
    with writing(out):
        if out.is_dir() or not out.parent.is_dir():
            raise ConfigError(f"{out}: expected a file in a folder that exists")
    meta = {name: getattr(extraction, name, None) for name in _META} | {"kind": kind}
    with writing(out):
        write_atomically(out, lambda file: _write(file, _build_filled(kind, extraction), meta))
    logger.info("wrote %s: %d features of %d, %s", out, *extraction.features.shape, kind)
    return load_index(out, verify=False)


def load_index(path: str | PathLike[str], *, verify: bool = True) -> GalleryIndex:
    """Map an index into memory.

    Args:
        path: a file that ``build_index`` wrote.
        verify: read all of it once and compare the checksum: faiss does not survive links that lead nowhere.

    Raises:
        DataError: there is no such file, or it is truncated, damaged or no index.
    """
    import faiss

    path = Path(path).expanduser()
    with open_arrays(path, "index", fix=_BUILD_AGAIN) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        missing = [name for name in _META if name != "boxes" and name not in names]
        if missing:
            raise ValueError(f"it has no {', '.join(missing)}")
        if verify and (record := archive.testzip()):
            raise ValueError(f"{record} is not what was written")
        meta = {name: map_array(archive, name) for name in names if name in _META}
        size, crc = (_number(path, name, meta[name]) for name in ("size", "crc"))
        with open(path, "rb") as file:
            if verify and _checksum(file, size) != crc:
                raise ValueError("the index in it is not what was written")
        # Older versions of faiss map the lists of an IVF index only, and read the others.
        index = faiss.read_index(str(path), getattr(faiss, "IO_FLAG_MMAP_IFC", faiss.IO_FLAG_MMAP))
    _check_parts(path, index, meta)
    return GalleryIndex(path, index, meta)


def _number(path: Path, name: str, array: np.ndarray) -> int:
    if array.shape != () or array.dtype.kind not in "iu":
        raise DataError(f"{path}: {name} is {array.dtype} {array.shape}; expected an integer.\n  fix: {_BUILD_AGAIN}")
    return int(array)


def _check_parts(path: Path, index: Any, meta: dict[str, np.ndarray]) -> None:
    """Check that faiss's index is the one that the rest of the file describes.

    Raises:
        DataError: it is of another kind or metric, or of another number of images.
    """
    import faiss

    names = ("kind", "metric", "config_hash", "checkpoint", "fingerprint")
    texts = {name: text_of(path, name, meta[name], fix=_BUILD_AGAIN) for name in names}
    classes = {"flat": faiss.IndexFlat, "ivf": faiss.IndexIVFFlat, "hnsw": faiss.IndexHNSWFlat}
    metrics = {"cosine": faiss.METRIC_INNER_PRODUCT, "euclidean": faiss.METRIC_L2}
    kind, metric = texts["kind"], texts["metric"]
    if kind not in classes or not isinstance(index, classes[kind]) or index.metric_type != metrics.get(metric):
        raise DataError(
            f"{path} should hold an index of kind {kind!r} and metric {metric!r}, and holds a "
            f"{type(index).__name__} of metric {index.metric_type}.\n  fix: {_BUILD_AGAIN}"
        )
    check_columns(path, meta, index.ntotal, fix=_BUILD_AGAIN)


def open_gallery(
    gallery: str | PathLike[str], *, of: Any = None, index: str | PathLike[str] | None = None, kind: str = "auto"
) -> GalleryIndex:
    """Return an index: itself, or that of an extraction, which is written unless it is there already.

    Args:
        gallery: an index, or an extraction, whose name ends in ``.npz``.
        of: a ``Predictor``, which must be of the same model; None is any.
        index: of an extraction, its index; None is beside it, with the same name but for ``.index`` at its end.
        kind: of an index that is to be written, see ``build_index``; one of another kind is written anew.

    Raises:
        DataError: a file cannot be read, or is of another model.
        ConfigError: the index cannot be written.
    """
    path = Path(gallery).expanduser()
    if path.is_dir():
        raise DataError(
            f"{path} is a folder; a gallery is a file of features.\n"
            f"  fix: fastamp extract {of.checkpoint if of else 'CHECKPOINT'} {path} -o gallery.npz"
        )
    if path.suffix != ".npz":
        return load_index(path)
    extraction = read_extraction(path)
    if of is not None:
        check_same_model(extraction, of.config_hash, of.checkpoint)
    out = Path(index).expanduser() if index is not None else path.with_suffix(".index")
    if out.exists():
        found = load_index(out)
        if found.fingerprint == extraction.fingerprint and kind in ("auto", found.kind):
            return found
        logger.info("%s is of other features or of another kind: writing it anew", out)
    return build_index(extraction, out, kind=kind)


def _build_filled(kind: str, extraction: Extraction) -> Any:
    """Return an index with all features."""
    index, count = _build_empty(kind, extraction), len(extraction.features)
    starts = range(0, count, _BLOCK)
    for start in track(starts, len(starts), f"indexing {count} features ({kind})"):
        index.add(_load_features(extraction, slice(start, start + _BLOCK)))
    return index


def _build_empty(kind: str, extraction: Extraction) -> Any:
    """Return an index without features."""
    import faiss

    count, width = extraction.features.shape
    metric = faiss.METRIC_INNER_PRODUCT if extraction.metric == "cosine" else faiss.METRIC_L2
    if kind == "flat":
        return faiss.IndexFlat(width, metric)
    if kind == "hnsw":
        index = faiss.IndexHNSWFlat(width, _NEIGHBORS, metric)
        index.hnsw.efConstruction = _EF_CONSTRUCTION
        return index
    # The nearest power of 2 to the root. Twice as many would take four times as long to train.
    lists = 2 ** round(math.log2(count) / 2)
    index = faiss.index_factory(width, f"IVF{lists},Flat", metric)
    index.cp.spherical = extraction.metric == "cosine"
    index.cp.min_points_per_centroid = 1
    chosen = np.random.default_rng(0).choice(count, min(count, lists * _TRAINED_ON), replace=False)
    index.train(_load_features(extraction, np.sort(chosen)))
    return index


def _load_features(extraction: Extraction, chosen: slice | np.ndarray) -> np.ndarray:
    """Return some features as they are indexed."""
    features = np.array(extraction.features[chosen], dtype=np.float32)  # a copy, which is aligned
    if not np.isfinite(features).all():
        raise DataError(f"{extraction.path} has features that are not finite")
    return _normalized(features) if extraction.metric == "cosine" else features


def _normalized(features: np.ndarray) -> np.ndarray:
    return torch.nn.functional.normalize(torch.from_numpy(features), dim=1).numpy()


def _write(file: IO[bytes], index: Any, meta: dict[str, Any]) -> None:
    """Write the index, which faiss maps from a file's beginning, and behind it an npz archive of what it is of."""
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
