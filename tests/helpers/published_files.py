"""Names and shapes of the tensors in published files of the catalog.

They come from the reference models that the programs themselves saved, with the blocks and the widths of the other
sizes, from torchvision and timm, and from the plain networks: never from fastamp's models.
"""

import gzip
import json
import re
from fractions import Fraction
from functools import cache
from pathlib import Path

import plain_networks as plain
import torch
import torchvision

REFERENCE = Path(__file__).parents[1] / "reference"
IMAGES = torch.rand(1, 3, 64, 32)
RESNEST = "MODEL.BACKBONE.NAME build_resnest_backbone MODEL.BACKBONE.DEPTH 101x MODEL.BACKBONE.FEAT_DIM 2048"
TEXT = ("prompt_learner.", "text_encoder.")


@cache
def references(file):
    return json.loads(gzip.decompress((REFERENCE / f"{file}_models.json.gz").read_bytes()))


def reference(file, model):
    """Return the names and shapes of a reference model."""
    return {name: tuple(shape) for name, shape in references(file)[model]["state_dict"].items()}


def renamed(shapes, names):
    """Replace parts of names."""
    result = {}
    for name, shape in shapes.items():
        for old, new in names.items():
            name = name.replace(old, new)
        result[name] = shape
    return result


def with_prefixes(shapes, prefixes):
    """Keep the tensors with these prefixes, and replace the prefixes."""
    return {
        new + name.removeprefix(old): shape
        for name, shape in shapes.items()
        for old, new in prefixes.items()
        if name.startswith(old)
    }


def with_blocks(shapes, prefix, count):
    """Give ``count`` blocks to a stage; those that are missing are copies of the last one."""
    last = max(int(name.removeprefix(prefix).split(".")[0]) for name in shapes if name.startswith(prefix))
    kept = {
        name: shape
        for name, shape in shapes.items()
        if not name.startswith(prefix) or int(name.removeprefix(prefix).split(".")[0]) < count
    }
    block = {name: shape for name, shape in shapes.items() if name.startswith(f"{prefix}{last}.")}
    for number in range(last + 1, count):
        kept |= renamed(block, {f"{prefix}{last}.": f"{prefix}{number}."})
    return kept


def widened(shapes, factor):
    """Multiply the widths of a transformer of width 96, 192, ..., and the number of heads of a Swin Transformer."""
    return {
        name: tuple(
            int(n * factor) if n % 96 == 0 or (axis == 1 and "bias_table" in name) else n
            for axis, n in enumerate(shape)
        )
        for name, shape in shapes.items()
    }


def batch_norm(name, width):
    shapes = {f"{name}.{key}": (width,) for key in ("weight", "bias", "running_mean", "running_var")}
    return shapes | {f"{name}.num_batches_tracked": ()}


def shapes_of(network):
    return {name: tuple(value.shape) for name, value in network.state_dict().items()}


def plain_shapes(network, *args, **options):
    state = plain.Weights()
    with torch.no_grad():
        network(state, IMAGES, *args, **options)
    return {name: tuple(value.shape) for name, value in state.items()}


