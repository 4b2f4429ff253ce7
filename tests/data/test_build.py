import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import preloaded
import pytest
import torch

from fastamp.data import build_reid_test_loader, build_reid_train_loader
from fastamp.data.build import with_num_categories
from fastamp.data.loader import explain_lost_workers, worker_count
from fastamp.utils.errors import ConfigError, DataError


def take(loader, count):
    """Return the first batches and stop the workers."""
    batches = iter(loader)
    batches_taken = list(itertools.islice(batches, count))
    batches.close()
    return batches_taken


def equal_batches(left, right):
    return len(left) == len(right) and all(
        torch.equal(a[name], b[name]) if torch.is_tensor(a[name]) else a[name] == b[name]
        for a, b in zip(left, right, strict=True)
        for name in a.keys() | b.keys()
    )


def test_training_batch_shapes_and_dtypes(market, cfg):
    loader = build_reid_train_loader(cfg)
    assert loader.dataset.num_classes == 6 and loader.iters_per_epoch == 3
    (batch,) = take(loader, 1)
    assert batch["images"].shape == (8, 3, 32, 16) and batch["images"].dtype == torch.uint8
    assert batch["images"].is_contiguous()
    for name in ("targets", "camids", "viewids", "indices"):
        assert batch[name].shape == (8,) and batch[name].dtype == torch.int64
    assert [loader.dataset.items[index].path for index in batch["indices"]] == batch["img_paths"]


@pytest.mark.parametrize("channels", [1, 4])
def test_batches_have_configured_number_of_channels(market, cfg, channels):
    cfg.INPUT.CHANNELS = channels
    cfg.INPUT.AFFINE.ENABLED = True
    cfg.INPUT.REA.VALUE = (9.0,) * channels
    (batch,) = take(build_reid_train_loader(cfg), 1)
    assert batch["images"].shape == (8, channels, 32, 16) and batch["images"].dtype == torch.uint8
    tested = next(iter(build_reid_test_loader(cfg, "Market1501")[0]))
    assert tested["images"].shape == (4, channels, 32, 16)
    if channels == 4:
        assert (tested["images"][:, 3] == 255).all()
        cfg.INPUT.CHANNELS = 3
        rgb = next(iter(build_reid_test_loader(cfg, "Market1501")[0]))
        assert torch.equal(tested["images"][:, :3], rgb["images"])


def test_training_labels_follow_text_order_of_identities(market, cfg):
    """Classifier rows are in FastReID's order, in which "market1501_1000" precedes "market1501_2"."""
    dataset = build_reid_train_loader(cfg).dataset
    label_of = {item.pid.split("_")[1]: label for item, label in zip(dataset.items, dataset.labels, strict=True)}
    assert label_of == {"10": 0, "1000": 1, "11": 2, "2": 3, "30": 4, "7": 5}
    assert set(dataset.camids) == {0, 1, 2}


@pytest.mark.parametrize("combine_all", [False, True])
def test_single_dataset_keeps_camera_ids(market, cfg, write_image, combine_all):
    """Camera embeddings require the same camera number in all splits."""
    for path in market.glob("bounding_box_train/*_c1s1_*"):
        path.rename(path.with_name(path.name.replace("_c1s1_", "_c12s1_")))  # no training image is from camera 1
    cfg.DATASETS.COMBINEALL = combine_all
    training, testing = build_reid_train_loader(cfg).dataset, build_reid_test_loader(cfg, "Market1501")[0].dataset
    for dataset in (training, testing):
        for item, camid in zip(dataset.items, dataset.camids, strict=True):
            assert f"_c{camid + 1}s1_" in item.path
    assert {1, 2, 11} <= set(training.camids)


