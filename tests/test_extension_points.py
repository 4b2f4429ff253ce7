"""Tests of custom components, each one Python file and one YAML file; most are those of the documentation."""

import json
import runpy
import sys
from dataclasses import replace

import import_checkpoint
import numpy as np
import pytest
import tiny
import torch
from documented import documented_config, documented_file
from PIL import Image

from fastamp import Predictor
from fastamp.cli import main
from fastamp.config import plugin_tables, read_config
from fastamp.data.datasets import DATASET_REGISTRY
from fastamp.data.transforms import TRANSFORM_REGISTRY, build_transforms
from fastamp.engine import TRAINER_REGISTRY
from fastamp.evaluation import EVALUATOR_REGISTRY, PROTOCOL_REGISTRY, Identities, Protocol, compute_metrics
from fastamp.inference.extract import extract
from fastamp.inference.outputs import OUTPUT_REGISTRY
from fastamp.modeling import BACKBONE_REGISTRY, HEADS_REGISTRY, LOSS_REGISTRY, META_ARCH_REGISTRY
from fastamp.retrieval.columns import ImageColumns
from fastamp.retrieval.features import Features
from fastamp.retrieval.features_file import write_features
from fastamp.retrieval.indices import INDEX_REGISTRY
from fastamp.retrieval.model_id import ModelId
from fastamp.retrieval.open_gallery import open_gallery
from fastamp.retrieval.search import search
from fastamp.utils.errors import DataError
from fastamp.utils.plugins import import_plugin_file

TRANSFORM = '''
"""Darken images."""

import torch

from fastamp.config import Key
from fastamp.data.transforms import TRANSFORM_REGISTRY, BatchTransform

KEYS = (
    Key("INPUT.DARKEN.ENABLED", False, "Darken training images at random."),
    Key("INPUT.DARKEN.PROB", 0.5, "Probability of darkening an image.", low=0, high=1),
)


@TRANSFORM_REGISTRY.register("DARKEN")
class Darken(BatchTransform):
    draws = 1
    before = "REA"

    def __init__(self, *, prob):
        self.prob = prob

    @classmethod
    def from_config(cls, cfg):
        return cls(prob=cfg.INPUT.DARKEN.PROB)

    def parameters(self, uniforms, size):
        return {"dark": torch.from_numpy(uniforms[:, 0] < self.prob)}

    def apply(self, images, parameters):
        return torch.where(parameters["dark"].to(images.device)[:, None, None, None], images // 2, images)
'''

REGISTRIES = (
    BACKBONE_REGISTRY,
    DATASET_REGISTRY,
    EVALUATOR_REGISTRY,
    HEADS_REGISTRY,
    LOSS_REGISTRY,
    META_ARCH_REGISTRY,
    OUTPUT_REGISTRY,
    PROTOCOL_REGISTRY,
    TRAINER_REGISTRY,
    TRANSFORM_REGISTRY,
    INDEX_REGISTRY,
)


@pytest.fixture(autouse=True)
def own_registries(monkeypatch):
    """Restore the registries after each test."""
    for registry in REGISTRIES:
        monkeypatch.setattr(registry, "_components", {name: registry.get(name) for name in registry})


@pytest.fixture
def project(demo, tmp_path):
    """Function that writes the Python file and the YAML file (two iterations) of a project and returns their paths."""

    def write(code, text):
        (tmp_path / "component.py").write_text(code)
        base = tiny.tiny_config(
            tmp_path / "run", "SOLVER.MAX_EPOCH", "1", "SOLVER.IMS_PER_BATCH", "48", "LOG_PERIOD", "1"
        )
        (tmp_path / "base.yml").write_text(base.dump())
        (tmp_path / "component.yml").write_text("_BASE_: base.yml\n" + text)
        return tmp_path / "component.py", tmp_path / "component.yml"

    return write


def train(component, recipe, *opts):
    """Train and return the training rows of metrics.json."""
    assert main(["train", "--plugin", str(component), "--config-file", str(recipe), *opts]) == 0
    rows = map(json.loads, (component.parent / "run/metrics.json").read_text().splitlines())
    return [row for row in rows if "total_loss" in row]


@pytest.mark.integration
def test_custom_loss_with_custom_config_keys_trains(project, input_error, capsys):
    loss = documented_file("extending/loss", "length_loss.py")
    component, recipe = project(loss, documented_config("extending/loss"))
    rows = train(component, recipe)
    assert len(rows) == 2 and all(row["loss_length"] > 0 for row in rows)
    command = ["train", "--plugin", str(component), "--config-file", str(recipe), "MODEL.LOSSES.LENGTH.SCALE"]
    assert "MODEL.LOSSES.LENGTH.SCALE must be at least 0; got -1.0" in input_error(main, [*command, "-1"])
    assert main(["config", "explain", "MODEL.LOSSES.LENGTH.SCALE", "--plugin", str(component)]) == 0
    assert "Length loss: weight in the total loss." in capsys.readouterr().out


