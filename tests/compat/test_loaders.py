"""Datasets, loaders, checkpoints, evaluators and loggers in the style of FastReID."""

import logging
import os

import pytest
import tiny
import torch
from torch import nn

from fastamp.fastreid.config import get_cfg
from fastamp.fastreid.data import CommDataset, build_reid_test_loader, build_reid_train_loader
from fastamp.fastreid.data.datasets import DATASET_REGISTRY
from fastamp.fastreid.data.transforms import build_transforms
from fastamp.fastreid.evaluation import ReidEvaluator
from fastamp.fastreid.utils.checkpoint import Checkpointer
from fastamp.fastreid.utils.logger import setup_logger


@pytest.fixture
def cfg(demo, tmp_path):
    config = get_cfg()
    config.merge_from_list(tiny.tiny_options(tmp_path / "run"))
    return config


def test_dataset_accepts_combineall_and_has_fastreids_methods(demo, caplog):
    usual = DATASET_REGISTRY.get("Demo")(root=str(demo), combineall=False)
    combined = DATASET_REGISTRY.get("Demo")(root=str(demo), combineall=True)
    assert len(combined.train) == len(usual.train) + len(usual.query) + len(usual.gallery)
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
        assert torch.equal(torch.cat([prediction["feats"] for prediction in evaluator._predictions]), features)
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
