"""FastClas: datasets in class folders, class names in checkpoints, accuracy, bad input and recipes."""

import json

import pytest
import tiny
import torch
from PIL import Image
from project_recipes import check_equal_to_fastreid, files_of

from fastamp import Predictor
from fastamp.config import read_config
from fastamp.config.projects import import_project
from fastamp.data import build_reid_test_loader, build_reid_train_loader
from fastamp.engine import DefaultTrainer
from fastamp.inference.parity import RankedImages
from fastamp.utils.errors import ConfigError, DataError

COLORS = {"blue": (0, 0, 250), "10": (0, 250, 0), "9 red": (250, 0, 0)}
ORDER = ("10", "9 red", "blue")


@pytest.fixture(autouse=True)
def fastclas():
    import_project("FastClas")


@pytest.fixture
def folder(tmp_path):
    """Class folder with images of different sizes, whose class is their color."""
    root = tmp_path / "colors"
    for split, count in (("train", 8), ("val", 3)):
        for name, color in COLORS.items():
            below = root / split / name / "more"
            below.mkdir(parents=True)
            for number in range(count):
                image = Image.new("RGB", (40 + number, 50 + 3 * number), color)
                image.save(below.parent / f"{number}.PNG" if number else below / "0.jpg")
            (below / "notes.txt").write_text("no image")
    return root


def options(folder, output_dir, *opts):
    return tiny.tiny_options(
        output_dir, "PROJECTS", "[FastClas]", "DATASETS.NAMES", "ClassFolder", "DATASETS.TESTS", "ClassFolder",
        "DATASETS.CLASS_FOLDER", str(folder), "MODEL.HEADS.NAME", "ClasHead", "MODEL.HEADS.WITH_BNNECK", "False",
        "MODEL.LOSSES.NAME", "CrossEntropyLoss", "INPUT.SIZE_TRAIN", "[0]", "INPUT.SIZE_TEST", "[36]",
        "INPUT.PADDING.ENABLED", "False", "INPUT.REA.ENABLED", "False", "INPUT.CROP.ENABLED", "True",
        "INPUT.CROP.SIZE", "[32]", "DATALOADER.SAMPLER_TRAIN", "TrainingSampler", "SOLVER.IMS_PER_BATCH", "8",
        "SOLVER.BASE_LR", "1e-2", "SOLVER.MAX_EPOCH", "8", "TEST.EVAL_PERIOD", "8", *opts,
    )  # fmt: skip


def config(folder, output_dir, *opts):
    return read_config("", options(folder, output_dir, *opts))


def test_labels_of_training_and_test_images_agree(folder, tmp_path):
    cfg = config(folder, tmp_path / "run")
    train = build_reid_train_loader(cfg).dataset
    test, num_query = build_reid_test_loader(cfg, "ClassFolder")
    assert (train.num_classes, len(train), num_query, len(test.dataset)) == (3, 24, 9, 9)
    for dataset in (train, test.dataset):
        for item, label in zip(dataset.items, dataset.labels, strict=True):
            assert f"/{ORDER[label]}/" in item.path
    batch = next(iter(test))
    assert batch["images"].shape[1:] == (3, 32, 32)  # resized by the shorter side, then cropped


@pytest.mark.integration
def test_training_evaluation_resume_and_prediction(folder, tmp_path):
    run = tmp_path / "run"
    trainer = DefaultTrainer(config(folder, run, "SOLVER.MAX_EPOCH", "4"))
    assert trainer.cfg.DATASETS.CLASSES == ORDER and trainer.cfg.MODEL.HEADS.NUM_CLASSES == 3
    trainer.train()
    trainer = DefaultTrainer(config(folder, run))
    trainer.resume_or_load(resume=True)
    results = trainer.train()
    assert set(results) == {"Acc@1", "metric", "baselines"} and results["Acc@1"] == 100.0
    predictor = Predictor(run)
    assert predictor.outputs["classes"].names == ORDER
    images = RankedImages(predictor, "ClassFolder", limit=0)
    rows = images.features(lambda batch: predictor.compute([batch]))
    assert sum(map(len, rows)) == 9 and images.mean_average_precision(rows) is None
    image = Image.new("RGB", (50, 80), COLORS["9 red"])
    (found,) = predictor.predict("classes", image)
    assert next(iter(found)) == "9 red" and set(found) == set(ORDER)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert sum(found.values()) == pytest.approx(1)
    logits = predictor.features([image])
    assert found == dict(zip(ORDER, logits.softmax(1)[0].tolist(), strict=True))
    for path in (folder / "val").glob("9 red/**/*.*g"):
        path.rename(folder / "val/blue" / path.name)  # now 6 of 9 are right
    weights = ("MODEL.WEIGHTS", str(run / "model_final.pth"))
    cfg = config(folder, tmp_path / "eval", *weights, "DATASETS.CLASSES", json.dumps(ORDER))
    assert DefaultTrainer.test_weights(cfg)["Acc@1"] < 100.0