@pytest.mark.integration
def test_custom_transform_is_applied_to_training_images(project):
    component, recipe = project(TRANSFORM, "INPUT: {DARKEN: {ENABLED: True, PROB: 1.0}, REA: False}")
    assert len(train(component, recipe)) == 2
    bright, dark = (
        build_transforms(read_config(str(recipe), opts, plugin=str(component))).augment
        for opts in (("INPUT.DARKEN", "False"), ())
    )
    images = torch.randint(256, (6, 3, 64, 32), dtype=torch.uint8)
    # The random draws of other transforms do not change.
    expected = bright.apply(images, bright.draw([0] * 6, range(6), (64, 32))) // 2
    assert torch.equal(dark.apply(images, dark.draw([0] * 6, range(6), (64, 32))), expected)
    cfg = read_config(str(recipe), ("INPUT.REA", "True"), plugin=str(component))
    names = [type(transform).__name__ for transform in build_transforms(cfg).augment.transforms]
    assert names == ["PadAndRandomCrop", "RandomHorizontalFlip", "Darken", "RandomErasing"]


@pytest.mark.integration
def test_custom_backbone_trains_and_import_checkpoint_recognizes_the_weights(project, tmp_path, capsys):
    backbone = documented_file("extending/backbone", "patchnet.py")
    component, recipe = project(backbone, documented_config("extending/backbone"))
    assert len(train(component, recipe)) == 2
    state = tiny.weights(tmp_path / "run/model_final.pth")
    # Its weights are recognized, under its own names and under those of the original implementation.
    foreign = {name.replace("backbone.patches.", "backbone.embed."): value for name, value in state.items()}
    for number, content in enumerate((state, foreign)):
        source, target = tmp_path / f"in{number}.pth", tmp_path / f"out{number}.pth"
        torch.save(content, source)
        assert import_checkpoint.cli([str(source), str(target), "--plugin", str(component)]) == 0
        report = capsys.readouterr().out
        assert "NAME build_patchnet_backbone MODEL.BACKBONE.DEPTH wide MODEL.BACKBONE.WITH_GATE True" in report
        assert "(100%) of the model's tensors, 100% of the backbone's" in report
        imported = tiny.weights(target)
        assert all(torch.equal(imported[name], value) for name, value in state.items() if name.startswith("backbone."))
    torch.save({"teacher": {name.removeprefix("backbone."): value for name, value in state.items()}}, source)
    assert import_checkpoint.cli([str(source), str(target), "--plugin", str(component)]) == 2
    assert "--prefix teacher.   (patchnet)" in capsys.readouterr().err


@pytest.mark.integration
def test_training_and_evaluation_run_on_a_custom_dataset(project, demo, tmp_path, monkeypatch):
    generator = np.random.default_rng(0)
    places = [
        ("train", str(pid), camera, number) for pid in range(12) for camera in ("barn", "field") for number in range(4)
    ]
    places += [("query", "101", "barn", 0), ("gallery", "101", "field", 0), ("gallery", "102", "field", 0)]
    for split, pid, camera, number in places:
        file = tmp_path / "data/cows" / split / pid / f"{camera}_{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (64, 32, 3), dtype=np.uint8)).save(file)
    monkeypatch.setenv("FASTAMP_DATASETS", str(tmp_path / "data"))
    dataset = documented_file("extending/dataset", "cows.py")
    component, recipe = project(dataset, documented_config("extending/dataset"))
    assert len(train(component, recipe)) == 2
    assert "Cows/mAP" in (tmp_path / "run/metrics.json").read_text()


def test_dataset_with_a_list_of_images_is_read(project, tmp_path, monkeypatch):
    folder = tmp_path / "data/listed"
    folder.mkdir(parents=True)
    for split, pids in (("train", range(2)), ("query", [7]), ("gallery", [7, 8])):
        lines = [f"{split}_{pid}.png {pid} {number}" for number, pid in enumerate(pids)]
        (folder / f"{split}.txt").write_text("\n".join(lines))
    component, _ = project(documented_file("extending/dataset", "listed.py"), "")
    read_config("Demo/quickstart", [], plugin=str(component))
    dataset = DATASET_REGISTRY.get("Listed")(root=tmp_path / "data")
    assert [(item.pid, item.camid) for item in dataset.train] == [("listed_0", "listed_0"), ("listed_1", "listed_1")]
    assert [(item.pid, item.camid) for item in dataset.gallery] == [(7, 0), (8, 1)]
    with pytest.raises(DataError, match="listed"):
        DATASET_REGISTRY.get("Listed")(root=tmp_path)


