"""Transform that takes longer than any test for images of one color, also in another process."""

import time

from torch import Tensor

SLOW = (1, 2, 3)


class SlowResize:
    """Return images unchanged; sleep for a minute if the first pixel is SLOW."""

    def least_size(self, *, reduced: bool) -> None:
        """Decode images at full size."""

    def __call__(self, image: Tensor) -> Tensor:
        """Return the image (C, H, W) uint8."""
        if tuple(image[:, 0, 0].tolist()) == SLOW:
            time.sleep(60)
        return image
