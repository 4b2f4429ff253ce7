"""Known layouts of pretrained backbones, for messages about files that do not match a model."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fastamp.utils.errors import WeightsError

# Names of transformer blocks in timm's, Microsoft's, mmsegmentation's and torchvision's state dicts.
_BLOCK = re.compile(
    r"(?:^|\.)(?:(?:(?:layers|stages)\.(\d+)\.)?blocks\.(\d+)|features\.(\d+)\.(\d+))\.(?:norm1|attn|op)\b"
)


@dataclass(frozen=True)
class Layout:
    """Layout of the weights files of a program.

    Attributes:
        title: program and architecture.
        names: tensor names that identify the layout, without prefix.
        backbone: value of ``MODEL.BACKBONE.NAME`` that loads these files; "" if none does.
    """

    title: str
    names: tuple[str, ...]
    backbone: str


LAYOUTS = (
    Layout(
        "DINOv3 (original program)",
        ("storage_tokens", "rope_embed.periods", "cls_token", "blocks.0.ls1.gamma", "blocks.0.attn.qkv.weight"),
        "timm/vit_SIZE_patch16_dinov3",
    ),
    Layout(
        "DINOv2 with registers (original program)",
        ("register_tokens", "mask_token", "pos_embed", "blocks.0.ls1.gamma", "blocks.0.attn.qkv.weight"),
        "timm/vit_SIZE_patch14_reg4_dinov2",
    ),
    Layout(
        "DINOv2",
        ("mask_token", "cls_token", "pos_embed", "blocks.0.ls1.gamma", "blocks.0.attn.qkv.weight"),
        "timm/vit_SIZE_patch14_dinov2",
    ),
    Layout(
        "ViT of timm, DeiT, DINO or TransReID",
        ("cls_token", "pos_embed", "patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight"),
        "build_vit_backbone or timm/vit_SIZE_patch16_224",
    ),
    Layout(
        "PASS",
        ("part_token1", "cls_pos", "part1_pos", "pos_embed", "blocks.0.attn.qkv.weight"),
        "build_vit_backbone with MODEL.BACKBONE.PART_TOKENS 3",
    ),
    Layout(
        "TransReID-SSL with convolutional stem",
        ("patch_embed.conv.0.weight", "patch_embed.conv.1.IN.weight", "patch_embed.proj.weight", "cls_token"),
        "build_vit_backbone with MODEL.BACKBONE.STEM_CONV True",
    ),
    Layout(
        "SigLIP of timm",
        ("attn_pool.latent", "attn_pool.kv.weight", "pos_embed", "blocks.0.attn.qkv.weight"),
        "timm/vit_SIZE_patch16_siglip_256",
    ),
    Layout(
        "EVA-02 of timm",
        ("blocks.0.attn.q_proj.weight", "blocks.0.mlp.fc1_g.weight", "cls_token", "pos_embed"),
        "timm/eva02_SIZE_patch14_224",
    ),
    Layout(
        "SOLIDER",
        ("stages.0.blocks.0.attn.w_msa.qkv.weight", "semantic_embed_w.0.weight", "patch_embed.projection.weight"),
        "build_solider_backbone",
    ),
    Layout(
        "Swin of Microsoft or timm",
        (
            "layers.0.blocks.0.attn.relative_position_bias_table",
            "patch_embed.proj.weight",
            "layers.0.blocks.0.norm1.weight",
        ),
        "build_swin_backbone or timm/swin_SIZE_patch4_window7_224",
    ),
    Layout(
        "Swin of torchvision",
        ("features.1.0.attn.relative_position_bias_table", "features.0.0.weight", "features.1.0.norm1.weight"),
        "build_swin_backbone",
    ),
    Layout(
        "VMamba",
        ("layers.0.blocks.0.op.x_proj_weight", "layers.0.blocks.0.op.A_logs", "layers.0.blocks.0.op.conv2d.weight"),
        "build_vmamba_backbone",
    ),
    Layout(
        "CLIP's ResNet",
        ("conv3.weight", "bn3.running_mean", "attnpool.positional_embedding", "layer4.0.conv3.weight"),
        "build_clip_resnet_backbone",
    ),
    Layout(
        "ResNet of torchvision, FastReID or LUPerson",
        ("conv1.weight", "bn1.running_mean", "layer1.0.conv1.weight", "layer4.0.downsample.0.weight"),
        "build_resnet_backbone",
    ),
    Layout(
        "OSNet of torchreid",
        ("conv1.conv.weight", "conv2.0.conv1.conv.weight", "conv5.conv.weight"),
        "build_osnet_backbone",
    ),
    Layout(
        "ConvNeXt of timm",
        ("stem.0.weight", "stages.0.blocks.0.conv_dw.weight", "stages.1.downsample.1.weight"),
        "timm/convnext_SIZE",
    ),
    Layout(
        "CLIP's image encoder",
        ("visual.conv1.weight", "visual.class_embedding", "visual.transformer.resblocks.0.attn.in_proj_weight"),
        "build_clip_vit_backbone for ViT-B/16, timm/vit_SIZE_patchN_clip_224 for the others, e.g. ViT-L/14",
    ),
    Layout(
        "CLIP of Hugging Face transformers",
        (
            "vision_model.embeddings.class_embedding",
            "vision_model.embeddings.patch_embedding.weight",
            "vision_model.pre_layrnorm.weight",
            "vision_model.encoder.layers.0.self_attn.q_proj.weight",
        ),
        "build_clip_vit_backbone for ViT-B/16; timm/vit_SIZE_patchN_clip_224 with OpenAI's or open_clip's file for the "
        "others, e.g. ViT-L/14",
    ),
    Layout(
        "CLIP-ReID",
        (
            "image_encoder.conv1.weight",
            "prompt_learner.cls_ctx",
            "text_encoder.text_projection",
            "classifier_proj.weight",
        ),
        "build_clip_vit_backbone or build_clip_resnet_backbone",
    ),
    Layout(
        "MLFN of torchreid (Chang et al. 2018)",
        ("feature.0.fm_conv1.weight", "feature.0.fsm.1.weight", "feature.15.fm_bn3.weight", "fc_s.0.weight"),
        "",
    ),
    Layout(
        "HACNN of torchreid (Li et al. 2018)",
        ("inception1.0.stream1.0.conv.weight", "ha1.hard_attn.fc.weight", "local_conv1.stream3.1.conv.weight"),
        "",
    ),
    Layout(
        "ViT of Hugging Face transformers",
        ("embeddings.cls_token", "encoder.layer.0.attention.attention.query.weight", "encoder.layer.0.norm1.weight"),
        "timm/hf-hub:timm/NAME, whose file has timm's names",
    ),
)


def _endings(state: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names in a state dict without any number of their first parts."""
    parts = [name.split(".") for name in state]
    return {".".join(part[start:]) for part in parts for start in range(len(part))}


