"""JPEG files with a hole: libjpeg's warnings with the name of the file."""

import logging
import os
import threading

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import tiny_config

from fastamp.data import image_summary
from fastamp.data.build import build_dataset
from fastamp.data.cache import ImageCache
from fastamp.data.datasets.base import ImageItem
from fastamp.data.decode import read_image
from fastamp.data.jpeg_warnings import decoding_pool, named_warnings, read_all, read_in_threads
from fastamp.diagnostics.data_check import check_dataset
from fastamp.inference.predictor import Predictor
from fastamp.modeling import build_model


@pytest.fixture
def folder(tmp_path):
    """Four JPEG files; the third one has a hole."""
    rng = np.random.default_rng(0)
    for number in range(4):
        pixels = np.kron(rng.integers(0, 256, (8, 4, 3)), np.ones((16, 16, 1))) + rng.integers(0, 20, (128, 64, 3))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(tmp_path / f"{number}.jpg", quality=90)
    content = (tmp_path / "2.jpg").read_bytes()
    half = len(content) // 2
    (tmp_path / "2.jpg").write_bytes(content[:half] + bytes(300) + content[half + 300 :])
    rows = [f"{number}.jpg,{number // 2},{number % 2},train" for number in range(4)]
    (tmp_path / "list.csv").write_text("\n".join(["path,pid,camid,split", *rows]))
    return tmp_path


@pytest.fixture
def one_thread(monkeypatch):
    """Other tests may leave threads."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)


class Files(torch.utils.data.Dataset):
    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 4

    def __getitem__(self, number):
        return read_image(str(self.folder / f"{number}.jpg"))


@pytest.mark.usefixtures("one_thread")
def test_warning_names_the_file(folder, caplog, capfd):
    for number in range(4):
        read_image(str(folder / f"{number}.jpg"))
    (message,) = caplog.messages
    assert str(folder / "2.jpg") in message and "Corrupt JPEG data" in message
    assert "Corrupt JPEG data" not in capfd.readouterr().err


@pytest.mark.integration
def test_worker_names_the_file(folder):
    handler = logging.FileHandler(folder / "log.txt")
    logger = logging.getLogger("fastamp")
    logger.addHandler(handler)
    try:
        assert len(list(torch.utils.data.DataLoader(Files(folder), num_workers=1))) == 4
    finally:
        logger.removeHandler(handler)
        handler.close()
    [line] = [line for line in (folder / "log.txt").read_text().splitlines() if "Corrupt JPEG data" in line]
    assert str(folder / "2.jpg") in line


def test_check_reports_the_file(folder):
    report = check_dataset(build_dataset(f"csv:{folder}/list.csv"))
    (finding,) = (finding for finding in report.findings if "damaged" in finding.fault)
    assert finding.count == 1 and "2.jpg (line 4)" in finding.examples[0] and not finding.is_error
    assert finding.excluded == {("train", 2)}


@pytest.mark.usefixtures("one_thread")
def test_other_output_is_printed(capfd):
    with named_warnings("x"):
        os.write(2, b"other\n")
        os.write(2, b"Corrupt JPEG data: 3 extraneous bytes\n")
    assert capfd.readouterr().err == "other\n"
    with decoding_pool() as pool:
        assert read_all(pool, lambda path: os.write(2, f"{path} is read\n".encode()), ["a", "b"]) == ([10, 10], {})
    assert sorted(capfd.readouterr().err.splitlines()) == ["a is read", "b is read"]


@pytest.fixture
def only_decoding_threads(monkeypatch):
    """Other tests may leave threads."""
    alive = threading.enumerate
    mine = (threading.current_thread(),)
    monkeypatch.setattr(
        threading,
        "enumerate",
        lambda: [thread for thread in alive() if thread in mine or thread.name.startswith("fastamp")],
    )


@pytest.mark.usefixtures("only_decoding_threads")
@pytest.mark.parametrize("where", ["cache", "Predictor", "Predictor, bytes"])
def test_threads_name_the_file(where, folder, caplog, capfd, tmp_path):
    files = [folder / f"{number}.jpg" for number in range(4)]
    if where == "cache":
        items = [ImageItem(str(file), 0, 0) for file in files]
        cache = ImageCache(
            items, (3, 128, 64), lambda number: read_image(items[number].path), where="disk", folder=str(tmp_path / "c")
        )
        assert torch.equal(cache.images[1], read_image(str(files[1]))) and cache.images[2].any()
    else:
        images = [file.read_bytes() for file in files] if "bytes" in where else files
        cfg = tiny_config(tmp_path)
        torch.save({"model": build_model(cfg).state_dict(), "config": cfg.dump()}, tmp_path / "model.pth")
        assert Predictor(tmp_path / "model.pth", device="cpu")(images).isfinite().all()
    (message,) = [message for message in caplog.messages if "damaged" in message]
    assert ("number 2" if "bytes" in where else str(files[2])) in message and "Corrupt JPEG data" in message


def test_stderr_is_not_captured_among_other_threads(folder, caplog, capfd):
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    try:
        with decoding_pool() as pool:
            images = read_in_threads(pool, read_image, [str(folder / f"{number}.jpg") for number in range(4)], str)
    finally:
        stop.set()
        other.join()
    assert len(images) == 4 and caplog.messages == [] and "Corrupt JPEG data" in capfd.readouterr().err


def test_check_decodes_each_file_once(folder, monkeypatch):
    decoded = []
    decode = image_summary.decode_image
    monkeypatch.setattr(
        image_summary, "decode_image", lambda *args, **kw: decoded.append(kw["name"]) or decode(*args, **kw)
    )
    (folder / "2.jpg").write_bytes((folder / "1.jpg").read_bytes())
    check_dataset(build_dataset(f"csv:{folder}/list.csv"))
    assert sorted(decoded) == [str(folder / f"{number}.jpg") for number in range(4)]


def test_check_reports_truncated_files_as_unreadable(folder):
    content = (folder / "1.jpg").read_bytes()
    for number, length in ((1, len(content) // 2), (2, 200), (3, len(content) - 2)):
        (folder / f"{number}.jpg").write_bytes(content[:length])
    report = check_dataset(build_dataset(f"csv:{folder}/list.csv"))
    (finding,) = (finding for finding in report.findings if "unreadable" in finding.fault)
    assert {row for _, row in finding.excluded} >= {1, 2}
    assert all("cannot read the image" not in example for example in finding.examples)
