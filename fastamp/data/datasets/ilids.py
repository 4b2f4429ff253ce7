"""iLIDS-VID."""

from fastamp.data.datasets.base import DATASET_REGISTRY
from fastamp.data.datasets.named import NamedImages


@DATASET_REGISTRY.register()
class iLIDS(NamedImages):
    """Wang et al. 2014, "Person re-identification by video ranking" (ECCV).

    Training images alone. A folder is an identity; a file name begins with the camera, ``cam1_person001.png``.

    Args:
        root: data root; the identities' folders are in ``root/iLIDS``.

    Raises:
        DataError: a folder is missing (at once), or no image is named so (when they are first needed).
    """

    dataset_name = "ilids"
    folder = "iLIDS"
    tree = "{pid}/{camera}_*.png"
    layout = (r"(?P<pid>.+)", r"^(?P<camera>[^_]+)_")
    suffix = ".png"
    example = "person001/cam1_person001.png (identity person001, camera cam1)"
