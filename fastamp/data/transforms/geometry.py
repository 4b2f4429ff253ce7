"""Geometric transforms: resizing, cropping, flipping and padding."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fastamp.config import CfgNode, Key, crop_size, input_size
from fastamp.data.transforms.base import TRANSFORM_REGISTRY, BatchTransform, Parameters, on_device
from fastamp.utils.errors import ConfigError

KEYS = (
    Key("INPUT.FLIP.ENABLED", False, "Flip training images horizontally at random."),
    Key("INPUT.FLIP.PROB", 0.5, "Probability of flipping an image.", low=0, high=1),
    Key(
        "INPUT.PADDING.ENABLED", False, "Pad training images, then crop them to the training size at a random position."
    ),
    Key(
        "INPUT.PADDING.MODE",
        "constant",
        "Padding mode of torchvision.transforms.Pad; constant pads with black.",
        choices=("constant", "edge", "reflect", "symmetric"),
    ),
    Key("INPUT.PADDING.SIZE", 10, "Padding on each side, in pixels.", low=0, high=8192),
    Key(
        "INPUT.CROP.ENABLED",
        False,
        "Crop images to CROP.SIZE after resizing to SIZE_TRAIN or SIZE_TEST: a random resized crop in training, a "
        "center crop in evaluation, extraction and export.",
    ),
    Key(
        "INPUT.CROP.SIZE",
        (224, 224),
        "Crop size in pixels: (height, width), or (side,) for a square.",
        low=1,
        high=8192,
        forms="(height, width) or (side,)",
    ),
    Key(
        "INPUT.CROP.SCALE",
        (0.16, 1),
        "Minimum and maximum area of a random crop, as a fraction of the image area.",
        above=0,
        high=1,
        length=2,
    ),
    Key(
        "INPUT.CROP.RATIO",
        (0.75, 1.3333333333333333),
        "Minimum and maximum aspect ratio (width / height) of a random crop.",
        above=0,
        length=2,
    ),
)

_ATTEMPTS = 10


@dataclass(kw_only=True, eq=False)
class Resize:
    """Resize an image, then crop its center if ``crop`` is given.

    Resized images equal those of ``PIL.Image.resize`` up to rounding. As in torchvision, images smaller than the center
    crop are padded with black.

    Args:
        size: (height, width) in pixels; (shorter_side,), which keeps the aspect ratio; or (0,), which does not resize.
        crop: height and width of the center crop in pixels. Default: no crop.
        interpolation: ``bicubic`` or ``bilinear``, both antialiased, or ``nearest``. Default "bicubic".
    """

    size: tuple[int, ...]
    crop: tuple[int, int] | None = None
    interpolation: str = "bicubic"

    @property
    def output_size(self) -> tuple[int, int] | None:
        """Output (height, width) in pixels; None if the output size depends on the image."""
        return self.crop or (self.size if len(self.size) == 2 else None)

    def least_size(self, *, reduced: bool) -> tuple[int, int] | None:
        """Return the argument ``least_size`` of ``read_image``; None if images are not resized.

        Args:
            reduced: images of any number of pixels are decoded at reduced scale.
        """
        if self.size == (0,):
            return None
        # With less than twice the size, resizing has too few pixels to average: the features of a trained model had
        # cosines down to 0.984 with those at full size, instead of 0.999 (tools/benchmark/input_pipeline.py --reduced).
        height, width = (self.size[0], self.size[-1]) if reduced else (max(self.size), max(self.size))
        return 2 * height, 2 * width

    def __call__(self, image: Tensor) -> Tensor:
        """Return the resized and cropped (C, H, W) uint8 image."""
        if self.size not in ((0,), tuple(image.shape[-2:])):
            image = self._resize(image)
        if self.crop is None:
            return image
        from torchvision.transforms.v2 import functional  # its import takes as long as that of PyTorch

        return functional.center_crop(image, list(self.crop))

    def _resize(self, image: Tensor) -> Tensor:
        is_cpu_image = image.ndim == 3 and image.device.type == "cpu" and image.dtype == torch.uint8
        if is_cpu_image and len(self.size) == 2 and self.interpolation == "bicubic":
            # The same operator as in torchvision, whose checks take 0.1 ms for a single image between other work.
            return F.interpolate(image[None], size=self.size, mode=self.interpolation, antialias=True)[0]
        from torchvision.transforms.v2 import InterpolationMode, functional

        # torchvision's nearest differs from PIL, which samples at pixel centers.
        mode = "nearest-exact" if self.interpolation == "nearest" else self.interpolation
        return functional.resize(image, list(self.size), interpolation=InterpolationMode(mode), antialias=True)


@TRANSFORM_REGISTRY.register("FLIP")
class RandomHorizontalFlip(BatchTransform):
    """Flip an image horizontally with probability ``prob``."""

    section = "FLIP"
    draws = 1

    def __init__(self, *, prob: float) -> None:
        self.prob = prob

    def parameters(self, uniforms: np.ndarray, size: tuple[int, int]) -> Parameters:
        """Compute ``flip``, the (B,) bool mask of images to flip."""
        return {"flip": torch.from_numpy(uniforms[:, 0] < self.prob)}

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Flip the images selected by ``flip``."""
        mirrored = images.flip(-1)
        # Image by image: indexing and torch.where take ten times as long on bytes (measured on a CPU).
        for index in (~parameters["flip"]).nonzero()[:, 0].tolist():
            mirrored[index] = images[index]
        return mirrored


