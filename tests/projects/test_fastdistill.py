"""FastDistill: overhaul distillation against FastReID's numbers and a naive loop, teachers, training and recipes."""

import json
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import reference_weights
import tiny
import torch
from project_recipes import check_equal_to_fastreid, files_of
from torch import nn

from fastamp.config import read_config
from fastamp.config.projects import import_project
from fastamp.engine import DefaultTrainer
from fastamp.modeling import BACKBONE_REGISTRY, build_backbone, build_model
from fastamp.modeling.backbones.resnet import BasicBlock, BlockParts
from fastamp.modeling.losses.distillation import distillation_loss
from fastamp.utils.errors import ConfigError

REFERENCE = Path(__file__).parents[1] / "reference"
METHODS = REFERENCE / "methods"
SMALL = (
    "MODEL.BACKBONE.NAME", "build_two_stages", "MODEL.BACKBONE.FEAT_DIM", "16", "MODEL.HEADS.NUM_CLASSES", "4",
)  # fmt: skip
TEACHER = ("MODEL.BACKBONE.FEAT_DIM", "32")
RESNET = (
    "MODEL.BACKBONE.NAME", "build_resnet_backbone_distill", "MODEL.BACKBONE.LAST_STRIDE", "1", "MODEL.BACKBONE.DEPTH",
)  # fmt: skip
IMAGES = torch.arange(4 * 3 * 32 * 16).view(4, 3, 32, 16) * 37 % 251
BATCH = {"images": IMAGES, "targets": torch.arange(4) // 2}


@pytest.fixture(scope="module")
def fastdistill():
    import_project("FastDistill")
    import fastdistill
    import fastdistill.distiller_overhaul
    import fastdistill.overhaul
    import fastdistill.stages

    BACKBONE_REGISTRY.register("build_two_stages")(build_two_stages)
    return fastdistill


def build_two_stages(cfg):
    """Build a residual network of two stages, (B, 3, H, W) -> (B, FEAT_DIM, H / 8, W / 8)."""
    width, parts = cfg.MODEL.BACKBONE.FEAT_DIM // 2, BlockParts()
    stride = cfg.MODEL.BACKBONE.LAST_STRIDE + 1
    shortcut = nn.Conv2d(width, 2 * width, 1, stride, bias=False)
    stages = {
        "conv1": nn.Conv2d(3, width, 5, stride=4, padding=2, bias=False),
        "layer1": nn.Sequential(BasicBlock(width, width, stride=1, parts=parts, downsample=None)),
        "layer2": nn.Sequential(BasicBlock(width, 2 * width, stride=stride, parts=parts, downsample=shortcut)),
    }
    return nn.Sequential(OrderedDict(stages))


@pytest.fixture(scope="module")
def teacher(fastdistill, tmp_path_factory):
    """KEY VALUE pairs of a teacher of twice the student's width."""
    return write_teacher(tmp_path_factory.mktemp("teacher"), *TEACHER)


def config(folder, *opts):
    return tiny.tiny_config(folder, "PROJECTS", "[FastDistill]", *SMALL, *opts)


def write_teacher(folder, *opts, name="teacher"):
    cfg = config(folder / "unused", *opts)
    (folder / f"{name}.yml").write_text(cfg.dump())
    torch.manual_seed(3)
    model = build_model(cfg)
    with torch.no_grad():
        for norm in model.modules():
            if isinstance(norm, nn.BatchNorm2d) and norm.bias.requires_grad:
                norm.bias.normal_(0, 0.5)
                norm.weight.uniform_(0.3, 1)
    torch.save({"model": model.state_dict()}, folder / f"{name}.pth")
    return "KD.MODEL_CONFIG", f"[{folder / name}.yml]", "KD.MODEL_WEIGHTS", f"[{folder / name}.pth]"


def make(folder, *opts):
    torch.manual_seed(0)
    return build_model(config(folder, "MODEL.META_ARCHITECTURE", "DistillerOverhaul", *opts))


# ---- margins, connectors and loss


def test_margin_is_the_mean_of_the_negative_half(fastdistill):
    margins = fastdistill.overhaul.channel_margins
    data = np.load(METHODS / "distill1.npz")
    for stage in (1, 2, 3, 4):
        norm = nn.BatchNorm2d(len(data[f"margin0_{stage}"]))
        norm.weight.data = torch.from_numpy(data[f"teacher0_bn{stage}_w"])
        norm.bias.data = torch.from_numpy(data[f"teacher0_bn{stage}_b"])
        expected = torch.from_numpy(data[f"margin0_{stage}"])
        torch.testing.assert_close(margins(norm), expected, rtol=1e-6, atol=1e-6)
    norm = nn.BatchNorm2d(6)
    norm.weight.data = torch.tensor([1.0, -1.0, 0.5, 0.0, 0.0, 0.0])
    norm.bias.data = torch.tensor([0.3, 0.3, 4.0, -2.0, 0.0, 2.0])
    found = margins(norm)
    samples = torch.randn(2_000_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.3
    assert found[0].item() == pytest.approx(samples[samples < 0].mean().item(), abs=2e-3) and found[1] == found[0]
    assert found[2] == -1.5 and found[3:].tolist() == pytest.approx([-2.0, 0.0, 0.0])


def naive_loss(student, teacher, margins):
    total, stages = 0.0, len(student)
    for stage in range(stages):
        summed = 0.0
        for index in np.ndindex(*student[stage].shape):
            s, t = student[stage][index].item(), teacher[stage][index].item()
            t = max(t, margins[stage][index[1]].item())
            if s > t or t > 0:
                summed += (s - t) ** 2
        total += summed / 2 ** (stages - 1 - stage)
    return total / len(student[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_overhaul_loss_equals_naive_loop(fastdistill, dtype):
    generator = torch.Generator().manual_seed(1)
    shapes = ((3, 4, 4, 2), (3, 5, 2, 2), (3, 6, 1, 1))
    student, teacher = ([torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes] for _ in range(2))
    margins = [-torch.rand(shape[1], dtype=dtype, generator=generator) for shape in shapes]
    loss = fastdistill.overhaul.overhaul_loss(student, teacher, margins)
    assert loss.dtype == dtype and loss.item() == pytest.approx(naive_loss(student, teacher, margins), rel=1e-6)
    assert fastdistill.overhaul.overhaul_loss(teacher, [t.clone() for t in teacher], margins) < loss
    with torch.autocast("cpu", torch.bfloat16):
        low = fastdistill.overhaul.overhaul_loss([s.bfloat16() for s in student], teacher, margins)
    assert low.dtype == dtype and low.item() == pytest.approx(loss.item(), rel=0.02)


def test_losses_and_gradients_equal_reference(fastdistill):
    """The reference has one teacher, connectors with batch statistics, and the weight 1e-4."""
    data = np.load(METHODS / "distill1.npz")
    tensor = lambda name: torch.from_numpy(data[name])  # noqa: E731
    student = [tensor(f"s_feat{stage}").requires_grad_() for stage in (1, 2, 3, 4)]
    teacher = [tensor(f"t0_feat{stage}") for stage in (1, 2, 3, 4)]
    logits = tensor("s_logits").requires_grad_()
    margins = [tensor(f"margin0_{stage}") for stage in (1, 2, 3, 4)]
    connected = []
    for stage, maps in enumerate(student, start=1):
        connector = fastdistill.overhaul.build_connector(maps.shape[1], len(margins[stage - 1])).train()
        connector[0].weight.data = tensor(f"connector0_{stage}_conv")
        connector[1].weight.data, connector[1].bias.data = (tensor(f"connector0_{stage}_bn_{part}") for part in "wb")
        connected.append(connector(maps))
        raw = fastdistill.overhaul.overhaul_loss(connected[-1:], teacher[stage - 1 : stage], margins[stage - 1 : stage])
        assert raw.item() * len(maps) == pytest.approx(float(data[f"raw_loss0_{stage}"]), rel=1e-6)
    loss = 1e-4 * fastdistill.overhaul.overhaul_loss(connected, teacher, margins)
    assert loss.item() == pytest.approx(float(data["loss_overhaul"]), rel=1e-6)
    of_logits = distillation_loss(logits, tensor("t_logits")[0])
    assert of_logits.item() == pytest.approx(float(data["loss_jsdiv"]), rel=1e-6)
    for temperature in (1, 4, 16):
        found = distillation_loss(logits, tensor("t_logits")[0], temperature=temperature).item()
        assert found == pytest.approx(float(data[f"jsdiv_t{temperature}_first_teacher"]), rel=1e-6)
    (loss + of_logits).backward()
    names = ("logits", "feat1", "feat2", "feat3", "feat4")
    for name, value in zip(names, (logits, *student), strict=True):
        expected = tensor(f"grad_s_{name}")
        assert (value.grad - expected).abs().max() <= 1e-5 * expected.abs().max()


# ---- the stages of the backbone


def test_stages_of_the_backbone_equal_reference(fastdistill, tmp_path):
    shapes = json.loads((METHODS / "distill_r34_keys.json").read_text())["shapes"]
    backbone = build_backbone(config(tmp_path, *RESNET, "34x", "MODEL.BACKBONE.FEAT_DIM", "512")).eval()
    state = {name.removeprefix("backbone."): value for name, value in reference_weights.state_dict(shapes).items()}
    state = {name: value for name, value in state.items() if not name.startswith(("heads.", "pixel_"))}
    assert backbone.state_dict().keys() == state.keys()
    backbone.load_state_dict(state)
    images = (reference_weights.images((64, 32)) / 255 - 0.5) / 0.25
    with torch.no_grad(), fastdistill.stages.tap_stages(backbone) as (maps,):
        final = backbone(images)
    data = np.load(METHODS / "distill_r34.npz")
    for stage, found in enumerate(maps, start=1):
        assert found.min() < 0
        # FastReID's next block applies its ReLU in place, so that only its last stage is before the ReLU.
        found = found if stage == 4 else found.relu()
        expected = torch.from_numpy(data[f"stage{stage}_first_channels"])
        torch.testing.assert_close(found[:, :4], expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
        statistics = torch.stack([found.mean(), found.std(), found.min()])
        torch.testing.assert_close(
            statistics, torch.from_numpy(data[f"stage{stage}_mean_std_min"]), rtol=1e-4, atol=1e-4
        )
    torch.testing.assert_close(final, torch.from_numpy(data["final"]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(maps[-1].relu(), final)
    with torch.no_grad():
        assert torch.equal(backbone(images), final)  # without hooks


@pytest.mark.parametrize(
    "name, depth, width", [("resnest", "50x", "2048"), ("resnext", "50x", "2048"), ("resnet", "50x", "2048")]
)
def test_stages_of_other_residual_networks_are_tapped(fastdistill, tmp_path, name, depth, width):
    options = (
        "MODEL.BACKBONE.NAME",
        f"build_{name}_backbone",
        "MODEL.BACKBONE.DEPTH",
        depth,
        "MODEL.BACKBONE.FEAT_DIM",
    )
    backbone = build_backbone(config(tmp_path, *options, width)).eval()
    with torch.no_grad(), fastdistill.stages.tap_stages(backbone) as (maps,):
        final = backbone(torch.randn(1, 3, 64, 32))
    assert [features.shape[1] for features in maps] == [256, 512, 1024, 2048]
    torch.testing.assert_close(maps[-1].relu(), final)


# ---- the model


@pytest.mark.parametrize("variant", ["paper", "fastreid"])
def test_model_computes_the_loss_of_the_tapped_stages(fastdistill, teacher, tmp_path, variant):
    model = make(tmp_path, *teacher, "KD.OVERHAUL.VARIANT", variant, "KD.OVERHAUL.SCALE", "0.01")
    plain = build_model(config(tmp_path))
    assert {name for name in model.state_dict() if not name.startswith("connectors.0.")} == plain.state_dict().keys()
    before = {name: value.clone() for name, value in model._teachers[0].state_dict().items()}
    losses = model(BATCH)
    assert list(losses) == ["loss_cls", "loss_triplet", "loss_jsdiv", "loss_overhaul"]
    with fastdistill.stages.tap_stages(model.backbone, model._teachers[0].backbone) as (student, others):
        model.feature_maps(BATCH)
        model._teachers[0].feature_maps(BATCH)
    if variant == "fastreid":
        student, others = ([*(features.relu() for features in maps[:-1]), maps[-1]] for maps in (student, others))
    connected = [connector(maps) for connector, maps in zip(model.connectors[0], student, strict=True)]
    norms = fastdistill.stages.last_norms(model._teachers[0].backbone)
    margins = [fastdistill.overhaul.channel_margins(norm) for norm in norms]
    expected = 0.01 * fastdistill.overhaul.overhaul_loss(connected, others, margins)
    torch.testing.assert_close(losses["loss_overhaul"], expected)
    losses["loss_overhaul"].backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.connectors.parameters())
    assert model.backbone.conv1.weight.grad.abs().sum() > 0
    now = model._teachers[0].state_dict()
    assert all(torch.equal(value, now[name]) for name, value in before.items())
    assert model.eval()(BATCH).shape == (4, 16)


def test_several_teachers_and_the_moving_average(fastdistill, teacher, tmp_path):
    other = write_teacher(tmp_path, "MODEL.BACKBONE.FEAT_DIM", "24", name="other")
    files = [f"[{first[1:-1]}, {second[1:-1]}]" for first, second in zip(teacher[1::2], other[1::2], strict=True)]
    several = ("KD.MODEL_CONFIG", files[0], "KD.MODEL_WEIGHTS", files[1], "KD.EMA.ENABLED", "True")
    model = make(tmp_path, *several)
    assert [connectors[1][0].out_channels for connectors in model.connectors] == [32, 24, 16]
    terms = []
    hooked = fastdistill.distiller_overhaul.overhaul_loss
    fastdistill.distiller_overhaul.overhaul_loss = lambda *maps: terms.append(hooked(*maps)) or terms[-1]
    try:
        losses = model(BATCH)
    finally:
        fastdistill.distiller_overhaul.overhaul_loss = hooked
    torch.testing.assert_close(losses["loss_overhaul"], 1e-4 * sum(terms) / 3)
    assert sum(name.startswith("ema.") for name in model.state_dict()) > 0
    only = make(tmp_path, "KD.EMA.ENABLED", "True")
    assert torch.isfinite(only(BATCH)["loss_overhaul"])


def test_teacher_trained_by_overhaul_is_built_as_baseline(fastdistill, teacher, tmp_path):
    model = make(tmp_path, *teacher)
    cfg = config(tmp_path / "x", "MODEL.META_ARCHITECTURE", "DistillerOverhaul", *teacher)
    (tmp_path / "student.yml").write_text(cfg.dump())
    torch.save({"model": model.state_dict()}, tmp_path / "student.pth")
    files = ("KD.MODEL_CONFIG", f"{tmp_path}/student.yml", "KD.MODEL_WEIGHTS", f"{tmp_path}/student.pth")
    (found,) = make(tmp_path, *files)._teachers
    assert type(found).__name__ == "Baseline"
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in found.state_dict().items())


@pytest.mark.integration
def test_bfloat16_training_resume_and_evaluation_without_the_teacher(fastdistill, demo, tmp_path):
    files = write_teacher(tmp_path, *TEACHER, "MODEL.HEADS.NUM_CLASSES", "16")
    options = (
        "MODEL.META_ARCHITECTURE", "DistillerOverhaul", "MODEL.HEADS.NUM_CLASSES", "0", *files, "SOLVER.AMP", "bf16",
        "INPUT.SIZE_TRAIN", "(32, 16)", "INPUT.SIZE_TEST", "(32, 16)", "SOLVER.SCHED", "ConstantLR",
    )  # fmt: skip
    finals = []
    for name, epochs in (("straight", ("2",)), ("resumed", ("1", "2"))):
        for number, epoch in enumerate(epochs):
            torch.manual_seed(0)
            trainer = DefaultTrainer(config(tmp_path / name, *options, "SOLVER.MAX_EPOCH", epoch))
            trainer.resume_or_load(resume=number > 0)
            results = trainer.train()
        finals.append(tiny.weights(tmp_path / name / "model_final.pth"))
    assert all(torch.equal(value, finals[1][name]) for name, value in finals[0].items())
    assert any(name.startswith("connectors.0.1") for name in finals[0])
    losses = [json.loads(line) for line in (tmp_path / "straight/metrics.json").read_text().splitlines()]
    assert any("loss_overhaul" in loss for loss in losses)
    (tmp_path / "teacher.pth").unlink()
    weights = ("MODEL.WEIGHTS", str(tmp_path / "straight/model_final.pth"))
    for architecture in ("DistillerOverhaul", "Baseline"):
        chosen = (*options, *weights, "MODEL.META_ARCHITECTURE", architecture)
        assert DefaultTrainer.test_weights(config(tmp_path / architecture, *chosen)) == results


# ---- invalid settings


def test_invalid_teachers_are_errors(fastdistill, teacher, tmp_path):
    with pytest.raises(ConfigError, match="DistillerOverhaul"):
        make(tmp_path)
    with pytest.raises(ConfigError, match="MODEL.COMPILE.*aot_eager"):
        make(tmp_path, *teacher, "MODEL.COMPILE", "aot_eager")
    opts = ("MODEL.BACKBONE.NAME", "build_tiny_backbone", "MODEL.BACKBONE.FEAT_DIM", str(tiny.WIDTH))
    other = write_teacher(tmp_path, *opts, name="other")
    with pytest.raises(ConfigError, match="build_resnet_backbone_distill"):
        make(tmp_path, *other)
    with pytest.raises(ConfigError, match="stages"):
        make(tmp_path, *teacher, *opts)
    other = write_teacher(tmp_path, "MODEL.BACKBONE.LAST_STRIDE", "2", name="other")
    with pytest.raises(ConfigError, match=r"stage 2 are \(4, 2\).* \(3, 2\)"):
        make(tmp_path, *other)(BATCH)


def test_teacher_with_another_number_of_stages_is_an_error(fastdistill, teacher, tmp_path):
    model = make(tmp_path, *teacher)
    one = nn.Module()
    one.layer1 = model.backbone.layer1
    with pytest.raises(ConfigError, match="\\b2 stages.*\\b1\\b"):
        model._build_connectors(one)


def test_non_local_blocks_are_ignored_with_a_warning(fastdistill, tmp_path, caplog):
    options = (*RESNET, "50x", "MODEL.BACKBONE.FEAT_DIM", "2048", "MODEL.BACKBONE.WITH_NL", "True")
    backbone = build_backbone(config(tmp_path, *options))
    assert "WITH_NL is ignored" in caplog.text and not any("NL_" in name for name in backbone.state_dict())


# ---- recipes


@pytest.mark.parametrize("path", files_of("FastDistill"))
def test_recipe_equals_the_file_of_fastreid(path, tmp_path):
    check_equal_to_fastreid(path, tmp_path)
    assert len(files_of("FastDistill")) == 3


def test_recipe_of_the_teacher(fastdistill):
    cfg = read_config("FastDistill/sbs_r101ibn")
    assert (cfg.MODEL.BACKBONE.DEPTH, cfg.MODEL.BACKBONE.WITH_IBN, cfg.MODEL.BACKBONE.FEAT_DIM) == ("101x", True, 2048)
    student = read_config("FastDistill/kd-sbs_r101ibn-sbs_r34")
    assert (f"{cfg.OUTPUT_DIR}/config.yaml",) == student.KD.MODEL_CONFIG
