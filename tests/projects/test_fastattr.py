"""FastAttr: losses and metrics of FastReID, attributes from columns, runs, and bad input."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from project_recipes import check_equal_to_fastreid, files_of

from fastamp import Predictor
from fastamp.cli import main
from fastamp.config import read_config
from fastamp.config.projects import import_project
from fastamp.engine import DefaultTrainer
from fastamp.modeling import build_model
from fastamp.retrieval.columns import VALUE_PREFIX
from fastamp.utils.errors import ConfigError, DataError

REFERENCE = Path(__file__).parents[1] / "reference/methods"
COLUMNS = "MODEL.ATTRIBUTES.COLUMNS"


@pytest.fixture(autouse=True, scope="module")
def project(unregistered):
    import_project("FastAttr")


@pytest.mark.parametrize("name", ["attr1", "attr2"])
def test_loss_and_gradient_equal_fastreid(name):
    from fastattr.loss import binary_cross_entropy

    arrays = {key: torch.from_numpy(np.array(value)) for key, value in np.load(REFERENCE / f"{name}.npz").items()}
    for kind, rates in (("weighted", arrays["sample_weights"]), ("plain", None)):
        logits = arrays["logits"].clone().requires_grad_()
        loss = binary_cross_entropy(logits, arrays["labels"], rates)
        loss.backward()
        torch.testing.assert_close(loss, arrays[f"loss_{kind}"], rtol=1e-6, atol=0)
        torch.testing.assert_close(logits.grad, arrays[f"grad_{kind}"], rtol=1e-4, atol=1e-8)
    loss = binary_cross_entropy(arrays["logits_saturated"], arrays["labels"], arrays["sample_weights"])
    torch.testing.assert_close(loss, arrays["loss_saturated"], rtol=1e-6, atol=0)


def test_missing_labels_do_not_count_in_the_loss():
    from fastattr.loss import binary_cross_entropy

    logits, labels = torch.randn(4, 3, requires_grad=True), torch.tensor([[0, 1, 1]] * 4).float()
    labels[1, 2] = torch.nan
    kept = ~labels.isnan()
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits[kept], labels[kept])
    loss = binary_cross_entropy(logits, labels)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert logits.grad[1, 2] == 0 and logits.grad.isfinite().all()


@pytest.mark.parametrize("name", ["attr1", "attr2"])
def test_metrics_equal_fastreid(name):
    from fastattr.metrics import AttributeCounts

    arrays = np.load(REFERENCE / f"{name}.npz")
    probabilities, labels = (torch.from_numpy(arrays[key]) for key in ("probabilities", "labels"))
    for threshold, expected in json.loads((REFERENCE / f"{name}_metrics.json").read_text()).items():
        metrics = AttributeCounts(probabilities, labels, float(threshold)).metrics()
        for key, value in expected.items():
            # The reference computes mA in float32.
            assert metrics[key] == pytest.approx(value, rel=1e-6 if key in ("mA", "metric") else 1e-9), key


def test_missing_labels_do_not_count_in_the_metrics():
    from fastattr.metrics import AttributeCounts

    counts = AttributeCounts(torch.tensor([[0.9, 0.1], [0.2, 0.9]]), torch.tensor([[1.0, torch.nan], [0.0, 1.0]]))
    assert counts.mean_accuracies().tolist() == [1.0, 0.5]
    assert counts.one_sided() == [1]
    assert counts.metrics()["Accu"] == 100


def naive_attribute_metrics(labels, predicted):
    """Compute the metrics of one attribute in percent from lists of known labels and predictions."""
    pairs = list(zip(labels, predicted, strict=True))
    hits, rejected = pairs.count((1, 1)), pairs.count((0, 0))
    positives, images = sum(labels), len(labels)
    precision, recall = hits / max(1, sum(predicted)), hits / max(1, positives)
    return {
        "images": images,
        "positives": positives,
        "fraction": 100 * positives / images,
        "mA": 50 * (hits / positives + rejected / (images - positives)),
        "accuracy": 100 * (hits + rejected) / images,
        "majority": 100 * max(positives, images - positives) / images,
        "precision": 100 * precision,
        "recall": 100 * recall,
        "f1": 200 * precision * recall / max(1e-20, precision + recall),
    }


def test_metrics_of_each_attribute_equal_a_naive_count():
    from fastattr.metrics import AttributeCounts

    labels = torch.randint(2, (60, 3)).float()
    labels[5, 1] = torch.nan
    probabilities = torch.rand(60, 3)
    found = AttributeCounts(probabilities, labels, 0.4).of_attributes()
    for row in range(3):
        known = ~labels[:, row].isnan()
        predicted = (probabilities[known, row] >= 0.4).int().tolist()
        expected = naive_attribute_metrics(labels[known, row].int().tolist(), predicted)
        assert {name: column[row].item() for name, column in found.items()} == pytest.approx(expected)
    negative = AttributeCounts(torch.zeros(2, 1), torch.zeros(2, 1)).of_attributes()
    assert negative["precision"].isnan().all() and negative["majority"].item() == 100


def test_baseline_predicts_the_most_frequent_value_of_each_column(tmp_path):
    from fastattr.evaluator import AttrEvaluator

    names = ["color=red", "color=blue", "color=green", "hat"]
    cfg = config(tmp_path, "MODEL.ATTRIBUTES.NAMES", json.dumps(names)).with_values(
        {"DATASETS.CATEGORIES": {"color": ["red", "blue", "green"]}}
    )
    colors, hats = torch.tensor([0, 1, 1, 2, 1, 0]), torch.tensor([0, 0, 1, -1, 0, 1])
    evaluator = AttrEvaluator(cfg, output_dir=str(tmp_path / "out"))
    probabilities = torch.rand(6, 4)
    for rows in (slice(0, 4), slice(4, 6)):
        evaluator.process({"color": colors[rows], "hat": hats[rows]}, probabilities[rows])
    metrics = evaluator.evaluate()
    # Blue without a hat: right for three of six colors; the hat is never predicted.
    baseline = metrics["baselines"]["most frequent values"]
    assert baseline["Prec"] == pytest.approx(50) and baseline["mA"] == 50
    assert baseline["Recall"] == pytest.approx(100 * (0 + 1 + 0.5 + 0 + 1 + 0) / 6)
    (section,) = evaluator.report_sections()
    assert [row[0] for row in section.tables[0].rows] == names and section.tables[0].rows[3][1] == "5"
    positive = torch.stack([colors == 0, colors == 1, colors == 2, hats == 1], 1)
    wrong = ((probabilities >= 0.5) != positive) & torch.stack([hats >= -1] * 3 + [hats >= 0], 1)
    counts = [int(example.lines[0].split()[0]) for example in section.examples]
    assert counts == sorted(wrong.sum(1)[wrong.any(1)].tolist(), reverse=True)
    for example in section.examples:
        assert example.lines[0] == f"{wrong[example.index].sum()} of {3 + (hats[example.index] >= 0)} wrong"
    header, *rows = (tmp_path / "out/attributes.csv").read_text().splitlines()
    assert header.startswith("attribute,images,positives,mA,fraction") and rows[3].startswith("hat,5,2,")


def write_table(folder, columns, header="color,hat", rows=12):
    """Write tiny images and a table with two attributes; ``columns`` gives the cells of row i."""
    from PIL import Image

    lines = [f"path,pid,camid,split,{header}"]
    for index in range(rows):
        name = f"{index}.png"
        shade = np.full((32, 16, 3), 20 * index, dtype=np.uint8)
        Image.fromarray(shade).save(folder / name)
        split = "train" if index < rows - 4 else ("query" if index % 2 else "gallery")
        lines.append(f"{name},{index // 2},{index % 2},{split},{columns(index)}")
    table = folder / "table.csv"
    table.write_text("\n".join(lines) + "\n")
    return f"csv:{table}"


def options(output, *opts, columns="[color, hat]"):
    return [
        "MODEL.DEVICE", "cpu", "MODEL.BACKBONE.DEPTH", "18x", "MODEL.BACKBONE.FEAT_DIM", "512", COLUMNS, columns,
        "MODEL.BACKBONE.PRETRAIN", "False", "INPUT.SIZE_TRAIN", "(32, 16)", "INPUT.SIZE_TEST", "(32, 16)",
        "SOLVER.MAX_EPOCH", "1", "SOLVER.IMS_PER_BATCH", "4", "DATALOADER.NUM_WORKERS", "0", "SOLVER.AMP", "off",
        "SOLVER.WARMUP_ITERS", "0", "MODEL.HEADS.NUM_CLASSES", "0", "OUTPUT_DIR", str(output), *opts,
    ]  # fmt: skip


def both(index):
    return f"{('red', 'none')[index % 2]},{index % 3 == 0:d}"


def config(folder, *opts, recipe="FastAttr/Base-attribute", **arguments):
    data = write_table(folder, both)
    return read_config(
        recipe, options(folder / "run", "DATASETS.NAMES", data, "DATASETS.TESTS", data, *opts, **arguments)
    )


@pytest.mark.integration
def test_training_finds_the_attributes_and_evaluation_of_the_run_needs_nothing_more(tmp_path, capsys):
    cfg = config(tmp_path)
    results = DefaultTrainer(cfg).train()
    assert {"mA", "Accu", "Prec", "Recall", "F1", "metric"} <= results.keys()
    run = tmp_path / "run"
    rows = (run / "evaluation").rglob("attributes.csv").__next__().read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["attribute", "color=none", "color=red", "hat"]
    state = tiny.weights(run / "model_final.pth")
    assert state["heads.weight"].shape == (3, 512) and state["attribute_loss.positive_rates"].tolist() == [
        0.5,
        0.5,
        0.375,
    ]
    assert main(["eval", str(run), "TEST.REPORT", "True", "OUTPUT_DIR", str(tmp_path / "eval")]) == 0
    output = capsys.readouterr().out
    assert f"{results['mA']:.2f}" in output and "baseline: most frequent values" in output
    report = (tmp_path / "eval/report.html").read_text()
    assert "Attributes" in report and "color=none" in report and "wrong" in report
    history = [json.loads(line) for line in (run / "metrics.json").read_text().splitlines()]
    assert any(key.endswith("/baseline most frequent values/mA") for line in history for key in line)
    predictor, images = Predictor(run / "model_final.pth"), [str(tmp_path / "0.png"), str(tmp_path / "5.png")]
    features = predictor.features(images)
    attributes = predictor.predict("attributes", images)
    assert features.shape == (2, 3) and list(attributes[0]) == ["color=none", "color=red", "hat"]
    assert [list(attribute.values()) for attribute in attributes] == features.tolist()


@pytest.mark.integration
def test_resumed_run_equals_an_uninterrupted_one(tmp_path):
    longer = ("SOLVER.MAX_EPOCH", "2", "SOLVER.CHECKPOINT_PERIOD", "1")
    torch.manual_seed(1)
    DefaultTrainer(config(tmp_path, *longer)).train()
    expected = tiny.weights(tmp_path / "run" / "model_final.pth")
    other = tmp_path / "other"
    torch.manual_seed(1)
    DefaultTrainer(config(tmp_path, *longer, "OUTPUT_DIR", str(other))).train()
    for name in ("model_final.pth", "last_checkpoint"):
        (other / name).unlink()
    trainer = DefaultTrainer(config(tmp_path, *longer, "OUTPUT_DIR", str(other)))
    trainer.resume_or_load(resume=True)
    assert trainer.trainer.start_iter == 2
    trainer.train()
    found = tiny.weights(other / "model_final.pth")
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


JOINT = (
    "MODEL.META_ARCHITECTURE", "JointAttrBaseline", "MODEL.HEADS.NAME", "EmbeddingHead",
    "MODEL.LOSSES.NAME", "[CrossEntropyLoss, TripletLoss, BinaryCrossEntropyLoss]",
    "DATALOADER.SAMPLER_TRAIN", "NaiveIdentitySampler", "DATALOADER.NUM_INSTANCE", "2", "TEST.PROTOCOL", "no_camera",
)  # fmt: skip


@pytest.mark.integration
def test_joint_model_reports_both_kinds_of_metrics_and_outputs_features(tmp_path):
    trainer = DefaultTrainer(config(tmp_path, *JOINT))
    batch = {"images": torch.rand(4, 3, 32, 16), "targets": torch.tensor([0, 0, 1, 1])}
    batch |= {"color": torch.tensor([0, 1, 0, -1]), "hat": torch.tensor([0, 1, 1, 0])}
    losses = trainer.model.train()(batch)
    assert losses.keys() == {"loss_cls", "loss_triplet", "loss_bce"}
    results = trainer.train()
    assert {"mAP", "Rank-1", "mA", "F1"} <= results.keys()
    predictor = Predictor(tmp_path / "run" / "model_final.pth")
    assert predictor.features([str(tmp_path / "0.png")]).shape == (1, 512)
    empty, full = predictor.predict("attributes", str(tmp_path / "0.png"), boxes=[(90, 90, 95, 95), (0, 0, 16, 32)])
    assert np.isnan(list(empty.values())).all() and all(0 <= value <= 1 for value in full.values())
    assert main(["eval", str(tmp_path / "run")]) == 0


def test_weights_of_a_joint_model_do_not_change_its_reid_features(tmp_path):
    cfg = config(tmp_path, *JOINT, "MODEL.ATTRIBUTES.NAMES", "[hat]")
    model = build_model(cfg).eval()
    images = torch.rand(2, 3, 32, 16) * 255
    features, probabilities = model.features_and_attributes({"images": images})
    assert torch.equal(features, model(images)) and probabilities.shape == (2, 1)
    assert ((probabilities > 0) & (probabilities < 1)).all()


def test_column_that_does_not_exist_lists_the_columns(tmp_path):
    with pytest.raises(ConfigError, match="'colr'.*color, hat"):
        DefaultTrainer(config(tmp_path, columns="[colr]"))


def test_all_columns_are_attributes_by_default_and_a_set_without_columns_is_an_error(tmp_path):
    assert DefaultTrainer(config(tmp_path, columns="[]")).cfg.MODEL.ATTRIBUTES.NAMES == (
        "color=none",
        "color=red",
        "hat",
    )
    data = write_table(tmp_path, lambda index: f"{index // 2}", header="")
    table = Path(data.removeprefix("csv:"))
    table.write_text("\n".join(line.rpartition(",")[0] for line in table.read_text().splitlines()) + "\n")
    opts = options(tmp_path / "run", "DATASETS.NAMES", data, "DATASETS.TESTS", data, columns="[]")
    with pytest.raises(ConfigError, match="table.csv.*columns"):
        DefaultTrainer(read_config("FastAttr/Base-attribute", opts))


def test_values_other_than_0_and_1_are_an_error(tmp_path):
    data = write_table(tmp_path, lambda index: f"red,{index}")
    opts = options(tmp_path / "run", "DATASETS.NAMES", data, "DATASETS.TESTS", data)
    with pytest.raises(DataError, match=r"'hat'.* 2, 3"):
        DefaultTrainer(read_config("FastAttr/Base-attribute", opts))


@pytest.mark.integration
def test_test_set_without_the_attributes_is_an_error(tmp_path):
    data = write_table(tmp_path, both)
    other = tmp_path / "other"
    other.mkdir()
    tests = write_table(other, lambda index: f"{index % 2}", header="hat")
    opts = options(tmp_path / "run", "DATASETS.NAMES", data, "DATASETS.TESTS", tests)
    with pytest.raises(ConfigError, match="'color'"):
        DefaultTrainer(read_config("FastAttr/Base-attribute", opts)).train()


@pytest.mark.parametrize(
    "opts, match",
    [
        (("MODEL.LOSSES.NAME", "[CrossEntropyLoss]"), "BinaryCrossEntropyLoss"),
        (("MODEL.LOSSES.NAME", "()"), "BinaryCrossEntropyLoss"),
        (("MODEL.HEADS.NAME", "EmbeddingHead"), "AttrHead"),
    ],
)
def test_other_losses_and_heads_are_an_error(tmp_path, opts, match):
    with pytest.raises(ConfigError, match=match):
        DefaultTrainer(config(tmp_path, *opts))


def test_number_of_classes_of_the_file_that_differs_is_a_warning(tmp_path, caplog):
    cfg = config(tmp_path, "MODEL.HEADS.NUM_CLASSES", "26")
    assert DefaultTrainer(cfg).cfg.MODEL.HEADS.NUM_CLASSES == 3
    assert "MODEL.HEADS.NUM_CLASSES is 26, but the training set has 3 attributes" in caplog.text


def make_image(path):
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(len(path.name)).integers(256, size=(32, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def make_market(root, age=(1, 4)):
    """Write two training and two test identities of Market-1501 with three attributes."""
    from scipy.io import savemat

    folder = root / "Market-1501-v15.09.15"
    for split, pids in (("bounding_box_train", (2, 7)), ("query", (1, 3)), ("bounding_box_test", (1, 3, 0, -1))):
        for pid in pids:
            make_image(
                folder / split / f"{pid:04d}_c1s1_000001_00.jpg"
                if pid >= 0
                else folder / split / "-1_c1s1_000001_00.jpg"
            )
    tables = {
        split: {"image_index": np.array(pids, dtype=object), "age": list(age), "backpack": [1, 2], "upred": [2, 1]}
        for split, pids in (("train", ("0002", "0007")), ("test", ("0001", "0003")))
    }
    savemat(folder / "market_attribute.mat", {"market_attribute": tables})
    return folder


def test_market_attributes_belong_to_identities_and_the_age_is_a_text(tmp_path):
    from fastattr.datasets import Market1501Attr

    make_market(tmp_path)
    dataset = Market1501Attr(tmp_path)
    columns = {dataset.identity(item.pid): dict(item.columns) for item in dataset.train}
    assert columns == {
        "2": {"age": "young", "backpack": 0, "upred": 1},
        "7": {"age": "old", "backpack": 1, "upred": 0},
    }
    gallery = {item.pid: item.columns for item in dataset.gallery}
    assert gallery[1]["age"] == "young" and gallery[0] == {"age": None, "backpack": None, "upred": None}


@pytest.mark.integration
def test_market_attributes_train_with_the_file_of_fastreid(tmp_path, datasets_root, caplog):
    make_market(tmp_path)
    cfg = read_config("FastAttr/market1501", options(tmp_path / "run", "MODEL.HEADS.NUM_CLASSES", "27", columns="[]"))
    cfg = cfg.with_values({"SOLVER.IMS_PER_BATCH": 2, "SOLVER.BASE_LR": 1e-5})
    results = DefaultTrainer(cfg).train()
    assert 0 <= results["mA"] <= 100 and "27" in caplog.text


@pytest.mark.integration
def test_age_as_fastreid_reads_it_is_one_number(tmp_path, datasets_root):
    from fastattr.attributes import with_attributes
    from fastattr.datasets import Market1501AttrFastReID

    from fastamp.data import build_reid_train_loader

    folder = make_market(tmp_path)
    assert {item.columns["age"] for item in Market1501AttrFastReID(tmp_path).train} == {0, 3}
    name = ("DATASETS.NAMES", "Market1501AttrFastReID", "DATASETS.TESTS", "Market1501AttrFastReID")
    cfg = read_config("FastAttr/market1501", options(tmp_path / "run", *name, columns="[]"))
    cfg = cfg.with_values({"SOLVER.IMS_PER_BATCH": 2, "SOLVER.BASE_LR": 1e-5})
    loader = build_reid_train_loader(cfg)
    assert with_attributes(cfg, loader.dataset).MODEL.ATTRIBUTES.NAMES == ("age", "backpack", "upred")
    trainer = DefaultTrainer(cfg)
    # FastReID's weights are the means of the labels: (0 + 3) / 2 for the age.
    assert trainer.model.attribute_loss.positive_rates.tolist() == [1.5, 0.5, 0.5]
    assert 0 <= trainer.train()["mA"] <= 100
    make_market(tmp_path, age=(1, 5))
    with pytest.raises(DataError, match=r"'age'.*\[5\]"):
        list(Market1501AttrFastReID(tmp_path).train)
    assert folder.is_dir()


def test_missing_and_invalid_attribute_files_are_data_errors(tmp_path):
    from fastattr.datasets import Market1501Attr

    folder = make_market(tmp_path, age=(1, 5))
    with pytest.raises(DataError, match=r"'age'.*\[5\]"):
        list(Market1501Attr(tmp_path).train)
    (folder / "market_attribute.mat").write_bytes(b"damaged")
    with pytest.raises(DataError, match="market_attribute.mat.*truncated"):
        list(Market1501Attr(tmp_path).train)
    (folder / "market_attribute.mat").unlink()
    with pytest.raises(DataError, match="Market1501Attr: .*market_attribute.mat"):
        list(Market1501Attr(tmp_path).train)


def test_pa100k_reads_the_published_layout(tmp_path):
    from fastattr.datasets import PA100K
    from scipy.io import savemat

    cells = lambda texts: np.array([[text] for text in texts], dtype=object)  # noqa: E731
    content = {"attributes": cells(["Female", "Hat"])}
    for split, count in (("train", 3), ("val", 2), ("test", 2)):
        names = [f"{split}{index}.jpg" for index in range(count)]
        for name in names:
            make_image(tmp_path / "PA-100K/data" / name)
        content |= {f"{split}_images_name": cells(names), f"{split}_label": np.eye(count, 2, dtype=np.uint8)}
    savemat(tmp_path / "PA-100K/annotation.mat", content)
    dataset = PA100K(tmp_path)
    assert [dict(item.columns) for item in dataset.train] == [
        {"Female": 1, "Hat": 0}, {"Female": 0, "Hat": 1}, {"Female": 0, "Hat": 0},
    ]  # fmt: skip
    assert len(dataset.query) == 2 and len(dataset.gallery) == 0 and Path(dataset.query[0].path).is_file()
    savemat(tmp_path / "PA-100K/annotation.mat", content | {"train_label": np.eye(2)})
    with pytest.raises(DataError, match="annotation.mat.* 3 .* 2 x 2"):
        list(PA100K(tmp_path).train)
    savemat(tmp_path / "PA-100K/annotation.mat", {"attributes": content["attributes"]})
    with pytest.raises(DataError, match="'train_images_name'.*attributes"):
        list(PA100K(tmp_path).train)


def test_predictor_of_a_model_without_attributes_raises_config_error(checkpoint, tmp_path):
    make_image(tmp_path / "image.png")
    with pytest.raises(ConfigError, match="attributes"):
        Predictor(checkpoint).predict("attributes", str(tmp_path / "image.png"))


def test_query_in_words_finds_attributes_and_scores_images():
    from fastattr.search_term import AttributeTerm, parse_query

    names = ["upper_color=red", "lower_color=red", "hat", "hat_kind=cap"]
    assert parse_query("red", names) == [["upper_color=red", "lower_color=red"]]
    assert parse_query("red upper_color, HAT", names) == [["upper_color=red"], ["hat"]]
    assert parse_query("upper_color=red,cap", names) == [["upper_color=red"], ["hat_kind=cap"]]
    assert parse_query("upper red", names) == [["upper_color=red"]]
    rows = np.array([(0.5, 0.75, 0.25, 1.0), (0.25, 0.125, 1.0, 0.0)], dtype=np.float32)
    columns = {f"{VALUE_PREFIX}{name}": values for name, values in zip(names, rows.T, strict=True)}
    gallery = SimpleNamespace(columns=columns, path="gallery")
    assert AttributeTerm("red, hat", names, 0.5).scores(gallery).tolist() == [0.75 * 0.25, 0.25]
    assert AttributeTerm("red", names, 0.75).rows(gallery).tolist() == [0]
    with pytest.raises(ConfigError, match="gallery.*'hat'"):
        AttributeTerm("hat", names, 0.5).rows(SimpleNamespace(columns={}, path="gallery"))
    with pytest.raises(DataError, match="'hat'.*int64"):
        AttributeTerm("hat", names, 0.5).rows(
            SimpleNamespace(columns={f"{VALUE_PREFIX}hat": rows[0].astype(int)}, path="")
        )
    for text, match in (("blue", "available: upper_color=red"), (" , ", "no attributes")):
        with pytest.raises(ConfigError, match=match):
            parse_query(text, names)


@pytest.fixture(scope="module")
def joint(tmp_path_factory):
    """Predictor of a trained joint model, the extraction of its dataset, and its folder."""
    from fastamp.inference.extract import extract

    folder = tmp_path_factory.mktemp("joint")
    DefaultTrainer(config(folder, *JOINT, "SOLVER.BASE_LR", "1e-5")).train()
    predictor = Predictor(folder / "run", device="cpu")
    extraction, _ = extract(predictor, f"csv:{folder / 'table.csv'}", folder / "all.npz", num_workers=0)
    return predictor, extraction, folder


@pytest.mark.integration
def test_extraction_has_the_features_and_the_probabilities_of_the_predictor(joint):
    predictor, extraction, folder = joint
    paths = extraction.images.paths.tolist()
    np.testing.assert_allclose(extraction.matrix, predictor.features(paths).numpy(), rtol=1e-5, atol=1e-6)
    for name in predictor.outputs["attributes"].names:
        expected = [attribute[name] for attribute in predictor.predict("attributes", paths)]
        np.testing.assert_allclose(extraction.images.further[f"probability.{name}"], expected, rtol=1e-5, atol=1e-6)
    assert extraction.images.further["hat"].dtype.kind == "i"  # the label of the dataset
    assert main(["extract", str(folder / "run"), str(folder / "table.csv"), "-o", str(folder / "all.csv")]) == 0
    header = (folder / "all.csv").read_text().partition("\n")[0].split(",")
    assert {"color", "hat", "probability.color=red", "probability.hat", "f511"} <= {*header}


@pytest.mark.integration
def test_extraction_of_a_model_with_other_attributes_is_not_resumed(joint):
    from fastamp.inference.extract import describe_extraction
    from fastamp.inference.image_list import list_images
    from fastamp.utils.choices import EXTRACTED_SPLITS

    predictor, _, folder = joint
    listing = list_images(f"csv:{folder / 'table.csv'}", predictor.cfg, EXTRACTED_SPLITS)
    marker = describe_extraction(predictor, listing.items, False)
    assert marker["values"] == ["color=none", "color=red", "hat"]


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["flat", "ivf", "hnsw"])
def test_search_compares_only_with_the_images_with_the_attributes(joint, kind):
    from fastattr.search_term import AttributeTerm

    from fastamp.retrieval.open_gallery import with_index
    from fastamp.retrieval.search import search

    predictor, extraction, folder = joint
    opened = with_index(extraction, folder / f"{kind}.index", kind)
    probabilities = extraction.images.further["probability.color=red"]
    threshold = float(np.sort(probabilities)[-4])
    names = predictor.outputs["attributes"].names
    rows = AttributeTerm("red", names, threshold).rows(opened)
    assert sorted(rows) == np.flatnonzero(probabilities >= threshold).tolist()
    found = search(extraction.matrix[:2], opened, 10, where=rows)
    everything = search(extraction.matrix[:2], opened, len(extraction), exact=True)
    expected = [[row for row in neighbors if row in rows] for neighbors in everything.rows.tolist()]
    assert found.rows.tolist() == expected
    term = AttributeTerm.from_model("red, hat", predictor)
    ranked = predictor.search(None, opened, 3, terms=[term])
    product = probabilities.astype(float) * extraction.images.further["probability.hat"]
    assert ranked.rows[0].tolist() == np.argsort(-product, kind="stable")[:3].tolist()
    with pytest.raises(ConfigError, match="k=0"):
        predictor.search(None, opened, 0, terms=[term])
    with pytest.raises(ConfigError, match="terms"):
        predictor.search(None, opened)


@pytest.mark.integration
@pytest.mark.parametrize("with_query", [True, False])
def test_search_by_attributes_meets_other_conditions(joint, with_query):
    from fastattr.search_term import AttributeTerm

    from fastamp.retrieval.gallery import Conditions

    predictor, extraction, _ = joint
    identity = str(extraction.images.pids[3])
    terms = [AttributeTerm("red", predictor.outputs["attributes"].names, 0.0)]
    query = extraction.images.paths[0] if with_query else None
    found = predictor.search(query, extraction.path, terms=terms, conditions=Conditions(identities=[identity]))
    expected = np.flatnonzero(extraction.images.pids.astype(str) == identity)
    assert sorted(found.rows[0]) == expected.tolist() and found.searched == len(expected)


@pytest.mark.integration
def test_search_by_attributes_from_the_command_line(joint, capsys):
    _, _, folder = joint
    command = ["search", str(folder / "run"), "--gallery", str(folder / "all.npz"), "--device", "cpu", "--top", "3"]
    assert main([*command, "--attributes", "red, hat", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["query"] == "red, hat" and [row["rank"] for row in found["found"]] == [1, 2, 3]
    first = found["found"][0]
    assert first["score"] == pytest.approx(first["probability.color=red"] * first["probability.hat"], rel=1e-5)
    assert "probability.color=none" not in first
    query = [command[0], command[1], str(folder / "0.png"), *command[2:]]
    assert main(query) == 0 and "probability" not in capsys.readouterr().out
    assert main([*query, "--attributes", "red", "TEST.THRES", "0"]) == 0
    assert "probability.color=red" in capsys.readouterr().out


@pytest.mark.integration
@pytest.mark.parametrize(
    "words, match",
    [
        (["--attributes", "blue"], "available: color=none, color=red, hat"),
        ([], "no query image"),
        (["0.png", "--attributes", "red, none", "TEST.THRES", "1"], "none of the 12 gallery images"),
    ],
)
def test_invalid_attribute_search_exits_with_2(joint, capsys, caplog, words, match):
    _, _, folder = joint
    words = [str(folder / word) if word.endswith(".png") else word for word in words]
    options = ["--gallery", str(folder / "all.npz"), "--device", "cpu"]
    assert main(["search", str(folder / "run"), *words[:-2], *options, *words[-2:]]) == 2
    output = capsys.readouterr()
    assert match in output.err + output.out + caplog.text


@pytest.mark.integration
def test_search_by_attributes_requires_a_model_with_attributes(checkpoint, joint, capsys):
    _, _, folder = joint
    extracted = folder / "plain.npz"
    options = ["--device", "cpu"]
    assert main(["extract", str(checkpoint), str(folder / "table.csv"), "-o", str(extracted), *options]) == 0
    assert "probability" not in str(np.load(extracted).files)
    command = ["search", str(checkpoint), "--gallery", str(extracted), "--attributes", "hat", *options]
    assert main(command) == 2 and "'attributes'" in capsys.readouterr().err


@pytest.mark.parametrize("path", files_of("FastAttr"))
def test_recipe_equals_the_file_of_fastreid(path, tmp_path):
    # FastReID's Base-attribute has the path of its author's pretrained weights.
    check_equal_to_fastreid(path, tmp_path, ("MODEL.BACKBONE.PRETRAIN_PATH",) if "Base" in path else ())
