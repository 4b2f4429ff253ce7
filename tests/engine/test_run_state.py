"""The trainer sets the number of images of each class; a saved config is used from other folders."""

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from tiny import tiny_config

from fastamp.cli.source import config_of, evaluation_config
from fastamp.config import get_cfg, read_config
from fastamp.data.build import build_dataset
from fastamp.engine import DefaultTrainer
from fastamp.inference.package import License, package
from fastamp.inference.predictor import Predictor
from fastamp.utils.errors import ConfigError, DataError

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
def started_in(tmp_path, monkeypatch):
    """Folder with a CSV file and a folder of identities, in which a run with relative paths was started."""
    monkeypatch.delenv("FASTAMP_DATASETS", raising=False)
    folder = tmp_path / "started"
    lines = ["path,pid,camid,split"]
    for number in range(24):
        split = "train" if number < 16 else ("query", "gallery")[number % 2]
        for file in (folder / f"{number}.jpg", folder / f"people/{number // 4}/{number}.jpg"):
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 64), (10 * number, 0, 0)).save(file)
        lines.append(f"{number}.jpg,{number // 4},{number % 2},{split}")
    (folder / "mine.csv").write_text("\n".join(lines))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def saved_run(started_in, tmp_path, monkeypatch):
    """Run folder of a training with relative paths, seen from another folder."""
    names = ["DATASETS.NAMES", "csv:mine.csv", "DATASETS.TESTS", "('csv:mine.csv', 'folder:people')"]
    DefaultTrainer(tiny_config(tmp_path / "run", *names)).train()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "run"


@pytest.mark.integration
def test_saved_relative_paths_hold_in_the_folder_of_the_run(saved_run, started_in, tmp_path, caplog):
    run, names = str(saved_run), ("csv:mine.csv", "folder:people")
    saved = yaml.safe_load((saved_run / "config.yaml").read_text())
    assert saved["fastamp_format"] == 1 and saved["fastamp_folders"] == [str(started_in)]
    evaluated, by_file = evaluation_config("", [], source=run)[0], read_config(f"{run}/config.yaml")
    for cfg in (config_of(run), evaluated, by_file, Predictor(f"{run}/model_final.pth", device="cpu").cfg):
        assert tuple(cfg.DATASETS.TESTS) == names and cfg.saved_in() == (str(started_in),)
        caplog.clear()
        assert [build_dataset(name, cfg).dataset_name for name in names] == list(names)
        for name, path in zip(names, ("mine.csv", "people"), strict=True):
            assert any(name in line and str(started_in / path) in line for line in caplog.messages)
    assert DefaultTrainer.test_weights(evaluated).keys() == set(names)
    (tmp_path / "elsewhere/mine.csv").write_text(f"path,pid\n{started_in}/0.jpg,1\n")
    assert len(build_dataset(names[0], by_file).train) == 1  # the current folder is first
    (started_in / "people").rename(started_in / "others")
    with pytest.raises(DataError) as caught:
        build_dataset(names[1], by_file)
    assert all(f"{folder}/people" in str(caught.value) for folder in (tmp_path / "elsewhere", started_in))


@pytest.mark.integration
def test_resumed_run_keeps_the_folders_of_its_starts(saved_run, started_in, tmp_path, caplog):
    trainer = DefaultTrainer(config_of(saved_run).with_values({"SOLVER.MAX_EPOCH": 5}))
    trainer.resume_or_load(resume=True)
    assert [line for line in caplog.messages if "config differs" in line and "MAX_EPOCH" not in line] == []
    trainer.train()
    assert config_of(saved_run).saved_in() == (str(tmp_path / "elsewhere"), str(started_in))


@pytest.mark.integration
def test_folders_of_a_run_are_not_in_a_packaged_model(saved_run, started_in, tmp_path):
    package(saved_run, tmp_path / "packaged", license=License(name="mit"))
    for file in (tmp_path / "packaged").iterdir():
        assert str(started_in).encode() not in file.read_bytes()


def test_saved_config_of_a_later_format_is_refused(tmp_path):
    for line, named in (
        ("fastamp_format: 2", "'2'"),
        ("fastamp_folders: 3", "fastamp_folders"),
        ("fastamp_folders: [3]", "fastamp_folders"),
    ):
        (tmp_path / "config.yaml").write_text(f"{line}\n{get_cfg().dump()}")
        with pytest.raises(ConfigError, match=named):
            read_config(str(tmp_path / "config.yaml"))
        with pytest.raises(ConfigError):
            get_cfg().merge_saved(line)