def test_cameras_of_several_datasets_are_distinct(market, cfg):
    shutil.copytree(market, market.with_name("DukeMTMC-reID"))
    cfg.DATASETS.NAMES = ("Market1501", "DukeMTMC")
    dataset = build_reid_train_loader(cfg).dataset
    camera_of = {(item.camid, camid) for item, camid in zip(dataset.items, dataset.camids, strict=True)}
    assert len(camera_of) == 6 and {camid for _, camid in camera_of} == set(range(6))
    cfg.MODEL.BACKBONE.SIE_CAMERAS = 6
    with pytest.raises(ConfigError, match=r"SIE_CAMERAS is 6.* Market1501, DukeMTMC"):
        build_reid_train_loader(cfg)


def test_cameras_or_views_outside_embedding_range_raise(market, cfg, caplog):
    """On a GPU, an embedding index that is out of range would abort the process without a useful message."""
    cfg.MODEL.BACKBONE.SIE_CAMERAS = 3
    build_reid_train_loader(cfg)
    with pytest.raises(ConfigError, match=r"(?s)SIE_CAMERAS is 3.*0 to 5.*Market1501.*SIE_CAMERAS to 6"):
        build_reid_test_loader(cfg, "Market1501")
    cfg.MODEL.BACKBONE.SIE_CAMERAS = 2
    with pytest.raises(ConfigError, match=r"SIE_CAMERAS is 2.*0 to 1.*0 to 2.*Market1501"):
        build_reid_train_loader(cfg)
    cfg.MODEL.BACKBONE.SIE_CAMERAS, cfg.MODEL.BACKBONE.SIE_VIEWS = 6, 8
    assert "SIE_VIEWS" not in caplog.text
    build_reid_train_loader(cfg)
    assert "SIE_VIEWS is 8" in caplog.text and "Market1501" in caplog.text
    assert "embeddings" not in caplog.text
    cfg.DATASETS.NAMES = ("Elsewhere",)
    build_reid_test_loader(cfg, "Market1501")
    assert "Market1501" in caplog.text and "Elsewhere" in caplog.text


def test_cameras_of_another_csv_file_keep_their_numbers(tmp_path, cfg, write_image):
    images = [write_image(tmp_path / f"{number}.jpg") or tmp_path / f"{number}.jpg" for number in range(8)]

    def write_csv(name, cameras, split):
        rows = [f"{path},{row % 2},{cameras[row % len(cameras)]},{split(row)}" for row, path in enumerate(images)]
        (tmp_path / name).write_text("\n".join(["path,pid,camid,split", *rows]))
        return f"csv:{tmp_path / name}"

    cfg.DATASETS.NAMES = (write_csv("train.csv", ["7", "door", "8", "9"], lambda row: "train"),)
    cfg.MODEL.BACKBONE.SIE_CAMERAS = 8
    trained = with_num_categories(cfg, build_reid_train_loader(cfg).dataset)
    assert trained.DATASETS.CAMERAS == ("7", "8", "9", "door")

    def test_split(row):
        return "query" if row < 4 else "gallery"

    loader, _ = build_reid_test_loader(trained, write_csv("test.csv", ["9", "door"], test_split))
    assert loader.dataset.camids.tolist() == [2, 3] * 4
    assert loader.dataset.column_names()["camera"][2:] == ["9", "door"]
    unknown = write_csv("other.csv", ["9", "10"], test_split)
    with pytest.raises(ConfigError, match="other.csv.*1 camera: 10.*DATASETS.CAMERAS.*7, 8, 9, door"):
        build_reid_test_loader(trained, unknown)
    build_reid_test_loader(trained.with_values({"MODEL.BACKBONE.SIE_CAMERAS": 0}), unknown)


@pytest.mark.integration
@pytest.mark.parametrize("sampler", ["TrainingSampler", "NaiveIdentitySampler", "BalancedIdentitySampler"])
def test_resumed_batches_are_bit_identical_for_any_number_of_workers(market, cfg, sampler):
    cfg.DATALOADER.SAMPLER_TRAIN = sampler
    uninterrupted = take(build_reid_train_loader(cfg), 8)
    assert not equal_batches(uninterrupted[:3], uninterrupted[3:6])
    for start, workers in ((0, 1), (2, 0), (3, 2), (5, 1)):
        cfg.DATALOADER.NUM_WORKERS = workers
        assert equal_batches(take(build_reid_train_loader(cfg, start_iter=start), 8 - start), uninterrupted[start:])


