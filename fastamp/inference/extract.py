"""Extraction of the features of many images to one file; an interrupted extraction can be resumed."""

import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fastamp.contracts import Batch
from fastamp.data.build import check_known_cameras, inference_workers
from fastamp.data.dataset import ReidDataset
from fastamp.data.datasets.items import PackedItems
from fastamp.data.loader import TestLoader
from fastamp.data.samplers import InferenceSampler
from fastamp.data.transforms import Transforms
from fastamp.feature_pass import feature_pass
from fastamp.inference.image_list import Listing, list_images
from fastamp.inference.outputs import PredictorOutput
from fastamp.inference.partial_rows import PartialRows
from fastamp.retrieval.columns import VALUE_PREFIX
from fastamp.retrieval.features import Features
from fastamp.retrieval.features_file import read_features, write_features
from fastamp.retrieval.features_table import SUFFIXES, check_table_format, write_table
from fastamp.retrieval.model_id import ModelId
from fastamp.utils.choices import EXTRACTED_SPLITS
from fastamp.utils.errors import DataError, WriteError, writing
from fastamp.utils.plural import plural

if TYPE_CHECKING:
    from fastamp.inference.predictor import Predictor

logger = logging.getLogger(__name__)


def check_output(out: str | PathLike[str]) -> Path:
    """Return the path of an output file of ``extract``, and check it.

    Raises:
        WriteError: if the suffix is unknown, or the folder does not exist or is not writable.
        ConfigError: see ``check_table_format``.
    """
    out = Path(out).expanduser()
    parent = out.parent
    if out.suffix not in (".npz", *SUFFIXES) or out.is_dir() or not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise WriteError(
            f"cannot write the extraction to {out}: expected a file name that ends in .npz, .csv or .parquet in an "
            "existing folder that is writable.\n  fix: choose another --output"
        )
    check_table_format(out)
    return out


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
    predictor.inputs.check(items)
    description = describe_extraction(predictor, items, skip_corrupt)
    with writing(out):
        parts = PartialRows(out.with_name(f"{out.name}.parts"), description)
    with parts:
        _compute(predictor, listing, parts, skip_corrupt, num_workers)
        skipped = [message for _, message in sorted(parts.unreadable.items())]
        if not len(parts):
            raise DataError(
                f"none of the {len(items)} images can be read; first error: {skipped[0]}\n"
                "  fix: check that the files exist and are images"
            )
        matrix, names = parts.matrix(), description["values"]
        width = parts.width - len(names)
        order = items.rows_by_file()
        rows = order[~np.isin(order, list(parts.unreadable))]
        if (np.diff(rows) < 0).any():
            matrix = matrix[np.argsort(rows)]
        images = listing.columns.take(np.sort(rows))
        values = np.ascontiguousarray(matrix[:, width:].T)
        further = {VALUE_PREFIX + name: column for name, column in zip(names, values, strict=True)}
        images = replace(images, further={**images.further, **further})
        model = ModelId(width, predictor.metric, predictor.config_hash, str(predictor.checkpoint))
        extraction = Features(out, matrix[:, :width], images, model)
        if out.suffix == ".npz":
            write_features(extraction)
            extraction = read_features(out)
        else:
            write_table(out, extraction)
    return extraction, skipped


def _compute(
    predictor: "Predictor", listing: Listing, parts: PartialRows, skip_corrupt: bool, num_workers: int | None
) -> None:
    """Extract the features of images that are not yet in ``parts``, and append them."""
    cfg, total = predictor.cfg, len(listing.items)
    if parts.done == total:
        return
    if parts.done:
        logger.info("resuming: %d of %s extracted before", parts.done, plural(total, "image"))
    images = _Images(
        listing.items,
        predictor.transforms,
        skip_unreadable=skip_corrupt,
        relabel=False,
        sources=[listing.dataset] if listing.dataset else [],
        categories=cfg.DATASETS.CATEGORIES,
    )
    rows = listing.items.rows_by_file()[parts.done :].tolist()  # boxes of a frame one after the other
    sampler = InferenceSampler(size=len(rows), batch_size=cfg.TEST.IMS_PER_BATCH, images=rows)
    loader = TestLoader(images, sampler, num_workers=inference_workers(cfg, num_workers), device=predictor.device)
    outputs = _stored_outputs(predictor)

    def forward(model: nn.Module, batch: Batch) -> list[Tensor]:
        found = [output.compute(model, batch) for output in outputs]
        return [found[0][0], *(values for _, values in found)] if found else [model(batch)]

    def process(batch: Batch, computed: list[Tensor]) -> None:
        features, *found = computed
        values = [output.finish(part) for output, part in zip(outputs, found, strict=True)]
        readable = [row not in batch["unreadable"] for row in batch["indices"].tolist()]
        with writing(parts.folder):
            parts.append(torch.cat([features, *values], dim=1).cpu().numpy()[readable], batch["unreadable"])

    options: dict[str, Any] = {"on_all_ranks": False, "flip_test": cfg.TEST.FLIP.ENABLED}
    feature_pass(predictor.model, loader, process, predictor.policy, forward=forward, title="extracting", **options)
    with writing(parts.folder):
        parts.save()


def _stored_outputs(predictor: "Predictor") -> list[PredictorOutput]:
    return [output for output in predictor.outputs.values() if output.stored]


class _Images(ReidDataset):
    """Dataset of images, some of which may be unreadable.

    With ``skip_unreadable``, the entry ``unreadable`` of a batch maps indices of unreadable images to error messages.
    """

    def __init__(self, items: PackedItems, transforms: Transforms, *, skip_unreadable: bool, **options: Any) -> None:
        super().__init__(items, transforms, **options)
        self.skip_unreadable = skip_unreadable
        self._unreadable: dict[int, str] = {}

    def __getitems__(self, keys: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
        self._unreadable = {}
        batch = super().__getitems__(keys)
        batch.pop("tracklet", None)  # features of images, not of tracklets
        return batch | {"unreadable": self._unreadable}

    def read(self, index: int) -> Tensor:
        """Read an image, see ``ReidDataset``; with ``skip_unreadable``, a black image replaces an unreadable image."""
        try:
            return super().read(index)
        except DataError as error:
            reason = str(error).partition("\n  fix:")[0]
            if not self.skip_unreadable:
                raise DataError(
                    f"{reason}\n  fix: repair or delete the file, or skip unreadable images with --skip-corrupt"
                ) from error
            self._unreadable[index] = reason.replace("\n  ", "; ")
            black = torch.zeros(self.transforms.channels, 256, 128, dtype=torch.uint8)
            return self.transforms.resize(black)


def describe_extraction(predictor: "Predictor", items: PackedItems, skip_corrupt: bool) -> dict[str, Any]:
    """Describe an extraction: a hash of its images, and settings that can change the features, if only by rounding."""
    digest = hashlib.blake2b(digest_size=16)
    for item in items:
        digest.update(repr(item).encode())
    return {
        "values": [name for output in _stored_outputs(predictor) for name in output.names],
        "model": predictor.config_hash,
        "images": digest.hexdigest(),
        "modality": predictor.inputs.default_modality,
        "precision": f"{predictor.policy.describe()} on {predictor.device.type}",
        "batch size": predictor.cfg.TEST.IMS_PER_BATCH,
        "skip corrupt": skip_corrupt,
    }
