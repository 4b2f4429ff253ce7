"""Miniature datasets in the layout of Market-1501, and configs for them."""

import numpy as np
import pytest
from PIL import Image

from fastamp.config import get_cfg


@pytest.fixture
def write_image():
    """Write a random image that depends on its file name."""

    def write(path, size=(64, 32), mode="RGB", **options):
        path.parent.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(list(path.name.encode()))
        pixels = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).convert(mode).save(path, **options)
        return path

    return write


@pytest.fixture
def market(tmp_path, monkeypatch, write_image):
    """Data root with a small Market-1501: 6 training identities with 4 images each, from 3 cameras."""
    monkeypatch.setenv("FASTAMP_DATASETS", str(tmp_path))
    base = tmp_path / "Market-1501-v15.09.15"
    for pid in (2, 7, 10, 11, 1000, 30):
        for image in range(4):
            write_image(base / f"bounding_box_train/{pid:04d}_c{image % 3 + 1}s1_{image:06d}_00.jpg")
    for pid in (1, 3):
        write_image(base / f"query/{pid:04d}_c1s1_000000_00.jpg")
        for image in range(3):
            write_image(base / f"bounding_box_test/{pid:04d}_c{image + 1}s1_{image:06d}_01.jpg")
    write_image(base / "bounding_box_test/0000_c6s1_000000_00.jpg")
    write_image(base / "bounding_box_test/-1_c2s1_000000_00.jpg")
    return base


@pytest.fixture
def cfg():
    """Config with common augmentations, small images and no workers."""
    cfg = get_cfg()
    cfg.INPUT.SIZE_TRAIN = cfg.INPUT.SIZE_TEST = (32, 16)
    cfg.INPUT.PADDING.SIZE = 3
    for name in ("FLIP", "PADDING", "CJ", "REA"):
        cfg.INPUT[name].ENABLED = True
    cfg.SOLVER.IMS_PER_BATCH = 8
    cfg.DATALOADER.NUM_INSTANCE = 2
    cfg.DATALOADER.NUM_WORKERS = 0
    cfg.TEST.IMS_PER_BATCH = 4
    cfg.SEED = 5
    return cfg
