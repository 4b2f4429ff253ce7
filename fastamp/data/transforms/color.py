"""Color transforms: color jitter, grayscale and Gaussian blur."""

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fastamp.config import CfgNode, Key
from fastamp.data.transforms.base import (
    TRANSFORM_REGISTRY,
    BatchTransform,
    Parameters,
    bitwise_where,
    byte_mask,
    indices_where,
    on_device,
)
from fastamp.utils.errors import ConfigError

KEYS = (
    Key("INPUT.CJ.ENABLED", False, "Jitter the colors of training images; a fourth channel is not changed."),
    Key("INPUT.CJ.PROB", 0.5, "Probability of jittering an image.", low=0, high=1),
    Key("INPUT.CJ.BRIGHTNESS", 0.15, "Maximum relative change in brightness.", low=0),
    Key("INPUT.CJ.CONTRAST", 0.15, "Maximum relative change in contrast.", low=0),
    Key("INPUT.CJ.SATURATION", 0.1, "Maximum relative change in saturation.", low=0),
    Key("INPUT.CJ.HUE", 0.1, "Maximum hue shift, as a fraction of the color circle.", low=0, high=0.5),
    Key("INPUT.GRAYSCALE.ENABLED", False, "Convert training images to grayscale at random."),
    Key("INPUT.GRAYSCALE.PROB", 0.1, "Probability of converting an image to grayscale.", low=0, high=1),
    Key("INPUT.BLUR.ENABLED", False, "Blur training images at random with a Gaussian kernel."),
    Key("INPUT.BLUR.PROB", 0.5, "Probability of blurring an image.", low=0, high=1),
    Key("INPUT.BLUR.KERNEL_SIZE", 5, "Kernel size in pixels, odd.", low=1),
    Key(
        "INPUT.BLUR.SIGMA",
        (0.1, 2.0),
        "Minimum and maximum standard deviation of the blur kernel, in pixels.",
        above=0,
        length=2,
    ),
)

_WHITE = 255
# The float copies of this many images fit into a core's cache: 3 to 10 times as fast as a batch of 32 (measured).
_CACHED_IMAGES = 4
# Number of an operation of ColorJitter that leaves the image unchanged.
_SKIP = 4


@TRANSFORM_REGISTRY.register("CJ")
class ColorJitter(BatchTransform):
    """Jitter brightness, contrast, saturation and hue, in an independent random order for each image.

    Each operation rounds to uint8 and matches torchvision's ``adjust_*`` function for uint8 tensors. In grayscale
    images, only brightness and contrast change. A fourth channel is not changed.

    Args:
        prob: probability of jittering an image.
        brightness, contrast, saturation: maximum relative change x; the factor is uniform in [max(0, 1 - x), 1 + x].
        hue: the hue shift is uniform in [-hue, hue], as a fraction of the color circle; at most 0.5.
    """

    section = "CJ"
    draws = 9  # 1 to select images, 4 for the factors, 4 for the order: the slices in ``parameters``

    def __init__(self, *, prob: float, brightness: float, contrast: float, saturation: float, hue: float) -> None:
        self.prob = prob
        self._low = np.array([max(0, 1 - brightness), max(0, 1 - contrast), max(0, 1 - saturation), -hue])
        self._high = np.array([1 + brightness, 1 + contrast, 1 + saturation, hue])

    def parameters(self, uniforms: np.ndarray, size: tuple[int, int]) -> Parameters:
        """Compute the factors and the order of the operations for each image.

        Returns:
            ``jitter``: (B,) bool; ``factors``: (B, 4) float32, for brightness, contrast, saturation and hue; ``order``:
                (B, 4) int64, indices of these operations in order of application.
        """
        factors = self._low + uniforms[:, 1:5] * (self._high - self._low)
        return {
            "jitter": torch.from_numpy(uniforms[:, 0] < self.prob),
            "factors": torch.from_numpy(factors.astype(np.float32)),
            "order": torch.from_numpy(uniforms[:, 5:].argsort(axis=1)),
        }

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Jitter the colors of the images selected by ``jitter``."""
        copies = on_device(parameters, images.device)
        jittered = images.clone()
        colors = jittered[:, :3]
        operations: list[Callable[[Tensor, Tensor], Tensor]] = [_adjust_brightness, _adjust_contrast]
        if colors.shape[1] == 3:
            operations += [_adjust_saturation, _adjust_hue]
        # In each step, the images sorted by operation, and the number of images of each operation.
        ranked = _operations(copies).argsort(dim=0, stable=True)
        order = _operations(parameters)
        for step in range(order.shape[1]):
            counts = order[:, step].bincount(minlength=_SKIP + 1).tolist()
            for number, (adjust, chosen) in enumerate(zip(operations, ranked[:, step].split(counts), strict=False)):
                if self._low[number] == self._high[number] or not counts[number]:
                    continue
                for part in chosen.split(_CACHED_IMAGES if images.device.type == "cpu" else len(images)):
                    factor = copies["factors"][part, number].view(-1, 1, 1, 1)
                    colors[part] = adjust(colors[part], factor)
        return jittered


@TRANSFORM_REGISTRY.register("GRAYSCALE")
class RandomGrayscale(BatchTransform):
    """Randomly convert images to grayscale like torchvision's ``rgb_to_grayscale``; a fourth channel is not changed.

    Args:
        prob: probability of converting an image.
    """

    section = "GRAYSCALE"
    draws = 1

    def __init__(self, *, prob: float) -> None:
        self.prob = prob

    def parameters(self, uniforms: np.ndarray, size: tuple[int, int]) -> Parameters:
        """Compute ``grayscale``, the (B,) bool mask of images to convert."""
        return {"grayscale": torch.from_numpy(uniforms[:, 0] < self.prob)}

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Convert the images selected by ``grayscale``."""
        mask = byte_mask(on_device(parameters, images.device)["grayscale"])
        return bitwise_where(mask.view(-1, 1, 1, 1), to_grayscale(images), images)


