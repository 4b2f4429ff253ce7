"""Recipes of the catalog, and files of a layout in the models of its entries.

Names and shapes of the files are those of plain networks, or of the reference models that other programs saved.
"""

import gzip
import json
from pathlib import Path

import plain_networks as plain
import pytest
import torch

from fastamp import zoo
from fastamp.checkpoint.load_state import load_model_state
from fastamp.modeling import build_model
from fastamp.zoo.catalog import list_entries

pytestmark = pytest.mark.integration

IMAGES = torch.rand(1, 3, 64, 32)


def baseline(w, *, non_local):
    maps = plain.resnet50(w, IMAGES, "base.", relu=False, non_local=non_local)
    w.bn(plain.gem(w, maps, "global_pool.p") if non_local else maps.mean((2, 3)), "bottleneck")


def fc512(w):
    plain.fc_head(w, plain.resnet50(w, IMAGES).mean((2, 3)))


# Ends of names of entries -> function that creates their tensors
LAYOUTS = {
    "osnet_x1_0_msmt17": lambda w: plain.osnet(w, IMAGES, 1.0),
    "osnet_x0_75_imagenet": lambda w: plain.osnet(w, IMAGES, 0.75),
    "osnet_x0_5_market1501": lambda w: plain.osnet(w, IMAGES, 0.5),
    "osnet_x0_25_dukemtmc": lambda w: plain.osnet(w, IMAGES, 0.25),
    "osnet_ibn_x1_0_ms_d_m": lambda w: plain.osnet(w, IMAGES, 1.0, "ibn"),
    "osnet_ain_x1_0_msmt17_combineall": lambda w: plain.osnet(w, IMAGES, 1.0, "ain"),
    "osnet_ain_x0_25_imagenet": lambda w: plain.osnet(w, IMAGES, 0.25, "ain"),
    "torchreid_resnet50_market1501": lambda w: plain.resnet50(w, IMAGES),
    "resnet50_fc512_msmt17": fc512,
    "mobilenetv2_x1_0_dukemtmc": lambda w: plain.torchreid_mobilenet(w, IMAGES, 1.0),
    "mobilenetv2_x1_4_msmt17": lambda w: plain.torchreid_mobilenet(w, IMAGES, 1.4),
    "shufflenet_imagenet": lambda w: plain.torchreid_shufflenet(w, IMAGES),
    "strong_baseline_r50_market1501": lambda w: baseline(w, non_local=False),
    "agw_r50_cuhk03": lambda w: baseline(w, non_local=True),
}


REFERENCE = Path(__file__).parents[1] / "reference"
# File of reference models, name of a model, and the programs and ends of recipes of the entries that have its network.
REFERENCES = (
    ("fastreid", "DukeMTMC/bagtricks_R50.yml", ("FastReID",), ("/bagtricks_R50",)),
    ("fastreid", "DukeMTMC/sbs_R50-ibn.yml", ("FastReID",), ("/sbs_R50-ibn",)),
    ("fastreid", "DukeMTMC/AGW_R50.yml", ("FastReID",), ("/AGW_R50",)),
    ("transreid", "vit_sie", ("TransReID", "PersonViT"), ("/vit_base",)),
    ("transreid", "vit_transreid_stride", ("TransReID",), ("/transreid_vit_base",)),
    ("foundation/pass", "pass_vit_small 256x128", ("PASS-reID",), ("/pass_vit_small",)),
    ("foundation/ssl", "ssl_vit_small 256x128", ("TransReID-SSL", "PersonViT"), ("/ssl_vit_small",)),
    ("foundation/solider", "swin_tiny 384x128", ("SOLIDER-REID",), ("/solider_swin_tiny",)),
    ("foundation/clipreid", "vit_clipreid", ("CLIP-ReID",), ("_vit_clipreid", "_vit_prom")),
)
# Names in the release v0.1.1 of FastReID
OLD_NAMES = {"heads.weight": "heads.classifier.weight", "heads.bottleneck.0": "heads.bnneck"}


