"""Write errors on a full disk: one message, no partial files, and a resumable run."""

import errno
import logging
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny
import torch

from fastamp.engine import DefaultTrainer, HookBase, default_setup, run_command_line
from fastamp.utils.errors import WriteError
from fastamp.utils.events import JSONWriter, TensorboardXWriter
from fastamp.utils.files import write_atomically
from fastamp.utils.logger import setup_logger


@contextmanager
def full_disk(room=2000):
    """Limit file sizes to ``room`` bytes, so that writes fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class FillDisk(HookBase):
    """Simulate a full disk before the checkpoint of the second epoch: hooks that save have a lower priority."""

    def __init__(self, checkpointer):
        self.checkpointer = checkpointer

    def after_epoch(self):
        if self.trainer.epoch == 1:
            with full_disk():
                self.checkpointer.save("model_0001")


@pytest.mark.integration
@pytest.mark.parametrize("evaluated", [True, False])
def test_full_disk_error_names_only_a_valid_best_model(demo, tmp_path, input_error, evaluated):
    """If no evaluation was run, the file ``model_best.pth`` of an earlier run is not named."""
    options = ["TEST.EVAL_PERIOD", "1" if evaluated else "4", "SOLVER.CHECKPOINT_PERIOD", "2"]
    if not evaluated:
        (tmp_path / "model_best.pth").write_bytes(b"of an earlier run")

    def train():
        trainer = DefaultTrainer(tiny.tiny_config(tmp_path, *options))
        trainer.register_hooks([FillDisk(trainer.checkpointer)])
        trainer.train()

    stderr = input_error(run_command_line, train)
    assert (f"best model: {tmp_path}/model_best.pth (" in stderr) == evaluated, stderr
    assert ("has been saved" in stderr) == (not evaluated)


@pytest.mark.integration
def test_failed_checkpoint_write_keeps_the_previous_checkpoint(demo, tmp_path, input_error):
    cfg = tiny.tiny_config(tmp_path, "TEST.EVAL_PERIOD", "4")

    def train():
        default_setup(cfg)
        trainer = DefaultTrainer(cfg)
        trainer.register_hooks([FillDisk(trainer.checkpointer)])
        trainer.train()

    stderr = input_error(run_command_line, train)
    assert f"error: {tmp_path}/model_0001.pth cannot be written: File too large (" in stderr
    assert f"last valid checkpoint: {tmp_path}/model_0000.pth" in stderr and "--resume" in stderr
    assert "Traceback" not in stderr
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000.pth"
    assert not list(tmp_path.glob(".*.tmp")) and not (tmp_path / "model_0001.pth").exists()
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=True)
    assert trainer.trainer.start_iter == trainer.trainer.iters_per_epoch


@pytest.mark.parametrize("room", [10, 700, 4000, 40_000])
def test_failed_atomic_write_keeps_the_old_file(tmp_path, room):
    path = tmp_path / "a.pth"
    write_atomically(path, lambda file: torch.save({"a": torch.zeros(3)}, file))
    with full_disk(room), pytest.raises(WriteError, match=r"a\.pth.*File too large"):
        write_atomically(path, lambda file: torch.save({"a": torch.zeros(10_000)}, file))
    assert torch.load(path, weights_only=True)["a"].shape == (3,)
    assert [left.name for left in tmp_path.iterdir()] == ["a.pth"]


def test_failed_metrics_write_leaves_no_partial_line(tmp_path):
    for writer in (JSONWriter(tmp_path / "metrics.json"), TensorboardXWriter(tmp_path)):
        path = writer._file.path
        writer.write(1, {"loss": 1.0})
        before = path.read_bytes()
        with full_disk(len(before) + 10), pytest.raises(WriteError, match=path.name):
            writer.write(2, {"loss": 1.0})
        assert path.read_bytes() == before
        writer.write(3, {"loss": 1.0})
        assert len(path.read_bytes()) == pytest.approx(2 * len(before), abs=len(before))
        writer.close()


def test_failed_log_write_prints_one_line_without_traceback(tmp_path, capsys):
    logger = logging.getLogger("fastamp.test")
    setup_logger(tmp_path)
    logger.info("first")
    with full_disk(60):
        for _ in range(3):
            logger.info("a line that is too long for what is left of the disk")
    setup_logger(None)  # closes the file
    stderr = capsys.readouterr().err
    assert stderr.count("log.txt cannot be written: File too large") == 1 == stderr.count("\n")
    assert (tmp_path / "log.txt").read_text().startswith("[") and "first" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize("name", ["x" * 5000, "y" * 300])
def test_too_long_file_name_exits_with_2(input_error, name):
    stderr = input_error(run_command_line, lambda: Path(name).exists())
    assert stderr.startswith("error: cannot access file: File name too long.\n  found: ")
    assert f"({len(name)} characters)" in stderr and len(stderr) < 500


def test_too_many_open_files_exits_with_2(input_error):
    def fail():
        raise OSError(errno.EMFILE, "Too many open files", "metrics.json")

    stderr = input_error(run_command_line, fail)
    assert stderr.startswith("error: too many open files: cannot open metrics.json") and "ulimit -n" in stderr


def test_os_error_without_user_cause_is_reraised():
    def fail():
        raise OSError(errno.EBADF, "Bad file descriptor")

    with pytest.raises(OSError, match="Bad file"):
        run_command_line(fail)
