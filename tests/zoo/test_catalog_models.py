"""Recipes of the catalog, and files of a layout in the models of its entries."""

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
