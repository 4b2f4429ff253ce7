"""Random transforms from torchvision, made reproducible by a random seed for each image."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import conv2d, grid_sample
from torchvision.transforms import v2
from torchvision.transforms.functional import _get_inverse_affine_matrix

from fastamp.config import CfgNode, Key
from fastamp.data.transforms.base import TRANSFORM_REGISTRY, BatchTransform, Parameters, indices_where, on_device
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


# Arguments of the affine operations, by name and magnitude. A shear about a corner is given by its angle in degrees.
_AFFINE: dict[str, Callable[[float], dict[str, Any]]] = {
    "ShearX": lambda magnitude: {"shear": (math.degrees(math.atan(magnitude)), 0.0), "about_corner": True},
    "ShearY": lambda magnitude: {"shear": (0.0, math.degrees(math.atan(magnitude))), "about_corner": True},
    "TranslateX": lambda magnitude: {"translate": (int(magnitude), 0)},
    "TranslateY": lambda magnitude: {"translate": (0, int(magnitude))},
    "Rotate": lambda magnitude: {"angle": -(magnitude % 360)},
}
_OPERATIONS = (
    *_AFFINE,
    "Identity",
    "Brightness",
    "Color",
    "Contrast",
    "Sharpness",
    "Posterize",
    "Solarize",
    "AutoContrast",
    "Equalize",
    "Invert",
)
"""torchvision's names for the operations in AutoAugment, RandAugment and AugMix."""


class TorchvisionTransform(BatchTransform):
    """Apply a transform of ``torchvision.transforms.v2`` to each image with probability ``prob``.

    torchvision draws from PyTorch's global random generator, which is seeded for each image and restored afterwards.
    With INPUT.AUGMENT_ON ``device``, ``transform`` must not draw from the generator of the device, which is not seeded.

    Args:
        transform: (C, H, W) uint8 image -> image of the same shape and dtype.
        prob: probability of transforming an image.
    """

    draws = 3

    def __init__(self, *, transform: Callable[[Tensor], Tensor], prob: float) -> None:
        self.transform: Any = transform  # subclasses call further methods of it
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
        if not parameters["chosen"].any():
            return images
        changed = images.clone()
        with _preserve_global_rng():
            for number in _seed_each(parameters):
                changed[number] = self.transform(images[number])
        return changed


_Mixin: Any = object  # before a class of torchvision


class _RecordedOperations(_Mixin):
    """Mixin with which a torchvision transform draws the random operations for an image without applying them."""

    recorded: list[tuple[str, float]]
    recording = False

    def draw(self, size: tuple[int, int]) -> list[tuple[str, float]]:
        """Draw the operations for an image of ``size`` (height, width); return their names and magnitudes, in order."""
        self.recorded, self.recording = [], True
        try:
            self(torch.zeros((), dtype=torch.uint8).expand(1, *size))
        finally:
            self.recording = False
        return self.recorded

    def operate(self, image: Tensor, name: str, magnitude: float) -> Tensor:
        """Apply the operation ``name`` to an image."""
        return self._apply_image_or_video_transform(image, name, magnitude, interpolation="nearest", fill={})

    def _apply_image_or_video_transform(
        self, image: Tensor, transform_id: str, magnitude: float, **options: Any
    ) -> Tensor:
        if self.recording:
            return self.record(image, transform_id, magnitude)
        applied: Tensor = super()._apply_image_or_video_transform(image, transform_id, magnitude, **options)
        return applied

    def record(self, image: Tensor, name: str, magnitude: float) -> Tensor:
        """Record an operation and return the input of the next operation."""
        self.recorded.append((name, magnitude))
        return image


class _AutoAugment(_RecordedOperations, v2.AutoAugment):
    """AutoAugment that can draw its operations without applying them."""


class _RandAugment(_RecordedOperations, v2.RandAugment):
    """RandAugment that can draw its operations without applying them."""


