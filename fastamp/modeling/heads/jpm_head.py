"""TransReID's jigsaw patch module: a global feature, and local ones of shuffled patches."""

import copy
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastamp.checkpoint.load_state import State
from fastamp.config import Key
from fastamp.modeling.heads.build import HEADS_REGISTRY
from fastamp.modeling.heads.embedding_head import EmbeddingHead
from fastamp.utils.errors import ConfigError
from fastamp.utils.moved import moved_names, renamed_attribute

__getattr__ = moved_names(
    __name__,
    {
        "shuffled": "fastamp.modeling.heads.jpm_head.shuffle_patches",
        "blocks_in_head": "fastamp.modeling.heads.jpm_head.last_block_state",
    },
)

KEYS = (
    Key("MODEL.HEADS.JPM.PARTS", 4, "JPMHead: parts of the patches with a feature of their own.", low=1),
    Key(
        "MODEL.HEADS.JPM.REARRANGE",
        True,
        "JPMHead: shift and shuffle the patches first; off makes the parts bands of rows.",
    ),
    Key(
        "MODEL.HEADS.JPM.SHIFT",
        5,
        "JPMHead: patches that the rest moves before, counted as TransReID does: from 1, which moves nothing.",
        low=1,
    ),
    Key("MODEL.HEADS.JPM.GROUPS", 2, "JPMHead: runs of patches that are shuffled, taking one of each in turn.", low=1),
)


