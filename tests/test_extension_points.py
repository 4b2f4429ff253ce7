"""Tests of a custom loss, transform, backbone and dataset, each defined by one Python file and one YAML file."""

import json

import import_checkpoint
import numpy as np
import pytest
import tiny
import torch
from PIL import Image

from fastamp.cli import main
from fastamp.config import read_config
from fastamp.data.datasets import DATASET_REGISTRY
from fastamp.data.transforms import TRANSFORM_REGISTRY, build_transforms
from fastamp.modeling import BACKBONE_REGISTRY, HEADS_REGISTRY, LOSS_REGISTRY

LOSS = '''
"""Loss that keeps the norm of features near one."""

import torch
from torch import nn

from fastamp.amp import force_fp32
from fastamp.config import Key
from fastamp.modeling import LOSS_REGISTRY

KEYS = (Key("MODEL.LOSSES.LENGTH.SCALE", 1.0, "Length loss: weight in the total loss.", low=0),)


@LOSS_REGISTRY.register()
class LengthLoss(nn.Module):
    loss_name = "loss_length"

    def __init__(self, *, scale):
        super().__init__()
        self.scale = scale

    @classmethod
    def from_config(cls, cfg):
        return cls(scale=cfg.MODEL.LOSSES.LENGTH.SCALE)

    @force_fp32
    def forward(self, outputs, targets):
        return self.scale * (outputs["features"].norm(dim=1) - 1).square().mean()
'''

TRANSFORM = '''
"""Darken images."""

import torch

from fastamp.config import Key
from fastamp.data.transforms import TRANSFORM_REGISTRY, BatchTransform

KEYS = (
    Key("INPUT.DARKEN.ENABLED", False, "Darken training images at random."),
    Key("INPUT.DARKEN.PROB", 0.5, "Probability of darkening an image.", low=0, high=1),
)


@TRANSFORM_REGISTRY.register("DARKEN")
class Darken(BatchTransform):
    draws = 1
    before = "REA"

    def __init__(self, *, prob):
        self.prob = prob

    @classmethod
    def from_config(cls, cfg):
        return cls(prob=cfg.INPUT.DARKEN.PROB)

    def parameters(self, uniforms, size):
        return {"dark": torch.from_numpy(uniforms[:, 0] < self.prob)}

    def apply(self, images, parameters):
        return torch.where(parameters["dark"].to(images.device)[:, None, None, None], images // 2, images)
'''

BACKBONE = '''
"""Backbone of patches and 1x1 convolutions."""

from torch import nn

from fastamp.config import Key
from fastamp.modeling import BACKBONE_REGISTRY
from fastamp.modeling.backbones import variants

KEYS = (Key("MODEL.BACKBONE.WITH_GATE", False, "PatchNet: a gate behind the patches."),)
WIDTHS = {"narrow": 16, "wide": 32}


class PatchNet(nn.Module):
    def __init__(self, *, width, in_channels, gate):
        super().__init__()
        self.patches = nn.Conv2d(in_channels, width, 8, 8, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.gate = nn.Conv2d(width, width, 1) if gate else None
        self.mix = nn.Sequential(nn.Conv2d(width, width, 1), nn.ReLU(), nn.Conv2d(width, width, 1), nn.ReLU())
        self.feature_dim = width

    def forward(self, x):
        x = self.norm(self.patches(x))
        if self.gate:
            x = x * self.gate(x).sigmoid()
        return self.mix(x)

    def convert_state_dict(self, state, notes):
        """Translate the parameter names of the original implementation."""
        return {key.replace("embed.", "patches."): value for key, value in state.items()}


@BACKBONE_REGISTRY.register()
@variants(WIDTHS, options=("WITH_GATE",))
def build_patchnet_backbone(cfg):
    backbone = cfg.MODEL.BACKBONE
    return PatchNet(width=WIDTHS[backbone.DEPTH], in_channels=cfg.INPUT.CHANNELS, gate=backbone.WITH_GATE)
'''

DATASET = '''
"""Dataset of cows with two cameras."""

from fastamp.data.datasets import DATASET_REGISTRY, FilenameDataset


@DATASET_REGISTRY.register()
class Cows(FilenameDataset):
    dataset_name = "cows"
    folder = "cows"
    tree = "{train,query,gallery}/{pid}/{camera}_*.png"
    train_folders, query_folders, gallery_folders = ("train",), ("query",), ("gallery",)
    layout = (r"(?P<pid>.+)", r"^(?P<camera>[^_]+)_")
    suffix = ".png"
    example = "train/12/barn_001.png (identity 12, camera barn)"
'''


@pytest.fixture(autouse=True)
def own_registries(monkeypatch):
    """Restore the registries after each test."""
    for registry in (BACKBONE_REGISTRY, DATASET_REGISTRY, HEADS_REGISTRY, LOSS_REGISTRY, TRANSFORM_REGISTRY):
        monkeypatch.setattr(registry, "_components", dict(registry._components))


