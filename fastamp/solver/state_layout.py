"""Names, shapes and dtypes of the state that an optimizer keeps for each parameter."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from fastamp.utils.form import unlike

# Tensors with the parameter's shape and dtype. All of torch.optim that trains here, and timm's Lamb.
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
# Option of a group -> a further one of these where the option is on.
_OPTIONAL = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}
# Scalars in float32.
_SCALARS = {"ASGD": ("step", "eta", "mu"), "NAdam": ("step", "mu_product"), "Lamb": (), "SGD": ()}


def expected_state(optimizer: Optimizer, group: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what a step leaves for a parameter, as tensors without memory; {} for an optimizer of another library.

    Args:
        optimizer: of which only the class matters. A subclass with a ``step`` of its own may keep other state, and
            counts as another library's.
        group: options.
        parameter: of the group.
    """
    name = _layout_of(type(optimizer))
    if name is None:
        return {}
    names = [*_LIKE_PARAMETER[name], *(key for option, key in _OPTIONAL.items() if group.get(option))]
    shapes = dict.fromkeys(names, tuple(parameter.shape))
    if name == "Adafactor":
        *rest, last = parameter.shape or (1,)
        factored = {"row_var": (*rest, 1), "col_var": (*rest[:-1], 1, last)}
        shapes = factored if parameter.ndim > 1 else {"variance": tuple(parameter.shape)}
    expected = {key: torch.empty(shape, dtype=parameter.dtype, device="meta") for key, shape in shapes.items()}
    return expected | {key: torch.empty((), device="meta") for key in _SCALARS.get(name, ("step",))}


def _layout_of(kind: type[Optimizer]) -> str | None:
    """Return the entry of ``_LIKE_PARAMETER`` for a class; a subclass that steps as its base does has the base's."""
    for base in kind.__mro__:
        name = base.__name__
        if getattr(torch.optim, name, None) is base or (name == "Lamb" and base.__module__.startswith("timm.optim")):
            return name if name in _LIKE_PARAMETER else None
        if "step" in vars(base):
            return None
    return None


def check_state(optimizer: Optimizer, group: Mapping[str, Any], parameter: torch.Tensor, saved: Any, name: str) -> None:
    """Check what a file holds as the state of a parameter; an empty one is that of a parameter that was never updated.

    Args:
        optimizer, group, parameter: see ``expected_state``.
        saved: from the file.
        name: of the place, for the message.

    Raises:
        ValueError: a value is missing, or has another shape or dtype than a step leaves.
    """
    if saved is None or (isinstance(saved, Mapping) and not saved):
        return
    expected = expected_state(optimizer, group, parameter)
    wrong = unlike(expected, saved, name) or ", ".join(key for key in expected if key not in saved)
    if wrong:
        raise ValueError(f"what it has accumulated is wrong or missing: {wrong}")
