"""Extraction of the features of many images to one file; an interrupted extraction can be resumed."""

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fastamp.config import CfgNode
from fastamp.data.build import build_dataset, check_known_cameras
from fastamp.data.columns import to_array
from fastamp.data.dataset import ReidDataset
from fastamp.data.datasets.base import DATASET_REGISTRY, ImageDataset, number_cameras
from fastamp.data.datasets.custom import PATH_DATASETS, image_files
from fastamp.data.datasets.items import Column, ImageItem, PackedItems
from fastamp.data.loader import TestLoader, worker_count
from fastamp.data.samplers import InferenceSampler
from fastamp.data.transforms import build_transforms
from fastamp.retrieval.columns import VALUE_PREFIX
from fastamp.retrieval.features import Features
from fastamp.retrieval.features_file import COLUMN_PREFIX, read_features
from fastamp.retrieval.features_table import SUFFIXES, check_table_format, write_table
from fastamp.retrieval.npz import open_arrays, read_array, write_arrays
from fastamp.utils.choices import EXTRACTED_SPLITS
from fastamp.utils.errors import ConfigError, DataError, check_choice, did_you_mean, writing
from fastamp.utils.files import real_path, write_atomically
from fastamp.utils.lock import LOCK_FILE, lock_folder, unlock_folder
from fastamp.utils.plural import plural
from fastamp.utils.progress import ProgressBar, format_duration

if TYPE_CHECKING:
    from fastamp.inference.predictor import Predictor

logger = logging.getLogger(__name__)

# A part is written after this many seconds, or when this many bytes are in memory.
_PART_SECONDS, _PART_BYTES = 30.0, 2**26
_MARKER = "of.json"
_PART = re.compile(r"[0-9]{12}\.npz")
_UNFINISHED = re.compile(rf"\.({re.escape(_MARKER)}|{_PART.pattern})\..*\.tmp")
# All features in one temporary file, from which a table is written.
_TABLE_SOURCE = f".{_MARKER}.table.tmp"


# Features (B, D), values of outputs (B, A), indices (B,), and messages of unreadable images.
_Batch = tuple[Tensor, Tensor, Tensor, dict[int, str]]


