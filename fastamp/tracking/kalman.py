"""Kalman filter of a bounding box with constant velocity.

The state is (center x, center y, width / height, height) and its velocities, as in DeepSORT (Wojke et al. 2017,
arXiv:1703.07402, section 2.1). The standard deviations are those of the program of that paper: 1/20 of the height for
positions and 1/160 for velocities.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_POSITION, _VELOCITY = 1 / 20, 1 / 160
GATE = 9.4877
"""0.95 quantile of the chi-square distribution with 4 degrees of freedom."""

_STEP = np.eye(8)
_STEP[:4, 4:] = np.eye(4)


def to_measurement(box: Array) -> Array:
    """Convert a box (4,) of left, top, width and height to (center x, center y, width / height, height)."""
    left, top, width, height = box
    return np.array([left + width / 2, top + height / 2, width / height, height])


class BoxFilter:
    """Kalman filter of one box.

    Args:
        box: (4,) left, top, width and height in pixels of the first detection.
    """

    def __init__(self, box: Array) -> None:
        measured = to_measurement(box)
        height = measured[3]
        self.mean = np.concatenate([measured, np.zeros(4)])
        position, velocity = 2 * _POSITION * height, 10 * _VELOCITY * height
        deviations = [position, position, 1e-2, position, velocity, velocity, 1e-5, velocity]
        self.covariance = np.diag(np.square(deviations))

    def predict(self) -> None:
        """Advance the state by one frame."""
        height = self.mean[3]
        position, velocity = _POSITION * height, _VELOCITY * height
        noise = np.square([position, position, 1e-2, position, velocity, velocity, 1e-5, velocity])
        self.mean = _STEP @ self.mean
        self.covariance = _STEP @ self.covariance @ _STEP.T + np.diag(noise)

    def update(self, box: Array) -> None:
        """Correct the state by a detection (4,) of left, top, width and height."""
        mean, covariance = self._projected()
        gain = np.linalg.solve(covariance, self.covariance[:4]).T
        self.mean = self.mean + gain @ (to_measurement(box) - mean)
        self.covariance = self.covariance - gain @ covariance @ gain.T

    def distances(self, boxes: Array) -> Array:
        """Return the squared Mahalanobis distances (N,) of boxes (N, 4) from the predicted box; see ``GATE``."""
        mean, covariance = self._projected()
        differences = np.array([to_measurement(box) for box in boxes]).reshape(-1, 4) - mean
        whitened = np.linalg.solve(np.linalg.cholesky(covariance), differences.T)
        return np.square(whitened).sum(axis=0)

    @property
    def box(self) -> Array:
        """Estimated box (4,): left, top, width and height."""
        center_x, center_y, aspect, height = self.mean[:4]
        width = aspect * height
        return np.array([center_x - width / 2, center_y - height / 2, width, height])

    def _projected(self) -> tuple[Array, Array]:
        """Return mean (4,) and covariance (4, 4) of the next measurement."""
        noise = np.square([_POSITION * self.mean[3], _POSITION * self.mean[3], 1e-1, _POSITION * self.mean[3]])
        return self.mean[:4], self.covariance[:4, :4] + np.diag(noise)