def test_start_at_sets_first_batch_after_construction(market, cfg):
    uninterrupted = take(build_reid_train_loader(cfg), 5)
    loader = build_reid_train_loader(cfg)
    loader.start_at(4)
    assert loader.start_iter == 4 and equal_batches(take(loader, 1), uninterrupted[4:])
    loader.start_at(3)
    assert equal_batches(take(loader, 2), uninterrupted[3:])


def test_batches_of_all_ranks_form_single_process_batch(market, cfg):
    cfg.DATALOADER.SAMPLER_TRAIN = "NaiveIdentitySampler"
    reference = take(build_reid_train_loader(cfg), 4)
    parts = [take(build_reid_train_loader(cfg, rank=rank, world_size=4), 4) for rank in range(4)]
    for index, batch in enumerate(reference):
        for name in ("images", "targets", "camids"):
            assert torch.equal(torch.cat([part[index][name] for part in parts]), batch[name])
        assert [path for part in parts for path in part[index]["img_paths"]] == batch["img_paths"]


def test_batches_depend_on_the_seed(market, cfg):
    first = take(build_reid_train_loader(cfg), 2)
    assert equal_batches(take(build_reid_train_loader(cfg), 2), first)
    cfg.SEED = 6
    assert not equal_batches(take(build_reid_train_loader(cfg), 2), first)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.integration)])
def test_loading_does_not_change_global_random_state(market, cfg, workers):
    cfg.DATALOADER.NUM_WORKERS = workers
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    take(build_reid_train_loader(cfg), 2)
    list(build_reid_test_loader(cfg, "Market1501")[0])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert random.getstate() == before[2]


def test_dataset_smaller_than_a_batch_raises(market, cfg):
    cfg.SOLVER.IMS_PER_BATCH = 40
    with pytest.raises(DataError, match=r"Market1501.* 24 images, SOLVER.IMS_PER_BATCH is 40"):
        build_reid_train_loader(cfg)
    cfg.SOLVER.IMS_PER_BATCH = 24
    assert build_reid_train_loader(cfg).iters_per_epoch == 1
    cfg.DATALOADER.SAMPLER_TRAIN = "NaiveIdentitySampler"
    with pytest.raises(DataError, match=r"has 6, .* needs 12"):
        build_reid_train_loader(cfg)


@pytest.mark.parametrize(
    ("edits", "options", "expected"),
    [
        (["DATASETS.NAMES", ()], {}, "DATASETS.NAMES is empty"),
        (["DATASETS.NAMES", ("Market",)], {}, "Did you mean 'Market1501'"),
        (["DATALOADER.SAMPLER_TRAIN", "RandomSampler"], {}, "choices: BalancedIdentitySampler"),
        (["DATALOADER.NUM_WORKERS", -3], {}, "DATALOADER.NUM_WORKERS"),
        (["SOLVER.IMS_PER_BATCH", 0], {}, "SOLVER.IMS_PER_BATCH"),
        (["SOLVER.IMS_PER_BATCH", 9], {"rank": 0, "world_size": 2}, "got 9"),
    ],
)
def test_error_for_invalid_data_config_names_key_or_value(market, cfg, edits, options, expected):
    with pytest.raises(ConfigError) as raised:
        cfg.merge_from_list(edits)
        build_reid_train_loader(cfg, **options)
    assert expected in str(raised.value)


def test_test_loader_returns_query_then_gallery_images_in_order(market, cfg):
    loader, num_query = build_reid_test_loader(cfg, "Market1501")
    batches = list(loader)
    assert num_query == 2 and len(loader) == len(batches) == 3
    assert [len(batch["targets"]) for batch in batches] == [4, 4, 1]
    assert torch.cat([batch["targets"] for batch in batches]).tolist() == [1, 3, 0, 1, 1, 1, 3, 3, 3]
    assert torch.cat([batch["camids"] for batch in batches]).tolist() == [0, 0, 5, 0, 1, 2, 0, 1, 2]
    assert torch.cat([batch["indices"] for batch in batches]).tolist() == list(range(9))
    again = list(loader)
    assert equal_batches(batches, again)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.integration)])
