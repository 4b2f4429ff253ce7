"""Checks of a config that no single component can make."""

import torch
import torch.distributed as dist

from fastamp.amp import resolve_device
from fastamp.config import CfgNode, per_channel
from fastamp.evaluation import Protocol
from fastamp.solver import swa_start
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError


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
