"""Image cache: content, rebuilding, concurrent builds and interrupted builds."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fastamp.data import cache as module
from fastamp.data.cache import ImageCache
from fastamp.data.datasets.base import ImageItem
from fastamp.data.decode import read_image
from fastamp.data.transforms import Resize
from fastamp.utils.errors import DataError

SHAPE = (3, 16, 8)


class Read:
    """Callable that reads and resizes the image of an item, and counts its calls."""

    def __init__(self, items, size=SHAPE[1:], seconds=0.0):
        self.items, self.resize, self.seconds, self.count = items, Resize(size=size), seconds, 0

    def __call__(self, number):
        self.count += 1
        time.sleep(self.seconds)
        item = self.items[number]
        return self.resize(read_image(item.path, box=item.box))


@pytest.fixture
def items(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (150, 20, 10, 3), dtype=np.uint8)
    (tmp_path / "data").mkdir()
    image_items = []
    for number, image in enumerate(pixels):
        path = tmp_path / "data" / f"{number} ü.png"
        Image.fromarray(image).save(path)
        image_items.append(ImageItem(str(path), number, 0))
    return image_items


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTAMP_DATASETS", str(tmp_path / "root"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "root").mkdir()
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(module, "_SHARED_MEMORY", tmp_path / "shm")


def fail_on_read(number):
    raise AssertionError("read reopened")


@pytest.mark.parametrize("where", ["disk", "ram"])
def test_cache_equals_decoded_images_and_is_built_once(items, where):
    cache = ImageCache(items, SHAPE, Read(items), where=where)
    assert cache.images.shape == (150, *SHAPE) and cache.images.dtype == torch.uint8
    for number in (0, 63, 64, 149):
        assert torch.equal(cache.images[number], Read(items)(number))
    reopened = ImageCache(items, SHAPE, fail_on_read, where=where)
    assert torch.equal(reopened.images, cache.images) and reopened.path == cache.path
    cache.close()
    assert reopened.path.exists()
    reopened.close()
    assert reopened.path.exists() == (where == "disk")


@pytest.mark.parametrize("change", ["content", "box", "size", "order", "fewer"])
def test_cache_is_rebuilt_if_image_list_files_or_size_change(items, change):
    first = ImageCache(items, SHAPE, Read(items), where="disk")
    first.close()
    shape, changed = SHAPE, list(items)
    if change == "content":
        Image.new("RGB", (10, 20), "red").save(items[3].path)
    elif change == "box":
        changed[3] = items[3]._replace(box=(1, 2, 9, 18))
    elif change == "size":
        shape = (3, 8, 8)
    else:
        changed = items[::-1] if change == "order" else items[:-1]
    cache = ImageCache(changed, shape, Read(changed, shape[1:]), where="disk")
    assert cache.path != first.path and len(cache.images) == len(changed)
    assert torch.equal(cache.images[3], Read(changed, shape[1:])(3))
    # The old cache is removed only if the same list of images has changed files.
    assert first.path.exists() == (change != "content")


def test_open_cache_is_not_affected_by_changed_image_files(items):
    first = ImageCache(items, SHAPE, Read(items), where="disk")
    before = first.images.clone()
    Image.new("RGB", (10, 20), "red").save(items[3].path)
    second = ImageCache(items, SHAPE, Read(items), where="disk")
    assert first.path.exists() and torch.equal(first.images, before) and not torch.equal(second.images[3], before[3])


def test_cache_build_with_corrupt_image_raises_and_leaves_no_cache(items):
    Path(items[70].path).write_bytes(b"no image")
    with pytest.raises(DataError, match="70 ü.png"):
        ImageCache(items, SHAPE, Read(items), where="disk")
    folder = Path(os.environ["FASTAMP_DATASETS"]) / ".fastamp-cache"
    assert [file.suffix for file in folder.iterdir()] == [".lock"]


def test_cache_build_with_missing_image_raises_with_path(items):
    os.unlink(items[5].path)
    with pytest.raises(DataError, match="/5 ü.png.*No such file"):
        ImageCache(items, SHAPE, Read(items), where="disk")


def build(items, results):
    torch.set_num_threads(1)  # a forked process has no other threads of its parent's pool
    read = Read(items, seconds=0.02)
    images = ImageCache(items, SHAPE, read, where="disk").images
    results.put((read.count, int(images.sum())))


@pytest.mark.integration
def test_only_one_of_several_processes_builds_cache(items):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=build, args=(items, results)) for _ in range(3)]
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sorted(count for count, _ in outcomes) == [0, 0, 150] and len({total for _, total in outcomes}) == 1


@pytest.mark.integration
def test_killed_build_leaves_no_cache(items):
    context = multiprocessing.get_context("fork")
    process = context.Process(target=build, args=(items, context.Queue()))
    process.start()
    folder = Path(os.environ["FASTAMP_DATASETS"]) / ".fastamp-cache"
    for _ in range(2000):
        if list(folder.glob("*.unfinished")):
            break
        time.sleep(0.01)
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not list(folder.glob("*.images"))
    cache = ImageCache(items, SHAPE, Read(items), where="disk")
    assert torch.equal(cache.images[149], Read(items)(149)) and not list(folder.glob("*.unfinished"))


def test_cache_falls_back_to_home_if_data_root_is_not_writable(items, tmp_path, caplog):
    (tmp_path / "root/.fastamp-cache").write_text("no folder")
    cache = ImageCache(items, SHAPE, Read(items), where="disk")
    assert cache.path.parent == tmp_path / "home/fastamp"
    assert str(tmp_path / "root/.fastamp-cache") in caplog.text and str(cache.path) in caplog.text


def test_cache_falls_back_to_home_if_data_root_is_missing(items, tmp_path):
    (tmp_path / "root").rmdir()
    assert ImageCache(items, SHAPE, Read(items), where="disk").path.parent == tmp_path / "home/fastamp"


def test_unwritable_cache_folder_raises(items, tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DataError, match="(?s)DATALOADER.CACHE .*file.*DATALOADER.CACHE_DIR"):
        ImageCache(items, SHAPE, Read(items), where="disk", folder=str(tmp_path / "file"))


def test_full_disk_error_states_required_space(items, monkeypatch):
    def full(number, start, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(DataError, match=r"(?s)No space left on device.* 0.00 GB.*DATALOADER.CACHE_DIR"):
        ImageCache(items, SHAPE, fail_on_read, where="disk")


def test_memory_caches_of_killed_runs_are_removed(items):
    base = module._memory_folder()
    abandoned = base / "0123-4567.images"
    abandoned.write_bytes(b"abandoned")
    partial = base / "89ab-cdef.unfinished"
    partial.write_bytes(b"abandoned")
    ImageCache(items, SHAPE, Read(items), where="ram").close()
    assert not abandoned.exists() and not partial.exists() and not list(base.glob("*.images"))


def test_memory_cache_is_removed_when_last_process_releases_it(items):
    cache = ImageCache(items, SHAPE, Read(items), where="ram")
    path = cache.path
    other = ImageCache(items, SHAPE, fail_on_read, where="ram")
    del cache
    assert path.exists()
    del other
    assert not path.exists()


def test_cache_folder_on_file_system_without_locks_raises(items, monkeypatch):
    def no_locks(file, kind):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(module.fcntl, "flock", no_locks)
    with pytest.raises(DataError, match=r"(?s)No locks available.*DATALOADER.CACHE_DIR"):
        ImageCache(items, SHAPE, fail_on_read, where="disk")


def test_truncated_cache_is_rebuilt(items):
    cache = ImageCache(items, SHAPE, Read(items), where="disk")
    cache.close()
    os.truncate(cache.path, 1000)
    reopened = ImageCache(items, SHAPE, Read(items), where="disk")
    assert torch.equal(reopened.images[149], Read(items)(149))


def test_cache_larger_than_free_disk_space_raises_before_decoding(items):
    with pytest.raises(DataError, match="No space left on device.* 4294.97 GB"):
        ImageCache(items[:64], (4, 2**12, 2**12 * 1000), fail_on_read, where="disk")


def test_frames_that_outlive_the_build_do_not_block_the_cache(items):
    """The traceback of an error in ``read`` refers to the images, and with them to the file."""
    frames, read = [], Read(items)

    def read_and_keep(number):
        frames.append(sys._getframe(1))
        return read(number)

    def stop(*_):
        raise TimeoutError("the cache waits for itself")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    try:
        cache = ImageCache(items, SHAPE, read_and_keep, where="ram")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert len(frames) == len(items) and torch.equal(cache.images[7], read(7))
