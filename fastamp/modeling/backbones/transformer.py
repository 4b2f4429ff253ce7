"""Base classes of transformer backbones: camera and view embeddings, activation checkpointing, and the last block."""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastamp.config import CfgNode, Key, fixed_input_size, input_size, size_key
from fastamp.contracts import Backbone
from fastamp.modeling.backbones.build_utils import LayerGroups
from fastamp.modeling.backbones.position_grid import PositionGrid
from fastamp.utils.errors import ConfigError, DataError

KEYS = (
    Key(
        "MODEL.BACKBONE.SIE_CAMERAS",
        0,
        "Transformers: number of cameras with a learned embedding (TransReID's SIE); camera IDs start at 0. 0 disables "
        "it.",
        low=0,
    ),
    Key(
        "MODEL.BACKBONE.SIE_VIEWS",
        0,
        "Transformers: number of views with a learned embedding (TransReID's SIE); view IDs start at 0. If SIE_CAMERAS "
        "is also positive, each camera-view pair has an embedding. 0 disables it.",
        low=0,
    ),
    Key(
        "MODEL.BACKBONE.SIE_COE", 3.0, "Transformers: weight of the camera and view embedding that is added to tokens."
    ),
    Key(
        "MODEL.BACKBONE.CHECKPOINTING",
        False,
        "Transformers: recompute the activations of each block in the backward pass; training needs less memory, but "
        "is about a third slower.",
    ),
    Key(
        "MODEL.BACKBONE.DROP_PATH_RATIO",
        0.1,
        "Transformers: stochastic depth probability of the last block; it grows linearly from 0 in the first block.",
        low=0,
        high=0.99,
    ),
    Key(
        "MODEL.BACKBONE.DROP_RATIO",
        0.0,
        "Transformers: dropout probability of the tokens, and of the attention and MLP outputs.",
        low=0,
        high=0.99,
    ),
    Key(
        "MODEL.BACKBONE.ATT_DROP_RATE",
        0.0,
        "Transformers: dropout probability of the attention weights.",
        low=0,
        high=0.99,
    ),
)


def run_block(block: nn.Module, x: torch.Tensor, *, checkpointing: bool, **options: Any) -> torch.Tensor:
    """Run a block of a transformer; with ``checkpointing``, recompute its activations in the backward pass.

    Args:
        block: module, called as ``block(x, **options)``.
        x: input of the block.
        checkpointing: do not store the activations of the block. Has no effect if gradients are disabled.
        options: further arguments of the block.
    """
    if checkpointing and torch.is_grad_enabled():
        return checkpoint(block, x, use_reentrant=False, **options)
    return block(x, **options)


