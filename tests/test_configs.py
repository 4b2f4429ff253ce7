"""Tests of the recipes in configs/, and of the commands, keys and links in the README."""

import ast
import dataclasses
import json
import math
import re
from pathlib import Path

import old_configs
import pytest
import torch
import train_net

from fastamp.amp import OptimizationStep, PrecisionPolicy
from fastamp.config import get_cfg
from fastamp.engine import DefaultTrainer
from fastamp.modeling import build_model
from fastamp.modeling.backbones import swin, vit, vmamba
from fastamp.solver import build_gradient_clipping, build_lr_schedule, build_optimizers

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").rglob("*.yml"))
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def shallow_vit(monkeypatch):
    """Reduce ViTs to two blocks, and the stages of Swins and VMambas to two."""
    for name, depth in vit.DEPTHS.items():
        monkeypatch.setitem(vit.DEPTHS, name, dataclasses.replace(depth, blocks=2))
    for depths in (swin.DEPTHS, vmamba.DEPTHS):
        for name, depth in depths.items():
            monkeypatch.setitem(depths, name, dataclasses.replace(depth, blocks=(2, 2, 2, 2)))


# The smallest size that MGN can split in three; reference tests use the sizes of the recipes.
SIZE = (96, 48)


# Recipes that exist for several datasets and differ only in the dataset keys.
COPIES = [
    path
    for path in CONFIGS
    if path.parent.name in ("DukeMTMC", "MSMT17")
    and not {"vit", "solider", "pass", "ssl", "vmamba"} & {*path.stem.split("_")}
]


def load(path):
    cfg = get_cfg()
    cfg.merge_from_file(path)
    return cfg


def test_recipes_for_different_datasets_differ_only_in_dataset_and_output_keys(subtests):
    assert len(COPIES) == 30
    for path in COPIES:
        with subtests.test(str(path.relative_to(ROOT))):
            found, expected = values(load(path)), values(load(ROOT / "configs/Market1501" / path.name))
            differ = {key for key, value in found.items() if value != expected[key]}
            assert differ <= {"DATASETS.NAMES", "DATASETS.TESTS", "OUTPUT_DIR"}


@pytest.mark.integration
@pytest.mark.parametrize(
    "path", sorted({*CONFIGS} - {*COPIES}), ids=lambda path: str(path.relative_to(ROOT / "configs"))
)
def test_every_recipe_trains_for_one_step_and_evaluates(path, shallow_vit):
    cfg = load(path)
    cfg.merge_from_list(["MODEL.DEVICE", "cpu", "MODEL.BACKBONE.PRETRAIN", "False", "MODEL.HEADS.NUM_CLASSES", "2"])
    cfg.DATASETS.NUM_CATEGORIES = {"clothes": 4}
    if cfg.MODEL.META_ARCHITECTURE == "Distiller":  # there are no files of teachers
        cfg.merge_from_list(["KD.MODEL_CONFIG", (), "KD.MODEL_WEIGHTS", (), "KD.EMA.ENABLED", "True"])
    cfg.merge_from_list(["INPUT.SIZE_TRAIN", SIZE, "INPUT.SIZE_TEST", SIZE, "DATALOADER.TRACKLET.FRAMES", "2"])
    model = build_model(cfg)
    optimizers = list(build_optimizers(cfg, model).values())
    schedule = build_lr_schedule(cfg, 10)
    for group in optimizers[0].param_groups:
        group["lr"] = schedule.learning_rate(group["base_lr"], epoch=0, steps_taken=0)
    policy = PrecisionPolicy.from_config(cfg, torch.device("cpu"))
    step = OptimizationStep(model, optimizers, clip=build_gradient_clipping(cfg))
    batch = {"images": torch.randint(256, (4, 3, *SIZE), dtype=torch.uint8), "targets": torch.tensor([0, 0, 1, 1])}
    batch |= {"camids": torch.tensor([0, 1, 2, 3]), "viewids": torch.zeros(4, dtype=torch.int64)}
    batch |= {"modality": torch.tensor([0, 1, 0, 1]), "clothes": torch.tensor([0, 1, 2, 3])}
    batch["tracklet"] = torch.tensor([0, 0, 1, 1])
    step.zero_grad()
    with policy.autocast():
        losses = model.train()(batch)
    step.scale(losses).backward()
    assert step.finish().ok
    with torch.no_grad(), policy.for_evaluation(cfg.SOLVER.AMP.EVAL_DTYPE).autocast():
        features = model.eval()(batch)
    assert len(features) == 4 and torch.isfinite(features).all()