def refuse_unsupported(state: Mapping[str, torch.Tensor], source: str) -> None:
    """Raise WeightsError if a file has all characteristic names of a known network that no backbone implements.

    To be called for a file that does not match: a custom component may implement the network.
    """
    endings = _endings(state)
    for layout in LAYOUTS:
        if not layout.backbone and endings.issuperset(layout.names):
            raise WeightsError(
                f"{source} contains an {layout.title}, which fastamp does not implement.\n"
                "  fix: use another model, e.g. OSNet x1_0, for which torchreid publishes a higher mAP on Market-1501, "
                "DukeMTMC-reID and MSMT17; or register a backbone with these names (--plugin FILE)"
            )


def nearest_layout(state: Mapping[str, torch.Tensor]) -> str:
    """Describe the known layout that shares most names with a state dict, and the backbone that loads it.

    Args:
        state: tensor name, with any prefix -> tensor.

    Returns:
        Description; empty if no layout shares a name.
    """
    endings = _endings(state)
    shares = [sum(name in endings for name in layout.names) / len(layout.names) for layout in LAYOUTS]
    best = max(range(len(LAYOUTS)), key=shares.__getitem__)
    if not shares[best]:
        return ""
    layout = LAYOUTS[best]
    matching = sum(name in endings for name in layout.names)
    size = transformer_size(state)
    return (
        f"{layout.title} ({matching} of {len(layout.names)} characteristic names found{f'; {size}' if size else ''}); "
        f"its backbone is {layout.backbone or 'not implemented'}"
    )


def transformer_size(state: Mapping[str, torch.Tensor]) -> str:
    """Describe a transformer by the shapes in its state dict, e.g. ``width 384, 12 blocks, patches of 14 x 14``.

    Args:
        state: tensor name, with any prefix -> tensor.

    Returns:
        Description; empty if ``state`` contains no blocks of a transformer.
    """
    counts = block_counts(state)
    first = next((value for name, value in state.items() if _BLOCK.search(name) and "norm1" in name), None)
    if not counts or first is None or first.dim() != 1:
        return ""
    blocks = "/".join(str(number) for number in counts)
    parts = [f"width {len(first)}", f"{blocks} block{'' if counts == [1] else 's'}"]
    embeddings = ("patch_embed.proj.weight", "patch_embed.projection.weight", "features.0.0.weight")
    patches = [value for name, value in state.items() if name.endswith(embeddings) and value.dim() == 4]
    if patches:
        parts.append(f"patches of {patches[0].shape[2]} x {patches[0].shape[3]}")
    registers = [value for name, value in state.items() if name.endswith(("reg_token", "register_tokens"))]
    if registers and registers[0].dim() == 3:
        parts.append(f"{registers[0].shape[1]} registers")
    return ", ".join(parts)


def block_counts(state: Mapping[str, torch.Tensor]) -> list[int]:
    """Count the blocks of a transformer in each of its stages; [] if ``state`` contains none."""
    numbers: dict[int, int] = {}
    for name in state:
        if match := _BLOCK.search(name):
            stage, block = (match[1] or 0, match[2]) if match[2] is not None else (match[3], match[4])
            numbers[int(stage)] = max(numbers.get(int(stage), 0), int(block) + 1)
    return [numbers[stage] for stage in sorted(numbers)]
