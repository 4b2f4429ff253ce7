"""Consistency checks for config values that depend on each other."""

import torch
import torch.distributed as dist

from fastamp.amp import requested_device, resolve_device
from fastamp.config import CfgNode, per_channel
from fastamp.evaluation import Protocol
from fastamp.solver import swa_start
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError


def check_config(cfg: CfgNode) -> None:
    """Check that config values of different components are consistent.

    Raises:
        ConfigError: if values are inconsistent; the message gives the keys, their values and a fix.
    """
    if not cfg.MODEL.LOSSES.NAME:
        raise ConfigError("MODEL.LOSSES.NAME is empty.\n  fix: set MODEL.LOSSES.NAME to at least one loss")
    if cfg.SOLVER.AMP.MIN_SCALE > cfg.SOLVER.AMP.MAX_SCALE:
        raise ConfigError(
            f"SOLVER.AMP.MIN_SCALE ({cfg.SOLVER.AMP.MIN_SCALE:g}) is larger than SOLVER.AMP.MAX_SCALE "
            f"({cfg.SOLVER.AMP.MAX_SCALE:g}).\n  fix: lower MIN_SCALE or raise MAX_SCALE"
        )
    for name in ("PIXEL_MEAN", "PIXEL_STD"):
        per_channel(f"MODEL.{name}", cfg.MODEL[name], channels=cfg.INPUT.CHANNELS)
    if not cfg.DATASETS.TESTS:
        raise ConfigError("DATASETS.TESTS is empty.\n  fix: set DATASETS.TESTS to at least one dataset for evaluation")
    Protocol.from_config(cfg)  # fail now instead of in the first evaluation
    if cfg.SOLVER.EMA.ENABLED and cfg.SOLVER.SWA.ENABLED:
        raise ConfigError(
            "SOLVER.EMA and SOLVER.SWA are both enabled, but a run can use only one weight average.\n"
            "  fix: set SOLVER.EMA.ENABLED or SOLVER.SWA.ENABLED to False"
        )
    swa = cfg.SOLVER.SWA
    if swa.ENABLED:
        swa_start(cfg)
    if swa.ENABLED and swa.INITIAL_WEIGHT and not (cfg.MODEL.WEIGHTS or cfg.MODEL.BACKBONE.PRETRAIN):
        raise ConfigError(
            f"SOLVER.SWA.INITIAL_WEIGHT is {swa.INITIAL_WEIGHT:g}, but the training starts from random weights: the "
            "average with them is useless.\n"
            "  fix: set MODEL.WEIGHTS to pretrained weights, or SOLVER.SWA.INITIAL_WEIGHT to 0"
        )
    images_per_rank = cfg.SOLVER.IMS_PER_BATCH // comm.get_world_size()
    if images_per_rank == 1 and cfg.MODEL.HEADS.WITH_BNNECK and cfg.MODEL.HEADS.NORM == "BN":
        raise ConfigError(
            f"SOLVER.IMS_PER_BATCH is {cfg.SOLVER.IMS_PER_BATCH}, which is one image per process, but the batch norm "
            "that MODEL.HEADS.WITH_BNNECK adds needs at least two.\n"
            f"  fix: set SOLVER.IMS_PER_BATCH to at least {2 * comm.get_world_size()}"
        )
    _check_distributed(cfg)


def _check_distributed(cfg: CfgNode) -> None:
    """Check config values that matter only in a distributed run."""
    if comm.get_world_size() == 1:
        return
    if ":" in cfg.MODEL.DEVICE:
        raise ConfigError(
            f"MODEL.DEVICE is {cfg.MODEL.DEVICE!r}, but {comm.get_world_size()} processes cannot share one device.\n"
            "  fix: set MODEL.DEVICE to cuda, which assigns one device to each process"
        )
    device = resolve_device(requested_device(cfg))
    if device.type == "cuda" and "nccl" not in dist.get_backend_config():
        raise ConfigError(
            f"the number of processes exceeds the number of CUDA devices on this machine "
            f"({torch.cuda.device_count()}).\n"
            "  fix: start fewer processes (--num-gpus, --nproc-per-node), or set MODEL.DEVICE to cpu"
        )
    norms = {key: cfg.MODEL[key].NORM for key in ("BACKBONE", "HEADS")}
    sync = [f"MODEL.{key}.NORM" for key, name in norms.items() if name.lower() == "syncbn"]
    if sync and device.type != "cuda":
        raise ConfigError(
            f"{sync[0]} is syncBN, which PyTorch supports only on CUDA, but the device is {device.type}.\n"
            f"  fix: set {sync[0]} to BN"
        )
