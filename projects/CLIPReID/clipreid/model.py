"""CLIP-ReID: image encoder, its head, and the text features of identities (Li et al. 2023, arXiv:2211.13977)."""

import logging
from typing import Any

import torch
from torch import nn

from clipreid.losses import MeanCrossEntropyLoss, image_text_logits
from clipreid.text import PromptLearner, TextEncoder, prompt_tokens
from fastamp.amp import force_fp32
from fastamp.checkpoint.load_state import load_model_state
from fastamp.checkpoint.weights_file import read_checkpoint, state_dict_in
from fastamp.config import CfgNode, Key
from fastamp.contracts import Backbone, Head
from fastamp.layers import build_norm
from fastamp.modeling import META_ARCH_REGISTRY
from fastamp.modeling.backbones.clip import ClipVisionTransformer
from fastamp.modeling.backbones.clip_resnet import ClipResNet
from fastamp.modeling.heads import HEADS_REGISTRY
from fastamp.modeling.losses.compute import compute_losses
from fastamp.modeling.meta_arch import Baseline
from fastamp.utils.errors import ConfigError

logger = logging.getLogger(f"fastamp.{__name__}")

KEYS = (
    Key(
        "CLIPREID.PROMPT",
        "A photo of a X X X X person.",
        "CLIP-ReID: prompt; at X X X X, four vectors are learned for each identity.",
    ),
    Key(
        "CLIPREID.VOCABULARY",
        "",
        "CLIP-ReID: file of merges of CLIP's tokenizer, bpe_simple_vocab_16e6.txt.gz; not needed for the published "
        "prompts, of a person and of a vehicle.",
    ),
    Key("CLIPREID.TEXT_WIDTH", 512, "CLIP-ReID: width of the text tower.", low=1),
    Key("CLIPREID.TEXT_BLOCKS", 12, "CLIP-ReID: number of blocks of the text tower.", low=1),
    Key("CLIPREID.I2T_SCALE", 1.0, "CLIP-ReID: weight of the image-to-text cross entropy in the second stage.", low=0),
)
# Rows of the random token embedding of a model without pretrained weights: those of CLIP's vocabulary.
_VOCABULARY_SIZE = 49408
_TEXT = ("positional_embedding", "text_projection", "ln_final.", "transformer.")


