"""Optimizer state in checkpoints: round trip and validation."""

import inspect
import signal

import pytest
import tiny
import torch
from timm.optim import Lamb

from fastamp.engine import DefaultTrainer, HookBase
from fastamp.solver import OptimizerState
from fastamp.solver.build import optimizer_names
from fastamp.solver.state_layout import expected_state
from fastamp.utils.command_line import TrainingInterrupted


def stepped(optimizer, **options):
    parameters = [
        torch.nn.Parameter(torch.ones(4, 3)),
        torch.nn.Parameter(torch.ones(4)),
        torch.nn.Parameter(torch.ones(2)),
    ]
    made = optimizer(parameters, lr=0.1, **options)
    for parameter in parameters[:2]:  # the last is frozen
        parameter.grad = torch.ones_like(parameter)
    made.step()
    return OptimizerState(made)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adafactor", "NAdam", "Rprop"])
def test_loading_optimizer_state_takes_no_optimizer_step(name):
    optimizer = getattr(torch.optim, name)
    saved, other = stepped(optimizer).state_dict(), stepped(optimizer)
    parameters = [parameter for group in other.optimizer.param_groups for parameter in group["params"]]
    values = [parameter.detach().clone() for parameter in parameters]
    other.optimizer.step = None  # loading takes no step
    other.load_state_dict(saved)
    assert all(map(torch.equal, parameters, values))
    before, after = saved["state"], other.state_dict()["state"]
    assert before.keys() == after.keys()
    assert all(
        torch.equal(before[n][key], after[n][key]) for n in before for key in before[n] if before[n][key] is not None
    )


@pytest.mark.parametrize("wrong", [[], "x", None, 3, torch.ones(3, 4), torch.tensor(1.0), torch.ones(4, 3).long()])
def test_optimizer_state_of_wrong_type_shape_or_dtype_raises(wrong):
    saved = stepped(torch.optim.Adam).state_dict()
    saved["state"][0]["exp_avg"] = wrong
    with pytest.raises(ValueError, match="state 0.exp_avg"):
        stepped(torch.optim.Adam).load_state_dict(saved)


def test_optimizer_state_with_a_missing_tensor_raises():
    saved = stepped(torch.optim.Adam).state_dict()
    del saved["state"][1]["exp_avg_sq"]
    with pytest.raises(ValueError, match="missing state 1.exp_avg_sq"):
        stepped(torch.optim.Adam).load_state_dict(saved)


def variants():
    for name in optimizer_names():
        optimizer = getattr(torch.optim, name)
        options = [{}, {"momentum": 0.9}, {"amsgrad": True}, {"centered": True}, {"centered": True, "momentum": 0.9}]
        for arguments in options:
            if arguments.keys() <= inspect.signature(optimizer).parameters.keys():
                yield pytest.param(optimizer, arguments, id=f"{name} {arguments}")
    yield pytest.param(Lamb, {}, id="Lamb")


@pytest.mark.parametrize("optimizer, options", list(variants()))
def test_expected_state_matches_real_state_of_every_torch_optimizer(optimizer, options):
    shapes = [(4, 3), (4,), (), (2, 3, 3, 3), (2, 1, 5)]
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    parameters.append(torch.nn.Parameter(torch.ones(4, 3, dtype=torch.bfloat16)))
    made = optimizer(parameters, lr=0.1, **options)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    made.step()
    for parameter in parameters:
        expected, left = expected_state(made, made.param_groups[0], parameter), made.state[parameter]
        assert {key: (value.shape, value.dtype) for key, value in expected.items()} == {
            key: (value.shape, value.dtype) for key, value in left.items()
        }
    saved, other = OptimizerState(made).state_dict(), OptimizerState(optimizer(parameters, lr=0.1, **options))
    other.load_state_dict(saved)
    for key in expected:
        for wrong in (None, torch.ones(4, 3, 2), torch.ones(expected[key].shape, dtype=torch.int64)):
            state = {**saved, "state": {**saved["state"], 5: {**saved["state"][5], key: wrong}}}
            with pytest.raises(ValueError, match=f"state 5.{key}"):
                other.load_state_dict(state)


class SketchSGD(torch.optim.SGD):
    """Custom optimizer whose state tensors differ in shape from the parameters."""

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"sketch": torch.zeros(7), "step": 1}


class ClosureSGD(SketchSGD):
    """Custom optimizer whose ``step`` requires a closure, so that a trial step without one fails."""

    def step(self, closure):
        super().step()


def test_loading_restores_the_state_of_a_custom_optimizer():
    saved, other = stepped(SketchSGD).state_dict(), stepped(SketchSGD)
    values = [parameter.detach().clone() for parameter in other.optimizer.param_groups[0]["params"]]
    other.load_state_dict(saved)
    assert next(iter(other.optimizer.state.values())).keys() == {"sketch", "step"}
    assert all(map(torch.equal, other.optimizer.param_groups[0]["params"], values))


