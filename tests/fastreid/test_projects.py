"""Code in the style of FastReID's projects: own loaders, datasets, checkpoints and config keys."""

import logging
from collections import OrderedDict

import pytest
import tiny
import torch
from PIL import Image

from fastamp.fastreid.config import CfgNode, get_cfg
from fastamp.fastreid.data import CommDataset, build_reid_test_loader, build_reid_train_loader
from fastamp.fastreid.data.datasets import DATASET_REGISTRY
from fastamp.fastreid.data.datasets.bases import ImageDataset
from fastamp.fastreid.data.transforms import ToTensor, build_transforms
from fastamp.fastreid.engine import DefaultTrainer
from fastamp.fastreid.evaluation import DatasetEvaluator, print_csv_format
from fastamp.fastreid.evaluation.testing import flatten_results_dict
from fastamp.fastreid.utils.checkpoint import Checkpointer, PeriodicCheckpointer
from fastamp.utils.errors import ConfigError, DataError


@pytest.fixture
def cfg(demo, tmp_path):
    config = get_cfg()
    config.merge_from_list(tiny.tiny_options(tmp_path / "run", "SOLVER.MAX_EPOCH", "1", "TEST.EVAL_PERIOD", "1"))
    return config


@pytest.fixture
def shop(tmp_path):
    """Register a dataset with string identities and without gallery images; remove it after the test."""
    for pid in range(4):
        for number in range(8):
            Image.new("RGB", (32, 64), (pid * 60, 200 - pid * 40, number)).save(tmp_path / f"{pid}_{number}.png")
    items = [(str(tmp_path / f"{pid}_{n}.png"), f"shirt{pid}", "0") for pid in range(4) for n in range(8)]

    class Shop(ImageDataset):
        dataset_name = "shop"

        def __init__(self, root="datasets", per_class=8, **kwargs):
            train = [item for index, item in enumerate(items) if index % 8 < per_class]
            super().__init__(train, items, [], **kwargs)

    DATASET_REGISTRY.register()(Shop)
    yield "Shop"
    DATASET_REGISTRY._components.pop("Shop")


class Recall(DatasetEvaluator):
    """Recall at 1 of each query among the other queries."""

    def __init__(self, cfg, num_query, output_dir=None):
        self.num_query = num_query

    def reset(self):
        self.features, self.labels = [], []

    def process(self, inputs, outputs):
        self.features.append(outputs.cpu())
        self.labels.extend(inputs["targets"])

    def evaluate(self):
        features = torch.nn.functional.normalize(torch.cat(self.features))
        labels = torch.tensor([int(label) for label in self.labels])
        similarity = (features @ features.T).fill_diagonal_(-2)
        recall = 100 * (labels[similarity.argmax(1)] == labels).float().mean().item()
        return OrderedDict({"Recall@1": recall, "metric": recall})


class RecallTrainer(DefaultTrainer):
    @classmethod
    def build_evaluator(cls, cfg, dataset_name, output_dir=None):
        loader, num_query = cls.build_test_loader(cfg, dataset_name)
        return loader, Recall(cfg, num_query, output_dir)


@pytest.mark.integration
def test_test_set_with_string_identities_and_without_gallery_is_evaluated_by_own_evaluator(cfg, shop):
    cfg.DATASETS.NAMES = cfg.DATASETS.TESTS = (shop,)
    loader, num_query = build_reid_test_loader(cfg, shop)
    labels = torch.cat([batch["targets"] for batch in loader])
    assert num_query == 32 and labels.tolist() == [pid for pid in (1, 2, 3, 4) for _ in range(8)]
    assert RecallTrainer(cfg).train()["Recall@1"] == 100.0


def test_missing_gallery_is_an_early_error_with_the_default_evaluator(cfg, shop):
    cfg.DATASETS.TESTS = (shop,)
    with pytest.raises(DataError, match="Shop.*gallery"):
        DefaultTrainer(cfg)


def test_leave_one_out_protocol_needs_no_gallery(cfg, shop):
    cfg.DATASETS.NAMES = cfg.DATASETS.TESTS = (shop,)
    cfg.TEST.PROTOCOL = "recall_at_k"
    results = DefaultTrainer.test(cfg, DefaultTrainer(cfg).model)
    assert 0 < results["Recall@1"] <= 100


def test_identity_strings_of_query_and_gallery_have_common_numbers(tmp_path):
    dataset = ImageDataset([], [("a", "x", "c1"), ("b", "y", "c2")], [("c", "y", "c1"), ("d", "0", "c1")])
    query, gallery = dataset.test_items()
    assert [item.pid for item in query] == [2, 3] and [item.pid for item in gallery] == [3, 1]
    assert [item.camid for item in query] == [1, 2] and [item.camid for item in gallery] == [1, 1]
    assert [item.pid for item in dataset.query] == ["x", "y"]


