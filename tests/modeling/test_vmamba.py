"""VMamba: features and gradients of the authors' program, weights files, cost, and precision of the scan."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import reference_weights
import torch
import yacs.config
from small_networks import config
from torch import nn

from fastamp.checkpoint.pretrained import load_pretrained_backbone
from fastamp.checkpoint.state_dict_conversion import whole_model_names
from fastamp.engine.dry_run import multiply_adds
from fastamp.layers import DropPath
from fastamp.modeling import build_backbone
from fastamp.modeling.backbones import vmamba
from fastamp.modeling.backbones.vmamba import DEPTHS, Depth, SelectiveScan2d, VMamba
from fastamp.modeling.infer_config import infer_config
from fastamp.solver import build_optimizer
from fastamp.utils.errors import ConfigError, WeightsError

REFERENCE = Path(__file__).parents[1] / "reference/vmamba"
MODELS = json.loads(gzip.decompress((REFERENCE / "vmamba_models.json.gz").read_bytes()))
SMALL = Depth(16, (1, 2, 1, 1), 2)


def arrays(name):
    return {key: torch.from_numpy(value) for key, value in np.load(REFERENCE / f"{name}.npz").items()}


def with_reference_weights(case):
    """VMamba-T with the reference weights, and these, which include an ImageNet classifier."""
    expected = MODELS[case]
    state = reference_weights.state_dict(expected["state_dict"])
    for name in state:
        if name.endswith(("x_proj_weight", "dt_projs_weight")):
            state[name] *= expected["scale_of_x_proj_weight_and_dt_projs_weight"]
    with torch.device("meta"):
        model = VMamba(DEPTHS["tiny"], last_stride=expected["last_stride"], drop_path=0)
    assert model.load_state_dict(state, strict=False, assign=True).missing_keys == []
    return model, state


def images(case, count=2, size=None):
    mean, std = (torch.tensor(MODELS[case][key])[:, None, None] for key in ("pixel_mean", "pixel_std"))
    return (reference_weights.images(size or MODELS[case]["input_size"], count) / 255 - mean) / std


def classify(features, state):
    return features @ state["classifier.head.weight"].T + state["classifier.head.bias"]


@pytest.mark.integration
@pytest.mark.parametrize("case", MODELS)
def test_features_and_maps_equal_the_authors_program(case):
    expected = np.load(REFERENCE / "vmamba_embeddings.npz")
    model, state = with_reference_weights(case)
    stages = []
    for layer in model.layers:
        layer.blocks[-1].register_forward_hook(lambda *args: stages.append(args[2]))
    with torch.no_grad():
        features = model.eval()(images(case)).mean((2, 3))
    found = {case: features, f"{case} logits10": classify(features, state)[:, :10], f"{case} last_map": stages[3][:1]}
    found |= {f"{case} stage{number}_mean": stage.mean((2, 3)) for number, stage in enumerate(stages)}
    found = {name: value for name, value in found.items() if name in expected}
    assert len(found) >= 6
    for name, value in found.items():
        assert reference_weights.difference(value, expected[name]) < 1e-5, name


@pytest.mark.integration
def test_training_loss_and_gradients_equal_the_authors_program():
    case, expected = "tiny_s1l8 256x128", arrays("vmamba_train")
    model, state = with_reference_weights(case)
    features = model.train()(images(case, 4, (128, 64))).mean((2, 3))
    loss = nn.functional.cross_entropy(classify(features, state), torch.tensor([3, 9, 3, 9]))
    loss.backward()
    torch.testing.assert_close(loss, expected.pop("loss"), rtol=1e-5, atol=0)
    assert len(expected) == 7
    for name, gradient in expected.items():
        assert reference_weights.difference(model.get_parameter(name).grad, gradient.numpy()) < 1e-4, name


def test_directions_are_rows_columns_and_their_reverses():
    expected = arrays("cross1")
    x = expected["x"][:, None].expand(-1, 4, -1, -1, -1)
    assert torch.equal(vmamba.in_directions(x), expected["cross_scan"])
    merged = vmamba.sum_of_directions(expected["y"].flatten(3), (5, 4)).flatten(2)
    torch.testing.assert_close(merged, expected["cross_merge"])


# Millions of parameters with and without the classifier, then G multiply-adds at 224x224, at 256x128 and there with
# stride 1, of the published models and of the authors' formula.
COSTS = {
    "tiny": (30.25, 29.48, 4.91, 3.20, 4.66),
    "tiny_s2l5": (30.71, 29.94, 4.86, 3.17, 4.92),
    "small": (50.15, 49.38, 8.72, 5.69, 7.44),
    "small_s1l20": (49.01, 48.24, 8.61, None, None),
    "base": (88.56, 87.53, 15.36, 10.03, 13.13),
    "base_s1l20": (86.61, 85.59, 15.22, None, None),
}


def cost(depth, size, last_stride):
    """Multiply-adds with 5 for each element of a layer norm, which the authors count."""
    elements = []
    with torch.device("meta"):
        model = VMamba(DEPTHS[depth], last_stride=last_stride).eval()
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.register_forward_hook(lambda *args: elements.append(args[2].numel()))
        total = multiply_adds(model, torch.zeros(1, 3, *size)) + 1000 * model.feature_dim
    return total, 5 * sum(elements)


@pytest.mark.integration
def test_parameters_and_multiply_adds_equal_those_of_the_published_models(subtests, monkeypatch):
    assert COSTS.keys() == DEPTHS.keys() - {"nano"}
    exact = multiply_adds(VMamba(SMALL), torch.zeros(1, 3, 64, 32))
    monkeypatch.setattr(vmamba, "selective_scan", lambda u, *_, **options: u)
    assert multiply_adds(VMamba(SMALL), torch.zeros(1, 3, 64, 32)) == exact  # not that of the implementation
    sizes = (((224, 224), 2), ((256, 128), 2), ((256, 128), 1))
    for depth, (with_head, without, *published) in COSTS.items():
        with torch.device("meta"):
            model = VMamba(DEPTHS[depth])
        count = sum(parameter.numel() for parameter in model.parameters())
        head = 1000 * (model.feature_dim + 1)
        with subtests.test(depth):
            assert (round((count + head) / 1e6, 2), round(count / 1e6, 2)) == (with_head, without)
        for (size, stride), expected in zip(sizes, published, strict=True):
            if expected is not None:
                with subtests.test(depth, size=size, stride=stride):
                    assert round(sum(cost(depth, size, stride)) / 1e9, 2) == expected
    for case, values in MODELS.items():
        macs = values["macs"]
        counted = macs["conv_linear"] + macs["proj"] + macs["scan"]
        with subtests.test(case):
            assert cost("tiny", values["input_size"], values["last_stride"]) == (counted, macs["norm"])


def small_state():
    torch.manual_seed(0)
    state = VMamba(SMALL).state_dict()
    return state | {"classifier.head.weight": torch.ones(9, 128), "classifier.head.bias": torch.ones(9)}


def older_names(state):
    names = {"patch_embed.0": "patch_embed.proj", "patch_embed.2": "patch_embed.norm", "classifier.head": "head"}
    renamed = {}
    for name, value in state.items():
        name = name.replace(".norm.", ".ln_1.").replace(".op.", ".self_attention.").replace("classifier.ln_1", "norm")
        name = name.replace("classifier.norm", "norm")
        module, _, last = name.rpartition(".")
        renamed[f"{names.get(module, module)}.{last}"] = value
    assert len(renamed) == len(state) and "layers.0.blocks.0.self_attention.A_logs" in renamed
    return renamed


def as_convolutions(state):
    linear = ("in_proj.weight", "out_proj.weight", "fc1.weight", "fc2.weight", "head.weight")
    return {name: value[..., None, None] if name.endswith(linear) else value for name, value in state.items()}


def of_a_detector(state):
    norms = {f"outnorm{stage}.weight": torch.full((16 * 2**stage,), 9.0) for stage in range(3)}
    last = {f"outnorm3.{name}": state[f"classifier.norm.{name}"] for name in ("weight", "bias")}
    trunk = {name: value for name, value in state.items() if not name.startswith("classifier.")}
    return {"state_dict": {f"backbone.{name}": value for name, value in (trunk | norms | last).items()}}


def published(state):
    """A file as the authors' program writes it, with a yacs node and an average of the weights."""
    node = yacs.config.CfgNode({"MODEL": {"VSSM": {"EMBED_DIM": 16}, "NAME": "vssm"}, "TRAIN": {"LR_STEPS": [1, 2]}})
    node.freeze()
    zeros = {name: torch.zeros_like(value) for name, value in state.items()}
    other = {"optimizer": {"state": {}}, "max_accuracy": np.float64(82.6), "scaler": {"scale": 65536.0}, "epoch": 264}
    return {"model": zeros, "model_ema": state, "config": node, "lr_scheduler": {}} | other


