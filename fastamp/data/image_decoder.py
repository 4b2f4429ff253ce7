"""Decoders of JPEG files: torchcodec, torchvision or PIL, whichever is installed."""

import functools
import importlib.metadata
import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastamp.config import Key
from fastamp.utils.errors import ConfigError, summarize_error

logger = logging.getLogger(__name__)

KEYS = (
    Key(
        "INPUT.DECODER",
        "auto",
        "Decoder of JPEG files: auto selects the first of torchcodec, torchvision and pil that is installed. They "
        "return the same pixels.",
        choices=("auto", "torchcodec", "torchvision", "pil"),
    ),
)
_RGB = 3  # torchvision's ImageReadMode.RGB


class ImageDecoder(NamedTuple):
    """Decoder of JPEG files.

    Attributes:
        name: ``torchcodec``, ``torchvision`` or ``pil``.
        version: version of the package.
        decode: content of a file (N,) uint8 -> (3, H, W) uint8 with the EXIF orientation applied; raises RuntimeError
            for files that it does not decode. None for PIL, which decodes the other formats, too.
    """

    name: str
    version: str
    decode: Callable[[Tensor], Tensor] | None

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def _torchcodec() -> Callable[[Tensor], Tensor]:
    from torchcodec.decoders import decode_jpeg

    decode: Any = decode_jpeg  # returns a list for a list
    return functools.partial(decode, mode="RGB")


def _torchvision() -> Callable[[Tensor], Tensor]:
    """Load the library of torchvision, because importing torchvision takes as long as importing PyTorch."""
    package = importlib.util.find_spec("torchvision")
    libraries = Path(package.origin).parent.glob("image*.so") if package and package.origin else ()
    for library in libraries:
        torch.ops.load_library(library)
        decode = torch.ops.image.decode_image
        return lambda content: decode(content, _RGB, True)
    raise ImportError("it contains no image decoders")


_LOADERS: dict[str, tuple[str, Callable[[], Callable[[Tensor], Tensor] | None]]] = {
    "torchcodec": ("torchcodec", _torchcodec),
    "torchvision": ("torchvision", _torchvision),
    "pil": ("pillow", lambda: None),
}


@functools.cache
def image_decoder(name: str = "auto") -> ImageDecoder:
    """Load a decoder, once in a process.

    All three return the same pixels. torchcodec and torchvision decode small files in about two thirds of PIL's time.
    torchvision will remove its decoders.

    Args:
        name: ``INPUT.DECODER``. A warning is logged if ``"auto"`` finds a package that does not work. Default
            ``"auto"``.

    Raises:
        ConfigError: if the package ``name`` is missing or does not work.
    """
    for choice in _LOADERS if name == "auto" else (name,):
        package, load = _LOADERS[choice]
        try:
            return ImageDecoder(choice, importlib.metadata.version(package), load())
        except Exception as error:  # packages built for another version of PyTorch raise many types
            if name != "auto":
                raise ConfigError(
                    f"INPUT.DECODER is {name}, which cannot be loaded: {summarize_error(error)}\n"
                    f"  fix: {_fix(package)}, or set INPUT.DECODER to auto"
                ) from error
            if not isinstance(error, importlib.metadata.PackageNotFoundError):
                logger.warning(
                    "cannot load the image decoder of %s; another one is used, which may be slower: %s\n  fix: %s",
                    *(package, summarize_error(error), _fix(package)),
                )
    raise AssertionError("PIL is always installed")


def _fix(package: str) -> str:
    name = "torchcodec" if package == "torchvision" else package
    return f"install the version of {name} that belongs to torch {torch.__version__}"
