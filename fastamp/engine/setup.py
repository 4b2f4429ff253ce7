"""What comes before a run: command-line arguments, the check of the config, the log, the seeds."""

import argparse
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from fastamp.amp import resolve_device
from fastamp.checkpoint.weights_file import read_checkpoint
from fastamp.config import CfgNode, get_cfg, per_channel
from fastamp.diagnostics.machine import inspect_machine
from fastamp.evaluation import Protocol
from fastamp.solver import swa_start
from fastamp.utils import comm
from fastamp.utils.env import keep_freed_memory, seed_all
from fastamp.utils.errors import ConfigError, UserError, WeightsError
from fastamp.utils.files import closed_stdout_allowed, real_path
from fastamp.utils.lock import describe_lock_holder, lock_folder
from fastamp.utils.logger import setup_logger

logger = logging.getLogger(__name__)


class _Parser(argparse.ArgumentParser):
    """Prints its help also where the reader of stdout stops early."""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        with closed_stdout_allowed():
            super().exit(status, message)


def default_argument_parser() -> argparse.ArgumentParser:
    """Return the parser of FastReID's command line."""
    parser = _Parser(description="Train or evaluate a re-identification model.")
    add_training_arguments(parser)
    return parser


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of FastReID's command line."""
    parser.add_argument("--resume", action="store_true", help="continue from OUTPUT_DIR/last_checkpoint")
    parser.add_argument("--eval-only", action="store_true", help="evaluate MODEL.WEIGHTS on DATASETS.TESTS")
    add_process_arguments(parser)


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    """Add those of them that say with which config, and in which processes."""
    parser.add_argument("--config-file", default="", metavar="FILE", help="YAML config file")
    parser.add_argument("--num-gpus", type=int, default=1, help="GPUs per machine")
    parser.add_argument("--num-machines", type=int, default=1)
    parser.add_argument("--machine-rank", type=int, default=0, help="this machine's number, from 0")
    parser.add_argument("--dist-url", default=None, help="where the processes meet, e.g. tcp://127.0.0.1:29500")
    parser.add_argument("opts", nargs=argparse.REMAINDER, metavar="KEY VALUE", help="config keys and their values")


def default_setup(cfg: CfgNode, args: argparse.Namespace | None = None) -> None:
    """Check the config, start the log, seed the random generators, and choose deterministic computation or not.

    With the arguments of a training (``args.eval_only`` is False), rank 0 also takes the lock of OUTPUT_DIR, which
    ``DefaultTrainer.train`` releases at its end, and the system when the process ends. An evaluation takes no lock.

    Raises:
        ConfigError: a value that cannot work, a part that this version does not have, a device that is not there, or
            another training writes into OUTPUT_DIR.
    """
    check_config(cfg)
    device = resolve_device(cfg.MODEL.DEVICE)
    rank = comm.get_rank()
    _refuse_links_out_of(Path(cfg.OUTPUT_DIR))
    try:
        setup_logger(cfg.OUTPUT_DIR, rank=rank)
    except OSError as error:
        raise ConfigError(f"OUTPUT_DIR {cfg.OUTPUT_DIR!r} cannot be written to: {error.strerror}") from error
    evaluates = getattr(args, "eval_only", None)
    if evaluates is False and rank == 0:
        lock_folder(cfg.OUTPUT_DIR, "OUTPUT_DIR")
    if evaluates and (training := describe_lock_holder(cfg.OUTPUT_DIR)):
        logger.warning(
            "a training writes into OUTPUT_DIR %s (%s): this evaluation adds to its log.txt and replaces its report",
            cfg.OUTPUT_DIR,
            training,
        )
    machine = inspect_machine(device, asked=cfg.MODEL.DEVICE)
    logger.info("%s", "\n".join(machine.lines()))
    for problem in machine.problems:
        logger.warning("%s", problem)
    if args is not None:
        logger.info("arguments: %s", args)
    for line in cfg.translation_notes():
        logger.info("config file: %s", line)
    logger.info("config:\n%s", cfg.dump())
    if device.type == "cpu":
        keep_freed_memory()
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # whose random state is kept
    seed_all(cfg.SEED + rank)
    _set_deterministic(cfg.DETERMINISTIC, benchmark=cfg.CUDNN_BENCHMARK)


def _set_deterministic(deterministic: bool, *, benchmark: bool) -> None:
    """Let PyTorch compute deterministically, or as fast as it can, whatever a run before in this process had."""
    if deterministic and benchmark:
        logger.warning("CUDNN_BENCHMARK True has no effect: what cuDNN finds fastest is not the same in each run")
    if deterministic:
        # Without it cuBLAS shares its workspace among streams; read when CUDA is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = benchmark and not deterministic


def _refuse_links_out_of(output_dir: Path) -> None:
    """Raise ConfigError for links in a run's folder, which may be a stranger's, by which it would write elsewhere.

    Other files of a run are renamed into place, which replaces a link.
    """
    for pattern in ("log.txt*", "amp_crash", "evaluation", "evaluation/*", "evaluation/*/*"):
        for path in output_dir.glob(pattern):
            if path.is_symlink() and not real_path(path).is_relative_to(real_path(output_dir)):
                raise ConfigError(
                    f"OUTPUT_DIR {str(output_dir)!r}: {path.relative_to(output_dir)} in it is a link to "
                    f"{real_path(path)}; a run writes into its own folder alone.\n  fix: remove the link"
                )


