"""Optimizer steps that update only the rows of a parameter that have a gradient."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

ROW_OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop")
"""Optimizers whose update of an element depends only on the gradient, the value and the state of this element."""


def gradient_values(parameter: nn.Parameter) -> torch.Tensor:
    """Return the gradient of a parameter as a dense tensor that shares its memory.

    Returns:
        The gradient; for a sparse gradient, which is coalesced, the rows that have one, in order.
    """
    gradient = parameter.grad
    assert gradient is not None
    if not gradient.is_sparse:
        return gradient
    parameter.grad = gradient.coalesce()
    return parameter.grad.values()


@torch.no_grad()
def step_rows(optimizer: Optimizer) -> None:
    """Take an optimizer step; of a parameter with a sparse gradient, update only the rows that have one.

    The other rows keep their values and their state, so neither momentum nor weight decay moves them. For the step, the
    optimizer holds a copy of the rows and of their state; afterwards, both are copied back (An et al. 2021,
    arXiv:2010.05222, and their program). The step count of Adam is that of the parameter, not of a row.

    Args:
        optimizer: one of ``ROW_OPTIMIZERS`` if a parameter has a sparse gradient, else of any class.
    """
    places = [
        (group["params"], number, parameter)
        for group in optimizer.param_groups
        for number, parameter in enumerate(group["params"])
        if parameter.grad is not None and parameter.grad.is_sparse
    ]
    if not places:
        optimizer.step()
        return
    moved: list[tuple[list[Any], int, nn.Parameter, torch.Tensor, nn.Parameter, dict[str, Any]]] = []
    for parameters, number, parameter in places:
        values = gradient_values(parameter)
        rows = parameter.grad.indices()[0]
        part = nn.Parameter(parameter[rows])
        part.grad = values
        state = optimizer.state.pop(parameter, {})
        if state:
            optimizer.state[part] = {
                key: value[rows] if _is_like(value, parameter) else value for key, value in state.items()
            }
        parameters[number] = part
        moved.append((parameters, number, parameter, rows, part, state))
    try:
        optimizer.step()
    finally:
        for parameters, number, parameter, rows, part, state in moved:
            parameter.index_copy_(0, rows, part)
            for key, value in optimizer.state.pop(part, {}).items():
                if _is_like(value, part):
                    if key not in state:  # the only operation on all rows, in the first step
                        state[key] = torch.zeros_like(parameter, dtype=value.dtype)
                    state[key].index_copy_(0, rows, value)
                else:
                    state[key] = value
            if state:
                optimizer.state[parameter] = state
            parameters[number] = parameter


def _is_like(value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape
