"""timm's plain Vision Transformers as backbones: DINOv2, DINOv3, EVA-02, SigLIP and others with one grid of patches."""

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastamp.contracts import State
from fastamp.modeling.backbones.build_utils import LayerGroups, layers_in_order
from fastamp.modeling.backbones.position_grid import COMMON_STRIDES, DEFAULT_STRIDE
from fastamp.modeling.backbones.transformer import (
    TokenBackbone,
    patch_grid,
    run_block,
)
from fastamp.utils.errors import ConfigError

MODEL_PREFIX = "model."


def is_plain_vit(model: nn.Module) -> bool:
    """Return True for timm models that ``TimmVisionTransformer`` supports."""
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer

    # Subclasses with another order of layers are excluded.
    return any(
        isinstance(model, cls) and type(model).forward_features is cls.forward_features
        for cls in (VisionTransformer, Eva)
    )


def _has_single_convolution(model: nn.Module) -> bool:
    """Return True if one convolution embeds the patches of a plain ViT."""
    from timm.layers import PatchEmbed

    return isinstance(model.patch_embed, PatchEmbed)


def patch_size_of(model: Any) -> tuple[int, int]:
    """Return the height and width of the patches of a plain ViT, in pixels."""
    height, width = model.patch_embed.feat_ratio(as_scalar=False)
    return height, width


def nearest_grid(size: tuple[int, int], patch: tuple[int, int]) -> tuple[int, int]:
    """Compute the grid (rows, columns), at least 1 x 1, whose size in pixels is nearest to ``size`` (height, width)."""
    rows, columns = (max(1, round(side / length)) for side, length in zip(size, patch, strict=True))
    return rows, columns


