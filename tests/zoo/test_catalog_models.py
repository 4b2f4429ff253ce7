"""Recipes of the catalog, and files of its programs in the models of its entries."""

import re

import pytest
import torch
from published_files import LAYOUTS, published_shapes

from fastamp.checkpoint.load_state import load_model_state
from fastamp.checkpoint.weights_file import state_dict_in
from fastamp.config.projects import import_project
from fastamp.modeling import build_model
from fastamp.zoo.catalog import list_entries

pytestmark = pytest.mark.integration
NETWORKS = ("trunc_normal_", "kaiming_normal_", "xavier_uniform_", "normal_")


@pytest.fixture(autouse=True, scope="module")
def project(unregistered):
    import_project("CLIPReID")


@pytest.fixture
def without_initialization(monkeypatch):
    """Skip the slow initializations: the test loads other weights."""
    for name in NETWORKS:
        monkeypatch.setattr(torch.nn.init, name, lambda tensor, *args, **options: tensor)


def test_config_of_each_entry_with_a_recipe_is_read(subtests):
    entries = [entry for entry in list_entries() if entry.recipe]
    assert len(entries) > 200
    for entry in entries:
        with subtests.test(entry.name):
            assert entry.config().MODEL.BACKBONE.PRETRAIN is False


def entries_of(program):
    """Return the entries with a recipe and a layout, one for each combination of the facts that change the tensors."""
    chosen = {}
    for entry in list_entries():
        if entry.program == program and entry.recipe and entry.layout:
            recipe = re.sub(r"^(CLIPReID/[A-Za-z0-9]+_|\w+/)", "", entry.recipe)  # without the dataset
            facts = (entry.backbone, recipe, entry.task, entry.layout, bool(entry.classes), *entry.input_size)
            chosen.setdefault((*facts, *entry.strides, *entry.sie.items()), entry)
    return list(chosen.values())


def test_each_program_has_a_layout():
    assert {entry.program for entry in list_entries() if entry.recipe and entry.layout} == {*LAYOUTS}


@pytest.mark.parametrize("program", LAYOUTS)
def test_file_of_each_entry_fills_the_backbone(program, subtests, tmp_path, without_initialization, caplog):
    entries = entries_of(program)
    assert entries
    for entry in entries:
        with subtests.test(entry.name):
            state = {
                name: torch.zeros(shape, dtype=torch.int64 if name.endswith(("_tracked", "_index")) else torch.float32)
                for name, shape in published_shapes(entry).items()
            }
            cfg = entry.config().with_values({"MODEL.DEVICE": "cpu", "MODEL.LOSSES.NAME": ()})
            if entry.task == "backbone":
                path = tmp_path / "backbone.pth"
                torch.save(state, path)
                caplog.clear()
                build_model(
                    cfg.with_values({"MODEL.BACKBONE.PRETRAIN": True, "MODEL.BACKBONE.PRETRAIN_PATH": str(path)})
                )
                assert "100% of the backbone's" in caplog.text
                continue
            model = build_model(cfg)
            report = load_model_state(model, state_dict_in(state, ""), source=entry.name, allow_missing=False)
            assert report.backbone_fraction == 1 and not report.other_shape
            needed = [name for name in report.missing if name.partition(".")[0] not in model.training_only]
            assert all(name.startswith("heads.weight") for name in needed)
