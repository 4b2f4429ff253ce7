"""Poses and gaits of the generated pedestrians."""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Pose:
    """Pose of a person in one image. Angles are in radians.

    Attributes:
        yaw: direction of the person: 0 faces the camera, pi shows the back.
        pitch: downward angle of the camera.
        stride: swing of the legs.
        arms: swing of the arms.
        elbows: bend of the left and right elbow.
        knee: bend of the trailing knee.
        light: direction of the light.
    """

    yaw: float
    pitch: float
    stride: float
    arms: float
    elbows: tuple[float, float]
    knee: float
    light: float


def draw_pose(rng: np.random.Generator, yaw: float, pitch: float) -> Pose:
    """Draw a random walking or standing pose near the given direction."""
    standing = rng.random() < 0.25
    stride = rng.uniform(-0.08, 0.08) if standing else rng.uniform(0.12, 0.5) * rng.choice((-1.0, 1.0))
    elbows = [rng.uniform(0.1, 0.5), rng.uniform(0.1, 0.5)]
    if rng.random() < 0.22:
        elbows[rng.integers(2)] = rng.uniform(1.3, 2.3)
    return Pose(
        yaw=yaw,
        pitch=pitch,
        stride=stride,
        arms=-stride * rng.uniform(0.6, 1.1) + rng.uniform(-0.1, 0.1),
        elbows=(elbows[0], elbows[1]),
        knee=rng.uniform(0.15, 0.75) * min(1.0, abs(stride) * 3),
        light=rng.uniform(-0.8, 0.8),
    )


@dataclass(frozen=True)
class Gait:
    """Way of walking of a person, constant across images. Angles are in radians.

    Attributes:
        stride, arms: largest swing of legs and arms.
        elbows: bend of the left and right elbow.
        knee: largest bend of the trailing knee.
    """

    stride: float
    arms: float
    elbows: tuple[float, float]
    knee: float


def draw_gait(rng: np.random.Generator) -> Gait:
    """Draw a random gait."""
    elbows = (rng.uniform(0.1, 1.2), rng.uniform(0.1, 1.2))
    return Gait(rng.uniform(0.2, 0.5), rng.uniform(0.1, 0.6), elbows, rng.uniform(0.2, 0.8))


def walking_pose(gait: Gait, phase: float, yaw: float, pitch: float, light: float = 0.0) -> Pose:
    """Return the pose of a walking person at one phase of the gait cycle, in radians."""
    swing = math.sin(phase)
    return Pose(
        yaw=yaw,
        pitch=pitch,
        stride=gait.stride * swing,
        arms=-gait.arms * swing,
        elbows=gait.elbows,
        knee=gait.knee * min(1.0, abs(gait.stride * swing) * 3),
        light=light,
    )