def test_documented_protocol_can_be_named_in_a_config(project):
    code, text = documented_file("extending/protocol", "other_time.py"), documented_config("extending/protocol")
    component, recipe = project(code, text)
    protocol = Protocol.from_config(read_config(str(recipe), [], plugin=str(component)))
    ids = torch.tensor([0]), torch.tensor([0, 0, 1]), torch.tensor([0]), torch.tensor([0, 0, 0])
    features = torch.tensor([[0.0]]), torch.tensor([[0.1], [0.3], [0.2]])
    identities = Identities(*ids, {"hour": (torch.tensor([5]), torch.tensor([5, 6, 5]))})
    found = compute_metrics(*features, identities, replace(protocol, metric="euclidean"))
    assert found.ranking.first_match.tolist() == [[1]]
    with pytest.raises(DataError, match="hour"):
        compute_metrics(*features, Identities(*ids), protocol)


EVALUATOR = '''
"""Report the mean brightness of the test images, from an output of the model besides its features."""

from fastamp.config import plugin_tables
from fastamp.evaluation import EVALUATOR_REGISTRY, ReidEvaluator
from fastamp.modeling import META_ARCH_REGISTRY
from fastamp.modeling.meta_arch import Baseline


@META_ARCH_REGISTRY.register()
class BrightBaseline(Baseline):
    evaluator = "BrightEvaluator"


@EVALUATOR_REGISTRY.register()
class BrightEvaluator(ReidEvaluator):
    def reset(self):
        super().reset()
        self.brightness = []

    def forward(self, model, batch):
        return super().forward(model, batch), batch["images"].float().mean((1, 2, 3))

    def process(self, inputs, outputs):
        super().process(inputs, outputs[0])
        self.brightness += outputs[1].tolist()

    def evaluate(self):
        return super().evaluate() | {"brightness": sum(self.brightness) / len(self.brightness)}
'''


@pytest.mark.integration
@pytest.mark.parametrize("text", ["MODEL: {META_ARCHITECTURE: BrightBaseline}", "TEST: {EVALUATOR: BrightEvaluator}"])
def test_registered_evaluator_is_built_for_the_model_or_by_name(text, project, input_error):
    component, recipe = project(EVALUATOR, text)
    train(component, recipe)
    rows = map(json.loads, (component.parent / "run/metrics.json").read_text().splitlines())
    (evaluated,) = [row for row in rows if any("brightness" in name for name in row)]
    assert 0 < next(value for name, value in evaluated.items() if "brightness" in name) < 255
    command = ["train", "--plugin", str(component), "--config-file", str(recipe), "TEST.EVALUATOR", "BrightEvaluatr"]
    assert "BrightEvaluator" in input_error(main, command)


@pytest.mark.integration
@pytest.mark.parametrize(("page", "title"), [("head", "dropout_head.py"), ("trainer", "noise_trainer.py")])
def test_documented_component_trains(page, title, project):
    component, recipe = project(documented_file(f"extending/{page}", title), documented_config(f"extending/{page}"))
    assert len(train(component, recipe)) == 2


@pytest.mark.integration
@pytest.mark.parametrize(
    ("page", "title", "expected"),
    [
        ("hook", "train_with_hook.py", "epoch 1: 96 images, 2 optimizer steps"),
        ("evaluator", "train_with_evaluator.py", "mean norm"),
        ("command", "count_parameters.py", " parameters\n"),
    ],
)
def test_documented_script_runs(page, title, expected, project, capsys, monkeypatch):
    script, recipe = project(documented_file(f"extending/{page}", title), "")
    monkeypatch.setattr("sys.argv", [title, "--config-file", str(recipe)])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(script), run_name="__main__")
    output = capsys.readouterr()
    assert stop.value.code == 0 and expected in output.out + output.err


@pytest.mark.integration
def test_documented_report_section_is_in_the_report(project):
    code = documented_file("extending/evaluator", "small_features.py")
    component, recipe = project(code, "TEST: {EVALUATOR: SmallFeatures, REPORT: True}")
    train(component, recipe)
    assert "Norms of the features" in (component.parent / "run/report.html").read_text()


@pytest.fixture
def query_image(tmp_path):
    """Image in a folder of its own."""
    path = tmp_path / "images/query.png"
    path.parent.mkdir()
    Image.effect_noise((32, 64), 90).convert("RGB").save(path)
    return path