@HEADS_REGISTRY.register()
class CLIPReIDHead(nn.Module, Head):
    """Head with a neck and a classifier for the image feature, and for its projection to the space of texts.

    Args:
        dims: widths of the image feature and of the projection.
        num_classes: number of identities; 0 builds a head for evaluation only.
        eval_feat: feature in evaluation mode: "before" or "after" the necks.
        norm: name of the necks' normalization layer. Default ``"BN"``.
    """

    classifiers = ("weight", "weight_proj")
    continues_backbone = True
    several_outputs = True

    def __init__(self, *, dims: tuple[int, int], num_classes: int, eval_feat: str, norm: str = "BN") -> None:
        super().__init__()
        self.dims, self.eval_feat, self.feature_dim = dims, eval_feat, sum(dims)
        self.bottleneck = build_norm(norm, dims[0], freeze_bias=True)
        self.bottleneck_proj = build_norm(norm, dims[1], freeze_bias=True)
        self.weight = nn.Parameter(torch.randn(num_classes, dims[0]) * 0.001)
        self.weight_proj = nn.Parameter(torch.randn(num_classes, dims[1]) * 0.001)

    @classmethod
    def from_config(cls, cfg: CfgNode, *, backbone: nn.Module) -> dict[str, Any]:
        """Return the constructor arguments.

        Raises:
            ConfigError: if the backbone is not an image tower of CLIP with a projection.
        """
        if not isinstance(backbone, ClipVisionTransformer | ClipResNet) or not cfg.MODEL.BACKBONE.PROJECTION:
            raise ConfigError(
                f"MODEL.HEADS.NAME=CLIPReIDHead requires an image tower of CLIP with a projection; found "
                f"MODEL.BACKBONE.NAME {cfg.MODEL.BACKBONE.NAME}, PROJECTION {cfg.MODEL.BACKBONE.PROJECTION}.\n"
                "  fix: set MODEL.BACKBONE.NAME to build_clip_vit_backbone or build_clip_resnet_backbone, and "
                "MODEL.BACKBONE.PROJECTION to True"
            )
        heads = cfg.MODEL.HEADS
        return {
            "dims": backbone.feature_dims[1:],
            "num_classes": heads.NUM_CLASSES,
            "eval_feat": heads.EVAL_FEAT,
            "norm": heads.NORM,
        }

    @force_fp32
    def forward(
        self, features: torch.Tensor, targets: torch.Tensor | None = None
    ) -> torch.Tensor | list[tuple[float, dict[str, torch.Tensor]]]:
        """Compute features or outputs for the losses.

        Args:
            features: (B, D, 1, 1) or (B, D), image feature and projection.
            targets: not used.

        Returns:
            In evaluation mode the features (B, D), float32. In training mode a list of (1, outputs) for the image
            feature and for the projection, each with ``cls_outputs`` and ``pred_class_logits``, (B, K), and
            ``features`` before the neck.
        """
        parts = features.flatten(1).split(list(self.dims), dim=1)
        if not self.training and self.eval_feat == "before":
            return torch.cat(parts, dim=1)
        necks = (self.bottleneck(parts[0][:, :, None, None]), self.bottleneck_proj(parts[1][:, :, None, None]))
        necks = tuple(neck.flatten(1) for neck in necks)
        if not self.training:
            return torch.cat(necks, dim=1)
        logits = (necks[0] @ self.weight.t(), necks[1] @ self.weight_proj.t())
        return [
            (1.0, {"cls_outputs": part_logits, "pred_class_logits": part_logits, "features": part})
            for part_logits, part in zip(logits, parts, strict=True)
        ]

    @force_fp32
    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Compute the class logits of the image feature, (B, K) float32."""
        part = features.flatten(1)[:, : self.dims[0]]
        return self.bottleneck(part[:, :, None, None]).flatten(1) @ self.weight.t()


@META_ARCH_REGISTRY.register()
class CLIPReID(Baseline):
    """Model of CLIP-ReID. Its training mode is the second stage; ``CLIPReIDTrainer`` trains the prompts before it.

    The cross entropy is that of the image feature and of the projection; the triplet loss, or another loss of pairs, is
    that of these two and of the feature before the last block (ViT) or stage (ResNet).

    Args:
        prompt_learner: prompts; None, with ``text_encoder``, for evaluation.
        text_encoder: text tower, whose parameters are frozen.
        text_dim: width of the text features. Default 0.
        text_loss: loss of the image-to-text logits.
        parts: keyword arguments of ``Baseline``.

    Attributes:
        text_features: (K, text_dim) float32, the features of the prompts after the first stage.
    """

    classifiers = ("text_features",)
    training_only = ("losses", "prompt_learner", "text_encoder", "text_features", "text_loss")

    text_features: torch.Tensor | None

    def __init__(
        self,
        *,
        prompt_learner: PromptLearner | None,
        text_encoder: TextEncoder | None,
        text_dim: int = 0,
        text_loss: MeanCrossEntropyLoss | None = None,
        **parts: Any,
    ) -> None:
        super().__init__(**parts)
        self.prompt_learner, self.text_encoder, self.text_loss = prompt_learner, text_encoder, text_loss
        count = 0 if prompt_learner is None else len(prompt_learner.cls_ctx)
        self.register_buffer("text_features", torch.zeros(count, text_dim) if count else None)
        for module in (prompt_learner, text_encoder):
            if module is not None:
                module.requires_grad_(False)

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        """Build the parts configured in ``MODEL`` and ``CLIPREID``.

        Raises:
            ConfigError: if the head is not ``CLIPReIDHead``, or ``MODEL.COMPILE`` is not off in training.
        """
        heads = cfg.MODEL.HEADS
        if heads.NAME != "CLIPReIDHead":
            raise ConfigError(
                f"MODEL.META_ARCHITECTURE=CLIPReID requires MODEL.HEADS.NAME CLIPReIDHead, found {heads.NAME}.\n"
                "  fix: set MODEL.HEADS.NAME to CLIPReIDHead"
            )
        if cfg.MODEL.COMPILE != "off" and heads.NUM_CLASSES:
            raise ConfigError(
                f"MODEL.COMPILE={cfg.MODEL.COMPILE} is not supported by MODEL.META_ARCHITECTURE=CLIPReID, which reads "
                "features within the backbone.\n  fix: set MODEL.COMPILE to off"
            )
        parts = super().from_config(cfg)
        return parts | cls._text_parts(cfg, parts["backbone"])

    @classmethod
    def _text_parts(cls, cfg: CfgNode, backbone: nn.Module) -> dict[str, Any]:
        """Build the text tower and the prompts; without classes, for evaluation, there are none."""
        options, classes = cfg.CLIPREID, cfg.MODEL.HEADS.NUM_CLASSES
        if not classes:
            return {"prompt_learner": None, "text_encoder": None}
        tokens, start = prompt_tokens(options.PROMPT, options.VOCABULARY)
        embedding = backbone.feature_dims[2]
        encoder = TextEncoder(
            width=options.TEXT_WIDTH,
            blocks=options.TEXT_BLOCKS,
            embedding=embedding,
            quick_gelu=cfg.MODEL.BACKBONE.QUICK_GELU,
        )
        prompts = PromptLearner(classes, options.TEXT_WIDTH, start=start, length=len(tokens))
        words = torch.randn(max(_VOCABULARY_SIZE, max(tokens) + 1), options.TEXT_WIDTH) * 0.02
        path = cfg.MODEL.BACKBONE.PRETRAIN_PATH if cfg.MODEL.BACKBONE.PRETRAIN else ""
        if path:
            words = _load_text_tower(encoder, path)
        prompts.set_words(tokens, words)
        loss = MeanCrossEntropyLoss.from_config(cfg.with_values({"MODEL.LOSSES.CE.SCALE": options.I2T_SCALE}))
        return {"prompt_learner": prompts, "text_encoder": encoder, "text_dim": embedding, "text_loss": loss}

    def forward(self, batch: dict[str, Any] | torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """Compute features, or the losses ``loss_cls``, ``loss_triplet`` and ``loss_i2t`` of the second stage.

        Raises:
            ConfigError: in training mode, if there are no text features, because the first stage was not run.
        """
        if not self.training:
            return super().forward(batch)
        batch = self.as_batch(batch)
        self._check_text_features()
        targets = self.targets(batch)
        last, image, projection = self.feature_maps(batch, _Features(self.backbone))
        outputs = self.heads(torch.cat((image.float(), projection.float()), dim=1), targets)
        extra = (1.0, {"features": last.float()})
        pairs = {name: loss for name, loss in self.losses.items() if loss.over_pairs}
        others = {name: loss for name, loss in self.losses.items() if name not in pairs}
        gather = self.losses.gather
        terms = compute_losses(others, outputs, targets, gather=gather)
        terms |= compute_losses(pairs, [*outputs, extra], targets, gather=gather)
        logits = image_text_logits(projection, self.text_features)
        text = {"loss_i2t": self.text_loss} if self.text_loss.scale else {}
        return terms | compute_losses(text, {"cls_outputs": logits}, targets, gather=gather)

    def _check_text_features(self) -> None:
        if self.text_features is None or not len(self.text_features):
            raise ConfigError(
                "MODEL.META_ARCHITECTURE=CLIPReID has no identities to train with: MODEL.HEADS.NUM_CLASSES is 0.\n"
                "  fix: set MODEL.HEADS.NUM_CLASSES to the number of identities"
            )

    @torch.no_grad()
    def prompt_image_features(self, batch: dict[str, Any]) -> torch.Tensor:
        """Compute the projections (B, text_dim) for the first stage: without camera and view embeddings."""
        return self.feature_maps(batch, _Features(self.backbone, side_information=False))[2]

    @torch.no_grad()
    def update_text_features(self, batch_size: int = 64) -> None:
        """Compute the text feature of each identity in float32."""
        labels = torch.arange(len(self.text_features), device=self.device)
        texts = [self.text_encoder(self.prompt_learner(part)) for part in labels.split(batch_size)]
        self.text_features.copy_(torch.cat(texts))

    def equal_on_all_ranks(self) -> tuple[str, ...]:
        """Return the names of the buffers that are equal on all ranks: constants."""
        parts = () if self.text_features is None else ("text_features",)
        return (*super().equal_on_all_ranks(), *parts)

    def convert_state_dict(self, state: dict[str, torch.Tensor], notes: list[str]) -> dict[str, torch.Tensor]:
        """Convert the names of CLIP-ReID's program; other files as ``ImageModel``."""
        if not any(name.startswith(("image_encoder.", "bottleneck_proj.")) for name in state):
            return super().convert_state_dict(state, notes)
        names = {"classifier.weight": "heads.weight", "classifier_proj.weight": "heads.weight_proj"}
        names |= {"cv_embed": "backbone.cv_embed"}
        renamed = {}
        for name, value in state.items():
            if name.startswith("image_encoder."):
                name = name.replace("image_encoder.", "backbone.", 1)
            elif name.startswith("bottleneck"):
                name = f"heads.{name}"
            renamed[names.get(name, name)] = value
        return renamed


