"""One process at a time has a folder's lock; it names itself, and the system takes the lock from it when it ends."""

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
    """Be a process that has the lock, and a child that outlives it."""
    lock_folder(folder, "OUTPUT_DIR")
    child = FORK.Process(target=signal.pause)
    child.start()
    pipe.send(child.pid)
    signal.pause()


@pytest.fixture
def holder(tmp_path):
    """Another process that has the lock of a folder: the folder and the process."""
    folder = tmp_path / "out"
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=hold, args=(folder, sender))
    process.start()
    child = receiver.recv()
    yield folder, process
    process.kill()
    process.join()
    os.kill(child, signal.SIGKILL)


def test_a_second_process_is_refused_and_told_of_the_first(holder):
    folder, process = holder
    assert f"process {process.pid} on " in describe_lock_holder(folder)
    with pytest.raises(ConfigError, match=rf"(?s)OUTPUT_DIR .*out: .*process {process.pid} on .*since 20.*fix: "):
        lock_folder(folder, "OUTPUT_DIR")
    (folder / LOCK_FILE).write_bytes(b"[]")
    with pytest.raises(ConfigError, match="could not say which"):
        lock_folder(folder, "OUTPUT_DIR")


def test_the_lock_of_a_killed_process_is_free(holder):
    """Although a child of it, as a worker that loads data, is still there with all files that it had open."""
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


def test_a_process_may_take_its_lock_again_and_a_forked_one_does_not_inherit_it(tmp_path):
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


def test_a_file_system_without_locks(tmp_path, monkeypatch, caplog):
    def unsupported(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "lockf", unsupported)
    lock_folder(tmp_path, "OUTPUT_DIR")
    assert "cannot be locked (No locks available)" in caplog.text


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / LOCK_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WriteError, match="cannot be written"):
        lock_folder(tmp_path / "out", "OUTPUT_DIR")
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_in_which_no_file_can_be_made(tmp_path, monkeypatch):
    """As in /proc, where the system says that there is no such file; this does not wait forever."""

    def open_(*args):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(lock.os, "open", open_)
    with pytest.raises(WriteError, match=r"\.lock cannot be written: No such file"):
        lock_folder(tmp_path, "OUTPUT_DIR")


def contend(folder, pipe, rounds):
    """Take and release the lock again and again; report every overlap with another process."""
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


def test_the_file_that_a_release_removes_is_no_way_in(tmp_path):
    pipes = []
    for _ in range(4):
        receiver, sender = FORK.Pipe(duplex=False)
        FORK.Process(target=contend, args=(tmp_path / "out", sender, 50), daemon=True).start()
        pipes.append(receiver)
    assert [pipe.recv() if pipe.poll(60) else "hangs" for pipe in pipes] == [0] * 4