class TimmVisionTransformer(TokenBackbone):
    """Plain ViT of timm, with overlapping patches, camera and view embeddings, and a last block for ``JPMHead``.

    Images whose size is not a multiple of the patch size are resized to the nearest multiple by bilinear interpolation;
    with overlapping patches, the pixels after the last patch are not used, as in TransReID (arXiv:2102.04378).

    Args:
        model: plain ViT of timm, created with ``dynamic_img_size=True`` and with the ``img_size`` that has as many
            patches without overlap as the training images have with ``stride``. Its parameters are part of this module;
            it must not be used otherwise.
        stride: vertical and horizontal stride of the patches, in pixels.
        feature: output of ``forward``: ``"class"``: class token; ``"patches"``: map of patch tokens; ``"pooled"``:
            timm's pooling of the tokens; ``"auto"`` (default): attention pooling if the model has it, otherwise the
            class token if the model has one, otherwise the map.
        cameras, views, side_weight: see ``SideInformation``. Default: no embedding.
        checkpointing: recompute the activations of each block in the backward pass. Default False.
        weights_grid: see ``PositionGrid``. Default ().

    Raises:
        ConfigError: if the model does not support ``stride`` or ``feature``.
    """

    def __init__(
        self,
        model: Any,  # of timm, whose modules have no types
        *,
        stride: tuple[int, int],
        feature: str = "auto",
        cameras: int = 0,
        views: int = 0,
        side_weight: float = 3.0,
        checkpointing: bool = False,
        weights_grid: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.weights_grid = weights_grid
        self.model: Any = model
        self.feature_dim, self.prefix = model.embed_dim, model.num_prefix_tokens
        self.patch, self.stride = patch_size_of(model), stride
        self.grid: tuple[int, int] = model.patch_embed.grid_size
        self.checkpointing = checkpointing
        has_class_token = model.cls_token is not None
        if feature == "auto":
            feature = "pooled" if model.attn_pool is not None else "class" if has_class_token else "patches"
        if feature == "class" and not has_class_token:
            raise ConfigError(
                "MODEL.BACKBONE.FEATURE is class, but the model has no class token.\n"
                "  fix: set MODEL.BACKBONE.FEATURE to auto, patches or pooled"
            )
        self.feature = feature
        if feature != "pooled":
            model.attn_pool = None  # DistributedDataParallel does not support unused parameters
        # Dropout follows the camera and view embeddings.
        self.pos_drop, model.pos_drop = model.pos_drop, nn.Identity()
        if stride != self.patch:
            if not _has_single_convolution(model):
                raise ConfigError(
                    f"MODEL.BACKBONE.STRIDE_SIZE is {stride}, but overlapping patches require a single convolution; "
                    f"the patches of this model are embedded by {type(model.patch_embed).__name__}.\n"
                    f"  fix: set MODEL.BACKBONE.STRIDE_SIZE to {self.patch}, or choose another MODEL.BACKBONE.NAME"
                )
            model.patch_embed.proj.stride = stride
        self.create_side_embedding(self.feature_dim, cameras=cameras, views=views, side_weight=side_weight)

    @property
    def last_block(self) -> nn.Module | None:
        """The last block; None after ``hand_over_last_block``."""
        return None if self.model.norm is None else self.model.blocks[-1]

    def layer_groups(self) -> LayerGroups:
        """List the modules of each block and those after the last one, for layer-wise learning-rate decay."""
        return layers_in_order(self.model, "blocks")

    def patch_grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Compute the number of rows and columns of patches for images of ``size`` (height, width)."""
        if self.stride == self.patch:
            return nearest_grid(size, self.patch)
        return patch_grid(size, self.patch, self.stride)

    def grid_for(self, size: tuple[int, int], stride: tuple[int, int], last_stride: int) -> tuple[int, int]:
        """Compute the grid for training images of ``size``; ``last_stride`` has no effect."""
        if stride in (DEFAULT_STRIDE, self.patch):
            return nearest_grid(size, self.patch)
        return patch_grid(size, self.patch, stride)

    def common_strides(self) -> tuple[tuple[tuple[int, int], int], ...]:
        """List the strides without overlap and of TransReID, then the others down to half a patch."""
        return ((self.patch, 1), *(layout for layout in COMMON_STRIDES if layout[0] < self.patch))

    def forward(
        self, x: torch.Tensor, camids: torch.Tensor | None = None, viewids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the feature, or all tokens if the last block was removed by ``hand_over_last_block``.

        Args:
            x: (B, in_channels, H, W) float, normalized images.
            camids, viewids: see ``SideInformation.add_side_information``.

        Returns:
            (B, feature_dim, 1, 1), or (B, feature_dim, h, w) for ``feature`` ``"patches"``. If the last block was
            removed: (B, prefix + h * w, D), all tokens, without the last norm; D is ``feature_dim``, plus the width of
            the rotary position embedding if the model has one.
        """
        grid = self.patch_grid((int(x.shape[2]), int(x.shape[3])))  # tensors while torch.jit.trace runs
        tokens, rotation = self._embed(x, grid)
        tokens = self.pos_drop(self.add_side_information(tokens, camids, viewids))
        tokens = self.model.norm_pre(tokens)
        for number, block in enumerate(self.model.blocks):
            options = {} if rotation is None else {"rope": rotation[number] if self.model.rope_mixed else rotation}
            tokens = run_block(block, tokens, checkpointing=self.checkpointing, **options)
        if self.model.norm is None:
            return tokens if rotation is None else _append_rotation(tokens, rotation, self.prefix)
        tokens = normalize_and_pool(tokens, self.model, self.feature, self.prefix)
        if self.feature == "patches":
            return tokens.transpose(1, 2).unflatten(2, grid)
        return tokens[:, 0, :, None, None]

    def _embed(self, x: torch.Tensor, grid: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the tokens with position embedding (B, prefix + h * w, D), and the rotary embedding, if any."""
        model = self.model
        if self.stride == self.patch:
            size = (grid[0] * self.patch[0], grid[1] * self.patch[1])
            if (x.shape[2], x.shape[3]) != size:
                x = F.interpolate(x, size=size, mode="bilinear", align_corners=False)
            patches = model.patch_embed(x)
        else:
            patches = model.patch_embed.norm(model.patch_embed.proj(x).permute(0, 2, 3, 1))
        embedded = model._pos_embed(patches)  # resizes the position embedding to the grid of the patches
        return embedded if isinstance(embedded, tuple) else (embedded, None)

    def hand_over_last_block(self) -> nn.Module:
        """Remove and return the last block, the norm and the pooling; ``forward`` then returns all tokens.

        Raises:
            ConfigError: if the model has a separate rotary position embedding for each block.
        """
        if getattr(self.model, "rope_mixed", False):
            raise ConfigError(
                "MODEL.HEADS.NAME=JPMHead does not support models with a learned rotary position embedding per block.\n"
                "  fix: set MODEL.HEADS.NAME to EmbeddingHead, or choose another MODEL.BACKBONE.NAME"
            )
        last = TimmLastBlock(self.model, self.feature)
        del self.model.blocks[-1]
        self.model.norm = self.model.fc_norm = self.model.attn_pool = None
        return last

    def convert_state_dict(self, state: State, notes: list[str]) -> State:
        """Convert timm's, DINOv2's or DINOv3's parameter names; resize the position embedding to this grid."""
        self.note_unused_side_embedding(state, notes)
        others = {key: value for key, value in state.items() if key == "sie_embed"}
        trunk = {key.removeprefix(MODEL_PREFIX): value for key, value in state.items() if key not in others}
        if len(trunk) and not any(key.startswith(MODEL_PREFIX) for key in state):
            trunk = self._convert_names(trunk, notes)
        model_state = self.model.state_dict()
        # timm normalizes before or after the pooling; for a single token, both are the same.
        for name, other in (("norm", "fc_norm"), ("fc_norm", "norm")):
            for part in ("weight", "bias"):
                old, new = f"{name}.{part}", f"{other}.{part}"
                if old in trunk and old not in model_state and new in model_state and new not in trunk:
                    trunk[new] = trunk.pop(old)
        positions = trunk.get("pos_embed")
        if positions is not None and "pos_embed" in model_state:
            trunk["pos_embed"] = self._resize_positions(positions, trunk, notes)
        return others | {MODEL_PREFIX + key: value for key, value in trunk.items()}

    def _convert_names(self, state: State, notes: list[str]) -> State:
        """Convert the names in the files of the original programs to timm's."""
        state = _unchunk_blocks(state)
        kept = {}
        if "register_tokens" in state:  # DINOv2 adds the class token's position, timm's models with registers do not
            state["reg_token"] = state.pop("register_tokens")
            state["cls_token"] = state["cls_token"] + state["pos_embed"][:, :1]
            state["pos_embed"] = state["pos_embed"][:, 1:]
        names = {name for name, _ in self.model.named_parameters()}
        biases = [key for key in state if key.endswith("attn.qkv.bias")]
        without = [key for key in biases if key not in names and key.replace("qkv.bias", "q_bias") not in names]
        if "storage_tokens" in state and without:
            if any(bool(state[key].any()) for key in without):
                notes.append(
                    "the biases of queries, keys and values were dropped: for the original features, choose the model "
                    "with the suffix _qkvb"
                )
            state = {key: value for key, value in state.items() if key not in without}
        # Position embedding and patches of another size are not changed by timm's function, which logs no size.
        for key in ("pos_embed", "patch_embed.proj.weight"):
            if key in state and (key == "pos_embed" or state[key].dim() == 4):
                kept[key] = state.pop(key)
        return convert_by_timm(state, self.model) | kept

    def _resize_positions(self, positions: torch.Tensor, trunk: State, notes: list[str]) -> torch.Tensor:
        """Resize a position embedding to the grid of this model by bicubic interpolation with antialiasing."""
        from timm.layers import resample_abs_pos_embed

        prefix = 0 if self.model.no_embed_class else self.prefix
        own_registers = self.model.reg_token is not None
        fits = positions.dim() == 3 and positions.shape[:1] == (1,) and positions.shape[1] > prefix + 1
        if not fits or own_registers != ("reg_token" in trunk) or positions.shape[2] != self.feature_dim:
            return positions  # loading reports the shape mismatch
        grid = self.grid_in_file(positions.shape[1] - prefix, notes, "bicubic")
        if grid == self.grid:
            return positions
        return resample_abs_pos_embed(positions, new_size=[*self.grid], old_size=[*grid], num_prefix_tokens=prefix)


def convert_by_timm(state: State, model: nn.Module) -> State:
    """Convert the authors' names and resize position embeddings, by the function of timm's model family, if any."""
    convert = vars(sys.modules[type(model).__module__]).get("checkpoint_filter_fn")
    return state if convert is None else convert(state, model)


class TimmLastBlock(nn.Module):
    """Last block of a plain ViT with the norm and the pooling after it.

    The parameters are those of the given model.

    Args:
        model: plain ViT of timm.
        feature: ``"class"``, ``"patches"`` or ``"pooled"``; see ``TimmVisionTransformer``.
    """

    def __init__(self, model: Any, feature: str) -> None:
        super().__init__()
        self.block, self.norm, self.fc_norm = model.blocks[-1], model.norm, model.fc_norm
        self.attn_pool, self.global_pool = model.attn_pool, model.global_pool
        self.pool_include_prefix = _pools_prefix(model)
        self.feature, self.prefix, self.width = feature, model.num_prefix_tokens, model.embed_dim

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the feature as the first and only token: (B, prefix + patches, D or more) -> (B, 1, D).

        Channels after D are the rotary position embedding of each patch, so that it is shuffled with the patches.
        """
        x = tokens[..., : self.width]
        options: dict[str, Any] = {}
        if tokens.shape[2] > self.width:
            options["rope"] = tokens[:, None, self.prefix :, self.width :]
        x = normalize_and_pool(self.block(x, **options), self, self.feature, self.prefix)
        return x.mean(dim=1, keepdim=True)


def normalize_and_pool(tokens: torch.Tensor, model: nn.Module, feature: str, prefix: int) -> torch.Tensor:
    """Apply the norms of a plain ViT of timm to the output of its last block, and select or pool tokens.

    Args:
        tokens: (B, prefix + patches, D).
        model: module with the ViT's ``norm``, ``fc_norm``, ``attn_pool`` and ``global_pool``.
        feature: ``"class"``: class token; ``"patches"``: patch tokens; ``"pooled"``: timm's pooling, by attention or as
            in ``global_pool``.
        prefix: number of learned tokens before the patches.

    Returns:
        (B, patches, D) for ``"patches"``, otherwise (B, 1, D).
    """
    tokens = model.norm(tokens)
    if feature == "class":
        return model.fc_norm(tokens[:, :1])
    if feature == "patches":
        return model.fc_norm(tokens[:, prefix:])
    from timm.layers import global_pool_nlc

    whole = _pools_prefix(model)
    if model.attn_pool is not None:
        pooled = model.attn_pool(tokens if whole else tokens[:, prefix:])
    else:
        pooled = global_pool_nlc(
            tokens, pool_type=model.global_pool, num_prefix_tokens=prefix, reduce_include_prefix=whole
        )
    return model.fc_norm(pooled)[:, None]


def _pools_prefix(model: nn.Module) -> bool:
    """Return True if timm's pooling includes the learned tokens; the attention pooling of ``Eva`` always does."""
    return getattr(model, "pool_include_prefix", model.attn_pool is not None)


def _append_rotation(tokens: torch.Tensor, rotation: torch.Tensor, prefix: int) -> torch.Tensor:
    """Append the rotary embedding (patches, R) to the channels of patch tokens, and zeros to those of other tokens."""
    rotation = F.pad(rotation.expand(tokens.shape[0], -1, -1), (0, 0, prefix, 0))
    return torch.cat((tokens, rotation.to(tokens.dtype)), dim=2)


def _unchunk_blocks(state: State) -> State:
    """Rename ``blocks.CHUNK.NUMBER.*``, of DINOv2's and DINOv3's training checkpoints, to ``blocks.NUMBER.*``."""
    renamed = {}
    for key, value in state.items():
        parts = key.split(".")
        if parts[0] == "blocks" and len(parts) > 3 and parts[2].isdigit():
            key = ".".join(("blocks", *parts[2:]))
        renamed[key] = value
    return renamed
