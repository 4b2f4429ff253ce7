"""The clipping rule of ``SOLVER.CLIP_GRADIENTS``: in place on unscaled gradients, without reading the device."""

import torch

from fastamp.config import Key

KEYS = (
    Key("SOLVER.CLIP_GRADIENTS.ENABLED", False, "Clip gradients before each step."),
    Key(
        "SOLVER.CLIP_GRADIENTS.CLIP_TYPE",
        "norm",
        "What is bounded: value each element, norm the norm of each "
        "parameter's gradient, global_norm the norm of all gradients together.",
        choices=("value", "norm", "global_norm"),
    ),
    Key("SOLVER.CLIP_GRADIENTS.CLIP_VALUE", 5.0, "The bound: largest absolute value, or largest norm.", above=0),
    Key("SOLVER.CLIP_GRADIENTS.NORM_TYPE", 2.0, "The p of the p-norm; .inf is the largest absolute value.", above=0),
)

_EPS = 1e-6


def clip_gradients(
    gradients: list[torch.Tensor],
    total_norm: torch.Tensor,
    *,
    clip_type: str,
    clip_value: float,
    norm_type: float = 2.0,
) -> torch.Tensor:
    """Clip ``gradients`` in place.

    Args:
        gradients: of any shapes, unscaled.
        total_norm: (), their L2 norm.
        clip_type: ``"value"`` clamps each element, ``"norm"`` bounds the norm of each parameter's gradient,
            ``"global_norm"`` bounds the norm of all together.
        clip_value: the bound.
        norm_type: p of the norm that is bounded.

    Returns:
        (), the L2 norm after clipping over that before, at most 1.
    """
    if clip_type == "value":
        torch._foreach_clamp_min_(gradients, -clip_value)
        torch._foreach_clamp_max_(gradients, clip_value)
    else:
        norms = torch.stack(torch._foreach_norm(gradients, norm_type))
        if clip_type == "global_norm":
            norms = torch.linalg.vector_norm(norms, norm_type)
        factors = (clip_value / (norms + _EPS)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factors if clip_type == "global_norm" else list(factors.unbind()))
    after = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return torch.where(total_norm > 0, after / total_norm, torch.ones_like(after))
