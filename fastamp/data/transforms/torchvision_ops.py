"""Random transforms from torchvision, made reproducible by a random seed for each image."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

from fastamp.config import Key
from fastamp.data.transforms.base import TRANSFORM_REGISTRY, BatchTransform, Parameters
from fastamp.utils.errors import ConfigError

logger = logging.getLogger(__name__)

KEYS = (
    Key("INPUT.AFFINE.ENABLED", False, "Rotate, scale and shear training images at random."),
    Key("INPUT.AUTOAUG.ENABLED", False, "AutoAugment with the ImageNet policy, for grayscale and RGB images."),
    Key("INPUT.AUTOAUG.PROB", 0.0, "Probability of applying AutoAugment to an image.", low=0, high=1),
    Key("INPUT.AUGMIX.ENABLED", False, "AugMix: mix an image with augmented copies, for grayscale and RGB images."),
    Key("INPUT.AUGMIX.PROB", 0.0, "Probability of applying AugMix to an image.", low=0, high=1),
    Key(
        "INPUT.RANDAUG.ENABLED",
        False,
        "RandAugment: random operations of equal magnitude, for grayscale and RGB images.",
    ),
    Key("INPUT.RANDAUG.PROB", 1.0, "Probability of applying RandAugment to an image.", low=0, high=1),
    Key("INPUT.RANDAUG.NUM_OPS", 2, "Number of sequential operations per image.", low=1),
    Key("INPUT.RANDAUG.MAGNITUDE", 9, "Magnitude of the operations, in 0..30.", low=0, high=30),
)


class TorchvisionTransform(BatchTransform):
    """Apply a transform of ``torchvision.transforms.v2`` to each image with probability ``prob``.

    torchvision draws from PyTorch's global random generator, which is seeded for each image and restored afterwards.

    Args:
        transform (Callable): (C, H, W) uint8 image -> image of the same shape and dtype.
        prob (float): probability of transforming an image.
    """

    draws = 3

    def __init__(self, *, transform: Callable[[Tensor], Tensor], prob: float) -> None:
        self.transform = transform
        self.prob = prob

    def parameters(self, uniforms: np.ndarray, size: tuple[int, int]) -> Parameters:
        """Compute ``chosen``, the (B,) bool mask of images to transform, and ``seed``: (B,) int64 generator seeds."""
        # A uniform number has 32 random bits: a seed takes 31 bits of one and 32 of another.
        high, low = (uniforms[:, 1] * 2**31).astype(np.int64), (uniforms[:, 2] * 2**32).astype(np.int64)
        return {
            "chosen": torch.from_numpy(uniforms[:, 0] < self.prob),
            "seed": torch.from_numpy(high << 32 | low),
        }

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Transform the images selected by ``chosen``."""
        chosen = parameters["chosen"].nonzero()[:, 0].tolist()
        if not chosen:
            return images
        changed = images.clone()
        with _preserve_global_rng():
            for number in chosen:
                torch.default_generator.manual_seed(int(parameters["seed"][number]))
                changed[number] = self.transform(images[number])
        return changed


@TRANSFORM_REGISTRY.register("AUTOAUG")
class AutoAugment(TorchvisionTransform):
    """AutoAugment with the ImageNet policy (Cubuk et al. 2019, arXiv:1805.09501), for 1 or 3 channels."""

    def __init__(self, *, prob: float) -> None:
        super().__init__(transform=v2.AutoAugment(v2.AutoAugmentPolicy.IMAGENET), prob=prob)

    @classmethod
    def from_config(cls, cfg: Any) -> "AutoAugment":
        """Build the transform from the config section ``INPUT.AUTOAUG``.

        Raises:
            ConfigError: if INPUT.CHANNELS is 4.
        """
        return cls(prob=_section(cfg, "AUTOAUG").PROB)


class _HostSampledAugMix(v2.AugMix):
    """AugMix that draws all random numbers on the host, even if the images are on another device."""

    def _sample_dirichlet(self, params: Tensor) -> Tensor:
        # torchvision samples from the generator of the images' device, which is not seeded per image.
        host = torch.full(params.shape, float(self.alpha), dtype=params.dtype)
        return torch._sample_dirichlet(host).to(params.device)


@TRANSFORM_REGISTRY.register("AUGMIX")
class AugMix(TorchvisionTransform):
    """AugMix: mix an image with augmented copies (Hendrycks et al. 2020, arXiv:1912.02781), for 1 or 3 channels."""

    def __init__(self, *, prob: float) -> None:
        super().__init__(transform=_HostSampledAugMix(), prob=prob)

    @classmethod
    def from_config(cls, cfg: Any) -> "AugMix":
        """Build the transform from the config section ``INPUT.AUGMIX``.

        Raises:
            ConfigError: if INPUT.CHANNELS is 4.
        """
        return cls(prob=_section(cfg, "AUGMIX").PROB)


@TRANSFORM_REGISTRY.register("RANDAUG")
class RandAugment(TorchvisionTransform):
    """RandAugment: random operations of equal magnitude (Cubuk et al. 2020, arXiv:1909.13719), for 1 or 3 channels.

    Args:
        prob (float): probability of transforming an image.
        num_ops (int): number of sequential operations.
        magnitude (int): magnitude in 0..30.
    """

    def __init__(self, *, prob: float, num_ops: int, magnitude: int) -> None:
        super().__init__(transform=v2.RandAugment(num_ops=num_ops, magnitude=magnitude), prob=prob)

    @classmethod
    def from_config(cls, cfg: Any) -> "RandAugment":
        """Build the transform from the config section ``INPUT.RANDAUG``.

        Raises:
            ConfigError: if INPUT.CHANNELS is 4.
        """
        section = _section(cfg, "RANDAUG")
        return cls(prob=section.PROB, num_ops=section.NUM_OPS, magnitude=section.MAGNITUDE)


@TRANSFORM_REGISTRY.register("AFFINE")
class RandomAffine(TorchvisionTransform):
    """Rotate by up to 10 degrees, scale by 0.9 to 1.1 and shear by up to 0.1 degrees, as in FastReID.

    Pixels outside of the image are black.
    """

    def __init__(self) -> None:
        super().__init__(transform=v2.RandomAffine(degrees=10, scale=(0.9, 1.1), shear=0.1), prob=1.0)

    @classmethod
    def from_config(cls, cfg: Any) -> "RandomAffine":
        """Build the transform; INPUT.AFFINE has no settings other than ENABLED."""
        return cls()


def _section(cfg: Any, name: str) -> Any:
    """Return the config section INPUT.<name> after checking that images are grayscale or RGB."""
    section = cfg.INPUT[name]
    if cfg.INPUT.CHANNELS == 4:
        raise ConfigError(
            f"INPUT.{name} supports only grayscale and RGB images, but INPUT.CHANNELS is 4.\n"
            f"  fix: set INPUT.{name}.ENABLED False, or INPUT.CHANNELS to 1 or 3"
        )
    if section.PROB == 0:
        logger.warning(
            "INPUT.%s is enabled but has no effect because INPUT.%s.PROB is 0.\n"
            "  fix: set PROB to a value above 0, or ENABLED to False",
            name,
            name,
        )
    return section


@contextmanager
def _preserve_global_rng() -> Iterator[None]:
    state = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
