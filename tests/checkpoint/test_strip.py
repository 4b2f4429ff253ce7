"""Stripped checkpoints: content, evaluation, extraction, export and fine-tuning."""

import shutil

import numpy as np
import pytest
import tiny
import torch

import fastamp
from fastamp.checkpoint.safetensors_file import INFERENCE_ENTRIES
from fastamp.cli import main
from fastamp.engine import DefaultTrainer
from fastamp.utils.errors import ConfigError, WeightsError

pytestmark = pytest.mark.integration

IMAGE = np.random.default_rng(0).integers(0, 256, (64, 32, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def averaged(demo_root, tmp_path_factory):
    """Train a model with a weight average that is evaluated (EMA); return the output folder."""
    folder = tmp_path_factory.mktemp("ema")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTAMP_DATASETS", str(demo_root))
        tiny.train(folder, "SOLVER.EMA", "True", "SOLVER.EMA.DECAY", "0.9")
    return folder


def strip(source, target):
    assert main(["strip", str(source), str(target)]) == 0
    return torch.load(target, weights_only=True)


def test_stripped_checkpoint_keeps_weights_config_and_inference_entries(checkpoint, tmp_path, capsys):
    content = strip(checkpoint, tmp_path / "small.pth")
    before = torch.load(checkpoint, weights_only=True)
    assert content.keys() == {"model", "config", "fastamp_format", *INFERENCE_ENTRIES} - {"calibration", "adapters_of"}
    assert "optimizer" in before  # the original checkpoint has it
    assert all(torch.equal(tensor, content["model"][name]) for name, tensor in before["model"].items())
    assert content["config"] == before["config"] and content["best"] == before["best"]
    assert (tmp_path / "small.pth").stat().st_size < checkpoint.stat().st_size
    assert "small.pth" in capsys.readouterr().out
    assert strip(tmp_path / "small.pth", tmp_path / "again.pth").keys() == content.keys()


def test_stripped_checkpoint_is_written_next_to_the_original_by_default(checkpoint, tmp_path):
    shutil.copy(checkpoint, tmp_path / "model_best.pth")
    assert main(["strip", str(tmp_path / "model_best.pth")]) == 0
    assert (tmp_path / "model_best_stripped.pth").exists()


def test_stripped_checkpoint_gives_the_same_features_and_metrics(demo, checkpoint, tmp_path):
    small = tmp_path / "small.pth"
    strip(checkpoint, small)
    one, other = (fastamp.Predictor(path, device="cpu") for path in (checkpoint, small))
    assert torch.equal(one.features(IMAGE), other.features(IMAGE)) and one.config_hash == other.config_hash
    assert one.policy == other.policy
    assert one.compare(IMAGE, IMAGE[:, ::-1]).describe() == other.compare(IMAGE, IMAGE[:, ::-1]).describe()
    options = tiny.tiny_options(tmp_path / "eval", "MODEL.WEIGHTS", str(small), "SOLVER.AMP", "bf16")
    assert main(["eval", *options]) == 0
    assert main(["extract", str(small), "Demo", "-o", str(tmp_path / "demo.npz"), "--splits", "query"]) == 0


def test_stripped_checkpoint_can_be_exported(demo, checkpoint, tmp_path):
    strip(checkpoint, tmp_path / "small.pth")
    assert main(["export", str(tmp_path / "small.pth"), str(tmp_path / "small.pt2"), "--data", "Demo"]) == 0
    assert (tmp_path / "small.pt2").exists()


@pytest.mark.parametrize("name", ["model_best.pth", "model_final.pth"])
def test_strip_replaces_model_weights_by_the_evaluated_average(demo, averaged, tmp_path, name, caplog):
    content = strip(averaged / name, tmp_path / "small.pth")
    assert "average" not in content and content["stripped"] == "ema"
    before = torch.load(averaged / "model_final.pth", weights_only=True)
    assert not all(torch.equal(tensor, before["model"][key]) for key, tensor in content["model"].items())
    expected = fastamp.Predictor(averaged / name, device="cpu").features(IMAGE)
    caplog.clear()
    predictor = fastamp.Predictor(tmp_path / "small.pth", device="cpu")
    assert torch.equal(predictor.features(IMAGE), expected)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    fastamp.Predictor(tmp_path / "small.pth", device="cpu", opts=["SOLVER.EMA.EVALUATE", "False"])
    assert "stripped" in caplog.text and "ema" in caplog.text


def test_strip_keeps_model_weights_instead_of_ema_if_ema_evaluate_is_false(demo, tmp_path):
    tiny.train(tmp_path, "SOLVER.EMA", "True", "SOLVER.EMA.DECAY", "0.9", "SOLVER.EMA.EVALUATE", "False")
    content = strip(tmp_path / "model_final.pth", tmp_path / "small.pth")
    assert content["stripped"] == "model"
    before = torch.load(tmp_path / "model_final.pth", weights_only=True)["model"]
    assert all(torch.equal(tensor, before[key]) for key, tensor in content["model"].items())


def test_stripped_checkpoint_allows_fine_tuning_but_not_resume(demo, run_folder, tmp_path):
    final = run_folder / "model_final.pth"
    small = tmp_path / "model_final.pth"
    strip(final, small)
    trainer = DefaultTrainer(tiny.tiny_config(tmp_path / "tuned", "MODEL.WEIGHTS", str(small), "SOLVER.AMP", "bf16"))
    trainer.resume_or_load(resume=False)
    loaded, expected = trainer.model.state_dict(), tiny.weights(final)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    for pointer in (True, False):
        if pointer:
            (tmp_path / "last_checkpoint").write_text(small.name)
        else:
            (tmp_path / "last_checkpoint").unlink()
        trainer = DefaultTrainer(tiny.tiny_config(tmp_path, "SOLVER.AMP", "bf16"))
        with pytest.raises(WeightsError, match=r"stripped(.|\n)*fix: (.|\n)*MODEL\.WEIGHTS"):
            trainer.resume_or_load(resume=True)


def test_resume_ignores_a_stripped_checkpoint_in_the_folder(demo, run_folder, tmp_path):
    shutil.copy(run_folder / "model_final.pth", tmp_path / "model_final.pth")
    strip(
        tmp_path / "model_final.pth", tmp_path / "model_final_stripped.pth"
    )  # newer, and not named in last_checkpoint
    trainer = DefaultTrainer(tiny.tiny_config(tmp_path, "SOLVER.AMP", "bf16"))
    trainer.resume_or_load(resume=True)
    assert trainer.trainer.start_iter > 0


def test_strip_exits_with_code_2_on_invalid_input(checkpoint, tmp_path, capsys):
    shutil.copy(checkpoint, tmp_path / "a.pth")
    for source, target, error in (
        ("a.pth", "a.pth", ConfigError),
        ("a.pth", "b.onnx", ConfigError),
        ("missing.pth", "b.pth", WeightsError),
        ("bare.pth", "b.pth", WeightsError),
    ):
        torch.save({"model": torch.load(checkpoint, weights_only=True)["model"]}, tmp_path / "bare.pth")
        assert main(["strip", str(tmp_path / source), str(tmp_path / target)]) == 2, error
        assert "error: " in capsys.readouterr().err
    assert not (tmp_path / "b.pth").exists()
    assert (tmp_path / "a.pth").read_bytes() == checkpoint.read_bytes()
