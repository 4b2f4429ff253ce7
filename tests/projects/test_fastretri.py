"""FastRetri: list files, Recall@k against FastReID's numbers, recipes, training, evaluation and bad input."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from project_recipes import check_equal_to_fastreid, files_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastamp.config import read_config
from fastamp.config.projects import import_project
from fastamp.data.build import build_dataset
from fastamp.engine import DefaultTrainer
from fastamp.modeling import build_model
from fastamp.utils.errors import ConfigError, DataError

METHODS = Path(__file__).parents[1] / "reference/methods"


@pytest.fixture(autouse=True)
def fastretri():
    import_project("FastRetri")


@pytest.fixture
def root(tmp_path, datasets_root):
    """Data root with FastReID's lists of the four datasets: 8 classes of 4 images, half of them for training."""
    folders = {"CUB_200_2011": "{}", "Cars_196": "{}", "Stanford_Online_Products": "shoe_{}", "InShop": "id_{:03}"}
    for folder, label in folders.items():
        lists = {"train.txt": [], "test.txt": [], "test_query.txt": [], "test_gallery.txt": []}
        for pid in range(8):
            for number in range(4):
                path = tmp_path / folder / f"images,{pid}/{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                color = (pid * 30, 255 - pid * 30, (pid % 4) * 60 + number)
                Image.new("RGB", (40 + number, 36), color).save(path)
                names = ["train.txt"] if pid < 4 else ["test.txt", f"test_{'query' if number < 2 else 'gallery'}.txt"]
                for name in names:
                    lists[name].append(f"{path.relative_to(tmp_path / folder)},{label.format(pid)}")
        expected = (
            ("train.txt", "test_query.txt", "test_gallery.txt") if folder == "InShop" else ("train.txt", "test.txt")
        )
        for name in expected:
            (tmp_path / folder / name).write_text("\n".join(lists[name]) + "\n")
    return tmp_path


def config(name, output_dir, *opts):
    return read_config("", tiny.tiny_options(
        output_dir, "PROJECTS", "[FastRetri]", "DATASETS.NAMES", name, "DATASETS.TESTS", name,
        "DATALOADER.SAMPLER_TRAIN", "TrainingSampler", "MODEL.LOSSES.NAME", "CrossEntropyLoss", "SOLVER.IMS_PER_BATCH",
        "8", "INPUT.SIZE_TRAIN", "[32, 32]", "INPUT.SIZE_TEST", "[32, 32]", "TEST.BOOTSTRAP", "0", *opts,
    ))  # fmt: skip


@pytest.mark.parametrize("name, prefix", [("CUB", "cub"), ("Cars196", "cars"), ("SOP", "sop"), ("InShop", "inshop")])
def test_list_files_of_fastreid(root, name, prefix):
    dataset = build_dataset(name)
    assert len(dataset.train) == 16 and len(dataset.query) + len(dataset.gallery) == 16
    assert len({item.pid for item in dataset.train}) == 4
    assert all(str(item.pid).startswith(f"{prefix}_") for item in dataset.train)
    query, gallery = dataset.test_items()
    assert len(query) == (8 if name == "InShop" else 4) and len({item.camid for item in (*query, *gallery)}) == 16
    folder_of = {}
    for item in (*query, *gallery):
        assert Path(item.path).is_file() and isinstance(item.pid, int)
        assert folder_of.setdefault(item.pid, Path(item.path).parent) == Path(item.path).parent
    assert len(folder_of) == 4


def test_own_files_of_a_dataset_are_preferred(root):
    folder = root / "Stanford_Online_Products"
    for split in ("train", "test"):
        rows = [f"{n} {n} 1 images,{n}/0.png" for n in range(2)]
        (folder / f"Ebay_{split}.txt").write_text("\n".join(["image_id class_id super_class_id path", *rows]))
    assert len(build_dataset("SOP").train) == 2


@pytest.mark.parametrize("line", ["images/1.png", "images/1.png,", ",3"])
def test_invalid_lines_are_errors(root, line):
    (root / "Cars_196/train.txt").write_text(f"{line}\n")
    with pytest.raises(DataError, match=r"Cars196.*'images/0001.jpg,17'.*train.txt"):
        build_dataset("Cars196").train  # noqa: B018
    (root / "Cars_196/train.txt").write_text("gone.png,1\n")
    with pytest.raises(DataError, match="gone.png"):
        build_dataset("Cars196").train  # noqa: B018
    (root / "Cars_196/test.txt").unlink()
    with pytest.raises(DataError, match=r"test.txt"):
        build_dataset("Cars196")


