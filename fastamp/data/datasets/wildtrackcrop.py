"""People cut out of WILDTRACK."""

from fastamp.data.datasets.base import DATASET_REGISTRY
from fastamp.data.datasets.named import NamedImages


@DATASET_REGISTRY.register()
class WildTrackCrop(NamedImages):
    """Chavdarova et al. 2018, "WILDTRACK: a multi-camera HD dataset for dense unscripted pedestrian detection" (CVPR).

    Training images alone. A folder is an identity; a file name begins with the camera.

    Args:
        root: data root; the identities' folders are in ``root/Wildtrack_crop_dataset/crop``.

    Raises:
        DataError: a folder is missing (at once), or no image is named so (when they are first needed).
    """

    dataset_name = "wildtrackcrop"
    folder = "Wildtrack_crop_dataset"
    tree = "crop/{pid}/{camera}_*.png"
    train_folders = ("crop",)
    layout = (r"(?P<pid>.+)", r"^(?P<camera>[^_]+)_")
    suffix = ".png"
    example = "12/3_0001.png (identity 12, camera 3)"
