"""Tests of calibrated models: entry in the checkpoint, decisions of compare and search, and invalid calibrations."""

import csv
import json

import numpy as np
import PIL.Image
import pytest
import torch
from command import run_command

import fastamp
from fastamp.cli import calibrate as calibrate_command
from fastamp.cli import compare as compare_command
from fastamp.cli import search as search_command
from fastamp.cli import strip as strip_command
from fastamp.cli.source import evaluation_config
from fastamp.engine import DefaultTrainer
from fastamp.evaluation.calibration import Calibration
from fastamp.inference.calibration import calibrate_model, write_calibrated
from fastamp.inference.export import export
from fastamp.inference.extract import extract
from fastamp.inference.package import License, package
from fastamp.utils.errors import ConfigError, DataError, WeightsError

RATES = {"far": 0.05, "frr": 0.2, "fpir": 0.2}
FLAGS = [word for name, rate in RATES.items() for word in (f"--{name}", str(rate))]


@pytest.fixture(scope="module")
def people(tmp_path_factory):
    """CSV file of 60 identities, each a color with noise, with 4 images."""
    folder = tmp_path_factory.mktemp("people")
    random = np.random.default_rng(0)
    with (folder / "people.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("path", "pid", "camid", "split"))
        for pid in range(60):
            color = random.integers(30, 226, (2, 1, 3)).repeat(32, axis=0)
            for camid in range(4):
                pixels = color + random.normal(0, 12, (64, 32, 3)) + random.normal(0, 15, 3)
                path = folder / f"{pid}_{camid}.png"
                PIL.Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)
                writer.writerow((path, pid, camid, "query" if camid == 0 else "gallery"))
    return f"csv:{folder / 'people.csv'}"


@pytest.fixture(scope="module")
def calibration(run_folder, people):
    return calibrate_model(fastamp.Predictor(run_folder, device="cpu"), people, **RATES)


@pytest.fixture(scope="module")
def calibrated(run_folder, calibration, tmp_path_factory):
    """Checkpoint with a calibration."""
    return write_calibrated(run_folder / "model_best.pth", calibration, tmp_path_factory.mktemp("model") / "model.pth")


def images_of(people, pid):
    folder = people.removeprefix("csv:").removesuffix("people.csv")
    return [f"{folder}{pid}_{camid}.png" for camid in range(4)]


@pytest.mark.integration
def test_calibration_uses_half_of_the_identities_and_measures_the_others(calibration, people):
    assert calibration.source == people and calibration.metric == "cosine"
    assert calibration.chosen.far.num_identities == calibration.measured.far.num_identities == 30
    assert calibration.chosen.far.rate <= 0.05 and calibration.gallery_size == 29 * 4
    # Pairs of the same identity and camera are junk.
    assert calibration.chosen.frr.num_trials == 30 * 6


