"""Cached lists of modules and tensors: every change of the model is detected."""

import pytest
import torch
from torch import nn

from fastamp.amp.buffers import ForwardBuffers
from fastamp.amp.model_tensors import ModelTensors


def make_model():
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ModuleList([nn.Linear(2, 2)]))


def replace_directly(model):
    model[2]._modules["0"] = nn.Linear(2, 2)


CHANGES = {
    "module": lambda model: setattr(model, "1", nn.BatchNorm1d(2)),
    "nested module": replace_directly,
    "added module": lambda model: model[2].append(nn.Linear(2, 2)),
    "removed module": lambda model: model[2].__delitem__(0),
    "parameter": lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(2, 2))),
    "buffer": lambda model: setattr(model[1], "running_mean", torch.ones(2)),
    "added buffer": lambda model: model[0].register_buffer("scale", torch.ones(1)),
    "removed parameter": lambda model: setattr(model[0], "bias", None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_lists_are_updated_after_a_change_of_the_model(change):
    model = make_model()
    tensors = ModelTensors(model)
    version = tensors.refresh()
    assert tensors.refresh() == version
    CHANGES[change](model)
    assert tensors.refresh() == version + 1 == tensors.refresh()
    assert tensors.modules == list(model.modules())
    assert list(map(id, tensors.parameters)) == list(map(id, model.parameters()))


def test_lists_are_not_rebuilt_after_training_loading_or_freezing():
    model = make_model()
    tensors = ModelTensors(model)
    version = tensors.refresh()
    model[1](torch.randn(4, 2)).sum().backward()
    model.load_state_dict(make_model().state_dict())
    model.eval().requires_grad_(False)
    assert tensors.refresh() == version


@pytest.mark.parametrize("change", ["module", "buffer"])
def test_forward_buffers_include_replaced_normalization_layer(change):
    model = make_model()
    buffers = ForwardBuffers(model)
    buffers.save()
    CHANGES[change](model)
    buffers.save()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model[1](torch.full((4, 2), float("inf")))
    buffers.restore()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch.jit.script is deprecated
def test_lists_and_forward_buffers_support_scripted_modules():
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))))
    tensors, buffers = ModelTensors(model), ForwardBuffers(model)
    for _ in range(2):
        tensors.refresh()
        assert len(tensors.parameters) == 6
        buffers.save()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        model(torch.full((4, 2), float("inf")))
        buffers.restore()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Reassigning(nn.Module):
    """Module whose forward pass assigns a new tensor to its buffer."""

    written_in_forward = True

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(2))

    def forward(self, x):
        self.mean = 0.5 * (self.mean + x.mean(0))
        return x - self.mean


def test_forward_buffers_restore_buffer_that_the_forward_pass_reassigns():
    model = nn.Sequential(Reassigning())
    buffers = ForwardBuffers(model)
    for number in range(3):
        buffers.save()
        before = model[0].mean.clone()
        model(torch.full((4, 2), float("inf") if number == 1 else 3.0))
        if number == 1:
            buffers.restore()
            assert torch.equal(model[0].mean, before)
    assert torch.equal(model[0].mean, torch.tensor([2.5, 2.5]))


class Registering(nn.Module):
    """Module whose first forward pass registers a buffer in front of another one."""

    written_in_forward = True

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(2))

    def forward(self, x):
        if not hasattr(self, "count"):
            former = self._buffers.pop("mean")
            self.register_buffer("count", torch.zeros(2))
            self.register_buffer("mean", former)
        self.mean += x.mean(0)
        return x - self.mean


def test_forward_buffers_restore_existing_buffers_if_the_forward_pass_registers_another():
    model = nn.Sequential(Registering())
    buffers = ForwardBuffers(model)
    buffers.save()
    model(torch.full((4, 2), float("inf")))
    buffers.restore()
    assert torch.equal(model[0].mean, torch.ones(2))
    buffers.save()
    model(torch.full((4, 2), float("inf")))
    buffers.restore()
    assert torch.equal(model[0].mean, torch.ones(2)) and torch.equal(model[0].count, torch.zeros(2))