def test_test_images_are_divided_among_ranks(market, cfg, workers):
    cfg.TEST.NUM_WORKERS = workers
    reference = torch.cat([batch["images"] for batch in build_reid_test_loader(cfg, "Market1501")[0]])
    parts = [build_reid_test_loader(cfg, "Market1501", rank=rank, world_size=4)[0] for rank in range(4)]
    batches = [batch for part in parts for batch in part]
    assert [len(part) for part in parts] == [2, 2, 2, 3]
    assert torch.cat([batch["indices"] for batch in batches]).tolist() == list(range(9))
    assert torch.equal(torch.cat([batch["images"] for batch in batches]), reference)


def test_test_set_with_fewer_images_than_processes_raises(market, cfg):
    with pytest.raises(DataError, match="Market1501.* 9 .* 10 processes"):
        build_reid_test_loader(cfg, "Market1501", rank=0, world_size=10)


@pytest.mark.integration
def test_test_loader_returns_same_batches_in_second_evaluation(market, cfg):
    cfg.TEST.NUM_WORKERS = 1
    loader, _ = build_reid_test_loader(cfg, "Market1501")
    assert equal_batches(list(loader), list(loader))


def test_test_set_without_queries_raises(market, cfg, monkeypatch):
    monkeypatch.setattr("fastamp.data.datasets.market1501.Market1501.query", [])
    with pytest.raises(DataError, match="Market1501(.|\n)*DATASETS.TESTS"):
        build_reid_test_loader(cfg, "Market1501")


def test_non_integer_test_identity_raises(market, cfg, monkeypatch):
    from fastamp.data.datasets import ImageItem

    monkeypatch.setattr("fastamp.data.datasets.market1501.Market1501.query", [ImageItem("a.jpg", "seven", 0)])
    with pytest.raises(DataError, match=r"identity 'seven'.*a\.jpg"):
        build_reid_test_loader(cfg, "Market1501")


@pytest.mark.parametrize(
    "workers", [0, pytest.param(1, marks=pytest.mark.integration), pytest.param(2, marks=pytest.mark.integration)]
)
def test_corrupt_image_error_names_file_without_traceback(market, cfg, workers):
    path = market / "bounding_box_train/0007_c2s1_000001_00.jpg"
    path.write_bytes(path.read_bytes()[:100])
    cfg.DATALOADER.NUM_WORKERS = workers
    with pytest.raises(DataError) as raised:
        take(build_reid_train_loader(cfg), 4)
    assert str(path) in str(raised.value)
    _, fix = str(raised.value).splitlines()
    assert "fix: " in fix and "DATALOADER.ON_CORRUPT" in fix


@pytest.mark.integration
def test_unexpected_exception_in_worker_keeps_its_class(market, cfg, monkeypatch):
    def broken(path, channels, **options):
        raise ZeroDivisionError("bug")

    monkeypatch.setattr("fastamp.data.transforms.build.read_image", broken)
    cfg.DATALOADER.NUM_WORKERS = 1
    with pytest.raises(ZeroDivisionError):
        take(build_reid_train_loader(cfg), 1)


def test_indexing_the_dataset_returns_one_image_with_labels(market, cfg):
    dataset = build_reid_train_loader(cfg).dataset
    sample = dataset[3]
    assert sample["images"].shape == (3, 32, 16) and sample["img_paths"] == dataset.items[3].path
    assert int(sample["targets"]) == dataset.labels[3]


def test_worker_count_is_limited_to_available_cores():
    assert worker_count("K", 0) == 0 and worker_count("K", 1) == 1
    assert 1 <= worker_count("K", 10_000) < 10_000


