"""Tests of Predictor: equality with evaluation, input formats, boxes and errors."""

import warnings

import numpy as np
import PIL.Image
import pytest
import tiny
import torch

import fastamp
from fastamp.data import build_reid_test_loader
from fastamp.data.decode import read_image
from fastamp.engine import DefaultTrainer
from fastamp.feature_pass import extract_features
from fastamp.inference import images as module
from fastamp.inference.outputs import PredictorOutput
from fastamp.utils.errors import ConfigError, DataError, WeightsError


def evaluated(predictor):
    """Return the features of the first test batch, as passed to the evaluator, and the batch."""
    loader, _ = build_reid_test_loader(predictor.cfg, "Demo")
    batch = next(iter(loader))
    with torch.inference_mode():
        return extract_features(predictor.model, batch, predictor.policy, predictor.cfg.TEST.FLIP.ENABLED), batch


@pytest.mark.integration
@pytest.mark.parametrize("options", [("SOLVER.AMP", "bf16"), ("TEST.FLIP", "True", "SOLVER.EMA", "True"), ()])
def test_predictor_features_equal_features_in_evaluation(demo, tmp_path, options):
    tiny.train(tmp_path, *options)
    predictor = fastamp.Predictor(tmp_path / "model_best.pth", device="cpu")
    assert predictor.policy.enabled == ("SOLVER.AMP" in options)
    expected, batch = evaluated(predictor)
    found = predictor.features(batch["img_paths"])
    assert found.dtype == torch.float32 and torch.equal(found, expected)
    images = torch.stack([predictor.preprocess(path) for path in batch["img_paths"]])
    assert torch.equal(images, batch["images"])


def test_predictor_features_are_equal_for_paths_arrays_and_tensors(demo, checkpoint):
    predictor = fastamp.Predictor(checkpoint, device="cpu")
    _, batch = evaluated(predictor)
    path = batch["img_paths"][0]
    tensor = read_image(path)
    array = tensor.permute(1, 2, 0).numpy()
    expected = predictor.features(path)
    assert expected.shape == (1, 16)
    one_path = np.array([path])  # as in an extraction
    for image in (tensor, array, [path], one_path, [tensor], tensor[None], array[None], np.flip(np.flip(array, 1), 1)):
        assert torch.equal(predictor.features(image), expected)
    gray = array[:, :, 0]
    assert torch.equal(predictor.features(gray), predictor.features(np.stack([gray] * 3, -1)))


@pytest.mark.parametrize(
    "image, message",
    [
        (np.zeros((4, 4, 3), np.float32), "float32"),
        (np.zeros((4, 4, 5), np.uint8), "1, 3 or 4 channels"),
        (torch.zeros(5, 4, 3, dtype=torch.uint8), r"\(C, H, W\) with 1, 3 or 4"),
        ([3], "got int"),
        ([], "at least one image"),
        (np.zeros((0, 4, 4, 3), np.uint8), "at least one image"),
        (None, "got NoneType"),
        (PIL.Image.new("F", (4, 4)), "mode F"),
        ([np.zeros((4, 4, 3), np.uint8), np.zeros((4, 4, 3), np.int32)], "image 1: .* int32"),
        ("nowhere.jpg", "nowhere.jpg"),
    ],
)
def test_predictor_features_raise_for_invalid_images(checkpoint, image, message):
    with pytest.raises(DataError, match=message):
        fastamp.Predictor(checkpoint, device="cpu").features(image)


def test_predictor_config_hash_depends_on_weights_and_feature_keys(checkpoint, run_folder, demo, tmp_path):
    one = fastamp.Predictor(checkpoint, device="cpu")
    again = fastamp.Predictor(run_folder / "model_final.pth", device="cpu", opts=["TEST.RANKS", "(1, 2)"])
    assert one.config_hash == again.config_hash and len(one.config_hash) == 16
    other_size = fastamp.Predictor(checkpoint, device="cpu", opts=["INPUT.SIZE_TEST", "(32, 32)"])
    with torch.no_grad():
        next(again.model.parameters())[0] += 1
    del again.config_hash
    assert len({one.config_hash, other_size.config_hash, again.config_hash}) == 3