RECIPES = json.loads((ROOT / "tests/reference/fastreid_config_values.json").read_text())["resolved"]
# FastReID's file has a path of an author's machine.
PRIVATE = {"Market1501/bagtricks_vit.yml": {"MODEL.BACKBONE.PRETRAIN_PATH": ""}}


def of_fastamp_alone(recipe):
    """Return the keys, unknown to FastReID, that make fastamp compute FastReID's variant of a formula."""
    if RECIPES[recipe].get("MODEL.LOSSES.TRI.HARD_MINING", False):
        return {}
    return {"MODEL.LOSSES.TRI.WEIGHTING": "fastreid"}


def values(cfg):
    return {key.path: list(value) if isinstance(value, tuple) else value for key, value in cfg.keys_below()}


def test_recipes_equal_fastreid_recipes(subtests):
    for recipe in RECIPES:
        with subtests.test(recipe):
            expected = values(get_cfg()) | RECIPES[recipe] | PRIVATE.get(recipe, {})
            assert values(load(ROOT / "configs" / recipe)) == expected | of_fastamp_alone(recipe)


def in_fastreids_spelling(settings):
    """Format YAML in FastReID's style: quoted names, lists of names as tuple literals in strings, plain numbers."""
    lines, section = [], ()
    for path in sorted(settings):
        *sections, name = path.split(".")
        for depth, part in enumerate(sections):
            if tuple(sections[: depth + 1]) != section[: depth + 1]:
                lines.append("  " * depth + f"{part}:")
        section, value = tuple(sections), settings[path]
        if isinstance(value, list) and value and isinstance(value[0], str):
            value = "(" + "".join(f'"{text}", ' for text in value) + ")"
        elif isinstance(value, str):
            value = f'"{value}"'
        lines.append("  " * len(sections) + f"{name}: {value}")
    return "\n".join(lines)


@pytest.mark.integration
def test_recipe_in_the_yaml_style_of_fastreid_gives_the_same_config(tmp_path, subtests):
    for recipe in RECIPES:
        with subtests.test(recipe):
            (tmp_path / "recipe.yml").write_text(in_fastreids_spelling(RECIPES[recipe]))
            assert values(load(tmp_path / "recipe.yml")) == values(get_cfg()) | RECIPES[recipe]


@pytest.mark.integration
@pytest.mark.parametrize(
    "recipe", [f"Market1501/{name}.yml" for name in ("bagtricks_R50", "sbs_R101-ibn", "transreid_vit_base")]
)
def test_recipes_train_and_evaluate_end_to_end_on_small_images(demo, tmp_path, recipe, monkeypatch, shallow_vit):
    monkeypatch.setattr(DefaultTrainer, "build_train_loader", with_fewer_batches(DefaultTrainer.build_train_loader))
    code = train_net.cli([
        "--config-file", str(ROOT / "configs" / recipe), "MODEL.DEVICE", "cpu", "MODEL.BACKBONE.PRETRAIN", "False",
        "DATASETS.NAMES", "Demo", "DATASETS.TESTS", "Demo", "DATALOADER.NUM_INSTANCE", "4",
        "DATALOADER.NUM_WORKERS", "0",
        "INPUT.SIZE_TRAIN", "(64, 32)", "INPUT.SIZE_TEST", "(64, 32)", "INPUT.AUTOAUG.PROB", "0.5",
        "SOLVER.IMS_PER_BATCH", "8", "SOLVER.MAX_EPOCH", "1", "SOLVER.DELAY_EPOCHS", "0", "SOLVER.WARMUP_ITERS", "2",
        "SOLVER.FREEZE_ITERS", "2", "SOLVER.AMP", "bf16", "LOG_PERIOD", "1", "OUTPUT_DIR", str(tmp_path),
    ])  # fmt: skip
    assert code == 0
    rows = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    assert len([row for row in rows if "total_loss" in row]) == 4
    assert all(row["skipped_total"] == 0 for row in rows if "total_loss" in row)
    assert any("Demo/mAP" in row for row in rows)
    state = torch.load(tmp_path / "model_final.pth", weights_only=True)["model"]
    assert all(torch.isfinite(tensor).all() for tensor in state.values())