SIGNALLED = """
import multiprocessing, os, signal
from fastamp.utils.errors import DataError
from fastamp.config import get_cfg
from fastamp.data import build_reid_train_loader
cfg = get_cfg()
cfg.INPUT.SIZE_TRAIN, cfg.DATALOADER.NUM_WORKERS, cfg.SOLVER.IMS_PER_BATCH = (32, 16), 2, 8
signal.signal(signal.SIGTERM, lambda *_: None)
batches = iter(build_reid_train_loader(cfg))
next(batches), next(batches)  # one batch of each worker, so that both handle signals
workers = [process.pid for process in multiprocessing.active_children()]
os.system("kill -TERM %s; kill -INT %s; kill -USR1 %s" % ((" ".join(map(str, workers)),) * 3))
for _ in range(20):
    next(batches)
assert [process.pid for process in multiprocessing.active_children()] == workers
print(*workers, flush=True)
"""
KILLED = """
os.kill(workers[0], signal.SIGKILL)
try:
    while True: next(batches)
except DataError as error:
    print(error, flush=True)
    os._exit(0)
"""


@pytest.mark.integration
@pytest.mark.skipif(sys.platform != "linux", reason="needs sigwaitinfo to identify the sender of a signal")
def test_workers_ignore_external_signals_and_exit_with_the_main_process(market, tmp_path):
    """The main process exits without stopping the workers."""
    script = tmp_path / "signaled.py"
    script.write_text(SIGNALLED)
    run = preloaded.run(script)
    assert run.returncode == 0, run.stderr
    assert not any(is_alive(int(pid)) for pid in run.stdout.split())


@pytest.mark.integration
def test_killed_worker_raises_data_error(market, tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(SIGNALLED + KILLED)
    run = preloaded.run(script)
    assert run.returncode == 0 and "worker exited unexpectedly" in run.stdout, run.stderr
    assert "is killed by signal: Killed" in run.stdout, run.stdout


@pytest.mark.parametrize(
    "found, cause",
    [
        ("is killed by signal: Killed.", "out of memory"),
        ("is killed by signal: Bus error. It is possible that ...", "/dev/shm"),
        ("is killed by signal: Segmentation fault.", "crashed"),
    ],
)
def test_lost_worker_error_names_the_cause(found, cause):
    error = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
    error.__cause__ = RuntimeError(f"DataLoader worker (pid 7) {found} ")
    message = f"(?s)exited.*found: DataLoader worker .pid 7. {found}\n.*{cause}.*fix: "
    with pytest.raises(DataError, match=message), explain_lost_workers():
        raise error


def test_errors_unrelated_to_lost_workers_are_reraised():
    for error, fetching in ((RuntimeError("a bug"), True), (EOFError("Caught EOFError in"), True), (EOFError(), False)):
        with pytest.raises(type(error)), explain_lost_workers(fetching=fetching):
            raise error
    with pytest.raises(DataError, match="found: EOFError"), explain_lost_workers(fetching=True):
        raise EOFError


@pytest.mark.integration
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_exit_when_the_main_process_is_killed(market):
    code = SIGNALLED + "while True: next(batches)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        workers = [int(pid) for pid in run.stdout.readline().split()]
        os.kill(run.pid, signal.SIGKILL)
    assert len(workers) >= 1
    for _ in range(150):
        if not any(is_alive(pid) for pid in workers):
            return
        time.sleep(0.1)
    pytest.fail("a worker outlived the main process")


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_min_images_excludes_identities_with_fewer_training_images(market, cfg, write_image):
    for image in (4, 5):
        write_image(market / f"bounding_box_train/0007_c1s1_{image:06d}_00.jpg")
        write_image(market / f"bounding_box_train/1000_c1s1_{image:06d}_00.jpg")
    cfg.DATASETS.MIN_IMAGES = 5
    dataset = build_reid_train_loader(cfg).dataset
    assert np.bincount(dataset.labels).tolist() == [6, 6] and dataset.num_classes == 2
    assert {item.pid for item in dataset.items} == {"market1501_7", "market1501_1000"}
    cfg.DATASETS.MIN_IMAGES = 7
    with pytest.raises(DataError, match=r"DATASETS\.MIN_IMAGES"):
        build_reid_train_loader(cfg)