def test_predictor_raises_if_checkpoint_has_no_valid_config(checkpoint, tmp_path):
    content = torch.load(checkpoint, weights_only=True)
    torch.save({"model": content["model"]}, tmp_path / "bare.pth")
    with pytest.raises(WeightsError, match="config"):
        fastamp.Predictor(tmp_path / "bare.pth")
    torch.save(content | {"config": "MODEL: {NOSE: 1}"}, tmp_path / "foreign.pth")
    with pytest.raises(WeightsError, match="MODEL.NOSE"):
        fastamp.Predictor(tmp_path / "foreign.pth")


def test_predictor_options_override_config(checkpoint):
    predictor = fastamp.Predictor(checkpoint, device="cpu", opts=["SOLVER.AMP.EVAL_DTYPE", "float32"])
    assert not predictor.policy.enabled
    with pytest.raises(ConfigError, match="cuda"):
        fastamp.Predictor(checkpoint, device="cuda:99")


def test_predictor_raises_if_features_are_not_finite(checkpoint, tmp_path):
    content = torch.load(checkpoint, weights_only=True)
    content["model"]["backbone.0.weight"].fill_(float("nan"))
    torch.save(content, tmp_path / "nan.pth")
    with pytest.raises(DataError, match="SOLVER.AMP.EVAL_DTYPE"):
        fastamp.Predictor(tmp_path / "nan.pth", device="cpu").features(np.zeros((8, 8, 3), np.uint8))


def test_predictor_and_trainer_load_the_same_weights(demo, checkpoint):
    predictor = fastamp.Predictor(checkpoint, device="cpu")
    model, _ = DefaultTrainer.load_model(predictor.cfg)
    state = predictor.model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.mark.integration
def test_evaluation_reads_the_number_of_classes_from_the_checkpoint(demo, tmp_path):
    options = ("MODEL.HEADS.NAME", "ClasHead")
    tiny.train(tmp_path, *options)
    best = tmp_path / "model_best.pth"
    cfg = tiny.tiny_config(tmp_path / "eval", *options, "MODEL.WEIGHTS", str(best))  # NUM_CLASSES 0, as in training
    found = DefaultTrainer.test_weights(cfg)
    assert found["metric"] == pytest.approx(torch.load(best, weights_only=True)["best"]["value"])
    predictor = fastamp.Predictor(best, device="cpu")
    features, batch = evaluated(predictor)
    assert features.shape[1] == 16 and torch.equal(predictor.features(batch["img_paths"]), features)


def test_predictor_rotates_pil_images_by_their_exif_orientation(checkpoint, tmp_path):
    predictor = fastamp.Predictor(checkpoint, device="cpu")
    pixels = np.random.default_rng(0).integers(0, 256, (40, 24, 3), dtype=np.uint8)
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees
    PIL.Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    with PIL.Image.open(tmp_path / "turned.png") as opened:
        found = predictor.features([opened, opened])  # lazily decoded; the same object twice
    assert torch.equal(found[:1], predictor.features(tmp_path / "turned.png"))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[:1], predictor.features(np.ascontiguousarray(np.rot90(pixels, -1))))


def test_predictor_raises_if_a_pil_image_cannot_be_decoded(checkpoint, tmp_path):
    PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes((tmp_path / "a.png").read_bytes()[:3000])
    with PIL.Image.open(tmp_path / "a.png") as opened, pytest.raises(DataError, match=r"a\.png"):
        fastamp.Predictor(checkpoint, device="cpu").features([opened])