def entries_of(programs, recipes):
    """Return the ReID entries of a network, one for each combination of what changes the shapes of its tensors."""
    chosen = {}
    for entry in list_entries():
        if entry.program in programs and entry.recipe.endswith(recipes) and entry.classes and entry.task == "reid":
            chosen.setdefault(
                (entry.program, entry.classes, *entry.input_size, *entry.strides, *entry.sie.items()), entry
            )
    return list(chosen.values())


def published_state(shapes, entry, classes):
    """Return tensors with the names of a reference model, and the shapes that the facts of an entry give them."""
    state = {}
    for name, shape in shapes.items():
        shape = list(shape)
        if "without prompt_learner" in entry.layout and name.startswith(("prompt_learner.", "text_encoder.")):
            continue
        if "sie_embed" in name:
            if not entry.sie:
                continue
            shape[0] = int(entry.sie["cameras"]) * max(int(entry.sie.get("views", 0)), 1)
        if ("classifier" in name or name in ("heads.weight", "prompt_learner.cls_ctx")) and shape[0] == classes:
            shape[0] = entry.classes
        if name in ("base.pos_embed", "image_encoder.positional_embedding"):
            patches = [(size - 16) // stride + 1 for size, stride in zip(entry.input_size, entry.strides, strict=True)]
            has_token = shape[-2] % 2  # 128 patches at 256 x 128, or an odd number with overlap, with the class token
            shape[-2] = patches[0] * patches[1] + has_token
        for new, old in OLD_NAMES.items() if "v0.1.1" in entry.layout else ():
            name = name.replace(new, old)
        state[name] = torch.zeros(shape, dtype=torch.int64 if name.endswith(("_tracked", "_index")) else torch.float32)
    if "v0.1.1" in entry.layout and "AGW" in entry.recipe:  # the exponent was learned
        state["heads.pool_layer.p"] = torch.ones(1)
    if entry.program == "CLIP-ReID" and entry.sie:
        state["cv_embed"] = torch.zeros(int(entry.sie["cameras"]), 768)
    return state


@pytest.mark.parametrize(("file", "model", "programs", "recipes"), REFERENCES, ids=[row[1] for row in REFERENCES])
def test_file_of_another_program_fills_the_backbone_of_each_entry(file, model, programs, recipes, subtests):
    reference = json.loads(gzip.decompress((REFERENCE / f"{file}_models.json.gz").read_bytes()))[model]
    entries = entries_of(programs, recipes)
    assert entries
    for entry in entries:
        with subtests.test(entry.name):
            state = published_state(reference["state_dict"], entry, reference.get("num_classes", 751))
            cfg = entry.config().with_values({"MODEL.DEVICE": "cpu", "MODEL.LOSSES.NAME": ()})
            model = build_model(cfg)
            report = load_model_state(model, state, source=entry.name, allow_missing=False)
            assert report.backbone_fraction == 1 and not report.other_shape
            assert all(name.partition(".")[0] in model.training_only for name in report.missing)


def test_config_of_each_entry_with_a_recipe_is_read(subtests):
    entries = [entry for entry in list_entries() if entry.recipe]
    assert len(entries) > 200
    for entry in entries:
        with subtests.test(entry.name):
            assert entry.config().MODEL.BACKBONE.PRETRAIN is False


@pytest.mark.parametrize("name", LAYOUTS)
def test_file_of_the_layout_fills_the_model_of_the_entry(name):
    state = plain.Weights()
    with torch.no_grad():
        LAYOUTS[name](state)
    cfg = zoo.find(name).config().with_values({"MODEL.DEVICE": "cpu", "MODEL.LOSSES.NAME": ()})
    report = load_model_state(build_model(cfg), state, source=name, allow_missing=False)
    assert report.backbone_fraction == 1 and not report.dropped and not report.notes
    assert {*report.missing} <= {"heads.weight"}