def patch_grid(size: tuple[int, int], patch: tuple[int, int], stride: tuple[int, int]) -> tuple[int, int]:
    """Compute the number of rows and columns of patches; pixels after the last patch are not used.

    Args:
        size: height and width of the image, at least those of a patch.
        patch, stride: height and width of a patch, and vertical and horizontal stride, in pixels.
    """
    rows, columns = ((side - length) // step + 1 for side, length, step in zip(size, patch, stride, strict=True))
    return rows, columns


def size_of_training_images(cfg: CfgNode, patch: tuple[int, int]) -> tuple[int, int]:
    """Return the height and width of the training images, for which a position embedding is created.

    Args:
        cfg: the config.
        patch: height and width of a patch, in pixels.

    Raises:
        ConfigError: if training images have no fixed size, or training or test images are smaller than a patch.
    """
    name = cfg.MODEL.BACKBONE.NAME
    image_size = fixed_input_size(cfg, is_train=True, needed_by=f"MODEL.BACKBONE.NAME={name}")
    for is_train, size in ((True, image_size), (False, input_size(cfg, is_train=False))):
        if size is not None and any(side < length for side, length in zip(size, patch, strict=True)):
            key = size_key(cfg, is_train=is_train)
            raise ConfigError(
                f"{key} is {size}, but MODEL.BACKBONE.NAME={name} needs images of at least {patch[0]} x {patch[1]} "
                f"pixels, the size of a patch.\n  fix: increase {key}"
            )
    return image_size


def transformer_options(cfg: CfgNode) -> dict[str, Any]:
    """Return the arguments of a Vision Transformer with patches of 16 x 16 pixels that the config sets.

    Raises:
        ConfigError: see ``size_of_training_images``.
    """
    backbone = cfg.MODEL.BACKBONE
    return {
        "image_size": size_of_training_images(cfg, TokenBackbone.patch),
        "in_channels": cfg.INPUT.CHANNELS,
        "stride": tuple(backbone.STRIDE_SIZE),
        "dropout": backbone.DROP_RATIO,
        "attention_dropout": backbone.ATT_DROP_RATE,
        "drop_path": backbone.DROP_PATH_RATIO,
        "cameras": backbone.SIE_CAMERAS,
        "views": backbone.SIE_VIEWS,
        "side_weight": backbone.SIE_COE,
        "checkpointing": backbone.CHECKPOINTING,
        "weights_grid": tuple(backbone.WEIGHTS_GRID),
    }


class SideInformation(nn.Module, Backbone):
    """Base class of backbones with camera and view embeddings (SIE, He et al. 2021, arXiv:2102.04378).

    A subclass calls ``create_side_embedding`` in its constructor and ``add_side_information`` in ``forward``.
    """

    def create_side_embedding(self, width: int, *, cameras: int, views: int, side_weight: float) -> None:
        """Create the parameter ``sie_embed``, (rows, 1, width) with random values, if there are cameras or views.

        Args:
            width: width of the tokens.
            cameras, views: number of cameras and of views with a learned embedding. If both are positive, each
                camera-view pair has an embedding. 0 disables the embedding.
            side_weight: weight of the embedding.
        """
        self.cameras, self.views, self.side_weight = cameras, views, side_weight
        self.takes_cameras = cameras > 0 or views > 0
        if self.takes_cameras:
            self.sie_embed = nn.Parameter(torch.zeros(max(cameras, 1) * max(views, 1), 1, width))
            nn.init.trunc_normal_(self.sie_embed, std=0.02)

    def add_side_information(
        self, tokens: torch.Tensor, camids: torch.Tensor | None, viewids: torch.Tensor | None
    ) -> torch.Tensor:
        """Add the weighted embedding of each image's camera and view to all its tokens.

        Args:
            tokens: (B, ..., width) float.
            camids, viewids: (B,) int64, starting at 0; required if the model has embeddings for cameras or views,
                respectively.

        Raises:
            ValueError: if required camera or view IDs are missing.
            DataError: see ``check_side_ids``.
        """
        if not self.takes_cameras:
            return tokens
        rows = self.sie_embed[self._side_index(camids, viewids)]
        for _ in range(tokens.dim() - rows.dim()):
            rows = rows.unsqueeze(1)  # a view with the size of the batch would fix it in exported models
        return tokens + self.side_weight * rows

    def check_side_ids(self, camids: torch.Tensor | None = None, viewids: torch.Tensor | None = None) -> None:
        """Check that the embeddings of cameras and views on the CPU exist; on a device, this would wait for it.

        Raises:
            DataError: if an ID is negative, or at least the number of embeddings.
        """
        if torch.jit.is_tracing() or torch.compiler.is_compiling():
            return
        for key, number, name, ids in (
            ("SIE_CAMERAS", self.cameras, "camids", camids),
            ("SIE_VIEWS", self.views, "viewids", viewids),
        ):
            if not number or ids is None or ids.device.type != "cpu" or not len(ids):
                continue
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= number:
                raise DataError(
                    f"{name} in {low}..{high}, but the model has embeddings for 0..{number - 1} "
                    f"(MODEL.BACKBONE.{key} {number}).\n"
                    "  fix: pass the number of each image as in training"
                )

    def _side_index(self, camids: torch.Tensor | None, viewids: torch.Tensor | None) -> torch.Tensor:
        """Compute the index of each image's row in ``sie_embed``, (B,) int64."""
        for key, number, name, ids in (
            ("SIE_CAMERAS", self.cameras, "camids", camids),
            ("SIE_VIEWS", self.views, "viewids", viewids),
        ):
            if number and ids is None:
                raise ValueError(
                    f"MODEL.BACKBONE.{key}={number} requires {name!r}, but the batch does not contain it.\n"
                    f"  fix: add {name!r}, (B,) int64 IDs from 0 to {number - 1}, to the batch"
                )
        self.check_side_ids(camids, viewids)
        if camids is not None and viewids is not None and self.cameras and self.views:
            return camids * self.views + viewids
        index = camids if self.cameras else viewids
        assert index is not None  # checked above
        return index

    def note_unused_side_embedding(self, state: dict[str, torch.Tensor], notes: list[str]) -> None:
        """Add a remark to ``notes`` if ``state`` has camera or view embeddings that the model does not use."""
        if "sie_embed" in state and not self.takes_cameras:
            notes.append(
                f"the file has {len(state['sie_embed'])} camera or view embeddings, which the model does not use: to "
                "reproduce its features, set MODEL.BACKBONE.SIE_CAMERAS or SIE_VIEWS"
            )


class TokenBackbone(PositionGrid, SideInformation):
    """Base class of Vision Transformers: blocks that map a sequence of tokens (B, prefix + patches, D) to another.

    Attributes:
        feature_dim: width D of the tokens.
        prefix: number of learned tokens before the patches: class, part and register tokens.
        patch: height and width of a patch. Default (16, 16).
        stride: vertical and horizontal distance of the patches.
    """

    feature_dim: int
    prefix: int
    patch: tuple[int, int] = (16, 16)
    stride: tuple[int, int]

    @property
    def last_block(self) -> nn.Module | None:
        """The last block, whose input is the last use of the patch tokens; None after ``hand_over_last_block``."""
        raise NotImplementedError

    def layer_groups(self) -> LayerGroups:
        """List the modules of each block and those after the last one, for layer-wise learning-rate decay."""
        raise NotImplementedError

    def patch_grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Compute the number of rows and columns of patches for images of ``size`` (height, width)."""
        return patch_grid(size, self.patch, self.stride)

    def grid_for(self, size: tuple[int, int], stride: tuple[int, int], last_stride: int) -> tuple[int, int]:
        """Compute the grid for training images of ``size``; ``last_stride`` has no effect."""
        return patch_grid(size, self.patch, stride)

    def hand_over_last_block(self) -> nn.Module:
        """Remove and return the last block and the norm; ``forward`` then returns all tokens, for ``JPMHead``.

        The returned module maps tokens (B, prefix + patches, D or more) to tokens whose first one is the feature.
        """
        raise NotImplementedError
