"""LoRA: adapters of each transformer, the frozen weights, merging, files of adapters, and resumed runs."""

import copy
from pathlib import Path

import numpy as np
import preloaded
import pytest
import tiny
import torch
from every_backbone import SIZE, config

import fastamp
from fastamp.checkpoint import Checkpointer
from fastamp.cli import main
from fastamp.engine import DefaultTrainer
from fastamp.inference.export import export
from fastamp.layers.lora import adapted_modules, is_adapter, merge_adapters
from fastamp.modeling import build_backbone, build_model
from fastamp.modeling.load import load_model
from fastamp.solver import build_optimizer
from fastamp.utils.errors import ConfigError, WeightsError

# Backbone -> number of adapted layers: four per block.
TRANSFORMERS = {
    "vit deit_small": 48,
    "clip_vit tiny": 16,
    "swin tiny": 48,
    "solider tiny": 48,
    "vmamba nano": 20,
    "timm/vit_tiny_patch16_224": 48,
    "timm/vit_small_patch16_dinov3_qkvb": 48,
    "timm/swin_tiny_patch4_window7_224": 48,
}
LORA = ("MODEL.LORA.RANK", "2", "MODEL.LORA.ALPHA", "4")


def images(count=2):
    return torch.rand(count, 3, *SIZE, generator=torch.Generator().manual_seed(0))


