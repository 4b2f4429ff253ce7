"""Partial FC in several processes equals the ordinary head in one."""

from pathlib import Path

import preloaded
import pytest
import torch

pytestmark = pytest.mark.integration

HELPER = Path(__file__).parents[1] / "helpers/partial_fc_ranks.py"


def steps(folder: Path, processes: int, *options: str) -> dict:
    """Take the steps of the helper, and return what rank 0 saved."""
    process = preloaded.run(HELPER, folder, processes, *options)
    assert process.returncode == 0, process.stderr
    return torch.load(folder / f"{processes}.pth", weights_only=True)


def assert_equal_runs(first: dict, second: dict) -> None:
    assert first["losses"] == pytest.approx(second["losses"], rel=1e-6, nan_ok=True)
    for name, value in first["model"].items():
        torch.testing.assert_close(value, second["model"][name], rtol=1e-5, atol=1e-6)
    for (norm, coefficient), (other, other_coefficient) in zip(first["norms"], second["norms"], strict=True):
        assert norm == pytest.approx(other, rel=1e-5, nan_ok=True)
        assert (coefficient is None) == (other_coefficient is None)
        assert coefficient is None or float(coefficient) == pytest.approx(float(other_coefficient), rel=1e-5)
    for number, state in first["optimizer"]["state"].items():
        other = second["optimizer"]["state"][number]["momentum_buffer"]
        torch.testing.assert_close(state["momentum_buffer"], other, rtol=1e-5, atol=1e-6)


CASES = [
    (1, "Linear", "none"),
    (2, "ArcSoftmax", "global_norm"),
    (2, "CircleSoftmax", "norm"),
    (3, "CosSoftmax", "value"),
    (4, "DetachedArcSoftmax", "global_norm"),
]


@pytest.mark.parametrize(("processes", "layer", "clip"), CASES)
def test_rate_1_equals_the_ordinary_head_in_one_process(tmp_path, processes, layer, clip):
    """Uneven batches, micro-batches, loss scaling, a skipped step, momentum, weight decay and clipping."""
    (tmp_path / "full").mkdir()
    full = steps(tmp_path / "full", 1, layer, "full", clip)
    assert_equal_runs(steps(tmp_path, processes, layer, "1", clip), full)
    assert full["model"]["heads.weight"].shape == (30, 8)


def test_sampling_in_two_processes_leaves_unsampled_rows(tmp_path):
    result = steps(tmp_path, 2, "ArcSoftmax", "0.4", "global_norm")
    draw = torch.Generator().manual_seed(1)
    start = [torch.randn(shape, generator=draw) for shape in ((8, 5), (8,), (30, 8))][2]
    moved = (result["model"]["heads.weight"] != start).any(1)
    used = (result["optimizer"]["state"][2]["momentum_buffer"] != 0).any(1)
    assert torch.equal(moved, used) and 12 <= moved.sum() < 30  # 6 of 15 on each rank in four of six micro-batches


@pytest.mark.parametrize(("before", "now"), [(2, 1), (3, 2), (1, 4)])
def test_weights_and_optimizer_state_continue_in_another_number_of_processes(tmp_path, before, now):
    options = ("CosSoftmax", "1", "global_norm")
    steps(tmp_path, before, *options)
    file = tmp_path / "saved.pth"
    (tmp_path / f"{before}.pth").rename(file)
    runs = []
    for processes, rate in ((now, "1"), (1, "full")):
        folder = tmp_path / f"{processes}_{rate}"
        folder.mkdir()
        runs.append(steps(folder, processes, options[0], rate, options[2], file))
    assert_equal_runs(*runs)