@pytest.fixture
def project(demo, tmp_path):
    """Function that writes the Python file and the YAML file (two iterations) of a project and returns their paths."""

    def write(code, text):
        (tmp_path / "component.py").write_text(code)
        base = tiny.tiny_config(
            tmp_path / "run", "SOLVER.MAX_EPOCH", "1", "SOLVER.IMS_PER_BATCH", "48", "LOG_PERIOD", "1"
        )
        (tmp_path / "base.yml").write_text(base.dump())
        (tmp_path / "component.yml").write_text("_BASE_: base.yml\n" + text)
        return tmp_path / "component.py", tmp_path / "component.yml"

    return write


def train(component, recipe, *opts):
    """Train and return the training rows of metrics.json."""
    assert main(["train", "--plugin", str(component), "--config-file", str(recipe), *opts]) == 0
    rows = map(json.loads, (component.parent / "run/metrics.json").read_text().splitlines())
    return [row for row in rows if "total_loss" in row]


def test_custom_loss_with_custom_config_keys_trains(project, capsys):
    component, recipe = project(LOSS, "MODEL: {LOSSES: {NAME: [CrossEntropyLoss, LengthLoss], LENGTH: {SCALE: 0.5}}}")
    rows = train(component, recipe)
    assert len(rows) == 2 and all(row["loss_length"] > 0 for row in rows)
    command = ["train", "--plugin", str(component), "--config-file", str(recipe), "MODEL.LOSSES.LENGTH.SCALE"]
    assert main([*command, "-1"]) == 2
    assert "MODEL.LOSSES.LENGTH.SCALE must be at least 0; got -1.0" in capsys.readouterr().err
    assert main(["config", "explain", "MODEL.LOSSES.LENGTH.SCALE", "--plugin", str(component)]) == 0
    assert "Length loss: weight in the total loss." in capsys.readouterr().out


def test_custom_transform_is_applied_to_training_images(project):
    component, recipe = project(TRANSFORM, "INPUT: {DARKEN: {ENABLED: True, PROB: 1.0}, REA: False}")
    assert len(train(component, recipe)) == 2
    bright, dark = (
        build_transforms(read_config(str(recipe), opts, plugin=str(component))).augment
        for opts in (("INPUT.DARKEN", "False"), ())
    )
    images = torch.randint(256, (6, 3, 64, 32), dtype=torch.uint8)
    # The random draws of other transforms do not change.
    expected = bright.apply(images, bright.draw([0] * 6, range(6), (64, 32))) // 2
    assert torch.equal(dark.apply(images, dark.draw([0] * 6, range(6), (64, 32))), expected)
    cfg = read_config(str(recipe), ("INPUT.REA", "True"), plugin=str(component))
    names = [type(transform).__name__ for transform in build_transforms(cfg).augment.transforms]
    assert names == ["PadAndRandomCrop", "RandomHorizontalFlip", "Darken", "RandomErasing"]


def test_custom_backbone_trains_and_import_checkpoint_recognizes_the_weights(project, tmp_path, capsys):
    text = "MODEL: {BACKBONE: {NAME: build_patchnet_backbone, DEPTH: wide, FEAT_DIM: 32, WITH_GATE: True}}"
    component, recipe = project(BACKBONE, text)
    assert len(train(component, recipe)) == 2
    state = tiny.weights(tmp_path / "run/model_final.pth")
    # Its weights are recognized, under its own names and under those of the original implementation.
    foreign = {name.replace("backbone.patches.", "backbone.embed."): value for name, value in state.items()}
    for number, content in enumerate((state, foreign)):
        source, target = tmp_path / f"in{number}.pth", tmp_path / f"out{number}.pth"
        torch.save(content, source)
        assert import_checkpoint.cli([str(source), str(target), "--plugin", str(component)]) == 0
        report = capsys.readouterr().out
        assert "NAME build_patchnet_backbone MODEL.BACKBONE.DEPTH wide MODEL.BACKBONE.WITH_GATE True" in report
        assert "(100%) of the model's tensors, 100% of the backbone's" in report
        imported = tiny.weights(target)
        assert all(torch.equal(imported[name], value) for name, value in state.items() if name.startswith("backbone."))
    torch.save({"teacher": {name.removeprefix("backbone."): value for name, value in state.items()}}, source)
    assert import_checkpoint.cli([str(source), str(target), "--plugin", str(component)]) == 2
    assert "--prefix teacher.   (patchnet)" in capsys.readouterr().err


def test_training_and_evaluation_run_on_a_custom_dataset(project, demo, tmp_path, monkeypatch):
    generator = np.random.default_rng(0)
    places = [
        ("train", str(pid), camera, number) for pid in range(12) for camera in ("barn", "field") for number in range(4)
    ]
    places += [("query", "101", "barn", 0), ("gallery", "101", "field", 0), ("gallery", "102", "field", 0)]
    for split, pid, camera, number in places:
        file = tmp_path / "data/cows" / split / pid / f"{camera}_{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (64, 32, 3), dtype=np.uint8)).save(file)
    monkeypatch.setenv("FASTAMP_DATASETS", str(tmp_path / "data"))
    component, recipe = project(DATASET, "DATASETS: {NAMES: [Cows], TESTS: [Cows]}")
    assert len(train(component, recipe)) == 2
    assert "Cows/mAP" in (tmp_path / "run/metrics.json").read_text()
