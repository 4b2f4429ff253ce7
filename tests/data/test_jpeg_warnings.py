"""JPEG files with a hole: libjpeg's warnings with the name of the file."""

import logging
import os
import threading

import numpy as np
import pytest
import torch
from PIL import Image

from fastamp.data.build import build_dataset
from fastamp.data.check import check_dataset
from fastamp.data.decode import read_image
from fastamp.data.jpeg_warnings import damaged_files, named_warnings


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
    (line,) = (folder / "log.txt").read_text().splitlines()
    assert str(folder / "2.jpg") in line


def test_check_reports_the_file(folder):
    report = check_dataset(build_dataset(f"csv:{folder}/list.csv"))
    (finding,) = (each for each in report.findings if "damaged" in each.fault)
    assert finding.count == 1 and "2.jpg (line 4)" in finding.examples[0] and not finding.is_error
    assert finding.excluded == {("train", 2)}


@pytest.mark.usefixtures("one_thread")
def test_other_output_is_printed(capfd):
    with named_warnings("x"):
        os.write(2, b"other\n")
        os.write(2, b"Corrupt JPEG data: 3 extraneous bytes\n")
    assert capfd.readouterr().err == "other\n"
    assert damaged_files(["a", "b"], lambda path: os.write(2, f"{path} is read\n".encode())) == {}
    assert sorted(capfd.readouterr().err.splitlines()) == ["a is read", "b is read"]
