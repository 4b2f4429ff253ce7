"""Python API: inputs that Predictor, models, trainers and configs accept, and explanations of inputs of wrong types."""

import io
import logging
import os
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest
import tiny
import torch

from fastamp import Predictor
from fastamp.config import get_cfg
from fastamp.engine import DefaultTrainer, default_setup
from fastamp.modeling import build_model, load_model
from fastamp.utils.errors import ConfigError, DataError, WeightsError


@pytest.fixture(scope="module")
def predictor(checkpoint):
    return Predictor(checkpoint, device="cpu", opts=["SOLVER.AMP", "off"])


@pytest.fixture(scope="module")
def picture():
    pixels = np.random.default_rng(0).integers(0, 256, (64, 32, 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels)


class Delegating:
    """File around another one, like those of ``tempfile``."""

    def __init__(self, file):
        self.file = file

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_call_accepts_images_of_every_kind(predictor, picture, tmp_path):
    path = tmp_path / "image.png"
    picture.save(path)
    array = np.asarray(picture)
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    expected, pixels = predictor.features(picture), predictor.preprocess(picture)[None]
    for image in (picture, array, tensor, path, str(path), [picture], array[None], tensor[None], iter([picture])):
        assert torch.equal(predictor(image), expected), type(image)
    content = path.read_bytes()
    for image in (content, bytearray(content), memoryview(content), io.BytesIO(content), [io.BytesIO(content)]):
        assert torch.equal(predictor(image), expected), type(image)
    with path.open("rb") as file:
        file.read()  # read from its start, as PIL does
        assert torch.equal(predictor(file), expected) and torch.equal(predictor.preprocess(file)[None], pixels)
        wrapped = Delegating(file)
        assert torch.equal(predictor(wrapped), expected)
    text = tmp_path / "image.txt"
    text.touch()
    with text.open() as file, pytest.raises(DataError, match=r"image\.txt"):
        predictor(file)
    mixed = predictor([picture, array, tensor, path, str(path)])
    assert mixed.shape == (5, tiny.WIDTH) and torch.allclose(mixed, expected.expand(5, -1), atol=1e-6)
    frame = np.zeros((100, 100, 3), dtype=np.uint8)
    frame[10:74, 20:52] = array
    box = torch.tensor([20.0, 10, 52, 74], requires_grad=True)
    for boxes in ([[20, 10, 52, 74]], box[None], [box], (box,)):
        assert torch.allclose(predictor(frame, boxes=boxes), expected, atol=1e-6)


def test_run_folder_is_its_best_model(run_folder, tmp_path, predictor, picture):
    of_folder = Predictor(run_folder, device=torch.device("cpu"), opts=["SOLVER.AMP", "off"])
    assert of_folder.checkpoint == run_folder / "model_best.pth"
    assert torch.equal(of_folder(picture), predictor(picture))
    os.link(run_folder / "model_final.pth", tmp_path / "model_final.pth")
    assert Predictor(tmp_path, device="cpu").checkpoint.name == "model_final.pth"
    assert str(tmp_path / "model_final.pth") == load_model(tmp_path, device="cpu").cfg.MODEL.WEIGHTS


def test_folder_without_checkpoint_lists_what_it_contains(tmp_path):
    (tmp_path / "model_0003.pth").touch()
    with pytest.raises(WeightsError, match=r"(?s)model_best.pth, model_final.pth.*model_0003.pth.*fix:"):
        Predictor(tmp_path)


def test_repr_is_one_line_with_file_model_and_precision(predictor, checkpoint):
    text = repr(predictor)
    for part in (str(checkpoint), "Baseline", "build_tiny_backbone", "(64, 32)", "float32", "cpu"):
        assert part in text, part
    assert "\n" not in text and "object at" not in text


@pytest.mark.integration
def test_predictor_in_a_new_process_logs_and_shows_no_warnings(checkpoint):
    script = (
        "import sys, numpy, torch, PIL.Image, tiny, fastamp\n"
        "predictor = fastamp.Predictor(sys.argv[1])\n"
        "array = numpy.zeros((64, 32, 3), dtype=numpy.uint8)\n"
        "array.setflags(write=False)\n"
        "image = PIL.Image.fromarray(array)\n"
        "print(len(predictor([array, image, numpy.asarray(image), torch.zeros(3, 64, 32, dtype=torch.uint8)])))\n"
        "print(predictor.compare(image, image).score, predictor)\n"
    )
    # PyTorch warns about an NVIDIA driver that is too old, even if no device is visible.
    filters = ("-W", "error", "-W", "ignore:CUDA initialization:UserWarning")
    done = subprocess.run(
        [sys.executable, *filters, "-c", script, checkpoint],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    assert done.stderr.count("parameters, precision: ") == 1 and done.stdout.startswith("4\n")


def test_images_of_wrong_type_are_explained(predictor, picture, tmp_path):
    array = np.asarray(picture)
    cases = {
        "int": 5,
        "NoneType": None,
        "dict": {"images": array},
        "float64": array / 255,
        "float32": torch.zeros(3, 64, 32),
        "got the folder": tmp_path,
    }
    for found, image in cases.items():
        with pytest.raises(DataError, match=rf"(?s){found}.*fix: "):
            predictor(image)
    with pytest.raises(DataError, match="bytes"):
        predictor(b"\x89PNG")  # not a whole file


def test_conversion_that_an_error_suggests_for_floats_in_0_to_1_is_correct(predictor, picture):
    array = np.asarray(picture)
    for image, suggested in (
        (array / np.float32(255), lambda image: (255 * image).round().astype("uint8")),
        (torch.from_numpy(array / np.float32(255)).movedim(-1, 0), lambda image: (255 * image).round().to(torch.uint8)),
    ):
        with pytest.raises(DataError, match=r"0\.\.1: \(255 \* image\)\.round\(\)"):
            predictor(image)
        assert torch.equal(predictor(suggested(image)), predictor(picture))


def test_gallery_of_wrong_type_is_explained(predictor, picture):
    with pytest.raises(TypeError, match=r"(?s)got int.*fix:"):
        predictor.search(picture, 5)


@pytest.mark.parametrize("source", [5, None, torch.nn.Identity()], ids=["int", "None", "module"])
def test_checkpoint_of_wrong_type_is_explained(source):
    with pytest.raises(TypeError, match=rf"(?s)MODEL.WEIGHTS.*{type(source).__name__}.*fix:"):
        Predictor(source)


@pytest.mark.parametrize("opts", [5, None, {"TEST.FLIP": True}, {"TEST.FLIP"}, "TEST.FLIP True", [1, 2], ["SEED"]])
def test_overrides_of_wrong_type_are_explained(opts, checkpoint):
    for merge in (get_cfg().merge_from_list, lambda opts: Predictor(checkpoint, device="cpu", opts=opts)):
        with pytest.raises(ConfigError, match="expected .*, got "):
            merge(opts)


def test_overrides_may_have_python_values(checkpoint):
    found = Predictor(checkpoint, device="cpu", opts=("TEST.IMS_PER_BATCH", 4, "TEST.FLIP", True)).cfg.TEST
    assert found.IMS_PER_BATCH == 4 and found.FLIP.ENABLED


@pytest.mark.parametrize("path", [5, None, {"SEED": 1}])
def test_config_file_of_wrong_type_is_explained(path):
    with pytest.raises(ConfigError, match=rf"(?s)merge_from_file: .*{type(path).__name__}.*fix:"):
        get_cfg().merge_from_file(path)


@pytest.mark.parametrize("values", [[("SEED", 1)], 5, None])
def test_values_of_wrong_type_are_explained(values):
    with pytest.raises(ConfigError, match=r"(?s)expected a dict.*fix:"):
        get_cfg().with_values(values)


@pytest.mark.parametrize("function", [DefaultTrainer, default_setup, build_model])
@pytest.mark.parametrize("cfg", ["my.yml", None, {"SOLVER": {}}], ids=["path", "None", "dict"])
def test_argument_that_is_not_a_config_is_explained(function, cfg):
    with pytest.raises(TypeError, match=rf"(?s)got .*{type(cfg).__name__}.*fix: .*read_config"):
        function(cfg)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_model(tiny.tiny_config(tmp_path_factory.mktemp("unused"), "MODEL.HEADS.NUM_CLASSES", "4"))


def test_model_accepts_a_tensor_and_explains_other_inputs(model, picture):
    model.eval()
    images = torch.zeros(2, 3, 64, 32)
    assert torch.equal(model(images), model({"images": images}))
    with pytest.raises(ValueError, match=r"(?s)got \(3, 64, 32\).*images\[None\]"):
        model(images[0])
    for wrong in (picture, [picture], "image.jpg", None, images.numpy()):
        with pytest.raises(TypeError, match=rf"(?s)got {type(wrong).__name__}.*fix:"):
            model(wrong)
    with pytest.raises(ValueError, match=r"(?s)bool.*fix:"):
        model(images.bool())


def test_targets_of_wrong_type_are_explained(model):
    model.train()
    images = torch.zeros(2, 3, 64, 32)
    with pytest.raises(TypeError, match=r"(?s)Baseline.*model.eval\(\)"):
        model(images)
    for wrong, found in (([0, 1], "list"), (torch.zeros(2), "float32"), (torch.zeros(2, 1).long(), "(2, 1)")):
        with pytest.raises(ValueError, match=r"targets: expected") as error:
            model({"images": images, "targets": wrong})
        assert found in str(error.value) and "fix:" in str(error.value)


def test_long_extraction_shows_progress(predictor, picture, monkeypatch):
    titles = []
    monkeypatch.setattr(
        "fastamp.inference.predictor.track", lambda items, total, title: titles.append((title, total)) or items
    )
    size = predictor.cfg.TEST.IMS_PER_BATCH
    predictor([picture])
    predictor([picture] * (size + 1))
    assert titles == [("extracting features", 2)]


@pytest.mark.integration
def test_trainer_without_default_setup_logs_in_a_new_process(demo, tmp_path):
    script = (
        "import sys, tiny\nfrom pathlib import Path\nfrom fastamp.engine import DefaultTrainer\n"
        "DefaultTrainer(tiny.tiny_config(Path(sys.argv[1]), 'SOLVER.MAX_EPOCH', '1')).train()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "log.txt").read_text()
    for text in ("epoch 1/1 iter 6/6", "new best score", "training finished in "):
        assert done.stderr.count(text) == log.count(text) == 1, text


@pytest.mark.integration
def test_logging_of_the_user_receives_the_lines_of_the_trainer(demo, tmp_path, caplog):
    tiny.train(tmp_path)
    assert caplog.text.count("training finished in") == 1 and logging.getLogger("fastamp").handlers == []