class _AugMix(_RecordedOperations, v2.AugMix):
    """AugMix that can draw its operations without applying them.

    The operations of each augmented copy are padded to three with Identity.
    """

    previous: Tensor | None = None

    def draw_weights(self) -> Tensor:
        """Draw the mixing weights of the image and its three augmented copies: (4,) float32."""
        image, copies = (self._sample_dirichlet(torch.full((1, count), float(self.alpha)))[0] for count in (2, 3))
        return torch.cat((image[:1], copies * image[1:]))

    def record(self, image: Tensor, name: str, magnitude: float) -> Tensor:
        """Record an operation and return the input of the next operation.

        If ``image`` is not the result of the previous operation, this operation is the first of an augmented copy.
        """
        if image is not self.previous:
            self.recorded.extend([("Identity", 0.0)] * (-len(self.recorded) % 3))
        self.previous = super().record(image, name, magnitude).clone()
        return self.previous


class _TorchvisionOperations(TorchvisionTransform):
    """Base class of transforms that apply a random sequence of torchvision's operations to each selected image.

    torchvision draws random numbers while it transforms an image, and copies constants to the device one by one. This
    class draws the operations in ``parameters``, with torchvision's code, so that ``apply`` draws no random numbers and
    copies nothing to the device. On a CPU, the images are bit-identical to those from torchvision.

    Args:
        transform: torchvision transform with the mixin.
        prob: probability of transforming an image.

    Attributes:
        steps: maximum number of operations per image.
        interpolation: interpolation of affine operations. Default "nearest".
    """

    steps: int
    interpolation = "nearest"

    @classmethod
    def from_config(cls, cfg: CfgNode) -> BatchTransform:
        """Build the transform from its config section.

        Raises:
            ConfigError: if INPUT.CHANNELS is 4.
        """
        name = cls.section
        if cfg.INPUT.CHANNELS == 4:
            raise ConfigError(
                f"INPUT.{name} supports only grayscale and RGB images, but INPUT.CHANNELS is 4.\n"
                f"  fix: set INPUT.{name}.ENABLED False, or INPUT.CHANNELS to 1 or 3"
            )
        if cfg.INPUT[name].PROB == 0:
            logger.warning(
                "INPUT.%s is enabled but has no effect because INPUT.%s.PROB is 0.\n"
                "  fix: set PROB to a value above 0, or ENABLED to False",
                name,
                name,
            )
        return super().from_config(cfg)

    def parameters(self, uniforms: np.ndarray, size: tuple[int, int]) -> Parameters:
        """Compute the parameters of ``TorchvisionTransform``, and draw the operations of each selected image.

        Returns:
            ``chosen`` and ``seed``; ``operation``: (B, steps) int64 index in ``_OPERATIONS``; ``magnitude``: (B, steps)
            float32; ``matrix``: (B, steps, 3, 2) float32, see ``_inverse_matrix``, 0 for operations that are not
            affine.
        """
        parameters = super().parameters(uniforms, size)
        shape = (len(uniforms), self.steps)
        operation = torch.full(shape, _OPERATIONS.index("Identity"))
        magnitude, matrix = torch.zeros(shape), torch.zeros(*shape, 3, 2)
        with _preserve_global_rng():
            for number in _seed_each(parameters):
                for step, (name, value) in enumerate(self.transform.draw(size)):
                    if name == "Rotate" and value == 0:
                        continue  # torchvision does not resample the image
                    operation[number, step], magnitude[number, step] = _OPERATIONS.index(name), value
                    if name in _AFFINE:
                        matrix[number, step] = _inverse_matrix(size, **_AFFINE[name](value))
        return parameters | {"operation": operation, "magnitude": magnitude, "matrix": matrix}

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Apply the operations to the images selected by ``chosen``."""
        chosen = parameters["chosen"].nonzero()[:, 0].tolist()
        if not chosen:
            return images
        changed = images.clone()
        copies = on_device(parameters, images.device)
        names = [[_OPERATIONS[number] for number in code] for code in parameters["operation"].tolist()]
        magnitudes = parameters["magnitude"].tolist()
        for number in chosen:
            operations = list(zip(names[number], magnitudes[number], copies["matrix"][number], strict=True))
            parameters_of_image = {name: value[number] for name, value in copies.items()}
            changed[number] = self.compose(images[number, None], operations, parameters_of_image)[0]
        return changed

    def compose(self, image: Tensor, operations: list[tuple[str, float, Tensor]], copies: Parameters) -> Tensor:
        """Apply the operations to an image, one after another.

        Args:
            image: (1, C, H, W) uint8.
            operations: (name, magnitude, (3, 2) matrix) of each operation.
            copies: parameters of this image, on the device of the image.

        Returns:
            (1, C, H, W) uint8.
        """
        for name, magnitude, matrix in operations:
            if name in _AFFINE:
                image = _warp(image, matrix[None], self.interpolation)
            elif name == "Sharpness":
                image = _adjust_sharpness(image, 1.0 + magnitude)
            else:
                image = self.transform.operate(image, name, magnitude)
        return image


@TRANSFORM_REGISTRY.register("AUTOAUG")
class AutoAugment(_TorchvisionOperations):
    """AutoAugment with the ImageNet policy (Cubuk et al. 2019, arXiv:1805.09501), for 1 or 3 channels."""

    section = "AUTOAUG"
    steps = 2

    def __init__(self, *, prob: float) -> None:
        super().__init__(transform=_AutoAugment(v2.AutoAugmentPolicy.IMAGENET), prob=prob)


@TRANSFORM_REGISTRY.register("AUGMIX")
class AugMix(_TorchvisionOperations):
    """AugMix: mix an image with augmented copies (Hendrycks et al. 2020, arXiv:1912.02781), for 1 or 3 channels."""

    section = "AUGMIX"
    steps = 9  # up to 3 for each of 3 augmented copies
    interpolation = "bilinear"

    def __init__(self, *, prob: float) -> None:
        super().__init__(transform=_AugMix(), prob=prob)

    def parameters(self, uniforms: np.ndarray, size: tuple[int, int]) -> Parameters:
        """Draw the operations and ``weights``, (B, 4) float32: mixing weights of an image and its augmented copies."""
        parameters = super().parameters(uniforms, size)
        weights = torch.zeros(len(uniforms), 4)
        with _preserve_global_rng():
            for number in _seed_each(parameters):  # torchvision draws the weights first
                weights[number] = self.transform.draw_weights()
        return parameters | {"weights": weights}

    def compose(self, image: Tensor, operations: list[tuple[str, float, Tensor]], copies: Parameters) -> Tensor:
        """Return the weighted sum of the image and its three augmented copies: (1, C, H, W) uint8."""
        weights = copies["weights"].view(4, 1, 1, 1, 1)
        mixed = weights[0] * image
        for number in range(3):
            mixed.add_(weights[number + 1] * super().compose(image, operations[3 * number : 3 * number + 3], copies))
        return mixed.to(torch.uint8)


@TRANSFORM_REGISTRY.register("RANDAUG")
class RandAugment(_TorchvisionOperations):
    """RandAugment: random operations of equal magnitude (Cubuk et al. 2020, arXiv:1909.13719), for 1 or 3 channels.

    Args:
        prob: probability of transforming an image.
        num_ops: number of sequential operations.
        magnitude: magnitude in 0..30.
    """

    section = "RANDAUG"

    def __init__(self, *, prob: float, num_ops: int, magnitude: int) -> None:
        super().__init__(transform=_RandAugment(num_ops=num_ops, magnitude=magnitude), prob=prob)
        self.steps = num_ops


@TRANSFORM_REGISTRY.register("AFFINE")
class RandomAffine(TorchvisionTransform):
    """Rotate by up to 10 degrees, scale by 0.9 to 1.1 and shear by up to 0.1 degrees, as in FastReID.

    Pixels outside of the image are black.
    """

    section = "AFFINE"

    def __init__(self) -> None:
        super().__init__(transform=v2.RandomAffine(degrees=10, scale=(0.9, 1.1), shear=0.1), prob=1.0)

    def parameters(self, uniforms: np.ndarray, size: tuple[int, int]) -> Parameters:
        """Compute the parameters of ``TorchvisionTransform``, and draw an affine map for each image.

        Returns:
            ``chosen`` and ``seed``; ``matrix``: (B, 3, 2) float32, see ``_inverse_matrix``.
        """
        parameters = super().parameters(uniforms, size)
        matrix = torch.zeros(len(uniforms), 3, 2)
        with _preserve_global_rng():
            for number in _seed_each(parameters):
                matrix[number] = _inverse_matrix(
                    size, **self.transform.make_params([torch.empty(1, *size, device="meta")])
                )
        return parameters | {"matrix": matrix}

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Transform the images selected by ``chosen``."""
        changed, copies = images.clone(), on_device(parameters, images.device)
        chosen = indices_where(parameters["chosen"], copies["chosen"])
        for part in chosen.split(1 if images.device.type == "cpu" else len(images)):
            changed[part] = _warp(images[part], copies["matrix"][part], "nearest")
        return changed


