"""Replay of a failed step from its crash dump."""

import logging
from collections.abc import Sequence

from tabulate import tabulate

from fastamp.amp import PrecisionPolicy, requested_device, resolve_device
from fastamp.config import get_cfg, load_plugin
from fastamp.config.releases import current_path
from fastamp.diagnostics.config_check import check_config
from fastamp.diagnostics.crash import CrashDump
from fastamp.diagnostics.isolated_passes import IsolatedPasses
from fastamp.diagnostics.nan_locator import locate_in_evaluation, locate_in_training
from fastamp.diagnostics.tensors import all_finite
from fastamp.modeling import build_model
from fastamp.utils.errors import ConfigError

logger = logging.getLogger(__name__)


def replay(path: str, opts: Sequence[str] = (), *, plugin: str = "") -> bool:
    """Replay a crash dump; log the recorded and the replayed losses, and the first non-finite value.

    Args:
        path: a crash dump, or the folder ``amp_crash``, from which the newest crash dump is replayed.
        opts: KEY VALUE pairs that override the config, to test a fix on the failed step: ``SOLVER.AMP.FORCE_FP32``,
            ``SOLVER.AMP bf16``, ``SOLVER.AMP.INIT_SCALE``, ``MODEL.DEVICE``.
        plugin: Python file that registers the model's custom components, see ``load_plugin``.

    Returns:
        True if all values are finite in the replay.

    Raises:
        UserError: if the file, an option or the config is invalid, or the model does not match the crash dump.
    """
    crash = CrashDump.read(path)
    cfg = get_cfg()
    if plugin:
        load_plugin(plugin, cfg)
    cfg.merge_saved(crash.config)
    cfg.merge_from_list(["MODEL.BACKBONE.PRETRAIN", "False", "MODEL.WEIGHTS", ""])
    cfg.merge_from_list(opts)
    cfg.freeze()
    check_config(cfg)
    device = resolve_device(requested_device(cfg))
    try:
        model = build_model(cfg)
    except ConfigError as error:
        hint = "" if plugin else "\n  fix: add --plugin FILE if the model has custom components"
        raise ConfigError(f"{error}{hint}") from error
    crash.restore(model, exact=not opts)
    keys = {current_path(key) for key in opts[::2]}
    policy = crash.precision(device)
    if keys & {"SOLVER.AMP", "SOLVER.AMP.ENABLED", "SOLVER.AMP.DTYPE"}:
        policy = PrecisionPolicy.from_config(cfg, device)
    policy.apply_tf32()
    scale = cfg.SOLVER.AMP.INIT_SCALE if "SOLVER.AMP.INIT_SCALE" in keys else crash.loss_scale
    scale = scale if policy.needs_loss_scaling else 1.0
    logger.info(
        "replaying iteration %d of rank %d: %s, loss scale %g",
        crash.iteration + 1,
        crash.rank,
        policy.describe(),
        scale,
    )
    batch = crash.micro_batch
    with IsolatedPasses(model, batch.batch, random=batch.random, frozen=tuple(crash.frozen_layers)) as passes:
        reference = passes.train(policy.in_float32())
        now = passes.train(policy, scale=scale)
        location = locate_in_training(passes, policy, scale=scale)
        eval_policy = policy.for_evaluation(cfg.SOLVER.AMP.EVAL_DTYPE)
        evaluates = all_finite(passes.evaluate(eval_policy))
        if location is None and not evaluates:
            location = locate_in_evaluation(passes, eval_policy)
    rows = [
        (name, f"{crash.losses.get(name, float('nan')):.8g}", f"{value:.8g}", f"{reference.losses[name]:.8g}")
        for name, value in now.losses.items()
    ]
    logger.info("%s", tabulate(rows, headers=["", "recorded", "now", "float32"], disable_numparse=True))
    total = sum(p.requires_grad for p in model.parameters())
    logger.info("non-finite gradients: %d of %d", len(now.bad_gradients), total)
    if location:
        logger.info("%s", location.describe())
    finite = now.finite and evaluates
    outcome = "all values are finite" if finite else "reproduced: values are not finite"
    if finite and not opts:
        outcome = (
            "NOT reproduced: all values are finite with the same settings.\n"
            "  cause: another device or library version, or a failure that needs all processes (MODEL.LOSSES.GATHER, "
            "syncBN)"
        )
    logger.info("%s", outcome)
    return finite
