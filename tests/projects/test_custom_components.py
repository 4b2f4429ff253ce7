"""Example project with custom components: training, evaluation and resume."""

from pathlib import Path

import preloaded
import pytest
import tiny
import torch

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "projects/CustomComponents"


def test_custom_components_example_has_at_most_45_lines():
    lines = (FOLDER / "train_net.py").read_text().splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 45


def run(root, output, *argv):
    options = tiny.tiny_options(output, "SOLVER.MAX_EPOCH", "1", "INPUT.SIZE_TRAIN", "(64, 32)")
    # The model comes from the project's YAML file.
    pairs = [(k, v) for k, v in zip(options[::2], options[1::2], strict=True) if not k.startswith("MODEL.")]
    words = [word for pair in pairs for word in pair]
    words = (*argv, "--config-file", FOLDER / "demo.yml", "MODEL.DEVICE", "cpu", *words)
    return preloaded.run(FOLDER / "train_net.py", *words, FASTAMP_DATASETS=str(root))


@pytest.mark.integration
def test_custom_components_example_trains_and_resumes(demo_root, tmp_path):
    process = run(demo_root, tmp_path)
    assert process.returncode == 0, process.stderr
    assert "loss_norm" in process.stdout and "epoch 1: 6 optimizer steps taken" in process.stdout
    assert "| Demo" in process.stdout
    state = tiny.weights(tmp_path / "model_final.pth")
    assert state["backbone.0.weight"].shape == (128, 3, 16, 16)
    assert all(torch.isfinite(tensor).all() for tensor in state.values())
    assert "FEATURE_NORM" in (tmp_path / "config.yaml").read_text()
    assert run(demo_root, tmp_path, "--resume").returncode == 0


@pytest.mark.integration
def test_custom_components_example_with_eval_only_requires_model_weights(demo_root, tmp_path):
    process = run(demo_root, tmp_path, "--eval-only")
    assert process.returncode == 2 and "MODEL.WEIGHTS" in process.stderr
