"""Predictor, extraction, search and export of a model with one stem for visible and one for infrared images."""

import json

import every_backbone
import numpy as np
import pytest
import torch

import fastamp
from fastamp.cli import main
from fastamp.inference.export import export
from fastamp.inference.extract import extract
from fastamp.modeling import build_model
from fastamp.utils.errors import ConfigError

KEY = "MODEL.BACKBONE.MODALITY"
IMAGES = np.random.default_rng(0).integers(256, size=(3, 64, 32, 3), dtype=np.uint8)
WORDS = ["visible", "infrared", "infrared"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return the checkpoint of a small two-stem network whose stems differ."""
    torch.manual_seed(0)
    cfg = every_backbone.config(
        "two_stem_resnet 18x", KEY, "", "DATASETS.TESTS", "()", "SOLVER.AMP.EVAL_DTYPE", "float32"
    )
    model = build_model(cfg)
    torch.nn.init.kaiming_normal_(model.backbone.infrared_conv1.weight)
    path = tmp_path_factory.mktemp("two_stems") / "model.pth"
    torch.save({"model": model.state_dict(), "config": cfg.dump()}, path)
    return path


@pytest.fixture(scope="module")
def predictor(checkpoint):
    return fastamp.Predictor(checkpoint, device="cpu")


@pytest.fixture
def folder(tmp_path):
    """Return a folder with the three images as files."""
    from PIL import Image

    (tmp_path / "images").mkdir()
    for number, pixels in enumerate(IMAGES):
        Image.fromarray(pixels).save(tmp_path / "images" / f"{number}.png")
    return tmp_path / "images"


def test_modality_of_each_image_selects_its_stem(predictor):
    visible, infrared = (predictor(IMAGES, modality=word) for word in ("visible", "infrared"))
    assert not torch.allclose(visible, infrared, rtol=0.01)
    mixed = predictor(IMAGES, modality=WORDS)
    torch.testing.assert_close(mixed, torch.stack([visible[0], infrared[1], infrared[2]]), rtol=1e-4, atol=1e-4)
    assert predictor.feature_dim == 512
    assert predictor.compare(IMAGES[0], IMAGES[0], modality="infrared").score == pytest.approx(1)
    assert predictor.compare(IMAGES[0], IMAGES[0], modality=["visible", "infrared"]).score < 0.999
    frames = predictor.tracklet_features(IMAGES, modality="infrared")
    torch.testing.assert_close(frames, infrared.mean(0), rtol=1e-4, atol=1e-4)


def test_config_key_is_the_default_and_does_not_change_the_hash(checkpoint, predictor):
    infrared = fastamp.Predictor(checkpoint, device="cpu", opts=[KEY, "infrared"])
    assert torch.equal(infrared(IMAGES), predictor(IMAGES, modality="infrared"))
    assert torch.equal(infrared(IMAGES, modality="visible"), predictor(IMAGES, modality="visible"))
    assert infrared.config_hash == predictor.config_hash


@pytest.mark.parametrize("modality", [None, ["visible"] * 2, "thermal", ["visible", "infrared", 1]])
def test_missing_and_wrong_modalities_are_errors(predictor, modality):
    with pytest.raises(ConfigError, match="modality.*visible"):
        predictor(IMAGES, modality=modality)


def test_modality_for_a_model_without_stems_is_an_error(tmp_path):
    cfg = every_backbone.config("resnet 18x")
    torch.save({"model": build_model(cfg).state_dict(), "config": cfg.dump()}, tmp_path / "model.pth")
    predictor = fastamp.Predictor(tmp_path / "model.pth", device="cpu")
    assert predictor(IMAGES).shape == (3, 512)
    with pytest.raises(ConfigError, match="modality 'visible'"):
        predictor(IMAGES, modality="visible")


def test_extraction_uses_the_column_of_a_csv_file(predictor, folder, tmp_path):
    rows = [f"{folder}/{number}.png,1,{word}" for number, word in enumerate(WORDS)]
    (tmp_path / "list.csv").write_text("\n".join(["path,pid,modality", *rows]))
    extraction, _ = extract(predictor, tmp_path / "list.csv", tmp_path / "out.npz", num_workers=0)
    torch.testing.assert_close(
        torch.from_numpy(np.array(extraction.matrix)), predictor(IMAGES, modality=WORDS), rtol=1e-4, atol=1e-4
    )
    with pytest.raises(ConfigError, match="'modality'(.|\n)*MODEL.BACKBONE.MODALITY"):
        extract(predictor, folder, tmp_path / "other.npz", num_workers=0)


@pytest.mark.integration
def test_search_of_a_visible_folder_by_an_infrared_image(checkpoint, folder, capsys, monkeypatch):
    monkeypatch.setattr("fastamp.inference.image_folder._IN_MEMORY_UP_TO", 0)
    query = str(folder / "0.png")
    command = ["search", str(checkpoint), query, "--gallery", str(folder), "--device", "cpu", "--json"]
    assert main([*command, "--modality", "infrared", KEY, "visible"]) == 0
    assert main([*command, "--modality", "visible", KEY, "visible"]) == 0
    different, same = (json.loads(line)[0]["found"][0]["score"] for line in capsys.readouterr().out.splitlines())
    assert same == pytest.approx(1, abs=1e-6) and different < 1 - 1e-5
    assert main([*command, KEY, "infrared"]) == 0  # not the features of the visible gallery
    assert len({*folder.parent.glob("images.*.npz")}) == 2


@pytest.mark.integration
def test_exported_model_has_the_modality_as_input(predictor, checkpoint, tmp_path):
    report = export(predictor, tmp_path / "model.pt2", data="")
    assert report.metadata["modalities"] == ["visible", "infrared"]
    program = torch.export.load(tmp_path / "model.pt2").module()
    pixels = torch.from_numpy(IMAGES).permute(0, 3, 1, 2).float()
    found = program(images=pixels, modality=torch.tensor([0, 1, 1]))
    torch.testing.assert_close(found, predictor(IMAGES, modality=WORDS), rtol=1e-3, atol=1e-3)
    of_one = fastamp.Predictor(checkpoint, device="cpu", opts=[KEY, "infrared"])
    report = export(of_one, tmp_path / "infrared.pt2", data="")
    assert report.metadata["modalities"] == ["infrared"]
    found = torch.export.load(tmp_path / "infrared.pt2").module()(images=pixels)
    torch.testing.assert_close(found, of_one(IMAGES), rtol=1e-3, atol=1e-3)