def test_calibration_states_that_identities_of_a_set_without_split_are_not_used(run_folder, people, tmp_path, caplog):
    with open(people.removeprefix("csv:"), newline="") as file:
        rows = [line[:3] for line in csv.reader(file)]
    with (tmp_path / "people.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    name, rates = f"csv:{tmp_path / 'people.csv'}", dict.fromkeys(RATES, 0.3)
    for fraction, used in ((0.5, 30), (1.0, 60)):
        caplog.clear()
        predictor = fastamp.Predictor(run_folder, device="cpu", opts=["DATASETS.FOLDER.TEST_FRACTION", fraction])
        found = calibrate_model(predictor, name, **rates)
        assert found.chosen.far.num_identities + found.measured.far.num_identities == used
        warnings = [message for message in caplog.messages if "TEST_FRACTION to 1" in message]
        assert len(warnings) == (used < 60) and all("30 of 60 identities" in warning for warning in warnings)


def test_compare_decides_with_probability_and_rates(calibrated, calibration, people, checkpoint, capsys):
    predictor = fastamp.Predictor(calibrated, device="cpu")
    first, second, *_ = images_of(people, 3)
    found = predictor.compare(first, first)
    assert found.decision == "same" and found.probability > 0.9
    assert found.calibration.measured == calibration.measured
    text = found.describe()
    assert "same: probability" in text and "stated false accept rate 5 %" in text
    assert {predictor.compare(first, images_of(people, pid)[1]).decision for pid in range(10)} >= {"different"}
    assert run_command(compare_command, calibrated, first, second, "--device", "cpu", "--json") == 0
    written = json.loads(capsys.readouterr().out)
    assert written["decision"] == predictor.compare(first, second).decision and written["far"] == 0.05
    bare = fastamp.Predictor(checkpoint, device="cpu").compare(first, second)
    assert bare.calibration is bare.decision is bare.probability is None
    assert "fastamp calibrate" in bare.describe()


def test_search_answers_unknown_below_the_threshold(calibrated, calibration, people, tmp_path, capsys):
    predictor = fastamp.Predictor(calibrated, device="cpu")
    extraction, _ = extract(predictor, people, tmp_path / "gallery.npz", splits=["gallery"])
    noise = tmp_path / "noise.png"
    pixels = np.random.default_rng(1).integers(0, 256, (8, 4, 3)).repeat(8, 0).repeat(8, 1)
    PIL.Image.fromarray(pixels.astype(np.uint8)).save(noise)
    queries = [images_of(people, 5)[1], noise]
    found = predictor.search(queries, extraction.path, k=3)
    decision = found.decision
    assert decision.known.tolist() == (found.scores[:, 0] >= calibration.search_threshold).tolist() == [True, False]
    assert decision.threshold == calibration.search_threshold
    assert decision.fpir == calibration.expected_fpir(180) > 0.2
    gallery = str(extraction.path)
    assert run_command(search_command, calibrated, *queries, "--gallery", gallery, "--device", "cpu") == 0
    text = capsys.readouterr().out
    assert "match: the best similarity is at least" in text and "unknown: the best similarity is below" in text
    assert run_command(search_command, calibrated, *queries, "--gallery", gallery, "--device", "cpu", "--json") == 0
    written = json.loads(capsys.readouterr().out)
    assert [query["decision"] for query in written] == ["match", "unknown"]
    assert written[0]["fpir"] == decision.fpir


def test_search_without_calibration_makes_no_decisions(checkpoint, people, tmp_path, capsys):
    predictor = fastamp.Predictor(checkpoint, device="cpu")
    extraction, _ = extract(predictor, people, tmp_path / "gallery.npz", splits=["gallery"])
    query = images_of(people, 5)[0]
    found = predictor.search(query, extraction.path)
    assert found.decision is None
    argv = (checkpoint, query, "--gallery", str(extraction.path), "--device", "cpu")
    assert run_command(search_command, *argv, "--json") == 0
    assert json.loads(capsys.readouterr().out)[0].keys() == {"query", "found"}
    assert run_command(search_command, *argv) == 0
    assert "unknown:" not in capsys.readouterr().out


def test_search_warns_if_the_gallery_is_much_larger(calibrated, people, tmp_path, caplog):
    predictor = fastamp.Predictor(calibrated, device="cpu")
    extraction, _ = extract(predictor, people, tmp_path / "gallery.npz")
    found = predictor.search(images_of(people, 5)[0], extraction.path)
    assert found.decision.fpir == pytest.approx(1 - 0.8 ** (240 / 116))
    assert "240 images" in caplog.text and f"{100 * found.decision.fpir:.1f} %" in caplog.text


@pytest.mark.parametrize("opts", [["TEST.METRIC", "euclidean"], ["INPUT.SIZE_TEST", "(32, 32)"]])
def test_calibration_of_other_features_is_not_used(calibrated, people, caplog, opts):
    predictor = fastamp.Predictor(calibrated, device="cpu", opts=opts)
    first, second, *_ = images_of(people, 3)
    assert predictor.compare(first, second).decision is None
    assert f"{predictor.metric} and {predictor.config_hash}" in caplog.text and "fastamp calibrate" in caplog.text


def test_search_in_a_gallery_of_another_metric_makes_no_decisions(calibrated, people, tmp_path, caplog):
    euclidean = fastamp.Predictor(calibrated, device="cpu", opts=["TEST.METRIC", "euclidean"])
    extraction, _ = extract(euclidean, people, tmp_path / "gallery.npz", splits=["gallery"])
    found = fastamp.Predictor(calibrated, device="cpu").search(images_of(people, 5)[0], extraction.path)
    assert found.decision is None and found.metric == "euclidean" and "extract the gallery again" in caplog.text


def test_euclidean_calibration_decides_by_distance(run_folder, people):
    predictor = fastamp.Predictor(run_folder, device="cpu", opts=["TEST.METRIC", "euclidean"])
    found = calibrate_model(predictor, people, **RATES)
    assert 0 < found.same_threshold <= found.different_threshold and found.decide(0.0) == "same"
    assert found.accepts(np.array([0.0, 1e9])).tolist() == [True, False]
    assert found.probability(0.0) > 0.9 > 0.5 > found.probability(1e9)
    assert "at most" in found.describe()


def test_calibration_survives_strip_and_package(calibrated, calibration, people, tmp_path):
    assert run_command(strip_command, calibrated, tmp_path / "small.pth") == 0
    package(calibrated, tmp_path / "package", license=License(name="mit"))
    for path in (tmp_path / "small.pth", tmp_path / "package"):
        found = fastamp.Predictor(path, device="cpu").calibration
        assert found.describe().replace("csv:people.csv", people) == calibration.describe()
        assert found.probability(0.5) == calibration.probability(0.5)
    card = (tmp_path / "package" / "README.md").read_text()
    assert "## Open-set decisions" in card and "csv:people.csv" in card and str(calibrated.parent) not in card
    content = torch.load(calibrated, weights_only=True)
    assert isinstance(Calibration.from_state(content["calibration"]), Calibration)


@pytest.mark.integration
@pytest.mark.parametrize("name", ["model.onnx", "model.pt2"])
def test_export_contains_the_calibration(calibrated, calibration, tmp_path, name):
    if name == "model.onnx":
        onnx = pytest.importorskip("onnx")
    report = export(fastamp.Predictor(calibrated, device="cpu"), tmp_path / name, data="")
    if name == "model.onnx":
        properties = {metadata_prop.key: metadata_prop.value for metadata_prop in onnx.load(report.path).metadata_props}
        found = json.loads(properties["calibration"])
    else:
        files = {"metadata.json": ""}
        torch.export.load(report.path, extra_files=files)
        found = json.loads(files["metadata.json"])["calibration"]
    assert found["same_threshold"] == calibration.same_threshold and found["source"] == "people.csv"
    assert np.interp(0.5, found["scores"], found["probabilities"]) == pytest.approx(calibration.probability(0.5))
    assert found["measured"]["far"]["high"] == calibration.measured.far.high


def test_evaluation_measures_the_rates_of_the_other_identities(calibrated, calibration, people, tmp_path, demo, caplog):
    options = ["TEST.REPORT", "True", "OUTPUT_DIR", str(tmp_path), "DATASETS.TESTS", f"('{people}', 'Demo')"]
    cfg, _ = evaluation_config("", options, source=str(calibrated))
    DefaultTrainer.test_weights(cfg)
    assert f"false accepts {calibration.measured.far}" in caplog.text
    report = (tmp_path / "report.html").read_text()
    assert report.count("<h3>Open-set decisions</h3>") == 2 and str(calibration.measured.fpir) in report
    assert "The 30 identities that chose the thresholds are excluded." in report
    assert "Reliability of the probability" in report and f"{calibration.same_threshold:.4f}" in report
    cfg, _ = evaluation_config("", [*options, "TEST.METRIC", "euclidean"], source=str(calibrated))
    DefaultTrainer.test_weights(cfg)
    assert "not evaluated" in caplog.text
    assert "Open-set decisions" not in (tmp_path / "report.html").read_text()


@pytest.mark.integration
def test_calibrate_command_writes_a_copy_and_overwrites_nothing(run_folder, people, tmp_path, capsys, caplog):
    checkpoint = tmp_path / "model_best.pth"
    checkpoint.write_bytes((run_folder / "model_best.pth").read_bytes())
    argv = (checkpoint, "--data", people, "--device", "cpu", *FLAGS)
    assert run_command(calibrate_command, *argv) == 0
    text = capsys.readouterr().out
    assert "stated false accept rate 5 %" in text and "model_best_calibrated.pth" in text
    target = tmp_path / "model_best_calibrated.pth"
    before, after = (torch.load(path, weights_only=True) for path in (checkpoint, target))
    assert after.keys() - before.keys() == {"calibration"} and "optimizer" in after
    for more in ((), ("--output", checkpoint), ("--output", tmp_path / "a.onnx"), ("--output", "a.pth", "--in-place")):
        with pytest.raises(ConfigError):
            run_command(calibrate_command, *argv, *more)
    for seed in ("1", "2"):
        assert run_command(calibrate_command, *argv, "--in-place", "--seed", seed) == 0
        assert fastamp.Predictor(checkpoint, device="cpu").calibration.seed == int(seed)
    assert caplog.text.count("calibration replaces") == 1
    with pytest.raises(ConfigError, match="--data"):
        run_command(calibrate_command, checkpoint, "--data", "Demoo", "--device", "cpu", "--output", tmp_path / "b.pth")


def test_identities_of_the_training_set_are_rejected(run_folder, people, tmp_path):
    with open(people.removeprefix("csv:")) as file:
        rows = list(csv.reader(file))
    rows += [[path, pid, camid, "train"] for path, pid, camid, split in rows[1:9]]
    with (tmp_path / "shared.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    name = f"csv:{tmp_path / 'shared.csv'}"
    predictor = fastamp.Predictor(run_folder, device="cpu", opts=["DATASETS.NAMES", f"('{name}',)"])
    with pytest.raises(DataError, match="2 of 60 "):
        calibrate_model(predictor, name, **RATES)
    with pytest.raises(DataError, match="identities"):
        calibrate_model(predictor, people, far=0.001)
    with pytest.raises(ConfigError, match="far"):
        calibrate_model(predictor, people, far=1.0)
    with pytest.raises(TypeError, match="fars"):
        calibrate_model(predictor, people, fars=0.1)


@pytest.mark.parametrize(
    "change", [{"far": float("inf")}, {"chosen": {}}, {"probabilities": torch.ones(2, 2)}, {"a": 1}]
)
def test_damaged_calibration_is_an_error(calibrated, tmp_path, change):
    content = torch.load(calibrated, weights_only=True)
    content["calibration"] |= change
    torch.save(content, tmp_path / "damaged.pth")
    with pytest.raises(WeightsError, match="calibration"):
        fastamp.Predictor(tmp_path / "damaged.pth", device="cpu")
    content["calibration"] = "text"
    torch.save(content, tmp_path / "damaged.pth")
    with pytest.raises(WeightsError, match="calibration"):
        fastamp.Predictor(tmp_path / "damaged.pth", device="cpu")