def read_config(
    config_file: str, opts: Sequence[str], *, parts: str = "", define_keys: Callable[[CfgNode], None] | None = None
) -> CfgNode:
    """Return the frozen config of a file and of KEY VALUE pairs over it.

    Args:
        config_file: path; empty for the defaults.
        opts: the pairs, one after the other.
        parts: file that registers the user's own parts first, see ``load_parts``; empty is none.
        define_keys: declares keys of a project's own.

    Raises:
        ConfigError: a file, a key or a value is wrong.
    """
    cfg = get_cfg()
    if define_keys:
        define_keys(cfg)
    if parts:
        load_parts(parts, cfg)
    if config_file:
        cfg.merge_from_file(config_file)
    cfg.merge_from_list(opts)
    cfg.freeze()
    return cfg


def merge_from_checkpoint(cfg: CfgNode, checkpoint: str | os.PathLike[str]) -> None:
    """Merge the config in a checkpoint into ``cfg``.

    Raises:
        WeightsError: the file cannot be read, or holds no config of this version.
    """
    if not merge_if_config(cfg, checkpoint):
        raise WeightsError(
            f"{checkpoint} holds no config, so that the model is not known.\n"
            "  fix: python tools/import_checkpoint.py makes a checkpoint with a config of it"
        )


def merge_if_config(cfg: CfgNode, checkpoint: str | os.PathLike[str]) -> bool:
    """Merge the config in a checkpoint into ``cfg``, if it holds one, and return whether it does.

    Raises:
        WeightsError: the file cannot be read, or its config is not of this version.
    """
    content = read_checkpoint(checkpoint)
    text = content.get("config") if isinstance(content, dict) else None
    if not isinstance(text, str):
        return False
    try:
        cfg.merge_from_other_cfg(CfgNode.load_cfg(text))
    except UserError as error:
        raise WeightsError(
            f"the config in {checkpoint} is not of this version, or of parts of your own: {error}"
        ) from error
    return True


def load_parts(path: str, cfg: CfgNode) -> None:
    """Run a Python file of the user's that registers parts, and declare its config keys.

    These are the file's ``KEYS``, declared as in a component of fastamp, and those of its ``add_config(cfg)``.

    Raises:
        ConfigError: there is no such file.
    """
    file = real_path(path)
    if not file.is_file():
        raise ConfigError(f"--parts: there is no file {path}")
    name = f"fastamp_parts_{file}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    cfg.add_keys(getattr(sys.modules[name], "KEYS", ()))
    if hasattr(sys.modules[name], "add_config"):
        sys.modules[name].add_config(cfg)


def check_config(cfg: CfgNode) -> None:
    """Check what no single component can.

    Raises:
        ConfigError: with the key, the value and what to change.
    """
    if not cfg.MODEL.LOSSES.NAME:
        raise ConfigError("MODEL.LOSSES.NAME is empty; name at least one loss")
    if cfg.SOLVER.AMP.MIN_SCALE > cfg.SOLVER.AMP.MAX_SCALE:
        raise ConfigError("SOLVER.AMP.MIN_SCALE is above SOLVER.AMP.MAX_SCALE")
    for name in ("PIXEL_MEAN", "PIXEL_STD"):
        per_channel(f"MODEL.{name}", cfg.MODEL[name], channels=cfg.INPUT.CHANNELS)
    if not cfg.DATASETS.TESTS:
        raise ConfigError("DATASETS.TESTS is empty; name at least one data set to evaluate on")
    Protocol.from_config(cfg)  # raises what the first evaluation would
    if cfg.SOLVER.EMA.ENABLED and cfg.SOLVER.SWA.ENABLED:
        raise ConfigError("SOLVER.EMA and SOLVER.SWA are both enabled; one average of the weights can be kept")
    if cfg.SOLVER.SWA.ENABLED:
        swa_start(cfg)
    share = cfg.SOLVER.IMS_PER_BATCH // comm.get_world_size()
    if share == 1 and cfg.MODEL.HEADS.WITH_BNNECK and cfg.MODEL.HEADS.NORM == "BN":
        raise ConfigError(
            f"SOLVER.IMS_PER_BATCH is {cfg.SOLVER.IMS_PER_BATCH}, one image for each process, and the batch norm of "
            "MODEL.HEADS.WITH_BNNECK needs two at least"
        )
    _check_distributed(cfg)


def _check_distributed(cfg: CfgNode) -> None:
    """Check what only several processes ask for."""
    if comm.get_world_size() == 1:
        return
    if ":" in cfg.MODEL.DEVICE:
        raise ConfigError(
            f"MODEL.DEVICE is {cfg.MODEL.DEVICE!r}, the same device for all {comm.get_world_size()} processes.\n"
            "  fix: MODEL.DEVICE cuda, and each process takes its own"
        )
    device = resolve_device(cfg.MODEL.DEVICE)
    if device.type == "cuda" and "nccl" not in dist.get_backend_config():
        raise ConfigError(
            f"there are more processes than CUDA devices on this machine ({torch.cuda.device_count()}).\n"
            "  fix: fewer processes (--num-gpus, --nproc-per-node), or MODEL.DEVICE cpu"
        )
    norms = {key: cfg.MODEL[key].NORM for key in ("BACKBONE", "HEADS")}
    sync = [f"MODEL.{key}.NORM" for key, name in norms.items() if name.lower() == "syncbn"]
    if sync and device.type != "cuda":
        raise ConfigError(f"{sync[0]} is syncBN, which PyTorch has for CUDA only.\n  fix: {sync[0]} BN")
