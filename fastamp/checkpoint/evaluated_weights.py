"""Load the weights that the config selects for evaluation: the model's weights or their average."""

import logging
from typing import Any

from torch import nn

from fastamp.checkpoint.checkpointer import STRIPPED, load_weights
from fastamp.checkpoint.load_state import load_model_state
from fastamp.checkpoint.weights_file import state_dict_in
from fastamp.config import CfgNode

logger = logging.getLogger(__name__)


def evaluated_average(cfg: CfgNode) -> str | None:
    """Return the weight average that the config selects for evaluation: ``"ema"``, ``"swa"`` or None."""
    if cfg.SOLVER.EMA.ENABLED:
        return "ema" if cfg.SOLVER.EMA.EVALUATE else None
    return "swa" if cfg.SOLVER.SWA.ENABLED else None


def load_evaluated_weights(model: nn.Module, content: Any, cfg: CfgNode) -> dict[str, Any]:
    """Load the weights of ``MODEL.WEIGHTS`` for evaluation.

    Args:
        model: model to load the weights into.
        content: content of ``MODEL.WEIGHTS``: a checkpoint, or a bare state dict.
        cfg: config; reads ``MODEL.WEIGHTS``, ``MODEL.WEIGHTS_MIN_MATCH``, ``MODEL.WEIGHTS_ALLOW_MISSING``,
            ``MODEL.LORA.BASE`` and the average to load, see ``evaluated_average``. If the file does not contain the
            average, the weights of the model are loaded.

    Returns:
        The remaining entries of the file, without the loaded weights; empty for a bare state dict.

    Raises:
        WeightsError: if the weights are missing or damaged, or do not match the model.
    """
    average, path = evaluated_average(cfg), cfg.MODEL.WEIGHTS
    extra = load_weights(
        model,
        content,
        path,
        min_match=cfg.MODEL.WEIGHTS_MIN_MATCH,
        allow_missing=cfg.MODEL.WEIGHTS_ALLOW_MISSING,
        base=cfg.MODEL.LORA.BASE,
    )
    if STRIPPED in extra:
        kind = extra[STRIPPED]
        if kind != (average or "model"):
            logger.warning(
                "%s was stripped and contains only the %s weights: evaluating these instead of the configured "
                "weights.\n  fix: to evaluate others, use the checkpoint from which this file was made",
                path,
                kind,
            )
        return extra
    if average is None:
        return extra
    state = extra.get("average")
    if not isinstance(state, dict) or state.get("kind") != average or not state.get("updates"):
        logger.warning(
            "%s contains no %s weights: evaluating the model weights instead.\n"
            "  fix: if this is intended, set SOLVER.%s False",
            path,
            average,
            "EMA.EVALUATE" if average == "ema" else "SWA.ENABLED",
        )
        return extra
    # A model that is built for evaluation only has no classifier: tensors that it lacks are skipped.
    source = f"the {average} in {path}"
    load_model_state(model, state_dict_in(state, source), source=source, content=extra)
    return extra
