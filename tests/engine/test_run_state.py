"""The trainer sets the number of images of each class in the classification layer."""

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import tiny_config

from fastamp.cli.source import config_of, evaluation_config
from fastamp.config import describe_changes
from fastamp.data.build import with_absolute_paths
from fastamp.engine import DefaultTrainer
from fastamp.report.verdict import previous_run

OPTIONS = ["MODEL.HEADS.CLS_LAYER", "SubCenterArcSoftmax", "MODEL.HEADS.MARGIN", "0.5", "MODEL.HEADS.SCALE", "30"]


def test_trainer_sets_margins_by_the_training_images_of_each_class(demo, tmp_path):
    images = ["DATASETS.NAMES", f"('csv:{tmp_path}/a.csv',)"]
    source = DefaultTrainer.build_train_loader(tiny_config(tmp_path)).dataset
    rows = [row for row in range(len(source)) if source.labels[row] or row % 3]  # class 0 has fewer images
    lines = [f"{source.items.path(row)},{source.labels[row]},train" for row in rows]
    (tmp_path / "a.csv").write_text("\n".join(["path,pid,split", *lines]))
    trainer = DefaultTrainer(tiny_config(tmp_path / "run", *OPTIONS, *images))
    layer, counts = trainer.model.heads.cls_layer, np.bincount(trainer.data_loader.dataset.labels)
    assert trainer.model.heads.weight.shape[0] == 2 * len(counts)
    assert len(set(counts.tolist())) > 1
    rarity = torch.tensor(counts).double().pow(-0.25)
    expected = 0.2 + 0.3 * (rarity - rarity.min()) / (rarity.max() - rarity.min())
    assert layer.margins.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert "heads.cls_layer.margins" in trainer.model.state_dict()


def test_weights_with_margins_load_into_a_model_without_classes(demo, tmp_path):
    trainer = DefaultTrainer(tiny_config(tmp_path / "run", *OPTIONS))
    path = trainer.checkpointer.save("a")
    cfg = tiny_config(tmp_path / "other", *OPTIONS, "MODEL.WEIGHTS", str(path))
    assert DefaultTrainer.test_weights(cfg)["mAP"] > 0


@pytest.fixture
def own_data(tmp_path, monkeypatch):
    """CSV file in the current folder, which the returned function leaves."""
    lines = ["path,pid,camid,split"]
    for number in range(24):
        split = "train" if number < 16 else ("query", "gallery")[number % 2]
        Image.new("RGB", (32, 64), (10 * number, 0, 0)).save(tmp_path / f"{number}.jpg")
        lines.append(f"{number}.jpg,{number // 4},{number % 2},{split}")
    (tmp_path / "mine.csv").write_text("\n".join(lines))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    return lambda: monkeypatch.chdir(tmp_path / "elsewhere")


def test_saved_config_is_evaluated_from_another_folder(own_data, tmp_path, caplog):
    names = [
        "DATASETS.NAMES",
        "csv:mine.csv",
        "DATASETS.TESTS",
        "csv:mine.csv",
        "SOLVER.BEST_METRIC",
        "csv:mine.csv/mAP",
    ]
    cfg = tiny_config(tmp_path / "run", *names)
    trainer = DefaultTrainer(cfg)
    found = trainer.train()["mAP"]
    trainer = DefaultTrainer(cfg)
    caplog.clear()
    trainer.resume_or_load(resume=True)  # with the names as typed
    assert not [line for line in caplog.messages if "config differs" in line]
    own_data()
    saved, (evaluated, _) = config_of(tmp_path / "run"), evaluation_config("", [], source=str(tmp_path / "run"))
    mine = f"csv:{tmp_path}/mine.csv"
    for each in (saved, evaluated):
        found_names = (each.DATASETS.NAMES, each.DATASETS.TESTS, each.SOLVER.BEST_METRIC)
        assert found_names == ((mine,), (mine,), f"{mine}/mAP")
    assert DefaultTrainer.test_weights(evaluated)["mAP"] == pytest.approx(found)


def test_only_paths_of_datasets_that_exist_become_absolute(own_data, tmp_path):
    names = ("Demo", "csv:mine.csv", "csv:none.csv", f"csv:{tmp_path}/mine.csv", "folder:elsewhere")
    cfg = tiny_config(tmp_path / "run").with_values({"DATASETS.TESTS": names})
    found = with_absolute_paths(cfg)
    mine = f"csv:{tmp_path}/mine.csv"
    assert list(found.DATASETS.TESTS) == ["Demo", mine, "csv:none.csv", mine, f"folder:{tmp_path}/elsewhere"]
    assert [line.split(":")[0] for line in describe_changes(found, cfg.dump(), "before")] == ["DATASETS.TESTS"]
    assert with_absolute_paths(found).dump() == found.dump()


def test_previous_run_is_found_by_the_typed_and_by_the_absolute_name(own_data, tmp_path):
    cfg = tiny_config(tmp_path / "runs/b")
    (tmp_path / "runs/a").mkdir(parents=True)
    (tmp_path / "runs/a/config.yaml").write_text(cfg.dump())
    (tmp_path / "runs/a/metrics.json").write_text('{"iteration": 1, "csv:mine.csv/mAP": 50.0}\n')
    for name in ("csv:mine.csv", f"csv:{tmp_path}/mine.csv"):
        assert previous_run(cfg, name).mean_ap == 50
    assert previous_run(cfg, "csv:other.csv") is None
