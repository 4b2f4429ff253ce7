"""Two torchrun processes compared with one process: steps, gradients, evaluation and failures."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import same_result
import torch

HELPERS, TOOLS = Path(__file__).parents[1] / "helpers", Path(__file__).parents[2] / "tools"


@pytest.fixture(scope="module")
def folders(demo_root, made_once):
    """Folders of the run with one process and of the run with two processes."""
    with made_once("same_result") as (folder, missing):
        one, two = folder / "one", folder / "two"
        if missing:
            train_both(demo_root, one, two)
    return one, two


def train_both(demo_root, one, two):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join(filter(None, [str(HELPERS), str(TOOLS), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"FASTAMP_DATASETS": str(demo_root), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen([*command, same_result.__file__, str(two)], env=env, **pipes)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FASTAMP_DATASETS", str(demo_root))
            same_result.main(str(one))
        output, _ = process.communicate(timeout=400)
    finally:
        process.kill()
    assert process.returncode == 0, output


def steps(folder):
    return torch.load(folder / "steps.pth", weights_only=True)


def assert_same_steps(a, b):
    first, second = steps(a), steps(b)
    assert len(first) == len(second)
    for one, two in zip(first, second, strict=True):
        assert one.keys() == two.keys()
        for name, value in one.items():
            assert value.dtype == torch.float64
            torch.testing.assert_close(value, two[name], rtol=1e-9, atol=1e-10)
    assert any(not torch.equal(value, first[-1][name]) for name, value in first[0].items())


def evaluations(folder):
    lines = map(json.loads, (folder / "metrics.json").read_text().splitlines())
    return [row for row in lines if "Demo/mAP" in row]


@pytest.mark.end_to_end
@pytest.mark.parametrize("way, count", [("gathered", 24), ("soft", 6)])
def test_training_with_two_processes_matches_one_process(folders, way, count):
    one, two = (folder / way for folder in folders)
    assert len(steps(one)) == count
    assert_same_steps(one, two)
    assert evaluations(one) == evaluations(two) and evaluations(one)[-1]["Demo/mAP"] > 0
    # Only rank 0 writes files.
    names = [{path.name.split(".out.")[0] for path in folder.iterdir()} for folder in (one, two)]
    assert names[1] - names[0] == {"log.txt.rank1"} and not names[0] - names[1]


@pytest.mark.integration
def test_steps_differ_without_gathering_features_across_ranks(folders):
    """Negative control: if each rank mines triplets only among its own images, the loss changes."""
    one, local = steps(folders[0] / "gathered"), steps(folders[1] / "local")
    difference = max((one[5][name] - value).abs().max().item() for name, value in local[5].items())
    assert difference > 1e-4


@pytest.mark.integration
@pytest.mark.parametrize("name", same_result.LOSSES)
def test_gradients_of_every_loss_with_two_processes_match_one_process(folders, name):
    one, two = (torch.load(folder / "gradients.pth", weights_only=True) for folder in folders)
    expected, found, local = one["gathered"][name], two["gathered"][name], two["local"][name]
    assert expected.keys() == found.keys() and all(value.abs().max() > 0 for value in expected.values())
    for key, value in expected.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(found[key], value, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(one["local"][name][key], value, rtol=0, atol=0)
    # Losses per image need no gathering, unless they exclude images.
    same = all(torch.allclose(local[key], value, rtol=1e-9, atol=0) for key, value in expected.items())
    assert same == (name in ("FocalLoss", "CenterLoss", "adaptive smoothing"))


@pytest.mark.integration
def test_mgn_gradients_with_two_processes_match_one_process(folders):
    one, two = (torch.load(folder / "gradients.pth", weights_only=True)["MGN"] for folder in folders)
    assert one.keys() == two.keys() and len(one) > 100
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.integration
def test_moco_queue_with_two_processes_matches_one_process(folders):
    """The model has no interaction between images of a batch. The third step is skipped."""
    paths = (folders[0] / "moco/rank0.pth", folders[1] / "moco/rank0.pth", folders[1] / "moco/rank1.pth")
    one, *two = (torch.load(path, weights_only=True) for path in paths)
    assert len(one) == 5 and [step["memory.queue_ptr"].item() for step in one] == [0, 8, 16, 16, 4]
    for step, (single, first, second) in enumerate(zip(one, *two, strict=True)):
        for name, value in single.items():
            assert torch.equal(first[name], second[name]), (step, name)
            torch.testing.assert_close(first[name], value, rtol=1e-4, atol=1e-6)
    for states in (one, *two):
        assert all(torch.equal(states[3][name], value) for name, value in states[2].items())
        assert not torch.equal(states[4]["key_encoder.backbone.0.weight"], states[3]["key_encoder.backbone.0.weight"])


@pytest.mark.integration
def test_all_ranks_skip_a_step_together(folders):
    folder = folders[1] / "skipped"
    for log in ("log.txt", "log.txt.rank1"):
        assert (folder / log).read_text().count("step skipped (1 in a row, 1 in total)") == 1
    same = [torch.equal(a["heads.weight"], b["heads.weight"]) for a, b in itertools.pairwise(steps(folder))]
    assert same == [False, True, False, False, False]
    assert torch.load(folder / "model_final.pth", weights_only=True)["trainer"]["steps_taken"] == 5


@pytest.mark.integration
def test_preflight_has_no_side_effects_with_two_ranks(folders):
    first, second = (steps(folders[1] / name) for name in ("preflight", "no preflight"))
    assert all(torch.equal(a[name], b[name]) for a, b in zip(first, second, strict=True) for name in a)


@pytest.mark.integration
def test_parameters_without_gradient_raise_with_two_ranks(folders):
    for rank in (0, 1):
        message = (folders[1] / f"unreached/error{rank}.txt").read_text()
        assert "2 trainable parameters have no gradient, e.g. heads.weight" in message


@pytest.mark.integration
def test_all_ranks_report_a_preflight_failure_on_one_rank(folders):
    messages = [(folders[1] / f"broken/error{rank}.txt").read_text() for rank in (0, 1)]
    assert messages[0] == messages[1] and "fails on the first training batch in float32" in messages[0]
    assert "pre-flight: on rank 1: " in messages[0] and "batch not finite" in messages[0]
    assert "amp_crash/iteration_1_rank_1.pth" in messages[0]


@pytest.mark.integration
def test_plain_training_loop_with_two_ranks_matches_the_trainer(folders):
    """The model is MoCo, whose key encoder is not synchronized by DDP."""
    first, second = (
        torch.load(folders[1] / name / "model_final.pth", weights_only=True) for name in ("hooks", "open_loop")
    )
    assert first["model"].keys() == second["model"].keys()
    assert all(torch.equal(value, second["model"][name]) for name, value in first["model"].items())
