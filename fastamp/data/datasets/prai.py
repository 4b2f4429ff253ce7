"""PRAI-1581."""

from fastamp.data.datasets.base import DATASET_REGISTRY
from fastamp.data.datasets.named import NamedImages


@DATASET_REGISTRY.register()
class PRAI(NamedImages):
    """Zhang et al. 2020, "Person re-identification in aerial imagery" (IEEE Transactions on Multimedia).

    Training images alone, taken by drones. A file name begins with identity and camera.

    Args:
        root: data root; the images are in ``root/PRAI-1581/images``.

    Raises:
        DataError: a folder is missing (at once), or no image is named so (when they are first needed).
    """

    dataset_name = "prai"
    folder = "PRAI-1581"
    tree = "images/{pid}_{camera}_*.jpg"
    train_folders = ("images",)
    layout = (r"^(?P<pid>[^_]+)_(?P<camera>[^_]+)_",)
    example = "00000012_1_00000034.jpg (identity 12, camera 1)"
