"""Tests that evaluation, Predictor, extraction and export resize, crop and interpolate images identically."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from PIL import Image

import fastamp
from fastamp.data import build_reid_test_loader
from fastamp.data.decode import read_image
from fastamp.engine import DefaultTrainer
from fastamp.feature_pass import extract_features
from fastamp.inference.export import FORMATS, export
from fastamp.inference.extract import extract
from fastamp.utils.errors import ConfigError, DataError

GUIDE = Path(__file__).parents[2] / "docs/guides/export.md"
CROPPED = ("INPUT.SIZE_TRAIN", "(72, 40)", "INPUT.SIZE_TEST", "(72, 40)", "INPUT.CROP", "True",
           "INPUT.CROP.SIZE", "(48, 24)")  # fmt: skip


@pytest.fixture(scope="module")
def cropped_run(demo_root, tmp_path_factory):
    """OUTPUT_DIR of a one-epoch run with random crops and bilinear resizing."""
    folder = tmp_path_factory.mktemp("cropped")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTAMP_DATASETS", str(demo_root))
        tiny.train(folder, *CROPPED, "INPUT.INTERPOLATION", "bilinear")
    return folder


def by_hand(path):
    """Preprocess an image with PIL as in FastReID's test pipeline."""
    image = Image.open(path).convert("RGB").resize((40, 72), Image.Resampling.BILINEAR).crop((8, 12, 32, 60))
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)


