"""The one loader of pretrained backbones: a local file, or torchvision's ImageNet weights."""

import logging
from urllib.error import URLError

import torch
from torch import nn
from torchvision.models import get_model_weights

from fastamp.utils.checkpoint import load_model_state, read_checkpoint, state_dict_in
from fastamp.utils.errors import WeightsError

logger = logging.getLogger(__name__)


def load_pretrained_backbone(backbone: nn.Module, *, path: str = "", torchvision_name: str) -> None:
    """Fill ``backbone`` from a local file, or from torchvision's first ImageNet weights (IMAGENET1K_V1).

    Args:
        backbone: has torchvision's parameter names, without the classifier.
        path: ``MODEL.BACKBONE.PRETRAIN_PATH``; empty for torchvision's weights, downloaded once and cached.
        torchvision_name: e.g. ``"resnet50"``.

    Raises:
        WeightsError: the file is missing or damaged, the download failed, or the weights do not fit.
    """
    if path:
        state, source = state_dict_in(read_checkpoint(path), path), path
    else:
        state, source = _torchvision_state(torchvision_name), f"torchvision's {torchvision_name} (IMAGENET1K_V1)"
    # A whole ReID model may serve as the start, too: take its backbone.
    if any(key.startswith("backbone.") for key in state):
        state = {key.removeprefix("backbone."): value for key, value in state.items() if key.startswith("backbone.")}
    state = {key: value for key, value in state.items() if not key.startswith("fc.")}
    load_model_state(backbone, state, source=source, backbone_prefix="")


def _torchvision_state(name: str) -> dict[str, torch.Tensor]:
    weights = get_model_weights(name)["IMAGENET1K_V1"]
    try:
        return weights.get_state_dict(progress=True, check_hash=True)
    except (URLError, OSError, RuntimeError) as error:
        raise WeightsError(
            f"MODEL.BACKBONE.PRETRAIN is on, but torchvision's {name} weights could not be downloaded from "
            f"{weights.url} ({error}).\n"
            "  fix: download that file elsewhere and name it in MODEL.BACKBONE.PRETRAIN_PATH, "
            "or start from random weights with MODEL.BACKBONE.PRETRAIN False"
        ) from error