FILES = {
    "plain": lambda state: state,
    "model": lambda state: {"model": state, "epoch": 1},
    "state_dict": lambda state: {"state_dict": {f"module.{name}": value for name, value in state.items()}},
    "average": published,
    "model without average": lambda state: published(state) | {"model": state, "model_ema": None},
    "older names": lambda state: {"model": older_names(state)},
    "convolutions": lambda state: {"model": as_convolutions(state)},
    "detector": of_a_detector,
}


@pytest.mark.parametrize("kind", FILES)
def test_every_tensor_of_the_authors_files_is_loaded(kind, tmp_path, caplog):
    state = small_state()
    torch.save(FILES[kind](state), tmp_path / "vssm.pth")
    model = VMamba(SMALL)
    nn.utils.vector_to_parameters(torch.full((sum(p.numel() for p in model.parameters()),), 7.0), model.parameters())
    with caplog.at_level("INFO"):
        load_pretrained_backbone(model, path=str(tmp_path / "vssm.pth"), online=None)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert "missing  0 (0%)" in caplog.text
    assert ("model_ema" in caplog.text) == (kind == "average")


def test_files_of_other_models_are_refused(tmp_path, subtests):
    state = small_state()
    without_op = {name: value for name, value in state.items() if ".op." not in name}
    deeper = VMamba(Depth(16, (1, 2, 3, 1), 2)).state_dict()
    vanilla = state | {name: value.repeat(1, 16) for name, value in state.items() if name.endswith("A_logs")}
    files = {"no match": {f"x.{name}": value for name, value in state.items()}, "parts": without_op}
    for kind, content in (files | {"deeper": deeper, "states of 16": vanilla, "empty": {"model": {}}}).items():
        torch.save(content, tmp_path / "file.pth")
        with subtests.test(kind), pytest.raises(WeightsError, match="file.pth"):
            load_pretrained_backbone(VMamba(SMALL), path=str(tmp_path / "file.pth"), online=None)
    with pytest.raises(ConfigError, match="PRETRAIN_PATH"):
        build_backbone(config("build_vmamba_backbone", "tiny", 768, "MODEL.BACKBONE.PRETRAIN", "True"))