def test_bgr_arrays_have_the_same_features_as_their_image_file(demo, checkpoint):
    predictor = fastamp.Predictor(checkpoint, device="cpu")
    _, batch = evaluated(predictor)
    path = batch["img_paths"][0]
    expected = predictor.features(path)
    rgb = read_image(path).permute(1, 2, 0).numpy()
    bgr = rgb[:, :, ::-1]
    alpha = np.full_like(bgr[:, :, :1], 7)
    assert not torch.allclose(predictor.features(bgr), expected)  # negative control
    for image in (bgr, np.dstack((bgr, alpha)), torch.from_numpy(bgr.copy()).movedim(-1, 0), [bgr], bgr[None]):
        assert torch.equal(predictor.features(image, color="bgr"), expected)
    # Files and PIL images have a defined channel order, gray arrays have none.
    assert torch.equal(predictor.features(path, color="bgr"), expected)
    assert torch.equal(predictor.features(PIL.Image.fromarray(rgb), color="bgr"), expected)
    gray = rgb[:, :, 0]
    assert torch.equal(predictor.features(gray, color="bgr"), predictor.features(gray))
    assert predictor.compare(bgr, path, color="bgr").score == pytest.approx(1)
    with pytest.raises(ConfigError, match="color.*'brg'.*rgb, bgr"):
        predictor.features(bgr, color="brg")


def test_predictor_does_not_warn_about_read_only_arrays(checkpoint):
    predictor = fastamp.Predictor(checkpoint, device="cpu")
    array = np.asarray(PIL.Image.new("RGB", (16, 32), (50, 100, 150)))
    assert not array.flags.writeable
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = predictor.features(array)
    finally:
        torch.set_warn_always(before)
    assert torch.equal(found, predictor.features(array.copy()))


class IsLong(PredictorOutput):
    """1 for a feature that is longer than 0."""

    def compute(self, model, batch):
        features = model(batch)
        return features, features.norm(dim=1, keepdim=True)

    def finish(self, values):
        assert values.isfinite().all()
        return (values > 0).float()


def test_output_of_a_box_without_pixels_is_nan(checkpoint, monkeypatch):
    predictor = fastamp.Predictor(checkpoint, device="cpu")
    monkeypatch.setattr(predictor, "outputs", {"long": IsLong(["is long"])})
    frame = np.random.default_rng(0).integers(256, size=(60, 40, 3), dtype=np.uint8)
    empty, full = predictor.predict("long", frame, boxes=[(90, 90, 95, 95), (0, 0, 30, 50)])
    assert np.isnan(empty["is long"]) and full == {"is long": 1}


def test_features_of_boxes_in_a_frame_equal_features_of_crops(checkpoint, monkeypatch):
    predictor = fastamp.Predictor(checkpoint, device="cpu", opts=["TEST.IMS_PER_BATCH", "4"])
    frame = np.random.default_rng(0).integers(0, 256, (120, 160, 3), dtype=np.uint8)
    boxes = np.array([[0, 0, 30, 60], [100, 20, 160, 120], [5.4, 5.6, 40.4, 80.6], [-20, -9, 30, 200], [1, 2, 33, 66]])
    crops = [frame[0:60, 0:30], frame[20:120, 100:160], frame[6:81, 5:40], frame[:, 0:30], frame[2:66, 1:33]]
    expected = predictor.features(crops)
    batches = []
    predictor.model.register_forward_hook(lambda module, inputs, output: batches.append(len(output)))
    for given in (boxes, boxes.tolist(), torch.from_numpy(boxes)):
        assert torch.equal(predictor.features(frame, boxes=given), expected)
    assert batches == [4, 1] * 3
    assert torch.equal(predictor.features(frame[:, :, ::-1], boxes=boxes, color="bgr"), expected)
    assert torch.equal(predictor.features(PIL.Image.fromarray(frame), boxes=boxes), expected)
    assert torch.equal(predictor.features([frame], boxes=boxes), expected)
    for gray in (frame[:, :, 0], torch.from_numpy(frame[:, :, 0].copy())[None]):
        assert torch.equal(predictor.features(gray, boxes=boxes), predictor.features([crop[:, :, 0] for crop in crops]))
    none = predictor.features(frame, boxes=np.zeros((0, 4)))
    assert none.shape == (0, 16) and none.dtype == torch.float32
    assert predictor.features(frame, boxes=[]).shape == (0, 16)


