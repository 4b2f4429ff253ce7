"""Load pretrained backbones from a local file, torchvision or a URL."""

import logging
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlparse

import torch
from torch import nn

from fastamp.checkpoint.download import DownloadError, download
from fastamp.checkpoint.load_state import load_model_state
from fastamp.checkpoint.state_dict_conversion import backbone_names
from fastamp.checkpoint.weights_file import average_in, read_checkpoint, state_dict_in
from fastamp.utils.errors import ConfigError, WeightsError, WriteError
from fastamp.utils.lock import waiting_lock

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TorchvisionWeights:
    """ImageNet weights from torchvision for the model ``name``; the default ``version`` is IMAGENET1K_V1."""

    name: str
    version: str = "IMAGENET1K_V1"

    @property
    def url(self) -> str:
        """Download URL of the weights."""
        from torchvision.models import get_model_weights

        return get_model_weights(self.name)[self.version].url

    def __str__(self) -> str:
        return f"torchvision's {self.name} ({self.version})"


@dataclass(frozen=True)
class Download:
    """Weights file at a URL.

    Attributes:
        url: download URL.
        file_name: file name in the cache. Default: the last component of the URL.
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
    """Load pretrained weights into a backbone, from a local file or from a cached download.

    RGB weights are adapted to backbones with one or four input channels; see ``_fit_channels``.

    Args:
        backbone: backbone whose parameter names are those in the weights file, or that converts the names in
            ``convert_state_dict``.
        path: local file, ``MODEL.BACKBONE.PRETRAIN_PATH``; empty to use ``online``.
        online: published weights; None if there are none for this backbone.
        without: globs of tensor names that the weights may lack.

    Raises:
        ConfigError: if neither a local file nor a download is given.
        WeightsError: if the file is missing or damaged, the download failed, or the weights do not match.
    """
    if path:
        content, source = read_checkpoint(path), path
    elif online is None:
        raise ConfigError(
            "MODEL.BACKBONE.PRETRAIN is True, but there are no ImageNet weights to download for this backbone.\n"
            "  fix: set MODEL.BACKBONE.PRETRAIN_PATH to a weights file, or MODEL.BACKBONE.PRETRAIN to False"
        )
    else:
        content, source = _download(online), str(online)
    # From a complete ReID model only the backbone is used; the other tensors are reported.
    state = backbone_names(state_dict_in(average_in(content), source))
    trunk = {key.removeprefix("backbone."): value for key, value in state.items() if key.startswith("backbone.")}
    if trunk:
        state = {key: value for key, value in state.items() if not key.startswith("backbone.")} | trunk
    load_model_state(
        backbone,
        state,
        source=source,
        backbone_prefix="",
        without=without,
        content=content,
        fit=lambda converted: _fit_channels(converted, backbone, source),
    )


def _fit_channels(state: dict[str, torch.Tensor], backbone: nn.Module, source: str) -> dict[str, torch.Tensor]:
    """Adapt the RGB input convolutions in ``state`` to a backbone with one or four input channels.

    For one input channel, the weights are summed over RGB: a gray image gives the same activations as an RGB image with
    three equal, equally normalized channels. For four channels, the weights of the fourth channel are initialized to
    zero, so that the network ignores it at the start of training. Other convolutions are unchanged.
    """
    fitted: dict[str, torch.Tensor] = {}
    convolutions = [name for name, module in backbone.named_modules() if isinstance(module, nn.Conv2d)]
    for key in (f"{name}.weight" for name in convolutions):
        if key not in state or state[key].dim() != 4 or state[key].shape[1] != 3:
            continue
        weight, channels = state[key], backbone.state_dict()[key].shape[1]
        if channels == 1:
            fitted[key], how = weight.sum(dim=1, keepdim=True), "the weights are summed over channels"
        elif channels == 4:
            fitted[key], how = (
                torch.cat((weight, torch.zeros_like(weight[:, :1])), dim=1),
                "the weights of the fourth channel are initialized to zero",
            )
        else:
            continue
        logger.info("%s in %s has three input channels; %s because INPUT.CHANNELS is %d", key, source, how, channels)
    return state | fitted


def _download(online: TorchvisionWeights | Download) -> Any:
    """Read a weights file from PyTorch's cache; download it first if it is missing.

    Raises:
        WeightsError: if the download failed, or the file is damaged or not a weights file.
    """
    stated = online.file_name if isinstance(online, Download) else ""
    name = stated or PurePosixPath(urlparse(online.url).path).name
    path = Path(torch.hub.get_dir()) / "checkpoints" / name
    # File names of torchvision end with a checksum; other sources do not guarantee this.
    checksum = re.search(r"-([0-9a-f]+)\.", name) if isinstance(online, TorchvisionWeights) else None
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with waiting_lock(path.with_name(f".{name}.lock")):
                if not path.exists():
                    logger.info("downloading %s to %s", online.url, path)
                    download(online.url, path, sha256=checksum[1] if checksum else "")
        return read_checkpoint(path)
    except (DownloadError, OSError, WriteError, WeightsError) as error:
        again = f"delete {path} to download it again, " if path.exists() else ""
        # WeightsError: e.g. a web page instead of the file
        problem = "are damaged" if isinstance(error, WeightsError) else "could not be downloaded"
        raise WeightsError(
            f"MODEL.BACKBONE.PRETRAIN is True, but the weights from {online.url} {problem}.\n"
            f"  found: {str(error).splitlines()[0]}\n"
            f"  fix: {again}download that file on another machine and set MODEL.BACKBONE.PRETRAIN_PATH to it, "
            "or set MODEL.BACKBONE.PRETRAIN to False to start from random weights"
        ) from error
