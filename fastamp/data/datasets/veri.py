"""VeRi-776."""

from fastamp.data.datasets.base import DATASET_REGISTRY
from fastamp.data.datasets.named import NamedImages


@DATASET_REGISTRY.register()
class VeRi(NamedImages):
    """Liu et al. 2016, "A deep learning-based approach to progressive vehicle re-identification for urban
    surveillance" (ECCV).

    776 vehicles from 20 cameras. A file name begins with identity and camera, ``0002_c002_00030600_0.jpg``.

    Args:
        root: data root; the three folders are in ``root/veri``.

    Raises:
        DataError: a folder is missing (at once), or has no image named so (when the split is first needed).
    """

    dataset_name = "veri"
    folder = "veri"
    tree = "{image_train,image_query,image_test}/*.jpg"
    train_folders, query_folders, gallery_folders = ("image_train",), ("image_query",), ("image_test",)
    layout = (r"(?P<pid>\d+)_c(?P<camera>\d{3})",)
    first_camera = 1
    example = "0002_c002_00030600_0.jpg (identity 2, camera 2)"
