"""Jigsaw patch module of TransReID: a global feature, and local features of groups of shuffled patches."""

import copy

import torch
from torch import nn

from fastamp.config import CfgNode, Key
from fastamp.contracts import Head, State
from fastamp.modeling.backbones.transformer import TokenBackbone, run_block
from fastamp.modeling.heads.build import HEADS_REGISTRY
from fastamp.modeling.heads.embedding_head import EmbeddingHead
from fastamp.utils.errors import ConfigError

KEYS = (
    Key("MODEL.HEADS.JPM.PARTS", 4, "JPMHead: number of patch groups, each with a local feature.", low=1),
    Key(
        "MODEL.HEADS.JPM.REARRANGE",
        True,
        "JPMHead: shift and shuffle the patches before grouping; if False, each group is a band of rows.",
    ),
    Key(
        "MODEL.HEADS.JPM.SHIFT",
        5,
        "JPMHead: number of patches to shift by, plus 1, as in TransReID; 1 disables the shift.",
        low=1,
    ),
    Key(
        "MODEL.HEADS.JPM.GROUPS",
        2,
        "JPMHead: number of runs of consecutive patches to interleave; 1 disables the shuffle.",
        low=1,
    ),
)


@HEADS_REGISTRY.register()
class JPMHead(nn.Module, Head):
    """Jigsaw patch module: a global feature and one local feature per patch group (He et al. 2021, arXiv:2102.04378).

    The head has two copies of the last block of a ViT. The global feature is the class token after the first copy. The
    patch tokens are shifted and shuffled, so that each group covers the whole image, and split into groups. The
    second copy processes each group together with the class token; the resulting class token is the local feature.
    Each feature has a separate neck and classifier. The last block and the norm are removed from the backbone, because
    their outputs would not be used.

    Args:
        last_block: module (B, tokens, D) -> (B, tokens, D), copied with its weights; the first token of the output is
            the feature.
        branches: heads of the features, the global one first, then one per group.
        shift, groups: see ``shuffle_patches``. Default 5 and 2.
        rearrange: shift and shuffle the patches. Default True.
        checkpointing: recompute the activations of the blocks in the backward pass. Default False.
        prefix: number of learned tokens before the patches, which are added to each group. Default 1.
    """

    continues_backbone = True
    several_outputs = True

    def __init__(
        self,
        *,
        last_block: nn.Module,
        branches: list[EmbeddingHead],
        shift: int = 5,
        groups: int = 2,
        rearrange: bool = True,
        checkpointing: bool = False,
        prefix: int = 1,
    ) -> None:
        super().__init__()
        self.b1 = copy.deepcopy(last_block)
        self.b2 = copy.deepcopy(last_block)
        self.branches = nn.ModuleList(branches)
        self.parts = len(branches) - 1
        self.shift, self.groups, self.rearrange = shift, groups, rearrange
        self.checkpointing, self.prefix = checkpointing, prefix
        self.feature_dim = sum(branch.feature_dim for branch in branches)

    @classmethod
    def from_config(cls, cfg: CfgNode, *, backbone: nn.Module) -> "JPMHead":
        """Build the head configured in ``MODEL.HEADS``; the last block is removed from ``backbone``.

        Raises:
            ConfigError: if the backbone is not a Vision Transformer.
        """
        if not isinstance(backbone, TokenBackbone):
            raise ConfigError(
                f"MODEL.HEADS.NAME=JPMHead requires a Vision Transformer, but MODEL.BACKBONE.NAME is "
                f"{cfg.MODEL.BACKBONE.NAME}.\n"
                "  fix: set MODEL.BACKBONE.NAME to build_vit_backbone or to a plain ViT of timm"
            )
        jpm = cfg.MODEL.HEADS.JPM
        cfg = cfg.with_values({"MODEL.HEADS.POOL_LAYER": "Identity"})  # a token has no spatial dimensions
        return cls(
            last_block=backbone.hand_over_last_block(),
            branches=[EmbeddingHead(**EmbeddingHead.from_config(cfg)) for _ in range(1 + jpm.PARTS)],
            shift=jpm.SHIFT,
            groups=jpm.GROUPS,
            rearrange=jpm.REARRANGE,
            checkpointing=cfg.MODEL.BACKBONE.CHECKPOINTING,
            prefix=backbone.prefix,
        )

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor | None = None
    ) -> torch.Tensor | list[tuple[float, dict[str, torch.Tensor]]]:
        """Compute embeddings, and in training mode logits.

        Args:
            tokens: (B, prefix + patches, D) float of any precision, the class token first.
            targets: (B,) int64 class labels, required in training mode.

        Returns:
            In evaluation mode (B, (1 + parts) * D) float32: the global feature and the local features, the latter
            divided by ``parts``. In training mode a list of (loss weight, outputs of ``EmbeddingHead``): weight 0.5 for
            the global feature, and 0.5 / ``parts`` for each local feature.
        """
        features = [self._run_block(self.b1, tokens)[:, 0], *self._local_features(tokens)]
        outputs = [
            branch(feature[:, :, None, None], targets) for branch, feature in zip(self.branches, features, strict=True)
        ]
        if not self.training:
            return torch.cat([outputs[0], *(local / self.parts for local in outputs[1:])], dim=1)
        weights = [0.5] + [0.5 / self.parts] * self.parts
        return list(zip(weights, outputs, strict=True))

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute class logits (B, K), float32, from the global feature; see ``EmbeddingHead.logits``."""
        return self.branches[0].logits(self._run_block(self.b1, tokens)[:, 0, :, None, None])

    def _local_features(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute the local features, (B, D) for each group."""
        learned, patches = tokens[:, : self.prefix], tokens[:, self.prefix :]
        length = patches.shape[1] // self.parts
        if length == 0:
            raise ConfigError(
                f"MODEL.HEADS.JPM.PARTS is {self.parts}, but the images have only {patches.shape[1]} patches.\n"
                "  fix: decrease MODEL.HEADS.JPM.PARTS, or use larger images"
            )
        if self.rearrange:
            patches = shuffle_patches(patches, shift=self.shift, groups=self.groups)
        # All groups are computed as one batch. The remaining patches are dropped, as in TransReID.
        parts = [
            torch.cat((learned, patches[:, start : start + length]), dim=1)
            for start in range(0, length * self.parts, length)
        ]
        return self._run_block(self.b2, torch.cat(parts))[:, 0].unflatten(0, (self.parts, -1)).unbind()

    def _run_block(self, block: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return run_block(block, tokens, checkpointing=self.checkpointing)

    def convert_state_dict(self, state: dict[str, torch.Tensor], notes: list[str]) -> dict[str, torch.Tensor]:
        """Rename TransReID's parameters, e.g. ``bottleneck_2.*`` and ``classifier_2.*`` to ``branches.2.*``."""
        renamed = {}
        for key, value in state.items():
            part, dot, rest = key.partition(".")
            kind, _, number = part.partition("_")
            if kind in ("bottleneck", "classifier"):
                key = f"branches.{number or 0}.{kind}{dot}{rest}"
            renamed[key] = value
        return renamed


def last_block_state(state: State, *, number: int) -> State:
    """Extract the last block and norm of the backbone from the JPM head of a TransReID model.

    Args:
        state: state dict of the whole model.
        number: index of the last block in the backbone.

    Returns:
        Parameter name in the backbone -> tensor.
    """
    block = {name.removeprefix("b1.0."): value for name, value in state.items() if name.startswith("b1.0.")}
    renamed = {f"blocks.{number}.{name}": value for name, value in block.items()}
    return renamed | {"norm.weight": state["b1.1.weight"], "norm.bias": state["b1.1.bias"]}


def shuffle_patches(patches: torch.Tensor, *, shift: int, groups: int) -> torch.Tensor:
    """Shift the patches cyclically, split them into ``groups`` runs, and interleave the runs.

    As in TransReID's code, the patches are shifted by ``shift - 1``; and if N is not a multiple of ``groups``, as many
    patches as are missing are repeated, namely those before the last patch. The paper describes neither.

    Args:
        patches: (B, N, D), row by row.
        shift: number of patches to shift by, plus 1; 1 disables the shift.
        groups: number of runs; 1 disables the shuffle.

    Returns:
        (B, N rounded up to a multiple of ``groups``, D).
    """
    patches = patches.roll(1 - shift, dims=1)
    missing = -patches.shape[1] % groups
    if missing:
        patches = torch.cat((patches, patches[:, -1 - missing : -1]), dim=1)
    return patches.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)
