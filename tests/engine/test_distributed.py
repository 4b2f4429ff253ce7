"""Two processes with gloo against one: the same steps, the same evaluation; errors and signals that end them all."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
import torch

from fastamp.amp.crash import Crash
from fastamp.engine import launch
from fastamp.engine.setup import check_config
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError

HELPERS = Path(__file__).parents[1] / "helpers"
FLOAT32 = (*tiny.PLAIN, "SOLVER.AMP", "off", "SOLVER.MAX_EPOCH", "1", "SOLVER.BASE_LR", "0.05")


def run(root, output, processes, *words, flags=(), torchrun=False):
    """Run ranks.py and return the finished process."""
    command = [sys.executable, str(HELPERS / "ranks.py"), *flags, str(output), str(processes), *words]
    if torchrun:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    env = os.environ | {"FASTAMP_DATASETS": str(root), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HELPERS)}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)


def result_lines(process):
    return [line.split("report]")[-1] for line in process.stdout.splitlines() if line.startswith(("| Demo", "Demo:"))]


def assert_same_steps(a, b, rtol):
    first, second = (torch.load(folder / "steps.pth", weights_only=True) for folder in (a, b))
    assert len(first) == len(second) >= 5
    for one, two in zip(first[:5], second[:5], strict=True):
        for name in one:
            torch.testing.assert_close(one[name], two[name], rtol=rtol, atol=1e-6)
    assert any(not torch.equal(first[0][name], first[4][name]) for name in first[0])


def test_torchrun_equals_one_process(demo_root, tmp_path):
    one = run(demo_root, tmp_path / "one", 1, *FLOAT32)
    two = run(demo_root, tmp_path / "two", 2, *FLOAT32, torchrun=True)
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    assert_same_steps(tmp_path / "one", tmp_path / "two", rtol=1e-5)
    assert len(result_lines(one)) == 2 and result_lines(one) == result_lines(two)
    # One rank writes.
    names = {path.name for path in (tmp_path / "two").iterdir()}
    assert names == {path.name for path in (tmp_path / "one").iterdir() if "tfevents" not in path.name} | {
        "log.txt.rank1",
        next(path.name for path in (tmp_path / "two").iterdir() if "tfevents" in path.name),
    }


def test_accumulation_and_freezing_equal_one_process(demo_root, tmp_path):
    options = (*FLOAT32, "SOLVER.ACCUM_STEPS", "2", "SOLVER.IMS_PER_BATCH", "8", "MODEL.FREEZE_LAYERS", "backbone.0")
    options += ("SOLVER.FREEZE_ITERS", "2")
    for processes in (1, 2):
        process = run(demo_root, tmp_path / str(processes), processes, *options)
        assert process.returncode == 0, process.stderr
    assert_same_steps(tmp_path / "1", tmp_path / "2", rtol=1e-5)


def test_pair_losses_over_the_gathered_batch_equal_one_process(demo_root, tmp_path):
    losses = ("MODEL.LOSSES.NAME", "('CrossEntropyLoss', 'TripletLoss', 'CircleLoss')", "SOLVER.BASE_LR", "0.001")
    for folder, processes, gather in (("one", 1, "True"), ("two", 2, "True"), ("apart", 2, "False")):
        options = (*FLOAT32, *losses, "MODEL.LOSSES.GATHER", gather)
        process = run(demo_root, tmp_path / folder, processes, *options)
        assert process.returncode == 0, process.stderr
    assert_same_steps(tmp_path / "one", tmp_path / "two", rtol=1e-4)
    with pytest.raises(AssertionError):  # the negative control: mining in each process's share is another loss
        assert_same_steps(tmp_path / "one", tmp_path / "apart", rtol=1e-4)


def test_the_ranks_skip_a_step_together(demo_root, tmp_path):
    process = run(demo_root, tmp_path, 2, *FLOAT32, flags=("--fault", "infinite loss on rank 1"))
    assert process.returncode == 0, process.stderr
    for log in ("log.txt", "log.txt.rank1"):
        assert (tmp_path / log).read_text().count("step skipped (1 in a row, 1 in all)") == 1
    steps = torch.load(tmp_path / "steps.pth", weights_only=True)
    same = [torch.equal(a["heads.weight"], b["heads.weight"]) for a, b in itertools.pairwise(steps)]
    assert same == [False, True, False, False, False]
    assert torch.load(tmp_path / "model_final.pth", weights_only=True)["trainer"]["steps_taken"] == 5


def test_a_resumed_run_of_two_equals_straight_through(demo_root, tmp_path):
    """With batch norm, dropout that differs between the ranks, a triplet loss, mixed precision and an average."""
    options = ("SOLVER.AMP", "bf16", "SOLVER.EMA.ENABLED", "True", "SOLVER.MAX_EPOCH", "1")
    assert run(demo_root, tmp_path / "straight", 2, *options).returncode == 0
    stopped = run(demo_root, tmp_path / "resumed", 2, *options, flags=("--fault", "signal on rank 1"))
    assert stopped.returncode == 128 + 15
    assert stopped.stderr.count("resume with:") == 1 and "model_interrupted.pth" in stopped.stderr
    resumed = run(demo_root, tmp_path / "resumed", 2, *options, flags=("--resume",))
    assert resumed.returncode == 0 and "at iteration 3" in resumed.stdout, resumed.stderr
    first, second = (tmp_path / f"{which}/model_final.pth" for which in ("straight", "resumed"))
    first, second = (torch.load(path, weights_only=True) for path in (first, second))
    for part in (first["model"], second["model"]), (first["average"]["model"], second["average"]["model"]):
        assert all(torch.equal(tensor, part[1][name]) for name, tensor in part[0].items())
    assert len(first["random"]["others"]) == 1
    assert not torch.equal(first["random"]["torch"], first["random"]["others"][0]["torch"])


@pytest.mark.parametrize(
    "fault, message",
    [
        ("error on rank 0", "error: the image of rank 0"),
        ("error on rank 1", "rank 1: error: the image of rank 1"),
        ("error on all ranks", "error: no rank"),
    ],
)
def test_an_error_ends_all_and_is_said_once(demo_root, tmp_path, fault, message):
    # A collective's timeout is half an hour, beyond that of the subprocess.
    process = run(demo_root, tmp_path, 2, *FLOAT32, flags=("--fault", fault))
    assert process.returncode == 2
    assert process.stderr.count("error") == 1 and message in process.stderr, process.stderr
    assert "Traceback" not in process.stderr


def test_a_signal_to_the_first_process(demo_root, tmp_path):
    command = [sys.executable, str(HELPERS / "ranks.py"), str(tmp_path), "2", *FLOAT32, "SOLVER.MAX_EPOCH", "10000"]
    env = os.environ | {"FASTAMP_DATASETS": str(demo_root), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HELPERS)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env) as process:
        log = tmp_path / "log.txt"
        deadline = time.monotonic() + 200
        while not (log.exists() and "iter 10/" in log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=200)
    assert process.returncode == 130
    assert stderr.count("resume with:") == 1 and "Traceback" not in stderr
    assert (tmp_path / "last_checkpoint").read_text() == "model_interrupted.pth"


def test_parameters_that_no_loss_reaches(demo_root, tmp_path):
    options = ("MODEL.LOSSES.NAME", "TripletLoss", "SOLVER.MAX_EPOCH", "1")
    process = run(demo_root, tmp_path, 2, *options)
    assert process.returncode == 2
    assert "no loss reaches 2 trainable parameters, e.g. heads.weight" in process.stderr


@pytest.mark.parametrize(
    "options, message",
    [
        (("MODEL.BACKBONE.NORM", "syncBN"), "MODEL.BACKBONE.NORM is syncBN, which PyTorch has for CUDA only"),
        (("MODEL.HEADS.NORM", "SyncBN"), "MODEL.HEADS.NORM is syncBN"),
        (("MODEL.DEVICE", "cuda:0"), "MODEL.DEVICE is 'cuda:0', the same device for all 2 processes"),
    ],
)
def test_what_several_processes_cannot_do(tmp_path, monkeypatch, options, message):
    cfg = tiny.tiny_config(tmp_path, *options)
    check_config(cfg)
    monkeypatch.setattr(comm, "get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match=message):
        check_config(cfg)


def _raise_bug():
    raise AssertionError("a bug")


def test_a_bug_in_a_process_is_an_exit_code(capfd):
    with pytest.raises(SystemExit) as stop:
        launch(_raise_bug, 2)
    assert stop.value.code == 1 and "AssertionError: a bug" in capfd.readouterr().err


def test_alone_everything_is_a_no_op():
    x = torch.tensor([1.0, 2.0])
    assert comm.all_reduce_min(x) is x and comm.all_reduce_sum(x) is x
    assert comm.sum_over_ranks([1, 2]) == [1, 2] and comm.from_main_process(3.5) == 3.5
    assert comm.first_of_all("x") == (0, "x") and comm.first_of_all("") == (-1, "") and comm.largest(-2.5) == -2.5
    assert comm.any_rank(True) and not comm.any_rank(False)
    assert comm.gather_bytes(b"x") == [b"x"] and torch.equal(comm.gather_rows(x), x)
    comm.synchronize()
    comm.broadcast([x])
    model = torch.nn.Linear(1, 1)
    assert comm.data_parallel(model) is model
    with comm.no_sync(model), comm.main_process_first(), comm.alone():
        assert comm.is_main_process()
    with pytest.raises(ConfigError, match="--num-gpus 0"):
        launch(print, 0)


def test_what_one_rank_alone_finds_is_said_once_and_both_leave_a_file(demo_root, tmp_path):
    """The images of rank 1 are infinite: the verdict is everybody's, the cause is found on rank 1."""
    limits = ("SOLVER.AMP.MAX_CONSECUTIVE_SKIPS", "1", "SOLVER.MAX_EPOCH", "2")
    flags = ("--fault", "infinite images on rank 1")
    process = run(demo_root, tmp_path, 2, *limits, "SOLVER.AMP", "bf16", flags=flags)
    assert process.returncode == 2, process.stderr
    assert process.stderr.count("2 optimizer steps in a row were skipped") == 1
    assert "on rank 1: batch not finite" in process.stderr
    for rank, found in ((0, None), (1, "batch not finite")):
        crash = Crash.read(tmp_path / f"amp_crash/iteration_3_rank_{rank}.pth")
        assert crash.location is None if found is None else crash.location["kind"] == found
    # From the first batch on it is the pre-flight that finds it.
    flags = ("--fault", "infinite images on rank 1 from the first on")
    process = run(demo_root, tmp_path / "first", 2, "SOLVER.AMP", "bf16", flags=flags)
    assert process.returncode == 2 and process.stderr.count("broken in float32 already") == 1, process.stderr
    assert "pre-flight: on rank 1: " in process.stderr and "batch not finite" in process.stderr
    assert "amp_crash/iteration_0_rank_1.pth" in process.stderr


def test_two_processes_are_the_same_with_and_without_the_pre_flight(demo_root, tmp_path):
    options = ("SOLVER.AMP", "bf16", "SOLVER.MAX_EPOCH", "1", "MODEL.LOSSES.GATHER", "True")
    for name in ("error", "off"):
        process = run(demo_root, tmp_path / name, 2, *options, "SOLVER.AMP.PREFLIGHT", name)
        assert process.returncode == 0, process.stderr
    first, second = (torch.load(tmp_path / name / "steps.pth", weights_only=True) for name in ("error", "off"))
    assert all(torch.equal(a[name], b[name]) for a, b in zip(first, second, strict=True) for name in a)