@pytest.mark.parametrize(
    "images, boxes, message",
    [
        (np.zeros((8, 8, 3), np.uint8), np.zeros((2, 5)), r"\(2, 5\)"),
        (np.zeros((8, 8, 3), np.uint8), [1, 2, 3, 4], r"\(4,\)"),
        (np.zeros((8, 8, 3), np.uint8), [["a", 2, 3, 4]], "numbers"),
        (np.zeros((8, 8, 3), np.uint8), [[1, 2, 3, 4], [1, 2]], "numbers"),
        (np.zeros((2, 8, 8, 3), np.uint8), [[1, 2, 3, 4]], "one image.*2"),
        (np.zeros((8, 8, 3), np.int32), [[1, 2, 3, 4]], r"int32 \(8, 8, 3\)"),
        (torch.zeros(8, 8, dtype=torch.uint8), [], r"uint8 \(8, 8\)"),
        (np.zeros((8, 8, 3), np.uint8), [[0.1, 0.2, 0.9, 1]], "normalized"),
    ],
)
def test_predictor_features_raise_for_invalid_boxes(checkpoint, images, boxes, message):
    with pytest.raises(DataError, match=message):
        fastamp.Predictor(checkpoint, device="cpu").features(images, boxes=boxes)


def test_predictor_converts_only_the_boxes_of_a_frame_to_model_input(checkpoint, monkeypatch):
    """Conversion of the entire frame would be slow, because it has many more pixels than its boxes."""
    predictor = fastamp.Predictor(checkpoint, device="cpu")
    sizes, with_channels = [], module.with_channels
    monkeypatch.setattr(
        module, "with_channels", lambda image, n: sizes.append(image.shape[1:]) or with_channels(image, n)
    )
    predictor.features(np.zeros((1080, 1920, 3), np.uint8), boxes=[[0, 0, 30, 60], [9, 9, 19, 29]], color="bgr")
    assert sorted(map(tuple, sizes)) == [(20, 10), (60, 30)]


def test_boxes_without_pixels_have_nan_features_and_log_a_warning(checkpoint, caplog):
    """Boxes outside the frame do not affect the features of other boxes."""
    predictor = fastamp.Predictor(checkpoint, device="cpu")
    frame = np.random.default_rng(0).integers(0, 256, (120, 160, 3), dtype=np.uint8)
    nan = float("nan")
    good, bad = (
        [10, 10, 40, 90],
        ([160, 0, 190, 60], [30, 30, 30, 60], [40, 50, 20, 60], [-9, 0, 0, 60], [nan, 0, 9, 9]),
    )
    expected = predictor.features(frame[10:90, 10:40])
    found = predictor.features(frame, boxes=[good, *bad, good])
    assert found.shape == (7, 16)
    assert found.isnan().all(dim=1).tolist() == [False, *[True] * 5, False]
    assert torch.allclose(found[[0, 6]], expected.expand(2, -1), atol=1e-5)
    assert "1, 2, 3, 4, 5" in caplog.text and "NaN" in caplog.text
    caplog.clear()
    empty = frame[200:260, 10:40]
    crops = predictor.features([frame[10:90, 10:40], empty, torch.zeros(3, 5, 0, dtype=torch.uint8)])
    assert crops.isnan().all(dim=1).tolist() == [False, True, True] and "1, 2" in caplog.text
    assert predictor.features(frame, boxes=bad).isnan().all()
    with pytest.raises(DataError, match=r"\bimage 1\b"):
        predictor.compare(frame, empty)


def test_policy_of_a_training_with_amp_that_ended_in_float32_does_not_say_that_amp_is_off(demo, checkpoint, tmp_path):
    content = torch.load(checkpoint, weights_only=True)
    content["policy"]["dtype"] = "float32"  # e.g. after a fallback
    torch.save(content, tmp_path / "model.pth")
    policy = fastamp.Predictor(tmp_path / "model.pth", device="cpu").policy
    assert not policy.enabled and "SOLVER.AMP" not in policy.reason
