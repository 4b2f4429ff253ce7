"""Training loaders for custom datasets: random numbers of the workers, and the order of each pass."""

import itertools
import os
import signal
import subprocess

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from fastamp.config import read_config
from fastamp.data.custom_loader import (
    CustomTrainLoader,
    as_train_loader,
    build_custom_test_loader,
    build_custom_train_loader,
)
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError

pytestmark = pytest.mark.integration


class Noise(Dataset):
    """Dataset whose images are random numbers."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"images": torch.rand(1), "targets": index, "added": ADDED[0], "pid": os.getpid()}


ADDED = [0.0]


def add(worker):
    ADDED[0] = 5.0


def first_images(*, seed=0, start=0):
    cfg = read_config("", ["SOLVER.IMS_PER_BATCH", "4", "DATALOADER.NUM_WORKERS", "1", "SEED", str(seed)])
    loader = build_custom_train_loader(cfg, Noise(), sampler=range(8))
    loader.start_at(start)
    return next(iter(loader))["images"].flatten().tolist()


def test_random_numbers_of_workers_depend_on_seed_rank_and_start(monkeypatch):
    reference = first_images()
    assert first_images() == reference
    assert first_images(seed=1) != reference
    assert first_images(start=1) != reference
    monkeypatch.setattr(comm, "get_rank", lambda: 1)
    assert first_images() != reference


@pytest.mark.parametrize("wrapped", [False, True])
def test_each_pass_over_a_distributed_sampler_has_another_order(wrapped):
    sampler = DistributedSampler(Noise(), num_replicas=1, rank=0, seed=3)
    if wrapped:
        loader = CustomTrainLoader.wrap(DataLoader(Noise(), batch_size=4, sampler=sampler), batch_size=4)
    else:
        cfg = read_config("", ["SOLVER.IMS_PER_BATCH", "4", "DATALOADER.NUM_WORKERS", "0"])
        loader = build_custom_train_loader(cfg, Noise(), sampler=sampler)
    expected = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        expected += list(sampler)
    for start in (0, 3):  # batches of 4 images
        loader.start_at(start)
        batches = itertools.islice(loader, 6 - start)
        assert [index for batch in batches for index in batch["targets"].tolist()] == expected[4 * start :]


def test_wrapped_loader_calls_worker_init_fn():
    loader = DataLoader(Noise(), batch_size=4, num_workers=1, worker_init_fn=add)
    assert next(iter(CustomTrainLoader.wrap(loader, batch_size=4)))["added"].tolist() == [5.0] * 4


def loader_for(kind):
    cfg = read_config("", [
        "SOLVER.IMS_PER_BATCH", "2", "DATALOADER.NUM_WORKERS", "1", "TEST.IMS_PER_BATCH", "1", "TEST.NUM_WORKERS",
        "1",
    ])  # fmt: skip
    if kind == "test":
        return build_custom_test_loader(cfg, Noise())[0]
    if kind == "train":
        return build_custom_train_loader(cfg, Noise(), sampler=range(8))
    return CustomTrainLoader.wrap(DataLoader(Noise(), batch_size=2, num_workers=1), batch_size=2)


@pytest.mark.parametrize("kind", ["train", "wrapped", "test"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_workers_survive_signals_that_stop_the_main_process_after_the_step(kind, number):
    batches = iter(loader_for(kind))
    worker = next(batches)["pid"][0].item()
    subprocess.run(["kill", f"-{number.value}", str(worker)], check=True)  # a worker exits on SIGTERM from its parent
    assert len(list(itertools.islice(batches, 5))) == 5


def test_iteration_over_test_loader_does_not_change_the_global_generator():
    before = torch.get_rng_state()
    assert len(list(loader_for("test"))) == 8
    assert torch.equal(torch.get_rng_state(), before)


def test_loader_that_delegates_to_another_one_trains():
    class Prefetched:
        def __init__(self, loader):
            self.loader = loader

        def __getattr__(self, name):
            return getattr(self.loader, name)

        def __iter__(self):
            return iter(self.loader)

    cfg = read_config("", ["SOLVER.IMS_PER_BATCH", "4"])
    loader = Prefetched(build_custom_train_loader(cfg, Noise(), sampler=range(8)))
    assert as_train_loader(loader, cfg) is loader and loader.dataset.labels is None


def test_training_loader_without_a_start_is_an_error():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([])

    class Loader:
        dataset, iters_per_epoch = Stream(), 2

    with pytest.raises(ConfigError, match="start_at"):
        as_train_loader(Loader(), read_config("", []))
