"""Generated features of identities that resemble each other in groups, as people with similar clothes do."""

import numpy as np
import torch

from fastamp.evaluation import Identities

_WIDTH = 24
_GROUPS = np.random.default_rng(5).normal(size=(30, _WIDTH))


def look_alikes(count, images, seed):
    """Return (count * images, 24) features and the identities and cameras of the images, each as query and gallery."""
    random = np.random.default_rng(seed)
    centers = 0.6 * _GROUPS[random.integers(len(_GROUPS), size=count)] + random.normal(size=(count, _WIDTH))
    spread = 0.6 * random.gamma(4, 0.25, size=(count, 1, 1))
    features = centers[:, None] + spread * random.normal(size=(count, images, _WIDTH))
    return torch.from_numpy(features.reshape(-1, _WIDTH)).float(), identities_of(count, images)


def identities_of(count, images):
    """Return the identities and cameras of ``images`` images of each of ``count`` identities."""
    pids, camids = torch.arange(count).repeat_interleave(images), torch.arange(images).repeat(count)
    return Identities(pids, pids, camids, camids)