def test_documented_predictor_output_is_computed_and_stored(checkpoint, query_image, tmp_path):
    (tmp_path / "quality.py").write_text(documented_file("extending/output", "quality.py"))
    predictor = Predictor(checkpoint, device="cpu", plugin=str(tmp_path / "quality.py"))
    (values,) = predictor.predict("quality", query_image)
    assert values == {"norm": pytest.approx(predictor.features(query_image).norm().item())}
    extraction, _ = extract(predictor, query_image.parent, tmp_path / "features.npz", num_workers=0)
    norms = np.linalg.norm(extraction.matrix, axis=1)
    np.testing.assert_allclose(extraction.images.further["probability.norm"], norms, rtol=1e-5)


@pytest.fixture
def plugin_project(tmp_path, monkeypatch):
    """Function that writes a project with files and a table in its plugin.py."""
    monkeypatch.setattr("sys.path", [*sys.path])

    def write(table, **files):
        (tmp_path / "plugin.py").write_text(f"\n{table}\n")
        for name, code in files.items():
            (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.setattr(plugin_tables, "list_projects", lambda: {"Mine": tmp_path})

    return write


def test_documented_command_is_listed_and_runs(plugin_project, capsys):
    code = documented_file("extending/command", "part_sizes.py")
    plugin_project('COMMANDS = {"part-sizes": ("part_sizes", "count the parameters of each part")}', part_sizes=code)
    assert main(["help"]) == 0 and "part-sizes" in capsys.readouterr().out
    assert main(["part-sizes", "Demo/quickstart", "MODEL.DEVICE", "cpu"]) == 0
    sizes = dict(line.split() for line in capsys.readouterr().out.splitlines() if line.count(" ") == 1)
    assert int(sizes["backbone"]) > int(sizes["heads"]) > 0
    assert main(["part-size"]) == 2 and "part-sizes" in capsys.readouterr().err


def test_command_of_a_plugin_cannot_replace_one_of_fastamp(plugin_project, capsys):
    plugin_project('COMMANDS = {"train": ("part_sizes", "count")}')
    assert main(["help"]) == 2 and "'train'" in capsys.readouterr().err


def test_documented_search_term_limits_the_search(plugin_project, checkpoint, query_image, tmp_path, capsys):
    code = documented_file("extending/search-term", "species_term.py")
    plugin_project('SEARCH_TERMS = {"species": ("species_term:Species", "a species")}', species_term=code)
    lines = [f"{query_image},{number},{species}" for number, species in enumerate(("fox", "cat", "fox"))]
    (tmp_path / "table.csv").write_text("\n".join(["path,pid,species", *lines]))
    predictor = Predictor(checkpoint, device="cpu")
    extract(predictor, f"csv:{tmp_path / 'table.csv'}", tmp_path / "animals.npz", num_workers=0)
    command = ["search", str(checkpoint), "--gallery", str(tmp_path / "animals.npz"), "--device", "cpu", "--json"]
    for query, expected in (([str(query_image)], [0, 2]), ([], [0, 2, 1])):  # without a query, all are ranked
        assert main([*command[:2], *query, *command[2:], "--species", "fox"]) == 0
        (found,) = json.loads(capsys.readouterr().out)
        assert [row["pid"] for row in found["found"]] == expected and found["found"][0]["species"] == "fox"
    assert main(command) == 2 and "--species" in capsys.readouterr().err


def test_documented_index_kind_is_built_measured_and_read_again(tmp_path, monkeypatch):
    (tmp_path / "scalar_codes.py").write_text(documented_file("extending/index-kind", "scalar_codes.py"))
    import_plugin_file(tmp_path / "scalar_codes.py")
    matrix, numbers = np.random.default_rng(0).standard_normal((500, 8)).astype(np.float32), np.arange(500)
    images = ImageColumns(paths=numbers.astype(str), pids=numbers, camids=numbers)
    write_features(Features(tmp_path / "a.npz", matrix, images, ModelId(8, "euclidean", "hash", "model.pth")))
    for options in ({"kind": "sq8"}, {}):  # the second one reads it
        gallery = open_gallery(tmp_path / "a.npz", **options)
        assert gallery.kind == "sq8" and gallery.recall > 0.98
        assert search(matrix[:9], gallery, 1).rows[:, 0].tolist() == list(range(9))
    monkeypatch.setattr(INDEX_REGISTRY, "_components", {})
    with pytest.raises(DataError, match="'sq8'"):
        open_gallery(tmp_path / "a.npz")
