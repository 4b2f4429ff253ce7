"""NAIC20: list files, long tail, exchanged channels, submissions, pairwise CosFace, recipes, training and bad input."""

import json
import subprocess
import sys
from pathlib import Path

import ensemble
import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from project_recipes import check_equal_to_fastreid, files_of

from fastamp.cli import main
from fastamp.config import read_config
from fastamp.config.projects import import_project
from fastamp.data.build import build_dataset
from fastamp.engine import DefaultTrainer
from fastamp.modeling.losses import pairwise_cosface
from fastamp.utils.errors import DataError

ROOT = Path(__file__).parents[2]
METHODS = ROOT / "tests/reference/methods"


@pytest.fixture(autouse=True)
def naic20():
    import_project("NAIC20")


@pytest.fixture
def root(tmp_path, datasets_root):
    """Data root with the lists of both years: identities 3, 17 and x with 3, 2 and 1 training images."""
    train = [("a.png", "3"), ("b.png", "3"), ("c d.png", "3"), ("e.png", "17"), ("f.png", "17"), ("g.png", "x")]
    test = [("h.png", "20"), ("i.png", "21")], [("j.png", "20"), ("k.png", "21"), ("l.png", "20")]

    def write(folder, pairs, name, separator, images):
        (tmp_path / folder / images).mkdir(parents=True, exist_ok=True)
        for number, (image, _) in enumerate(pairs):
            Image.new("RGB", (16, 32), (200, 100 + number, 0)).save(tmp_path / folder / images / image)
        prefix = "" if separator == ":" else f"{images}/"
        lines = "".join(f"{prefix}{image}{separator}{identity}\n" for image, identity in pairs)
        (tmp_path / folder / name).write_text(lines)

    write("naic/2020_NAIC/fusai/train", train, "naic20r2_train_list_clean.txt", ":", "images")
    write("naic/2020_NAIC/chusai/train", train, "label.txt", ":", "images")
    write("naic/2020_NAIC/fusai/train", test[0], "val_query.txt", ":", "images")
    write("naic/2020_NAIC/fusai/train", test[1], "val_gallery.txt", ":", "images")
    write("naic/2019_NAIC/fusai", train, "train_list_clean.txt", " ", "train")
    write("naic/round2/image_A", test[0], "unused.txt", ":", "query")
    write("naic/round2/image_A", test[1], "unused.txt", ":", "gallery")
    return tmp_path


