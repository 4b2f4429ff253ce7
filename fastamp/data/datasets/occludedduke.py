"""Occluded-DukeMTMC."""

from fastamp.data.datasets.base import DATASET_REGISTRY
from fastamp.data.datasets.dukemtmc import DukeMTMC


@DATASET_REGISTRY.register()
class OccludedDuke(DukeMTMC):
    """Miao et al. 2019, "Pose-guided feature alignment for occluded person re-identification" (ICCV).

    Images of DukeMTMC-reID, divided so that every query shows a person behind something; named as there.

    Args:
        root: data root; the three folders are in ``root/Occluded_Duke``.

    Raises:
        DataError: a folder is missing (at once), or has no image named so (when the split is first needed).
    """

    dataset_name = "occludedduke"
    folder = "Occluded_Duke"
