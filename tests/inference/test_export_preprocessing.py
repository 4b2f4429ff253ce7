"""Tests of exported models with the preprocessing inside: uint8 images of any size, RGB or BGR."""

import numpy as np
import pytest
import torch
from PIL import Image

import fastamp
from fastamp.cli import main
from fastamp.data import build_reid_test_loader
from fastamp.data.decode import read_image
from fastamp.data.transforms import Resize
from fastamp.inference.export import FORMATS, export
from fastamp.inference.export.metadata import export_metadata
from fastamp.inference.export.options import ExportOptions
from fastamp.inference.export.preprocessing import Preprocessing
from fastamp.inference.package import License, package
from fastamp.inference.parity import RankedImages
from fastamp.inference.runtime import ExportedModel
from fastamp.utils.errors import ConfigError
from fastamp.utils.files import file_sha256

ONNX = pytest.param(
    ".onnx",
    marks=pytest.mark.skipif(
        tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7), reason="ONNX export needs PyTorch 2.7"
    ),
)
SIZES = ((1, 1), (2, 3), (64, 32), (65, 31), (17, 250), (131, 77), (301, 400), (49, 24), (47, 23), (50, 29))


@pytest.fixture
def predictor(checkpoint):
    return fastamp.Predictor(checkpoint, device="cpu", opts=["SOLVER.AMP.EVAL_DTYPE", "float32"])


@pytest.fixture(scope="module")
def photos(tmp_path_factory, demo_root):
    """Image files of several sizes, made from the demo dataset."""
    folder = tmp_path_factory.mktemp("photos")
    sources = sorted(demo_root.rglob("query/*.jpg"))[:6]
    sizes = ((57, 101), (200, 333), (33, 64), (31, 17), (200, 333), (90, 40))
    for number, (source, size) in enumerate(zip(sources, sizes, strict=True)):
        Image.open(source).resize(size).save(folder / f"{number}.png")
    return sorted(folder.iterdir())


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "nearest"])
@pytest.mark.parametrize(
    "size, crop",
    [
        ((64, 32), None),
        ((72, 40), (48, 24)),
        ((72,), (48, 24)),
        ((20,), (48, 24)),  # padded with black
        ((0,), (48, 24)),  # not resized
    ],
)
def test_preprocessing_equals_the_transform_of_the_evaluator(size, crop, interpolation):
    resize, generator = Resize(size=size, crop=crop, interpolation=interpolation), torch.Generator().manual_seed(0)
    different = total = 0
    for height, width in SIZES:
        images = torch.randint(256, (2, 3, height, width), dtype=torch.uint8, generator=generator)
        expected = torch.stack([resize(image) for image in images]).float()
        for flipped in (False, True):
            pixels = images.flip(1) if flipped else images
            found = Preprocessing(resize, reverse_channels=flipped)(pixels.movedim(1, -1))
            # Single pixels on the border between two integers are rounded to the other one.
            assert found.shape == expected.shape and (found - expected).abs().max() <= 1
            different, total = different + (found != expected).sum().item(), total + found.numel()
    assert different <= (0 if interpolation == "nearest" or size == (0,) else 1e-3 * total)


def test_order_of_the_two_passes_matters():
    """Negative control of the comparison of pixels: each pass rounds, so that the vertical one must be second."""
    images = torch.randint(256, (2, 3, 131, 77), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([Resize(size=(64, 32))(image) for image in images]).float()
    transposed = Preprocessing(Resize(size=(32, 64)))(images.permute(0, 3, 2, 1)).transpose(2, 3)
    assert (transposed != expected).float().mean() > 0.1


@pytest.mark.integration
@pytest.mark.parametrize("suffix", [ONNX, ".pt2", ".ts", pytest.param(".xml", marks=pytest.mark.extras)])
def test_features_of_images_of_any_size_equal_those_of_the_predictor(demo, predictor, photos, suffix, tmp_path):
    report = export(predictor, tmp_path / f"model{suffix}", preprocess="inside")
    assert {"random, batch of 32, 32 x 64 pixels", "Demo, 30 images"} < {
        comparison.images for comparison in report.comparisons
    }
    assert min(comparison.min_cosine for comparison in report.comparisons) > 0.9999 and report.map_difference == 0
    files = {file.suffix: file.read_bytes() for file in tmp_path.iterdir()}
    model, expected = FORMATS[suffix].runner(files), predictor.features(photos)
    for number, path in enumerate(photos):
        image = read_image(str(path)).movedim(0, -1)
        found = model({"images": torch.stack([image] * (1 + number % 2))})
        assert torch.cosine_similarity(found, expected[[number]]).min() > 0.9999


@pytest.mark.integration
def test_exported_model_runs_the_preprocessing_inside(predictor, photos, tmp_path):
    pytest.importorskip("onnxruntime")
    expected = predictor.features(photos)
    path = tmp_path / "model.onnx"
    export(predictor, path, preprocess="inside", color_order="bgr", data="", license=License(name="mit"))
    model = ExportedModel(path)
    assert model.metadata["color_order"] == "BGR" and model.metadata["preprocess"] == "inside"
    assert model.metadata["model_hash"] == file_sha256(predictor.checkpoint) and model.metadata["license"] == "mit"
    assert torch.cosine_similarity(model.features(photos), expected).min() > 0.9999
    frame = np.asarray(Image.open(photos[1]))
    boxes = [[3, 5, 60, 90], [-5, -5, 0, 0], [10, 10, 33, 64]]
    found, of_boxes = (extractor.features(frame, boxes=boxes, color="bgr") for extractor in (model, predictor))
    assert found[1].isnan().all()
    assert torch.cosine_similarity(found[[0, 2]], of_boxes[[0, 2]]).min() > 0.9999


def test_parity_check_reads_the_original_images_of_the_test_set(demo, checkpoint):
    predictor = fastamp.Predictor(checkpoint, device="cpu", opts=["INPUT.SIZE_TEST", "(48, 24)"])
    images = RankedImages(predictor, "Demo", 12)
    originals = []

    def collect(batch):
        originals.extend(zip(batch["img_paths"], batch["images"], strict=True))
        return torch.zeros(len(batch["images"]), 1)

    images.features(collect, raw=True)
    paths = build_reid_test_loader(predictor.cfg, "Demo")[0].dataset.items
    assert len(originals) == sum(len(batch["images"]) for batch in images.batches) < len(paths)
    for path, image in originals:
        assert torch.equal(image, read_image(path))


def test_license_in_the_metadata_is_that_of_the_model_card(run_folder, checkpoint, tmp_path):
    folder = package(run_folder, tmp_path / "model", license=License(name="cc-by-4.0")).folder
    for source, expected in ((folder, "cc-by-4.0"), (checkpoint, "unknown")):
        assert export_metadata(fastamp.Predictor(source, device="cpu"), ExportOptions())["license"] == expected


def test_conflicting_options_are_rejected(predictor, checkpoint, tmp_path, input_error):
    for options, message in (
        ({"preprocess": "inside", "normalization": False}, "--no-normalization"),
        ({"color_order": "bgr"}, "--preprocess is outside"),
        ({"preprocess": "within"}, "within"),
    ):
        with pytest.raises(ConfigError, match=message):
            export(predictor, tmp_path / "model.pt2", **options)
    arguments = ("--preprocess", "inside", "--license", "other", "--device", "cpu")
    assert "--license-name" in input_error(main, ["export", str(checkpoint), str(tmp_path / "model.pt2"), *arguments])
