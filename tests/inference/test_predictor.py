"""A predictor's features are those of the evaluation."""

import numpy as np
import PIL.Image
import pytest
import tiny
import torch

import fastamp
from fastamp.data import build_reid_test_loader
from fastamp.data.decode import read_image
from fastamp.engine import DefaultTrainer
from fastamp.evaluation.evaluator import extract_features
from fastamp.utils.errors import ConfigError, DataError, WeightsError


def evaluated(predictor):
    """Return (features, paths) of the first test batch, as the evaluator sees them."""
    loader, _ = build_reid_test_loader(predictor.cfg, "Demo")
    batch = next(iter(loader))
    with torch.inference_mode():
        return extract_features(predictor.model, batch, predictor.policy, predictor.cfg.TEST.FLIP.ENABLED), batch


@pytest.mark.parametrize("options", [("SOLVER.AMP", "bf16"), ("TEST.FLIP", "True", "SOLVER.EMA", "True"), ()])
def test_features_are_the_evaluators(demo, tmp_path, options):
    tiny.train(tmp_path, *options)
    predictor = fastamp.Predictor(tmp_path / "model_best.pth", device="cpu")
    assert predictor.policy.enabled == ("SOLVER.AMP" in options)
    expected, batch = evaluated(predictor)
    found = predictor.features(batch["img_paths"])
    assert found.dtype == torch.float32 and torch.equal(found, expected)
    images = torch.stack([predictor.preprocess(path) for path in batch["img_paths"]])
    assert torch.equal(images, batch["images"])


def test_paths_arrays_and_tensors_are_alike(demo, checkpoint):
    predictor = fastamp.Predictor(checkpoint, device="cpu")
    _, batch = evaluated(predictor)
    path = batch["img_paths"][0]
    tensor = read_image(path)
    array = tensor.permute(1, 2, 0).numpy()
    expected = predictor.features(path)
    assert expected.shape == (1, 16)
    one_path = np.array([path])  # as an extraction holds them
    for image in (tensor, array, [path], one_path, [tensor], tensor[None], array[None], np.flip(np.flip(array, 1), 1)):
        assert torch.equal(predictor.features(image), expected)
    grey = array[:, :, 0]
    assert torch.equal(predictor.features(grey), predictor.features(np.stack([grey] * 3, -1)))


@pytest.mark.parametrize(
    "image, message",
    [
        (np.zeros((4, 4, 3), np.float32), "float32"),
        (np.zeros((4, 4, 5), np.uint8), "1, 3 or 4 channels"),
        (torch.zeros(5, 4, 3, dtype=torch.uint8), r"\(C, H, W\) with 1, 3 or 4"),
        ([3], "not int"),
        ([], "no images"),
        (np.zeros((0, 4, 4, 3), np.uint8), "no images"),
        (None, "not NoneType"),
        (PIL.Image.new("RGB", (4, 4)), r"not Image; numpy\.asarray\(image\)"),
        ("nowhere.jpg", "nowhere.jpg"),
    ],
)
def test_what_is_no_image(checkpoint, image, message):
    with pytest.raises(DataError, match=message):
        fastamp.Predictor(checkpoint, device="cpu").features(image)


def test_the_hash_is_of_the_weights_and_of_what_makes_features(checkpoint, run_folder, demo, tmp_path):
    one = fastamp.Predictor(checkpoint, device="cpu")
    again = fastamp.Predictor(run_folder / "model_final.pth", device="cpu", opts=["TEST.RANKS", "(1, 2)"])
    assert one.config_hash == again.config_hash and len(one.config_hash) == 16
    other_size = fastamp.Predictor(checkpoint, device="cpu", opts=["INPUT.SIZE_TEST", "(32, 32)"])
    with torch.no_grad():
        next(again.model.parameters())[0] += 1
    del again._config_hash
    assert len({one.config_hash, other_size.config_hash, again.config_hash}) == 3


def test_a_checkpoint_without_a_config(checkpoint, tmp_path):
    content = torch.load(checkpoint, weights_only=True)
    torch.save({"model": content["model"]}, tmp_path / "bare.pth")
    with pytest.raises(WeightsError, match="holds no config"):
        fastamp.Predictor(tmp_path / "bare.pth")
    torch.save(content | {"config": "MODEL: {NOSE: 1}"}, tmp_path / "foreign.pth")
    with pytest.raises(WeightsError, match="MODEL.NOSE"):
        fastamp.Predictor(tmp_path / "foreign.pth")


def test_options_over_the_config(checkpoint):
    predictor = fastamp.Predictor(checkpoint, device="cpu", opts=["SOLVER.AMP.EVAL_DTYPE", "float32"])
    assert not predictor.policy.enabled
    with pytest.raises(ConfigError, match="cuda"):
        fastamp.Predictor(checkpoint, device="cuda:99")


def test_features_that_are_not_finite(checkpoint, tmp_path):
    content = torch.load(checkpoint, weights_only=True)
    content["model"]["backbone.0.weight"].fill_(float("nan"))
    torch.save(content, tmp_path / "nan.pth")
    with pytest.raises(DataError, match="not finite"):
        fastamp.Predictor(tmp_path / "nan.pth", device="cpu").features(np.zeros((8, 8, 3), np.uint8))


def test_the_model_is_loaded_as_eval_only_does(demo, checkpoint):
    predictor = fastamp.Predictor(checkpoint, device="cpu")
    model, _ = DefaultTrainer.load_model(predictor.cfg)
    own = predictor.model.state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in model.state_dict().items())


def test_a_classifier_that_evaluates_is_as_the_checkpoints(demo, tmp_path):
    options = ("MODEL.HEADS.NAME", "ClasHead")
    tiny.train(tmp_path, *options)
    best = tmp_path / "model_best.pth"
    cfg = tiny.tiny_config(tmp_path / "eval", *options, "MODEL.WEIGHTS", str(best))  # NUM_CLASSES 0, as in training
    found = DefaultTrainer.test_weights(cfg)
    assert found["metric"] == pytest.approx(torch.load(best, weights_only=True)["best"]["value"])
    predictor = fastamp.Predictor(best, device="cpu")
    features, batch = evaluated(predictor)
    assert features.shape[1] == 16 and torch.equal(predictor.features(batch["img_paths"]), features)