@TRANSFORM_REGISTRY.register("PADDING")
class PadAndRandomCrop(BatchTransform):
    """Pad all sides of an image, then crop the padded image at a random position.

    Args:
        padding: padding on each side, in pixels.
        mode: ``constant`` (black), ``edge``, ``reflect`` or ``symmetric``, as in torchvision's ``Pad``.
        size: height and width of the crop in pixels, at most those of the padded image. Default: the input size.
    """

    draws = 2

    def __init__(self, *, padding: int, mode: str, size: tuple[int, int] | None = None) -> None:
        self.padding = padding
        self.mode = mode
        self.size = size

    @classmethod
    def from_config(cls, cfg: CfgNode) -> "PadAndRandomCrop":
        """Build the transform from the config section ``INPUT.PADDING``."""
        padding = cfg.INPUT.PADDING
        return cls(padding=padding.SIZE, mode=padding.MODE, size=input_size(cfg, is_train=True))

    def check_size(self, size: tuple[int, int]) -> None:
        """Check that images of ``size`` (height, width) are large enough for the padding mode."""
        # The reflected part cannot be larger than the image; ``reflect`` does not repeat the edge.
        largest = {"reflect": min(size) - 1, "symmetric": min(size)}.get(self.mode)
        if largest is not None and self.padding > largest:
            raise ConfigError(
                f"INPUT.PADDING.SIZE must be in 0..{largest} for mode {self.mode!r} and images of size {list(size)}, "
                f"got {self.padding}.\n"
                f"  fix: set INPUT.PADDING.SIZE to {largest}, or INPUT.PADDING.MODE constant"
            )

    def parameters(self, uniforms: np.ndarray, size: tuple[int, int]) -> Parameters:
        """Compute ``top`` and ``left``, the top left corner of each crop in the padded image: (B,) int64."""
        spare = [side + 2 * self.padding - cut for side, cut in zip(size, self.output_size(size), strict=True)]
        corners = torch.from_numpy((uniforms * (np.array(spare) + 1)).astype(np.int64))
        return {"top": corners[:, 0], "left": corners[:, 1]}

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Pad the images and crop them at ``top`` and ``left``.

        On a CPU, the part inside the image is copied to black, image by image (measured: in half the time). Otherwise,
        crops are copied row by row: row i of a strided view of the padded batch contains the W pixels that start at
        offset i, so that one index per row is sufficient (measured: 10 to 80 times as fast as one index per pixel).

        Returns:
            (B, C, H, W) uint8.
        """
        batch, channels = images.shape[:2]
        height, width = self.output_size((images.shape[-2], images.shape[-1]))
        if self.mode == "constant" and images.device.type == "cpu":
            return self._crop_on_black(images, parameters, height, width)
        padded = self._pad(images)
        padded_height, padded_width = padded.shape[-2:]
        device = images.device
        planes = torch.arange(batch * channels, device=device).view(batch, channels, 1)
        copies = on_device(parameters, device)
        top, left = (copies[name].view(batch, 1, 1) for name in ("top", "left"))
        rows = top + torch.arange(height, device=device)
        offsets = (planes * padded_height + rows) * padded_width + left
        return (
            padded.flatten().unfold(0, width, 1).index_select(0, offsets.flatten()).view(batch, channels, height, width)
        )

    def _crop_on_black(self, images: Tensor, parameters: Parameters, height: int, width: int) -> Tensor:
        """Crop images (B, C, H, W) on the CPU, as ``apply``, to ``height`` x ``width`` pixels."""
        crops = np.zeros((*images.shape[:2], height, width), dtype=np.uint8)
        corners = torch.stack([parameters["top"], parameters["left"]], dim=1) - self.padding
        for crop, image, (top, left) in zip(crops, images.numpy(), corners.tolist(), strict=True):
            inside = image[:, max(top, 0) : max(top + height, 0), max(left, 0) : max(left + width, 0)]
            rows, columns = inside.shape[1:]
            y, x = max(-top, 0), max(-left, 0)
            crop[:, y : y + rows, x : x + columns] = inside
        return torch.from_numpy(crops)

    def _pad(self, images: Tensor) -> Tensor:
        """Pad all sides; return a (B, C, H + 2 * padding, W + 2 * padding) uint8 tensor."""
        batch, channels, height, width = images.shape
        padding = self.padding
        inner_rows, inner_columns = slice(padding, padding + height), slice(padding, padding + width)
        padded = images.new_zeros(batch, channels, height + 2 * padding, width + 2 * padding)
        padded[:, :, inner_rows, inner_columns] = images
        if self.mode == "constant":
            return padded
        before, after = (side + padding for side in self._sources(width, images.device))
        padded[:, :, inner_rows, :padding] = padded[:, :, inner_rows, before]
        padded[:, :, inner_rows, padding + width :] = padded[:, :, inner_rows, after]
        before, after = (side + padding for side in self._sources(height, images.device))
        padded[:, :, :padding] = padded[:, :, before]
        padded[:, :, padding + height :] = padded[:, :, after]
        return padded

    def _sources(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the indices of the pixels in a row of ``length`` pixels that pad the row: ``(before, after)``."""
        distance = torch.arange(1, self.padding + 1, device=device)
        if self.mode == "edge":
            distance = torch.zeros_like(distance)
        elif self.mode == "symmetric":
            distance = distance - 1
        return distance.flip(0), length - 1 - distance


