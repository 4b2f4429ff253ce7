"""Parameter groups, learning-rate factors, and optimizers built by name."""

import sys

import pytest
import torch
from torch import nn

from fastamp.config import get_cfg, read_config
from fastamp.modeling import build_backbone, build_heads
from fastamp.solver import build_optimizer
from fastamp.solver.build import parameter_groups
from fastamp.utils.errors import ConfigError


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.heads = nn.ModuleDict({"neck": nn.BatchNorm2d(4), "reduce": nn.Linear(4, 2)})
        self.heads["neck"].bias.requires_grad_(False)


def config(*opts):
    cfg = get_cfg()
    cfg.merge_from_list(list(opts))
    return cfg


def groups_by_name(optimizer, model):
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: (g["base_lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}


def test_learning_rates_and_weight_decays_of_parameter_groups_match_fastreid():
    cfg = config(
        "SOLVER.BASE_LR", "1.0", "SOLVER.HEADS_LR_FACTOR", "3.0", "SOLVER.BIAS_LR_FACTOR", "2.0",
        "SOLVER.WEIGHT_DECAY", "0.1", "SOLVER.WEIGHT_DECAY_NORM", "0.2", "SOLVER.WEIGHT_DECAY_BIAS", "0.3",
    )  # fmt: skip
    model = Model()
    optimizer = build_optimizer(cfg, model)
    assert groups_by_name(optimizer, model) == {
        "backbone.0.weight": (1.0, 0.1),
        "backbone.0.bias": (2.0, 0.3),
        "backbone.1.weight": (1.0, 0.2),
        "backbone.1.bias": (2.0, 0.3),
        "heads.neck.weight": (3.0, 0.2),
        "heads.reduce.weight": (3.0, 0.1),
        "heads.reduce.bias": (6.0, 0.3),
    }


@pytest.mark.parametrize(
    "recipe, tables",
    [
        ("MSMT17/solider_swin_tiny", 12),
        ("Market1501/solider_swin_base", 24),
        ("Market1501/transreid_vit_base", 0),
        ("Market1501/pass_vit_small", 0),
        ("MSMT17/ssl_vit_small_ics", 0),
    ],
)
def test_all_parameters_with_bias_in_their_name_have_the_rate_of_transreid(recipe, tables):
    cfg = read_config(recipe, ["MODEL.BACKBONE.PRETRAIN", "False", "MODEL.HEADS.NUM_CLASSES", "4"])
    with torch.device("meta"):
        model = nn.ModuleDict({"backbone": (backbone := build_backbone(cfg)), "heads": build_heads(cfg, backbone)})
    groups = parameter_groups(cfg, model)
    rates = {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    found = {name: rates[id(p)] for name, p in model.named_parameters() if p.requires_grad}
    solver = cfg.SOLVER
    assert found == {name: (solver.BASE_LR * (2 if "bias" in name else 1), solver.WEIGHT_DECAY) for name in found}
    assert sum(name.endswith("relative_position_bias_table") for name in found) == tables


@pytest.mark.parametrize("decay", ["0.0005", "0.0", "0.1"])
def test_parameter_groups_do_not_depend_on_learning_rates_and_weight_decays(decay):
    optimizer = build_optimizer(config("SOLVER.WEIGHT_DECAY", decay, "SOLVER.LR_FACTORS", "{'*.reduce.*': 1}"), Model())
    assert {group["role"]: len(group["params"]) for group in optimizer.param_groups} == {
        "backbone weight": 1,
        "backbone bias": 2,
        "backbone norm": 1,
        "heads norm": 1,
        "heads weight *.reduce.*": 1,
        "heads bias *.reduce.*": 1,
    }


def test_torch_optimizers_update_the_weights(subtests):
    cases = ["Adam", "AdamW", "SGD", "RAdam", "NAdam", "RMSprop", "Adagrad", "Adadelta", "Adamax", "ASGD", "Rprop"]
    for name in cases:
        with subtests.test(name=name):
            model = nn.Linear(3, 2)
            cfg = config("SOLVER.OPT", name)
            optimizer = build_optimizer(cfg, model)
            before = model.weight.detach().clone()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            assert not torch.equal(before, model.weight)


def test_opt_args_and_momentum_are_passed_to_the_optimizer():
    cfg = config("SOLVER.OPT", "AdamW", "SOLVER.OPT_ARGS.betas", "[0.8, 0.9]", "SOLVER.OPT_ARGS.eps", "1e-6")
    group = build_optimizer(cfg, nn.Linear(1, 1)).param_groups[0]
    assert tuple(group["betas"]) == (0.8, 0.9) and group["eps"] == 1e-6
    cfg = config("SOLVER.OPT", "SGD", "SOLVER.MOMENTUM", "0.7", "SOLVER.NESTEROV", "True")
    group = build_optimizer(cfg, nn.Linear(1, 1)).param_groups[0]
    assert group["momentum"] == 0.7 and group["nesterov"]


def test_build_optimizer_rejects_unknown_names_unknown_arguments_and_frozen_models():
    with pytest.raises(ConfigError, match="SOLVER.OPT: .*'AdmaW'.*'AdamW'"):
        build_optimizer(config("SOLVER.OPT", "AdmaW"), Model())
    with pytest.raises(ConfigError, match="SOLVER.OPT_ARGS: .*Adam.*'beta'.*'betas'"):
        build_optimizer(config("SOLVER.OPT_ARGS.beta", "0.5"), Model())
    frozen = Model()
    frozen.requires_grad_(False)
    with pytest.raises(ConfigError, match="requires_grad"):
        build_optimizer(get_cfg(), frozen)


def test_all_matching_lr_factors_are_multiplied():
    factors = {"backbone.0.*": 0.5, "*.weight": 0.1, "heads.*": 0.2}
    cfg = config("SOLVER.BASE_LR", "1.0", "SOLVER.HEADS_LR_FACTOR", "3.0", "SOLVER.LR_FACTORS", str(factors))
    model = Model()
    rates = {name: lr for name, (lr, _) in groups_by_name(build_optimizer(cfg, model), model).items()}
    assert rates == pytest.approx({
        "backbone.0.weight": 0.05,
        "backbone.0.bias": 0.5,
        "backbone.1.weight": 0.1,
        "backbone.1.bias": 1.0,
        "heads.neck.weight": 0.06,
        "heads.reduce.weight": 0.06,
        "heads.reduce.bias": 0.6,
    })  # fmt: skip


def test_lr_factors_accept_yaml_mapping_and_command_line_entries(tmp_path):
    file = tmp_path / "factors.yml"
    file.write_text("SOLVER:\n  LR_FACTORS:\n    backbone.0.*: 0.5\n")
    cfg = config("SOLVER.LR_FACTORS.heads.reduce.*", "0.25")
    cfg.merge_from_file(file)
    assert dict(cfg.SOLVER.LR_FACTORS) == {"backbone.0.*": 0.5}  # a mapping replaces the former one
    cfg.merge_from_list(["SOLVER.LR_FACTORS.heads.reduce.*", "0.25"])
    assert dict(cfg.SOLVER.LR_FACTORS) == {"backbone.0.*": 0.5, "heads.reduce.*": 0.25}
    again = get_cfg()
    file.write_text(cfg.dump())
    again.merge_from_file(file)
    assert again == cfg


def test_lr_factors_reject_unmatched_globs_and_invalid_factors():
    with pytest.raises(ConfigError, match=r"SOLVER.LR_FACTORS: .*'backbon.\*'.*Did you mean"):
        build_optimizer(config("SOLVER.LR_FACTORS", "{'backbon.*': 0.5}"), Model())
    for value in ("-1", "fast", "True"):
        with pytest.raises(ConfigError, match="SOLVER.LR_FACTORS"):
            build_optimizer(config("SOLVER.LR_FACTORS", f"{{'backbone.*': {value}}}"), Model())


@pytest.mark.parametrize("name", ["LAMB", "Lamb"])
def test_timm_lamb_receives_opt_args_and_updates_the_weights(name):
    pytest.importorskip("timm")
    model = nn.Linear(3, 2)
    optimizer = build_optimizer(config("SOLVER.OPT", name, "SOLVER.OPT_ARGS.eps", "1e-7"), model)
    assert optimizer.param_groups[0]["eps"] == 1e-7
    assert optimizer.defaults["max_grad_norm"] is None  # the gradients are clipped before the step
    before = model.weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.weight)


def test_lamb_error_names_package_to_install_if_timm_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm.optim", None)
    with pytest.raises(ConfigError, match=r'pip install "fastamp\[timm\]"'):
        build_optimizer(config("SOLVER.OPT", "LAMB"), nn.Linear(1, 1))