def fastreid(entry):
    """Files of the release v0.1.1, and those of later versions that BoT-SORT trained."""
    recipe, is_old = entry.recipe.rpartition("/")[2], entry.program == "FastReID"
    shapes = reference("fastreid", "DukeMTMC/sbs_R50-ibn.yml" if "ibn" in recipe else "DukeMTMC/AGW_R50.yml")
    if "S50" in recipe:
        others = {name: shape for name, shape in shapes.items() if "NL_" in name or "heads" in name}
        shapes = with_blocks(reference("fastreid", f"Market1501/bagtricks_R50.yml {RESNEST}"), "backbone.layer3.", 6)
        stem = ("backbone.conv1.", "backbone.bn1.", "backbone.layer1.0.conv1.", "backbone.layer1.0.downsample.1.")
        halves = {64: 32, 128: 64}  # the stem is half as wide as that of the 101 layers
        for name in [name for name in shapes if name.startswith(stem)]:
            first = shapes[name][:1] if "layer1" in name else tuple(halves[n] for n in shapes[name][:1])
            shapes[name] = first + tuple(halves.get(n, n) for n in shapes[name][1:])
        shapes |= others
    if "R101" in recipe:
        shapes = with_blocks(with_blocks(shapes, "backbone.layer3.", 23), "backbone.NL_3.", 9)
    if recipe.startswith("bagtricks") or not is_old:
        shapes = {name: shape for name, shape in shapes.items() if "NL_" not in name}
    shapes.pop("heads.pool_layer.p", None)
    if not recipe.startswith("bagtricks"):  # the exponent was learned
        shapes["heads.pool_layer.p"] = (1,)
    old = {"heads.weight": "heads.classifier.weight", "heads.bottleneck.0": "heads.bnneck"}
    if "autumn" in entry.layout:
        del old["heads.bottleneck.0"]
    return renamed(shapes, old if is_old else {})


def luperson(entry):
    if entry.task == "backbone":
        depth = entry.backbone.removeprefix("ResNet-")
        network = shapes_of(torchvision.models.get_model(f"resnet{depth}"))
        encoder = {f"module.encoder_q.{name}": shape for name, shape in network.items() if not name.startswith("fc")}
        return encoder | {"module.encoder_q.fc.0.weight": (2048, 2048)}
    shapes = {}
    for name, shape in reference("fastreid", "DukeMTMC/mgn_R50-ibn.yml").items():  # here without IBN
        if ".IN." not in name:
            shapes[name.replace(".BN.", ".")] = tuple(2 * n for n in shape) if ".BN." in name else shape
    for branch in ("b1", "b2", "b3"):
        shapes |= batch_norm(f"heads_extra_bn_{branch}", 2048)
    return shapes


