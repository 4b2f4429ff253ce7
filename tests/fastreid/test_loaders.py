"""Datasets, loaders, checkpoints, evaluators and loggers in the style of FastReID."""

import importlib
import itertools
import logging
import os
import pickle

import pytest
import tiny
import torch
from torch import nn

from fastamp.data import datasets as core
from fastamp.data.rank_agreement import check_equal_on_all_ranks
from fastamp.fastreid.config import get_cfg
from fastamp.fastreid.data import CommDataset, build_reid_test_loader, build_reid_train_loader, datasets, samplers
from fastamp.fastreid.data.datasets import DATASET_REGISTRY
from fastamp.fastreid.data.datasets.bases import ImageDataset
from fastamp.fastreid.data.transforms import build_transforms
from fastamp.fastreid.evaluation import DatasetEvaluator, ReidEvaluator
from fastamp.fastreid.utils.checkpoint import Checkpointer
from fastamp.fastreid.utils.logger import setup_logger
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError


@pytest.fixture
def cfg(demo, tmp_path):
    config = get_cfg()
    config.merge_from_list(tiny.tiny_options(tmp_path / "run"))
    return config


def test_dataset_accepts_combineall_and_has_fastreids_methods(demo, caplog):
    usual = DATASET_REGISTRY.get("Demo")(root=str(demo), combineall=False)
    combined = DATASET_REGISTRY.get("Demo")(root=str(demo), combineall=True)
    people = [item for item in usual.gallery if item.pid > 0]
    assert len(combined.train) == len(usual.train) + len(usual.query) + len(people) and len(people) < len(usual.gallery)
    assert usual.get_num_pids(usual.train) == 16 and usual.get_num_cams(usual.train) == 3
    with caplog.at_level(logging.INFO):
        usual.show_train()
        usual.show_test()
    assert "train" in caplog.messages[0] and "gallery" in caplog.messages[1]


def test_combineall_of_the_loader_is_the_config_key(cfg):
    expected = len(build_reid_train_loader(cfg.with_values({"DATASETS.COMBINEALL": True})).dataset)
    assert len(build_reid_train_loader(cfg, combineall=True).dataset) == expected
    assert len(build_reid_train_loader(cfg, combineall=False).dataset) == 96


def test_dataset_of_a_loader_has_fastreids_attributes(cfg):
    dataset = build_reid_test_loader(cfg, "Demo")[0].dataset
    assert len(dataset.img_items) == 30 and dataset.img_items[0][0].endswith(".jpg") and dataset.num_cameras == 3


def test_loaders_with_explicit_arguments(cfg):
    dataset = DATASET_REGISTRY.get("Demo").from_config(cfg, root=os.environ["FASTAMP_DATASETS"])
    train = CommDataset(dataset.train, build_transforms(cfg, is_train=True))
    batch = next(iter(build_reid_train_loader(train, total_batch_size=12, num_workers=0)))
    assert batch["images"].shape == (12, 3, 64, 32)
    test = CommDataset([*dataset.query, *dataset.gallery], build_transforms(cfg, is_train=False), relabel=False)
    loader, num_query = build_reid_test_loader(test, test_batch_size=5, num_query=8, num_workers=0)
    assert num_query == 8 and next(iter(loader))["images"].shape == (5, 3, 64, 32)
    assert len(next(iter(build_reid_train_loader(cfg, total_batch_size=32)))["targets"]) == 32


def test_checkpointer_of_a_wrapped_model_writes_the_names_of_the_model(tmp_path):
    model, optimizer = nn.Linear(2, 1), torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    path = Checkpointer(nn.DataParallel(model), tmp_path, optimizer=optimizer).save("model_0001", epoch=3)
    other, own = nn.Linear(2, 1), torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    checkpointer = Checkpointer(nn.DataParallel(other), tmp_path, optimizer=own)
    assert checkpointer.get_checkpoint_file() == str(path)
    assert checkpointer.load(path, checkpointables=[])["epoch"] == 3 and own.param_groups[0]["lr"] == 0.1
    assert torch.equal(other.weight, model.weight)
    assert "optimizer" not in checkpointer.load(path, checkpointables=["optimizer"])
    assert own.param_groups[0]["lr"] == 0.5
    assert Checkpointer(other, tmp_path / "empty").get_checkpoint_file() == ""