def test_test_set_may_lack_a_class_but_not_have_another(folder, tmp_path):
    (folder / "val" / "blue").rename(tmp_path / "aside")
    cfg = config(folder, tmp_path / "run")
    loader, _ = build_reid_test_loader(cfg, "ClassFolder")
    assert sorted(set(loader.dataset.labels.tolist())) == [0, 1]
    (tmp_path / "aside").rename(folder / "val" / "teal")
    with pytest.raises(DataError, match="'teal'.*\\b3 classes"):
        DefaultTrainer(cfg)


@pytest.mark.integration
def test_classes_of_several_training_sets_are_merged_by_name(folder, tmp_path, monkeypatch):
    other = tmp_path / "data/hymenoptera_data"
    for split in ("train", "val"):
        for name in ("ants", "blue"):
            (other / split / name).mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (40, 40), (9, 9, number)).save(other / split / name / f"{number}.jpg")
    monkeypatch.setenv("FASTAMP_DATASETS", str(tmp_path / "data"))
    both = ("DATASETS.NAMES", "[Hymenoptera, ClassFolder]", "DATASETS.TESTS", "[ClassFolder, Hymenoptera]")
    trainer = DefaultTrainer(config(folder, tmp_path / "run", *both, "SOLVER.MAX_EPOCH", "1", "TEST.EVAL_PERIOD", "1"))
    names = trainer.cfg.DATASETS.CLASSES
    assert names == ("10", "9 red", "ants", "blue")
    for dataset in (trainer.data_loader.dataset, *(loader.dataset for loader, _ in trainer.test_loaders.values())):
        assert all(f"/{names[label]}/" in item.path for item, label in zip(dataset.items, dataset.labels, strict=True))
    assert set(trainer.train()) == {"ClassFolder", "Hymenoptera"}


