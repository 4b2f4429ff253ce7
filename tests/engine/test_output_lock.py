"""Lock of OUTPUT_DIR: exclusive for training runs, ignored by evaluations and dry runs, released after a kill."""

import multiprocessing
import signal
from pathlib import Path

import preloaded
import pytest
import tiny

from fastamp.cli import main
from fastamp.engine import DefaultTrainer
from fastamp.utils import lock
from fastamp.utils.errors import ConfigError
from fastamp.utils.lock import describe_lock_holder, lock_folder

pytestmark = pytest.mark.integration

HELPERS = Path(__file__).parents[1] / "helpers"


def hold(folder, pipe):
    lock_folder(folder, "OUTPUT_DIR")
    pipe.send("locked")
    signal.pause()


@pytest.fixture
def running(demo, tmp_path, monkeypatch):
    """Folder of a training run, and the process that holds its lock."""
    monkeypatch.setattr(lock, "_WAIT_SECONDS", 0.0)
    folder, fork = tmp_path / "run", multiprocessing.get_context("fork")
    tiny.train(folder)
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=hold, args=(folder, sender), daemon=True)
    process.start()
    receiver.recv()
    yield folder, process
    process.kill()
    process.join()


def content(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_second_training_run_exits_with_2_and_names_the_lock_holder(running, input_error):
    folder, process = running
    before = content(folder)
    stderr = input_error(main, ["train", *tiny.tiny_options(folder, "SOLVER.MAX_EPOCH", "1")])
    assert (
        f"error: OUTPUT_DIR {folder} is locked: another process is writing to it" in stderr
        and "Traceback" not in stderr
    )
    assert f"process {process.pid} on " in stderr and "since 20" in stderr and "fix: " in stderr
    assert content(folder) == before
    with pytest.raises(ConfigError, match=f"process {process.pid}"):  # as a script without default_setup
        DefaultTrainer(tiny.tiny_config(folder)).train()


def test_killed_training_run_can_be_resumed(running):
    folder, process = running
    process.kill()
    process.join()
    assert main(["train", "--resume", *tiny.tiny_options(folder, "SOLVER.MAX_EPOCH", "2")]) == 0
    assert "resuming from" in (folder / "log.txt").read_text() and not (folder / lock.LOCK_FILE).exists()


def test_evaluation_and_dry_run_ignore_the_lock(running, capsys):
    folder, process = running
    before = content(folder)
    assert main(["train", "--dry-run", *tiny.tiny_options(folder)]) == 0
    assert content(folder) == before
    options = tiny.tiny_options(folder, "MODEL.WEIGHTS", str(folder / "model_best.pth"))
    assert main(["eval", *options]) == 0
    assert f"OUTPUT_DIR {folder}" in capsys.readouterr().out
    assert str(process.pid) in describe_lock_holder(folder)


def test_failed_training_run_releases_its_lock(demo, tmp_path, monkeypatch):
    trainer = DefaultTrainer(tiny.tiny_config(tmp_path))
    monkeypatch.setattr(trainer.trainer, "train", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert not (tmp_path / lock.LOCK_FILE).exists()


def test_multi_process_run_locks_output_dir_on_rank_0(running, demo_root):
    folder, process = running
    words, root = (HELPERS / "ranks.py", folder, "2", "SOLVER.AMP", "off"), {"FASTAMP_DATASETS": str(demo_root)}
    run = preloaded.run(*words, **root)
    assert run.returncode == 2 and "Traceback" not in run.stderr, run.stderr
    assert run.stderr.count("another process is writing to it") == 1 and f"process {process.pid}" in run.stderr
    process.kill()
    process.join()
    run = preloaded.run(*words, "SOLVER.MAX_EPOCH", "1", **root)
    assert run.returncode == 0, run.stderr
