"""Peak speeds of GPUs, and what to change if a training run waits for its images."""

import os
import re
from collections.abc import Mapping

import torch

from fastamp.amp import PrecisionPolicy
from fastamp.config import CfgNode
from fastamp.data.build import loading_device
from fastamp.utils.env import available_cores

# Pattern of the name of a GPU -> dense peak in TFLOP/s with 16 bits, TF32 and float32, from NVIDIA's data sheets.
_PEAKS: Mapping[str, tuple[float, float, float]] = {
    r"H200|H100 80GB HBM3|GH200": (989, 494, 67),
    r"H100 PCIe": (756, 378, 51),
    r"A100": (312, 156, 19.5),
    r"A40": (149.7, 74.8, 37.4),
    r"A10": (125, 62.5, 31.2),
    r"L40S": (362, 183, 91.6),
    r"L4": (121, 60, 30.3),
    r"V100": (125, 15.7, 15.7),
    r"T4": (65, 8.1, 8.1),
    r"RTX 4090": (165.2, 82.6, 82.6),
    r"RTX 3090": (71, 35.6, 35.6),
}


def peak_flops(policy: PrecisionPolicy) -> float | None:
    """Return the peak of the current CUDA device in FLOP/s, without sparsity.

    Args:
        policy: precision of the matrix products.

    Returns:
        The peak; None for another kind of device, or if it is unknown or divided into instances (MIG).
    """
    name = torch.cuda.get_device_name() if policy.device_type == "cuda" else ""
    for pattern, (half, tensor_float, single) in _PEAKS.items():
        if re.search(rf"\b({pattern})\b", name) and "MIG" not in name:
            return 1e12 * (half if policy.enabled else tensor_float if policy.tf32 else single)
    return None


def input_fix(cfg: CfgNode) -> str:
    """Return the change that most likely speeds up the images of a training run."""
    cores = available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if cores > cfg.DATALOADER.NUM_WORKERS:
        return f"set DATALOADER.NUM_WORKERS to {cores}, the number of available CPU cores of each process"
    if cfg.DATALOADER.CACHE == "none" and len(cfg.INPUT.SIZE_TRAIN) == 2:
        return "set DATALOADER.CACHE to disk or ram, so that each image is decoded and resized once"
    if cfg.DATALOADER.CACHE == "none":
        return f"reduce the image files to about INPUT.SIZE_TRAIN {tuple(cfg.INPUT.SIZE_TRAIN)} once"
    if cfg.INPUT.AUGMENT_ON == "worker" and loading_device(cfg).type != "cpu":
        return "set INPUT.AUGMENT_ON to device"
    return "use a machine with more CPU cores, or reduce INPUT.SIZE_TRAIN"