class _Features(Backbone):
    """Call of ``backbone.features`` in place of the backbone, for ``ImageModel.feature_maps``.

    Args:
        backbone: image tower of CLIP.
        side_information: add camera and view embeddings. Default True.
    """

    def __init__(self, backbone: nn.Module, *, side_information: bool = True) -> None:
        self.backbone = backbone
        self.takes_cameras = side_information and backbone.takes_cameras
        self._options = {} if side_information or not backbone.takes_cameras else {"side_information": False}

    def __call__(self, images: torch.Tensor, **ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.backbone.features(images, **ids, **self._options)


def _load_text_tower(encoder: TextEncoder, path: str) -> torch.Tensor:
    """Load the text tower of a file of CLIP, and return its token embedding (vocabulary, width).

    Raises:
        ConfigError: if the file has no text tower.
        WeightsError: if the text tower does not match the model.
    """
    state = state_dict_in(read_checkpoint(path), path)
    if any(name.startswith("text.") for name in state):  # open_clip's models with a custom text tower
        state = {name.removeprefix("text."): value for name, value in state.items()}
    text = {name: value.float() for name, value in state.items() if name.startswith(_TEXT)}
    if not text or "token_embedding.weight" not in state:
        raise ConfigError(
            f"MODEL.BACKBONE.PRETRAIN_PATH {path} contains no text tower, which CLIP-ReID requires.\n"
            f"  found: {', '.join(list(state)[:3])}, ...\n"
            "  fix: set it to a complete file of CLIP; to start from a ReID model of CLIP-ReID, set MODEL.WEIGHTS"
        )
    sizes = (state["token_embedding.weight"].shape[1], sum(name.endswith(".ln_1.weight") for name in text))
    expected = (encoder.positional_embedding.shape[1], len(encoder.transformer.resblocks))
    if sizes != expected:
        raise ConfigError(
            f"the text tower in {path} has width {sizes[0]} and {sizes[1]} blocks, but the config has "
            f"CLIPREID.TEXT_WIDTH {expected[0]} and TEXT_BLOCKS {expected[1]}.\n"
            f"  fix: set CLIPREID.TEXT_WIDTH to {sizes[0]} and CLIPREID.TEXT_BLOCKS to {sizes[1]}"
        )
    load_model_state(encoder, text, source=f"{path} (text tower)", backbone_prefix="")
    return state["token_embedding.weight"]
