"""Preprocessing inside an exported model: uint8 images of any size are resized, cropped and converted to float32."""

import torch
from torch import Tensor, nn

from fastamp.data.transforms import Resize
from fastamp.data.transforms.geometry import interpolation_kernel

COLOR_ORDERS = ("rgb", "bgr")
_BORDER = 3


class Preprocessing(nn.Module):
    """Resize and crop images as ``Resize`` does, in operators that every export format supports.

    Each pass multiplies by the matrix of the interpolation weights, because the resizing operators of the runtimes do
    not agree: OpenVINO on CPUs ignores ``antialias`` of an ONNX ``Resize`` with mode ``cubic`` (openvino#35893), and
    PyTorch exported bicubic resizing with a = -3/4 (pytorch#177138) instead of -1/2, the value of PIL.

    Args:
        resize: transform of the evaluator, with a fixed output size.
        reverse_channels: if True, the images are BGR. Default False, RGB.
    """

    def __init__(self, resize: Resize, *, reverse_channels: bool = False) -> None:
        super().__init__()
        assert resize.output_size is not None
        self.resize = resize
        self.height, self.width = resize.output_size
        self.reverse_channels = reverse_channels

    def forward(self, images: Tensor) -> Tensor:
        """Convert images (B, H, W, C) uint8 to (B, C, height, width) float32, integers in 0..255."""
        pixels = images.permute(0, 3, 1, 2).float()
        if self.reverse_channels:
            pixels = pixels.flip(1)
        rows, columns = (torch.arange(pixels.shape[dim]) for dim in (2, 3))
        sides = rows.amax(dim=0) + 1, columns.amax(dim=0) + 1
        resized = self._resized(*sides)
        down = self._weights(rows, sides[0], resized[0], self.height)
        across = self._weights(columns, sides[1], resized[1], self.width)
        # As torchvision and PIL on uint8: rounded after each of the two passes, the horizontal one first.
        narrowed = _round_to_bytes(pixels @ across.T)
        return _round_to_bytes(down @ narrowed)

    def _resized(self, height: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
        """Return the height and width before the center crop, int64."""
        size = self.resize.size
        if size == (0,):
            return height, width
        if len(size) == 2:
            return torch.full_like(height, size[0]), torch.full_like(width, size[1])
        shorter = torch.minimum(height, width)
        return size[0] * height // shorter, size[0] * width // shorter

    def _weights(self, pixels: Tensor, side: Tensor, resized: Tensor, output: int) -> Tensor:
        """Compute the (output, side) matrix that resizes a row of pixels and crops its center."""
        positions = torch.arange(output)
        if self.resize.crop is not None:
            # torchvision pads images that are smaller than the crop, and rounds a half to the even number.
            half = (resized - output) / 2
            positions = positions + torch.where(half < 0, half.ceil(), half.round())
            # The largest weight, on which their rounding depends, is often that of a pixel at the border.
            positions = torch.cat((torch.arange(_BORDER), positions))
        weights = sampling_weights(positions, pixels, side / resized, self.resize.interpolation)
        inside = ((positions >= 0) & (positions < resized)).float()[:, None]
        weights = inside * weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-6)
        return _as_fixed_point(weights)[-output:]


def sampling_weights(positions: Tensor, pixels: Tensor, scale: Tensor, interpolation: str) -> Tensor:
    """Return the weight of each pixel of a row at each position of the resized row."""
    centers = ((positions + 0.5) * scale)[:, None]
    if interpolation == "nearest":
        return (pixels == centers.floor()).float()
    return interpolation_kernel((pixels + 0.5 - centers).abs() / scale.clamp(min=1), interpolation)


def _as_fixed_point(weights: Tensor) -> Tensor:
    """Round weights as PyTorch does to resize uint8 images, to integers of 15 bits times a power of two.

    Exact weights change 1 % of the pixels by one, which changes the features of random images at a cosine of 0.9998.
    """
    scales = torch.tensor([2.0**exponent for exponent in range(23)])  # onnxscript 0.7.0 exports 2 ** k as int64
    scale = torch.where(scales * weights.amax(dim=(0, 1)) < 2**15 - 0.5, scales, 1.0).amax(dim=0)
    return weights.sign() * (weights.abs() * scale + 0.5).floor() / scale


def _round_to_bytes(values: Tensor) -> Tensor:
    return (values + 0.5).floor().clamp(0, 255)  # half up, as in torchvision