def vit(entry):
    """TransReID and the programs that come from it."""
    recipe = entry.recipe.rpartition("/")[2]
    if "transreid" in recipe:
        shapes = reference("transreid", "vit_transreid_stride")
    elif recipe == "vit_base":
        shapes = reference("transreid", "vit_sie")
    elif "pass" in recipe:
        shapes = reference("foundation/pass", "pass_vit_small 256x128")
    else:
        shapes = reference("foundation/ssl", "ssl_vit_small 256x128")
    if "_base" in recipe and recipe.startswith(("pass", "ssl")):
        shapes = widened(shapes, 2)
    if "ics" in recipe:
        width = shapes["base.cls_token"][2]
        shapes = {name: shape for name, shape in shapes.items() if "patch_embed" not in name}
        stem = {"conv.0.weight": (64, 3, 7, 7), "conv.3.weight": (64, 64, 3, 3), "conv.6.weight": (64, 64, 3, 3)}
        for number in (1, 4):
            stem |= {f"conv.{number}.IN.weight": (32,), f"conv.{number}.IN.bias": (32,)}
            stem |= batch_norm(f"conv.{number}.BN", 32)
        stem |= batch_norm("conv.7", 64) | {"proj.weight": (width, 64, 8, 8), "proj.bias": (width,)}
        shapes |= {f"base.patch_embed.{name}": shape for name, shape in stem.items()}
    strides = entry.strides or (16, 16)
    if entry.input_size:
        rows, columns = ((n - 16) // stride + 1 for n, stride in zip(entry.input_size, strides, strict=True))
        _, tokens, width = shapes["base.pos_embed"]
        shapes["base.pos_embed"] = (1, rows * columns + tokens % 2, width)  # odd with the class token
    count = int(entry.sie.get("cameras", 0)) * max(int(entry.sie.get("views", 0)), 1)
    sie = shapes.pop("base.sie_embed", None)
    if count:
        shapes["base.sie_embed"] = (count, *sie[1:])
    if entry.task == "backbone" or "no prefix" in entry.layout:  # the backbone itself, or with a neck
        shapes = {name.removeprefix("base."): shape for name, shape in shapes.items() if "classifier" not in name}
        if entry.task == "backbone":
            shapes = {name: shape for name, shape in shapes.items() if not name.startswith("bottleneck")}
    return shapes


def solider(entry):
    shapes = reference("foundation/solider", "swin_tiny 384x128")
    if "tiny" not in entry.backbone:
        shapes = with_blocks(shapes, "base.stages.2.blocks.", 18)
    if "base" in entry.backbone:
        shapes = widened(shapes, Fraction(4, 3))
    if entry.task == "backbone":
        shapes = {name.removeprefix("base."): shape for name, shape in shapes.items() if name.startswith("base.")}
    return shapes


def clipreid(entry):
    shapes = reference("foundation/clipreid", "vit_clipreid")
    if "cnn" in entry.name:
        shapes = {name: shape for name, shape in shapes.items() if name.startswith(TEXT)}
        shapes["text_encoder.text_projection"] = (512, 1024)
        shapes |= {"classifier.weight": (16, 2048), "classifier_proj.weight": (16, 1024)}
        shapes |= batch_norm("bottleneck", 2048) | batch_norm("bottleneck_proj", 1024)
        shapes |= {f"image_encoder.{name}": shape for name, shape in clip_resnet(entry.input_size).items()}
    else:
        rows, columns = (
            (n - 16) // stride + 1 for n, stride in zip(entry.input_size, entry.strides or (16, 16), strict=True)
        )
        shapes = shapes | {"image_encoder.positional_embedding": (rows * columns + 1, 768)}
    if entry.sie:
        shapes["cv_embed"] = (int(entry.sie["cameras"]), 768)
    return {name: s for name, s in shapes.items() if "without" not in entry.layout or not name.startswith(TEXT)}


def clip_resnet(size):
    """ResNet-50 of CLIP (Radford et al. 2021, arXiv:2103.00020) with last stride 1."""
    shapes, width = {}, 64
    for number, (inputs, outputs) in enumerate(((3, 32), (32, 32), (32, 64)), start=1):
        shapes |= {f"conv{number}.weight": (outputs, inputs, 3, 3)} | batch_norm(f"bn{number}", outputs)
    for stage, blocks in enumerate((3, 4, 6, 3)):
        planes = 64 * 2**stage
        for number in range(blocks):
            block = f"layer{stage + 1}.{number}"
            kernels = ((planes, width, 1, 1), (planes, planes, 3, 3), (4 * planes, planes, 1, 1))
            for layer, kernel in enumerate(kernels, start=1):
                shapes |= {f"{block}.conv{layer}.weight": kernel} | batch_norm(f"{block}.bn{layer}", kernel[0])
            if number == 0:
                shapes |= {f"{block}.downsample.0.weight": (4 * planes, width, 1, 1)}
                shapes |= batch_norm(f"{block}.downsample.1", 4 * planes)
            width = 4 * planes
    shapes["attnpool.positional_embedding"] = (size[0] // 16 * (size[1] // 16) + 1, width)
    for name, outputs in (("q_proj", width), ("k_proj", width), ("v_proj", width), ("c_proj", 1024)):
        shapes |= {f"attnpool.{name}.weight": (outputs, width), f"attnpool.{name}.bias": (outputs,)}
    return shapes


def lightmbn(entry):
    """LightMBN with the names of BoxMOT's program: parts of an OSNet, and seven heads."""
    osnet = plain_shapes(plain.osnet, 1.0)
    shapes = with_prefixes(osnet, {"conv1.": "backone.0.", "conv2.": "backone.2.", "conv3.0.": "backone.3."})
    for branch in ("global_branch.", "partial_branch.", "channel_branch."):
        stages = {"conv3.1.": "0.1.", "conv3.2.": "0.2.", "conv4.": "1.", "conv5.": "2."}
        shapes |= with_prefixes(osnet, {old: branch + new for old, new in stages.items()})
    for head in (*(f"reduction_{number}" for number in range(5)), "reduction_ch_0", "reduction_ch_1"):
        shapes |= {f"{head}.classifier.weight": (entry.classes or 751, 512)} | batch_norm(f"{head}.bn", 512)
        if "ch" not in head:
            shapes[f"{head}.reduction.weight"] = (512, 512, 1, 1)
    shapes |= {"shared.0.weight": (512, 256, 1, 1)} | batch_norm("shared.1", 512)
    return shapes | with_prefixes(osnet, {"conv4.1.": "batch_drop_block.drop_batch_bottleneck."})


def torchreid(entry):
    name = entry.backbone
    if name.startswith("osnet"):
        kind = next((kind for kind in ("ibn", "ain") if kind in name), "")
        return plain_shapes(plain.osnet, float(name.rpartition("_x")[2].replace("_", ".")), kind)
    if name.startswith("mobilenet"):
        return plain_shapes(plain.torchreid_mobilenet, float(name.rpartition("_x")[2].replace("_", ".")))
    if name == "shufflenet":
        return plain_shapes(plain.torchreid_shufflenet)
    shapes = plain_shapes(plain.resnet50)
    return shapes | plain_shapes(lambda w, x: plain.fc_head(w, torch.zeros(1, 2048))) if "fc512" in name else shapes


def baseline(entry):
    """Strong baseline, AGW, and cluster-contrast, whose ResNet is a sequence."""
    if "cluster" in entry.name:
        numbers = {"conv1.": 0, "bn1.": 1, "layer1.": 4, "layer2.": 5, "layer3.": 6, "layer4.": 7}
        prefixes = {old: f"base.{number}." for old, number in numbers.items()}
        shapes = with_prefixes(plain_shapes(plain.resnet50), prefixes)
        return shapes | batch_norm("feat_bn", 2048) | {"gap.p": (1,)}
    shapes = plain_shapes(plain.resnet50, "base.", non_local=entry.program == "AGW") | batch_norm("bottleneck", 2048)
    return shapes | {"global_pool.p": (1,)} if entry.program == "AGW" else shapes


def timm_network(entry):
    """MegaDescriptor, whose files are networks of timm, and MiewID, which has them below ``backbone.``."""
    import timm  # an extra

    if entry.program == "wildlife-tools":
        name = entry.keys["MODEL.BACKBONE.NAME"].removeprefix("timm/")
    else:
        name = "efficientnetv2_rw_m"
    with torch.device("meta"):
        network = shapes_of(timm.create_model(name, num_classes=0, global_pool=""))
    if entry.program == "wildlife-tools":
        return network
    shapes = {f"backbone.{name}": shape for name, shape in network.items()}
    return shapes | batch_norm("bn", 2152) | {"pooling.p": (1,)}


# Program -> function that returns the names and shapes of an entry's file.
LAYOUTS = {
    **dict.fromkeys(("FastReID", "BoT-SORT"), fastreid),
    **dict.fromkeys(("LUPerson", "LUPerson-NL"), luperson),
    **dict.fromkeys(("TransReID", "PersonViT", "PASS-reID", "TransReID-SSL"), vit),
    **dict.fromkeys(("SOLIDER", "SOLIDER-REID"), solider),
    **dict.fromkeys(("reid-strong-baseline", "AGW", "cluster-contrast"), baseline),
    **dict.fromkeys(("wildlife-tools", "MiewID"), timm_network),
    "CLIP-ReID": clipreid,
    "LightMBN, redistributed by BoxMOT": lightmbn,
    "torchreid": torchreid,
}


CLASSIFIER = re.compile(
    r"((heads|reduction_\w+)\.)?classifier(_proj|_\d)?\.weight|(heads|b\d+_head)\.weight|prompt_learner\.cls_ctx"
)


def published_shapes(entry):
    """Return the names and shapes of the file of an entry; without its classifiers if the classes are unknown."""
    shapes = LAYOUTS[entry.program](entry).items()
    if not entry.classes:
        return {name: shape for name, shape in shapes if not CLASSIFIER.fullmatch(name)}
    return {name: (entry.classes, *shape[1:]) if CLASSIFIER.fullmatch(name) else shape for name, shape in shapes}
