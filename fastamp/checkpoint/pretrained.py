"""The one loader of pretrained backbones: a local file, torchvision's ImageNet weights, or a download."""

import logging
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.error import URLError
from urllib.parse import urlparse

import torch
from torch import nn
from torchvision.models import get_model_weights

from fastamp.checkpoint.load_state import load_model_state
from fastamp.checkpoint.weights_file import read_checkpoint, state_dict_in
from fastamp.utils.errors import ConfigError, WeightsError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TorchvisionWeights:
    """torchvision's ImageNet weights ``version`` of the model ``name``; the first ones unless said otherwise."""

    name: str
    version: str = "IMAGENET1K_V1"

    @property
    def url(self) -> str:
        """Where they are downloaded from."""
        return get_model_weights(self.name)[self.version].url

    def __str__(self) -> str:
        return f"torchvision's {self.name} ({self.version})"


@dataclass(frozen=True)
class Download:
    """A weights file at ``url``.

    Attributes:
        url: where it is.
        file_name: its name in the cache, where the address does not end with one; '' is what the address ends with.
    """

    url: str
    file_name: str = ""

    def __str__(self) -> str:
        return self.url


def load_pretrained_backbone(
    backbone: nn.Module,
    *,
    path: str = "",
    online: TorchvisionWeights | Download | None,
    without: tuple[str, ...] = (),
) -> None:
    """Fill ``backbone`` from a local file, or from weights that are downloaded once and cached.

    Weights for RGB also fill a backbone for one channel or four, see ``_fit_channels``.

    Args:
        backbone: has the parameter names of the weights, or translates them in its ``convert_state_dict``.
        path: ``MODEL.BACKBONE.PRETRAIN_PATH``; empty for ``online``.
        online: weights of this very network; None where nobody offers them.
        without: globs over the names of tensors that pretrained weights need not have.

    Raises:
        ConfigError: there is neither a file nor anything online.
        WeightsError: the file is missing or damaged, the download failed, or the weights do not fit.
    """
    if path:
        content, source = read_checkpoint(path), path
    elif online is None:
        raise ConfigError(
            "MODEL.BACKBONE.PRETRAIN is on, but there are no ImageNet weights to download for this backbone.\n"
            "  fix: name a file in MODEL.BACKBONE.PRETRAIN_PATH, or set MODEL.BACKBONE.PRETRAIN False"
        )
    else:
        content, source = _download(online), str(online)
    state = state_dict_in(content, source)
    # A whole ReID model may serve as the start, too: take its backbone, which TransReID calls base.
    for prefix in ("backbone.", "base."):
        if any(key.startswith(prefix) for key in state):
            state = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    load_model_state(
        backbone,
        state,
        source=source,
        backbone_prefix="",
        without=without,
        fit=lambda converted: _fit_channels(converted, backbone, source),
    )


def _fit_channels(state: dict[str, torch.Tensor], backbone: nn.Module, source: str) -> dict[str, torch.Tensor]:
    """Return ``state`` with the convolutions that see an RGB image fitted to a backbone for one channel or four.

    For one channel the weights are summed over RGB: a grey image then gives what it gave as three equal channels, under
    one normalization for all three. For four, the fourth channel's weights are zero: the network starts as that for
    RGB, and learns what the fourth is good for. Weights of any other number of channels stay as they are.
    """
    fitted: dict[str, torch.Tensor] = {}
    convolutions = [name for name, module in backbone.named_modules() if isinstance(module, nn.Conv2d)]
    for key in (f"{name}.weight" for name in convolutions):
        if key not in state or state[key].dim() != 4 or state[key].shape[1] != 3:
            continue
        weight, channels = state[key], backbone.state_dict()[key].shape[1]
        if channels == 1:
            fitted[key], how = weight.sum(dim=1, keepdim=True), "summed over them"
        elif channels == 4:
            fitted[key], how = torch.cat((weight, torch.zeros_like(weight[:, :1])), dim=1), "with zeros for the fourth"
        else:
            continue
        logger.info("%s of %s has three channels; taken %s, since INPUT.CHANNELS is %d", key, source, how, channels)
    return state | fitted


def _download(online: TorchvisionWeights | Download) -> Any:
    """Return the content of a weights file that is downloaded unless it is in PyTorch's cache.

    Raises:
        WeightsError: the download failed, or what came is damaged or not a weights file.
    """
    name = getattr(online, "file_name", "") or PurePosixPath(urlparse(online.url).path).name
    path = Path(torch.hub.get_dir()) / "checkpoints" / name
    # torchvision's file names end with their checksum; what others' names end with is nowhere promised.
    checksum = re.search(r"-([0-9a-f]+)\.", name) if isinstance(online, TorchvisionWeights) else None
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            logger.info("downloading %s to %s", online.url, path)
            torch.hub.download_url_to_file(online.url, str(path), checksum[1] if checksum else None)
        return read_checkpoint(path)
    except (URLError, OSError, RuntimeError, WeightsError) as error:  # the last: a web page came, not the file
        again = f"delete {path} to download it again, " if path.exists() else ""
        raise WeightsError(
            f"MODEL.BACKBONE.PRETRAIN is on, but the weights could not be downloaded from {online.url} ({error}).\n"
            f"  fix: {again}download that file elsewhere and name it in MODEL.BACKBONE.PRETRAIN_PATH, "
            "or start from random weights with MODEL.BACKBONE.PRETRAIN False"
        ) from error
