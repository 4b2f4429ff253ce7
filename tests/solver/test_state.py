"""An optimizer goes on only with what a step of its own could have left."""

import pytest
import torch

from fastamp.solver import OptimizerState


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
def test_what_was_saved_goes_on(name):
    optimizer = getattr(torch.optim, name)
    saved, other = stepped(optimizer).state_dict(), stepped(optimizer)
    other.load_state_dict(saved)
    before, after = saved["state"], other.state_dict()["state"]
    assert before.keys() == after.keys()
    assert all(
        torch.equal(before[n][key], after[n][key]) for n in before for key in before[n] if before[n][key] is not None
    )


@pytest.mark.parametrize("wrong", [[], "x", None, 3, torch.ones(3, 4), torch.tensor(1.0), torch.ones(4, 3).long()])
def test_what_no_step_leaves(wrong):
    saved = stepped(torch.optim.Adam).state_dict()
    saved["state"][0]["exp_avg"] = wrong
    with pytest.raises(ValueError, match="wrong or missing: state 0.exp_avg"):
        stepped(torch.optim.Adam).load_state_dict(saved)


def test_what_is_missing():
    saved = stepped(torch.optim.Adam).state_dict()
    del saved["state"][1]["exp_avg_sq"]
    with pytest.raises(ValueError, match="wrong or missing: exp_avg_sq"):
        stepped(torch.optim.Adam).load_state_dict(saved)


def test_the_check_needs_no_second_model():
    class Counted(torch.optim.SGD):
        largest = 0

        def step(self):
            Counted.largest = max(Counted.largest, sum(p.numel() for g in self.param_groups for p in g["params"]))
            super().step()

    saved = stepped(Counted, momentum=0.9).state_dict()
    other, Counted.largest = stepped(Counted, momentum=0.9), 0
    other.load_state_dict(saved)
    assert 0 < Counted.largest <= 12
    assert all(
        torch.equal(p, torch.full_like(p, 0.9 if i < 2 else 1))
        for i, p in enumerate(p for g in other.optimizer.param_groups for p in g["params"])
    )