@pytest.mark.parametrize("number", [3, 10, 31])
def test_accuracy_equals_naive_count(folder, tmp_path, number):
    from fastclas.evaluator import ClasEvaluator

    cfg = config(folder, tmp_path, "DATASETS.CLASSES", json.dumps([f"class {number}" for number in range(number)]))
    evaluator = ClasEvaluator(cfg)
    logits, labels = torch.randn(50, number).mul(2).round(), torch.arange(50) % number  # with equal logits
    for rows in (slice(0, 30), slice(30, 50)):
        evaluator.process({"targets": labels[rows]}, logits[rows])
    order = [sorted(range(number), key=lambda label, row=row: (-row[label], label)) for row in logits.tolist()]
    expected = {}
    for k in (1, 5) if number >= 10 else (1,):
        expected[f"Acc@{k}"] = 2.0 * sum(
            label in classes[:k] for classes, label in zip(order, labels.tolist(), strict=True)
        )
    metrics = evaluator.evaluate()
    baseline = metrics.pop("baselines")["most frequent class"]
    assert metrics == expected | {"metric": expected["Acc@1"]} and set(metrics) == set(evaluator.metric_names())
    assert baseline["Acc@1"] == 2.0 * -(-50 // number) and baseline.keys() == expected.keys()
    (section,) = evaluator.report_sections()
    predicted = torch.tensor([classes[0] for classes in order])
    if number > 30:
        assert section.matrix is None and section.tables[1].rows
    else:
        counts = [[int(((labels == a) & (predicted == b)).sum()) for b in range(number)] for a in range(number)]
        assert section.matrix.counts.tolist() == counts
    wrong = {index for index in range(50) if labels[index] != predicted[index]}
    assert {example.index for example in section.examples} <= wrong
    assert len(section.examples) == min(24, len(wrong))


def test_equal_logits_of_all_classes_are_not_accurate(folder, tmp_path):
    from fastclas.evaluator import ClasEvaluator

    evaluator = ClasEvaluator(config(folder, tmp_path, "DATASETS.CLASSES", '["a", "b"]'))
    evaluator.process({"targets": torch.tensor([0, 1, 1, 1])}, torch.zeros(4, 2))
    assert evaluator.evaluate()["Acc@1"] == 25.0


@pytest.mark.integration
def test_report_of_a_run_has_the_confusion_matrix_and_errors(folder, tmp_path):
    opts = ("SOLVER.MAX_EPOCH", "1", "TEST.EVAL_PERIOD", "1", "TEST.REPORT", "True", "SOLVER.BASE_LR", "1e-6")
    DefaultTrainer(config(folder, tmp_path / "run", *opts)).train()
    report = (tmp_path / "run/report.html").read_text()
    for text in ("Confusion matrix", "baseline: most frequent class", "Most confident errors", "9 red"):
        assert text in report, text


@pytest.mark.integration
def test_checkpoint_of_fastreid_is_evaluated_and_used_with_class_names(folder, tmp_path):
    run = tmp_path / "run"
    trainer = DefaultTrainer(config(folder, run, "SOLVER.MAX_EPOCH", "1"))
    trainer.train()
    state = tiny.weights(run / "model_final.pth")
    mean = torch.tensor(trainer.cfg.MODEL.PIXEL_MEAN).view(1, 3, 1, 1)
    weights = tmp_path / "fastreid.pth"
    kept = {name: value for name, value in state.items() if not name.startswith("pixel_")}
    torch.save({"model": kept | {"pixel_mean": mean, "pixel_std": mean.clone()}, "epoch": 3}, weights)
    cfg = config(folder, tmp_path / "eval", "MODEL.WEIGHTS", str(weights))
    expected = DefaultTrainer.test_weights(
        config(folder, tmp_path / "eval", "MODEL.WEIGHTS", str(run / "model_final.pth"))
    )
    assert DefaultTrainer.test_weights(cfg) == expected
    image = Image.new("RGB", (50, 80), COLORS["blue"])
    with pytest.raises(ConfigError, match="DATASETS.CLASSES"):
        Predictor(cfg).predict("classes", image)
    with pytest.raises(ConfigError, match="DATASETS.CLASSES.* 2 .* 3 "):
        Predictor(cfg.with_values({"DATASETS.CLASSES": ("a", "b")})).predict("classes", image)
    named = Predictor(cfg.with_values({"DATASETS.CLASSES": ORDER})).predict("classes", [image, image])
    assert named == Predictor(run / "model_final.pth").predict("classes", [image, image])


@pytest.mark.parametrize(
    "opts, error, message",
    [
        (("DATASETS.CLASS_FOLDER", ""), ConfigError, "DATASETS.CLASS_FOLDER"),
        (("DATASETS.CLASS_FOLDER", "/nowhere"), DataError, "nowhere"),
        (("DATASETS.CLASSES", "[red, blue]"), ConfigError, "DATASETS.CLASSES.*3 classes"),
        (("DATASETS.COMBINEALL", "True"), ConfigError, "DATASETS.COMBINEALL.*ClassFolder"),
        (("MODEL.HEADS.NUM_CLASSES", "2"), ConfigError, "MODEL.HEADS.NUM_CLASSES is 2"),
        (("DATASETS.NAMES", "[ClassFolder, Demo]"), ConfigError, "cannot be combined"),
    ],
)
def test_invalid_settings(folder, demo, tmp_path, opts, error, message):
    with pytest.raises(error, match=message):
        DefaultTrainer(config(folder, tmp_path / "run", *opts))


def test_empty_class_folders(folder, tmp_path):
    (folder / "train" / "none").mkdir()
    with pytest.raises(DataError, match="/none"):
        build_reid_train_loader(config(folder, tmp_path / "run"))
    (tmp_path / "empty/train").mkdir(parents=True)
    (tmp_path / "empty/val").mkdir()
    with pytest.raises(DataError, match="/empty"):
        build_reid_train_loader(config(tmp_path / "empty", tmp_path / "run"))


@pytest.mark.integration
def test_head_without_logits_is_an_error(folder, tmp_path):
    with pytest.raises(ConfigError, match="3 classes.* 16 .*MODEL.HEADS.NAME=EmbeddingHead"):
        DefaultTrainer(
            config(folder, tmp_path / "run", "MODEL.HEADS.NAME", "EmbeddingHead", "SOLVER.MAX_EPOCH", "1")
        ).train()


def test_demo_classes_are_the_generated_scenes(demo):
    from fastamp.demo.attributes import VALUES

    train = build_reid_train_loader(read_config("FastClas/demo", ["SOLVER.IMS_PER_BATCH", "8"])).dataset
    assert {pid.removeprefix("class_") for pid in train.items.pids.unique()[0]} <= set(VALUES["scene"])


@pytest.mark.parametrize("path", files_of("FastClas"))
def test_recipe_equals_the_file_of_fastreid(path, tmp_path):
    check_equal_to_fastreid(path, tmp_path)