@TRANSFORM_REGISTRY.register("CROP")
@dataclass(kw_only=True, eq=False)
class RandomResizedCrop(BatchTransform):
    """Crop a random region of an image, and resize the crop to a fixed size.

    The crop is sampled as in torchvision. The area, as a fraction of the image area, is uniform in ``scale``. The
    aspect ratio (width / height) is log-uniform in ``ratio``. Area and aspect ratio are drawn up to ten times until the
    crop fits into the image. The position of the crop is uniform. If no crop fits, the largest central region whose
    aspect ratio is in ``ratio`` is used.

    Args:
        size: output height and width in pixels.
        scale: minimum and maximum area of the crop, as a fraction of the image area.
        ratio: minimum and maximum aspect ratio (width / height) of the crop.
        interpolation: ``bicubic`` or ``bilinear``, both antialiased, or ``nearest``. Default "bicubic".
    """

    draws = 2 + 2 * _ATTEMPTS
    size: tuple[int, int]
    scale: tuple[float, float]
    ratio: tuple[float, float]
    interpolation: str = "bicubic"

    @classmethod
    def from_config(cls, cfg: CfgNode) -> "RandomResizedCrop":
        """Build the transform from the config section ``INPUT.CROP``.

        Raises:
            ConfigError: if a maximum is smaller than its minimum.
        """
        crop = cfg.INPUT.CROP
        for name in ("SCALE", "RATIO"):
            low, high = crop[name]
            if low > high:
                raise ConfigError(
                    f"INPUT.CROP.{name} must be (minimum, maximum), but its first value is larger: {crop[name]}.\n"
                    "  fix: swap the two values"
                )
        size = crop_size(cfg)
        assert size is not None  # the transform is enabled
        return cls(size=size, scale=crop.SCALE, ratio=crop.RATIO, interpolation=cfg.INPUT.INTERPOLATION)

    def parameters(self, uniforms: np.ndarray, size: tuple[int, int]) -> Parameters:
        """Compute ``top``, ``left``, ``height`` and ``width`` of each crop in pixels: (B,) int64."""
        height, width = size
        position, area, aspect = uniforms[:, :2], uniforms[:, 2 : 2 + _ATTEMPTS], uniforms[:, 2 + _ATTEMPTS :]
        area = height * width * (self.scale[0] + area * (self.scale[1] - self.scale[0]))
        low, high = np.log(self.ratio)
        aspect = np.exp(low + aspect * (high - low))
        widths, heights = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
        fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
        first, any_fits = (np.arange(len(uniforms)), fits.argmax(axis=1)), fits.any(axis=1)
        spare_height, spare_width = self._central_size(size)
        heights = np.where(any_fits, heights[first], spare_height)
        widths = np.where(any_fits, widths[first], spare_width)
        tops = np.where(any_fits, np.floor(position[:, 0] * (height - heights + 1)), (height - heights) // 2)
        lefts = np.where(any_fits, np.floor(position[:, 1] * (width - widths + 1)), (width - widths) // 2)
        names = {"top": tops, "left": lefts, "height": heights, "width": widths}
        return {name: torch.from_numpy(value.astype(np.int64)) for name, value in names.items()}

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Crop the images and resize the crops; return a (B, C, H, W) uint8 tensor, where (H, W) is ``size``."""
        corners = on_device(parameters, images.device)
        across = resampling_weights(
            corners["left"], corners["width"], images.shape[-1], self.size[1], self.interpolation
        )
        down = resampling_weights(corners["top"], corners["height"], images.shape[-2], self.size[0], self.interpolation)
        # As torchvision on uint8: rounded after each of the two passes.
        narrowed = _round_to_bytes(images.float() @ across.transpose(1, 2)[:, None])
        return _round_to_bytes(down[:, None] @ narrowed).to(torch.uint8)

    def _central_size(self, size: tuple[int, int]) -> tuple[int, int]:
        height, width = size
        if width / height < self.ratio[0]:
            return max(1, round(width / self.ratio[0])), width
        return (height, max(1, round(height * self.ratio[1]))) if width / height > self.ratio[1] else (height, width)


def resampling_weights(start: Tensor, length: Tensor, size: int, output: int, interpolation: str = "bicubic") -> Tensor:
    """Compute, for each image, the interpolation matrix that resizes an interval of a row to ``output`` pixels.

    Args:
        start, length: (B,) int64 first pixel and length of the interval in each image.
        size: pixels per input row.
        output: pixels per output row.
        interpolation: ``bicubic`` or ``bilinear``, both antialiased, or ``nearest``. Default "bicubic".

    Returns:
        (B, output, size) float32.
    """
    scale = (length / output)[:, None, None]
    stretch = scale.clamp(min=1)
    pixel = torch.arange(size, device=start.device) + 0.5
    center = start[:, None, None] + scale * (torch.arange(output, device=start.device)[:, None] + 0.5)
    if interpolation == "nearest":
        return (pixel - 0.5 == center.floor()).float()
    weights = interpolation_kernel(((pixel - center) / stretch).abs(), interpolation)
    inside = (pixel > start[:, None, None]) & (pixel < (start + length)[:, None, None])
    weights = weights * inside
    return weights / weights.sum(dim=2, keepdim=True)


def interpolation_kernel(distance: Tensor, interpolation: str) -> Tensor:
    """Compute the weight of a pixel, not normalized, from its distance to the center, as in PIL and torchvision.

    Args:
        distance: float32 distance of any shape, in input pixels, or in output pixels if these are larger.
        interpolation: ``bicubic`` (Keys 1981 with a = -1/2) or ``bilinear``.

    Returns:
        Float32 weights of the shape of ``distance``.
    """
    if interpolation == "bilinear":
        return (1 - distance).clamp(min=0)
    near = (1.5 * distance - 2.5) * distance * distance + 1
    far = ((2.5 - 0.5 * distance) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))


def _round_to_bytes(values: Tensor) -> Tensor:
    return values.round_().clamp_(0, 255)