def test_a_position_embedding_is_reported():
    notes = []
    converted = VMamba(SMALL).convert_state_dict({"pos_embed": torch.zeros(1, 16, 8, 8)}, notes)
    assert len(notes) == 1 and "pos_embed" in converted


def test_final_norm_of_a_bare_file_belongs_to_the_backbone():
    names = whole_model_names(small_state(), VMamba(SMALL), [], pools_without_padding=False, has_relu=True)
    assert {name for name in names if not name.startswith("backbone.")} == {
        "heads.classifier.head.weight",
        "heads.classifier.head.bias",
    }


@pytest.mark.integration
def test_config_of_a_file_is_inferred():
    with torch.device("meta"):
        states = {depth: VMamba(values).state_dict() for depth, values in DEPTHS.items()}
    shapes = {frozenset((name, value.shape) for name, value in state.items()) for state in states.values()}
    assert len(shapes) == len(DEPTHS)
    keys = infer_config(states["tiny_s2l5"] | {"classifier.head.weight": torch.zeros(1000, 768)}, "file")
    assert {name: keys[f"MODEL.BACKBONE.{name}"] for name in ("NAME", "DEPTH", "FEAT_DIM")} == {
        "NAME": "build_vmamba_backbone",
        "DEPTH": "tiny_s2l5",
        "FEAT_DIM": "768",
    }