class Appending(ReidEvaluator):
    """Evaluator whose ``process`` appends to ``_predictions``."""

    def process(self, inputs, outputs):
        self._predictions.append({"feats": outputs.cpu(), "pids": inputs["targets"], "camids": inputs["camids"]})


def test_evaluator_that_appends_predictions_has_the_usual_result():
    features = torch.randn(30, 4)
    batches = [
        {"targets": (torch.arange(30) % 5)[part], "camids": (torch.arange(30) % 2)[part], "features": features[part]}
        for part in (slice(0, 12), slice(12, 30))
    ]
    found = []
    for evaluator in (ReidEvaluator(get_cfg(), 10), Appending(get_cfg(), 10)):
        evaluator.reset()
        for batch in batches:
            evaluator.process(batch, batch["features"])
        for predictions in (evaluator._predictions, pickle.loads(pickle.dumps(evaluator._predictions))):
            assert torch.equal(torch.cat([prediction["feats"] for prediction in predictions]), features)
        found.append(evaluator.evaluate())
    assert found[0] == found[1] and found[0]["mAP"] > 0


def test_lines_of_fastreids_loggers_are_written(tmp_path):
    parents = {name: logging.getLogger(name).parent for name in ("fastreid", "my_project")}
    try:
        setup_logger(output=tmp_path, name="my_project", color=False)
        for name in ("fastreid.train", "my_project", "fastamp.mine"):
            logging.getLogger(name).info("line of %s", name)
        text = (tmp_path / "log.txt").read_text()
        assert all(f"line of {name}" in text for name in ("fastreid.train", "my_project", "fastamp.mine"))
    finally:
        setup_logger()
        for name, parent in parents.items():
            logging.getLogger(name).parent = parent


class Standalone(ReidEvaluator):
    """Evaluator whose constructor does not call that of its base class, as in PartialReID."""

    def __init__(self, cfg, num_query, output_dir=None):
        self.cfg = cfg
        self._num_query = num_query
        self._output_dir = output_dir
        self.scores = []

    def reset(self):
        self._predictions = []
        self.scores.clear()


def test_evaluator_whose_constructor_does_not_call_that_of_its_base_class():
    evaluator, features = Standalone(get_cfg(), 10, "folder"), torch.randn(30, 4)
    assert evaluator.protocol.metric == "cosine" and (evaluator.num_query, evaluator.output_dir) == (10, "folder")
    batch = {"targets": torch.arange(30) % 5, "camids": torch.arange(30) % 2}
    for _ in range(2):
        evaluator.reset()
        evaluator.process(batch, features)
        assert len(evaluator._predictions) == 1


def test_methods_of_evaluators_that_are_never_called_give_a_warning(recwarn):
    def method(self):
        pass

    for name in ("preprocess_inputs", "evaluates"):
        with pytest.warns(UserWarning, match=f"Mine.{name} .*"):
            type("Mine", (DatasetEvaluator,), {name: method})
    type("Mine", (ReidEvaluator,), {"process": method, "compute_recall": method, "_process": method})
    assert not recwarn


ITEMS = [(f"{number}.jpg", f"{'ab'[number % 2]}_{number % 6}", number % 3) for number in range(48)]


