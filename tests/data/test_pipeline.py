"""Input pipeline for several configs: augmentation in workers or on the device, caches, and unreadable images."""

import itertools
import shutil
from pathlib import Path

import pytest
import tiny
import torch

from fastamp.config import read_config
from fastamp.data import cache as cache_module
from fastamp.data.build import build_reid_test_loader, build_reid_train_loader
from fastamp.utils.errors import DataError

AUGMENTED = [
    word
    for name in (
        "CROP",
        "PADDING",
        "FLIP",
        "CJ",
        "GRAYSCALE",
        "BLUR",
        "AUTOAUG",
        "RANDAUG",
        "AFFINE",
        "AUGMIX",
        "REA",
        "LOCAL_GRAYSCALE",
        "RPT",
    )
    for word in (f"INPUT.{name}", "True")
]


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Data root with the small demo dataset."""
    tiny.make_demo(tmp_path / "root")
    monkeypatch.setenv("FASTAMP_DATASETS", str(tmp_path / "root"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(cache_module, "_SHARED_MEMORY", tmp_path / "shm")
    return tmp_path / "root"


def config(tmp_path, *opts):
    return read_config("", tiny.tiny_options(tmp_path / "out", *opts))


def batches(cfg, count=6, start_iter=0):
    return list(itertools.islice(build_reid_train_loader(cfg, start_iter=start_iter), count))


def equal_batches(expected, actual):
    return all(
        torch.equal(a[name], b[name])
        for a, b in zip(expected, actual, strict=True)
        for name in ("images", "targets", "camids", "indices")
    )


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.integration)])
def test_augmentation_in_workers_and_on_device_gives_equal_batches(root, tmp_path, workers):
    options = [
        *AUGMENTED,
        "INPUT.CROP.SIZE",
        "(64, 32)",
        "INPUT.AUTOAUG.PROB",
        "0.5",
        "INPUT.AUGMIX.PROB",
        "0.5",
        "DATALOADER.NUM_WORKERS",
        workers,
    ]
    in_workers = batches(config(tmp_path, *options))
    on_device = batches(config(tmp_path, *options, "INPUT.AUGMENT_ON", "device"))
    assert equal_batches(in_workers, on_device) and "augmentation" not in on_device[0]
    plain = batches(config(tmp_path, "INPUT.FLIP", "False", "INPUT.PADDING", "False", "INPUT.REA", "False"))
    assert not torch.equal(plain[0]["images"], in_workers[0]["images"])
    resumed = batches(config(tmp_path, *options, "INPUT.AUGMENT_ON", "device"), count=3, start_iter=3)
    assert equal_batches(on_device[3:], resumed)


@pytest.mark.cuda
def test_augmentation_on_cuda_matches_augmentation_in_workers(root, tmp_path):
    options = [*AUGMENTED, "INPUT.CROP.SIZE", "(64, 32)", "MODEL.DEVICE", "cuda"]
    in_workers = batches(config(tmp_path, *options))
    on_device = batches(config(tmp_path, *options, "INPUT.AUGMENT_ON", "device"))
    for expected, actual in zip(in_workers, on_device, strict=True):
        assert expected["images"].is_cuda and actual["images"].is_cuda
        difference = (expected["images"].int() - actual["images"].int()).abs()
        assert (difference > 2).float().mean() < 1e-3


@pytest.mark.integration
@pytest.mark.parametrize("cache", ["ram", "disk"])
def test_cache_does_not_change_batches(root, tmp_path, cache):
    plain = batches(config(tmp_path))
    for _ in range(2):  # built, then found
        assert equal_batches(plain, batches(config(tmp_path, "DATALOADER.CACHE", cache, "DATALOADER.NUM_WORKERS", "2")))
    assert equal_batches(plain[3:], batches(config(tmp_path, "DATALOADER.CACHE", cache), count=3, start_iter=3))
    tested = [next(iter(build_reid_test_loader(config(tmp_path, *opts), "Demo")[0])) for opts in
              ((), ("DATALOADER.CACHE", cache))]  # fmt: skip
    assert torch.equal(tested[0]["images"], tested[1]["images"])
    folder = tmp_path / "own cache"
    assert equal_batches(
        plain, batches(config(tmp_path, "DATALOADER.CACHE", cache, "DATALOADER.CACHE_DIR", str(folder)))
    )
    assert folder.exists() == (cache == "disk")


@pytest.mark.parametrize("cache", ["none", "disk"])
@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.integration)])
def test_corrupt_image_raises_with_file_name(root, tmp_path, cache, workers):
    victim = sorted(root.rglob("bounding_box_train/*.jpg"))[7]
    victim.write_bytes(victim.read_bytes()[:100])
    options = ["DATALOADER.CACHE", cache, "DATALOADER.NUM_WORKERS", workers]
    with pytest.raises(DataError, match=f"{victim.name}.*\n.*fix: .*DATALOADER.ON_CORRUPT to skip"):
        batches(config(tmp_path, *options), count=30)


@pytest.mark.parametrize("cache", ["none", "ram"])
def test_on_corrupt_skip_replaces_corrupt_image_with_same_identity(root, tmp_path, cache, caplog):
    files = sorted(root.rglob("bounding_box_train/*.jpg"))
    options = ["INPUT.FLIP", "False", "INPUT.PADDING", "False", "INPUT.REA", "False"]
    before = batches(config(tmp_path, *options), count=30)
    files[7].write_bytes(b"no image")
    options += ["DATALOADER.ON_CORRUPT", "skip", "DATALOADER.CACHE", cache]
    after = batches(config(tmp_path, *options), count=30)
    assert caplog.text.count(f"cannot read the image {files[7]}") == 1 and "in this process: 1)" in caplog.text
    replacement = next(
        image
        for batch in before
        for image, path in zip(batch["images"], batch["img_paths"], strict=True)
        if path == str(files[8])
    )
    replaced = 0
    for expected, actual in zip(before, after, strict=True):
        assert expected["img_paths"] == actual["img_paths"] and torch.equal(expected["targets"], actual["targets"])
        for original, current, path in zip(expected["images"], actual["images"], expected["img_paths"], strict=True):
            replaced += path == str(files[7])
            assert torch.equal(current, replacement if path == str(files[7]) else original)
    assert replaced and files[7].name[:4] == files[8].name[:4]


def test_on_corrupt_skip_raises_if_identity_has_no_readable_image(root, tmp_path):
    files = sorted(root.rglob("bounding_box_train/*.jpg"))
    for file in files:
        if file.name[:4] == files[0].name[:4]:
            file.write_bytes(b"no image")
    with pytest.raises(DataError, match="identity .*DATALOADER.ON_CORRUPT"):
        batches(config(tmp_path, "DATALOADER.ON_CORRUPT", "skip"), count=30)


def test_training_set_with_single_identity_raises(root, tmp_path):
    folder = next(root.iterdir()).rename(root / "Market-1501-v15.09.15")
    first = sorted(folder.rglob("bounding_box_train/*.jpg"))[0].name[:4]
    for file in folder.rglob("bounding_box_train/*.jpg"):
        if file.name[:4] != first:
            file.unlink()
    options = [
        "SOLVER.IMS_PER_BATCH",
        "4",
        "DATALOADER.SAMPLER_TRAIN",
        "TrainingSampler",
        "DATASETS.NAMES",
        "Market1501",
    ]
    with pytest.raises(DataError, match="Market1501"):
        build_reid_train_loader(config(tmp_path, *options))


def test_set_weight_controls_the_batch_composition(root, tmp_path):
    csv_file = tmp_path / "mine.csv"
    files = sorted(shutil.copytree(next(root.rglob("bounding_box_train")), tmp_path / "csv_file").glob("*.jpg"))
    csv_file.write_text("\n".join(["path,pid,split", *(f"{file},{file.name[:4]},train" for file in files[:24])]))
    names = f"('Demo', 'csv:{csv_file}')"
    options = [
        "DATASETS.NAMES",
        names,
        "DATALOADER.SAMPLER_TRAIN",
        "SetReWeightSampler",
        "DATALOADER.SET_WEIGHT",
        "(3, 1)",
    ]
    loader = build_reid_train_loader(config(tmp_path, *options))
    assert loader.dataset.num_classes == 16 + 4
    for batch in itertools.islice(loader, 5):
        from_mine = [loader.dataset.items[index].pid.startswith("csv:") for index in batch["indices"].tolist()]
        assert sum(from_mine) == 4 and len(from_mine) == 16
    assert Path(csv_file).exists()