@pytest.mark.parametrize("protocol, file", [("market1501", "retri1"), ("recall_at_k_first_hit", "retri2")])
def test_recalls_equal_reference(root, tmp_path, protocol, file):
    from fastretri.retri_evaluator import RetriEvaluator

    data = np.load(METHODS / f"{file}.npz")
    expected = json.loads((METHODS / f"{file}_recall.json").read_text())
    features, labels = torch.from_numpy(data["features"]), torch.from_numpy(data["labels"])
    evaluator = RetriEvaluator(config("CUB", tmp_path / "run", "TEST.PROTOCOL", protocol), num_query=30)
    assert "Recall@32" in evaluator.metric_names()
    evaluator.process({"targets": labels, "camids": torch.zeros_like(labels)}, features)
    metrics = evaluator.evaluate()
    found = {rank: round(metrics[f"Recall@{rank}"], 2) for rank in expected["leave_one_out_cosine"]}
    assert found == expected["leave_one_out_cosine"] and metrics["metric"] == metrics["Recall@1"]
    if file == "retri1":
        gallery = [torch.from_numpy(data[name]) for name in ("gallery", "gallery_labels")]
        cfg = config("InShop", tmp_path / "run", "TEST.RECALLS", "[10, 20, 30, 40, 50]")
        evaluator = RetriEvaluator(cfg, num_query=len(labels))
        targets = torch.cat([labels, gallery[1]])
        evaluator.process({"targets": targets, "camids": torch.zeros_like(targets)}, torch.cat([features, gallery[0]]))
        metrics = evaluator.evaluate()
        found = {rank: round(metrics[f"Recall@{rank}"], 2) for rank in expected["query_gallery_cosine"]}
        assert found == expected["query_gallery_cosine"] and metrics["metric"] == metrics["Recall@10"]


@pytest.mark.integration
def test_training_resume_and_evaluation(root, tmp_path):
    run = tmp_path / "run"
    DefaultTrainer(config("CUB", run, "SOLVER.MAX_EPOCH", "1", "TEST.EVAL_PERIOD", "1")).train()
    trainer = DefaultTrainer(config("CUB", run))
    trainer.resume_or_load(resume=True)
    results = trainer.train()
    assert results["num_query"] == 16 and results["num_gallery"] == 15 and "Recall@32" in results
    weights = ("MODEL.WEIGHTS", str(run / "model_final.pth"))
    assert DefaultTrainer.test_weights(config("CUB", tmp_path / "eval", *weights)) == results
    found = DefaultTrainer.test_weights(config("InShop", tmp_path / "eval", *weights))
    assert (found["num_query"], found["num_gallery"]) == (8, 8)
    with pytest.raises(ConfigError, match="CUB recall_at_k, InShop recall_at_k_gallery"):
        DefaultTrainer.test_weights(config("[CUB, InShop]", tmp_path / "eval", *weights))


def test_evaluator_is_that_of_the_test_sets(root, tmp_path):
    from fastretri.retri_evaluator import RetriEvaluator

    from fastamp.engine.evaluation import build_evaluator
    from fastamp.evaluation import ReidEvaluator

    for name in RetriEvaluator.test_sets:
        cfg = config(name, tmp_path / "run")
        assert cfg.TEST.EVALUATOR == "auto" and type(build_evaluator(cfg, 4)) is RetriEvaluator, name
    for name in ("Market1501", "[CUB, Market1501]", f"csv:{tmp_path}/table.csv"):
        assert type(build_evaluator(config(name, tmp_path / "run"), 4)) is ReidEvaluator, name
    import_project("FastAttr")
    opts = ("PROJECTS", "[FastRetri, FastAttr]", "MODEL.META_ARCHITECTURE", "AttrBaseline", "DATASETS.TESTS", "PA100K")
    assert type(build_evaluator(config("PA100K", tmp_path / "run", *opts), 4)).__name__ == "AttrEvaluator"
    cfg = config("Market1501", tmp_path / "run", "TEST.EVALUATOR", "RetriEvaluator")
    assert type(build_evaluator(cfg, 4)) is RetriEvaluator


