"""Inputs of a model besides the images: their cameras, views and modalities."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fastamp.config import CfgNode
from fastamp.data.datasets.items import PackedItems
from fastamp.modeling.meta_arch.image_model import ImageModel
from fastamp.utils.errors import ConfigError

_MAX_LISTED = 20


class ModelInputs:
    """Cameras, views and modalities that a model requires for each image.

    Args:
        cfg: config of the model.
        model: the model.

    Attributes:
        counts: number of embeddings of cameras (``camids``) and views (``viewids``); only those that the model has.
        modality_column: name of the column that selects the stem of a two-stem model; "" for other models.
        modalities: modalities in the order of their numbers; () for models without a stem for each modality.
        default_modality: ``MODEL.BACKBONE.MODALITY``, that of images without a stated one; "" for none.
    """

    def __init__(self, cfg: CfgNode, model: nn.Module) -> None:
        self.counts, self.modality_column, self.modalities = dict[str, int](), "", tuple[str, ...]()
        self.backbone = cfg.MODEL.BACKBONE.NAME
        if isinstance(model, ImageModel):
            if model.backbone.takes_cameras:
                counts = {"camids": cfg.MODEL.BACKBONE.SIE_CAMERAS, "viewids": cfg.MODEL.BACKBONE.SIE_VIEWS}
                self.counts = {name: count for name, count in counts.items() if count}
            self.modality_column = str(model.backbone.modality_column)
        if self.modality_column:
            self.modalities = tuple(cfg.DATASETS.CATEGORIES[self.modality_column])
        self.default_modality = str(cfg.MODEL.BACKBONE.MODALITY) if self.modality_column else ""

    @property
    def required_modality(self) -> str:
        """``modality_column`` if the modality of each image must be stated; else ""."""
        return "" if self.default_modality else self.modality_column

    def check(self, items: PackedItems) -> None:
        """Check that the images of a dataset have the cameras, views and the modality that the model requires.

        Raises:
            ConfigError: if one is missing or out of range.
        """
        modality = self.modalities[:1] if self.modality_column in items.columns else ()
        self.of_images(len(items), camids=items.camids.codes, viewids=items.viewids, modality=modality or None)

    def of_images(
        self,
        count: int,
        *,
        camids: Sequence[int] | np.ndarray | None = None,
        viewids: Sequence[int] | np.ndarray | None = None,
        modality: str | Sequence[str] | None = None,
    ) -> dict[str, Tensor]:
        """Convert the cameras, views and modalities of images to inputs of the model; see ``Predictor.features``.

        Args:
            count: number of images.
            camids, viewids, modality: those of the images.

        Returns:
            Name in a batch -> (count,) int64, only those that the model takes.

        Raises:
            ConfigError: if one that the model requires is missing or invalid, or the model has no modalities.
        """
        batch = {"camids": torch.zeros(count, dtype=torch.int64)} if self.counts else {}
        for name, limit in self.counts.items():
            ids = camids if name == "camids" else viewids
            if ids is None or len(ids) != count or not all(0 <= label < limit and label == int(label) for label in ids):
                description = "none" if ids is None else f"{len(ids)}, in {min(ids, default=0)}..{max(ids, default=0)}"
                raise ConfigError(
                    f"the model requires {name} for its embeddings: expected {count} values in 0..{limit - 1}, one per "
                    f"image; got {description}.\n"
                    f"  fix: pass the {name} of all images, as numbered in training"
                )
            batch[name] = torch.as_tensor(ids, dtype=torch.int64)
        names = self.modalities
        if not names:
            if modality is not None:
                raise ConfigError(
                    f"modality {modality!r}: the model has no stem for each modality "
                    f"(MODEL.BACKBONE.NAME {self.backbone}).\n  fix: omit the modality"
                )
            return batch
        if modality is None:
            modality = self.default_modality or []
        given = [modality] if isinstance(modality, str) else [*modality]
        given *= count if len(given) == 1 else 1
        if len(given) != count or not set(given) <= set(names):
            raise ConfigError(
                f"the model requires the modality of each image, {' or '.join(names)}: expected one value"
                f"{f', or {count}' if count > 1 else ''}; got {', '.join(map(str, given[:_MAX_LISTED])) or 'none'}.\n"
                "  fix: pass the modality of the images (--modality, modality=..., or the column "
                f"{self.modality_column!r} of a CSV file), or set MODEL.BACKBONE.MODALITY if all have the same one"
            )
        return batch | {self.modality_column: torch.tensor([names.index(name) for name in given], dtype=torch.int64)}
