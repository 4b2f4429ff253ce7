"""Validation of saved optimizer state: expected names, shapes and dtypes for each parameter."""

import copy
import functools
import logging
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from fastamp.utils.structure import structure_mismatch

logger = logging.getLogger(__name__)

# State tensors with the shape and dtype of the parameter, for all supported optimizers of torch.optim and timm's Lamb.
_LIKE_PARAMETER = {
    "ASGD": ("ax",),
    "Adadelta": ("square_avg", "acc_delta"),
    "Adafactor": (),
    "Adagrad": ("sum",),
    "Adam": ("exp_avg", "exp_avg_sq"),
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "Adamax": ("exp_avg", "exp_inf"),
    "Lamb": ("exp_avg", "exp_avg_sq"),
    "NAdam": ("exp_avg", "exp_avg_sq"),
    "RAdam": ("exp_avg", "exp_avg_sq"),
    "RMSprop": ("square_avg",),
    "Rprop": ("prev", "step_size"),
    "SGD": (),
}
# Group option -> additional state tensor if the option is set.
_OPTIONAL = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}
# Scalar state in float32; the default is "step".
_SCALARS = {"ASGD": ("step", "eta", "mu"), "NAdam": ("step", "mu_product"), "Lamb": (), "SGD": ()}


def expected_state(optimizer: Optimizer, group: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """Create a template of one parameter's optimizer state after an optimizer step.

    Args:
        optimizer: optimizer of any class. If the class is not from torch.optim or overrides ``step``, a copy of the
            optimizer takes a trial step on a copy of the parameter.
        group: options of the parameter group.
        parameter: a parameter of the group.

    Returns:
        Expected state. Its tensors are on the meta device for optimizers of torch.optim. The dict is empty if the trial
        step fails.
    """
    name = _layout_of(type(optimizer))
    if name is None:
        return _state_after_step(optimizer, group, parameter)
    names = [*_LIKE_PARAMETER[name], *(key for option, key in _OPTIONAL.items() if group.get(option))]
    shapes = dict.fromkeys(names, tuple(parameter.shape))
    if name == "Adafactor":
        *rest, last = parameter.shape or (1,)
        factored = {"row_var": (*rest, 1), "col_var": (*rest[:-1], 1, last)}
        shapes = factored if parameter.ndim > 1 else {"variance": tuple(parameter.shape)}
    expected = {key: torch.empty(shape, dtype=parameter.dtype, device="meta") for key, shape in shapes.items()}
    return expected | {key: torch.empty((), device="meta") for key in _SCALARS.get(name, ("step",))}


def _layout_of(kind: type[Optimizer]) -> str | None:
    """Return the name of the known optimizer class whose ``step`` ``kind`` uses; None if ``step`` is custom."""
    for base in kind.__mro__:
        name = base.__name__
        if vars(torch.optim).get(name) is base or (name == "Lamb" and base.__module__.startswith("timm.optim")):
            return name if name in _LIKE_PARAMETER else None
        if "step" in vars(base):
            return None
    return None


def _state_after_step(optimizer: Optimizer, group: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    clone = parameter.detach().clone()
    clone.grad = torch.zeros_like(clone)
    options = {key: value for key, value in group.items() if key != "params"}
    # Holds one parameter at a time: a copy of the whole optimizer would double its memory.
    twin = copy.copy(optimizer)
    twin.param_groups = [copy.deepcopy(options) | {"params": [clone]}]
    twin.state = defaultdict(dict)
    try:
        twin.step()
    except Exception as error:
        _warn_not_validated(type(optimizer).__name__, f"{type(error).__name__}: {error}")
        return {}
    return dict(twin.state[clone])


@functools.cache  # one warning, not one for each parameter
def _warn_not_validated(name: str, error: str) -> None:
    logger.warning("the saved state of %s is not validated, because a trial step failed with %s", name, error)


def check_state(optimizer: Optimizer, group: Mapping[str, Any], parameter: torch.Tensor, saved: Any, name: str) -> None:
    """Validate the saved optimizer state of one parameter.

    None and an empty state are valid: they are saved for a parameter that was never updated.

    Args:
        optimizer, group, parameter: see ``expected_state``.
        saved: state read from a checkpoint.
        name: name of the entry, for the error message.

    Raises:
        ValueError: if an entry is missing, or has another shape or dtype than after an optimizer step.
    """
    if saved is None or (isinstance(saved, Mapping) and not saved):
        return
    expected = expected_state(optimizer, group, parameter)
    wrong = structure_mismatch(expected, saved, name) or ", ".join(
        f"missing {name}.{key}" for key in expected if key not in saved
    )
    if wrong:
        raise ValueError(f"the saved optimizer state is invalid: {wrong}")
