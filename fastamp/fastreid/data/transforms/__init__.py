"""FastReID's transforms."""

import numpy as np
import PIL.Image
import torch

from fastamp.data.transforms import *  # noqa: F403
from fastamp.data.transforms import __all__ as _names

__all__ = ["ToTensor", *_names]


class ToTensor:
    """Convert an image to a float32 tensor (C, H, W) in 0..255."""

    def __call__(self, pic: PIL.Image.Image | np.ndarray | torch.Tensor) -> torch.Tensor:
        """Convert ``pic``: a PIL image, an array (H, W) or (H, W, C), or a tensor (C, H, W)."""
        if isinstance(pic, torch.Tensor):
            return pic.float()
        array = np.array(pic)
        if array.ndim == 2:
            array = array[:, :, None]
        return torch.from_numpy(np.ascontiguousarray(array.transpose(2, 0, 1))).float()

    def __repr__(self) -> str:
        return "ToTensor()"
