"""Calibration of random scores, which distinguishes equal images from others."""

import numpy as np
import torch

from fastamp.evaluation import Identities
from fastamp.evaluation.calibration import Calibration
from fastamp.evaluation.identities import SAME_CAMERA
from fastamp.evaluation.thresholds import calibrate


def random_calibration(model) -> Calibration:
    """Return a calibration for the hash and the metric of a model."""
    random = np.random.default_rng(0)
    features = torch.tensor(random.standard_normal((40, 16)).repeat(4, 0) + 0.3 * random.standard_normal((160, 16)))
    identities = Identities(torch.arange(40).repeat_interleave(4), torch.arange(40).repeat_interleave(4),
                            torch.arange(4).repeat(40), torch.arange(4).repeat(40))  # fmt: skip
    options = {"far": 0.05, "frr": 0.2, "fpir": 0.2}
    return calibrate(features.float(), identities, metric=model.metric, junk=SAME_CAMERA, source="random",
                     config_hash=model.config_hash, **options)  # fmt: skip
