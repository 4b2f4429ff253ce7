"""Setup of a run: config checks, logging, seeds and determinism."""

import argparse
import logging
import os
from datetime import timedelta
from pathlib import Path

import torch

from fastamp.amp import requested_device, resolve_device
from fastamp.config import CfgNode, check_is_config
from fastamp.diagnostics.config_check import check_config
from fastamp.diagnostics.environment import inspect_environment
from fastamp.engine.launch import group_timeout
from fastamp.report.run import config_changes
from fastamp.utils import comm
from fastamp.utils.env import keep_freed_memory, seed_all
from fastamp.utils.errors import ConfigError
from fastamp.utils.files import real_path
from fastamp.utils.lock import describe_lock_holder, lock_folder
from fastamp.utils.logger import setup_logger

logger = logging.getLogger(__name__)

# Long texts go to log.txt only.
_FILE_ONLY = {"file_only": True}
# The values that PyTorch accepts in deterministic mode.
_CUBLAS_WORKSPACES = (":4096:8", ":16:8")


def default_setup(cfg: CfgNode, args: argparse.Namespace | None = None) -> None:
    """Check the config, set up logging, seed the random number generators, and configure determinism.

    For a training run (``args.eval_only`` is False), rank 0 also locks OUTPUT_DIR. The lock is released at the end of
    ``DefaultTrainer.train``, or by the operating system when the process exits. An evaluation does not lock OUTPUT_DIR.

    Args:
        cfg: config of the run.
        args: parsed command-line arguments.

    Raises:
        TypeError: if ``cfg`` is not a config.
        ConfigError: if a value is invalid, a component is unknown, the device is not available, ``DETERMINISTIC`` is
            True but CUBLAS_WORKSPACE_CONFIG is not deterministic, or OUTPUT_DIR is not writable or is locked by another
            run.
    """
    check_is_config(cfg)
    check_config(cfg)
    set_cublas_workspace(cfg)  # before anything uses the device
    device = resolve_device(requested_device(cfg))
    rank = comm.get_rank()
    check_links(Path(cfg.OUTPUT_DIR))
    try:
        setup_logger(cfg.OUTPUT_DIR, rank=rank)
    except OSError as error:
        raise ConfigError(
            f"OUTPUT_DIR {cfg.OUTPUT_DIR!r} is not writable: {error.strerror}.\n  fix: choose another OUTPUT_DIR"
        ) from error
    evaluates = getattr(args, "eval_only", None)  # None in scripts that pass no arguments
    if evaluates is False and rank == 0:
        lock_folder(cfg.OUTPUT_DIR, "OUTPUT_DIR")
    if evaluates and (training := describe_lock_holder(cfg.OUTPUT_DIR)):
        logger.warning(
            "OUTPUT_DIR %s is in use by a training run (%s): this evaluation appends to log.txt of that run and may "
            "overwrite evaluation results.\n  fix: choose another OUTPUT_DIR for the evaluation",
            cfg.OUTPUT_DIR,
            training,
        )
    minutes = cfg.DIST_TIMEOUT_MINUTES
    if minutes and comm.is_distributed() and group_timeout() != timedelta(minutes=minutes):
        logger.warning(
            "DIST_TIMEOUT_MINUTES %g has no effect: the process group was initialized without the config.\n"
            "  fix: pass timeout=datetime.timedelta(minutes=%g) to launch, or to torch.distributed.init_process_group",
            minutes,
            minutes,
        )
    if requested_device(cfg) != cfg.MODEL.DEVICE:
        logger.info("MODEL.DEVICE is not set, and PyTorch finds no CUDA device: using %s", device)
    machine = inspect_environment(device, asked=requested_device(cfg), decoder=cfg.INPUT.DECODER)
    logger.info("environment:\n%s", machine.table(), extra=_FILE_ONLY)
    for problem in machine.problems:
        logger.warning("%s", problem)
    if args is not None:
        logger.info("arguments: %s", args, extra=_FILE_ONLY)
    for line in cfg.translation_notes():
        logger.info("config file: %s", line)
    logger.info("config:\n%s", cfg.dump(), extra=_FILE_ONLY)
    logger.info("%s", _describe_changes(cfg))
    if device.type == "cpu":
        keep_freed_memory()
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # checkpoints save the random state of the current device
    seed_all(cfg.SEED + rank)
    _set_deterministic(cfg.DETERMINISTIC, benchmark=cfg.CUDNN_BENCHMARK)


def _describe_changes(cfg: CfgNode) -> str:
    """List the config keys whose values differ from their defaults."""
    rows = [f"  {key}: {value}  (default {default})" for key, value, default, _ in config_changes(cfg)]
    return "\n".join(["config, differences from the defaults:", *(rows or ["  none"])])


def set_cublas_workspace(cfg: CfgNode) -> None:
    """Set ``CUBLAS_WORKSPACE_CONFIG``, which cuBLAS requires for deterministic results, if ``DETERMINISTIC`` is True.

    PyTorch checks the variable only once, at the first matrix product on a CUDA device in the process. If the variable
    is not set by then, all later matrix products in deterministic mode raise an error. A valid value that the user has
    set is not changed.

    Raises:
        ConfigError: if the user has set a value with which cuBLAS is not deterministic.
    """
    if not cfg.DETERMINISTIC:
        return
    value = os.environ.get("CUBLAS_WORKSPACE_CONFIG") or _CUBLAS_WORKSPACES[0]
    if value not in _CUBLAS_WORKSPACES:
        raise ConfigError(
            "the value of the environment variable CUBLAS_WORKSPACE_CONFIG makes cuBLAS nondeterministic, but "
            f"DETERMINISTIC is True.\n  found: {value!r}; expected {' or '.join(_CUBLAS_WORKSPACES)}\n"
            "  fix:   unset CUBLAS_WORKSPACE_CONFIG, or set DETERMINISTIC False"
        )
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = value


def _set_deterministic(deterministic: bool, *, benchmark: bool) -> None:
    """Configure deterministic algorithms and cuDNN benchmarking.

    The settings replace those of earlier runs in the same process.
    """
    if deterministic and benchmark:
        logger.warning(
            "CUDNN_BENCHMARK=True has no effect because DETERMINISTIC=True: benchmarking may select different cuDNN "
            "algorithms in each run.\n  fix: set CUDNN_BENCHMARK False or DETERMINISTIC False"
        )
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = benchmark and not deterministic


def check_links(output_dir: Path) -> None:
    """Check that no symbolic link in OUTPUT_DIR redirects writes to another folder. OUTPUT_DIR may be untrusted.

    Only paths that a run opens in place are checked. All other files are written under a temporary name and then
    renamed, which replaces a link instead of following it.

    Raises:
        ConfigError: if a link points outside OUTPUT_DIR.
    """
    for pattern in ("log.txt*", "amp_crash", "evaluation", "evaluation/*", "evaluation/*/*"):
        for path in output_dir.glob(pattern):
            if path.is_symlink() and not real_path(path).is_relative_to(real_path(output_dir)):
                raise ConfigError(
                    f"OUTPUT_DIR {str(output_dir)!r}: {path.relative_to(output_dir)} is a symbolic link to "
                    f"{real_path(path)}, outside OUTPUT_DIR.\n  fix: remove the link"
                )