@TRANSFORM_REGISTRY.register("BLUR")
class GaussianBlur(BatchTransform):
    """Randomly blur images with reflection padding, like torchvision's ``gaussian_blur``.

    Args:
        prob: probability of blurring an image.
        kernel_size: kernel size in pixels, odd.
        sigma: minimum and maximum standard deviation in pixels; drawn uniformly between them.
    """

    draws = 2

    def __init__(self, *, prob: float, kernel_size: int, sigma: tuple[float, float]) -> None:
        self.prob = prob
        self.kernel_size = kernel_size
        self.sigma = sigma

    @classmethod
    def from_config(cls, cfg: CfgNode) -> "GaussianBlur":
        """Build the transform from the config section ``INPUT.BLUR``.

        Raises:
            ConfigError: if the kernel size is even, or the maximum standard deviation is smaller than the minimum.
        """
        blur = cfg.INPUT.BLUR
        if blur.KERNEL_SIZE % 2 == 0:
            raise ConfigError(
                f"INPUT.BLUR.KERNEL_SIZE must be odd, got {blur.KERNEL_SIZE}.\n"
                f"  fix: set INPUT.BLUR.KERNEL_SIZE to {blur.KERNEL_SIZE + 1}"
            )
        if blur.SIGMA[0] > blur.SIGMA[1]:
            raise ConfigError(
                f"INPUT.BLUR.SIGMA must be (minimum, maximum), but its first value is larger: {blur.SIGMA}.\n"
                "  fix: swap the two values"
            )
        return cls(prob=blur.PROB, kernel_size=blur.KERNEL_SIZE, sigma=blur.SIGMA)

    def check_size(self, size: tuple[int, int]) -> None:
        """Check that images of ``size`` (height, width) are large enough for reflection padding."""
        if min(size) <= self.kernel_size // 2:
            raise ConfigError(
                f"INPUT.BLUR.KERNEL_SIZE must be odd and at most {2 * min(size) - 1} for images of size {list(size)}, "
                f"got {self.kernel_size}.\n"
                f"  fix: set INPUT.BLUR.KERNEL_SIZE to {2 * min(size) - 1}"
            )

    def parameters(self, uniforms: np.ndarray, size: tuple[int, int]) -> Parameters:
        """Compute ``blur``, the (B,) bool mask of images to blur, and ``kernel``, the (B, kernel_size) float32 kernels.

        Each kernel sums to 1.
        """
        sigma = self.sigma[0] + uniforms[:, 1:] * (self.sigma[1] - self.sigma[0])
        distance = np.arange(self.kernel_size) - (self.kernel_size - 1) / 2
        kernel = np.exp(-0.5 * (distance / sigma) ** 2)
        kernel /= kernel.sum(axis=1, keepdims=True)
        return {
            "blur": torch.from_numpy(uniforms[:, 0] < self.prob),
            "kernel": torch.from_numpy(kernel.astype(np.float32)),
        }

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Blur the images selected by ``blur``."""
        blurred = images.clone()
        copies, margin = on_device(parameters, images.device), self.kernel_size // 2
        chosen = indices_where(parameters["blur"], copies["blur"])
        for part in chosen.split(_CACHED_IMAGES if images.device.type == "cpu" else len(images)):
            kernel = copies["kernel"][part]
            values = torch.nn.functional.pad(images[part].float(), [margin] * 4, mode="reflect")
            values = functools.reduce(
                torch.add,
                (
                    kernel[:, tap].view(-1, 1, 1, 1) * values[..., tap : tap + images.shape[-1]]
                    for tap in range(self.kernel_size)
                ),
            )
            values = functools.reduce(
                torch.add,
                (
                    kernel[:, tap].view(-1, 1, 1, 1) * values[..., tap : tap + images.shape[-2], :]
                    for tap in range(self.kernel_size)
                ),
            )
            blurred[part] = values.round_().to(torch.uint8)
        return blurred


def _operations(parameters: Parameters) -> Tensor:
    """Return the index of the operation in each step of ``ColorJitter``: (B, 4) int64; ``_SKIP`` means none."""
    return torch.where(parameters["jitter"][:, None], parameters["order"], _SKIP)


def to_grayscale(images: Tensor) -> Tensor:
    """Convert (B, C, H, W) uint8 images to grayscale with C channels; a fourth channel is not changed."""
    if images.shape[1] == 1:
        return images
    luma = _luma(images[:, :3]).to(torch.uint8).expand(-1, 3, -1, -1)
    return torch.cat((luma, images[:, 3:]), dim=1)


def _blend(images: Tensor, others: Tensor | float, weight: Tensor) -> Tensor:
    """Compute ``weight * images + (1 - weight) * others`` in uint8, rounded down as in torchvision."""
    return (weight * images + (1 - weight) * others).clamp_(0, _WHITE).to(torch.uint8)


def _luma(images: Tensor) -> Tensor:
    """Compute (B, 1, H, W) float32 luma, rounded down (ITU-R BT.601, with torchvision's coefficients)."""
    if images.shape[1] == 1:
        return images.float()
    red, green, blue = images.float().unbind(dim=1)
    return (0.2989 * red + 0.587 * green + 0.114 * blue).floor_()[:, None]


def _adjust_brightness(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(images, 0.0, factor)


def _adjust_contrast(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(images, _luma(images).mean(dim=(1, 2, 3), keepdim=True), factor)


def _adjust_saturation(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(images, _luma(images), factor)


def _adjust_hue(images: Tensor, turn: Tensor) -> Tensor:
    """Shift the hue by a fraction of the color circle, in HSV (Smith 1978)."""
    scaled = images.float() / _WHITE
    red, green, blue = scaled.unbind(dim=1)
    value, least = scaled.amax(dim=1), scaled.amin(dim=1)
    chroma = value - least
    divisor = chroma.clamp(min=0.5 / _WHITE)  # gray has no hue; half the minimum chroma of a color
    hue = torch.where(
        value == red,
        (green - blue) / divisor,
        torch.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    hue = hue.add_(6 * turn[:, 0]).remainder_(6)
    # Red, green and blue have hue 0, 2 and 4; a channel is 1 at a hue distance of up to 1, and 0 from 2 on.
    fullness = torch.stack(((hue - 3).abs() - 1, 2 - (hue - 2).abs(), 2 - (hue - 4).abs()), dim=1).clamp_(0, 1)
    # torchvision's factor: maps [0, 1] to 256 equal steps.
    return fullness.mul_(chroma[:, None]).add_(least[:, None]).mul_(_WHITE + 1 - 1e-3).to(torch.uint8)