@HEADS_REGISTRY.register()
class JPMHead(nn.Module):
    """Two copies of a ViT's last block, for all tokens and for parts of them (He et al. 2021, arXiv:2102.04378).

    The global feature is the class token after the first copy. The patches' tokens are shifted and shuffled, so that
    each part of them is from all over the image, and cut into parts; each part goes through the second copy together
    with the class token, and what becomes of that is a local feature. Each feature has a neck and a classifier of its
    own. The head takes the last block and norm from the backbone, which then ends with all tokens: none is computed,
    or waits for a gradient, in vain.

    Args:
        last_block: (B, tokens, D) -> (B, tokens, D); it is copied, with its weights.
        branches: the necks and classifiers: of the global feature first, then of each part.
        shift: see ``shuffle_patches``.
        groups: see ``shuffle_patches``.
        rearrange: whether to shift and shuffle at all.
        checkpointing: keep no activations of the blocks for the gradient, and compute them again.
    """

    # Built as from_config(cfg, backbone=...).
    continues_backbone = True
    # In training mode a list of them, of which each goes through the losses.
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
    ) -> None:
        super().__init__()
        self.b1 = copy.deepcopy(last_block)
        self.b2 = copy.deepcopy(last_block)
        self.branches = nn.ModuleList(branches)
        self.parts = len(branches) - 1
        self.shift, self.groups, self.rearrange = shift, groups, rearrange
        self.checkpointing = checkpointing
        self.feature_dim = sum(branch.feature_dim for branch in branches)

    @classmethod
    def from_config(cls, cfg: Any, *, backbone: nn.Module) -> "JPMHead":
        """Return the head of ``MODEL.HEADS``; ``backbone`` loses its last block to it.

        Raises:
            ConfigError: the backbone has no block to hand over.
        """
        if not hasattr(backbone, "hand_over_last_block"):
            raise ConfigError(
                f"MODEL.HEADS.NAME JPMHead continues a Vision Transformer, and MODEL.BACKBONE.NAME "
                f"{cfg.MODEL.BACKBONE.NAME} is none.\n  fix: MODEL.BACKBONE.NAME build_vit_backbone"
            )
        jpm = cfg.MODEL.HEADS.JPM
        cfg = cfg.with_values({"MODEL.HEADS.POOL_LAYER": "Identity"})  # a token is a vector already
        return cls(
            last_block=backbone.hand_over_last_block(),
            branches=[EmbeddingHead.from_config(cfg) for _ in range(1 + jpm.PARTS)],
            shift=jpm.SHIFT,
            groups=jpm.GROUPS,
            rearrange=jpm.REARRANGE,
            checkpointing=cfg.MODEL.BACKBONE.CHECKPOINTING,
        )

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor | None = None
    ) -> torch.Tensor | list[tuple[float, dict[str, torch.Tensor]]]:
        """Compute embeddings, and in training mode logits.

        Args:
            tokens: (B, 1 + patches, D) float of any precision, the class token first.
            targets: (B,) int64 class numbers, needed in training mode.

        Returns:
            In evaluation mode (B, (1 + parts) * D) float32: the global feature, and the local ones each divided by
            their number. In training mode ``EmbeddingHead``'s outputs of each feature with its weight in the losses:
            the global one counts as much as all local ones together.
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
        """Return (B, K) float32 class logits of the global feature, in every mode; see ``EmbeddingHead.logits``."""
        return self.branches[0].logits(self._run_block(self.b1, tokens)[:, 0, :, None, None])

    def _local_features(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return (B, D) for each part."""
        class_token, patches = tokens[:, :1], tokens[:, 1:]
        length = patches.shape[1] // self.parts
        if length == 0:
            raise ConfigError(
                f"MODEL.HEADS.JPM.PARTS is {self.parts}, but images of this size have {patches.shape[1]} patches"
            )
        if self.rearrange:
            patches = shuffle_patches(patches, shift=self.shift, groups=self.groups)
        # All parts as one batch; what is left over after the last part is dropped, as TransReID does.
        parts = [
            torch.cat((class_token, patches[:, start : start + length]), dim=1)
            for start in range(0, length * self.parts, length)
        ]
        return self._run_block(self.b2, torch.cat(parts))[:, 0].unflatten(0, (self.parts, -1)).unbind()

    def _run_block(self, block: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(block, tokens, use_reentrant=False)
        return block(tokens)

    def convert_state_dict(self, state: dict[str, torch.Tensor], notes: list[str]) -> dict[str, torch.Tensor]:
        """Return TransReID's ``bottleneck_2.*`` and ``classifier_2.*`` as ``branches.2.*``, which knows the rest."""
        renamed = {}
        for key, value in state.items():
            part, dot, rest = key.partition(".")
            kind, _, number = part.partition("_")
            if kind in ("bottleneck", "classifier"):
                key = f"branches.{number or 0}.{kind}{dot}{rest}"
            renamed[key] = value
        return renamed

    adopt_state = renamed_attribute("adopt_state", "convert_state_dict")


def last_block_state(state: State, *, number: int) -> State:
    """Return the backbone's last block and norm, which the head has, under the backbone's names.

    Args:
        state: of a whole TransReID model.
        number: of that block, from 0.
    """
    block = {name.removeprefix("b1.0."): value for name, value in state.items() if name.startswith("b1.0.")}
    renamed = {f"blocks.{number}.{name}": value for name, value in block.items()}
    return renamed | {"norm.weight": state["b1.1.weight"], "norm.bias": state["b1.1.bias"]}


def shuffle_patches(patches: torch.Tensor, *, shift: int, groups: int) -> torch.Tensor:
    """Return patches so that neighbours come from far apart: moved round, dealt into groups, one of each in turn.

    Differs from the paper as TransReID's program does: they move by one less than the shift, and where the groups do
    not divide their number, those before the last one are there twice.

    Args:
        patches: (B, N, D), row by row.
        shift: 1 moves nothing.
        groups: runs of neighbours that are interleaved; 1 shuffles nothing.

    Returns:
        (B, N rounded up to a multiple of ``groups``, D).
    """
    patches = patches.roll(1 - shift, dims=1)
    missing = -patches.shape[1] % groups
    if missing:
        patches = torch.cat((patches, patches[:, -1 - missing : -1]), dim=1)
    return patches.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)
