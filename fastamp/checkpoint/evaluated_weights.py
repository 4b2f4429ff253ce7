"""The weights of a checkpoint that are evaluated: the model's, or their average."""

import logging
import os
from typing import Any

from torch import nn

from fastamp.checkpoint.checkpointer import STRIPPED, Checkpointer
from fastamp.checkpoint.load_state import load_model_state
from fastamp.checkpoint.weights_file import state_dict_in

logger = logging.getLogger(__name__)


def evaluated_average(cfg: Any) -> str | None:
    """Return which average of the weights the config evaluates: ``"ema"``, ``"swa"`` or None."""
    if cfg.SOLVER.EMA.ENABLED:
        return "ema" if cfg.SOLVER.EMA.EVALUATE else None
    return "swa" if cfg.SOLVER.SWA.ENABLED else None


def load_evaluated_weights(
    model: nn.Module, path: str | os.PathLike[str], *, average: str | None, min_match: float
) -> dict[str, Any]:
    """Load the weights of a checkpoint that are to be evaluated.

    Args:
        model: gets them.
        path: a checkpoint, or a bare state dict.
        average: kind of the average to take where the file holds it, ``"ema"`` or ``"swa"``; None takes the weights.
        min_match: see ``load_model_state``.

    Returns:
        The further entries of the file, empty for a bare state dict.

    Raises:
        WeightsError: the weights are missing, damaged, or of another model.
    """
    extra = Checkpointer(model, min_match=min_match).load(path)
    if STRIPPED in extra:
        held = extra[STRIPPED]
        if held != (average or "model"):
            logger.warning("%s was stripped and holds the %s weights alone: evaluating these", path, held)
        return extra
    if average is None:
        return extra
    state = extra.get("average")
    if not isinstance(state, dict) or state.get("kind") != average or not state.get("updates"):
        logger.warning("%s holds no %s of the weights: evaluating the weights", path, average)
        return extra
    # The classifier, which a model for evaluation alone does not have, is left out.
    source = f"the {average} in {path}"
    load_model_state(model, state_dict_in(state, source), source=source)
    return extra