@pytest.mark.integration
@pytest.mark.parametrize("backbone", TRANSFORMERS)
def test_first_forward_equals_the_base_model_and_merging_keeps_features(backbone):
    if backbone.startswith("timm/"):
        pytest.importorskip("timm")
    adapted = build_backbone(config(backbone, *LORA)).eval()
    base = build_backbone(config(backbone)).eval()
    base.load_state_dict(adapted.state_dict(), strict=False)
    modules = dict(adapted_modules(adapted))
    assert len(modules) == TRANSFORMERS[backbone]
    assert not any(name.partition(".")[0] in ("semantic", "patch_embed", "conv1") for name in modules)
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert trained == {f"{name}.{part}" for name in modules for part in ("lora_A", "lora_B")}
    with torch.no_grad():
        first = adapted(images())
        assert torch.equal(first, base(images()))
        for module in modules.values():
            torch.nn.init.normal_(module.lora_B, std=0.05)
        changed = adapted(images())
        assert (changed - first).abs().max() > 1e-4
        assert torch.equal(copy.deepcopy(adapted)(images()), changed)
        merge_adapters(adapted)
        torch.testing.assert_close(adapted(images()), changed, rtol=0, atol=1e-5)
    assert adapted.state_dict().keys() == base.state_dict().keys()
    base.load_state_dict(adapted.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(base(images()), changed, rtol=0, atol=1e-5)


def test_adapted_layer_matches_the_formula_and_its_gradients():
    """W x + (alpha / r) B A x for a linear layer and for a packed projection, against two separate products."""
    model = build_backbone(config("clip_vit tiny", "MODEL.LORA.RANK", "3", "MODEL.LORA.ALPHA", "6")).double()
    attention = model.transformer.resblocks[1].attn
    layer = attention.out_proj
    for module in (attention, layer):
        torch.nn.init.normal_(module.lora_B)
    x = torch.randn(5, 128, dtype=torch.float64)
    weight = layer._parameters["weight"].detach()
    a, b = (layer.get_parameter(name).detach().requires_grad_() for name in ("lora_A", "lora_B"))
    expected = x @ weight.T + layer.bias.detach() + 6 / 3 * (x @ a.T) @ b.T
    torch.testing.assert_close(layer(x), expected)
    gradients = torch.autograd.grad(expected.square().sum(), (a, b))
    found = torch.autograd.grad(layer(x).square().sum(), (layer.lora_A, layer.lora_B))
    torch.testing.assert_close(found, gradients)
    packed = attention._parameters["in_proj_weight"] + 2 * attention.lora_B @ attention.lora_A
    torch.testing.assert_close(attention.in_proj_weight, packed)


def test_targets_select_layers_and_ranks_are_checked():
    only = build_backbone(config("clip_vit tiny", *LORA, "MODEL.LORA.TARGETS", "('attention',)"))
    assert {name.rpartition(".")[2] for name, _ in adapted_modules(only)} == {"attn", "out_proj"}
    for opts, match in (
        (("MODEL.LORA.TARGETS", "('attn',)"), "MODEL.LORA.TARGETS: .*'attn'"),
        (("MODEL.LORA.TARGETS", "()"), "no linear layers"),
        (("MODEL.LORA.RANK", "129"), "MODEL.LORA.RANK is 129, .* 128"),
    ):
        with pytest.raises(ConfigError, match=match):
            build_backbone(config("clip_vit tiny", *LORA, *opts))
    with pytest.raises(ConfigError, match=r"MODEL.LORA.RANK.*2.*build_resnet_backbone"):
        build_backbone(config("resnet 18x", *LORA))
    with pytest.raises(ConfigError, match="MODEL.LORA.RANK"):
        config("clip_vit tiny", "MODEL.LORA.RANK", "-1")


@pytest.mark.integration
@pytest.mark.parametrize(
    "opts",
    [
        ("SOLVER.AMP.FORCE_FP32", "('*mlp*',)"),
        ("MODEL.META_ARCHITECTURE", "MoCo"),
        ("MODEL.COMPILE", "aot_eager"),
    ],
)
def test_adapters_in_float32_regions_momentum_encoders_and_compiled_models(opts):
    model = build_model(config("clip_vit tiny", *LORA, "MODEL.WEIGHTS", "base.pth", *opts))
    for _, module in adapted_modules(model):
        torch.nn.init.normal_(module.lora_B, std=0.05)
    batch = {"images": 255 * images(4), "targets": torch.arange(4) // 2}
    losses = model.train()(batch)
    sum(losses.values()).backward()
    trained = [parameter for parameter in model.backbone.parameters() if parameter.requires_grad]
    assert len(trained) == 32 and all(parameter.grad is not None for parameter in trained)
    with torch.no_grad():
        features = model.eval()(batch)
        merge_adapters(model)
        torch.testing.assert_close(model(batch), features, rtol=0, atol=1e-5)


def test_optimizer_holds_adapters_heads_and_camera_embeddings_only():
    cfg = config("clip_vit tiny", *LORA, "MODEL.BACKBONE.SIE_CAMERAS", "3", "MODEL.HEADS.NAME", "JPMHead")
    model = build_model(cfg)
    held = {id(p) for group in build_optimizer(cfg, model).param_groups for p in group["params"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in held}
    others = {name for name in names if not is_adapter(name)}
    assert "backbone.sie_embed" in others
    assert all(name.startswith("heads.branches.") for name in others - {"backbone.sie_embed"})
    assert any(name.startswith("heads.b1.0.attn.lora") for name in names)


def test_base_weights_load_without_warnings_and_adapters_are_refused_by_other_models(tmp_path, caplog):
    base = build_model(config("clip_vit tiny"))
    torch.save({"model": base.state_dict()}, tmp_path / "base.pth")
    adapted = build_model(config("clip_vit tiny", *LORA, "MODEL.WEIGHTS", "base.pth"))
    Checkpointer(adapted).load(tmp_path / "base.pth")
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    torch.save({"model": adapted.state_dict()}, tmp_path / "adapted.pth")
    Checkpointer(base).load(tmp_path / "adapted.pth")
    assert "MODEL.LORA.RANK" in caplog.text


TINY = (
    "MODEL.BACKBONE.NAME", "build_clip_vit_backbone", "MODEL.BACKBONE.DEPTH", "tiny", "MODEL.BACKBONE.FEAT_DIM", "128",
    "MODEL.HEADS.POOL_LAYER", "Identity", "SOLVER.MAX_EPOCH", "2", "SOLVER.EMA.ENABLED", "True", "SOLVER.EMA.DECAY",
    "0.9", "SOLVER.AMP", "bf16", "MODEL.BACKBONE.CHECKPOINTING", "True", "TEST.EVAL_PERIOD", "1",
    "MODEL.BACKBONE.DROP_PATH_RATIO", "0.1", "SOLVER.LAYER_DECAY", "0.8", *LORA,
)  # fmt: skip


@pytest.fixture(scope="module")
def run(demo_root, tmp_path_factory):
    """Train a LoRA run with EMA, activation checkpointing, drop path and bfloat16 from base weights."""
    root = tmp_path_factory.mktemp("lora")
    base = build_model(tiny.tiny_config(root, *TINY, "MODEL.LORA.RANK", "0", "MODEL.HEADS.NUM_CLASSES", "16"))
    torch.save({"model": base.state_dict()}, root / "base.pth")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTAMP_DATASETS", str(demo_root))
        trainer = DefaultTrainer(tiny.tiny_config(root / "run", *TINY, "MODEL.WEIGHTS", str(root / "base.pth")))
        trainer.resume_or_load(resume=False)
        trainer.train()
    return root


@pytest.mark.integration
def test_run_trains_adapters_and_leaves_base_weights_unchanged(run):
    base, final = tiny.weights(run / "base.pth"), tiny.weights(run / "run" / "model_final.pth")
    trunk = {name for name in base if name.startswith("backbone.")}
    assert trunk and all(torch.equal(base[name], final[name]) for name in trunk)
    assert all(final[name].any() for name in final if name.endswith("lora_B"))


@pytest.mark.integration
def test_resumed_run_is_equal_bit_for_bit(run, demo, tmp_path):
    (tmp_path / "model_0000.pth").write_bytes((run / "run" / "model_0000.pth").read_bytes())
    (tmp_path / "last_checkpoint").write_text("model_0000.pth")
    trainer = DefaultTrainer(tiny.tiny_config(tmp_path, *TINY))
    trainer.resume_or_load(resume=True)
    trainer.train()
    one, other = (torch.load(folder / "model_final.pth", weights_only=True) for folder in (run / "run", tmp_path))
    for part in (lambda content: content["model"], lambda content: content["average"]["model"]):
        assert part(one).keys() == part(other).keys()
        assert all(torch.equal(tensor, part(other)[name]) for name, tensor in part(one).items())


@pytest.mark.integration
def test_two_processes_train_adapters_and_resume_bit_for_bit(demo_root, tmp_path):
    root, script = {"FASTAMP_DATASETS": str(demo_root)}, Path(__file__).parents[1] / "helpers" / "ranks.py"
    assert preloaded.run(script, tmp_path / "straight", 2, *TINY, **root).returncode == 0
    (tmp_path / "resumed").mkdir()
    first = (tmp_path / "straight" / "model_0000.pth").read_bytes()
    (tmp_path / "resumed" / "model_0000.pth").write_bytes(first)
    (tmp_path / "resumed" / "last_checkpoint").write_text("model_0000.pth")
    assert preloaded.run(script, "--resume", tmp_path / "resumed", 2, *TINY, **root).returncode == 0
    one, other = (tiny.weights(tmp_path / name / "model_final.pth") for name in ("straight", "resumed"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    start = tiny.weights(tmp_path / "straight" / "model_0000.pth")
    changed = {name for name in one if name.startswith("backbone.") and not torch.equal(one[name], start[name])}
    assert changed and all(map(is_adapter, changed))
    assert (tmp_path / "straight" / "model_final_adapters.pth").exists()


@pytest.mark.integration
def test_predictor_merges_adapters_and_the_file_of_adapters_gives_the_same_features(run):
    image = np.random.default_rng(0).integers(0, 256, (64, 32, 3), dtype=np.uint8)
    small = run / "run" / "model_final_adapters.pth"
    content = torch.load(small, weights_only=True)
    assert all(is_adapter(name) or name.startswith("heads.") for name in content["model"])
    assert small.stat().st_size < (run / "base.pth").stat().st_size / 4
    whole = fastamp.Predictor(run / "run" / "model_final.pth", device="cpu")
    assert not list(adapted_modules(load_model(run / "run" / "model_final.pth", device="cpu").model))
    features = whole.features(image)
    # The head of the base weights is not used: it may have another width.
    other = {name: tensor for name, tensor in tiny.weights(run / "base.pth").items() if name.startswith("backbone.")}
    torch.save({"model": other | {"heads.bottleneck.weight": torch.ones(3)}}, run / "trunk.pth")
    trunk = fastamp.Predictor(small, device="cpu", opts=["MODEL.LORA.BASE", str(run / "trunk.pth")])
    assert torch.equal(trunk.features(image), features)
    assert torch.equal(fastamp.Predictor(small, device="cpu").features(image), features)  # base from the config
    model = build_model(tiny.tiny_config(run, *TINY, "MODEL.HEADS.NUM_CLASSES", "16"))
    model.load_state_dict(torch.load(run / "run" / "model_final.pth", weights_only=True)["average"]["model"])
    batch = torch.from_numpy(image).permute(2, 0, 1)[None].float()
    with torch.no_grad():
        unmerged = torch.nn.functional.normalize(model.eval()(batch))
    exact = fastamp.Predictor(small, device="cpu", opts=["SOLVER.AMP.EVAL_DTYPE", "float32"]).features(image)
    torch.testing.assert_close(torch.nn.functional.normalize(exact), unmerged, rtol=0, atol=1e-5)


@pytest.mark.integration
def test_stripped_file_of_adapters_stays_a_file_of_adapters(run, tmp_path):
    small = run / "run" / "model_final_adapters.pth"
    assert main(["strip", str(small), str(tmp_path / "again.pth")]) == 0
    image = np.zeros((64, 32, 3), dtype=np.uint8)
    one, other = (fastamp.Predictor(path, device="cpu") for path in (small, tmp_path / "again.pth"))
    assert torch.equal(one.features(image), other.features(image))


@pytest.mark.integration
def test_exported_model_has_merged_weights(run, demo, tmp_path):
    source = run / "run" / "model_final.pth"
    report = export(fastamp.Predictor(source, device="cpu"), tmp_path / "model.pt2")
    names = {name for name, _ in torch.export.load(report.path).named_parameters()}
    assert names and not any(map(is_adapter, names))
    image = torch.randint(256, (1, 3, 64, 32), generator=torch.Generator().manual_seed(0)).float()
    with torch.no_grad():
        expected = load_model(source, device="cpu").model(image)
        torch.testing.assert_close(torch.export.load(report.path).module()(images=image), expected, rtol=0, atol=1e-5)


def test_frozen_random_weights_are_reported(caplog):
    build_backbone(config("clip_vit tiny", *LORA))
    assert "freezes random weights" in caplog.text
    caplog.clear()
    build_backbone(config("clip_vit tiny", *LORA, "MODEL.WEIGHTS", "base.pth"))
    assert "random" not in caplog.text


@pytest.mark.integration
def test_adapters_are_refused_with_other_base_weights_and_without(run, tmp_path):
    small = str(run / "run" / "model_final_adapters.pth")
    other = tiny.weights(run / "base.pth")
    other["backbone.conv1.weight"] += 1
    torch.save({"model": other}, tmp_path / "other.pth")
    with pytest.raises(WeightsError, match=r"MODEL.LORA.BASE"):
        load_model(small, device="cpu", opts=["MODEL.LORA.BASE", str(tmp_path / "other.pth")])
    with pytest.raises(WeightsError, match=r"MODEL.LORA.BASE"):
        load_model(small, device="cpu", opts=["MODEL.LORA.BASE", ""])
    with pytest.raises(WeightsError, match=r"MODEL.LORA.RANK"):
        load_model(small, device="cpu", opts=["MODEL.LORA.RANK", "4"])
    with pytest.raises(WeightsError, match=r"MODEL.LORA.RANK"):
        load_model(small, device="cpu", opts=["MODEL.LORA.RANK", "0"])


@pytest.mark.integration
def test_strip_writes_adapters_and_refuses_runs_without(run, checkpoint, tmp_path, input_error):
    out = tmp_path / "small.pth"
    assert main(["strip", str(run / "run" / "model_final.pth"), str(out), "--adapters"]) == 0
    one, other = (torch.load(path, weights_only=True) for path in (out, run / "run" / "model_final_adapters.pth"))
    assert one["adapters_of"] == other["adapters_of"] and one["model"].keys() == other["model"].keys()
    assert "MODEL.LORA.RANK" in input_error(main, ["strip", str(checkpoint), str(out), "--adapters"])
