"""Training with two gloo processes: resume, errors and signals."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import preloaded
import pytest
import ranks
import tiny
import torch

from fastamp.diagnostics.crash import CrashDump
from fastamp.engine import launch
from fastamp.utils import comm
from fastamp.utils.command_line import TrainingInterrupted
from fastamp.utils.errors import ConfigError

pytestmark = pytest.mark.integration

HELPERS = Path(__file__).parents[1] / "helpers"
FLOAT32 = (*tiny.PLAIN, "SOLVER.AMP", "off", "SOLVER.MAX_EPOCH", "1", "SOLVER.BASE_LR", "0.05")


def run(root, output, processes, *words, flags=()):
    """Run ``ranks.py`` with the given number of processes and return the completed process."""
    return preloaded.run(HELPERS / "ranks.py", *flags, output, processes, *words, FASTAMP_DATASETS=str(root))


def test_resume_with_two_processes_is_bit_identical(demo_root, tmp_path):
    """The run uses batch norm, dropout that differs between ranks, triplet loss, bfloat16 and a weight average."""
    options = ("SOLVER.AMP", "bf16", "SOLVER.EMA.ENABLED", "True", "SOLVER.MAX_EPOCH", "1", "TEST.REPORT", "True")
    assert run(demo_root, tmp_path / "straight", 2, *options).returncode == 0
    stopped = run(demo_root, tmp_path / "resumed", 2, *options, flags=("--fault", "signal on rank 1"))
    assert stopped.returncode == 128 + 15
    assert stopped.stderr.count("resume with:") == 1 and "model_interrupted.pth" in stopped.stderr
    resumed = run(demo_root, tmp_path / "resumed", 2, *options, flags=("--resume",))
    assert resumed.returncode == 0 and "after iteration 3" in resumed.stdout, resumed.stderr
    report = (tmp_path / "resumed" / "report.html").read_text(encoding="utf-8")
    for words in ("<td>train</td><td>96</td>", "<td>query</td><td>8</td>", "Losses", "Worst queries"):
        assert words in report, words
    first, second = (tmp_path / f"{which}/model_final.pth" for which in ("straight", "resumed"))
    first, second = (torch.load(path, weights_only=True) for path in (first, second))
    for part in (first["model"], second["model"]), (first["average"]["model"], second["average"]["model"]):
        assert all(torch.equal(tensor, part[1][name]) for name, tensor in part[0].items())
    assert len(first["random"]["others"]) == 1
    assert not torch.equal(first["random"]["torch"], first["random"]["others"][0]["torch"])


@pytest.mark.parametrize("before, now", [(2, 1), (1, 2)])
def test_resume_with_different_process_count_matches_uninterrupted_run(demo_root, demo, tmp_path, before, now):
    """All processes skip the damaged checkpoint and resume from the previous checkpoint."""
    options, stop = (*FLOAT32, "SOLVER.CHECKPOINT_ITERS", "2"), f"signal on rank {before - 1}"
    ranks.main(str(tmp_path / "straight"), False, "", FLOAT32)
    if before == 1:
        with pytest.raises(TrainingInterrupted):
            ranks.main(str(tmp_path), False, stop, options)
    else:
        assert run(demo_root, tmp_path, before, *options, flags=("--fault", stop)).returncode == 128 + 15
    newest = tmp_path / "model_interrupted.pth"
    newest.write_bytes(newest.read_bytes()[:-100])
    if now == 1:
        ranks.main(str(tmp_path), True, "", FLOAT32)
    else:
        process = run(demo_root, tmp_path, now, *FLOAT32, flags=("--resume",))
        assert process.returncode == 0, process.stderr
    for rank in range(now):
        log = (tmp_path / ("log.txt" if rank == 0 else f"log.txt.rank{rank}")).read_text()
        assert f"resuming from {tmp_path / 'model_iter_0000002.pth'}, saved after iteration 2" in log
        assert f"number of processes changed from {before} to {now}" in log
        assert "SOLVER.CHECKPOINT_ITERS: 2 -> 0" in log
    assert (tmp_path / "log.txt").read_text().count("it is truncated") == 1
    one, two = (tiny.weights(folder / "model_final.pth") for folder in (tmp_path / "straight", tmp_path))
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "fault, message",
    [
        (
            "full disk on rank 0",
            "error: model_0000.pth cannot be written\n  no checkpoint",
        ),
        ("error on rank 1", "rank 1: error: the image of rank 1"),
        ("error on all ranks", "error: no rank"),
    ],
)
def test_error_ends_all_processes_and_is_printed_once(demo_root, tmp_path, fault, message):
    # The timeout of collectives (30 min) exceeds the timeout of the subprocess.
    process = run(demo_root, tmp_path, 2, *FLOAT32, flags=("--fault", fault))
    assert process.returncode == 2
    assert process.stderr.count("error: ") == 1 and message in process.stderr, process.stderr
    assert "Traceback" not in process.stderr


def test_signal_to_parent_process_saves_checkpoint_and_stops_all_ranks(demo_root, tmp_path):
    command = [sys.executable, str(HELPERS / "ranks.py"), "--spawn", str(tmp_path), "2", *FLOAT32]
    command += ["SOLVER.MAX_EPOCH", "10000"]
    env = os.environ | {"FASTAMP_DATASETS": str(demo_root), "OMP_NUM_THREADS": "1"}
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


def _raise_bug():
    raise AssertionError("a bug")


def test_unexpected_exception_in_launched_processes_exits_with_1(capfd):
    with pytest.raises(SystemExit) as stop:
        launch(_raise_bug, 2)
    assert stop.value.code == 1 and "AssertionError: a bug" in capfd.readouterr().err


def test_collectives_are_no_ops_in_a_single_process():
    x = torch.tensor([1.0, 2.0])
    assert comm.all_reduce_min(x) is x and comm.all_reduce_sum(x) is x
    assert comm.sum_over_ranks([1, 2]) == [1, 2] and comm.broadcast_scalar(3.5) == 3.5
    assert comm.select_text("x") == (0, "x") and comm.select_text("") == (-1, "") and comm.max_over_ranks(-2.5) == -2.5
    assert comm.any_across_ranks(True) and not comm.any_across_ranks(False)
    assert comm.gather_bytes(b"x") == [b"x"] and torch.equal(comm.gather_rows(x), x)
    comm.synchronize()
    comm.broadcast([x])
    model = torch.nn.Linear(1, 1)
    assert comm.data_parallel(model) is model
    with comm.no_sync(model), comm.main_process_first(), comm.as_single_process():
        assert comm.is_main_process()
    with pytest.raises(ConfigError, match="--num-gpus 0"):
        launch(print, 0)


def test_nonfinite_batch_on_one_rank_makes_every_rank_write_crash_dump(demo_root, tmp_path):
    """The images of rank 1 are infinite. All ranks skip the steps, and the error names rank 1."""
    limits = ("SOLVER.AMP.MAX_CONSECUTIVE_SKIPS", "1", "SOLVER.MAX_EPOCH", "2")
    flags = ("--fault", "infinite images on rank 1")
    process = run(demo_root, tmp_path, 2, *limits, "SOLVER.AMP", "bf16", flags=flags)
    assert process.returncode == 2, process.stderr
    assert process.stderr.count("2 optimizer steps in a row were skipped") == 1
    assert "on rank 1: batch not finite" in process.stderr
    for rank, found in ((0, None), (1, "batch not finite")):
        crash = CrashDump.read(tmp_path / f"amp_crash/iteration_4_rank_{rank}.pth")
        assert crash.location is None if found is None else crash.location["kind"] == found