@dataclass(frozen=True)
class Listing:
    """N images with their identities and splits; see ``ImageColumns`` for the columns."""

    items: PackedItems
    pids: np.ndarray
    split: np.ndarray | None = None
    cameras: np.ndarray | None = None
    dataset: ImageDataset | None = None
    has_cameras: bool = True

    def columns(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return paths, identities, cameras and, if known, splits, boxes, camera names and further columns of images.

        Args:
            rows: indices of the images.
        """
        items = self.items.take(rows)
        columns = {"paths": np.array([items.path(row) for row in range(len(items))]), "pids": self.pids[rows]}
        columns["camids"] = items.camids.codes if self.has_cameras else np.full(len(items), -1)
        if self.split is not None:
            columns["split"] = self.split[rows]
        if self.cameras is not None:
            columns["cameras"] = self.cameras[rows]
        if items.boxes is not None and any(item.box for item in items):
            columns["boxes"] = np.array([item.box or (-1, -1, -1, -1) for item in items], dtype=np.int64)
        return columns | {COLUMN_PREFIX + name: to_array(column) for name, column in items.columns.items()}


def dataset_name(source: str | PathLike[str]) -> str:
    """Return the name of a dataset or CSV file as in DATASETS.NAMES; "" for a folder.

    Raises:
        DataError: if ``source`` is neither a dataset, a CSV file nor a folder.
    """
    name = str(source)
    if name in DATASET_REGISTRY or name.partition(":")[0] in PATH_DATASETS:
        return name
    if Path(name).expanduser().is_dir():
        return ""
    if name.endswith(".csv"):
        return f"csv:{name}"
    suggestion = "" if "/" in name else did_you_mean(name, DATASET_REGISTRY)
    raise DataError(
        f"{name} not found; expected a folder, a CSV file or a dataset name as in DATASETS.NAMES.{suggestion}\n"
        "  fix: correct the path or the dataset name"
    )


def check_output(out: str | PathLike[str]) -> Path:
    """Return the path of an output file of ``extract``, and check it.

    Raises:
        ConfigError: if the suffix is unknown, or the folder does not exist or is not writable.
    """
    out = Path(out).expanduser()
    if out.suffix not in (".npz", *SUFFIXES) or out.is_dir() or not out.parent.is_dir():
        raise ConfigError(
            f"cannot write the extraction to {out}: expected a file name that ends in .npz, .csv or .parquet in an "
            "existing folder.\n  fix: choose another --output"
        )
    if not os.access(out.parent, os.W_OK):
        raise ConfigError(
            f"cannot write the extraction to {out}: the folder is not writable.\n  fix: choose another --output"
        )
    check_table_format(out)
    return out


def list_images(source: str | PathLike[str], cfg: CfgNode, splits: Sequence[str] = EXTRACTED_SPLITS) -> Listing:
    """List the images of a dataset, a CSV file or a folder, in a fixed order.

    Args:
        source: dataset name as in DATASETS.NAMES, including ``csv:FILE`` and ``folder:FOLDER``; a CSV file; or a folder
            whose images, including those in subfolders, are used without identities and cameras.
        cfg: config; only DATASETS is read.
        splits: splits of a dataset to include. Default: query, gallery, train.

    Returns:
        The images with their identities, cameras and splits.

    Raises:
        ConfigError: if a split is unknown.
        DataError: if the dataset is unknown or invalid, or contains no images.
    """
    for split in splits:
        check_choice("splits", split, EXTRACTED_SPLITS)
    name = dataset_name(source)
    if not name:
        folder = Path(source).expanduser()
        files = [ImageItem(file, 0, -1) for file in image_files(folder)]
        if not files:
            raise DataError(
                f"no images found in {folder.absolute()} or its subfolders.\n"
                "  fix: choose a folder that contains image files"
            )
        return Listing(PackedItems.of(files), np.full(len(files), -1))
    dataset = build_dataset(name, cfg)
    parts = {split: PackedItems.of(getattr(dataset, split)) for split in EXTRACTED_SPLITS if split in splits}
    items = PackedItems.concat([*parts.values(), PackedItems.of([])])
    if not items:
        raise DataError(
            f"dataset {name} contains no {' or '.join(parts)} images.\n  fix: choose other splits with --splits"
        )
    values, inverse = items.pids.unique()
    pids = [dataset.identity(pid) for pid in values]
    are_integers = all(re.fullmatch(r"0|-?[1-9][0-9]{0,17}", pid) for pid in pids)
    values, codes = items.camids.unique()
    names = [dataset.camera(camera) for camera in values]
    has_names = any(name not in ("", str(camera)) for name, camera in zip(names, values, strict=True))
    cameras = items.camids
    if not cameras.is_integer:
        cameras = cameras.map(number_cameras(cameras.unique()[0]).get)
    split_names = np.concatenate([np.full(len(part), split) for split, part in parts.items()])
    items = items.replace(pids=Column(np.zeros(len(items), dtype=np.int64)), camids=cameras)
    return Listing(
        items,
        np.array(pids, dtype=np.int64 if are_integers else None)[inverse],
        split_names,
        np.array(names)[codes] if has_names else None,
        dataset,
        has_cameras=any(names),
    )


def extract(
    predictor: "Predictor",
    source: str | PathLike[str],
    out: str | PathLike[str],
    *,
    splits: Sequence[str] = EXTRACTED_SPLITS,
    skip_corrupt: bool = False,
    num_workers: int | None = None,
) -> tuple[Features, list[str]]:
    """Extract the features of all images of ``source`` to ``out``.

    Completed parts are stored in the folder ``OUT.parts``. After an interruption, another call with the same model and
    images resumes from these parts, and the result is bit-identical. When the extraction is complete, the parts are
    deleted, and also the folder if it contains no other files.

    Args:
        predictor: trained model.
        source: see ``list_images``.
        out: output file; its name must end in ``.npz`` (see ``read_features``), or ``.csv`` or ``.parquet`` (see
            ``write_table``).
        splits: see ``list_images``.
        skip_corrupt: if True, skip images that cannot be read instead of raising an error. Default: False.
        num_workers: number of processes for decoding images. Default: TEST.NUM_WORKERS.

    Returns:
        ``(extraction, skipped)``: the extraction, and the error message of each skipped image.

    Raises:
        ConfigError: if ``out`` cannot be written, a split is unknown, ``OUT.parts`` is a link or contains files
            that are not parts of an extraction, or another process is writing to ``out``.
        DataError: if there are no images, or an image cannot be read.
    """
    out = check_output(out)
    listing = list_images(source, predictor.cfg, splits)
    items = listing.items
    check_known_cameras(predictor.cfg, listing.dataset)
    predictor.camera_view_ids(len(items), camids=items.camids.codes, viewids=items.viewids)
    predictor.check_modality(items.columns, str(source))
    with writing(out):
        parts = _Parts(out.with_name(f"{out.name}.parts"), _marker_of(predictor, listing, skip_corrupt))
    try:
        _compute(predictor, listing, parts, skip_corrupt, num_workers, out)
        rows = np.concatenate([parts.read(path, "rows") for path in parts.paths])
        skipped = [str(line) for path in parts.paths for line in parts.read(path, "unreadable")]
        if not len(rows):
            parts.remove()  # otherwise a resume would skip images that were fixed since
            raise DataError(
                f"none of the {len(listing.items)} images can be read; first error: {skipped[0]}\n"
                "  fix: check that the files exist and are images"
            )
        width = parts.read(parts.paths[0], "features").shape[1]
        columns = listing.columns(rows)
        for name, column in zip(predictor.stored_names, parts.values().T, strict=True):
            columns[COLUMN_PREFIX + VALUE_PREFIX + name] = np.ascontiguousarray(column)
        columns |= {
            "config_hash": np.array(predictor.config_hash),
            "checkpoint": np.array(str(predictor.checkpoint)),
            "metric": np.array(predictor.cfg.TEST.METRIC),
        }
        blocks = (parts.read(path, "features") for path in parts.paths)
        shape = (len(rows), width)
        with writing(out):
            if out.suffix == ".npz":
                write_atomically(out, lambda file: write_arrays(file, columns, blocks, shape))
                extraction = read_features(out)
            else:
                archive = parts.folder / _TABLE_SOURCE
                with archive.open("wb") as file:
                    write_arrays(file, columns, blocks, shape)
                extraction = replace(read_features(archive), path=out)
                write_table(out, extraction)
                archive.unlink()  # the features remain mapped
    except BaseException:
        parts.close()
        raise
    parts.remove()
    return extraction, skipped


def _compute(
    predictor: "Predictor",
    listing: Listing,
    parts: "_Parts",
    skip_corrupt: bool,
    num_workers: int | None,
    out: Path,
) -> None:
    """Extract the features of images that are not yet in ``parts``, and add these features to ``parts``."""
    cfg, total = predictor.cfg, len(listing.items)
    if parts.done == total:
        return
    if parts.done:
        logger.info("resuming: %d of %s extracted before", parts.done, plural(total, "image"))
    images = _Images(
        listing.items[parts.done :],
        build_transforms(cfg, is_train=False),
        skip_corrupt,
        first=parts.done,
        sources=[listing.dataset] if listing.dataset else [],
        categories=cfg.DATASETS.CATEGORIES,
    )
    key, requested = "workers", num_workers
    if requested is None:
        key, requested = "TEST.NUM_WORKERS", cfg.TEST.NUM_WORKERS
        if requested == -1:
            key, requested = "DATALOADER.NUM_WORKERS", cfg.DATALOADER.NUM_WORKERS
    sampler = InferenceSampler(size=len(images), batch_size=cfg.TEST.IMS_PER_BATCH)
    loader = TestLoader(images, sampler, num_workers=worker_count(key, requested), device=predictor.device)
    bar = ProgressBar(total, "extracting", done=parts.done)
    buffer: list[_Batch] = []
    last_write, done = time.monotonic(), parts.done
    try:
        with torch.inference_mode():
            for batch in loader:
                features, values = (tensor.cpu() for tensor in predictor.features_and_values_of_batch(batch))
                buffer.append((features, values, batch["indices"], batch["unreadable"]))
                done += len(features)
                bar.update(done)
                size = sum(features.nbytes for features, *_ in buffer)
                if done < total and time.monotonic() - last_write <= _PART_SECONDS and size <= _PART_BYTES:
                    continue
                with writing(out):
                    parts.write(done, buffer)
                buffer, last_write = [], time.monotonic()
                remaining = f", {format_duration(bar.seconds_left())} left" if done < total else ""
                logger.info("%d of %s%s", done, plural(total, "image"), remaining)
    finally:
        bar.close()


class _Images(ReidDataset):
    """Dataset of images, some of which may be unreadable.

    With ``skip_corrupt``, the batch entry ``unreadable`` maps the index of each unreadable image to its error message.
    """

    def __init__(
        self,
        items: Sequence[ImageItem],
        transforms: Any,
        skip_corrupt: bool,
        *,
        first: int,
        sources: Sequence[ImageDataset] = (),
        categories: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        super().__init__(items, transforms, relabel=False, sources=sources, categories=categories)
        self.skip_unreadable, self.first = skip_corrupt, first
        self._unreadable: dict[int, str] = {}

    def __getitems__(self, keys: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
        self._unreadable = {}
        batch = super().__getitems__(keys)
        batch["indices"] += self.first
        batch.pop("tracklet", None)  # features of images, not of tracklets
        return batch | {"unreadable": self._unreadable}

    def read(self, index: int) -> Tensor:
        """Read an image, see ``ReidDataset``; with ``skip_corrupt``, a black image replaces an unreadable image."""
        try:
            return super().read(index)
        except DataError as error:
            reason = str(error).partition("\n  fix:")[0]
            if not self.skip_unreadable:
                raise DataError(
                    f"{reason}\n  fix: repair or delete the file, or skip unreadable images with --skip-corrupt"
                ) from error
            self._unreadable[index + self.first] = reason.replace("\n  ", "; ")
            black = torch.zeros(self.transforms.channels, 256, 128, dtype=torch.uint8)
            return self.transforms.resize(black)


class _Parts:
    """Completed parts of an extraction: files with the features of consecutive images, each written atomically.

    Args:
        folder: folder of the part files; existing parts of a different extraction are deleted.
        marker: description of the settings and images, see ``_marker_of``.

    Attributes:
        paths: files of the parts, in order.
        done: number of completed images.

    Raises:
        ConfigError: if the folder is a link, contains files but no marker of an extraction, or is in use.
    """

    def __init__(self, folder: Path, marker: dict[str, Any]) -> None:
        self.folder = folder
        self.paths: list[Path] = []
        self.done = 0
        self._check_folder()
        lock_folder(folder, "--output")
        try:
            self._open(marker)
        except BaseException:
            unlock_folder(folder)
            raise

    def _check_folder(self) -> None:
        """Raise ConfigError if the path is a link or a file, or the folder contains files but no extraction marker.

        Temporary files and a lock file are ignored, because an extraction that is killed before it writes the marker
        may leave them behind.
        """
        problem = ""
        if self.folder.is_symlink():
            problem = f"is a link to {real_path(self.folder)}"
        elif self.folder.exists() and not self.folder.is_dir():
            problem = "is a file"
        elif self.folder.is_dir() and not _is_marker(self._read_marker()):
            names = [path.name for path in self.folder.iterdir() if path.name != LOCK_FILE]
            other_files = [name for name in names if not _UNFINISHED.fullmatch(name)]
            problem = f"contains {other_files[0]}, but no marker of an extraction ({_MARKER})" if other_files else ""
        if problem:
            raise ConfigError(
                f"cannot store the parts of the extraction in {self.folder}: this path {problem}.\n"
                f"  fix: choose another --output, or move {self.folder} to another location"
            )

    def _read_marker(self) -> Any:
        """Read the marker; return None if it is missing or unreadable."""
        marker_path = self.folder / _MARKER
        try:
            return None if marker_path.is_symlink() else json.loads(marker_path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def _part_files(self) -> list[Path]:
        """List the part files in the folder, in order."""
        paths = sorted(path for path in self.folder.iterdir() if _PART.fullmatch(path.name))
        return [path for path in paths if path.is_file() and not path.is_symlink()]

    def _open(self, marker: dict[str, Any]) -> None:
        """Find the completed parts of this extraction, and delete the parts of a different extraction."""
        self._check_folder()  # again, now that the lock keeps other extractions out
        marker_path, saved_marker = self.folder / _MARKER, self._read_marker()
        if saved_marker != marker:
            if saved_marker is not None:
                changed = [name for name in marker if saved_marker.get(name) != marker[name]]
                logger.warning(
                    "%s contains parts of a different extraction (different %s): these parts are deleted, and all "
                    "images are extracted.\n"
                    "  fix: to keep the parts of several extractions, choose an --output for each",
                    self.folder,
                    ", ".join(changed),
                )
            for path in self._part_files():
                path.unlink()
            write_atomically(marker_path, lambda file: file.write(json.dumps(marker).encode()))
        for path in self._part_files():
            try:
                first, stop = self.read(path, "span").tolist()
                self.read(path, "features")
            except (DataError, ValueError, TypeError):
                first, stop = -1, -1
            if first != self.done:
                path.unlink()
                continue
            self.paths.append(path)
            self.done = stop

    def write(self, stop: int, batches: Sequence[_Batch]) -> None:
        """Write the features of the images ``done:stop`` as one part."""
        messages = {row: text for *_, unreadable in batches for row, text in unreadable.items()}
        rows = torch.cat([rows for _, _, rows, _ in batches]).numpy()
        kept = ~np.isin(rows, list(messages))
        arrays = {
            "span": np.array([self.done, stop]),
            "rows": rows[kept],
            "features": torch.cat([features for features, *_ in batches]).numpy()[kept],
            "unreadable": np.array([messages[row] for row in sorted(messages)], dtype=str),
        }
        values = torch.cat([values for _, values, *_ in batches])
        if values.shape[1]:
            arrays["values"] = values.numpy()[kept]
        path = self.folder / f"{self.done:012d}.npz"
        write_atomically(path, lambda file: write_arrays(file, arrays))
        self.paths.append(path)
        self.done = stop

    def read(self, path: Path, name: str) -> np.ndarray:
        """Read an array from a part."""
        with open_arrays(path, "extraction", fix="delete it; its images will be extracted again") as archive:
            return read_array(archive, name)

    def values(self) -> np.ndarray:
        """Read the values of the outputs, (N, A) float32; A is 0 for models without stored outputs."""
        with open_arrays(self.paths[0], "extraction", fix="delete it") as archive:
            if "values.npy" not in archive.namelist():
                return np.empty((0, 0), np.float32)
        return np.concatenate([self.read(path, "values") for path in self.paths])

    def remove(self) -> None:
        """Delete the files of the extraction, and then the folder if it is empty."""
        with suppress(OSError):
            unfinished = [path for path in self.folder.iterdir() if _UNFINISHED.fullmatch(path.name)]
            for path in (*self._part_files(), *unfinished, self.folder / _MARKER):
                path.unlink(missing_ok=True)
        unlock_folder(self.folder)
        with suppress(OSError):  # contains other files, or another extraction has started
            self.folder.rmdir()

    def close(self) -> None:
        """Unlock the folder and keep the completed parts; if there are none, delete the folder."""
        if self.paths:
            unlock_folder(self.folder)
        else:
            self.remove()


def _is_marker(content: Any) -> bool:
    """Return True if ``content`` is the marker of an extraction, written by any version."""
    return isinstance(content, dict) and {"model", "images"} <= content.keys()


def _marker_of(predictor: "Predictor", listing: Listing, skip_corrupt: bool) -> dict[str, Any]:
    """Build the marker: settings that can change the features, if only by rounding, and a hash of the image list."""
    digest = hashlib.blake2b(digest_size=16)
    splits = listing.split if listing.split is not None else [""] * len(listing.items)
    column = predictor.modality_column
    for item, pid, split in zip(listing.items, listing.pids, splits, strict=True):
        values: tuple[Any, ...] = (item.path, str(pid), item.camid, item.viewid, item.box, str(split))
        if column:
            values += ((item.columns or {}).get(column, predictor.cfg.MODEL.BACKBONE.MODALITY),)
        digest.update(repr(values).encode())
    names = predictor.stored_names
    return ({"values": list(names)} if names else {}) | {
        "model": predictor.config_hash,
        "images": digest.hexdigest(),
        "precision": f"{predictor.policy.describe()} on {predictor.device.type}",
        "batch size": predictor.cfg.TEST.IMS_PER_BATCH,
        "skip corrupt": skip_corrupt,
    }