def test_samplers_take_fastreids_arguments(subtests, monkeypatch):
    built = {
        "naive": samplers.NaiveIdentitySampler(ITEMS, 8, 4, 3),
        "balanced": samplers.BalancedIdentitySampler(ITEMS, 8, 4, 3),
        "weighted": samplers.SetReWeightSampler(ITEMS, 8, 4, [1, 1], 3),
    }
    for name, sampler in built.items():
        with subtests.test(name):
            batch = list(itertools.islice(sampler, 8))
            pids = [ITEMS[index][1] for index in batch]
            assert pids[:4] == pids[:1] * 4 and pids[4:] == pids[4:5] * 4 and pids[0] != pids[4]
            if name == "weighted":
                assert {pid[0] for pid in pids} == {"a", "b"}
    drawn = list(itertools.islice(samplers.ImbalancedDatasetSampler(ITEMS[:3] + ITEMS[3:4] * 97), 400))
    assert 200 < sum(index < 3 for index in drawn) < 400
    assert list(itertools.islice(samplers.TrainingSampler(4, False), 6)) == [0, 1, 2, 3, 0, 1]
    assert sorted(itertools.islice(samplers.TrainingSampler(4), 4)) == [0, 1, 2, 3]
    assert list(samplers.InferenceSampler(5)) == [0, 1, 2, 3, 4]
    whole = list(itertools.islice(samplers.NaiveIdentitySampler(ITEMS, 16, 4, 3), 16))
    monkeypatch.setattr(comm, "get_world_size", lambda: 2)
    parts = []
    for rank in (0, 1):
        monkeypatch.setattr(comm, "get_rank", lambda rank=rank: rank)
        parts += itertools.islice(samplers.NaiveIdentitySampler(ITEMS, 8, 4, 3), 8)
        assert list(samplers.InferenceSampler(5)) == ([0, 1], [2, 3, 4])[rank]
    assert parts == whole


def test_sampler_of_fastreid_draws_the_batches_of_the_configured_datasets(cfg):
    dataset = build_reid_train_loader(cfg).dataset
    sampler = samplers.NaiveIdentitySampler(dataset.img_items, 16, 4, 0)
    loader = build_reid_train_loader(cfg, sampler=sampler)
    targets = next(iter(loader))["targets"]
    assert len(targets) == 16 and targets.view(4, 4).unique(dim=1).shape == (4, 1)


def test_dataset_of_items_without_identities_is_loaded_at_random(cfg):
    class Attributes(CommDataset):
        def __init__(self, img_items):
            self.img_items = img_items

        num_classes = 3

        def __getitem__(self, index):
            return {"images": torch.zeros(3, 8, 4), "targets": torch.tensor(self.img_items[index][1])}

    dataset = Attributes([("a.jpg", [0.0, 1.0, 0.0])] * 20)
    random, identities = (
        cfg.with_values({"DATALOADER.SAMPLER_TRAIN": name}) for name in ("TrainingSampler", "NaiveIdentitySampler")
    )
    loader = build_reid_train_loader(random, train_set=dataset)
    assert next(iter(loader))["targets"].shape == (16, 3)
    check_equal_on_all_ranks(loader.dataset, "the training set")
    with pytest.raises(ConfigError, match="NaiveIdentitySampler"):
        build_reid_train_loader(identities, train_set=dataset)


def test_built_in_datasets_have_fastreids_methods_in_each_module(subtests):
    names = {"market1501": "Market1501", "iLIDS": "iLIDS", "AirportALERT": "AirportALERT", "caviara": "CAVIARa"}
    for module, name in names.items():
        with subtests.test(module):
            found = getattr(importlib.import_module(f"fastamp.fastreid.data.datasets.{module}"), name)
            assert found is DATASET_REGISTRY.get(name) is getattr(datasets, name)
            assert issubclass(found, core.DATASET_REGISTRY.get(name)) and found.combine_all and found.show_train


def test_combine_all_excludes_junk_identities_only():
    class Mine(ImageDataset):
        _junk_pids = (-1,)

    for cls, expected in ((Mine, ["a", "Unknown_test_0", "Unknown_test_0"]), (ImageDataset, 4)):
        dataset = cls([("a.jpg", "a", 0)], [("b.jpg", 0, 0)], [("c.jpg", 0, 1), ("d.jpg", -1, 0)], combineall=True)
        pids = [item.pid for item in dataset.train]
        assert (pids if isinstance(expected, list) else len(pids)) == expected


def test_splits_of_a_dataset_are_assigned():
    class Half(ImageDataset):
        def __init__(self):
            self.train = [("a.jpg", 0, 0), ("b.jpg", 1, 0)]
            super().__init__(self.train, [], [])
            self.train = self.train[:1]

    assert [tuple(item[:3]) for item in Half().train] == [("a.jpg", 0, 0)]
