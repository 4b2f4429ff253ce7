"""Estimate the disk space of a search."""

import logging
import shutil
from pathlib import Path

import torch

from autotuner.settings import Search
from fastamp.config import CfgNode
from fastamp.modeling import build_model
from fastamp.solver import build_optimizer
from fastamp.utils.errors import ConfigError

logger = logging.getLogger("fastamp.fasttune")
_GB = 1e9


def trial_bytes(cfg: CfgNode, identities: int) -> tuple[int, int]:
    """Return the sizes of a trial's checkpoint and of its best weights, in bytes: ``(checkpoint, weights)``.

    Args:
        cfg: config of the trial; its model is built once with random weights.
        identities: number of training identities.
    """
    cfg = cfg.with_values(
        {"MODEL.HEADS.NUM_CLASSES": identities, "MODEL.BACKBONE.PRETRAIN": False, "MODEL.DEVICE": "cpu"}
    )
    model = build_model(cfg)
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    copies = 1 + _state_per_weight(build_optimizer(cfg, model)) + (cfg.SOLVER.EMA.ENABLED or cfg.SOLVER.SWA.ENABLED)
    return int(weights * copies), weights


def _state_per_weight(optimizer: torch.optim.Optimizer) -> float:
    """Return the number of optimizer state values per weight, e.g. 2 for Adam."""
    parameter = max((p for group in optimizer.param_groups for p in group["params"]), key=torch.Tensor.numel)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = optimizer.state[parameter].values()
    return sum(entry.numel() for entry in state if isinstance(entry, torch.Tensor)) / parameter.numel()


def check_disk(search: Search, identities: int, *, concurrent: int) -> None:
    """Log the maximum disk space that the search needs, and check that it is available.

    Each trial keeps one checkpoint (two in population based training). The best weights of a trial are kept until
    another trial has a better score.

    Args:
        search: settings of a search that has not started.
        identities: number of training identities.
        concurrent: number of concurrent trials.

    Raises:
        ConfigError: if the disk of OUTPUT_DIR has less free space than the search needs.
    """
    checkpoint, weights = trial_bytes(search.cfg, identities)
    keeps_paused = search.scheduler in ("pbt", "hyperband")  # paused trials keep their files
    alive = search.trials if keeps_paused else min(concurrent, search.trials)
    kept = 2 if search.scheduler == "pbt" else 1
    # A new file is complete before it replaces the old one.
    needed = alive * (kept * checkpoint + weights) + min(concurrent, search.trials) * checkpoint + weights
    free = shutil.disk_usage(search.folder.parent).free
    message = (
        f"disk space: the trials need up to {needed / _GB:.3g} GB ({alive} x {kept} checkpoints of "
        f"{checkpoint / _GB:.3g} GB, and weights); {free / _GB:.3g} GB are free in {Path(search.folder).parent}"
    )
    if needed > free:
        raise ConfigError(
            f"{message}.\n  fix: set OUTPUT_DIR to a folder on another disk, or lower --max-concurrent or --num-trials"
        )
    logger.info("%s", message)