@pytest.mark.integration
def test_recipe_of_an_old_fastreid_release_trains_and_logs_translated_keys(demo, tmp_path, monkeypatch):
    """The schedule of the release changes the learning rate at every iteration, also during warm-up."""
    monkeypatch.setattr(DefaultTrainer, "build_train_loader", with_fewer_batches(DefaultTrainer.build_train_loader))
    old = old_configs.write(tmp_path) / "v0.1.1/configs/Market1501/sbs_R50-ibn.yml"
    code = train_net.cli([
        "--config-file", str(old), "MODEL.DEVICE", "cpu", "MODEL.BACKBONE.PRETRAIN", "False",
        "MODEL.BACKBONE.DEPTH", "18x", "MODEL.BACKBONE.FEAT_DIM", "512", "DATASETS.NAMES", "Demo", "DATASETS.TESTS",
        "Demo", "DATALOADER.NUM_INSTANCE", "4", "DATALOADER.NUM_WORKERS", "0", "INPUT.SIZE_TRAIN", "(64, 32)",
        "INPUT.SIZE_TEST", "(64, 32)", "SOLVER.IMS_PER_BATCH", "8", "SOLVER.MAX_EPOCH", "2", "SOLVER.WARMUP_EPOCHS",
        "1", "SOLVER.DELAY_EPOCHS", "1", "SOLVER.FREEZE_EPOCHS", "1", "LOG_PERIOD", "1", "OUTPUT_DIR",
        str(tmp_path / "run"),
    ])  # fmt: skip
    assert code == 0
    log = (tmp_path / "run/log.txt").read_text()
    assert "FastReID v0.1.1" in log
    assert "Base-bagtricks.yml: INPUT.DO_PAD True -> INPUT.PADDING.ENABLED True" in log
    assert "backbone: frozen until iteration 4" in log
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.json").read_text().splitlines()]
    base, end = 3.5e-4, 7.7e-7
    rates = [base * (0.01 + 0.99 * step / 4) for step in range(4)]
    rates += [end + (base - end) * (1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)]
    assert [row["lr"] for row in rows if "total_loss" in row] == pytest.approx(rates)


def with_fewer_batches(build):
    """Wrap ``build`` so that its loaders yield four batches per epoch."""

    def build_short(cls, cfg):
        loader = build(cfg)
        loader.batch_sampler.iters_per_epoch = 4
        return loader

    return classmethod(build_short)


def test_recipes_named_in_the_readme_exist():
    assert {"Base-bagtricks.yml", "bagtricks_R50.yml", "quickstart.yml"} <= {path.name for path in CONFIGS}


def test_python_code_and_links_in_the_readme_are_valid():
    for block in re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE):
        ast.parse(block)
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_config_keys_in_the_readme_exist():
    cfg = get_cfg()
    known = {key.path for key, _ in cfg.keys_below()}
    sections = {".".join(path.split(".")[:depth]) for path in known for depth in range(1, 4)}
    for key in re.findall(r"`((?:[A-Z][A-Z0-9_]*\.)+[A-Z][A-Z0-9_]*)\b", README):
        assert key in known | sections, key