@pytest.mark.parametrize(
    "key, wrong", [("sketch", torch.zeros(4, 3)), ("sketch", None), ("sketch", torch.zeros(7).long()), ("step", "x")]
)
def test_invalid_state_of_a_custom_optimizer_raises(key, wrong):
    saved = stepped(SketchSGD).state_dict()
    saved["state"][0] = {**saved["state"][0], key: wrong}
    with pytest.raises(ValueError, match=f"state 0.{key}"):
        stepped(SketchSGD).load_state_dict(saved)
    del saved["state"][0][key]
    with pytest.raises(ValueError, match=key):
        stepped(SketchSGD).load_state_dict(saved)


def test_custom_optimizer_that_cannot_take_a_trial_step_warns_once(caplog):
    made = ClosureSGD([torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(4))], lr=0.1)
    made.step(None)
    saved = OptimizerState(made).state_dict()
    OptimizerState(made).load_state_dict(saved)
    assert [record.levelname for record in caplog.records if "ClosureSGD" in record.getMessage()] == ["WARNING"]


OPTIONS = (
    "SOLVER.MAX_EPOCH", "2", "SOLVER.BIAS_LR_FACTOR", "2.0", "SOLVER.HEADS_LR_FACTOR", "2.0",
    "SOLVER.LR_FACTORS", "{'backbone.4.*': 0.5}", "SOLVER.CLIP_GRADIENTS", "True",
    "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "global_norm", "SOLVER.CLIP_GRADIENTS.CLIP_VALUE", "1.0",
)  # fmt: skip


class Interrupt(HookBase):
    def before_step(self):
        if self.trainer.iter == 7:
            signal.raise_signal(signal.SIGTERM)


def train(folder, *hooks, resume=False, opts=()):
    torch.manual_seed(0)
    trainer = DefaultTrainer(tiny.tiny_config(folder, *OPTIONS, *opts))
    trainer.resume_or_load(resume=resume)
    trainer.trainer.register_hooks(hooks)
    trainer.train()


def resumed(folder, content, opts=()):
    folder.mkdir()
    torch.save(content, folder / "model_interrupted.pth")
    (folder / "last_checkpoint").write_text("model_interrupted.pth")
    train(folder, resume=True, opts=opts)
    return torch.load(folder / "model_final.pth", weights_only=True)


@pytest.mark.integration
def test_resume_uses_learning_rates_and_weight_decays_from_the_config(demo, tmp_path):
    with pytest.raises(TrainingInterrupted):
        train(tmp_path / "interrupted", Interrupt())
    content = torch.load(tmp_path / "interrupted/model_interrupted.pth", weights_only=True)
    changed = ("SOLVER.WEIGHT_DECAY", "0.25", "SOLVER.BASE_LR", "0.5", "SOLVER.HEADS_LR_FACTOR", "1.0")
    groups = resumed(tmp_path / "other", content, changed)["optimizer"]["param_groups"]
    assert {(group["role"], group["base_lr"], group["weight_decay"]) for group in groups} == {
        ("backbone weight", 0.5, 0.25),
        ("backbone weight backbone.4.*", 0.25, 0.25),
        ("backbone norm", 0.5, 0.0005),
        ("backbone bias", 1.0, 0.0005),
        ("heads weight", 0.5, 0.25),
        ("heads norm", 0.5, 0.0005),
    }


def test_loading_matches_optimizer_state_by_parameter_name():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})

    def state(*groups):
        parameters = [{"params": [model.get_parameter(name) for name in names]} for names in groups]
        return OptimizerState(torch.optim.Adam(parameters, lr=0.1), model)

    first, second = state(["a.weight", "b.weight"], ["a.bias"]), state(["a.bias"], ["b.weight"], ["a.weight"])
    for number, name in enumerate(("a.weight", "b.weight", "a.bias")):
        parameter = model.get_parameter(name)
        parameter.grad = torch.full_like(parameter, number + 1.0)
    first.optimizer.step()
    saved = first.state_dict()
    assert [group["param_names"] for group in saved["param_groups"]] == [["a.weight", "b.weight"], ["a.bias"]]
    second.load_state_dict(saved)
    for name in ("a.weight", "b.weight", "a.bias"):
        parameter = model.get_parameter(name)
        ours, theirs = second.optimizer.state[parameter], first.optimizer.state[parameter]
        assert torch.equal(ours["exp_avg"], theirs["exp_avg"]) and ours["exp_avg"].flatten()[0] > 0
    with pytest.raises(ValueError, match=r"1 .*\(b.bias\)"):
        state(["a.bias", "b.bias"], ["b.weight"], ["a.weight"]).load_state_dict(saved)