def test_initial_values_are_those_of_the_paper():
    torch.manual_seed(0)
    op = SelectiveScan2d(192, 384)
    steps = nn.functional.softplus(op.dt_projs_bias)
    assert 1e-3 <= steps.min() < 1.2e-3 and 0.08 < steps.max() <= 0.1
    assert abs(steps.log().mean() - np.log(1e-2)) < 0.1  # uniform in the logarithm
    assert not op.A_logs.any() and (op.Ds == 1).all()
    for weight, bound in ((op.x_proj_weight, 384**-0.5), (op.dt_projs_weight, 12**-0.5)):
        assert 0.98 * bound < weight.abs().max() <= bound
    model = VMamba(SMALL)
    assert 0.018 < model.layers[3].blocks[0].mlp.fc1.weight.std() < 0.022
    assert not model.layers[3].blocks[0].mlp.fc1.bias.any()
    convolution = model.layers[2].downsample[0]
    assert convolution.weight.abs().max() > 0.9 * convolution.weight[0].numel() ** -0.5  # of PyTorch


def test_one_drop_path_serves_both_branches_and_grows_linearly():
    model = VMamba(SMALL, drop_path=0.4)
    blocks = [block for layer in model.layers for block in layer.blocks]
    rates = [1 - module.keep.item() for module in model.modules() if isinstance(module, DropPath)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4]) and isinstance(blocks[0].drop_path, nn.Identity)
    calls = []
    blocks[4].drop_path.register_forward_hook(lambda *args: calls.append(args[2]))
    model.train()(torch.randn(2, 3, 32, 16))
    assert len(calls) == 2


def test_maps_of_any_size_and_last_stride():
    for size, last_stride, expected in (((64, 32), 2, (2, 1)), ((64, 32), 1, (4, 2)), ((75, 41), 2, (3, 2))):
        with torch.device("meta"):
            maps = VMamba(SMALL, in_channels=4, last_stride=last_stride)(torch.randn(2, 4, *size))
        assert maps.shape == (2, 128, *expected)


def test_recurrences_are_excluded_from_weight_decay():
    opts = ("SOLVER.WEIGHT_DECAY", "0.05", "SOLVER.WEIGHT_DECAY_BIAS", "0.02", "SOLVER.BIAS_LR_FACTOR", "2")
    cfg = config("build_vmamba_backbone", "tiny", 768, "SOLVER.BASE_LR", "0.1", *opts)
    model = nn.ModuleDict({"backbone": VMamba(SMALL)})
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    for group in build_optimizer(cfg, model).param_groups:
        found |= {names[id(p)]: (group["weight_decay"], pytest.approx(group["base_lr"])) for p in group["params"]}
    op = "backbone.layers.1.blocks.1.op"
    for name in ("A_logs", "Ds", "dt_projs_bias"):
        assert found[f"{op}.{name}"] == (0.0, 0.1)
    for name in ("x_proj_weight", "dt_projs_weight", "in_proj.weight", "conv2d.weight"):
        assert found[f"{op}.{name}"] == (0.05, 0.1)
    assert found["backbone.patch_embed.0.bias"] == (0.02, 0.2)
