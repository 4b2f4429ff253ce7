"""Shinpuhkan 2014."""

from fastamp.data.datasets.base import DATASET_REGISTRY
from fastamp.data.datasets.named import NamedImages


@DATASET_REGISTRY.register()
class Shinpuhkan(NamedImages):
    """Kawanishi et al. 2014, "Shinpuhkan2014: a multi-camera pedestrian dataset for tracking people across multiple
    cameras" (FCV).

    Training images alone, in folders of any depth. Of a file name's parts between underscores the first is the
    identity, the third the camera.

    Args:
        root: data root; the images are below ``root/shinpuhkan``.

    Raises:
        DataError: a folder is missing (at once), or no image is named so (when they are first needed).
    """

    dataset_name = "shinpuhkan"
    folder = "shinpuhkan"
    tree = "**/{pid}_*_{camera}_*.jpg"
    layout = ("**", r"^(?P<pid>[^_]+)_[^_]*_(?P<camera>[^_.]+)")
    example = "001_02_03_0004.jpg (identity 1, camera 3)"
