import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest
import torch
from PIL import Image

from fastamp.config import get_cfg
from fastamp.data import decode
from fastamp.data.dataset import ReidDataset
from fastamp.data.datasets.items import ImageItem
from fastamp.data.decode import read_image
from fastamp.data.frame_cache import FrameCache
from fastamp.data.transforms import build_transforms
from fastamp.utils.errors import DataError

FRAME = torch.zeros(3, 10, 10, dtype=torch.uint8)


def counted(calls, key, frame=FRAME):
    def read():
        calls.append(key)
        return frame

    return read


def test_least_recently_used_frames_are_removed():
    calls = []
    cache = FrameCache(2 * FRAME.nbytes)
    for key in ("a", "b", "a", "c", "a", "b"):
        cache.get(key, counted(calls, key))
    assert calls == ["a", "b", "c", "b"]
    big = torch.zeros(3, 100, 100, dtype=torch.uint8)
    for key in ("big", "big", "a"):
        cache.get(key, counted(calls, key, big))
    assert calls[4:] == ["big", "a"]
    assert cache.get("a", counted(calls, "a")) is big


def test_threads_decode_a_frame_once():
    calls, started, go = [], Event(), Event()
    cache = FrameCache(2**20)

    def slow():
        calls.append("a")
        started.set()
        assert go.wait(10)
        return FRAME

    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(cache.get, "a", slow) for _ in range(4)]
        assert started.wait(10)
        assert cache.get("b", counted(calls, "b")) is FRAME  # other frames are not blocked
        go.set()
        assert all(result.result(10) is FRAME for result in results)
    assert calls == ["a", "b"]


def test_errors_are_raised_and_not_kept():
    cache = FrameCache(2**20)

    def fail():
        raise DataError("damaged")

    for _ in range(2):
        with pytest.raises(DataError, match="damaged"):
            cache.get("a", fail)
    assert cache.get("a", lambda: FRAME) is FRAME


def save(path, seed, size=(60, 40)):
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(path)
    return str(path)


@pytest.fixture
def decoded(monkeypatch):
    """Names of the files that are decoded."""
    names = []
    original = decode.decode_image

    def record(content, channels, *, name, **options):
        names.append(os.path.basename(name))
        return original(content, channels, name=name, **options)

    monkeypatch.setattr(decode, "decode_image", record)
    return names


def test_boxes_of_a_frame_decode_it_once(tmp_path, decoded):
    path = save(tmp_path / "a.png", 0)
    whole = read_image(path)
    boxes = [(left, 5, left + 20, 35) for left in range(0, 60, 7)]
    crops = [read_image(path, box=box) for box in boxes]
    assert all(
        torch.equal(crop, whole[:, top:bottom, left:right])
        for crop, (left, top, right, bottom) in zip(crops, boxes, strict=True)
    )
    assert decoded == ["a.png"] * 2
    crops[0].zero_()  # a crop is a copy
    assert torch.equal(read_image(path, box=boxes[0]), whole[:, 5:35, :20])
    assert read_image(path, 1, box=boxes[0]).shape == (1, 30, 20)  # another kind of decoding
    assert decoded == ["a.png"] * 3


@pytest.mark.parametrize("size", [(24, 16), (0,)])
def test_a_batch_decodes_each_frame_once(size, tmp_path, decoded, monkeypatch):
    paths = [save(tmp_path / f"{number}.png", number) for number in range(4)]
    random = np.random.default_rng(0)
    corners = random.integers(0, 15, (40, 2)).tolist()
    items = [
        ImageItem(paths[n % 4], n, 0, box=(left, top, left + 20, top + 25)) for n, (left, top) in enumerate(corners)
    ]
    cfg = get_cfg()
    cfg.merge_from_list(["INPUT.SIZE_TRAIN", str(size), "INPUT.FLIP.ENABLED", "True"])
    transforms = build_transforms(cfg)
    dataset = ReidDataset(items, transforms, relabel=True)
    order = random.permutation(len(items)).tolist()
    keys = [(0, place, row) for place, row in enumerate(order)]
    monkeypatch.setattr(decode, "_FRAMES", FrameCache(1))  # keeps one frame
    batch = dataset.__getitems__(keys)
    assert sorted(decoded) == [os.path.basename(path) for path in paths]
    assert batch["targets"].tolist() == order
    for place, row in enumerate(order):
        left, top, right, bottom = items[row].box
        crop = transforms.resize(read_image(items[row].path)[:, top:bottom, left:right])[None]
        for augment in (transforms.augment_each, transforms.augment):
            crop = augment.apply(crop, augment.draw([0], [place], crop.shape[-2:]))
        assert torch.equal(batch["images"][place], crop[0])


def test_a_frame_that_is_written_again_is_decoded_again(tmp_path, decoded):
    path = save(tmp_path / "a.png", 0)
    read_image(path, box=(0, 0, 9, 9))
    save(tmp_path / "a.png", 1)
    os.utime(path, ns=(1, 1))
    assert torch.equal(read_image(path, box=(0, 0, 9, 9)), read_image(path)[:, :9, :9])
    os.remove(path)
    with pytest.raises(DataError, match=r"a\.png"):
        read_image(path, box=(0, 0, 9, 9))


@pytest.mark.integration
def test_a_forked_process_starts_with_an_empty_cache():
    cache = FrameCache(2**20)
    cache.get("a", lambda: FRAME)
    with cache._lock:  # as held by a thread of the parent
        process = multiprocessing.get_context("fork").Process(target=cache.get, args=("a", lambda: FRAME))
        process.start()
        process.join(10)
    assert process.exitcode == 0
