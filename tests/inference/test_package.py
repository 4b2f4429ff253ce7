"""Tests of packaged models: equality with the checkpoint, use as SOURCE, model card and license."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
import yaml

import fastamp
from fastamp.checkpoint import read_checkpoint
from fastamp.cli import main
from fastamp.inference.package import License, check_packaged, package
from fastamp.utils.errors import ConfigError, WeightsError

IMAGES = list(np.random.default_rng(0).integers(0, 256, (5, 64, 32, 3), dtype=np.uint8))
MIT = License(name="mit")


@pytest.fixture(scope="module")
def packaged(run_folder, tmp_path_factory):
    """Package of the bfloat16 run."""
    return package(run_folder, tmp_path_factory.mktemp("package") / "model", license=MIT).folder


def read_card(folder):
    """Return the metadata and the text of a model card."""
    _, metadata, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(metadata), text


def metrics_of(run):
    """Return the last row with metrics in metrics.json."""
    rows = [json.loads(line) for line in (run / "metrics.json").read_text().splitlines()]
    return next(row for row in reversed(rows) if "Demo/mAP" in row)


def test_package_contains_only_weights_config_and_card(packaged):
    assert sorted(path.name for path in packaged.iterdir()) == ["README.md", "config.yaml", "model.safetensors"]
    assert not list(packaged.parent.glob(".*"))


@pytest.mark.integration
@pytest.mark.parametrize(
    "options",
    [
        ("SOLVER.AMP", "bf16"),
        ("SOLVER.EMA", "True", "SOLVER.EMA.DECAY", "0.5"),
        ("SOLVER.SWA.ENABLED", "True", "SOLVER.SWA.START_EPOCH", "0"),
        ("MODEL.BACKBONE.NAME", "build_plain_backbone", "MODEL.HEADS.WITH_BNNECK", "False", "TEST.FLIP", "True"),
    ],
)
def test_packaged_model_gives_bit_identical_features(demo, tmp_path, options):
    run = tmp_path / "run"
    tiny.train(run, *options)
    package(run, tmp_path / "model", license=MIT)
    before, after = fastamp.Predictor(run, device="cpu"), fastamp.from_pretrained(tmp_path / "model", device="cpu")
    assert torch.equal(before.features(IMAGES), after.features(IMAGES))
    assert before.config_hash == after.config_hash and before.policy == after.policy
    assert before.compare(*IMAGES[:2]).describe() == after.compare(*IMAGES[:2]).describe()
    weights = after.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in before.model.state_dict().items())
    if "SOLVER.EMA" in options:  # the average differs from the trained weights
        raw = fastamp.Predictor(run / "model_final.pth", device="cpu", opts=["SOLVER.EMA.EVALUATE", "False"])
        assert not torch.equal(raw.features(IMAGES), after.features(IMAGES))


def test_card_has_the_metrics_that_the_run_recorded(run_folder, packaged):
    metadata, text = read_card(packaged)
    row = metrics_of(run_folder)
    (result,) = metadata["model-index"][0]["results"]
    values = {metric["type"]: metric["value"] for metric in result["metrics"]}
    assert values == {name: round(row[f"Demo/{name}"], 4) for name in ("Rank-1", "Rank-5", "Rank-10", "mAP", "mINP")}
    shown = f"{row['Demo/mAP']:.2f} ({row['Demo/mAP low']:.2f} to {row['Demo/mAP high']:.2f})"
    assert f"| {shown} |" in text and "Market-1501 (images of the query's identity and camera are junk)" in text
    assert metadata["license"] == "mit" and metadata["library_name"] == "fastamp"
    assert "bfloat16 mixed precision" in text and f"torch {torch.__version__}" in text
    assert "fastamp eval model DATASETS.TESTS '[\"Demo\"]' OUTPUT_DIR" in text and "pypi" not in text
    assert "trained with fastamp" in text and "identity sampler" in text
    assert "dimension 16" in text and "SAMPLER_TRAIN: NaiveIdentitySampler" in text
    assert "Responsible use" in text


def test_versions_of_another_type_are_a_missing_fact_of_the_card(run_folder, tmp_path):
    content = torch.load(run_folder / "model_best.pth", weights_only=True)
    torch.save(content | {"versions": torch.zeros(2)}, tmp_path / "model.pth")
    assert main(["push", str(tmp_path / "model.pth"), "--license", "mit", "--to", str(tmp_path / "card")]) == 0
    assert (tmp_path / "card/README.md").is_file()


def test_card_states_that_metrics_are_missing_and_eval_adds_them(demo, run_folder, tmp_path, capsys):
    content = torch.load(run_folder / "model_best.pth", weights_only=True)
    for name in ("evaluation", "versions", "policy", "best", "pairs"):
        del content[name]
    torch.save(content, tmp_path / "model.pth")
    command = ["push", str(tmp_path / "model.pth"), "--license", "mit", "--to"]
    assert main([*command, str(tmp_path / "without")]) == 0
    metadata, text = read_card(tmp_path / "without")
    assert "model-index" not in metadata and "--metrics metrics_eval.json" in text
    text = text.replace(re.search("````yaml.*````", text, re.DOTALL).group(), "")
    for fact in (
        "trained with",
        "Trained",
        "optimizer `",
        "epochs;",
        "identity sampler",
        "random",
        "evaluation during",
    ):
        assert fact not in text, fact
    assert "DATASETS.TESTS" not in text and text.count("unknown") >= 3
    others = ["DATASETS.NAMES", "('Market1501',)"]  # of which the file has no record
    assert main(["eval", str(tmp_path / "model.pth"), "OUTPUT_DIR", str(tmp_path / "eval"), *others]) == 0
    log = (tmp_path / "eval/log.txt").read_text()
    assert "evaluation results" in log and "trained on" not in log
    found = json.loads((tmp_path / "eval/metrics_eval.json").read_text())
    assert main([*command, str(tmp_path / "with"), "--metrics", str(tmp_path / "eval/metrics_eval.json")]) == 0
    metadata, text = read_card(tmp_path / "with")
    values = {metric["type"]: metric["value"] for metric in metadata["model-index"][0]["results"][0]["metrics"]}
    assert values["mAP"] == round(found["metrics"]["Demo"]["mAP"], 4)
    capsys.readouterr()
    # of another file, and of this file with other features
    assert main(["push", str(run_folder), *command[2:], str(tmp_path / "x"), "--metrics",
                 str(tmp_path / "eval/metrics_eval.json")]) == 2  # fmt: skip
    assert "another file" in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "model.pth"), "OUTPUT_DIR", str(tmp_path / "flip"), "TEST.FLIP", "True"]) == 0
    assert main([*command, str(tmp_path / "x"), "--metrics", str(tmp_path / "flip/metrics_eval.json")]) == 2
    assert "TEST.FLIP.ENABLED True" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_metrics_of_other_weights_are_not_in_the_card(run_folder, tmp_path, caplog):
    content = torch.load(run_folder / "model_best.pth", weights_only=True)
    content["evaluation"]["weights"] = "ema"
    torch.save(content, tmp_path / "model.pth")
    found = package(tmp_path / "model.pth", tmp_path / "model", license=MIT)
    assert not found.metrics and "evaluated the ema weights" in caplog.text
    assert "model-index" not in read_card(tmp_path / "model")[0]


def test_damaged_metrics_and_evaluations_are_input_errors(run_folder, tmp_path):
    metrics = tmp_path / "metrics.json"
    metrics.write_text("[]")
    with pytest.raises(ConfigError, match=r"metrics\.json"):
        package(run_folder, tmp_path / "model", license=MIT, metrics=metrics)
    content = torch.load(run_folder / "model_best.pth", weights_only=True)
    for evaluation in ([1], {"weights": "model"}, content["evaluation"] | {"metrics": 3}):
        torch.save(content | {"evaluation": evaluation}, tmp_path / "model.pth")
        with pytest.raises(WeightsError, match="evaluation"):
            package(tmp_path / "model.pth", tmp_path / "model", license=MIT)


@pytest.mark.integration
def test_checkpoint_after_further_training_has_no_metrics(demo, tmp_path):
    tiny.train(tmp_path, "SOLVER.MAX_EPOCH", "3", "TEST.EVAL_PERIOD", "2")
    entries = {path.name: torch.load(path, weights_only=True) for path in tmp_path.glob("model_*.pth")}
    assert {name for name, entry in entries.items() if "evaluation" in entry} >= {"model_best.pth", "model_final.pth"}
    assert "evaluation" not in entries["model_0000.pth"] and "evaluation" in entries["model_0001.pth"]
    found = entries["model_final.pth"]["evaluation"]["metrics"]["Demo"]
    assert found["mAP"] == metrics_of(tmp_path)["Demo/mAP"]


@pytest.mark.integration
def test_swa_metrics_are_those_of_the_average_only_after_the_last_epoch(demo, tmp_path):
    tiny.train(tmp_path, "SOLVER.SWA.ENABLED", "True", "SOLVER.SWA.START_EPOCH", "0", "SOLVER.MAX_EPOCH", "2",
               "TEST.EVAL_PERIOD", "1")  # fmt: skip
    kinds = {
        name: torch.load(tmp_path / f"{name}.pth", weights_only=True)["evaluation"]["weights"]
        for name in ("model_0000", "model_final")
    }
    assert kinds == {"model_0000": "model", "model_final": "swa"}


def test_local_paths_are_not_published(run_folder, tmp_path):
    content = torch.load(run_folder / "model_best.pth", weights_only=True)
    config = yaml.safe_load(content["config"])
    name = "csv:/home/alice/secret/cameras.csv"
    config["DATASETS"] |= {"NAMES": [name], "TESTS": [name, "folder:~/secret/images/"]}
    config["OUTPUT_DIR"], config["DATALOADER"]["CACHE_DIR"] = "/home/alice/secret/run", "/home/alice/secret/cache"
    config["MODEL"]["WEIGHTS"] = "/home/alice/secret/imagenet.pth"
    content["config"] = yaml.safe_dump(config)
    content["evaluation"]["metrics"] = {name: content["evaluation"]["metrics"].pop("Demo")}
    content["pairs"] = {name: content["pairs"].pop("Demo")}
    torch.save(content, tmp_path / "model.pth")
    package(tmp_path / "model.pth", tmp_path / "model", license=MIT)
    for path in (tmp_path / "model").iterdir():
        assert b"secret" not in path.read_bytes() and b"alice" not in path.read_bytes(), path
    _, text = read_card(tmp_path / "model")
    assert "`csv:cameras.csv`" in text and "`imagenet.pth`" in text
    cfg = fastamp.from_pretrained(tmp_path / "model").cfg
    assert list(cfg.DATASETS.TESTS) == ["csv:cameras.csv", "folder:images"]


def test_names_cannot_break_the_card(run_folder, tmp_path):
    content = torch.load(run_folder / "model_best.pth", weights_only=True)
    config = yaml.safe_load(content["config"])
    name = "csv:a`|\n# Title\n---\n````<script>.csv"
    config["DATASETS"]["NAMES"] = config["DATASETS"]["TESTS"] = [name]
    content["config"] = yaml.safe_dump(config)
    content["evaluation"]["metrics"] = {name: content["evaluation"]["metrics"].pop("Demo")}
    torch.save(content, tmp_path / "model.pth")
    package(tmp_path / "model.pth", tmp_path / "model", license=MIT)
    text = (tmp_path / "model/README.md").read_text()
    metadata = yaml.safe_load(re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)[1])
    assert metadata["model-index"][0]["results"][0]["dataset"]["name"] == name
    body = text.split("\n---\n", 1)[1]
    assert "\n# Title" not in body and body.count("\n````\n") == 1


@pytest.mark.integration
def test_commands_accept_a_packaged_model(demo, run_folder, packaged, tmp_path, capsys):
    def metrics(source, name):
        assert main(["eval", str(source), "OUTPUT_DIR", str(tmp_path / name)]) == 0
        return json.loads((tmp_path / name / "metrics_eval.json").read_text())["metrics"]

    assert metrics(packaged, "a") == metrics(run_folder, "b") == metrics(packaged / "model.safetensors", "c")
    extract = ["extract", "Demo", "--splits", "query", "--device", "cpu"]
    for source, name in ((packaged, "a.npz"), (run_folder, "b.npz")):
        assert main(["extract", str(source), *extract[1:], "-o", str(tmp_path / name)]) == 0
    assert np.array_equal(np.load(tmp_path / "a.npz")["features"], np.load(tmp_path / "b.npz")["features"])
    query = next(Path(demo).rglob("query/*.jpg"))
    assert main(["search", str(packaged), str(query), "--gallery", str(tmp_path / "b.npz"), "--device", "cpu"]) == 0
    assert main(["strip", str(packaged), str(tmp_path / "stripped.pth")]) == 0
    assert main(["config", "diff", str(packaged), str(run_folder)]) == 0
    options = tiny.tiny_options(tmp_path / "tuned", "SOLVER.MAX_EPOCH", "1")
    assert main(["train", "MODEL.WEIGHTS", str(packaged / "model.safetensors"), *options]) == 0
    assert main(["train", str(packaged), "OUTPUT_DIR", str(tmp_path / "again"), "MODEL.DEVICE", "cpu"]) == 0
    assert sorted(path.name for path in packaged.iterdir()) == ["README.md", "config.yaml", "model.safetensors"]


def test_export_of_a_packaged_model_equals_the_model(demo, packaged, tmp_path):
    assert main(["export", str(packaged), str(tmp_path / "model.pt2"), "--device", "cpu"]) == 0


def test_moved_and_linked_packages_load(packaged, tmp_path):
    shutil.copytree(packaged, tmp_path / "copy")
    (tmp_path / "link").mkdir()
    for path in packaged.iterdir():  # as in the cache of huggingface_hub
        (tmp_path / "link" / path.name).symlink_to(path)
    features = [fastamp.from_pretrained(tmp_path / name).features(IMAGES) for name in ("copy", "link")]
    assert torch.equal(*features)


def test_opts_override_the_config_and_edited_config_is_used(packaged, tmp_path):
    predictor = fastamp.from_pretrained(packaged, opts=["SOLVER.AMP.EVAL_DTYPE", "float32"])
    assert predictor.policy.dtype == torch.float32
    shutil.copytree(packaged, tmp_path / "model")
    config = (tmp_path / "model/config.yaml").read_text()
    (tmp_path / "model/config.yaml").write_text(config.replace("IMS_PER_BATCH: 64", "IMS_PER_BATCH: 2"))
    assert fastamp.from_pretrained(tmp_path / "model").cfg.TEST.IMS_PER_BATCH == 2
    (tmp_path / "model/config.yaml").unlink()
    with pytest.raises(WeightsError, match="model.safetensors(.|\n)*fastamp import"):
        fastamp.from_pretrained(tmp_path / "model")


def test_model_with_a_plugin_needs_it_and_the_card_names_it(run_folder, tmp_path, input_error):
    plugin = tmp_path / "my_parts.py"
    plugin.write_text(
        "from fastamp.config import Key\nfrom fastamp.modeling import BACKBONE_REGISTRY\n"
        "KEYS = (Key('MODEL.BACKBONE.MINE', 3, 'Test.'),)\n"
        "@BACKBONE_REGISTRY.register()\ndef build_mine(cfg):\n"
        "    return BACKBONE_REGISTRY.get('build_tiny_backbone')(cfg)\n"
    )
    content = torch.load(run_folder / "model_best.pth", weights_only=True)
    config = yaml.safe_load(content["config"])
    config["MODEL"]["BACKBONE"] |= {"NAME": "build_mine", "MINE": 4}
    torch.save(content | {"config": yaml.safe_dump(config)}, tmp_path / "model.pth")
    command = ["push", str(tmp_path / "model.pth"), "--license", "mit", "--to", str(tmp_path / "model")]
    assert "--plugin" in input_error(main, command) and not list(tmp_path.glob(".model*"))
    assert main([*command, "--plugin", str(plugin)]) == 0
    _, text = read_card(tmp_path / "model")
    assert 'from_pretrained("model", plugin="my_parts.py")' in text and "executed" in text
    assert not list((tmp_path / "model").glob("*.py"))
    published = (tmp_path / "model/config.yaml").read_text()
    assert str(tmp_path) not in published and yaml.safe_load(published)["fastamp_format"] == 1
    with pytest.raises(WeightsError, match="plugin"):
        fastamp.from_pretrained(tmp_path / "model")
    loaded = fastamp.from_pretrained(tmp_path / "model", plugin=str(plugin))
    assert torch.equal(loaded.features(IMAGES), fastamp.Predictor(run_folder).features(IMAGES))


@pytest.mark.parametrize("options", [(), ("--license", "MIT License"), ("--license", "other", "--license-name", "X")])
def test_license_is_required_and_complete(run_folder, tmp_path, options, capsys):
    assert main(["push", str(run_folder), "--to", str(tmp_path / "model"), *options]) == 2
    assert "license" in capsys.readouterr().err and not (tmp_path / "model").exists()


def test_other_license_links_to_a_file_that_must_exist(run_folder, tmp_path):
    license = License(name="other", title="my-license", link="LICENSE")
    folder = package(run_folder, tmp_path / "model", license=license).folder
    assert read_card(folder)[0]["license_name"] == "my-license"
    with pytest.raises(ConfigError, match="LICENSE"):
        check_packaged(folder)
    (folder / "LICENSE").write_text("...")
    assert check_packaged(folder) == license


def test_folder_is_checked_before_an_upload(packaged, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(packaged, folder)
    assert check_packaged(folder) == MIT
    card = (folder / "README.md").read_text()
    (folder / "README.md").write_text(card.replace("license: mit\n", ""))
    with pytest.raises(ConfigError, match="license"):
        check_packaged(folder)
    (folder / "README.md").write_text("# Model\n")
    with pytest.raises(ConfigError, match="license"):
        check_packaged(folder)
    (folder / "README.md").unlink()
    with pytest.raises(ConfigError, match=r"README\.md"):
        check_packaged(folder)


def test_existing_output_folder_is_not_changed(run_folder, packaged, tmp_path, input_error):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    for folder in (tmp_path / "full", tmp_path / "full/notes.txt"):
        with pytest.raises(ConfigError, match="exists"):
            package(run_folder, folder, license=MIT)
    (tmp_path / "empty").mkdir()
    package(run_folder, tmp_path / "empty", license=MIT)
    assert read_checkpoint(tmp_path / "empty/model.safetensors").keys() >= {"model", "config"}
    assert "already packaged" in input_error(main, ["push", str(packaged), "--to", str(tmp_path / "again")])
