"""Weight averages: comparison with closed forms, swapping with the model, saving and loading."""

import pytest
import torch
from torch import nn

from fastamp.solver import WeightAverage


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def change(model, seed):
    """Set the weights and statistics of a model to random values, and return a copy of them by name."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape) if tensor.is_floating_point() else torch.tensor(seed))
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("decay", [0.0, 0.9, 0.999, 1.0])
def test_ema_matches_the_closed_form(decay):
    model = make()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    average = WeightAverage(model, "ema")
    history = []
    for seed in range(1, 8):
        history.append(change(model, seed))
        average.update(1 - decay)
    n = len(history)
    for name, tensor in average.tensors().items():
        if name.endswith("num_batches_tracked"):
            assert tensor == n
            continue
        expected = decay**n * start[name].double()
        for i, state in enumerate(history):
            expected += (1 - decay) * decay ** (n - 1 - i) * state[name].double()
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-5, atol=1e-6)
        assert tensor.dtype == torch.float32


def test_swa_equals_the_mean_of_the_weights_at_all_updates():
    model = make()
    average = WeightAverage(model, "swa")
    history = [change(model, seed) for seed in range(1, 6) if not average.update(1 / (average.updates + 1))]
    # The model changes after each update, so that the first update uses the initial weights.
    average.update(1 / (average.updates + 1))
    start = make().state_dict()
    for name in ("0.weight", "1.running_mean"):
        expected = torch.stack([start[name], *(state[name] for state in history)]).mean(0)
        torch.testing.assert_close(average.tensors()[name], expected)


def test_weight_average_applied_loads_average_and_restores_model_on_exit():
    model = make()
    average = WeightAverage(model, "ema")
    before = change(model, 1)
    averaged = {name: tensor.clone() for name, tensor in average.tensors().items()}
    parameter = model[0].weight
    with average.applied():
        assert model[0].weight is parameter
        assert all(torch.equal(tensor, averaged[name]) for name, tensor in model.state_dict().items())
        assert all(torch.equal(tensor, averaged[name]) for name, tensor in average.state_dict()["model"].items())
        model[1].running_mean.fill_(7.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(average.tensors()["1.running_mean"], torch.full((4,), 7.0))  # the change is kept in the average
    with pytest.raises(RuntimeError, match="inside"), average.applied():
        raise RuntimeError("inside")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_weight_average_state_round_trip_is_exact_and_mismatches_raise():
    model, other = make(), make()
    average, again = WeightAverage(model, "ema"), WeightAverage(other, "ema")
    change(model, 3)
    average.update(0.25)
    again.load_state_dict(average.state_dict())
    assert again.updates == 1
    assert all(torch.equal(a, b) for a, b in zip(average.tensors().values(), again.tensors().values(), strict=True))
    with pytest.raises(ValueError, match="'swa'.*'ema'"):
        WeightAverage(other, "swa").load_state_dict(average.state_dict())
    with pytest.raises(ValueError, match="another model"):
        WeightAverage(nn.Linear(2, 2), "ema").load_state_dict(average.state_dict())


def test_average_follows_replaced_and_added_modules():
    model = make()
    average = WeightAverage(model, "ema")
    change(model, 1)
    average.update(0.5)
    kept = average.tensors()["0.bias"].clone()
    model[0].weight = nn.Parameter(torch.full((4, 3), 2.0))
    model.append(nn.Linear(4, 2))
    former = average.tensors()["0.weight"].clone()
    average.update(0.5)
    found = average.tensors()
    assert found.keys() == model.state_dict().keys()
    torch.testing.assert_close(found["0.weight"], (former + 2) / 2)
    torch.testing.assert_close(found["0.bias"], (kept + model[0].bias.detach()) / 2)
    assert torch.equal(found["2.weight"], model[2].weight)  # starts with its current values
    with average.applied():
        torch.testing.assert_close(model[0].weight.detach(), (former + 2) / 2)


def test_average_follows_parameters_whose_data_was_replaced():
    model = nn.Conv2d(3, 4, 3)
    average = WeightAverage(model, "ema")
    before = model.weight.detach().clone()
    model.to(memory_format=torch.channels_last)  # assigns weight.data
    with torch.no_grad():
        model.weight.add_(1)
    average.update(0.5)
    torch.testing.assert_close(average.tensors()["weight"], before + 0.5)
    with average.applied():
        torch.testing.assert_close(model.weight.detach(), before + 0.5)
        assert not average.tensors()["weight"].requires_grad
