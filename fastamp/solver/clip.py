"""In-place clipping of unscaled gradients, without host-device synchronization."""

from collections.abc import Sequence

import torch

from fastamp.amp.sharded_norm import norms_over_ranks
from fastamp.config import Key

KEYS = (
    Key("SOLVER.CLIP_GRADIENTS.ENABLED", False, "Clip gradients before each optimizer step."),
    Key(
        "SOLVER.CLIP_GRADIENTS.CLIP_TYPE",
        "norm",
        "Quantity to clip: value clips each element, norm the norm of each "
        "parameter's gradient, global_norm the norm of all gradients together.",
        choices=("value", "norm", "global_norm"),
    ),
    Key("SOLVER.CLIP_GRADIENTS.CLIP_VALUE", 5.0, "Maximum absolute value or maximum norm.", above=0),
    Key("SOLVER.CLIP_GRADIENTS.NORM_TYPE", 2.0, "Order p of the norm; .inf is the maximum absolute value.", above=0),
)

_EPS = 1e-6


def clip_gradients(
    gradients: list[torch.Tensor],
    total_norm: torch.Tensor,
    *,
    clip_type: str,
    clip_value: float,
    norm_type: float = 2.0,
    sharded: Sequence[int] = (),
) -> torch.Tensor:
    """Clip ``gradients`` in place, and return the clip coefficient.

    Args:
        gradients: unscaled gradients of any shape.
        total_norm: L2 norm of all gradients before clipping, shape (); used only to compute the returned coefficient.
        clip_type: ``"value"`` clamps each element, ``"norm"`` clips the norm of each parameter's gradient,
            ``"global_norm"`` clips the norm of all gradients together.
        clip_value: maximum absolute value or maximum norm.
        norm_type: order p of the clipped norm. Default 2.0.
        sharded: indices of the gradients whose rows are divided among the ranks; their norms are those of the rows of
            all ranks. Default: none.

    Returns:
        Clip coefficient, shape (), in 0..1: L2 norm of all gradients after clipping, divided by ``total_norm``. It is 1
        if ``total_norm`` is 0.
    """
    if clip_type == "value":
        torch._foreach_clamp_min_(gradients, -clip_value)
        torch._foreach_clamp_max_(gradients, clip_value)
    else:
        norms = norms_over_ranks(torch.stack(torch._foreach_norm(gradients, norm_type)), sharded, norm_type)
        if clip_type == "global_norm":
            norms = torch.linalg.vector_norm(norms, norm_type)
        factors = (clip_value / (norms + _EPS)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factors if clip_type == "global_norm" else list(factors.unbind()))
    after = torch.linalg.vector_norm(norms_over_ranks(torch.stack(torch._foreach_norm(gradients)), sharded))
    return torch.where(total_norm > 0, after / total_norm, torch.ones_like(after))
