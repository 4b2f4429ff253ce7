"""ResNet with one stem for visible and one for infrared images (Ye et al. 2021, arXiv:2001.04193, section 5.2)."""

from typing import Any

import torch
from torch import nn

from fastamp.config import CfgNode, Key
from fastamp.layers import build_norm
from fastamp.modeling.backbones.build import BACKBONE_REGISTRY, variants
from fastamp.modeling.backbones.build_utils import with_pretrained_weights
from fastamp.modeling.backbones.resnet import DEPTHS, ResNet, pretrained_weights, resnet_options
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError, DataError

KEYS = (
    Key(
        "MODEL.BACKBONE.MODALITY_COLUMN",
        "modality",
        "build_two_stem_resnet_backbone: column of the dataset that is visible or infrared. DATASETS.CATEGORIES must "
        "number it: {modality: [visible, infrared]}.",
    ),
    Key(
        "MODEL.BACKBONE.MODALITY",
        "",
        "build_two_stem_resnet_backbone: modality of images without the column, e.g. of a folder: visible or infrared. "
        "If empty, the column is required.",
        choices=("", "visible", "infrared"),
    ),
)

MODALITIES = ("visible", "infrared")
"""Modalities in the order of their numbers."""


class TwoStemResNet(ResNet):
    """ResNet whose stem, i.e. everything before the first stage, depends on the modality of the image.

    The stem of visible images has the parameter names of ``ResNet``; that of infrared images is ``infrared_conv1`` and
    ``infrared_bn1``. All stages are shared.

    Args:
        column: column of the batch with the modality of each image: 0 visible, 1 infrared. Default "modality".
        default_modality: modality of batches without this column. Default None: the column is required.
        options: keyword arguments of ``ResNet``.
    """

    def __init__(self, *, column: str = "modality", default_modality: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.columns, self.modality_column = (column,), column
        self.default_modality = default_modality
        self.infrared_conv1 = nn.Conv2d(self.conv1.in_channels, 64, 7, stride=2, padding=3, bias=False)
        self.infrared_bn1 = build_norm(options.get("norm", "BN"), 64)
        self.copy_stem()

    def copy_stem(self) -> None:
        """Initialize the infrared stem with the parameters of the visible stem."""
        self.infrared_conv1.load_state_dict(self.conv1.state_dict())
        self.infrared_bn1.load_state_dict(self.bn1.state_dict())

    def forward(self, x: torch.Tensor, **columns: torch.Tensor) -> torch.Tensor:
        """Compute feature maps (B, feature_dim, h, w) from normalized images (B, in_channels, H, W).

        Args:
            x: normalized images.
            columns: the column of the modality, (B,) int64: 0 visible, 1 infrared. On the CPU, the images of each
                modality are selected without waiting for the device. Compiled and exported models in evaluation mode
                compute both stems for all images, and do not check the values.

        Raises:
            DataError: if a modality is neither 0 nor 1.
        """
        modality = columns.get(self.columns[0])
        if modality is None:
            return self.stages(self._stem(x, self.default_modality or 0))
        if torch.compiler.is_compiling() and not self.training:
            # The shapes of the parts depend on the values, which torch.export cannot trace.
            stems = [self._stem(x, number) for number in (0, 1)]
            return self.stages(torch.where((modality == 1).to(x.device).view(-1, 1, 1, 1), stems[1], stems[0]))
        values = modality.unique().tolist()
        if not set(values) <= {0, 1}:
            raise DataError(
                f"the column {self.columns[0]!r} must be visible or infrared (0 or 1) for all images; found the "
                f"numbers {', '.join(map(str, values))} (-1: missing; from 2: values that DATASETS.CATEGORIES does not "
                "list).\n"
                f"  fix: set DATASETS.CATEGORIES to {{{self.columns[0]}: [visible, infrared]}}, and correct the column"
            )
        if len(values) == 1:
            return self.stages(self._stem(x, values[0]) + self._unused(1 - values[0]))
        rows = [torch.nonzero(modality == number).flatten() for number in (0, 1)]
        order = torch.cat(rows).argsort().to(x.device, non_blocking=True)
        stems = [
            self._stem(x.index_select(0, part.to(x.device, non_blocking=True)), number)
            for number, part in enumerate(rows)
        ]
        return self.stages(torch.cat(stems).index_select(0, order))

    def _stem(self, x: torch.Tensor, modality: int) -> torch.Tensor:
        """Compute the input of the first stage, (B, 64, h, w), for images of one modality."""
        conv, norm = (self.infrared_conv1, self.infrared_bn1) if modality else (self.conv1, self.bn1)
        return self.maxpool(self.relu(norm(conv(x))))

    def _unused(self, modality: int) -> torch.Tensor | float:
        """Return a zero that depends on the parameters of a stem without images in this batch.

        Distributed training requires a gradient of every parameter on every rank.
        """
        if not (self.training and torch.is_grad_enabled()):
            return 0.0
        conv, norm = (self.infrared_conv1, self.infrared_bn1) if modality else (self.conv1, self.bn1)
        return 0.0 * sum(parameter.float().sum() for module in (conv, norm) for parameter in module.parameters())


@BACKBONE_REGISTRY.register()
@variants(
    DEPTHS,
    options=("WITH_IBN", "WITH_SE", "WITH_NL"),
    keys_of=lambda state: {"DATASETS.CATEGORIES": "{'modality': ('visible', 'infrared')}"},
)
def build_two_stem_resnet_backbone(cfg: CfgNode) -> TwoStemResNet:
    """Build the two-stem ResNet configured in ``MODEL.BACKBONE``; see ``build_resnet_backbone``.

    Pretrained weights are those of a ResNet; both stems begin with its stem.

    Raises:
        ConfigError: if ``DATASETS.CATEGORIES`` does not number the column of the modality, or several processes use
            ``SyncBN``; see also ``build_resnet_backbone``.
    """
    backbone = cfg.MODEL.BACKBONE
    column = backbone.MODALITY_COLUMN
    if tuple(cfg.DATASETS.CATEGORIES.get(column, ())) != MODALITIES:
        raise ConfigError(
            f"MODEL.BACKBONE.NAME build_two_stem_resnet_backbone requires DATASETS.CATEGORIES {{{column}: [visible, "
            f"infrared]}}; got {dict(cfg.DATASETS.CATEGORIES)}.\n  fix: set DATASETS.CATEGORIES.{column} "
            "\"('visible', 'infrared')\""
        )
    default = MODALITIES.index(backbone.MODALITY) if backbone.MODALITY else None
    model = TwoStemResNet(column=column, default_modality=default, **resnet_options(cfg))
    processes = comm.get_world_size()
    if isinstance(model.infrared_bn1, nn.SyncBatchNorm) and processes > 1:
        # A rank without images of a modality would not take part in the communication of this stem, and all would hang.
        raise ConfigError(
            f"MODEL.BACKBONE.NORM {backbone.NORM} with {processes} processes: build_two_stem_resnet_backbone does not "
            "synchronize its batch norm, because the images of a process may all have the same modality.\n"
            "  fix: set MODEL.BACKBONE.NORM to BN, which has the same parameters"
        )
    model = with_pretrained_weights(model, cfg, pretrained_weights(cfg), without=("NL_*", "infrared_*"))
    model.copy_stem()
    return model
