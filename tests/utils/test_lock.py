"""Locks on folders that several processes use."""

import errno
import json
import multiprocessing
import os
import signal

import pytest

from fastamp.utils import lock
from fastamp.utils.errors import ConfigError, WriteError
from fastamp.utils.lock import LOCK_FILE, describe_lock_holder, lock_folder, unlock_folder

FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(lock, "_WAIT_SECONDS", 0.0)


def hold(folder, pipe):
    """Lock a folder, start a child process that outlives this process, and wait to be killed."""
    lock_folder(folder, "OUTPUT_DIR")
    child = FORK.Process(target=signal.pause)
    child.start()
    pipe.send(child.pid)
    signal.pause()


@pytest.fixture
def holder(tmp_path):
    """Yield a locked folder, and the process that holds the lock."""
    folder = tmp_path / "out"
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=hold, args=(folder, sender))
    process.start()
    child = receiver.recv()
    yield folder, process
    process.kill()
    process.join()
    os.kill(child, signal.SIGKILL)


@pytest.mark.integration
def test_locking_a_locked_folder_raises_and_names_the_locking_process(holder):
    folder, process = holder
    assert f"process {process.pid} on " in describe_lock_holder(folder)
    with pytest.raises(ConfigError, match=rf"(?s)OUTPUT_DIR .*out .*process {process.pid} on .*since 20.*fix: "):
        lock_folder(folder, "OUTPUT_DIR")
    (folder / LOCK_FILE).write_bytes(b"[]")
    with pytest.raises(ConfigError, match="unknown process"):
        lock_folder(folder, "OUTPUT_DIR")


@pytest.mark.integration
def test_killing_a_process_releases_its_folder_lock(holder):
    """The lock is released even if a child process, e.g. a data loading worker, still has the lock file open."""
    folder, process = holder
    process.kill()
    process.join()
    assert describe_lock_holder(folder) == ""
    lock_folder(folder, "OUTPUT_DIR")
    assert json.loads((folder / LOCK_FILE).read_text())["pid"] == os.getpid()
    unlock_folder(folder)
    assert list(folder.iterdir()) == []


def try_to_lock(folder, pipe):
    try:
        lock_folder(folder, "OUTPUT_DIR")
        pipe.send("locked")
    except ConfigError:
        pipe.send("refused")


@pytest.mark.integration
def test_folder_lock_is_reentrant_but_not_inherited_by_child_processes(tmp_path):
    lock_folder(tmp_path, "OUTPUT_DIR")
    lock_folder(tmp_path / ".", "OUTPUT_DIR")
    assert describe_lock_holder(tmp_path) == ""
    for expected in ("refused", "locked"):
        receiver, sender = FORK.Pipe(duplex=False)
        process = FORK.Process(target=try_to_lock, args=(tmp_path, sender))
        process.start()
        assert receiver.recv() == expected
        process.join()
        unlock_folder(tmp_path)
    unlock_folder(tmp_path)


def test_locking_on_a_file_system_without_locks_logs_a_warning(tmp_path, monkeypatch, caplog):
    def unsupported(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "lockf", unsupported)
    lock_folder(tmp_path, "OUTPUT_DIR")
    assert "OUTPUT_DIR" in caplog.text and "No locks available" in caplog.text


def test_locking_raises_if_the_lock_file_is_a_symbolic_link(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / LOCK_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WriteError, match=LOCK_FILE):
        lock_folder(tmp_path / "out", "OUTPUT_DIR")
    assert not (tmp_path / "elsewhere").exists()


def test_locking_raises_if_the_lock_file_cannot_be_created(tmp_path, monkeypatch):
    """In /proc, creating a file raises FileNotFoundError; ``lock_folder`` must raise instead of waiting forever."""

    def open_(*args):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(lock.os, "open", open_)
    with pytest.raises(WriteError, match=r"\.lock .*No such file"):
        lock_folder(tmp_path, "OUTPUT_DIR")


def contend(folder, pipe, rounds):
    """Lock and unlock a folder ``rounds`` times; send the number of times that another process also had the lock."""
    overlaps = 0
    for _ in range(rounds):
        while True:
            try:
                lock_folder(folder, "OUTPUT_DIR")
                break
            except ConfigError:
                continue
        try:
            os.close(os.open(folder.with_name("inside"), os.O_CREAT | os.O_EXCL))
            os.unlink(folder.with_name("inside"))
        except FileExistsError:
            overlaps += 1
        unlock_folder(folder)
    pipe.send(overlaps)


@pytest.mark.integration
def test_only_one_of_four_contending_processes_holds_the_lock(tmp_path):
    pipes = []
    for _ in range(4):
        receiver, sender = FORK.Pipe(duplex=False)
        FORK.Process(target=contend, args=(tmp_path / "out", sender, 50), daemon=True).start()
        pipes.append(receiver)
    assert [pipe.recv() if pipe.poll(60) else "hangs" for pipe in pipes] == [0] * 4