def largest_allocation(evaluate):
    """Return the bytes of the largest tensor, and the peak of the memory of NumPy and Python, in a call."""

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            output = function(*arguments, **(options or {}))
            tensors = [tree_leave for tree_leave in tree_leaves(output) if isinstance(tree_leave, torch.Tensor)]
            self.size = max([self.size, *(tensor.untyped_storage().nbytes() for tensor in tensors)])
            return output

    tracemalloc.start()
    try:
        with Largest() as largest:
            evaluate()
        return largest.size, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.integration
@pytest.mark.parametrize("protocol", ["market1501", "recall_at_k_first_hit"])
def test_memory_of_recalls_is_less_than_a_byte_per_pair(root, tmp_path, protocol):
    from fastretri.retri_evaluator import RetriEvaluator

    count = 6000
    labels = torch.arange(count) // 4
    features = torch.nn.functional.one_hot(labels % 37, 37) + torch.rand(count, 37)
    cfg = config("CUB", tmp_path / "run", "TEST.PROTOCOL", protocol)
    evaluator = RetriEvaluator(cfg, num_query=count // 4)
    evaluator.process({"targets": labels, "camids": torch.zeros_like(labels)}, features)
    assert max(largest_allocation(evaluator.evaluate)) < count * count
    assert largest_allocation(lambda: features @ features.T)[0] == 4 * count * count  # the check can fail


@pytest.mark.integration
def test_frozen_batch_norm_of_the_recipe_is_constant(root, tmp_path):
    options = (
        "MODEL.BACKBONE.DEPTH", "18x", "MODEL.BACKBONE.FEAT_DIM", "512", "MODEL.BACKBONE.PRETRAIN", "False",
        "MODEL.DEVICE", "cpu", "INPUT.SIZE_TRAIN", "[36]", "INPUT.SIZE_TEST", "[36]", "INPUT.CROP.SIZE", "[32]",
        "SOLVER.IMS_PER_BATCH", "8", "SOLVER.MAX_EPOCH", "1", "SOLVER.AMP.ENABLED", "False", "DATALOADER.NUM_WORKERS",
        "0", "OUTPUT_DIR", str(tmp_path / "run"),
    )  # fmt: skip
    trainer = DefaultTrainer(read_config("FastRetri/cub", options))
    backbone = trainer.model.backbone
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    assert not any("bn" in name or "downsample.1" in name for name, _ in backbone.named_parameters())
    trainer.train()
    for name, value in backbone.state_dict().items():
        frozen = "bn" in name or "downsample.1" in name
        assert torch.equal(value, before[name]) is frozen, name


def test_demo_has_each_image_once_and_no_distractors(demo):
    dataset = build_dataset("DemoRetri")
    items = [*dataset.query, *dataset.gallery]
    assert len({item.path for item in items}) == len(items) and min(item.pid for item in items) > 0
    assert len({item.camid for item in items}) == len(items) and len({item.pid for item in items}) == 4
    assert read_config("FastRetri/demo").DATASETS.TESTS == ("DemoRetri",)


@pytest.mark.parametrize("path", files_of("FastRetri"))
def test_recipe_equals_the_file_of_fastreid(path, tmp_path):
    check_equal_to_fastreid(path, tmp_path)


def test_further_recipes():
    cars, shop = read_config("FastRetri/cars"), read_config("FastRetri/inshop")
    assert (cars.MODEL.LOSSES.CE.EPSILON, cars.SOLVER.BASE_LR, cars.SOLVER.MOMENTUM) == (0.4, 0.05, 0.0)
    assert (cars.INPUT.CROP.RATIO, cars.SOLVER.MAX_EPOCH, cars.SOLVER.NESTEROV) == ((1.0, 1.0), 100, False)
    assert (shop.INPUT.SIZE_TRAIN, shop.INPUT.SIZE_TEST, shop.SOLVER.MOMENTUM) == ((0,), (0,), 0.99)
    for recipe in (cars, shop):
        cfg = recipe.with_values(
            {"MODEL.BACKBONE.PRETRAIN": False, "MODEL.HEADS.NUM_CLASSES": 3, "MODEL.DEVICE": "cpu"}
        )
        assert build_model(cfg).backbone.feature_dim == 2048