def _inverse_matrix(
    size: tuple[int, int],
    *,
    angle: float = 0.0,
    translate: tuple[int, int] = (0, 0),
    scale: float = 1.0,
    shear: tuple[float, float] = (0.0, 0.0),
    about_corner: bool = False,
) -> Tensor:
    """Compute the transposed inverse matrix of an affine map, in units of half the image size: (3, 2) float32.

    Args:
        size: height and width of the images in pixels.
        angle, translate, scale, shear: see ``torchvision.transforms.functional.affine``.
        about_corner: if True, the map is about the top left corner, otherwise about the center. Default False.
    """
    half_height, half_width = 0.5 * size[0], 0.5 * size[1]
    center = [-half_width, -half_height] if about_corner else [0.0, 0.0]
    matrix = _get_inverse_affine_matrix(center, angle, [*map(float, translate)], scale, [*shear])
    return torch.tensor(matrix).view(2, 3).t() / torch.tensor([half_width, half_height])


def _warp(images: Tensor, matrix: Tensor, interpolation: str) -> Tensor:
    """Apply an affine map to each image, like torchvision without a fill color.

    Args:
        images: (B, C, H, W) uint8.
        matrix: (B, 3, 2) float32, see ``_inverse_matrix``.
        interpolation: ``nearest`` or ``bilinear``.
    """
    (height, width), device = images.shape[-2:], images.device
    x = torch.linspace((1.0 - width) * 0.5, (width - 1.0) * 0.5, steps=width, device=device)
    y = torch.linspace((1.0 - height) * 0.5, (height - 1.0) * 0.5, steps=height, device=device)
    points = torch.stack((x.expand(height, -1), y[:, None].expand(-1, width), x.new_ones(height, width)), dim=-1)
    grid = points.view(1, -1, 3).expand(len(images), -1, -1).bmm(matrix).view(-1, height, width, 2)
    warped = grid_sample(images.float(), grid, mode=interpolation, padding_mode="zeros", align_corners=False)
    return warped.round_().to(torch.uint8)


def _adjust_sharpness(images: Tensor, factor: float) -> Tensor:
    """Sharpen (B, C, H, W) uint8 images like torchvision, but build the kernel on their device instead of the host."""
    channels, height, width = images.shape[-3:]
    if min(height, width) <= 2:
        return images
    kernel = torch.full((1, 1, 3, 3), 1 / 13, device=images.device)
    kernel[:, :, 1, 1] = 5 / 13
    sharpened = images.float()
    blurred = conv2d(sharpened, kernel.expand(channels, -1, -1, -1), groups=channels).round_()
    inner = sharpened[..., 1:-1, 1:-1]
    inner.add_(blurred.sub_(inner), alpha=1.0 - factor)
    return sharpened.clamp_(0, 255).to(torch.uint8)


def _seed_each(parameters: Parameters) -> Iterator[int]:
    """Yield the index of each image selected by ``chosen`` after seeding the global generator with its ``seed``."""
    for number in parameters["chosen"].nonzero()[:, 0].tolist():
        torch.default_generator.manual_seed(int(parameters["seed"][number]))
        yield number


@contextmanager
def _preserve_global_rng() -> Iterator[None]:
    state = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
