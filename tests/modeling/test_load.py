"""load_model: checkpoints, configs, precision and invalid files."""

import subprocess
import sys

import pytest
import tiny
import torch

from fastamp.config import get_cfg
from fastamp.data import build_reid_test_loader
from fastamp.engine import DefaultTrainer
from fastamp.feature_pass import extract_features
from fastamp.modeling import load_model
from fastamp.utils.errors import ConfigError, WeightsError


def features(loaded):
    loader, _ = build_reid_test_loader(loaded.cfg, "Demo")
    with torch.inference_mode():
        return extract_features(loaded.model, next(iter(loader)), loaded.policy, False)


def config_of(checkpoint, *opts):
    cfg = get_cfg()
    cfg.merge_saved(torch.load(checkpoint, weights_only=True)["config"])
    cfg.merge_from_list(["MODEL.WEIGHTS", str(checkpoint), *opts])
    return cfg


def test_load_model_returns_same_model_for_checkpoint_and_config(demo, checkpoint):
    """Both models are in evaluation mode and use the precision of the training run."""
    from_checkpoint, from_config = load_model(checkpoint, device="cpu"), load_model(config_of(checkpoint))
    for loaded in (from_checkpoint, from_config):
        assert not loaded.model.training and loaded.policy.dtype == torch.bfloat16 and loaded.cfg.is_frozen()
        assert loaded.extra["best"]["metric"]
    assert torch.equal(features(from_checkpoint), features(from_config))


def test_load_model_options_and_config_override_precision_of_checkpoint(checkpoint):
    assert load_model(checkpoint, device="cpu", opts=["SOLVER.AMP", "off"]).policy.dtype == torch.float32
    assert not load_model(checkpoint, device="cpu", opts=["SOLVER.AMP.EVAL_DTYPE", "float32"]).policy.enabled
    # For a config, SOLVER.AMP sets the precision; for a checkpoint, the training precision is the default.
    assert not load_model(config_of(checkpoint, "SOLVER.AMP", "off")).policy.enabled


def test_load_model_options_do_not_modify_config(checkpoint):
    cfg = config_of(checkpoint, "MODEL.DEVICE", "cuda")
    loaded = load_model(cfg, device="cpu", opts=["TEST.IMS_PER_BATCH", "7"])
    assert loaded.cfg.TEST.IMS_PER_BATCH == 7 and cfg.TEST.IMS_PER_BATCH != 7 and cfg.MODEL.DEVICE == "cuda"
    assert not cfg.is_frozen()


@pytest.mark.integration
@pytest.mark.parametrize("options", [("SOLVER.EMA", "True"), ("SOLVER.EMA", "True", "SOLVER.EMA.EVALUATE", "False")])
def test_load_model_returns_averaged_weights_if_config_evaluates_the_average(demo, tmp_path, options):
    tiny.train(tmp_path, *options)
    loaded = load_model(tmp_path / "model_final.pth", device="cpu")
    content = torch.load(tmp_path / "model_final.pth", weights_only=True)
    expected = content["average"]["model"] if len(options) == 2 else content["model"]
    state = {name: value for name, value in loaded.model.state_dict().items() if value.numel()}  # no classifier
    assert any(not torch.equal(content["average"]["model"][name], content["model"][name]) for name in state)
    assert all(torch.equal(value, expected[name]) for name, value in state.items())
    trainer_model, _ = DefaultTrainer.load_model(loaded.cfg)
    assert all(torch.equal(trainer_model.state_dict()[name], value) for name, value in state.items())


def test_load_model_raises_if_weights_config_or_policy_are_missing_or_invalid(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match="MODEL.WEIGHTS"):
        load_model(get_cfg(), device="cpu")
    content = torch.load(checkpoint, weights_only=True)
    torch.save(content | {"policy": {"dtype": 3}}, tmp_path / "damaged.pth")
    with pytest.raises(WeightsError, match="policy"):
        load_model(tmp_path / "damaged.pth", device="cpu")
    torch.save({"model": content["model"]}, tmp_path / "bare.pth")
    with pytest.raises(WeightsError, match="bare.pth"):
        load_model(tmp_path / "bare.pth", device="cpu")
    assert load_model(config_of(checkpoint, "MODEL.WEIGHTS", str(tmp_path / "bare.pth"))).extra == {}


def test_load_model_of_trainer_subclass_calls_overridden_build_model(demo, checkpoint):
    class Trainer(DefaultTrainer):
        @classmethod
        def build_model(cls, cfg):
            return super().build_model(cfg).double()

    model, _ = Trainer.load_model(config_of(checkpoint))
    assert next(model.parameters()).dtype == torch.float64


@pytest.mark.integration
def test_importing_inference_does_not_import_engine():
    code = "import sys, fastamp.inference, fastamp.inference.export, fastamp.inference.extract\n"
    code += "print([name for name in sys.modules if name.startswith('fastamp.engine')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