def run(script, *arguments):
    command = [sys.executable, str(ROOT / "projects/NAIC20" / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def load(name, *opts):
    return build_dataset(name, read_config("", ["PROJECTS", "[NAIC20]", *opts]))


@pytest.mark.parametrize("name", ["NAIC20_R2", "NAIC20_R1", "NAIC19"])
def test_lists_give_names_identities_and_splits_without_the_long_tail(root, name):
    data = load(name)
    prefix = name.lower()
    assert [item.pid for item in data.train] == [f"{prefix}_3"] * 3 + [f"{prefix}_17"] * 2
    assert all(Path(item.path).is_file() for item in data.train)
    whole = load(name, "DATASETS.RM_LT", "False")
    assert whole.train[-1].pid == f"{prefix}_x" and len(whole.train) == 6
    if name == "NAIC20_R2":
        assert [(item.pid, item.camid) for item in data.query] == [(20, 0), (21, 0)]
        assert [(item.pid, item.camid) for item in data.gallery] == [(20, 1), (21, 1), (20, 1)]
        assert data.camera(1) == "gallery"


@pytest.mark.integration
@pytest.mark.parametrize("name, part", [("NAIC20_R1", "chusai"), ("NAIC20_R2", "fusai")])
def test_images_with_exchanged_channels_are_further_identities(root, name, part):
    folder = root / f"naic/2020_NAIC/{part}/train"
    result = run("shuffle_channels.py", folder)
    assert result.returncode == 0 and "wrote 6 images" in result.stdout, result.stderr
    data, original = load(f"{name}CNV"), load(name)
    assert len(data.train) == len(original.train) and not {i.pid for i in data.train} & {i.pid for i in original.train}
    orders = {}
    for item, before in zip(data.train, original.train, strict=True):
        first, second = (np.asarray(Image.open(image.path))[0, 0].tolist() for image in (before, item))
        assert sorted(first) == sorted(second) and first != second
        orders.setdefault(item.pid, set()).add(tuple(first.index(value) for value in second))
    assert all(len(found) == 1 for found in orders.values())
    again = run("shuffle_channels.py", folder)
    assert again.returncode == 2 and "exists" in again.stderr and "fix:" in again.stderr
    negative = run("shuffle_channels.py", "--seed", "-1", folder)
    assert negative.returncode == 2 and "--seed" in negative.stderr and "-1" in negative.stderr


@pytest.mark.parametrize("margin, gamma", [(0.35, 64), (0.25, 128)])
def test_pairwise_cosface_equals_fastreid(margin, gamma):
    reference = np.load(METHODS / "pairwise1.npz")
    features = torch.from_numpy(reference["features"]).requires_grad_()
    loss = pairwise_cosface(features, torch.from_numpy(reference["targets"]), margin, gamma)
    loss.backward()
    name = f"cosface_m{margin}_g{gamma}"
    assert loss.item() == pytest.approx(reference[f"loss_{name}"].item(), rel=1e-6)
    gradient = reference[f"grad_{name}"]
    np.testing.assert_allclose(features.grad, gradient, rtol=0, atol=1e-6 * np.abs(gradient).max())


@pytest.mark.integration
def test_submission_has_the_nearest_names_of_each_query(tmp_path):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(9, 4)).astype(np.float32)
    paths = np.array([f"query/{n}.png" for n in range(3)] + [f"gallery/{n}.png" for n in range(6)])
    columns = {
        "features": features, "paths": paths, "pids": np.zeros(9, int), "camids": np.zeros(9, int),
        "split": np.array(["query"] * 3 + ["gallery"] * 6), "config_hash": np.array("0"), "checkpoint": np.array("x"),
        "metric": np.array("cosine"),
    }  # fmt: skip
    np.savez(tmp_path / "a.npz", **columns)
    result = run("submit.py", "-o", tmp_path / "s.json", "--count", 4, tmp_path / "a.npz", "MODEL.DEVICE", "cpu")
    assert result.returncode == 0, result.stderr
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    expected = {f"{q}.png": [f"{g}.png" for g in np.argsort(-unit[3:] @ unit[q])[:4]] for q in range(3)}
    assert json.loads((tmp_path / "s.json").read_text()) == expected
    options = ["TEST.RERANK", "{ENABLED: True, K1: 3, K2: 2}", "MODEL.DEVICE", "cpu"]
    result = run("submit.py", "-o", tmp_path / "r.json", "--count", 4, tmp_path / "a.npz", *options)
    assert result.returncode == 0, result.stderr
    assert {len(names) for names in json.loads((tmp_path / "r.json").read_text()).values()} == {4}
    for key, value in (("TEST.PROTOCOL", "no_camera"), ("SOLVER.BASE_LR", "1"), ("TEST.FLIP.ENABLED", "True")):
        result = run("submit.py", "-o", tmp_path / "t.json", tmp_path / "a.npz", key, value)
        assert result.returncode == 2 and f"{key} has no effect" in result.stderr and not (tmp_path / "t.json").exists()


@pytest.mark.integration
def test_submission_refuses_features_without_queries_and_repeated_names(tmp_path):
    columns = {
        "features": np.eye(3, dtype=np.float32), "paths": np.array(["a/1.png", "b/1.png", "2.png"]),
        "pids": np.zeros(3, dtype=np.int64), "camids": np.zeros(3, dtype=np.int64), "config_hash": np.array("0"),
        "checkpoint": np.array("x"), "metric": np.array("cosine"),
    }  # fmt: skip
    np.savez(tmp_path / "a.npz", **columns)
    result = run("submit.py", "-o", tmp_path / "s.json", tmp_path / "a.npz")
    assert result.returncode == 2 and "no query images" in result.stderr and "Traceback" not in result.stderr
    np.savez(tmp_path / "b.npz", **columns, split=np.array(["query", "query", "gallery"]))
    result = run("submit.py", "-o", tmp_path / "s.json", tmp_path / "b.npz")
    assert result.returncode == 2 and "named 1.png" in result.stderr
    assert not (tmp_path / "s.json").exists()


@pytest.mark.parametrize(
    "content, message",
    [("a.png 3\n", "expected lines like 0001.png:17"), ("", "is empty"), ("missing.png:3\nb.png:3\n", "not found")],
)
def test_damaged_lists_are_named(root, content, message):
    (root / "naic/2020_NAIC/chusai/train/label.txt").write_text(content)
    with pytest.raises(DataError, match=message):
        load("NAIC20_R1").train  # noqa: B018


def test_long_tail_without_other_identities_is_an_error(root):
    (root / "naic/2020_NAIC/chusai/train/label.txt").write_text("a.png:3\nb.png:4\n")
    with pytest.raises(DataError, match=r"\b2 training[\s\S]*DATASETS.RM_LT False"):
        load("NAIC20_R1").train  # noqa: B018


def test_missing_folder_lists_the_expected_files(tmp_path, datasets_root):
    with pytest.raises(DataError, match=r"label\.txt[\s\S]*fix:"):
        load("NAIC20_R1")


@pytest.mark.parametrize("path", files_of("NAIC20"))
def test_recipe_equals_fastreid(path, tmp_path):
    check_equal_to_fastreid(path, tmp_path)


@pytest.mark.integration
def test_training_resume_evaluation_and_submission_of_an_ensemble(root, tmp_path, capfd):
    cfg = read_config("", tiny.tiny_options(
        tmp_path / "run", "PROJECTS", "[NAIC20]", "DATASETS.NAMES", "[NAIC20_R2, NAIC19]", "DATASETS.TESTS",
        "NAIC20_R2", "MODEL.LOSSES.NAME", "[CrossEntropyLoss, Cosface]", "SOLVER.IMS_PER_BATCH", "4",
        "DATALOADER.NUM_INSTANCE", "2", "SOLVER.MAX_EPOCH", "2", "TEST.BOOTSTRAP", "0",
    ))  # fmt: skip
    trainer = DefaultTrainer(cfg)
    trainer.train()
    assert 0 <= DefaultTrainer.test(cfg, trainer.model)["mAP"] <= 100
    folder = str(tmp_path / "run")
    assert main(["train", "--config-file", f"{folder}/config.yaml", "--resume", "SOLVER.MAX_EPOCH", "3"]) == 0
    assert main(["eval", folder]) == 0 and main(["eval", folder, "DATASETS.TESTS", "NAIC20_R2A"]) == 2
    assert "no identity in common" in capfd.readouterr().err
    files = [str(tmp_path / f"{name}.npz") for name in ("final", "best", "both")]
    for name, file in zip(("final", "best"), files, strict=False):
        assert main(["extract", f"{folder}/model_{name}.pth", "NAIC20_R2A", "-o", file]) == 0
    ensemble.main(ensemble.parse(["-o", files[2], *files[:2], "MODEL.DEVICE", "cpu"]))
    assert "no metrics: none of the 2 queries has a match" in capfd.readouterr().out
    result = run("submit.py", "-o", tmp_path / "s.json", files[2], "MODEL.DEVICE", "cpu")
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "s.json").read_text())
    gallery = {"j.png", "k.png", "l.png"}
    assert set(found) == {"h.png", "i.png"} and all(set(names) == gallery for names in found.values())


def test_ensemble_of_other_images_is_an_error(tmp_path):
    for name, images in (("a", ["1.png", "2.png", "3.png"]), ("b", ["1.png", "2.png", "4.png"])):
        np.savez(
            tmp_path / f"{name}.npz", features=np.eye(3, dtype=np.float32), paths=np.array(images),
            pids=np.array([1, 1, 2]), camids=np.array([0, 1, 1]), split=np.array(["query", "gallery", "gallery"]),
            config_hash=np.array("0"), checkpoint=np.array("x"), metric=np.array("cosine"),
        )  # fmt: skip
    files = [str(tmp_path / f"{name}.npz") for name in ("a", "b")]
    with pytest.raises(DataError, match=r"\b1 of .* 3\.png"):
        ensemble.main(ensemble.parse(["-o", str(tmp_path / "c.npz"), *files]))