@pytest.mark.integration
def test_inference_with_a_model_trained_on_crops_uses_center_crops(demo, cropped_run, tmp_path):
    predictor = fastamp.Predictor(cropped_run / "model_best.pth", device="cpu", opts=["TEST.IMS_PER_BATCH", "8"])
    loader, _ = build_reid_test_loader(predictor.cfg, "Demo")
    batch = next(iter(loader))
    assert batch["images"].shape == (8, 3, 48, 24)
    for path, image in zip(batch["img_paths"], batch["images"], strict=True):
        assert (image.int() - by_hand(path).int()).abs().max() <= 2
        assert torch.equal(predictor.preprocess(path), image)
    with torch.inference_mode():
        expected = extract_features(predictor.model, batch, predictor.policy, predictor.cfg.TEST.FLIP.ENABLED)
    assert torch.equal(predictor.features(batch["img_paths"]), expected)
    assert torch.equal(predictor.features([read_image(path) for path in batch["img_paths"]]), expected)
    found, _ = extract(predictor, "Demo", tmp_path / "demo.npz")
    assert np.array_equal(found.matrix[:8], expected.numpy())
    report = export(predictor, tmp_path / "model.pt2", data="Demo", max_images=0)
    assert report.metadata["input_size"] == [48, 24] and report.expected_map == pytest.approx(
        report.found_map, abs=0.01
    )
    model = FORMATS[".pt2"].runner({".pt2": (tmp_path / "model.pt2").read_bytes()})
    torch.testing.assert_close(model({"images": batch["images"].float()}), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.integration
def test_evaluation_of_model_trained_on_crops_equals_evaluation_during_training(demo, cropped_run):
    line = json.loads((cropped_run / "metrics.json").read_text().splitlines()[-1])
    predictor = fastamp.Predictor(cropped_run / "model_best.pth", device="cpu")
    results = DefaultTrainer.test(predictor.cfg, predictor.model)
    found = {key: value for key, value in line.items() if key.endswith("mAP")}
    assert found and results["mAP"] == pytest.approx(next(iter(found.values())), abs=1e-6)


VARIANTS = [
    ("INPUT.SIZE_TEST", "(48, 24)", "INPUT.INTERPOLATION", "bilinear"),
    ("INPUT.SIZE_TEST", "(48, 24)", "INPUT.INTERPOLATION_TEST", "nearest"),
    (*CROPPED, "INPUT.INTERPOLATION_TEST", "bilinear"),
    (*CROPPED, "INPUT.SIZE_TEST", "(45,)", "INPUT.CROP.SIZE", "(30,)"),
    (*CROPPED, "INPUT.SIZE_TEST", "(0,)", "INPUT.CROP.SIZE", "(63, 33)"),
]
METADATA = [
    ([48, 24], "stretched", "bilinear", True, None),
    ([48, 24], "stretched", "nearest", False, None),
    ([72, 40], "stretched", "bilinear", True, [48, 24]),
    ([45], "kept", "bicubic", True, [30, 30]),
    ([0], "kept", "bicubic", True, [63, 33]),
]


@pytest.mark.parametrize("opts, expected", list(zip(VARIANTS, METADATA, strict=True)))
def test_preprocessing_code_in_export_guide_needs_only_export_metadata(
    demo, checkpoint, tmp_path, monkeypatch, opts, expected
):
    """The code uses only the metadata, and must return the same pixels as the predictor for images of any size."""
    predictor = fastamp.Predictor(checkpoint, device="cpu", opts=["SOLVER.AMP.EVAL_DTYPE", "float32", *opts])
    metadata = export(predictor, tmp_path / "model.pt2", data="").metadata
    keys = ("resize", "aspect", "interpolation", "antialias", "center_crop")
    assert tuple(metadata[key] for key in keys) == expected
    files = {"metadata.json": ""}
    torch.export.load(tmp_path / "model.pt2", extra_files=files)
    assert json.loads(files["metadata.json"]) == json.loads(json.dumps(metadata))

    smooth = np.random.default_rng(0).integers(0, 256, (12, 9, 3), dtype=np.uint8)
    Image.fromarray(smooth).resize((61, 101), Image.Resampling.BICUBIC).save(tmp_path / "image.jpg")
    monkeypatch.chdir(tmp_path)
    code = re.search(r"metadata = .*?\n(.*?images = [^\n]*\n)", GUIDE.read_text(encoding="utf-8"), re.DOTALL)[1]
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
    names = {"metadata": texts}
    exec("import json\nimport numpy as np\nfrom PIL import Image, ImageOps\n" + code, names)
    found, expected = names["images"][0], predictor.preprocess("image.jpg").float().numpy()
    assert found.shape == expected.shape == (3, *metadata["input_size"])
    difference = np.abs(found - expected)
    if metadata["interpolation"] == "nearest":  # halfway between two pixels, both are correct
        assert (difference > 0).mean() < 0.1
    else:
        assert difference.max() <= 2 and difference.mean() < 0.1


def test_predictor_config_hash_depends_on_crop_and_test_interpolation(checkpoint):
    def digest(*opts):
        return fastamp.Predictor(checkpoint, device="cpu", opts=opts).config_hash

    plain = digest()
    assert plain == digest("INPUT.INTERPOLATION_TEST", "bicubic") == digest("INPUT.CROP.SIZE", "(32,)")
    others = [digest(*opts) for opts in (("INPUT.INTERPOLATION", "bilinear"), CROPPED[4:], CROPPED[4:6])]
    assert len({plain, *others}) == 4
    # Only training uses another interpolation.
    assert digest("INPUT.INTERPOLATION", "bilinear", "INPUT.INTERPOLATION_TEST", "bicubic") == plain


def test_images_resized_to_different_sizes_raise_unless_batch_size_is_one(demo, checkpoint, tmp_path):
    opts = ["INPUT.SIZE_TEST", "(24,)", "SOLVER.AMP.EVAL_DTYPE", "float32"]
    predictor = fastamp.Predictor(checkpoint, device="cpu", opts=opts)
    images = [np.zeros((50, 25, 3), np.uint8), np.zeros((40, 30, 3), np.uint8)]
    with pytest.raises(DataError, match=r"\(48, 24\).*\(32, 24\).*INPUT\.SIZE_TEST \(24,\)"):
        predictor.features(images)
    one_by_one = fastamp.Predictor(checkpoint, device="cpu", opts=[*opts, "TEST.IMS_PER_BATCH", "1"])
    assert torch.equal(one_by_one.features(images), torch.cat([predictor.features(image) for image in images]))
    with pytest.raises(ConfigError, match=r"INPUT\.SIZE_TEST \(24,\)"):
        export(predictor, tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())