def test_loaders_with_own_transforms_load_the_configured_datasets(cfg):
    usual, num_query = build_reid_test_loader(cfg, "Demo")
    loader, count = build_reid_test_loader(cfg, "Demo", transforms=build_transforms(cfg, is_train=False))
    assert count == num_query
    expected = {name: torch.cat([batch[name] for batch in usual]) for name in ("images", "targets", "camids")}
    found = {name: torch.cat([batch[name] for batch in loader]) for name in expected}
    assert all(torch.equal(found[name], expected[name].to(found[name].dtype)) for name in expected)
    train = build_reid_train_loader(cfg, transforms=lambda image: ToTensor()(image.resize((8, 16))))
    batch = next(iter(train))
    assert batch["images"].shape == (16, 3, 16, 8) and train.dataset.num_classes == 16
    assert train.dataset.num_classes == build_reid_train_loader(cfg).dataset.num_classes


def test_further_arguments_are_passed_to_the_datasets(cfg, shop):
    cfg.DATASETS.NAMES = (shop,)
    assert len(build_reid_train_loader(cfg, per_class=5).dataset) == 20
    with pytest.raises(TypeError, match="smapler"):
        build_reid_train_loader(cfg.with_values({"DATASETS.NAMES": ("Demo",)}), smapler=None)


def test_comm_dataset_crops_boxes(tmp_path):
    path = tmp_path / "x.png"
    Image.new("RGB", (40, 30)).save(path)
    dataset = CommDataset([(str(path), 1, 1, 0, (10, 5, 30, 25))], None)
    assert dataset[0]["images"].size == (20, 20)


def test_print_csv_format_prints_the_metrics_of_one_dataset(caplog):
    results = OrderedDict({"mAP": 50.0, "Rank-1": 25.0, "dataset": "Shop"})
    with caplog.at_level(logging.INFO):
        print_csv_format(results)
    rows = caplog.messages[-1].splitlines()
    assert rows[1].split() == ["|", "dataset", "|", "mAP", "|", "Rank-1", "|"]
    assert rows[3].split() == ["|", "Shop", "|", "50.00", "|", "25.00", "|"]
    assert flatten_results_dict(results) == {"mAP": 50.0, "Rank-1": 25.0}


@pytest.mark.parametrize("as_dict", [False, True])
def test_loop_checkpointer_saves_the_best_metric(tmp_path, as_dict):
    model = torch.nn.Linear(1, 1)
    periodic = PeriodicCheckpointer(Checkpointer(model, str(tmp_path)), 2, 3)
    for epoch, score in enumerate((1.0, 3.0, 2.0)):
        torch.nn.init.constant_(model.bias, score)
        metrics = {"metric": score}
        periodic.step(epoch, **({"metric_dict": metrics} if as_dict else metrics))
    best = torch.load(tmp_path / "model_best.pth", weights_only=True)
    assert best["model"]["bias"].item() == 3.0 and best["epoch"] == 1


def test_assignment_declares_the_keys_of_a_project(tmp_path):
    cfg = get_cfg()
    with pytest.warns(UserWarning, match=r"cfg.define\('INPUT.CROP_SIZE', 224, 'its meaning'\)") as caught:
        cfg.INPUT.CROP_SIZE = 224
        cfg.TEST.RECALLS = [1, 2]
        cfg.MODEL.TEACHER = CfgNode({"ENABLED": False})
        cfg.MODEL.TEACHER.DEPTH = "50x"
    assert len(caught) == 2 and caught[0].filename == __file__
    (tmp_path / "mine.yml").write_text("INPUT: {CROP_SIZE: 96}\nTEST: {RECALLS: [4]}\nMODEL: {TEACHER: {DEPTH: 18x}}\n")
    cfg.merge_from_file(str(tmp_path / "mine.yml"))
    assert (cfg.INPUT.CROP_SIZE, cfg.TEST.RECALLS, cfg.MODEL.TEACHER.DEPTH) == (96, [4], "18x")
    cfg.merge_from_list(["INPUT.CROP_SIZE", "8"])
    assert cfg.clone().INPUT.CROP_SIZE == 8
    with pytest.raises(ConfigError, match="INPUT.CROP_SIZE"):
        cfg.merge_from_list(["INPUT.CROP_SIZE", "many"])


@pytest.mark.parametrize("name", ["SOLVER.BASE_LRR", "SOLVER.MAX_EPOCHS", "SOLVER.MAX_ITER", "MODEL.WEIGHT"])
def test_misspelled_or_old_key_in_an_assignment_is_an_error(name):
    section, key = name.split(".")
    with pytest.raises(ConfigError, match=name):
        setattr(get_cfg()[section], key, 1)


def test_unknown_key_of_a_file_or_command_line_is_an_error():
    with pytest.raises(ConfigError) as found:
        get_cfg().merge_from_list(["INPUT.CROP_WIDTH", "1"])
    assert "cfg.define" not in str(found.value)
